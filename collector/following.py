"""Pure: which parts of a merged log to read, and which of its lines somebody wants to see.

`LineFilter` attributes each line to its block while it passes over the lines, tolerant where `speclog.parse` is strict:
a damaged line must not end a `tail`. The log's chunks come from the index that the collector keeps
(`sinks.merged_index`); where there is none, `sampled_chunks` makes up as much of it as a range of steps needs, by
looking at some thousand places of the log. It misses then what the index knows: late blocks outside of their place.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from .protocol.errors import SpecLogError
from .protocol.records import Comment, Record
from .protocol.speclog import parse
from .selection import Selection
from .sinks.merged_index import CHUNK_BYTES, Chunk, rank_mask, read_entries

__all__ = [
    "Line",
    "LineFilter",
    "attempt_at",
    "backwards",
    "chunks_of",
    "sampled_chunks",
    "wanted_chunks",
]

# offset, size -> the bytes there, fewer at the end of the log
Read = Callable[[int, int], bytes]

# Where there is no index: as many places of the log are looked at. Some 0.1 s, whatever its size.
_SAMPLES = 4_096
# A first look for a block's header goes this far; blocks of a few hundred parameters are shorter.
_LOOK = 2**16

# The lines that begin an attempt are shorter.
_LINE = 128

_PREFIX = re.compile(rb"\[(?:rank_(0|[1-9][0-9]*)|collector)\] ")
_HEADER = re.compile(rb'\{ "step": ([1-9][0-9]*)(?:, "micro_step": ([1-9][0-9]*))? \}\n')
# A header with the whole line before it, to tell a late block's.
_HEADER_INSIDE = re.compile(
    rb'^([^\n]*)\n(\[rank_(?:0|[1-9][0-9]*)\] \{ "step": ([1-9][0-9]*)(?:, "micro_step": [1-9][0-9]*)? \}\n)',
    re.MULTILINE,
)
_ATTEMPT = re.compile(rb"# attempt ([1-9][0-9]*)\b")
_LATE = re.compile(rb"# late attempt ([1-9][0-9]*)\b")
_RUN_ATTEMPT = re.compile(rb"^\[collector\] # attempt ([1-9][0-9]*)\b", re.MULTILINE)
_NORMS = (("local_norm", b'{ "local_norm": '), ("device_norm", b'{ "device_norm": '))


# -- lines ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the log (prefix and newline included) with what it takes to understand it alone.

    Attributes:
        rank: None for the collector's lines.
        attempt: of the line's block.
        header: the block's header, as it stands in the rank's own log; empty outside of a block, and for headers.
    """

    text: bytes
    rank: int | None
    attempt: int
    header: bytes = b""

    def found(self) -> list[Record | Comment]:
        """What the line says; nothing if it is a header or derived, or not in the spec format."""
        own = self.text[self.text.find(b"] ") + 2 :]
        if not self.header and not own.startswith(b"# "):
            return []
        if self.rank is None:
            context = []
            lines = [self.text]
        else:
            context = [b"# attempt %d\n" % self.attempt, *([self.header] if self.header else [])]
            lines = [*context, own]
        try:
            found = list(parse(lines, rank=self.rank))
        except SpecLogError:
            return []
        return found[1:] if context else found


@dataclass(slots=True)
class _Context:
    """Where the lines of one rank are."""

    rank: int | None
    attempt: int
    late: tuple[int, bytes] | None = None  # attempt and line, between a `# late` line and its header
    block_attempt: int = 0
    header: bytes = b""
    wanted: bool = False
    pending: list[Line] = field(default_factory=list)  # the header's lines, until a line of the block is chosen


