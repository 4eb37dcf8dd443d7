"""Frames and control messages as msgpack bytes, and back; the protocol's version and its limits.

Two layers:

*Items* (`items.py`) are what a rank's process produces: name tables, blocks of frames, notes, gaps, the goodbye. An
item is encoded once, on the training thread, and those bytes travel unchanged from the outbox over the socket into the
journal.

*Messages* (`messages.py`) are what the two sides say to each other; `Data` is the one that carries items. Only `Data`'s
content is ever resent or stored.

Every decoder raises ProtocolError (LimitError, VersionError) for anything else than what the encoder here writes, and
nothing but that: a peer's bytes are never a bug of ours. No pickle, no extension types, no timestamps.

Decoders pull field by field (`unpacking.Reader`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgpack

from .checks import MAX_ENTRIES, MAX_RANKS, check_int
from .errors import LimitError, ProtocolError, VersionError
from .items import MAX_FRAMES_PER_BLOCK, Block, Gap, Goodbye, Hole, Item, Note, Table
from .messages import (
    MAX_ITEMS_PER_MESSAGE,
    Ack,
    Answer,
    Ask,
    Beat,
    Command,
    Data,
    Hello,
    Message,
    Refused,
    Report,
    Welcome,
    Who,
)
from .records import MAX_NAMES, Frame, NameTable
from .tables import MAX_TABLES, Interned, Tables
from .unpacking import Reader, decoder_of, flag_of, float_of, guarded, text_of
from .wording import counted

__all__ = [
    "MAX_ITEM_BYTES",
    "MAX_MESSAGE_BYTES",
    "MAX_RANKS",
    "MAX_TABLES",
    "PROTOCOL_VERSION",
    "Ack",
    "Answer",
    "Ask",
    "Beat",
    "Block",
    "Command",
    "Data",
    "Gap",
    "Goodbye",
    "Hello",
    "Hole",
    "Interned",
    "Item",
    "Message",
    "Note",
    "Refused",
    "Report",
    "Table",
    "Tables",
    "Welcome",
    "Who",
    "decode_item",
    "decode_message",
    "encode_item",
    "encode_message",
    "hole_of",
    "is_table",
    "number_item",
]

PROTOCOL_VERSION = 1

# 100,000 names of 80 bytes, or 61 layers × 256 experts over 64 micro-batches, fit with room; one item must not be able
# to hold the collector's memory.
MAX_ITEM_BYTES = 16 * 2**20
# A batch is cut at MAX_BATCH_BYTES (sender) unless a single item is larger.
MAX_MESSAGE_BYTES = MAX_ITEM_BYTES + 2**16

# -- encoding ---------------------------------------------------------------------------------------------------------


class _Kind(enum.IntEnum):
    TABLE = 1
    BLOCK = 2
    NOTE = 3
    GAP = 4
    GOODBYE = 5
    HOLE = 6


class _Type(enum.IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    DATA = 4
    ACK = 5
    BEAT = 6
    WHO = 7
    COMMAND = 8
    REPORT = 9
    ASK = 10
    ANSWER = 11


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


def is_table(raw: bytes) -> bool:
    """Whether these bytes of an item define a name table."""
    return raw[1] == _Kind.TABLE


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
        case Hole():
            step, micro_step = item.last or (0, None)
            return [int(_Kind.HOLE), item.seq, item.first, item.accepted, step, micro_step or 0]
        case Goodbye():
            return [int(_Kind.GOODBYE), item.seq, item.reason, item.produced, dict(item.dropped), item.time]


def encode_message(message: Message) -> bytes:
    """The bytes of a message, version first.

    Raises:
        LimitError: the message is larger than MAX_MESSAGE_BYTES.
    """
    kind, fields = _MESSAGE_FIELDS[type(message)]
    raw = msgpack.packb([PROTOCOL_VERSION, int(kind), *fields(message)], use_bin_type=True)
    if len(raw) > MAX_MESSAGE_BYTES:
        raise LimitError(f"a message of {len(raw)} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
    return bytes(raw)


def _hello_fields(hello: Hello) -> list[Any]:
    who = [hello.session, hello.run, hello.rank, hello.world_size, hello.next_seq]
    process = [hello.host, hello.pid, hello.started]
    return [*who, *process, hello.total_steps, dict(hello.about), hello.recovered]


# What comes after version and type.
_MESSAGE_FIELDS: dict[type, tuple[_Type, Callable[[Any], list[Any]]]] = {
    Data: (_Type.DATA, lambda m: [list(m.items)]),
    Ack: (_Type.ACK, lambda m: [m.seq]),
    Beat: (_Type.BEAT, lambda m: [m.step, m.micro_step, m.held, dict(m.host)]),
    Hello: (_Type.HELLO, _hello_fields),
    Welcome: (_Type.WELCOME, lambda m: [m.run, m.acked, m.beat_interval]),
    Refused: (_Type.REFUSED, lambda m: [m.reason, m.retry]),
    Who: (_Type.WHO, lambda _: []),
    Command: (_Type.COMMAND, lambda m: [m.kind, dict(m.facts), m.proof]),
    Report: (_Type.REPORT, lambda m: [m.kind, dict(m.facts)]),
    Ask: (_Type.ASK, lambda m: [m.number, m.kind, dict(m.facts), m.proof]),
    Answer: (_Type.ANSWER, lambda m: [m.number, m.fine, m.content]),
}


# -- decoding ---------------------------------------------------------------------------------------------------------


def decode_item(raw: bytes, tables: Tables) -> Item:
    """The item that `raw` encodes. Frames are resolved against, and checked with, `tables`, which is not changed.

    Raises:
        ProtocolError: anything that `encode_item` does not write.
    """
    reader = Reader(raw, MAX_ITEM_BYTES)
    length = reader.array("an item", _MAX_FIELDS, least=2)
    decode, expected = decoder_of(_ITEM_DECODERS, "kind of item", reader.next())
    if length != expected:
        raise ProtocolError(f"an item of {counted(length, 'field')}, this kind has {expected}")
    item: Item = guarded(decode, reader, tables)
    reader.end()
    if item.seq < 1:
        raise ProtocolError("an item without a number")
    return item


def hole_of(raw: bytes) -> Hole:
    """What stands for a block whose name tables nobody has any more.

    Raises:
        ProtocolError: it is no block.
    """
    reader = Reader(raw, MAX_ITEM_BYTES)
    reader.array("an item", _MAX_FIELDS, least=2)
    if reader.next() != _Kind.BLOCK:
        raise ProtocolError("only a block has name tables")
    hole: Hole = guarded(_hole_in_place, reader)
    return hole


def _hole_in_place(reader: Reader) -> Hole:
    seq, where = reader.next(), _place(reader)
    return Hole(seq, seq, None, where)


def decode_message(raw: bytes) -> Message:
    """The message that `raw` encodes.

    Raises:
        VersionError: it is of another protocol version; says which.
        ProtocolError: anything else that `encode_message` does not write.
    """
    reader = Reader(raw, MAX_MESSAGE_BYTES)
    length = reader.array("a message", _MAX_FIELDS, least=2)
    version = reader.next()
    if type(version) is not int:
        raise ProtocolError("not a message of this protocol")
    if version != PROTOCOL_VERSION:
        raise VersionError(
            f"the peer speaks version {version} of the rankd protocol, this side version {PROTOCOL_VERSION}; "
            "install the same rankd on all nodes"
        )
    decode, expected = decoder_of(_MESSAGE_DECODERS, "type of message", reader.next())
    if length != expected:
        raise ProtocolError(f"a message of {counted(length, 'field')}, this type has {expected}")
    message: Message = guarded(decode, reader)
    reader.end()
    return message


def _micro_step(value: object) -> int | None:
    """On the wire a step-level position has micro_step 0."""
    check_int("micro_step", value, 0)
    return None if value == 0 else cast(int, value)


def _place(reader: Reader) -> tuple[int, int | None]:
    return reader.next(), _micro_step(reader.next())


def _table_item(reader: Reader, _: Tables) -> Table:
    seq, table_id = reader.next(), reader.next()
    count = reader.array("a name table", MAX_NAMES)
    return Table(seq, table_id, NameTable(tuple(reader.next() for _ in range(count))))


def _block_item(reader: Reader, tables: Tables) -> Block:
    seq, (step, micro_step), flags, time = reader.next(), _place(reader), reader.next(), float_of(reader.next())
    check_int("flags", flags, 0, _COMPLETE | _ADDENDUM)
    count = reader.array("a block", MAX_FRAMES_PER_BLOCK)
    frames = tuple(_frame(reader, tables) for _ in range(count))
    return Block(seq, step, micro_step, bool(flags & _COMPLETE), time, frames, bool(flags & _ADDENDUM))


def _frame(reader: Reader, tables: Tables) -> Frame:
    reader.array("a frame", _FRAME_FIELDS, least=_FRAME_FIELDS)
    pull = reader.next
    metric, table_id, column, present, counts, iteration = pull(), pull(), pull(), pull(), pull(), pull()
    return Frame(metric, column, None if table_id is None else tables.get(table_id), present, counts, iteration)


def _note_item(reader: Reader, _: Tables) -> Note:
    seq, step, micro_step = reader.next(), reader.next(), _micro_step(reader.next())
    check_int("step", step, 0)
    return Note(seq, step or None, micro_step, reader.next(), text_of(reader.next()), float_of(reader.next()))


def _gap_item(reader: Reader, _: Tables) -> Gap:
    return Gap(reader.next(), reader.next(), reader.next(), _place(reader), _place(reader))


def _hole_item(reader: Reader, _: Tables) -> Hole:
    seq, first, accepted, (step, micro_step) = reader.next(), reader.next(), reader.next(), _place(reader)
    return Hole(seq, first, accepted, None if step == 0 and micro_step is None else (step, micro_step))


def _goodbye_item(reader: Reader, _: Tables) -> Goodbye:
    seq, reason, produced = reader.next(), text_of(reader.next()), reader.next()
    return Goodbye(seq, reason, produced, reader.map("dropped", MAX_ENTRIES), float_of(reader.next()))


_FRAME_FIELDS = 6
# The longest item or message has 12; another version's may have more.
_MAX_FIELDS = 64

# By kind: what decodes it, and how many fields it has, the kind included.
_ITEM_DECODERS: dict[int, tuple[Callable[[Reader, Tables], Item], int]] = {
    _Kind.TABLE: (_table_item, 4),
    _Kind.BLOCK: (_block_item, 7),
    _Kind.NOTE: (_note_item, 7),
    _Kind.GAP: (_gap_item, 8),
    _Kind.GOODBYE: (_goodbye_item, 6),
    _Kind.HOLE: (_hole_item, 6),
}


def _hello(reader: Reader) -> Hello:
    session, run, rank, world_size, next_seq = (reader.next() for _ in range(5))
    host, pid, started, total_steps = (reader.next() for _ in range(4))
    about = reader.map("about", MAX_ENTRIES)
    who = (session, run, rank, world_size, next_seq)
    return Hello(*who, host, pid, float_of(started), total_steps, about, flag_of(reader.next()))


def _welcome(reader: Reader) -> Welcome:
    return Welcome(reader.next(), reader.next(), float_of(reader.next()))


def _refused(reader: Reader) -> Refused:
    return Refused(text_of(reader.next()), flag_of(reader.next()))


def _data(reader: Reader) -> Data:
    count = reader.array("the items of a message", MAX_ITEMS_PER_MESSAGE)
    return Data(tuple(reader.next() for _ in range(count)))


def _ack(reader: Reader) -> Ack:
    return Ack(reader.next())


def _beat(reader: Reader) -> Beat:
    step, micro_step, held, host = reader.next(), reader.next(), reader.next(), reader.map("host", MAX_ENTRIES)
    return Beat(step, micro_step, held, {name: float_of(value) for name, value in host.items()})


def _who(_: Reader) -> Who:
    return Who()


def _command(reader: Reader) -> Command:
    return Command(reader.next(), reader.map("facts", MAX_ENTRIES), reader.next())


def _report(reader: Reader) -> Report:
    return Report(reader.next(), reader.map("facts", MAX_ENTRIES))


def _ask(reader: Reader) -> Ask:
    return Ask(reader.next(), reader.next(), reader.map("facts", MAX_ENTRIES), reader.next())


def _answer(reader: Reader) -> Answer:
    return Answer(reader.next(), flag_of(reader.next()), reader.next())


# By type: what decodes it, and how many fields it has, version and type included.
_MESSAGE_DECODERS: dict[int, tuple[Callable[[Reader], Message], int]] = {
    _Type.HELLO: (_hello, 13),
    _Type.WELCOME: (_welcome, 5),
    _Type.REFUSED: (_refused, 4),
    _Type.DATA: (_data, 3),
    _Type.ACK: (_ack, 3),
    _Type.BEAT: (_beat, 6),
    _Type.WHO: (_who, 2),
    _Type.COMMAND: (_command, 5),
    _Type.REPORT: (_report, 4),
    _Type.ASK: (_ask, 6),
    _Type.ANSWER: (_answer, 5),
}
