"""Reads a run's journal from outside: every entry in order, with its place. Writes and locks nothing.

A collector may be at work meanwhile; then this ends where the journal ended when it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .entries import Entry, decode_entry
from .journal import MAGIC, Tail, read_segment, segments, tail_of
from .place import JOURNAL
from .protocol.errors import JournalError, RankdError

__all__ = ["Located", "Replay", "show_nothing"]


@dataclass(frozen=True, slots=True)
class Located:
    """An entry, and the byte of its segment at which it begins."""

    segment: Path
    offset: int
    entry: Entry


def show_nothing(done: int, total: int) -> None:
    """No progress."""


class Replay:
    """The journal of the run in `output`.

    Attributes:
        bytes: of all segments, when it was opened.
        entries: how many have been read so far.
        tail: what stands behind the last whole entry of the last segment, once all has been read.

    Args:
        output: the run's output directory.
        progress: called now and then with the bytes read and the bytes in all.

    Raises:
        RankdError: there is no journal to read.
    """

    def __init__(self, output: Path, progress: Callable[[int, int], None] = show_nothing) -> None:
        self._progress = progress
        try:
            self.segments = segments(output / JOURNAL)
            self.bytes = sum(path.stat().st_size for path in self.segments)
        except OSError as e:
            raise RankdError(f"the journal in {output / JOURNAL} cannot be read: {e.strerror}") from e
        if not self.segments:
            raise RankdError(f"{output} holds no run: there is no journal in {output / JOURNAL}")
        self.entries = 0
        self.tail = Tail(0, 0, torn=True)

    def __iter__(self) -> Iterator[Located]:
        """All entries, once.

        Raises:
            JournalError: damage, or what another version has written; says where.
            RankdError: a segment cannot be read.
        """
        before = 0
        for path in self.segments:
            try:
                for located in self._segment(path):
                    yield located
                    if self.entries % 256 == 0:
                        self._progress(before + located.offset, self.bytes)
                self._close_segment(path)
            except OSError as e:
                raise RankdError(f"{path} cannot be read: {e.strerror}") from e
            before += self.tail.offset
        self._progress(self.bytes, self.bytes)

    def _segment(self, path: Path) -> Iterator[Located]:
        start = 0
        self.tail = Tail(0, 0, torn=True)
        for end, payload in read_segment(path):
            begin = start or len(MAGIC)
            try:
                entry = decode_entry(payload)
            except JournalError as e:
                raise JournalError(f"{path}: byte {begin}: {e}") from None
            self.entries += 1
            yield Located(path, begin, entry)
            start = end
        self._end = start or len(MAGIC)

    def _close_segment(self, path: Path) -> None:
        self.tail = tail_of(path, self._end)
        if path != self.segments[-1] and path.stat().st_size != self._end:
            raise JournalError(
                f"{path}: byte {self.tail.offset}: expected a whole entry, found {self.tail.size} bytes that are none, "
                "and later segments follow"
            )
