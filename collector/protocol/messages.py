"""What agent and collector say to each other. `wire` turns them into bytes; `Data` carries encoded items.

Checked when they are built, so that this side cannot send what the other refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from .checks import (
    MAX_RANKS,
    MAX_WORD_BYTES,
    check_any_number,
    check_bytes,
    check_int,
    check_map,
    check_number,
    check_short,
    check_text,
    clipped,
)
from .errors import LimitError, RecordError
from .records import MAX_NAME_BYTES

__all__ = ["MAX_ITEMS_PER_MESSAGE", "Ack", "Beat", "Data", "Hello", "Message", "Refused", "Welcome", "Who"]

MAX_ITEMS_PER_MESSAGE = 65_536
SESSION_BYTES = 16


@dataclass(frozen=True, slots=True)
class Hello:
    """Agent → collector, first on every connection.

    Attributes:
        session: 16 random bytes, the identity of this process; a restart is told from a duplicate by it.
        run: the run the agent believes to belong to; empty: whichever this collector serves.
        next_seq: the number that the agent's next new item will get.
        total_steps: the length of the training, for the text logs; None: not known.
        about: versions and choices a reader needs to know (`local_norm_kind`, `mindspore`, …).
        recovered: the process itself is gone; somebody delivers what its spool file still holds.
    """

    session: bytes
    run: str
    rank: int
    world_size: int
    next_seq: int
    host: str
    pid: int
    started: float
    total_steps: int | None = None
    about: Mapping[str, str] = field(default_factory=dict)
    recovered: bool = False

    def __post_init__(self) -> None:
        check_bytes("session", self.session)
        if len(self.session) != SESSION_BYTES:
            raise RecordError(f"a session is {SESSION_BYTES} bytes, got {len(self.session)}")
        check_text("run", self.run, MAX_WORD_BYTES, empty=True)
        check_int("world_size", self.world_size, 1, MAX_RANKS)
        check_int("rank", self.rank, 0, self.world_size - 1)
        check_int("next_seq", self.next_seq, 1)
        check_text("host", self.host, MAX_NAME_BYTES, empty=True)
        check_int("pid", self.pid, 0)
        check_number("started", self.started)
        if self.total_steps is not None:
            check_int("total_steps", self.total_steps, 1)
        check_map("about", self.about, check_short)


@dataclass(frozen=True, slots=True)
class Welcome:
    """Collector → agent: the journal has this session's items up to `acked`; resend from there."""

    run: str
    acked: int
    beat_interval: float

    def __post_init__(self) -> None:
        check_text("run", self.run, MAX_WORD_BYTES, empty=True)
        check_int("acked", self.acked, 0)
        check_number("beat_interval", self.beat_interval)
        if self.beat_interval <= 0:
            raise RecordError(f"beat_interval must be above 0, got {self.beat_interval!r}")


@dataclass(frozen=True, slots=True)
class Refused:
    """Collector → agent: no, and why. `retry`: the reason may pass (an older process of the same rank still lives)."""

    reason: str
    retry: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", clipped(self.reason))


@dataclass(frozen=True, slots=True)
class Data:
    """Agent → collector: encoded items, in the order of their numbers."""

    items: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if len(self.items) > MAX_ITEMS_PER_MESSAGE:
            raise LimitError(f"{len(self.items)} items in a message, at most {MAX_ITEMS_PER_MESSAGE} are allowed")
        for item in self.items:
            check_bytes("an item", item)


@dataclass(frozen=True, slots=True)
class Ack:
    """Collector → agent: the journal has everything up to `seq`."""

    seq: int

    def __post_init__(self) -> None:
        check_int("seq", self.seq, 0)


@dataclass(frozen=True, slots=True)
class Beat:
    """Agent → collector, at least each `beat_interval`: alive, and where; `host` are host figures by name."""

    step: int
    micro_step: int
    held: int
    host: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_int("step", self.step, 0)
        check_int("micro_step", self.micro_step, 0)
        check_int("held", self.held, 0)
        check_map("host", self.host, check_any_number)


@dataclass(frozen=True, slots=True)
class Who:
    """Collector → a peer it does not know (it has restarted, or the connection is new): say hello."""


Message: TypeAlias = Hello | Welcome | Refused | Data | Ack | Beat | Who
