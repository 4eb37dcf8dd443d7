"""A text log in parts: what was closed lies beside the file that grows, under the name of the bytes that it holds.

    merged.log.000000000000000-000001073744211.gz
    merged.log.000001073744211-000002147490812
    merged.log

The numbers are bytes of the log as if it had never been cut. So a listing of the directory says all: where each part
lies in the log, what is missing, and where the file that grows begins. There is nothing that could disagree with it
after a crash, and a part keeps its name for ever. A part is closed by one rename.

A compressed part appears whole beside the plain one, which is removed then; where both are there, the plain one counts.
A part of no bytes holds a place where nothing else does.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..disk import sync_directory
from .gzipped import DamagedPartError, GzipReader

__all__ = [
    "Layout",
    "LogReader",
    "Part",
    "compressed_path",
    "cut_log",
    "hold_place",
    "layout_of",
    "log_of_part",
    "part_path",
    "parts_of",
    "unfinished_path",
]

_UNFINISHED = ".unfinished"
# Beyond 18 digits no file has bytes.
_NAME = re.compile(r"(.+)\.([0-9]{15,18})-([0-9]{15,18})(\.gz)?")
_PIECE = 2**20


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes `start` to `end` of a log, in a file of their own."""

    start: int
    end: int
    path: Path
    compressed: bool = False


def part_path(log: Path, start: int, end: int) -> Path:
    """Where the plain form of this part lies."""
    return log.with_name(f"{log.name}.{start:015}-{end:015}")


def compressed_path(part: Part) -> Path:
    """Where the compressed form of this part lies."""
    return part.path if part.compressed else part.path.with_name(part.path.name + ".gz")


def unfinished_path(path: Path) -> Path:
    """Where a file is written before it gets this name; hidden, so that `zcat merged.log.*` does not meet it."""
    return path.with_name(f".{path.name}{_UNFINISHED}")


def log_of_part(path: Path) -> Path | None:
    """The log that this is a part of, by its name; None: it is not named as a part."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else path.with_name(match[1])


def parts_of(log: Path) -> list[Part]:
    """The closed parts of a log, oldest first."""
    # A directory or a pipe of such a name is none: to open it would fail, or wait for ever.
    prefix = log.name + "."
    return _parts(log, (entry.name for entry in _scan(log.parent) if entry.name.startswith(prefix) and _is_file(entry)))


def _scan(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False


def _parts(log: Path, names: Iterable[str]) -> list[Part]:
    found = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None and match[1] == log.name and int(match[2]) <= int(match[3]):
            found.append(Part(int(match[2]), int(match[3]), log.with_name(name), match[4] is not None))
    found.sort(key=lambda part: (part.start, part.end, part.compressed))
    parts: list[Part] = []
    for part in found:
        if not parts or (part.start >= parts[-1].end and (part.start, part.end) != (parts[-1].start, parts[-1].end)):
            parts.append(part)
    return parts


@dataclass(frozen=True, slots=True)
class Layout:
    """A log at one moment.

    Attributes:
        parts: the closed ones, oldest first.
        live: device and inode of the file that grows; None: it is not there.
        size: its bytes.
        written: when it was last written to, in seconds since 1970.
    """

    parts: tuple[Part, ...] = ()
    live: tuple[int, int] | None = None
    size: int = 0
    written: float = 0.0

    @property
    def start(self) -> int:
        """The first byte of the log that is there."""
        return self.parts[0].start if self.parts else 0

    @property
    def base(self) -> int:
        """Where the file that grows begins."""
        return self.parts[-1].end if self.parts else 0

    @property
    def end(self) -> int:
        return self.base + self.size

    def holes(self) -> list[tuple[int, int]]:
        """What is missing between the first byte that is there and the last: (start, end) each."""
        out: list[tuple[int, int]] = []
        at = self.start
        for part in self.parts:
            if part.start > at:
                out.append((at, part.start))
            there = part.end if part.compressed else min(part.end, part.start + _size_of(part.path))
            if there < part.end:
                out.append((there, part.end))
            at = part.end
        return out


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 2**63  # compressed meanwhile: it was whole


def layout_of(log: Path) -> Layout:
    """How the log lies on the disk now, also while it is being rotated.

    Raises:
        OSError: its directory cannot be read.
    """
    while True:
        before = _live(log)
        parts = tuple(parts_of(log))
        after = _live(log)
        # The file that grows was not renamed while the parts were listed.
        if _identity(before) == _identity(after):
            if after is None:
                return Layout(parts)
            return Layout(parts, _identity(after), after.st_size, after.st_mtime)


def _live(log: Path) -> os.stat_result | None:
    try:
        found = log.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _identity(found: os.stat_result | None) -> tuple[int, int] | None:
    return None if found is None else (found.st_dev, found.st_ino)


class LogReader:
    """Reads a log in parts as if it were one file; also while it grows, is rotated, compressed and deleted from.

    Attributes:
        layout: of the moment when it was last looked at.
    """

    def __init__(self, log: Path) -> None:
        self.path = log
        self.layout = layout_of(log)
        self._open: Part | None = None  # what `_file` is of; `_LIVE`: of the file that grows
        self._file: GzipReader | _PlainReader | None = None

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files; a later read opens them again."""
        if self._file is not None:
            self._file.close()
        self._file = self._open = None

    @property
    def start(self) -> int:
        """The first byte that is there."""
        return self.layout.start

    def look(self) -> bool:
        """Look at the directory again; True: it is another one than before."""
        before = self.layout
        self.layout = layout_of(self.path)
        return (before.parts, before.live) != (self.layout.parts, self.layout.live)

    def read(self, offset: int, count: int) -> bytes:
        """So many bytes from there; fewer where the log ends, or something is missing.

        Raises:
            DamagedPartError: a compressed part is damaged.
            OSError: a file cannot be read.
        """
        pieces: list[bytes] = []
        looked = False
        while count > 0:
            try:
                piece = self._some(offset, count)
            except FileNotFoundError:  # renamed, compressed or deleted since
                self.close()
                piece = b""
            if piece:
                pieces.append(piece)
                offset, count = offset + len(piece), count - len(piece)
                looked = False
            elif looked or not self.look():
                break
            else:
                looked = True
        return b"".join(pieces)

    def lines(self) -> Iterable[bytes]:
        """All whole and last lines, from the first byte that is there; over holes as if nothing were there."""
        rest = b""
        for start, end in self.pieces():
            if rest:
                yield rest
            rest, at = b"", start
            while at < end and (data := self.read(at, min(_PIECE, end - at))):
                at += len(data)
                *whole, rest = (rest + data).split(b"\n")
                yield from (line + b"\n" for line in whole)
        if rest:
            yield rest

    def pieces(self) -> list[tuple[int, int]]:
        """What is there, without holes: (start, end) each, in order."""
        out = []
        at = self.layout.start
        for start, end in self.layout.holes():
            if start > at:
                out.append((at, start))
            at = end
        if self.layout.end > at:
            out.append((at, self.layout.end))
        return out

    def _some(self, offset: int, count: int) -> bytes:
        """Some of it, from one file."""
        if offset >= self.layout.base:
            return self._reader(_LIVE).read(offset - self.layout.base, count)
        for part in self.layout.parts:
            if part.start <= offset < part.end:
                return self._reader(part).read(offset - part.start, min(count, part.end - offset))
        return b""

    def _reader(self, part: Part) -> GzipReader | _PlainReader:
        if self._open != part or self._file is None or self._is_renamed(self._file):
            self.close()
            path = self.path if part is _LIVE else part.path
            self._file = GzipReader(path) if part.compressed else _PlainReader(path)
            self._open = part
            if self._is_renamed(self._file):
                self.close()
                raise FileNotFoundError
        return self._file

    def _is_renamed(self, file: GzipReader | _PlainReader) -> bool:
        """It was the file that grows, and another one is of that name by now."""
        return self._open is _LIVE and isinstance(file, _PlainReader) and file.identity != self.layout.live


