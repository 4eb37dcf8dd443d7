"""What a merged log holds: the wanted lines of all of it, or the last ones, reading as little of it as possible."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from .following import Line, LineFilter, attempt_at, backwards, chunks_of, sampled_chunks, wanted_chunks
from .selection import Selection
from .sinks.merged_index import MERGED_INDEX, Chunk
from .sinks.parts import LogReader
from .sinks.speclog import MERGED_LOG, rank_log

__all__ = ["History", "LocalSource", "Source"]

# A log is read in such pieces.
_PIECE = 2**20
# The end of the last whole line is looked for in such pieces.
_LINE_LOOK = 2**16
# So many last lines are kept while the log is read backwards; some 50 MB.
_MOST_KEPT = 200_000
# Up to so many ranks are searched for before lines are split.
_FEW = 8


class Source(Protocol):
    """Where a merged log comes from; as it was when this was made, and as far as it is still there."""

    name: str
    """For messages."""
    start: int
    """The first byte that is there."""
    end: int

    def pieces(self) -> list[tuple[int, int]]:
        """What is there, without holes: (start, end) each, in order."""

    def holes(self) -> list[tuple[int, int]]:
        """What is missing between start and end."""

    def read(self, offset: int, count: int) -> bytes:
        """So many bytes from there; fewer where the log ends, or something is missing."""

    def index(self) -> bytes | None:
        """The collector's index of it; None: there is none."""

    def close(self) -> None:
        """Let go of it."""


class LocalSource:
    """The log of an output directory on this machine (`Source`)."""

    def __init__(self, output: Path) -> None:
        self._log = LogReader(output / MERGED_LOG)
        self._index = output / MERGED_INDEX
        self.name = str(self._log.path)
        self.start = self._log.start
        self.end = self._log.layout.end
        self.pieces = self._log.pieces
        self.holes = self._log.layout.holes
        self.read = self._log.read
        self.close = self._log.close

    def index(self) -> bytes | None:
        """The index beside it."""
        return self._index.read_bytes() if self._index.exists() else None


