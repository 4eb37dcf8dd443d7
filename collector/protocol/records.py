"""What is recorded: positions, metrics, name tables, frames, records (SPEC.md sections 1 and 2).

All of these are frozen and checked when they are built (a frame: with its block), so that no later part has to ask
again. Values are float64
throughout; a column of values travels as little-endian float64 bytes and is unpacked only where it is read.
"""

from __future__ import annotations

import enum
import functools
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .checks import MAX_STEP, check_bytes, check_int, check_text, shown
from .errors import LimitError, RecordError
from .wording import counted

__all__ = [
    "KNOWN_METRICS",
    "MAX_METRIC_BYTES",
    "MAX_NAMES",
    "MAX_NAME_BYTES",
    "MAX_STEP",
    "SUMMARY_FIELDS",
    "Comment",
    "ExpertLayer",
    "Frame",
    "Level",
    "Metric",
    "NameTable",
    "Position",
    "RankBlock",
    "Record",
    "Shape",
    "metric_of",
]

# A parameter path is some 100 bytes; ten times that is a mistake or an attack, and every line would carry it.
MAX_NAME_BYTES = 1_024
MAX_METRIC_BYTES = 256
# The largest models have some 100,000 parameter tensors on one rank before sharding by pipeline stage.
MAX_NAMES = 100_000

# Counts of tokens: up to here float64 holds every integer.
_MAX_TOKENS = 2**53
# No leading zeros, no sign, no other script's digits; more than 18 digits are no layer.
_LAYER_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")

# The micro_step part of the sort key of a step-level record: "none" sorts last in its step.
_AFTER_MICRO_STEPS = MAX_STEP + 1


class Level(enum.Enum):
    """Whether a metric belongs to a micro-step or to the whole step."""

    MICRO_STEP = "micro_step"
    STEP = "step"


class Shape(enum.Enum):
    """What one record of a metric holds."""

    SCALAR = "scalar"  # one value, no name
    NAMED = "named"  # one value for each name
    LISTS = "lists"  # a list of values for each name


# SPEC.md section 3: the order in which a block prints its metrics. The user's own scalars come last.
_USER_PLACE = 100


@dataclass(frozen=True, slots=True)
class Metric:
    """A kind of value: its name, its level (None: either), its shape, and its place within a block of the log."""

    name: str
    level: Level | None
    shape: Shape
    place: int

    @property
    def known(self) -> bool:
        """Whether rankd itself measures it; otherwise it is a scalar of the user's own."""
        return self.place != _USER_PLACE


SUMMARY_FIELDS = ("loss", "global_loss", "step_time_ms", "lr", "grad_norm", "throughput")
_KNOWN = {
    m.name: m
    for m in (
        Metric("local_loss", Level.MICRO_STEP, Shape.SCALAR, 1),
        Metric("local_norm", Level.MICRO_STEP, Shape.NAMED, 2),
        Metric("tpe", Level.MICRO_STEP, Shape.LISTS, 3),
        Metric("device_loss", Level.STEP, Shape.SCALAR, 4),
        Metric("device_norm", Level.STEP, Shape.NAMED, 5),
        Metric("max_attention_logit", Level.STEP, Shape.LISTS, 6),
        *(Metric(name, Level.STEP, Shape.SCALAR, 10 + i) for i, name in enumerate(SUMMARY_FIELDS)),
    )
}
# What rankd itself measures; any other name is a scalar of the user's own.
KNOWN_METRICS = tuple(_KNOWN)
# As the only key of a line these would read as a block's header.
_RESERVED = frozenset({"step", "micro_step"})


@functools.lru_cache(maxsize=4096)
def metric_of(name: str, level: Level) -> Metric:
    """The metric called `name` when recorded at `level`; an unknown name is the user's own scalar.

    The summary's names (`loss`, `lr`, …) are the step summary at step level and a user's own scalar at micro-step
    level.

    Raises:
        RecordError: an empty, overlong or reserved name, or a known metric at the wrong level.
    """
    known = _KNOWN.get(name)
    if known is not None:
        if known.level is level:
            return known
        if name not in SUMMARY_FIELDS:
            raise RecordError(f"metric {name!r} is a {_level_word(known.level)} metric, not a {_level_word(level)} one")
    if name in _RESERVED:
        raise RecordError(f"{name!r} cannot name a metric: its line would read as a block's header; choose another")
    check_text("metric name", name, MAX_METRIC_BYTES)
    return Metric(name, level, Shape.SCALAR, _USER_PLACE)


