"""`rankd tail`: the merged log of a run, its history and as it grows, from any machine that sees the files.

Reads only; a slow reader never slows the collector.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import select
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from .following import Line, LineFilter, attempt_at, backwards, chunks_of, sampled_chunks, wanted_chunks
from .growing import GrowingFile
from .protocol.errors import RankdError
from .protocol.jsonl import comment_object, record_object
from .protocol.records import Comment
from .selection import Selection, selection_of
from .selection import add_arguments as add_selection
from .sinks.gzipped import DamagedPartError
from .sinks.merged_index import MERGED_INDEX, Chunk
from .sinks.parts import LogReader, layout_of
from .sinks.speclog import MERGED_LOG

__all__ = ["History", "add_arguments", "drop_output", "run"]

# How many lines of history are shown unless told otherwise; as `tail` does.
_LINES = 10
# How often a log that does not grow is looked at, in milliseconds.
_LOOK_MS = 50
# A log is read in such pieces.
_PIECE = 2**20
# The end of the last whole line is looked for in such pieces.
_LINE_LOOK = 2**16
# Up to so many ranks are searched for before lines are split.
_FEW = 8
# Colours of the 256 that can be read on light and dark ground; neighbouring ranks get different ones.
_COLOURS = (33, 166, 35, 133, 37, 162, 100, 69, 172, 71, 127, 31)
_COMMENT_COLOUR = b"\x1b[1m"
_PLAIN = b"\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("output", type=Path, help="the run's output directory")
    parser.add_argument("-f", "--follow", action="store_true", help="go on as the log grows, until Ctrl-C")
    parser.add_argument(
        "-n", "--lines", type=_count, metavar="N", help=f"the last N lines; default {_LINES}, or with --step all"
    )
    add_selection(parser)
    parser.add_argument("--json", action="store_true", help="a JSON object for each record, values as printed")


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value


def run(args: argparse.Namespace) -> int:
    """Print what is wanted; 0 also when the reader of the output has gone."""
    selection = selection_of(args)
    path: Path = args.output / MERGED_LOG
    if not args.follow and not path.exists() and not layout_of(path).end:
        raise RankdError(f"{path} is not there; is {args.output} the output directory of a run (rankd.output)?")
    wanted = args.lines if args.lines is not None or args.step is not None else _LINES
    printer = _Printer(sys.stdout.buffer, selection if args.json else None)
    try:
        with History(args.output, selection, records=args.json) as history:
            printer.print(history.last(wanted) if wanted is not None else history.all())
            for note in history.notes():
                _tell(note)
            if args.follow:
                _follow(path, history, printer)
    except BrokenPipeError:
        drop_output()
    except DamagedPartError as e:
        raise RankdError(f"{e.filename} {e.strerror}; `rankd rebuild` makes the log again from the journal") from e
    return 0


def _follow(path: Path, history: History, printer: _Printer) -> None:
    file = GrowingFile(path, history.size)
    missed = 0
    # A pipe whose other end has gone is noticed while nothing comes that could be written to it.
    poller = select.poll()
    poller.register(sys.stdout.fileno(), 0)
    try:
        while True:
            if new := file.lines():
                if file.missed > missed:
                    _tell(f"{file.missed - missed} bytes of {path} were deleted before they could be shown")
                    missed = file.missed
                printer.print(history.filter.choose(new.splitlines(keepends=True)))
            elif poller.poll(_LOOK_MS):
                return
    finally:
        file.close()


def _tell(note: str) -> None:
    sys.stderr.write(f"note: {note}\n")
    sys.stderr.flush()


def drop_output() -> None:
    """What is still buffered has nowhere to go: let the interpreter's exit not complain of it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class History:
    """What a merged log holds at this moment, up to its last whole line. `filter` then goes on behind that.

    Args:
        output: the run's output directory; it may not hold a log yet.
        selection: what is wanted.
        records: only lines that say something of their own are wanted, no headers, and each must know its attempt
            (which takes longer where there is no index).
    """

    def __init__(self, output: Path, selection: Selection, *, records: bool = False) -> None:
        self._selection = selection
        self._attempts = records or selection.attempt is not None
        self._headers = not records
        self._log = LogReader(output / MERGED_LOG)
        self._first = self._log.start
        self._there = self._log.pieces()
        self._reached = False  # what was asked for goes back to the first byte that is there
        self.size = self._last_line_end()
        index = output / MERGED_INDEX
        self._chunks = chunks_of(index.read_bytes(), self.size, self._read, self._first) if index.exists() else None
        self.filter = self._filter(1)

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()

    def notes(self) -> list[str]:
        """What is missing of what was asked for, for a person."""
        notes = []
        if self._first and self._reached:
            notes.append(f"the first {self._first} bytes of {self._log.path} are gone: older parts were deleted")
        if holes := [hole for hole in self._log.layout.holes() if hole[0] < self.size]:
            told = ", ".join(f"{start} to {end}" for start, end in holes)
            notes.append(f"{self._log.path}: bytes {told} are missing (`rankd verify` tells more)")
        return notes

    def all(self) -> Iterator[Line]:
        """All lines that are wanted."""
        if self._chunks is not None:
            chunks = wanted_chunks(self._chunks, self._selection)
        elif self._selection.steps is not None:
            # The attempts of sampled chunks are not the log's.
            sampled = sampled_chunks(self.size, self._read, first=self._first)
            chunks = wanted_chunks(sampled, replace(self._selection, attempt=None))
        else:
            chunks = [Chunk(self._first, self.size)]
        self._reached = bool(chunks) and chunks[0].start == self._first
        end = 0
        for chunk in chunks:
            if chunk.start != end:
                self.filter.restart(self._attempt_of(chunk))
            end = chunk.end
            yield from self._lines_of(chunk, self.filter)

    def last(self, count: int) -> Sequence[Line]:
        """The last `count` lines that are wanted."""
        if self._chunks is not None:
            chunks: Iterable[Chunk] = reversed(wanted_chunks(self._chunks, self._selection))
        elif self._selection.steps is not None:
            return deque(self.all(), maxlen=count)
        else:
            chunks = backwards(self.size, self._read, self._first)
        pieces: list[list[Line]] = []
        missing = count
        for chunk in chunks:
            lines = self._filter(self._attempt_of(chunk))
            if not pieces:
                self.filter = lines  # the end of the log is where it goes on
            pieces.append(list(self._lines_of(chunk, lines)))
            missing -= len(pieces[-1])
            if missing <= 0:
                break
        self._reached = missing > 0
        found = [line for piece in reversed(pieces) for line in piece]
        return found[-count:] if count else []

    def _lines_of(self, chunk: Chunk, lines: LineFilter) -> Iterator[Line]:
        ranks = self._selection.ranks
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
        return LineFilter(self._selection, attempt, headers=self._headers)

    def _attempt_of(self, chunk: Chunk) -> int:
        if self._chunks is not None:
            return max(1, chunk.key[0])
        return attempt_at(self._read, chunk.start, self._first) if self._attempts else 1

    def _last_line_end(self) -> int:
        end = self._log.layout.end
        while end > self._first:
            start = max(self._first, end - _LINE_LOOK)
            newline = self._read(start, end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return self._first

    def _read(self, offset: int, size: int) -> bytes:
        return self._log.read(offset, size)


class _Printer:
    """Writes lines as somebody wants to read them: coloured by rank on a terminal, otherwise plain.

    Args:
        as_json: not None: as JSON, those of a line's records that are in this selection.
    """

    def __init__(self, out: BinaryIO, as_json: Selection | None) -> None:
        self._out = out
        coloured = out.isatty() and not os.environ.get("NO_COLOR")
        self._text: Callable[[Line], bytes] = _coloured if coloured else _plain
        if as_json is not None:
            self._text = functools.partial(_json_of, as_json)

    def print(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self._out.write(self._text(line))
        self._out.flush()


def _plain(line: Line) -> bytes:
    return line.text


def _coloured(line: Line) -> bytes:
    end = line.text.find(b"] ") + 2
    own = line.text[end:-1]
    if own.startswith(b"# "):
        own = _COMMENT_COLOUR + own + _PLAIN
    if line.rank is None:
        return line.text[:end] + own + b"\n"
    return b"\x1b[38;5;%dm%s\x1b[0m%s\n" % (_COLOURS[line.rank % len(_COLOURS)], line.text[:end], own)


def _json_of(selection: Selection, line: Line) -> bytes:
    objects = [
        comment_object(each) if isinstance(each, Comment) else record_object(each)
        for each in line.found()
        if isinstance(each, Comment) or selection.has(each)
    ]
    return b"".join(json.dumps(each, ensure_ascii=False).encode() + b"\n" for each in objects)
