"""Compares text logs with what they should be: byte for byte with the journal's rendering, and merged.log with itself.

Two looks that share no code: `LogComparison` renders the journal again; `MergedLog` reads nothing but the text, with
the rules of SPEC.md section 3. Both stream, and remember a few numbers for each rank. Of a rotated log (`sinks.parts`)
all parts are read as one; what is gone at its beginning cannot be compared.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .protocol.records import Comment, RankBlock
from .protocol.speclog import Renderer
from .sinks.gzipped import DamagedPartError
from .sinks.parts import LogReader
from .sinks.speclog import MERGED_LOG, is_log, log_texts, rank_log, rank_logs_in

__all__ = ["Finding", "LogComparison", "MergedLog"]

_SHOWN = 160
_CHUNK = 2**20
# Rendered and compared at once: some megabytes of text.
_PART_RECORDS = 2**15


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it must be: where, what was expected, and what is there."""

    where: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, found {self.found}"


# -- against the journal ----------------------------------------------------------------------------------------------


class Logs:
    """The text logs below `output`, read by their names from anywhere. Holds no file open: there may be thousands."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self._readers: dict[str, LogReader] = {}

    def of(self, name: str) -> LogReader:
        """The log of this relative name; it need not be there."""
        if name not in self._readers:
            self._readers[name] = LogReader(self.output / name)
        return self._readers[name]

    def read(self, name: str, start: int, count: int) -> bytes:
        """What the log holds there; fewer bytes at its end, or where something is missing.

        Raises:
            DamagedPartError: a compressed part is damaged.
            OSError: it cannot be read.
        """
        with self.of(name) as log:
            return log.read(start, count)

    def names(self) -> set[str]:
        """Of all logs that are there."""
        return {MERGED_LOG, *rank_logs_in(self.output)}


class LogComparison:
    """Takes what the journal releases, in order, and compares it with the logs, from `sizes` on.

    Attributes:
        findings: the first difference of each log.
        sizes: of each log, as the journal has it.
        short: bytes that the journal has and the log lacks at its end, by log.
    """

    def __init__(self, logs: Logs, sizes: Mapping[str, int]) -> None:
        self.findings: list[Finding] = []
        self.sizes = {name: size for name, size in sizes.items() if is_log(name)}
        self.short: dict[str, int] = {}
        self._logs = logs
        self._renderer = Renderer()
        self._different: set[str] = set()

    def expect(self, released: Iterable[RankBlock | Comment]) -> None:
        """These come next.

        Raises:
            OSError: a log cannot be read.
        """
        for part in _parts(released):
            self._compare(part)

    def _compare(self, released: Sequence[RankBlock | Comment]) -> None:
        for name, text in log_texts(self._renderer, released).items():
            start = self.sizes.get(name, 0)
            self.sizes[name] = start + len(text)
            if name not in self._different:
                # What was deleted at the log's beginning is passed over.
                gone = min(len(text), max(0, self._logs.of(name).start - start))
                if gone < len(text):
                    self._compare_text(name, start + gone, text[gone:])

    def _compare_text(self, name: str, start: int, text: bytes) -> None:
        log = self._logs.of(name)
        try:
            there = self._logs.read(name, start, len(text))
        except DamagedPartError as e:
            self._different.add(name)
            self.findings.append(Finding(str(e.filename), "a whole part of the log", str(e.strerror)))
            return
        if not there and start < log.start:  # deleted since the directory was listed
            gone = min(len(text), log.start - start)
            self._compare_text(name, start + gone, text[gone:])
            return
        # A log that goes on behind something missing is no shorter, it is another one.
        missing = len(there) < len(text) and start + len(there) < log.layout.end
        if missing or not text.startswith(there):
            self._different.add(name)
            self.findings.append(_difference(self._logs, name, start, text, there))
        elif len(there) < len(text):
            self.short[name] = self.short.get(name, 0) + len(text) - len(there)

    def beyond(self) -> dict[str, int]:
        """Bytes that a log has behind all that the journal makes, by log; logs that it does not make at all as well."""
        sizes = {**dict.fromkeys(self._logs.names(), 0), **self.sizes}
        more = {name: LogReader(self._logs.output / name).layout.end - size for name, size in sizes.items()}
        return {name: count for name, count in more.items() if count > 0 and name not in self._different}


def _parts(released: Iterable[RankBlock | Comment]) -> Iterator[list[RankBlock | Comment]]:
    """Cut into parts of some records each: their text is ten times as large as they are."""
    part: list[RankBlock | Comment] = []
    records = 0
    for each in released:
        part.append(each)
        records += sum(frame.record_count for frame in each.frames) if isinstance(each, RankBlock) else 1
        if records >= _PART_RECORDS:
            yield part
            part, records = [], 0
    if part:
        yield part


def _difference(logs: Logs, name: str, start: int, text: bytes, there: bytes) -> Finding:
    same = next((i for i, (a, b) in enumerate(zip(text, there, strict=False)) if a != b), min(len(text), len(there)))
    line_start = max(text.rfind(b"\n", 0, same) + 1, same - _SHOWN)
    where = f"{logs.output / name}: line {_lines_before(logs, name, start + same) + 1}, byte {start + same}"
    return Finding(where, _line(text[line_start:]), _line(there[line_start:]))


def _line(text: bytes) -> str:
    return repr(text.partition(b"\n")[0][: 2 * _SHOWN].decode(errors="backslashreplace"))


def _lines_before(logs: Logs, name: str, end: int) -> int:
    """Of those that are there."""
    count = 0
    for at in range(logs.of(name).start, end, _CHUNK):
        count += logs.read(name, at, min(_CHUNK, end - at)).count(b"\n")
    return count


# -- the merged log by itself -----------------------------------------------------------------------------------------

_HEADER = re.compile(rb'\{ "step": ([1-9][0-9]*)(?:, "micro_step": ([1-9][0-9]*))? \}\n')
_ATTEMPT = re.compile(rb"# attempt ([1-9][0-9]*) ")
_HEADER_START = b'{ "step": '
_SUMMARY_START = b"{ step:["
_LOGIT_START = b"step:["
_AFTER_ALL = 2**64

# (attempt, step, micro_step or "after all", rank)
_At = tuple[int, int, int, int]


@dataclass(slots=True)
class _RankLines:
    """A rank's lines of merged.log so far: their digest without the prefix, and how many records they are."""

    rank: int
    size: int = 0
    records: int = 0
    digest: hashlib.blake2b = field(default_factory=hashlib.blake2b)
    late: bool = False