def _level_word(level: Level | None) -> str:
    return "either" if level is None else level.value.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Position:
    """Where a record belongs in the course of training: attempt, step and micro_step, all 1-based.

    A step-level record has micro_step None and sorts after the step's last micro-step.

    Raises:
        RecordError: a part is not a positive integer.
    """

    attempt: int
    step: int
    micro_step: int | None = None

    def __post_init__(self) -> None:
        check_int("attempt", self.attempt, 1)
        check_int("step", self.step, 1)
        if self.micro_step is not None:
            check_int("micro_step", self.micro_step, 1)

    @property
    def key(self) -> tuple[int, int, int]:
        """The sort key: (attempt, step, micro_step), a missing micro_step last."""
        return (self.attempt, self.step, _AFTER_MICRO_STEPS if self.micro_step is None else self.micro_step)

    @property
    def level(self) -> Level:
        return Level.STEP if self.micro_step is None else Level.MICRO_STEP

    def __lt__(self, other: Position) -> bool:
        return self.key < other.key

    def __str__(self) -> str:
        micro = "" if self.micro_step is None else f" micro_step {self.micro_step}"
        return f"attempt {self.attempt} step {self.step}{micro}"

    @staticmethod
    def from_key(key: tuple[int, int, int]) -> Position:
        """The position whose `key` this is."""
        attempt, step, micro = key
        return Position(attempt, step, None if micro == _AFTER_MICRO_STEPS else micro)


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The layer that a `tpe` record is about: Megatron's (block, layer, mtp_idx); `name` is its form in a name table.

    Raises:
        RecordError: a block other than decoder and mtp, or an mtp_idx where none (or none where one) belongs.
    """

    block: str
    layer: int
    mtp_idx: int | None = None

    def __post_init__(self) -> None:
        if self.block not in ("decoder", "mtp"):
            raise RecordError(f"block must be 'decoder' or 'mtp', got {self.block!r}")
        check_int("layer", self.layer, 0)
        if (self.mtp_idx is not None) != (self.block == "mtp"):
            raise RecordError(f"mtp_idx goes with block 'mtp' and with no other: {self.block!r}, {self.mtp_idx!r}")
        if self.mtp_idx is not None:
            check_int("mtp_idx", self.mtp_idx, 0)

    @property
    def name(self) -> str:
        return f"decoder.{self.layer}" if self.mtp_idx is None else f"mtp.{self.mtp_idx}.{self.layer}"

    @property
    def sort_key(self) -> tuple[str, int, int]:
        """SPEC.md section 3: by (block, mtp_idx, layer)."""
        return (self.block, -1 if self.mtp_idx is None else self.mtp_idx, self.layer)

    @staticmethod
    def from_name(name: str) -> ExpertLayer:
        """The layer of that name, in the very form that `name` gives (one layer must not have two names).

        Raises:
            RecordError: it is no such name.
        """
        block, *numbers = name.split(".")
        if not all(_LAYER_NUMBER.fullmatch(n) for n in numbers):
            numbers = []
        match block, [int(n) for n in numbers]:
            case "decoder", [layer]:
                return ExpertLayer("decoder", layer)
            case "mtp", [mtp_idx, layer]:
                return ExpertLayer("mtp", layer, mtp_idx)
        raise RecordError(f"a tpe record is named decoder.LAYER or mtp.IDX.LAYER, got {shown(name)}")


@dataclass(frozen=True, slots=True)
class NameTable:
    """The names (parameters or layers) that a column of values belongs to, in the model's order.

    Raises:
        RecordError: no names, or a name that is not text.
        LimitError: more than MAX_NAMES names, or a name of more than MAX_NAME_BYTES bytes.
    """

    names: tuple[str, ...]
    # A table is the key of every template and id cache; hashing 700 names for each frame would be the largest cost.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.names, tuple) or not self.names:
            raise RecordError("a name table needs a tuple of at least one name")
        if len(self.names) > MAX_NAMES:
            raise LimitError(f"a name table of {len(self.names)} names, at most {MAX_NAMES} are allowed")
        for name in self.names:
            check_text("name", name, MAX_NAME_BYTES)
        object.__setattr__(self, "_hash", hash(self.names))

    def __hash__(self) -> int:
        return self._hash

    def __len__(self) -> int:
        return len(self.names)


@functools.lru_cache(maxsize=256)
def _doubles(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}d")


@functools.lru_cache(maxsize=256)
def _indices(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I")


def _packed(layout: struct.Struct, metric: str, values: Sequence[float]) -> bytes:
    try:
        return layout.pack(*values)
    except (struct.error, OverflowError) as e:
        raise RecordError(f"{shown(metric)}: {e}") from None


@dataclass(frozen=True, slots=True)
class Frame:
    """A batch of values of one metric at one position of one rank.

    Attributes:
        metric: its name.
        column: the values, little-endian float64.
        table: the names the values belong to; None for a scalar.
        present: little-endian uint32 indices into `table`, where not all of its names have a value here (a parameter
            without a gradient in this micro-step); None: all have.
        counts: for a metric of lists: how many values belong to each (present) name, little-endian uint32.
        iteration: for `tpe`: the global micro-step count.

    Build one with `scalar`, `named` or `lists`; those pack the columns, and raise RecordError for what is no number.
    Whether the parts fit together depends on the level: `check` says it, and a `Block` calls it when it is built.
    """

    metric: str
    column: bytes
    table: NameTable | None = None
    present: bytes | None = None
    counts: bytes | None = None
    iteration: int | None = None

    @staticmethod
    def scalar(metric: str, value: float) -> Frame:
        """One value without a name."""
        return Frame(metric, _packed(_doubles(1), metric, (value,)))

    @staticmethod
    def named(metric: str, table: NameTable, values: Sequence[float], present: Sequence[int] | None = None) -> Frame:
        """One value for each name of `table`, or for those that `present` names by index."""
        where = None if present is None else _packed(_indices(len(present)), metric, present)
        return Frame(metric, _packed(_doubles(len(values)), metric, values), table, where)

    @staticmethod
    def lists(metric: str, table: NameTable, lists: Sequence[Sequence[float]], iteration: int | None = None) -> Frame:
        """A list of values for each name of `table`."""
        flat = [v for values in lists for v in values]
        counts = _indices(len(lists)).pack(*map(len, lists))
        return Frame(metric, _packed(_doubles(len(flat)), metric, flat), table, None, counts, iteration)

    @property
    def values(self) -> tuple[float, ...]:
        """The column, unpacked."""
        return _doubles(len(self.column) // 8).unpack(self.column)

    @property
    def indices(self) -> tuple[int, ...] | None:
        """`present`, unpacked."""
        return None if self.present is None else _indices(len(self.present) // 4).unpack(self.present)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that have a value here, in the table's order; empty for a scalar."""
        if self.table is None:
            return ()
        where = self.indices
        return self.table.names if where is None else tuple(self.table.names[i] for i in where)

    @property
    def groups(self) -> list[tuple[float, ...]]:
        """For a metric of lists: the values of each name."""
        assert self.counts is not None
        values, start, out = self.values, 0, []
        for count in _indices(len(self.counts) // 4).unpack(self.counts):
            out.append(values[start : start + count])
            start += count
        return out

    @property
    def record_count(self) -> int:
        """How many records this is: one a name, or one."""
        if self.table is None:
            return 1
        return len(self.table) if self.present is None else len(self.present) // 4

    def check(self, level: Level) -> None:
        """Raise RecordError unless this is a possible frame at `level`: metric, shape and lengths agree."""
        check_text("metric name", self.metric, MAX_METRIC_BYTES)
        metric = metric_of(self.metric, level)
        check_bytes("column", self.column)
        if self.present is not None:
            check_bytes("present", self.present)
        if self.counts is not None:
            check_bytes("counts", self.counts)
        if len(self.column) % 8:
            raise RecordError(f"{self.metric}: a column of {counted(len(self.column), 'byte')} is no column of float64")
        if metric.shape is Shape.SCALAR:
            if len(self.column) != 8 or self.table is not None or self.present is not None or self.counts is not None:
                raise RecordError(f"{self.metric}: a scalar has one value and no names")
            if self.iteration is not None:
                raise RecordError(f"{self.metric}: only tpe carries an iteration")
            return
        if self.table is None:
            raise RecordError(f"{self.metric}: its values need a name table")
        self._check_present(self.table)
        self._check_lengths(metric)
        if metric.name == "tpe":
            self._check_tpe()
        elif self.iteration is not None:
            raise RecordError(f"{self.metric}: only tpe carries an iteration")

    def _check_present(self, table: NameTable) -> None:
        if self.present is None:
            return
        if len(self.present) % 4:
            raise RecordError(
                f"{self.metric}: a column of {counted(len(self.present), 'byte')} is no column of uint32 indices"
            )
        previous = -1
        for index in self.indices or ():
            if index <= previous or index >= len(table):
                raise RecordError(f"{self.metric}: indices must rise and stay below {len(table)}, got {index}")
            previous = index

    def _check_lengths(self, metric: Metric) -> None:
        values, records = len(self.column) // 8, self.record_count
        if metric.shape is Shape.NAMED:
            if self.counts is not None or values != records:
                raise RecordError(f"{self.metric}: {counted(values, 'value')} for {counted(records, 'name')}")
            return
        if self.counts is None or len(self.counts) != 4 * records:
            raise RecordError(f"{self.metric}: it needs a count for each of its {counted(records, 'name')}")
        if sum(_indices(records).unpack(self.counts)) != values:
            raise RecordError(f"{self.metric}: the counts do not add up to its {counted(values, 'value')}")

    def _check_tpe(self) -> None:
        check_int("iteration", self.iteration, 1)
        for name in self.names:
            ExpertLayer.from_name(name)
        values = self.values
        # NaN and the infinities are no integers either. Without a Python loop: there may be 100,000 counts.
        if not all(map(float.is_integer, values)) or max(map(abs, values), default=0.0) > _MAX_TOKENS:
            wrong = next(v for v in values if not v.is_integer() or abs(v) > _MAX_TOKENS)
            raise RecordError(f"tpe: a count of tokens is an integer of at most {_MAX_TOKENS}, got {wrong!r}")

    def records(self, position: Position, rank: int, time: float | None = None) -> Iterator[Record]:
        """The single records of this frame, in the table's order."""
        if self.table is None:
            yield Record(position, rank, self.metric, None, self.values[0], time)
            return
        values: Iterable[float | tuple[float, ...]] = self.values if self.counts is None else self.groups
        for name, value in zip(self.names, values, strict=True):
            yield Record(position, rank, self.metric, name, value, time, self.iteration)


@dataclass(frozen=True, slots=True)
class Record:
    """One value, as readers get it.

    Attributes:
        position: attempt, step and micro_step.
        rank: the global rank id.
        metric: the metric's name.
        name: the parameter or layer; None for a scalar.
        value: a float, or a tuple of floats for a metric of lists.
        time: seconds since the epoch on the rank's clock, for information only; None where the source has none (text).
        iteration: for `tpe`: the global micro-step count.
    """

    position: Position
    rank: int
    metric: str
    name: str | None
    value: float | tuple[float, ...]
    time: float | None = None
    iteration: int | None = None


@dataclass(frozen=True, slots=True)
class Comment:
    """A line that rankd itself adds to the logs: `# KIND TEXT`. rank None: about the whole run (`[collector]`)."""

    rank: int | None
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class RankBlock:
    """All that one rank has at one position, as it is released to the sinks.

    Attributes:
        frames: in the order of production; a sink that prints sorts them by the metric's place.
        comments: lines of rankd's own about this position, after the frames.
        late: the merged log had passed this position already.
        total_steps: the length of the training, where known.
        time: the rank's clock when the position was completed.
    """

    rank: int
    position: Position
    frames: tuple[Frame, ...]
    comments: tuple[Comment, ...] = ()
    late: bool = False
    total_steps: int | None = None
    time: float = 0.0
