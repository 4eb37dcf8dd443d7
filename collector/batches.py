"""Pure: batches of what is released, as bytes on their way to the processes that print them (`printers`), and the place
of each batch's text in the logs.

These bytes stay between the processes of one command, so they carry no version and are not checked again. They are
plain fields in msgpack: pickling the objects takes three times as long, and would send the 700 names of a table with
each block. A table goes to each process once, and has a number from then on.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgpack

from .protocol.records import Comment, Frame, NameTable, Position, RankBlock

__all__ = [
    "Batch",
    "BatchReader",
    "BatchWriter",
    "Kind",
    "Message",
    "Places",
    "next_message",
    "pack",
    "take_messages",
]

Message = list[Any]

_LENGTH = struct.Struct("<Q")
# Text of the names that a printing process is made to remember; beyond that it forgets all and is told again. Ranks
# whose tables all differ would otherwise fill the memory of every process with all of them.
_REMEMBERED_BYTES = 64 * 2**20


class Kind(enum.IntEnum):
    """The first field of a message."""

    PRINT = 1  # → printer: a batch (`BatchWriter`)
    WRITE = 2  # → printer: where the oldest text that it keeps belongs, by log
    PRINTED = 3  # ← printer: how long the text of the oldest batch without an answer is, by log
    WRITTEN = 4  # ← printer: the oldest text is in the logs
    FAILED = 5  # ← printer: errno, its text and the file; the last message


# -- messages ---------------------------------------------------------------------------------------------------------


def pack(kind: Kind, *fields: Any) -> bytes:
    """A message, its length before it."""
    # Names are what peers sent, and have been checked; other text may be of any kind.
    raw = msgpack.packb([int(kind), *fields], use_bin_type=True, unicode_errors="surrogatepass")
    return _LENGTH.pack(len(raw)) + bytes(raw)


def _unpack(raw: bytes | bytearray) -> Message:
    message: Message = msgpack.unpackb(raw, raw=False, use_list=True, unicode_errors="surrogatepass")
    return message


def next_message(source: BinaryIO) -> Message | None:
    """The next message of a file that blocks; None: it ended, in the middle of a message or before one."""
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    raw = source.read(length)
    return _unpack(raw) if len(raw) == length else None


def take_messages(received: bytearray) -> list[Message]:
    """Take the whole messages from the beginning of what was received."""
    out = []
    while len(received) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
        if len(received) < end:
            break
        out.append(_unpack(received[_LENGTH.size : end]))
        del received[:end]
    return out


# -- batches ----------------------------------------------------------------------------------------------------------


class BatchWriter:
    """Makes the messages for one printing process; remembers which name tables it has."""

    def __init__(self) -> None:
        self._numbers: dict[NameTable, int] = {}
        self._remembered = 0

    def message(self, released: Iterable[RankBlock | Comment]) -> bytes:
        """Print these."""
        forget = self._remembered > _REMEMBERED_BYTES
        if forget:
            self._numbers.clear()
            self._remembered = 0
        new: list[NameTable] = []
        fields = [self._block(each, new) if isinstance(each, RankBlock) else _comment(each) for each in released]
        return pack(Kind.PRINT, forget, [table.names for table in new], fields)

    def _block(self, block: RankBlock, new: list[NameTable]) -> Message:
        at = block.position
        frames = [
            (
                f.metric,
                f.column,
                None if f.table is None else self._number(f.table, new),
                f.present,
                f.counts,
                f.iteration,
            )
            for f in block.frames
        ]
        comments = [_comment(comment) for comment in block.comments]
        place = (block.rank, at.attempt, at.step, at.micro_step)
        return [*place, frames, comments, block.late, block.total_steps, block.time]

    def _number(self, table: NameTable, new: list[NameTable]) -> int:
        number = self._numbers.get(table)
        if number is None:
            number = self._numbers[table] = len(self._numbers)
            self._remembered += sum(map(len, table.names))
            new.append(table)
        return number


def _comment(comment: Comment) -> Message:
    return [comment.rank, comment.kind, comment.text]


class BatchReader:
    """The other end of a `BatchWriter`."""

    def __init__(self) -> None:
        self._tables: list[NameTable] = []

    def released(self, forget: bool, new: list[list[str]], fields: list[Message]) -> list[RankBlock | Comment]:
        """What is to be printed, from the fields of a message."""
        if forget:
            self._tables.clear()
        self._tables += [NameTable(tuple(names)) for names in new]
        return [Comment(*each) if len(each) == 3 else self._block(*each) for each in fields]

    def _block(
        self,
        rank: int,
        attempt: int,
        step: int,
        micro_step: int | None,
        frames: list[Message],
        comments: list[Message],
        *rest: Any,
    ) -> RankBlock:
        made = tuple([
            Frame(metric, column, None if table is None else self._tables[table], present, counts, iteration)
            for metric, column, table, present, counts, iteration in frames
        ])  # fmt: skip
        return RankBlock(rank, Position(attempt, step, micro_step), made, tuple(Comment(*c) for c in comments), *rest)


# -- places -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Batch:
    """One batch: who prints it; how long its text is and where it begins, by log, as far as that is known."""

    printer: int
    sizes: Mapping[str, int] | None = None
    places: Mapping[str, int] | None = None
    written: bool = False


class Places:
    """Gives each batch its place in every log. They stand there in the order of `add`, in whatever order they are
    printed and written.
    """

    def __init__(self) -> None:
        self._ends: dict[str, int] = {}
        self._without_place: deque[Batch] = deque()
        self._unwritten: deque[Batch] = deque()  # from the first that is not written on

    @property
    def unwritten(self) -> int:
        """How many batches lie from the first on that is not written."""
        return len(self._unwritten)

    def add(self, printer: int) -> Batch:
        """The next batch."""
        batch = Batch(printer)
        self._without_place.append(batch)
        self._unwritten.append(batch)
        return batch

    def printed(self, batch: Batch, sizes: Mapping[str, int]) -> list[Batch]:
        """So long is its text; returns the batches whose `places` are known now, in order."""
        batch.sizes = sizes
        placed = []
        while self._without_place and (known := self._without_place[0].sizes) is not None:
            first = self._without_place.popleft()
            first.places = {name: self._ends.get(name, 0) for name in known}
            for name, size in known.items():
                self._ends[name] = self._ends.get(name, 0) + size
            placed.append(first)
        return placed

    def written(self, batch: Batch) -> None:
        """Its text is in the logs."""
        batch.written = True
        while self._unwritten and self._unwritten[0].written:
            self._unwritten.popleft()

    def whole(self) -> dict[str, int]:
        """Up to which byte each log holds all that belongs there, for those of which more may be in the file: where
        the first batch that is not written begins.
        """
        out: dict[str, int] = {}
        for batch in self._unwritten:
            for name, place in (batch.places or {}).items():
                out.setdefault(name, place)
        return out
