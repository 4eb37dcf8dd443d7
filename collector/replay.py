"""Reads a run's journal from outside: every entry in order, with its place, and the run they make. Locks nothing.

Where the oldest segments have been deleted (`rankd.journal.keep`), it starts from the oldest checkpoint that can be
started from. A collector may be at work meanwhile; then this ends where the journal ended when it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from .entries import Checkpoint, Entry, decode_entry
from .journal import MAGIC, EntryReader, Tail, read_segment, reference, segment_of, segments, tail_of
from .place import JOURNAL
from .protocol.errors import JournalError, RankdError
from .protocol.wording import counted
from .run import Run

__all__ = ["Located", "Replay", "show_nothing"]


@dataclass(frozen=True, slots=True)
class Located:
    """An entry, and the byte of its segment at which it begins."""

    segment: Path
    offset: int
    entry: Entry | Checkpoint

    @property
    def reference(self) -> int:
        """What the journal calls this place."""
        return reference(_number(self.segment), self.offset)


def _number(segment: Path) -> int:
    return int(segment.stem)


def show_nothing(done: int, total: int) -> None:
    """No progress."""


class Replay:
    """The journal of the run in `output`.

    Attributes:
        bytes: of all segments, when it was opened.
        run: the state before the first entry; whoever reads applies the entries to it.
        whole: no segment has been deleted at the beginning.
        sizes: of the logs before the first entry; empty where the journal is there from its beginning.
        entries: how many have been read so far.
        tail: what stands behind the last whole entry of the last segment, once all has been read.

    Args:
        output: the run's output directory.

    Raises:
        RankdError: there is no journal to read.
    """

    def __init__(self, output: Path) -> None:
        try:
            self.segments = segments(output / JOURNAL)
        except OSError as e:
            raise RankdError(f"the journal in {output / JOURNAL} cannot be read: {e.strerror}") from e
        if not self.segments:
            raise RankdError(f"{output} holds no run: there is no journal in {output / JOURNAL}")
        self.entries = 0
        self.tail = Tail(0, 0, torn=True)
        self._reader = EntryReader(output / JOURNAL)
        self.run = Run(self._reader.fetch)
        self.sizes: Mapping[str, int] = {}
        self.whole = not self.segments or _number(self.segments[0]) == 1
        if not self.whole:
            self._start_from_checkpoint()
        self.bytes = sum(path.stat().st_size for path in self.segments)

    @property
    def damaged(self) -> bool:
        """Whether the last segment, once all has been read, goes on with what is no entry and no torn write.

        Entries that a collector has written since are none of that.
        """
        return not self.tail.torn and all(end <= self.tail.offset for end, _ in read_segment(self.segments[-1]))

    def damage(self) -> str | None:
        """What of the last segment is damaged and was not read, for a person; None: nothing is."""
        if not self.damaged:
            return None
        return (
            f"{self.segments[-1]} is damaged at byte {self.tail.offset}: {counted(self.tail.size, 'byte')} from there "
            "on are no whole entry and were not read, so what was recorded later is missing here"
        )

    def _start_from_checkpoint(self) -> None:
        """At the oldest one that needs nothing of what was deleted."""
        first = self.segments[0]
        while self.segments:
            entry = next((decode_entry(payload) for _, payload in read_segment(self.segments[0])), None)
            if isinstance(entry, Checkpoint):
                try:
                    self.run, self.sizes = Run.thaw(entry.state, self._reader.fetch), entry.sizes
                except JournalError as e:
                    raise JournalError(f"{self.segments[0]}: {e}; read this run with that version") from e
                if segment_of(self.run.oldest_needed(otherwise=reference(_number(first), 0))) >= _number(first):
                    return
            del self.segments[0]
        raise JournalError(f"{first}: expected a checkpoint that can be started from, for earlier segments are gone")

    def close(self) -> None:
        """Let go of the files."""
        self._reader.close()

    def read(self, progress: Callable[[int, int], None] = show_nothing) -> Iterator[Located]:
        """All entries, once; the checkpoint that it starts from is not among them.

        Args:
            progress: called now and then with the bytes read and the bytes in all.

        Raises:
            JournalError: damage, or what another version has written; says where.
            RankdError: a segment cannot be read.
        """
        before = 0
        for path, expected in zip(self.segments, count(_number(self.segments[0])), strict=False):
            if _number(path) != expected:
                raise JournalError(f"{path}: expected segment {expected} before it, found none")
            try:
                for located in self._segment(path):
                    yield located
                    if self.entries % 256 == 0:
                        progress(before + located.offset, self.bytes)
                self._close_segment(path)
            except OSError as e:
                raise RankdError(f"{path} cannot be read: {e.strerror}") from e
            before += self.tail.offset
        progress(self.bytes, self.bytes)

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
            if begin > len(MAGIC) or path != self.segments[0] or self.whole:
                yield Located(path, begin, entry)
            start = end
        self._end = start or len(MAGIC)

    def _close_segment(self, path: Path) -> None:
        self.tail = tail_of(path, self._end)
        if path != self.segments[-1] and path.stat().st_size != self._end:
            raise JournalError(
                f"{path}: byte {self.tail.offset}: expected a whole entry, found "
                f"{counted(self.tail.size, 'byte')} of something else, and later segments follow"
            )