class LineFilter:
    """Gives the lines that a selection wants, with the header of each block before the first of its lines.

    The collector's own lines are about the whole run: they are given when the selection asks for no part of it.

    Args:
        attempt: of the first line.
        headers: give the headers too.
    """

    def __init__(self, selection: Selection, attempt: int = 1, *, headers: bool = True) -> None:
        self._selection = selection
        self._headers = headers
        self._whole = selection == Selection()
        self.restart(attempt)

    def restart(self, attempt: int) -> None:
        """The next line is somewhere else in the log: at the start of a block, in this attempt."""
        self._attempt = attempt
        self._contexts: dict[bytes, _Context | None] = {}

    def choose(self, lines: Iterable[bytes]) -> Iterator[Line]:
        """The wanted ones of these lines, which follow on those before."""
        contexts = self._contexts
        for line in lines:
            end = line.find(b"] ") + 2
            prefix = line[:end]
            context = contexts[prefix] if prefix in contexts else self._enter(prefix)
            if context is None:
                if self._whole:
                    yield Line(line, None, self._attempt)
                continue
            own = line[end:]
            if own.startswith(b"# "):
                yield from self._comment(context, line, own)
            elif own.startswith(b'{ "step": ') and (match := _HEADER.fullmatch(own)):
                yield from self._header(context, line, own, int(match[1]))
            elif context.wanted and (not self._selection.by_content or self._has_content(context, own)):
                yield from context.pending
                context.pending.clear()
                yield Line(line, context.rank, context.block_attempt, context.header)

    def _enter(self, prefix: bytes) -> _Context | None:
        """The context of a prefix that was not seen yet; None: its lines are not wanted, or no log has such lines."""
        match = _PREFIX.fullmatch(prefix)
        if match is None:
            return None  # not kept: damaged lines could have any prefix
        rank = None if match[1] is None else int(match[1])
        wanted = rank is None or self._selection.has_rank(rank)
        context = _Context(rank, self._attempt) if wanted else None
        self._contexts[prefix] = context
        return context

    def _header(self, context: _Context, line: bytes, own: bytes, step: int) -> Iterator[Line]:
        attempt = context.attempt if context.late is None else context.late[0]
        lines = [line] if context.late is None else [context.late[1], line]
        context.late = None
        context.block_attempt, context.header = attempt, own
        context.wanted = self._selection.has_position(attempt, step)
        given = [Line(text, context.rank, attempt) for text in lines] if self._headers else []
        if self._selection.by_content:
            context.pending = given
        elif context.wanted:
            yield from given

    def _comment(self, context: _Context, line: bytes, own: bytes) -> Iterator[Line]:
        if context.rank is not None and (late := _LATE.match(own)):
            context.late = (int(late[1]), line)
            return
        selection = self._selection
        if begins := _ATTEMPT.match(own):
            self._begin(context, int(begins[1]))
            attempts = selection.attempt in (None, context.attempt) and selection.steps is None
            wanted = attempts and (context.rank is not None or selection.ranks is None)
        elif context.rank is None:
            wanted = self._whole
        elif context.header:
            wanted = context.wanted
        else:
            wanted = selection.steps is None and selection.attempt in (None, context.attempt)
        if wanted and not selection.by_content:
            yield Line(line, context.rank, context.attempt, context.header)

    def _begin(self, context: _Context, attempt: int) -> None:
        if context.rank is None:
            self._attempt = attempt
        of_all = [each for each in self._contexts.values() if each is not None and each.rank is not None]
        for each in of_all if context.rank is None else [context]:
            each.header, each.wanted, each.attempt = b"", False, attempt
        context.attempt = attempt

    def _has_content(self, context: _Context, own: bytes) -> bool:
        for metric, start in _NORMS:
            if own.startswith(start) and b"\\" not in own:
                name = own[len(start) :].rpartition(b": ")[0].decode(errors="replace")
                return self._selection.has_content(metric, name)
        if own.startswith(b"step:[") and (b"_logit/mean: " in own or b"_logit/max: " in own):
            return self._selection.has_content("max_attention_logit", None)
        found = Line(b"[x] " + own, context.rank, context.block_attempt, context.header).found()
        return any(isinstance(each, Record) and self._selection.has_content(each.metric, each.name) for each in found)


# -- chunks -----------------------------------------------------------------------------------------------------------