_LIVE = Part(0, 0, Path())


class _PlainReader:
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.identity = _identity(os.fstat(self._fd))

    def read(self, offset: int, count: int) -> bytes:
        return os.pread(self._fd, count, offset)

    def close(self) -> None:
        os.close(self._fd)


# -- cutting ----------------------------------------------------------------------------------------------------------


def cut_log(log: Path, end: int) -> int:
    """Remove what the log has from this byte on, and return where the file that grows begins then.

    At every moment of this the directory is that of a log which ends somewhere between; after a failure it may be
    called again.

    Raises:
        OSError: not possible now.
    """
    layout = layout_of(log)
    if end >= layout.base:
        if layout.size > end - layout.base:
            os.truncate(log, end - layout.base)
        return layout.base
    log.unlink(missing_ok=True)
    kept = [part for part in layout.parts if part.start < end]
    for part in reversed(layout.parts[len(kept) :]):
        _remove(log, part)
    if kept and kept[-1].end > end:
        part = kept.pop()
        if part.compressed:
            _decompress(log, part, end)
        plain = part_path(log, part.start, part.end)
        plain.with_name(plain.name + ".gz").unlink(missing_ok=True)
        size = plain.stat().st_size
        if size >= end - part.start:
            plain.rename(log)
            os.truncate(log, end - part.start)
            return part.start
        # Something of it was missing before: what comes next must not take that place.
        plain.rename(part_path(log, part.start, part.start + size))
        kept.append(Part(part.start, part.start + size, plain))
    if end > (kept[-1].end if kept else 0):
        hold_place(log, end)
    return end


def hold_place(log: Path, base: int) -> None:
    """The file that grows begins there, whether or not there are parts that say so.

    Raises:
        OSError: not possible now.
    """
    os.close(os.open(part_path(log, base, base), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))


def _remove(log: Path, part: Part) -> None:
    plain = part_path(log, part.start, part.end)
    plain.with_name(plain.name + ".gz").unlink(missing_ok=True)
    plain.unlink(missing_ok=True)


def _decompress(log: Path, part: Part, end: int) -> None:
    """The plain form of this part, at least up to byte `end` of the log, as far as it can be read."""
    plain = part_path(log, part.start, part.end)
    unfinished = unfinished_path(plain)
    reader = GzipReader(part.path)
    try:
        with unfinished.open("wb") as out:
            at = 0
            while at < end - part.start:
                data = reader.read(at, min(_PIECE, end - part.start - at))
                if not data:
                    break
                out.write(data)
                at += len(data)
            out.flush()
            os.fsync(out.fileno())  # the compressed form goes next
    except DamagedPartError:
        pass  # what could be read is there; the rest is written again
    finally:
        reader.close()
    unfinished.rename(plain)
    sync_directory(plain.parent)