class MergedLog:
    """merged.log, read by itself.

    Attributes:
        findings: what breaks the rules, the first `most` of each kind.
        lines: how many were read.
        records: by rank.
        late: blocks that are marked late, by rank.
        whole: it could be read to its end.
        unmatched: ranks whose lines here could not be compared with their own logs, because older parts were deleted.
    """

    def __init__(self, logs: Logs, most: int = 10) -> None:
        self.findings: list[Finding] = []
        self.lines = 0
        self.late: Counter[int] = Counter()
        self.whole = True
        self.unmatched: list[int] = []
        self._logs = logs
        self._path = logs.output / MERGED_LOG
        self._most = most
        self._kinds: Counter[str] = Counter()
        self._ranks: dict[bytes, _RankLines] = {}
        # Of a log whose beginning is gone nobody knows, until a line says so.
        self._attempt = None if logs.of(MERGED_LOG).start else 0
        self._latest: _At = (0, 0, 0, -1)

    @property
    def records(self) -> dict[int, int]:
        return {lines.rank: lines.records for lines in self._ranks.values()}

    def read(self, size: int) -> None:
        """Read and check the first `size` bytes, as far as they are there.

        Raises:
            OSError: it cannot be read.
        """
        end = 0
        with LogReader(self._path) as log:
            try:
                for offset, line in _lines(log, size):
                    self.lines += 1
                    self._line(line, offset)
                    end = offset + len(line)
            except DamagedPartError as e:
                self._find("damage", Finding(str(e.filename), "a whole part of the log", str(e.strerror)))
                self.whole = False
                return
            if self.lines and end < min(size, log.layout.end):
                self._found(end, "hole", "the log's next part", "that it is missing")
                self.whole = False

    def check_rank_logs(self, sizes: Mapping[str, int] | None) -> None:
        """Compare each rank's lines with its own log, where they must stand as they are.

        Args:
            sizes: of the logs that these lines are from; needed where older parts of a log were deleted.

        Raises:
            OSError: a log cannot be read.
        """
        for lines in self._ranks.values():
            name = rank_log(lines.rank)
            own = self._logs.of(name)
            start = 0
            if own.start or self._logs.of(MERGED_LOG).start:
                start = -1 if sizes is None else sizes.get(name, 0) - lines.size
            if start < own.start:
                self.unmatched.append(lines.rank)
                continue
            digest = hashlib.blake2b()
            try:
                for at in range(start, start + lines.size, _CHUNK):
                    digest.update(self._logs.read(name, at, min(_CHUNK, start + lines.size - at)))
            except DamagedPartError as e:
                self._find("damage", Finding(str(e.filename), "a whole part of the log", str(e.strerror)))
                continue
            if digest.digest() != lines.digest.digest():
                self._find("rank log", self._first_difference(lines, own.path, start))

    def _first_difference(self, lines: _RankLines, path: Path, offset: int) -> Finding:
        """Read both again, line by line."""
        prefix = b"[rank_%d] " % lines.rank
        with LogReader(self._path) as merged, LogReader(path) as own:
            of_rank = (line for _, line in _lines(merged, sys.maxsize) if line.startswith(prefix))
            for number, line in enumerate(of_rank, 1):
                there = own.read(offset, max(len(line), 2 * _SHOWN))
                there = there[: there.find(b"\n") + 1] or there
                if line != prefix + there:
                    where = f"{path}: line {number}, byte {offset}"
                    return Finding(where, f"the line of merged.log {_line(line[len(prefix) :])}", _line(there))
                offset += len(there)
        return Finding(str(path), "the rank's lines of merged.log", "others (the files change)")

    def _line(self, line: bytes, offset: int) -> None:
        end = line.find(b"] ") + 2
        lines = self._ranks.get(line[:end])
        if lines is None:
            if line.startswith(b"[collector] # "):
                self._about_the_run(line[end:])
                return
            if (prefix := re.fullmatch(rb"\[rank_(0|[1-9][0-9]*)\] ", line[:end])) is None:
                self._found(offset, "prefix", "a line that begins with [rank_N] or [collector] #", _line(line))
                return
            lines = self._ranks[line[:end]] = _RankLines(int(prefix[1]))
        rest = line[end:]
        lines.digest.update(rest)
        lines.size += len(rest)
        if rest.startswith(_HEADER_START):
            self._header(lines, rest, offset)
        elif rest.startswith(b"# "):
            self._comment(lines, rest, offset)
        elif rest.startswith(_SUMMARY_START):
            lines.records += rest.count(b", ")
        elif not rest.startswith(_LOGIT_START) or rest.endswith(b"]\n"):  # not a derived mean or maximum
            lines.records += 1

    def _about_the_run(self, rest: bytes) -> None:
        if match := _ATTEMPT.match(rest):
            self._attempt = int(match[1])

    def _comment(self, lines: _RankLines, rest: bytes, offset: int) -> None:
        if rest.startswith(b"# late "):
            lines.late = True
            self.late[lines.rank] += 1
        elif (match := _ATTEMPT.match(rest)) and self._attempt is None:
            self._attempt = int(match[1])
        elif match and int(match[1]) != self._attempt:
            self._found(offset, "attempt", f"attempt {self._attempt}, as [collector] said last", _line(rest))

    def _header(self, lines: _RankLines, rest: bytes, offset: int) -> None:
        match = _HEADER.fullmatch(rest)
        if match is None:
            self._found(offset, "header", "a block's header", _line(rest))
            return
        late, lines.late = lines.late, False
        if late:
            return
        at = (self._attempt or 0, int(match[1]), int(match[2] or _AFTER_ALL), lines.rank)
        if at <= self._latest:
            kind = "twice" if at == self._latest else "order"
            self._found(offset, kind, f"a position above {_shown(self._latest)}, or a line `# late`", _shown(at))
        self._latest = max(at, self._latest)

    def _found(self, offset: int, kind: str, expected: str, found: str) -> None:
        self._find(kind, Finding(f"{self._path}: line {self.lines}, byte {offset}", expected, found))

    def _find(self, kind: str, finding: Finding) -> None:
        self._kinds[kind] += 1
        if self._kinds[kind] <= self._most:
            self.findings.append(finding)


def _lines(log: LogReader, size: int) -> Iterator[tuple[int, bytes]]:
    """The lines of a log and where each begins, from the first that is there up to `size` or something missing."""
    at, rest = log.start, b""
    begin = at
    while at < size and (data := log.read(at, min(_CHUNK, size - at))):
        at += len(data)
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield begin, line + b"\n"
            begin += len(line) + 1
    if rest:
        yield begin, rest


def _shown(at: _At) -> str:
    attempt, step, micro_step, rank = at
    return f"attempt {attempt} step {step}{'' if micro_step == _AFTER_ALL else f' micro_step {micro_step}'} rank {rank}"