class History:
    """What a merged log holds at this moment, up to its last whole line. `filter` then goes on behind that.

    Attributes:
        size: where that line ends.
        selection: what is wanted.

    Args:
        source: the log; or the run's output directory, which may not hold one yet.
        selection: what is wanted.
        records: only lines that say something of their own are wanted, no headers, and each must know its attempt
            (which takes longer where there is no index).
    """

    def __init__(self, source: Path | Source, selection: Selection, *, records: bool = False) -> None:
        self.selection = selection
        self._attempts = records or selection.attempt is not None
        self._headers = not records
        self._log = LocalSource(source) if isinstance(source, Path) else source
        self._first = self._log.start
        self._there = self._log.pieces()
        self._reached = False  # what was asked for goes back to the first byte that is there
        self.size = self._last_line_end()
        index = self._log.index()
        self._chunks = None if index is None else chunks_of(index, self.size, self._read, self._first)
        self.filter = self._filter(1)

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()

    @property
    def whole(self) -> bool:
        """Nothing of the log is missing."""
        return not self._first and not self._missing()

    def _missing(self) -> list[tuple[int, int]]:
        return [hole for hole in self._log.holes() if hole[0] < self.size]

    def notes(self, *, nothing: bool = False) -> list[str]:
        """What is missing of what was asked for, for a person.

        Args:
            nothing: nothing was found of it, so it may have been in what is gone.
        """
        notes = []
        if self._first and (self._reached or nothing):
            gone = f"the first {self._first} bytes of {self._log.name} are gone: older parts were deleted"
            notes.append(gone + self._further_back())
        if holes := self._missing():
            told = ", ".join(f"{start} to {end}" for start, end in holes)
            notes.append(f"{self._log.name}: bytes {told} are missing (`rankd verify` tells more)")
        return notes

    def _further_back(self) -> str:
        """Each log keeps as many parts, and those of a rank's own hold more steps."""
        ranks = self.selection.ranks
        if ranks is None:
            return "" if self.selection.steps is None else "; the ranks' own logs may reach further back"
        log = rank_log(min(ranks)) if len(ranks) == 1 else "the ranks' own logs"
        return f"; {log} may reach further back"

    def all(self) -> Iterator[Line]:
        """All lines that are wanted."""
        if self._chunks is not None:
            chunks = wanted_chunks(self._chunks, self.selection)
        elif self.selection.steps is not None:
            # The attempts of sampled chunks are not the log's.
            sampled = sampled_chunks(self.size, self._read, first=self._first)
            chunks = wanted_chunks(sampled, replace(self.selection, attempt=None))
        else:
            chunks = [Chunk(self._first, self.size)]
        self._reached = bool(chunks) and chunks[0].start == self._first
        end = 0
        for chunk in chunks:
            if chunk.start != end:
                self.filter.restart(self._attempt_of(chunk))
            end = chunk.end
            yield from self._lines_of(chunk, self.filter)

    def last(self, count: int) -> Iterator[Line]:
        """The last `count` lines that are wanted; if metrics or names are, with the header that the first is under."""
        if self._chunks is not None:
            chunks: Iterable[Chunk] = reversed(wanted_chunks(self._chunks, self.selection))
        elif self.selection.steps is not None:
            return self._headed(deque(self.all(), maxlen=count))
        else:
            chunks = backwards(self.size, self._read, self._first)
        # Of many lines those before the last ones are read again when it is their turn, not kept until then.
        pieces: list[tuple[Chunk, Sequence[Line] | None]] = []
        missing = count
        for chunk in chunks:
            lines = self._filter(self._attempt_of(chunk))
            kept = count - missing < _MOST_KEPT
            if not pieces:
                self.filter = lines  # the end of the log is where it goes on
            found = list(self._lines_of(chunk, lines))
            pieces.append((chunk, found if kept else None))
            missing -= len(found)
            if missing <= 0:
                break
        self._reached = missing > 0
        wanted = (line for chunk, found in reversed(pieces) for line in self._again(chunk, found))
        return self._headed(itertools.islice(wanted, max(0, -missing), None if count else 0))

    def _again(self, chunk: Chunk, found: Sequence[Line] | None) -> Iterable[Line]:
        return self._lines_of(chunk, self._filter(self._attempt_of(chunk))) if found is None else found

    def _headed(self, lines: Iterable[Line]) -> Iterator[Line]:
        """With the header that the first line is under, where it would not be told otherwise."""
        for number, line in enumerate(lines):
            if not number and line.header and self._headers and self.selection.by_content:
                head = line.text[: line.text.find(b"] ") + 2] + line.header
                yield Line(head, line.rank, line.attempt)
            yield line

    def _lines_of(self, chunk: Chunk, lines: LineFilter) -> Iterator[Line]:
        ranks = self.selection.ranks
        marks = [b"[collector] ", *(b"[rank_%d] " % rank for rank in ranks or ())]
        for first, last in self._there:
            rest = b""
            start, end = max(first, chunk.start), min(last, chunk.end)
            for at in range(start, end, _PIECE):
                text, newline, rest = (rest + self._read(at, min(_PIECE, end - at))).rpartition(b"\n")
                # Searching for a few ranks is far quicker than splitting the lines of all.
                if ranks is None or len(marks) > _FEW or any(mark in text for mark in marks):
                    yield from lines.choose([line + b"\n" for line in (text + newline).split(b"\n")[:-1]])

    def _filter(self, attempt: int) -> LineFilter:
        return LineFilter(self.selection, attempt, headers=self._headers)

    def _attempt_of(self, chunk: Chunk) -> int:
        if self._chunks is not None:
            return max(1, chunk.key[0])
        return attempt_at(self._read, chunk.start, self._first) if self._attempts else 1

    def _last_line_end(self) -> int:
        end = self._log.end
        while end > self._first:
            start = max(self._first, end - _LINE_LOOK)
            newline = self._read(start, end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return self._first

    def _read(self, offset: int, size: int) -> bytes:
        return self._log.read(offset, size)
