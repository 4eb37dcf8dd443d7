"""What a rank's process produces, numbered 1, 2, 3 … within that process. `wire` turns them into bytes.

Checked when they are built, so that this side cannot send what the other refuses. The number of an item may be 0 until
the outbox gives it one; a decoder wants 1 or more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from .checks import MAX_WORD_BYTES, check_count, check_int, check_map, check_number, check_text, clipped
from .errors import LimitError, RecordError
from .records import Frame, Level, NameTable

__all__ = ["MAX_FRAMES_PER_BLOCK", "Block", "Gap", "Goodbye", "Hole", "Item", "Note", "Table"]

MAX_FRAMES_PER_BLOCK = 4_096


def _check_where(item: Block | Note) -> None:
    if item.step is not None:
        check_int("step", item.step, 1)
    if item.micro_step is not None:
        check_int("micro_step", item.micro_step, 1)
    check_number("time", item.time)


@dataclass(frozen=True, slots=True)
class Table:
    """Defines a name table for this process's later blocks."""

    seq: int
    table_id: int
    table: NameTable

    def __post_init__(self) -> None:
        check_int("seq", self.seq, 0)
        check_int("table_id", self.table_id, 0)


@dataclass(frozen=True, slots=True)
class Block:
    """Frames of one rank at one (step, micro_step); micro_step None: the step's own.

    Attributes:
        complete: the rank has passed this position; only an addendum may follow for it.
        addendum: belongs to a position that the rank had completed before (a value logged after the step's end).
        time: the rank's clock, seconds since the epoch.
    """

    seq: int
    step: int
    micro_step: int | None
    complete: bool
    time: float
    frames: tuple[Frame, ...] = ()
    addendum: bool = False

    def __post_init__(self) -> None:
        check_int("seq", self.seq, 0)
        check_int("step", self.step, 1)
        _check_where(self)
        if len(self.frames) > MAX_FRAMES_PER_BLOCK:
            raise LimitError(f"a block of {len(self.frames)} frames, at most {MAX_FRAMES_PER_BLOCK} are allowed")
        level = self.level
        for frame in self.frames:
            frame.check(level)

    @property
    def level(self) -> Level:
        return Level.STEP if self.micro_step is None else Level.MICRO_STEP

    @property
    def record_count(self) -> int:
        return sum(frame.record_count for frame in self.frames)


@dataclass(frozen=True, slots=True)
class Note:
    """A line of rankd's own in the rank's log: `# KIND TEXT` (an exception, an anomaly).

    It stands at (step, micro_step); step None: wherever the rank is. A text too long to travel is cut.
    """

    seq: int
    step: int | None
    micro_step: int | None
    kind: str
    text: str
    time: float

    def __post_init__(self) -> None:
        check_int("seq", self.seq, 0)
        _check_where(self)
        if self.step is None and self.micro_step is not None:
            raise RecordError(f"a note at micro_step {self.micro_step} needs a step")
        check_text("kind", self.kind, MAX_WORD_BYTES)
        object.__setattr__(self, "text", clipped(self.text))


@dataclass(frozen=True, slots=True)
class Gap:
    """Records that the agent had to refuse, between two positions, by cause (`outbox_full`, `spool_full`, …)."""

    seq: int
    cause: str
    records: int
    first: tuple[int, int | None]
    last: tuple[int, int | None]

    def __post_init__(self) -> None:
        check_int("seq", self.seq, 0)
        check_text("cause", self.cause, MAX_WORD_BYTES)
        check_int("records", self.records, 0)
        for step, micro_step in (self.first, self.last):
            check_int("step", step, 1)
            if micro_step is not None:
                check_int("micro_step", micro_step, 1)


@dataclass(frozen=True, slots=True)
class Hole:
    """Stands for the items `first` to `seq`, which nobody has any more: they were acknowledged, so that their process
    has let go of them, and a power failure took them from the journal.

    Attributes:
        seq: the number of the last of them.
        accepted: records that the process had accepted in all that it has let go of; None: not known.
        last: where the last of them belonged; None: not known.
    """

    seq: int
    first: int
    accepted: int | None = None
    last: tuple[int, int | None] | None = None

    def __post_init__(self) -> None:
        check_int("seq", self.seq, 1)
        check_int("first", self.first, 1, self.seq)
        if self.accepted is not None:
            check_int("accepted", self.accepted, 0)
        if self.last is not None:
            step, micro_step = self.last
            check_int("step", step, 1)
            if micro_step is not None:
                check_int("micro_step", micro_step, 1)


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The last item of a process: what it produced and what it dropped, by cause (in records)."""

    seq: int
    reason: str
    produced: int
    dropped: Mapping[str, int]
    time: float

    def __post_init__(self) -> None:
        check_int("seq", self.seq, 0)
        check_int("produced", self.produced, 0)
        check_map("dropped", self.dropped, check_count)
        check_number("time", self.time)
        object.__setattr__(self, "reason", clipped(self.reason))


Item: TypeAlias = Table | Block | Note | Gap | Hole | Goodbye
