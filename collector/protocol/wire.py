"""Frames and control messages as msgpack bytes, and back; the protocol's version and its limits.

Two layers:

*Items* (`items.py`) are what a rank's process produces: name tables, blocks of frames, notes, gaps, the goodbye. An
item is encoded once, on the training thread, and those bytes travel unchanged from the outbox over the socket into the
journal.

*Messages* (`messages.py`) are what the two sides say to each other; `Data` is the one that carries items. Only `Data`'s
content is ever resent or stored.

Every decoder raises ProtocolError (LimitError, VersionError) for anything else than what the encoder here writes, and
nothing but that: a peer's bytes are never a bug of ours. No pickle, no extension types, no timestamps.

Decoders pull field by field (`_Reader`). msgpack's own way, one call for the whole object, makes a list of any declared
length before its elements are there, and nests it a thousand times: 5 kB that claim 800 MB.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgpack

from .checks import MAX_ENTRIES, MAX_RANKS, MAX_TEXT_BYTES, check_int, check_number, check_text, shown
from .errors import LimitError, ProtocolError, RecordError, VersionError
from .items import MAX_FRAMES_PER_BLOCK, Block, Gap, Goodbye, Item, Note, Table
from .messages import MAX_ITEMS_PER_MESSAGE, Ack, Beat, Data, Hello, Message, Refused, Welcome, Who
from .records import MAX_NAMES, Frame, NameTable

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
    "Interned",
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
# Name tables of one process: norms, device norms, tpe, max logits, and room for models that change.
MAX_TABLES = 1_024
# Text of their names, of one process and of all together: equal tables of all processes count once.
MAX_TABLE_BYTES = 64 * 2**20
MAX_ALL_TABLES_BYTES = 512 * 2**20

_T = TypeVar("_T")

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
    """The bytes of a message, version first.

    Raises:
        LimitError: the message is larger than MAX_MESSAGE_BYTES.
    """
    raw = msgpack.packb([PROTOCOL_VERSION, *_message_fields(message)], use_bin_type=True)
    if len(raw) > MAX_MESSAGE_BYTES:
        raise LimitError(f"a message of {len(raw)} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
    return bytes(raw)


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
            return [int(_Type.HELLO), *who, *process, message.total_steps, dict(message.about), message.recovered]
        case Welcome():
            return [int(_Type.WELCOME), message.run, message.acked, message.beat_interval]
        case Refused():
            return [int(_Type.REFUSED), message.reason, message.retry]
        case Who():
            return [int(_Type.WHO)]


# -- decoding ---------------------------------------------------------------------------------------------------------


class Interned:
    """Equal name tables as one object, and what their text takes in all."""

    __slots__ = ("_bytes", "_tables")

    def __init__(self) -> None:
        self._tables: dict[NameTable, NameTable] = {}
        self._bytes = 0

    def take(self, table: NameTable, size: int) -> NameTable:
        """The one object for tables that equal this.

        Raises:
            LimitError: all of them together would be too large.
        """
        known = self._tables.get(table)
        if known is not None:
            return known
        if self._bytes + size > MAX_ALL_TABLES_BYTES:
            raise LimitError(f"more than {MAX_ALL_TABLES_BYTES} bytes of names from all processes")
        self._bytes += size
        self._tables[table] = table
        return table


def _text_bytes(table: NameTable) -> int:
    # An object each beside its text.
    return sum(len(name) + 64 for name in table.names)


class Tables:
    """The name tables that one process has defined so far, by id; what a decoder needs to resolve a block's frames.

    Equal tables of all processes are one object (`intern`), so that 1,024 ranks of one model cost one table.
    """

    __slots__ = ("_by_id", "_bytes", "_interned")

    def __init__(self, interned: Interned | None = None) -> None:
        self._by_id: dict[int, NameTable] = {}
        self._bytes = 0
        self._interned = Interned() if interned is None else interned

    def define(self, table_id: int, table: NameTable) -> None:
        """Take a definition; a resent equal one changes nothing.

        Raises:
            ProtocolError: the id is taken by another table.
            LimitError: more than MAX_TABLES tables, or more text than the limits allow.
        """
        known = self._by_id.get(table_id)
        if known is None and len(self._by_id) >= MAX_TABLES:
            raise LimitError(f"more than {MAX_TABLES} name tables from one process")
        if known is not None and known != table:
            raise ProtocolError(f"name table {table_id} is defined twice, differently")
        if known is None:
            size = _text_bytes(table)
            if self._bytes + size > MAX_TABLE_BYTES:
                raise LimitError(f"more than {MAX_TABLE_BYTES} bytes of names from one process")
            self._by_id[table_id] = self._interned.take(table, size)
            self._bytes += size

    def get(self, table_id: object) -> NameTable:
        table = self._by_id.get(table_id) if type(table_id) is int else None
        if table is None:
            raise ProtocolError(f"name table {shown(table_id)} was never defined")
        return table

    def items(self) -> Sequence[tuple[int, NameTable]]:
        return list(self._by_id.items())


def _not_ours(error: Exception) -> ProtocolError:
    return ProtocolError(f"not msgpack as rankd writes it: {type(error).__name__}: {error}")


class _Reader:
    """Pulls the fields of one msgpack array out of bytes, one call a field.

    A call gives one scalar; an array or a map is asked for by `array` or `map`, which check its length before anything
    is made of it. Empty ones may come out of `next`; no field lets a list or dict through.
    """

    __slots__ = ("_size", "_unpack", "_unpacker")

    def __init__(self, raw: bytes, most: int) -> None:
        if len(raw) > most:
            raise LimitError(f"{len(raw)} bytes, at most {most} are allowed")
        self._size = len(raw)
        self._unpacker = msgpack.Unpacker(
            raw=False, max_buffer_size=max(len(raw), 1), max_array_len=0, max_map_len=0, max_ext_len=0
        )
        self._unpacker.feed(raw)
        self._unpack = self._unpacker.unpack

    def next(self) -> Any:
        """The next field, which is a scalar, text or binary."""
        try:
            return self._unpack()
        except Exception as e:  # noqa: BLE001 - msgpack raises many kinds; each means that these bytes are not ours
            raise _not_ours(e) from None

    def array(self, what: str, most: int, least: int = 0) -> int:
        """The length of the array that comes next."""
        try:
            length = self._unpacker.read_array_header()
        except Exception as e:  # noqa: BLE001 - as above
            raise _not_ours(e) from None
        return self._length(what, length, least, most)

    def map(self, what: str, most: int) -> dict[str, Any]:
        """The map of scalars that comes next."""
        try:
            length = self._unpacker.read_map_header()
        except Exception as e:  # noqa: BLE001 - as above
            raise _not_ours(e) from None
        count = self._length(what, length, 0, most)
        entries: dict[str, Any] = {}
        for _ in range(count):
            key = self.next()
            if type(key) is not str or key in entries:
                raise ProtocolError(f"{what}: expected a new name, got {shown(key)}")
            entries[key] = self.next()
        return entries

    def end(self) -> None:
        """Nothing may follow."""
        if self._unpacker.tell() != self._size:
            raise ProtocolError(f"{self._size - self._unpacker.tell()} bytes too many")

    @staticmethod
    def _length(what: str, length: int, least: int, most: int) -> int:
        if length > most:
            raise LimitError(f"{what} of {length} entries, at most {most} are allowed")
        if length < least:
            raise ProtocolError(f"{what} of {length} entries, at least {least} are needed")
        return length


def decode_item(raw: bytes, tables: Tables) -> Item:
    """The item that `raw` encodes. Frames are resolved against, and checked with, `tables`, which is not changed.

    Raises:
        ProtocolError: anything that `encode_item` does not write.
    """
    reader = _Reader(raw, MAX_ITEM_BYTES)
    length = reader.array("an item", _MAX_FIELDS, least=2)
    decode, expected = _decoder(_ITEM_DECODERS, "kind of item", reader.next())
    if length != expected:
        raise ProtocolError(f"an item of {length} fields, this kind has {expected}")
    item: Item = _guarded(decode, reader, tables)
    reader.end()
    if item.seq < 1:
        raise ProtocolError("an item without a number")
    return item


def decode_message(raw: bytes) -> Message:
    """The message that `raw` encodes.

    Raises:
        VersionError: it is of another protocol version; says which.
        ProtocolError: anything else that `encode_message` does not write.
    """
    reader = _Reader(raw, MAX_MESSAGE_BYTES)
    length = reader.array("a message", _MAX_FIELDS, least=2)
    version = reader.next()
    if type(version) is not int:
        raise ProtocolError("not a message of this protocol")
    if version != PROTOCOL_VERSION:
        raise VersionError(
            f"the peer speaks version {version} of the rankd protocol, this side version {PROTOCOL_VERSION}; "
            "install the same rankd on all nodes"
        )
    decode, expected = _decoder(_MESSAGE_DECODERS, "type of message", reader.next())
    if length != expected:
        raise ProtocolError(f"a message of {length} fields, this type has {expected}")
    message: Message = _guarded(decode, reader)
    reader.end()
    return message


def _decoder(known: Mapping[int, _T], what: str, kind: object) -> _T:
    # True and 1.0 equal 1, but are not it.
    decode = known.get(kind) if type(kind) is int else None
    if decode is None:
        raise ProtocolError(f"unknown {what}: {shown(kind)}")
    return decode


def _guarded(decode: Callable[..., _T], *arguments: Any) -> _T:
    """Call a decoder; what the peer's fields make a constructor refuse is the peer's fault."""
    try:
        return decode(*arguments)
    except RecordError as e:
        raise ProtocolError(str(e)) from None
    except (TypeError, ValueError, OverflowError) as e:
        raise ProtocolError(f"malformed fields: {e}") from None


def _micro_step(value: object) -> int | None:
    """On the wire a step-level position has micro_step 0."""
    check_int("micro_step", value, 0)
    return None if value == 0 else cast(int, value)


def _place(reader: _Reader) -> tuple[int, int | None]:
    return reader.next(), _micro_step(reader.next())


def _float(value: Any) -> float:
    check_number("a number", value, finite=False)
    return float(value)


def _text(value: Any) -> str:
    check_text("a text", value, MAX_TEXT_BYTES, empty=True)
    return cast(str, value)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ProtocolError(f"expected a bool, got {shown(value)}")
    return value


def _table_item(reader: _Reader, _: Tables) -> Table:
    seq, table_id = reader.next(), reader.next()
    count = reader.array("a name table", MAX_NAMES)
    return Table(seq, table_id, NameTable(tuple(reader.next() for _ in range(count))))


def _block_item(reader: _Reader, tables: Tables) -> Block:
    seq, (step, micro_step), flags, time = reader.next(), _place(reader), reader.next(), _float(reader.next())
    check_int("flags", flags, 0, _COMPLETE | _ADDENDUM)
    count = reader.array("a block", MAX_FRAMES_PER_BLOCK)
    frames = tuple(_frame(reader, tables) for _ in range(count))
    return Block(seq, step, micro_step, bool(flags & _COMPLETE), time, frames, bool(flags & _ADDENDUM))


def _frame(reader: _Reader, tables: Tables) -> Frame:
    reader.array("a frame", _FRAME_FIELDS, least=_FRAME_FIELDS)
    pull = reader.next
    metric, table_id, column, present, counts, iteration = pull(), pull(), pull(), pull(), pull(), pull()
    return Frame(metric, column, None if table_id is None else tables.get(table_id), present, counts, iteration)


def _note_item(reader: _Reader, _: Tables) -> Note:
    seq, step, micro_step = reader.next(), reader.next(), _micro_step(reader.next())
    check_int("step", step, 0)
    return Note(seq, step or None, micro_step, reader.next(), _text(reader.next()), _float(reader.next()))


def _gap_item(reader: _Reader, _: Tables) -> Gap:
    return Gap(reader.next(), reader.next(), reader.next(), _place(reader), _place(reader))


def _goodbye_item(reader: _Reader, _: Tables) -> Goodbye:
    seq, reason, produced = reader.next(), _text(reader.next()), reader.next()
    return Goodbye(seq, reason, produced, reader.map("dropped", MAX_ENTRIES), _float(reader.next()))


_FRAME_FIELDS = 6
# The longest item or message has 12; another version's may have more.
_MAX_FIELDS = 64

# By kind: what decodes it, and how many fields it has, the kind included.
_ITEM_DECODERS: dict[int, tuple[Callable[[_Reader, Tables], Item], int]] = {
    _Kind.TABLE: (_table_item, 4),
    _Kind.BLOCK: (_block_item, 7),
    _Kind.NOTE: (_note_item, 7),
    _Kind.GAP: (_gap_item, 8),
    _Kind.GOODBYE: (_goodbye_item, 6),
}


def _hello(reader: _Reader) -> Hello:
    session, run, rank, world_size, next_seq = (reader.next() for _ in range(5))
    host, pid, started, total_steps = (reader.next() for _ in range(4))
    about = reader.map("about", MAX_ENTRIES)
    who = (session, run, rank, world_size, next_seq)
    return Hello(*who, host, pid, _float(started), total_steps, about, _flag(reader.next()))


def _welcome(reader: _Reader) -> Welcome:
    return Welcome(reader.next(), reader.next(), _float(reader.next()))


def _refused(reader: _Reader) -> Refused:
    return Refused(_text(reader.next()), _flag(reader.next()))


def _data(reader: _Reader) -> Data:
    count = reader.array("the items of a message", MAX_ITEMS_PER_MESSAGE)
    return Data(tuple(reader.next() for _ in range(count)))


def _ack(reader: _Reader) -> Ack:
    return Ack(reader.next())


def _beat(reader: _Reader) -> Beat:
    step, micro_step, held, host = reader.next(), reader.next(), reader.next(), reader.map("host", MAX_ENTRIES)
    return Beat(step, micro_step, held, {name: _float(value) for name, value in host.items()})


def _who(_: _Reader) -> Who:
    return Who()


# By type: what decodes it, and how many fields it has, version and type included.
_MESSAGE_DECODERS: dict[int, tuple[Callable[[_Reader], Message], int]] = {
    _Type.HELLO: (_hello, 13),
    _Type.WELCOME: (_welcome, 5),
    _Type.REFUSED: (_refused, 4),
    _Type.DATA: (_data, 3),
    _Type.ACK: (_ack, 3),
    _Type.BEAT: (_beat, 6),
    _Type.WHO: (_who, 2),
}
