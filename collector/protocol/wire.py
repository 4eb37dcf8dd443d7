"""Frames and control messages as msgpack bytes, and back; the protocol's version and its limits.

Two layers:

*Items* are what a rank's process produces, numbered 1, 2, 3 … within that process: name tables, blocks of frames,
notes, gaps, the goodbye. An item is encoded once, on the training thread, and those bytes travel unchanged from the
outbox over the socket into the journal.

*Messages* are what the two sides say to each other; `Data` is the one that carries items. Only `Data`'s content is
ever resent or stored.

Every decoder raises ProtocolError (LimitError, VersionError) for anything else than what the encoder here writes, and
nothing but that: a peer's bytes are never a bug of ours. No pickle, no extension types, no timestamps.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import msgpack

from .errors import LimitError, ProtocolError, RecordError, VersionError
from .records import MAX_NAME_BYTES, MAX_NAMES, MAX_STEP, Frame, Level, NameTable

__all__ = [
    "MAX_ITEM_BYTES",
    "MAX_MESSAGE_BYTES",
    "MAX_RANKS",
    "MAX_TABLES",
    "PROTOCOL_VERSION",
    "Ack",
    "Beat",
    "Block",
    "Data",
    "Gap",
    "Goodbye",
    "Hello",
    "Item",
    "Message",
    "Note",
    "Refused",
    "Table",
    "Tables",
    "Welcome",
    "Who",
    "decode_item",
    "decode_message",
    "encode_item",
    "encode_message",
    "number_item",
]

PROTOCOL_VERSION = 1

# 100,000 names of 80 bytes, or 61 layers × 256 experts over 64 micro-batches, fit with room; one item must not be able
# to hold the collector's memory.
MAX_ITEM_BYTES = 16 * 2**20
# A batch is cut at MAX_BATCH_BYTES (sender) unless a single item is larger.
MAX_MESSAGE_BYTES = MAX_ITEM_BYTES + 2**16
MAX_RANKS = 65_536
# Name tables of one process: norms, device norms, tpe, max logits, and room for models that change.
MAX_TABLES = 1_024
_MAX_FRAMES_PER_BLOCK = 4_096
_MAX_ITEMS_PER_MESSAGE = 65_536
_MAX_TEXT_BYTES = 16_384
_MAX_ABOUT = 64


# -- items ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Table:
    """Defines a name table for this process's later blocks."""

    seq: int
    table_id: int
    table: NameTable


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

    @property
    def level(self) -> Level:
        return Level.STEP if self.micro_step is None else Level.MICRO_STEP

    @property
    def record_count(self) -> int:
        return sum(frame.record_count for frame in self.frames)


@dataclass(frozen=True, slots=True)
class Note:
    """A line of rankd's own in the rank's log: `# KIND TEXT` (an exception, an anomaly).

    It stands at (step, micro_step); step None: wherever the rank is.
    """

    seq: int
    step: int | None
    micro_step: int | None
    kind: str
    text: str
    time: float


