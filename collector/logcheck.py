"""Compares text logs with what they should be: byte for byte with the journal's rendering, and merged.log with itself.

Two looks that share no code: `LogComparison` renders the journal again; `MergedLog` reads nothing but the text, with
the rules of SPEC.md section 3. Both stream, and remember a few numbers for each rank.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .protocol.records import Comment, RankBlock
from .protocol.speclog import Renderer
from .sinks.speclog import MERGED_LOG, is_log, log_texts, rank_log

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


class LogComparison:
    """Takes what the journal releases, in order, and compares it with the logs below `output`, from `sizes` on.

    Attributes:
        findings: the first difference of each log.
        sizes: of each log, as the journal has it.
        short: bytes that the journal has and the log lacks at its end, by log.
    """

    def __init__(self, output: Path, sizes: Mapping[str, int]) -> None:
        self.findings: list[Finding] = []
        self.sizes = {name: size for name, size in sizes.items() if is_log(name)}
        self.short: dict[str, int] = {}
        self._output = output
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
            if name in self._different:
                continue
            there = _read(self._output / name, start, len(text))
            if not text.startswith(there):
                self._different.add(name)
                self.findings.append(_difference(self._output / name, start, text, there))
            elif len(there) < len(text):
                self.short[name] = self.short.get(name, 0) + len(text) - len(there)

    def beyond(self) -> dict[str, int]:
        """Bytes that a log has behind all that the journal makes, by log; logs that it does not make at all as well."""
        sizes = dict(self.sizes)
        for path in self._output.glob("rank_*/monitor.log"):
            sizes.setdefault(path.relative_to(self._output).as_posix(), 0)
        sizes.setdefault(MERGED_LOG, 0)
        more = {name: _size(self._output / name) - size for name, size in sizes.items()}
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


def _read(path: Path, start: int, count: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        parts = []
        while count and (part := os.pread(fd, count, start)):
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _difference(path: Path, start: int, text: bytes, there: bytes) -> Finding:
    same = next((i for i, (a, b) in enumerate(zip(text, there, strict=False)) if a != b), min(len(text), len(there)))
    line_start = max(text.rfind(b"\n", 0, same) + 1, same - _SHOWN)
    where = f"{path}: line {_lines_before(path, start + same) + 1}, byte {start + same}"
    return Finding(where, _line(text[line_start:]), _line(there[line_start:]))


def _line(text: bytes) -> str:
    return repr(text.partition(b"\n")[0][: 2 * _SHOWN].decode(errors="backslashreplace"))


def _lines_before(path: Path, end: int) -> int:
    count = 0
    for start in range(0, end, _CHUNK):
        count += _read(path, start, min(_CHUNK, end - start)).count(b"\n")
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
    """

    def __init__(self, output: Path, most: int = 10) -> None:
        self.findings: list[Finding] = []
        self.lines = 0
        self.late: Counter[int] = Counter()
        self._output = output
        self._most = most
        self._kinds: Counter[str] = Counter()
        self._ranks: dict[bytes, _RankLines] = {}
        self._attempt = 0
        self._latest: _At = (0, 0, 0, -1)

    @property
    def records(self) -> dict[int, int]:
        return {lines.rank: lines.records for lines in self._ranks.values()}

    def read(self, size: int) -> None:
        """Read and check the first `size` bytes.

        Raises:
            OSError: it cannot be read.
        """
        offset = 0
        for line in self._some_lines(size):
            self.lines += 1
            self._line(line, offset)
            offset += len(line)

    def _some_lines(self, size: int) -> Iterator[bytes]:
        path = self._output / MERGED_LOG
        if not path.exists():
            return
        with path.open("rb", buffering=_CHUNK) as file:
            while size and (line := file.readline(size)):
                size -= len(line)
                yield line

    def check_rank_logs(self) -> None:
        """Compare each rank's lines with its own log: all of them must stand at its beginning.

        Raises:
            OSError: a log cannot be read.
        """
        for lines in self._ranks.values():
            path = self._output / rank_log(lines.rank)
            digest = hashlib.blake2b()
            for start in range(0, lines.size, _CHUNK):
                digest.update(_read(path, start, min(_CHUNK, lines.size - start)))
            if digest.digest() != lines.digest.digest():
                self._find("rank log", self._first_difference(lines, path))

    def _first_difference(self, lines: _RankLines, path: Path) -> Finding:
        """Read both again, line by line."""
        prefix = b"[rank_%d] " % lines.rank
        of_rank = (line for line in self._some_lines(_size(self._output / MERGED_LOG)) if line.startswith(prefix))
        with path.open("rb") if path.exists() else Path(os.devnull).open("rb") as own:
            offset = 0
            for number, line in enumerate(of_rank, 1):
                there = own.readline()
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
        elif (match := _ATTEMPT.match(rest)) and int(match[1]) != self._attempt:
            self._found(offset, "attempt", f"attempt {self._attempt}, as [collector] said last", _line(rest))

    def _header(self, lines: _RankLines, rest: bytes, offset: int) -> None:
        match = _HEADER.fullmatch(rest)
        if match is None:
            self._found(offset, "header", "a block's header", _line(rest))
            return
        late, lines.late = lines.late, False
        if late:
            return
        at = (self._attempt, int(match[1]), int(match[2] or _AFTER_ALL), lines.rank)
        if at <= self._latest:
            kind = "twice" if at == self._latest else "order"
            self._found(offset, kind, f"a position above {_shown(self._latest)}, or a line `# late`", _shown(at))
        self._latest = max(at, self._latest)

    def _found(self, offset: int, kind: str, expected: str, found: str) -> None:
        self._find(kind, Finding(f"{self._output / MERGED_LOG}: line {self.lines}, byte {offset}", expected, found))

    def _find(self, kind: str, finding: Finding) -> None:
        self._kinds[kind] += 1
        if self._kinds[kind] <= self._most:
            self.findings.append(finding)


def _shown(at: _At) -> str:
    attempt, step, micro_step, rank = at
    return f"attempt {attempt} step {step}{'' if micro_step == _AFTER_ALL else f' micro_step {micro_step}'} rank {rank}"