def chunks_of(index: bytes, size: int, read: Read, first: int = 0) -> list[Chunk] | None:
    """The chunks of a log of `size` bytes, by its index; the last one reaches to the end. None: no index fits it.

    Args:
        first: the first byte of the log that is there; chunks before it are left out.
    """
    known = itertools.takewhile(lambda chunk: chunk.end <= size, read_entries(index))
    chunks = [replace(chunk, start=max(chunk.start, first)) for chunk in known if chunk.end > first]
    if not chunks:
        return None
    if chunks[0].start == first > 0:
        chunks[0] = _cut_chunk(chunks, read)
    last = chunks[-1]
    # An index of another log is told by ends where no line ends.
    if any(read(chunk.end - 1, 1) != b"\n" for chunk in (chunks[0], chunks[len(chunks) // 2], last)):
        return None
    if last.end < size:
        chunks.append(Chunk(last.end, size, key=(_attempt_after(last, read), 0, 0), open=True))
    return chunks


def _cut_chunk(chunks: Sequence[Chunk], read: Read) -> Chunk:
    """The first chunk, whose beginning is gone; if an attempt began there, it is of that one."""
    chunk = chunks[0]
    if len(chunks) > 1 and chunks[1].key[0] != chunk.key[0] and _attempt_after(chunk, read) == chunk.key[0]:
        return replace(chunk, key=(chunks[1].key[0], 0, 0))
    return chunk


def _attempt_after(chunk: Chunk, read: Read) -> int:
    """The attempt at the end of a chunk: that of its begin, unless another one begins in it."""
    begun = _RUN_ATTEMPT.findall(read(chunk.start, chunk.end - chunk.start))
    return int(begun[-1]) if begun else chunk.key[0]


def wanted_chunks(chunks: Sequence[Chunk], selection: Selection) -> list[Chunk]:
    """Those of all chunks of a log in which the selection may find lines."""
    mask = ~0 if selection.ranks is None else rank_mask(selection.ranks)
    return [
        chunk
        for chunk, after in itertools.zip_longest(chunks, chunks[1:])
        if chunk.ranks & mask and (chunk.unordered or _reaches(chunk, after, selection))
    ]


def _reaches(chunk: Chunk, after: Chunk | None, selection: Selection) -> bool:
    """Whether the chunk, whose positions go from its own key to that of the one after it, has wanted positions."""
    attempt, last = chunk.key[0], None if after is None or after.open else after.key[0]
    if selection.attempt is not None and not attempt <= selection.attempt <= (last or selection.attempt):
        return False
    if selection.steps is None:
        return True
    first, to = selection.steps
    if last != attempt:
        return True  # a new attempt begins here (or it is not known where this ends): any step may be there
    assert after is not None
    return chunk.key[1] <= to and after.key[1] >= first


def backwards(size: int, read: Read, first: int = 0) -> Iterator[Chunk]:
    """Chunks from the end of a log without index, last first; about nothing more is known than where blocks begin.

    Args:
        first: the first byte of the log that is there.
    """
    end = size
    while end > first:
        at = max(first, end - CHUNK_BYTES)
        block = _block_from(read, at, end) if at > first else None
        start = first if at == first else block[0] if block else at
        if at > first and block is None:  # no block begins in the last CHUNK_BYTES: take more
            start = _wider(read, at, end, first)
        yield Chunk(start, end)
        end = start


def _wider(read: Read, at: int, end: int, first: int) -> int:
    while at > first:
        at = max(first, at - 4 * (end - at))
        block = _block_from(read, at, end) if at > first else None
        if block is not None:
            return block[0]
    return first


def sampled_chunks(size: int, read: Read, samples: int = _SAMPLES, first: int = 0) -> list[Chunk]:
    """Chunks of a log without index: blocks are looked for at places at even distances, from byte `first` on.

    Between two of them steps rise, or an attempt begins: what has a smaller step than what is before it says so. An
    attempt that begins and catches up between two places is not noticed.
    """
    stride = max(CHUNK_BYTES, (size - first) // samples)
    starts: list[tuple[int, int]] = [(first, 1)]
    for at in range(first + stride, size, stride):
        block = _block_from(read, at, min(size, at + stride))
        if block is not None and block[0] > starts[-1][0]:
            starts.append(block)
    return _as_chunks(starts, size)


def _as_chunks(starts: Sequence[tuple[int, int]], size: int) -> list[Chunk]:
    chunks, attempt, latest = [], 1, 0
    for (start, step), (end, _) in itertools.zip_longest(starts, starts[1:], fillvalue=(size, 0)):
        if step < latest:
            attempt += 1  # not its number, but higher than that of what is before it
        latest = step
        chunks.append(Chunk(start, end, key=(attempt, step, 0), unordered=False))
    return chunks


def _block_from(read: Read, at: int, end: int) -> tuple[int, int] | None:
    """Where the first block that begins behind `at`, and is not late, begins, and its step; None: none before `end`."""
    length = _LOOK
    while True:
        data = read(at, min(length, end - at))
        # From the first whole line on: half a line does not say whether it is about a late block.
        for match in _HEADER_INSIDE.finditer(data, data.find(b"\n") + 1):
            if b"] # late " not in match[1]:
                return at + match.start(2), int(match[3])
        if length >= end - at:
            return None
        length *= 4


def attempt_at(read: Read, offset: int, first: int = 0) -> int:
    """The attempt at this place of a log without index; looks back for the line that began it, down to `first`."""
    end = offset
    while end > first:
        start = max(first, end - CHUNK_BYTES)
        # A little more than the piece, for the line that lies across its end.
        found = [m for m in _RUN_ATTEMPT.finditer(read(start, end - start + _LINE)) if m.start() < end - start]
        if found:
            return int(found[-1][1])
        end = start
    return 1