@dataclass(frozen=True, slots=True)
class Gap:
    """Records that the agent had to refuse, between two positions, by cause (`outbox_full`, `spool_full`, …)."""

    seq: int
    cause: str
    records: int
    first: tuple[int, int | None]
    last: tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The last item of a process: what it produced and what it dropped, by cause (in records)."""

    seq: int
    reason: str
    produced: int
    dropped: Mapping[str, int]
    time: float


_T = TypeVar("_T")

Item: TypeAlias = Table | Block | Note | Gap | Goodbye

# -- messages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Agent → collector, first on every connection.

    Attributes:
        session: 16 random bytes, the identity of this process; a restart is told from a duplicate by it.
        run: the run the agent believes to belong to; empty: whichever this collector serves.
        next_seq: the number that the agent's next new item will get.
        total_steps: the length of the training, for the text logs; None: not known.
        about: versions and choices a reader needs to know (`local_norm_kind`, `mindspore`, …).
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


@dataclass(frozen=True, slots=True)
class Welcome:
    """Collector → agent: the journal has this session's items up to `acked`; resend from there."""

    run: str
    acked: int
    beat_interval: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Collector → agent: no, and why. `retry`: the reason may pass (an older process of the same rank still lives)."""

    reason: str
    retry: bool


@dataclass(frozen=True, slots=True)
class Data:
    """Agent → collector: encoded items, in the order of their numbers."""

    items: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Ack:
    """Collector → agent: the journal has everything up to `seq`."""

    seq: int


@dataclass(frozen=True, slots=True)
class Beat:
    """Agent → collector, at least each `beat_interval`: alive, and where; `host` are host figures by name."""

    step: int
    micro_step: int
    held: int
    host: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Who:
    """Collector → a peer it does not know (it has restarted, or the connection is new): say hello."""


Message: TypeAlias = Hello | Welcome | Refused | Data | Ack | Beat | Who

# -- encoding ---------------------------------------------------------------------------------------------------------


class _Kind(enum.IntEnum):
    TABLE = 1
    BLOCK = 2
    NOTE = 3
    GAP = 4
    GOODBYE = 5


class _Type(enum.IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    DATA = 4
    ACK = 5
    BEAT = 6
    WHO = 7


_COMPLETE, _ADDENDUM = 1, 2


def encode_item(item: Item, tables: Mapping[NameTable, int] | None = None) -> bytes:
    """The bytes of an item. `tables` gives the ids of the name tables that a block's frames refer to.

    Raises:
        LimitError: the item is larger than MAX_ITEM_BYTES.
        KeyError: a frame's table has no id yet (a `Table` item must come first).
    """
    raw = msgpack.packb(_item_fields(item, tables or {}), use_bin_type=True)
    if len(raw) > MAX_ITEM_BYTES:
        raise LimitError(f"an item of {len(raw)} bytes, at most {MAX_ITEM_BYTES} are allowed")
    return bytes(raw)


def number_item(raw: bytes, seq: int) -> bytes:
    """The item `raw`, which was encoded with the number 0, with the number `seq`.

    An item is encoded before it is known whether the outbox accepts it, and only an accepted one uses up a number.

    Raises:
        ValueError: `raw` has a number already.
    """
    # Each item is a short array (one byte), its kind (one byte), its number: 0 is one byte, and the rest follows.
    if raw[2:3] != b"\0":
        raise ValueError("an item gets its number once: encode it with seq 0")
    return b"".join((raw[:2], msgpack.packb(seq), memoryview(raw)[3:]))


def _item_fields(item: Item, tables: Mapping[NameTable, int]) -> list[Any]:
    match item:
        case Block():
            flags = _COMPLETE * item.complete + _ADDENDUM * item.addendum
            frames = [
                [f.metric, None if f.table is None else tables[f.table], f.column, f.present, f.counts, f.iteration]
                for f in item.frames
            ]
            return [int(_Kind.BLOCK), item.seq, item.step, item.micro_step or 0, flags, item.time, frames]
        case Table():
            return [int(_Kind.TABLE), item.seq, item.table_id, list(item.table.names)]
        case Note():
            where = [item.step or 0, item.micro_step or 0]
            return [int(_Kind.NOTE), item.seq, *where, item.kind, item.text, item.time]
        case Gap():
            ends = [item.first[0], item.first[1] or 0, item.last[0], item.last[1] or 0]
            return [int(_Kind.GAP), item.seq, item.cause, item.records, *ends]
        case Goodbye():
            return [int(_Kind.GOODBYE), item.seq, item.reason, item.produced, dict(item.dropped), item.time]


def encode_message(message: Message) -> bytes:
    """The bytes of a message, version first."""
    return bytes(msgpack.packb([PROTOCOL_VERSION, *_message_fields(message)], use_bin_type=True))


def _message_fields(message: Message) -> list[Any]:
    match message:
        case Data():
            return [int(_Type.DATA), list(message.items)]
        case Ack():
            return [int(_Type.ACK), message.seq]
        case Beat():
            return [int(_Type.BEAT), message.step, message.micro_step, message.held, dict(message.host)]
        case Hello():
            who = [message.session, message.run, message.rank, message.world_size, message.next_seq]
            process = [message.host, message.pid, message.started]
            return [int(_Type.HELLO), *who, *process, message.total_steps, dict(message.about)]
        case Welcome():
            return [int(_Type.WELCOME), message.run, message.acked, message.beat_interval]
        case Refused():
            return [int(_Type.REFUSED), message.reason, message.retry]
        case Who():
            return [int(_Type.WHO)]


# -- decoding ---------------------------------------------------------------------------------------------------------


class Tables:
    """The name tables that one process has defined so far, by id; what a decoder needs to resolve a block's frames.

    Equal tables of all processes are one object (`intern`), so that 1,024 ranks of one model cost one table.
    """

    __slots__ = ("_by_id", "_interned")

    def __init__(self, interned: dict[NameTable, NameTable] | None = None) -> None:
        self._by_id: dict[int, NameTable] = {}
        self._interned = {} if interned is None else interned

    def define(self, table_id: int, table: NameTable) -> None:
        """Take a definition; a resent equal one changes nothing.

        Raises:
            ProtocolError: the id is taken by another table.
            LimitError: more than MAX_TABLES tables.
        """
        known = self._by_id.get(table_id)
        if known is None and len(self._by_id) >= MAX_TABLES:
            raise LimitError(f"more than {MAX_TABLES} name tables from one process")
        if known is not None and known != table:
            raise ProtocolError(f"name table {table_id} is defined twice, differently")
        self._by_id[table_id] = self._interned.setdefault(table, table)

    def get(self, table_id: object) -> NameTable:
        table = self._by_id.get(table_id) if isinstance(table_id, int) else None
        if table is None:
            raise ProtocolError(f"name table {table_id!r} was never defined")
        return table

    def items(self) -> Sequence[tuple[int, NameTable]]:
        return list(self._by_id.items())


def decode_item(raw: bytes, tables: Tables) -> Item:
    """The item that `raw` encodes. Frames are resolved against, and checked with, `tables`, which is not changed.

    Raises:
        ProtocolError: anything that `encode_item` does not write.
    """
    fields = _unpack(raw, MAX_ITEM_BYTES)
    try:
        decode = _ITEM_DECODERS[fields[0]]
    except (KeyError, IndexError, TypeError):
        raise ProtocolError(f"unknown kind of item: {fields[:1]!r}") from None
    return _guarded(decode, fields[1:], tables)


def decode_message(raw: bytes) -> Message:
    """The message that `raw` encodes.

    Raises:
        VersionError: it is of another protocol version; says which.
        ProtocolError: anything else that `encode_message` does not write.
    """
    fields = _unpack(raw, MAX_MESSAGE_BYTES)
    if len(fields) < 2 or type(fields[0]) is not int:
        raise ProtocolError("not a message of this protocol")
    if fields[0] != PROTOCOL_VERSION:
        raise VersionError(
            f"the peer speaks version {fields[0]} of the rankd protocol, this side version {PROTOCOL_VERSION}; "
            "install the same rankd on all nodes"
        )
    try:
        decode = _MESSAGE_DECODERS[fields[1]]
    except (KeyError, TypeError):
        raise ProtocolError(f"unknown type of message: {fields[1]!r}") from None
    return _guarded(decode, fields[2:])


def _unpack(raw: bytes, most: int) -> list[Any]:
    if len(raw) > most:
        raise LimitError(f"{len(raw)} bytes, at most {most} are allowed")
    try:
        fields = msgpack.unpackb(
            raw, raw=False, strict_map_key=True, max_ext_len=0, max_str_len=2**20, max_array_len=MAX_NAMES + 16
        )
    except Exception as e:  # noqa: BLE001 - msgpack raises many kinds; each means that these bytes are not ours
        raise ProtocolError(f"not msgpack: {type(e).__name__}: {e}") from None
    if not isinstance(fields, list) or not fields:
        raise ProtocolError(f"expected a non-empty array, got {type(fields).__name__}")
    return fields


def _guarded(decode: Callable[..., _T], fields: list[Any], *more: Any) -> _T:
    """Call a decoder; whatever the peer's fields make it raise is the peer's fault."""
    try:
        return decode(fields, *more)
    except RecordError as e:
        raise ProtocolError(str(e)) from None
    except (TypeError, ValueError, OverflowError) as e:
        raise ProtocolError(f"malformed fields: {e}") from None


def _whole(value: Any, low: int = 0, high: int = MAX_STEP) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"expected an integer from {low} to {high}, got {value!r:.80}")
    return value


def _number(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise ValueError(f"expected a number, got {value!r:.80}")
    return float(value)


def _text(value: Any, most: int = MAX_NAME_BYTES) -> str:
    if not isinstance(value, str) or len(value.encode()) > most:
        raise ValueError(f"expected text of at most {most} bytes, got {value!r:.80}")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"expected a bool, got {value!r:.80}")
    return value


def _binary(value: Any) -> bytes:
    if type(value) is not bytes:
        raise ValueError(f"expected binary, got {value!r:.80}")
    return value


def _mapping(value: Any, check: Callable[[Any], Any]) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > _MAX_ABOUT:
        raise ValueError(f"expected a map of at most {_MAX_ABOUT} entries")
    return {_text(k, 128): check(v) for k, v in value.items()}


def _table_item(fields: list[Any], _: Tables) -> Table:
    seq, table_id, names = fields
    if not isinstance(names, list):
        raise ValueError("expected a list of names")
    return Table(_whole(seq, 1), _whole(table_id), NameTable(tuple(names)))


def _block_item(fields: list[Any], tables: Tables) -> Block:
    seq, step, micro, flags, time, raw_frames = fields
    if not isinstance(raw_frames, list) or len(raw_frames) > _MAX_FRAMES_PER_BLOCK:
        raise ValueError(f"expected a list of at most {_MAX_FRAMES_PER_BLOCK} frames")
    flags = _whole(flags, 0, _COMPLETE | _ADDENDUM)
    micro_step = _whole(micro) or None
    level = Level.STEP if micro_step is None else Level.MICRO_STEP
    frames = tuple(_frame(f, tables, level) for f in raw_frames)
    return Block(
        _whole(seq, 1), _whole(step, 1), micro_step, bool(flags & _COMPLETE), _number(time), frames,
        bool(flags & _ADDENDUM),
    )  # fmt: skip


def _frame(fields: Any, tables: Tables, level: Level) -> Frame:
    metric, table_id, column, present, counts, iteration = fields
    frame = Frame(
        _text(metric),
        _binary(column),
        None if table_id is None else tables.get(table_id),
        None if present is None else _binary(present),
        None if counts is None else _binary(counts),
        None if iteration is None else _whole(iteration, 1),
    )
    frame.check(level)
    return frame


def _note_item(fields: list[Any], _: Tables) -> Note:
    seq, step, micro, kind, text, time = fields
    where = (_whole(step) or None, _whole(micro) or None)
    return Note(_whole(seq, 1), *where, _text(kind, 64), _text(text, _MAX_TEXT_BYTES), _number(time))


def _gap_item(fields: list[Any], _: Tables) -> Gap:
    seq, cause, records, step0, micro0, step1, micro1 = fields
    first, last = (_whole(step0, 1), _whole(micro0) or None), (_whole(step1, 1), _whole(micro1) or None)
    return Gap(_whole(seq, 1), _text(cause, 64), _whole(records), first, last)


def _goodbye_item(fields: list[Any], _: Tables) -> Goodbye:
    seq, reason, produced, dropped, time = fields
    return Goodbye(_whole(seq, 1), _text(reason), _whole(produced), _mapping(dropped, _whole), _number(time))


_ITEM_DECODERS: dict[int, Callable[[list[Any], Tables], Item]] = {
    _Kind.TABLE: _table_item,
    _Kind.BLOCK: _block_item,
    _Kind.NOTE: _note_item,
    _Kind.GAP: _gap_item,
    _Kind.GOODBYE: _goodbye_item,
}


def _hello(fields: list[Any]) -> Hello:
    session, run, rank, world_size, next_seq, host, pid, started, total_steps, about = fields
    if len(_binary(session)) != 16:
        raise ValueError("a session is 16 bytes")
    world_size = _whole(world_size, 1, MAX_RANKS)
    return Hello(
        session,
        _text(run, 64),
        _whole(rank, 0, world_size - 1),
        world_size,
        _whole(next_seq, 1),
        _text(host),
        _whole(pid),
        _number(started),
        None if total_steps is None else _whole(total_steps, 1),
        _mapping(about, _text),
    )


def _welcome(fields: list[Any]) -> Welcome:
    run, acked, beat_interval = fields
    return Welcome(_text(run, 64), _whole(acked), _number(beat_interval))


def _refused(fields: list[Any]) -> Refused:
    reason, retry = fields
    return Refused(_text(reason, _MAX_TEXT_BYTES), _flag(retry))


def _data(fields: list[Any]) -> Data:
    (items,) = fields
    if not isinstance(items, list) or len(items) > _MAX_ITEMS_PER_MESSAGE:
        raise ValueError(f"expected a list of at most {_MAX_ITEMS_PER_MESSAGE} items")
    return Data(tuple(map(_binary, items)))


def _ack(fields: list[Any]) -> Ack:
    (seq,) = fields
    return Ack(_whole(seq))


def _beat(fields: list[Any]) -> Beat:
    step, micro_step, held, host = fields
    return Beat(_whole(step), _whole(micro_step), _whole(held), _mapping(host, _number))


def _who(fields: list[Any]) -> Who:
    () = fields
    return Who()


_MESSAGE_DECODERS: dict[int, Callable[[list[Any]], Message]] = {
    _Type.HELLO: _hello,
    _Type.WELCOME: _welcome,
    _Type.REFUSED: _refused,
    _Type.DATA: _data,
    _Type.ACK: _ack,
    _Type.BEAT: _beat,
    _Type.WHO: _who,
}
