"""Files that only grow, written so that a restart finds where it was: the ground of all sinks that write text.

Each file is a `LogFile`: what of its bytes is in the file already, and what waits. All the rest follows from these two:
a short write leaves the rest waiting, a retry goes on at that byte, a restart finds in the file the first of the bytes
that it makes again.

A file may be rotated: then `LogFile.path` holds the end of the log only, from byte `base` on, and the rest lies in
closed parts beside it (`parts`). All positions and sizes are those of the log as if it were one file, so that a
checkpoint need not know how it is cut.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from ..disk import set_aside
from ..protocol.wording import counted
from .gzipped import DamagedPartError
from .parts import LogReader, cut_log, hold_place, layout_of, part_path
from .retention import Rotation

__all__ = ["Buffer", "LogFiles", "OpenFiles", "write_at"]

_logger = logging.getLogger(__name__)

# Of the files that this process may open, the logs take half: the sockets of the ranks, the journal and other sinks
# need theirs too. Opening a log again costs about as much as writing a block.
_SHARE_OF_FILES = 2
_LEAST_OPEN_FILES = 64

# Copied at once.
_PIECE = 2**20

# IOV_MAX of Linux: one call takes no more buffers.
_MAX_PARTS = 1_024

Buffer: TypeAlias = bytes | memoryview

# In a checkpoint, after a file's name: where in the log the file that grows begins.
_BASE = ":base"


class LogFiles:
    """Files below `output`, by their relative names; the file side of a `Sink`.

    With `resume`, what a file holds beyond the checkpoint is compared with what is made again, and stays where it is:
    somebody who follows it does not see a line twice. A file that was not resumed is appended to.

    Args:
        rotation: when this file is to be rotated; None: never.
        closed: called with a file's name when a part of it has been closed.
    """

    def __init__(
        self,
        output: Path,
        rotation: Callable[[str], Rotation | None] = lambda _: None,
        closed: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._output = output
        self._rotation = rotation
        self._closed = closed
        self._files = OpenFiles()
        self._logs: dict[str, LogFile] = {}
        self._waiting: dict[str, LogFile] = {}  # in the order in which they came to wait
        self._bases: dict[str, int] = {}  # at least there begin the files that grow, by checkpoints that were seen

    @property
    def unwritten(self) -> int:
        """How many bytes wait for `push`. While there are any, `sizes` is ahead of the files."""
        return sum(len(log.waiting) for log in self._waiting.values())

    def take(self, name: str, parts: list[Buffer]) -> None:
        """These come next in that file; `push` writes them."""
        self._log(name).take(parts)
        self._waiting[name] = self._logs[name]

    def size(self, name: str) -> int:
        """Of one file, once nothing is `unwritten`.

        Raises:
            OSError: its directory cannot be read.
        """
        log = self._log(name)
        log.find_end()
        return log.position + len(log.waiting)

    def sizes(self) -> Mapping[str, int]:
        """Per file: its size once nothing is `unwritten`; and where a file that was rotated begins."""
        sizes = {name: log.position + len(log.waiting) for name, log in self._logs.items()}
        return {**sizes, **{name + _BASE: log.base for name, log in self._logs.items() if log.base}}

    def files(self) -> Mapping[Path, int]:
        """Per file: its size once nothing is `unwritten`."""
        return {log.path: log.position + len(log.waiting) for log in self._logs.values()}

    def push(self) -> None:
        """Write what waits, of each file from the byte where it stopped; does nothing when nothing waits.

        Raises:
            OSError: of the first file that could not be written; the others are.
        """
        self._each(LogFile.push, list(self._waiting.values()))

    def reaches(self, sizes: Mapping[str, int]) -> bool:
        """Whether no file is shorter than this checkpoint says, nor lacks something before that."""
        self._note_bases(sizes)
        files = [(name, size) for name, size in sizes.items() if not name.endswith(_BASE)]
        return all(_reaches(self._output / name, size, self._bases.get(name, 0)) for name, size in files)

    def _note_bases(self, sizes: Mapping[str, int]) -> None:
        for name, base in sizes.items():
            if name.endswith(_BASE):
                log = name.removesuffix(_BASE)
                self._bases[log] = max(base, self._bases.get(log, 0))

    def resume(self, sizes: Mapping[str, int]) -> None:
        """Go on from a checkpoint, with these files: see `Sink`. One that is shorter than at the checkpoint gets a
        warning, and is appended to; its size counts from then on.

        Raises:
            OSError: the output directory cannot be read.
        """
        self._waiting.clear()
        self._logs.clear()
        self._note_bases(sizes)
        for name, size in sizes.items():
            if not name.endswith(_BASE):
                log = self._logs[name] = self._made(name)
                log.resume(size, self._bases.get(name, 0))

    def settle(self) -> None:
        """The repeated calls are over: cut from the files what they did not make.

        Raises:
            OSError: of the first file that could not be cut; call again. What merely waits is left to `push`.
        """
        self._each(LogFile.settle, list(self._logs.values()))

    def close(self) -> None:
        """Let go of all files. What is `unwritten` is gone from here, not from the journal."""
        self._files.close()

    def _log(self, name: str) -> LogFile:
        log = self._logs.get(name)
        if log is None:
            log = self._logs[name] = self._made(name)
        return log

    def _made(self, name: str) -> LogFile:
        return LogFile(self._output / name, self._rotation(name), lambda: self._closed(name))

    def _each(self, call: Callable[[LogFile, OpenFiles], None], logs: Sequence[LogFile]) -> None:
        failures = [failure for log in logs if (failure := _failure(call, log, self._files)) is not None]
        self._waiting = {name: log for name, log in self._waiting.items() if log.waiting}
        if failures:
            raise failures[0]


def _failure(call: Callable[[LogFile, OpenFiles], None], log: LogFile, files: OpenFiles) -> OSError | None:
    try:
        call(log, files)
    except OSError as e:
        # With the file's name, which `os.write` and `os.ftruncate` leave out.
        return OSError(e.errno, e.strerror, str(log.path))
    return None


class LogFile:
    """One file: `position` bytes of what was rendered are in it, `waiting` comes next.

    While the file is `ahead`, it holds more than `position`: what was written before a restart.
    """

    def __init__(self, path: Path, rotation: Rotation | None, closed: Callable[[], None]) -> None:
        self.path = path
        self.base = 0  # where in the log the file at `path` begins
        self.position = 0
        self._rotation = rotation
        self._closed = closed
        self._told = False  # that it could not be rotated
        self._written = 0.0  # when, in seconds since 1970; kept up to date where the rotation asks for it
        self.waiting: bytes | bytearray = b""
        # What comes after `waiting`, as it was rendered: as long as nothing has to wait for a second call it goes to
        # the file from there. A copy of everything would be a tenth of all the work.
        self._parts: list[Buffer] = []
        self._size = 0  # of the log, as far as this process knows
        # Looking may fail as writing may, and what is taken must be kept: so it is a part of `push`.
        self._is_known = False

    @property
    def ahead(self) -> bool:
        return self._size > self.position

    def find_end(self) -> None:
        """Where it was not resumed: whatever the file holds stays before what comes.

        Raises:
            OSError: its directory cannot be read.
        """
        if not self._is_known:
            self._look()
            self.position = self._size

    def _look(self) -> None:
        layout = layout_of(self.path)
        self.base, self._size, self._written = layout.base, layout.end, layout.written
        self._is_known = True

    def resume(self, checkpoint: int, base: int) -> None:
        self._look()
        if self.base < base:
            _logger.warning(
                "%s lacks its part up to byte %d; going on, `rankd rebuild` makes the log again", self.path, base
            )
            hold_place(self.path, base)
            self._look()
        self.position = min(checkpoint, self._size)
        if self._size < checkpoint:
            _logger.warning(
                "%s is %s long, and was %d at the last checkpoint: something else truncated it; %s of the log "
                "cannot be found (`rankd rebuild` makes it again); going on after what is left",
                self.path, counted(self._size, "byte"), checkpoint, counted(checkpoint - self._size, "byte"),
            )  # fmt: skip

    def take(self, parts: list[Buffer]) -> None:
        """`parts` come after what waits."""
        self._parts += parts

    def _gather(self) -> None:
        """All of it into `waiting`."""
        if self._parts:
            # A bytearray grows in place, however long the disk stays full.
            self.waiting = bytearray(self.waiting) if isinstance(self.waiting, bytes) else self.waiting
            self.waiting += b"".join(self._parts)
            self._parts = []

    def _advance(self, count: int) -> None:
        """The first `count` bytes of what waits are in the file."""
        self.position += count
        if count == len(self.waiting):
            self.waiting = b""
        elif count:
            self.waiting = bytearray(memoryview(self.waiting)[count:])

    def push(self, files: OpenFiles) -> None:
        """Write what waits, except for what the file holds already."""
        try:
            self.find_end()
            if not self.ahead and not self.waiting:
                if self._parts and self._rotation is not None:
                    self._rotate(self._rotation, files)
                self._push_parts(files.open(self.path))
        finally:
            self._gather()
        while self.waiting:
            if self.ahead:
                self._skip(files)
                continue
            # A full disk writes a part, and fails at the next call only.
            written = os.write(files.open(self.path), self.waiting)
            self._advance(written)
            self._size = self.position

    def _rotate(self, rotation: Rotation, files: OpenFiles) -> None:
        """Close the file if it is time. Whatever is in it ends here with a whole block, and more will follow."""
        now = time.time() if rotation.every is not None else 0.0
        due = rotation.due(self._size - self.base, self._written, now)
        self._written = now
        if not due:
            return
        try:
            # Where something else has cut the file (copytruncate), its end is what is left of it.
            size = os.fstat(files.open(self.path)).st_size
            self.path.rename(part_path(self.path, max(self.base, self.position - size), self.position))
        except OSError as e:
            if not self._told:
                _logger.warning("%s cannot be rotated now (%s); it goes on growing", self.path, e.strerror)
            self._told = True
            return
        files.forget(self.path)
        self.base, self._told = self.position, False
        self._closed()

    def _push_parts(self, fd: int) -> None:
        """Write the parts where they lie; at the first that is not written whole, the rest is gathered and waits."""
        while self._parts:
            batch, self._parts = self._parts[:_MAX_PARTS], self._parts[_MAX_PARTS:]
            try:
                written = os.writev(fd, batch)
            except OSError:
                self._parts = batch + self._parts
                raise
            self.position += written
            self._size = self.position
            if written < sum(map(len, batch)):
                self._parts = [memoryview(b"".join(batch))[written:], *self._parts]
                return

    def _skip(self, files: OpenFiles) -> None:
        """Pass over what the log holds; where that is something else, cut it there."""
        there = self._there(files)
        if there is None:
            return
        same = len(there) if self.waiting.startswith(there) else _common(there, self.waiting)
        self._advance(same)
        if there and same == len(there):
            return
        # A power cut can leave zeros at the end of a file; or somebody has edited or cut it.
        _logger.warning(
            "%s differs from the journal after byte %d; writing it again from there", self.path, self.position
        )
        if there or self.position < self.base:  # otherwise the file ends before this byte, and this would fill it up
            self._cut(files)
        self._size = self.position

    def _there(self, files: OpenFiles) -> bytes | None:
        """What the log holds from `position` on, as much of it as waits; None: that was deleted, and is passed over."""
        count = min(len(self.waiting), self._size - self.position)
        if self.position >= self.base:
            return os.pread(files.open(self.path), count, self.position - self.base)
        with LogReader(self.path) as log:
            if self.position < log.start:
                self._advance(min(count, log.start - self.position))
                return None
            try:
                return log.read(self.position, count)
            except DamagedPartError:
                return b""

    def _cut(self, files: OpenFiles) -> None:
        # Lines that the journal has lost are all that is left of these records.
        if aside := set_aside(self.path, self.position, self._pieces()):
            _logger.warning("%s: what the journal does not make of it is kept in %s", self.path, aside.name)
        if self.position < self.base:
            files.forget(self.path)
            self.base = cut_log(self.path, self.position)
        else:
            os.ftruncate(files.open(self.path), self.position - self.base)
        self._size = self.position

    def _pieces(self) -> Iterator[bytes]:
        """What the log holds from `position` on, as far as it can be read."""
        with LogReader(self.path) as log, suppress(DamagedPartError):
            at = max(self.position, log.start)
            while piece := log.read(at, _PIECE):
                yield piece
                at += len(piece)

    def settle(self, files: OpenFiles) -> None:
        """Cut what the log holds beyond what was rendered."""
        try:
            self.push(files)
        except OSError:
            if self.ahead:
                raise
            return  # what waits for room is left to `retry`, and there is nothing to cut
        if self.ahead:
            self._cut(files)


def _common(a: bytes, b: bytes | bytearray) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _reaches(path: Path, size: int, base: int) -> bool:
    layout = layout_of(path)
    return max(layout.base, base) + layout.size >= size and not any(start < size for start, _ in layout.holes())


def write_at(fd: int, parts: Sequence[Buffer], offset: int) -> None:
    """Write `parts` one after the other, from byte `offset` of a file on that was not opened to append.

    Raises:
        OSError: not all of it could be written.
    """
    for start in range(0, len(parts), _MAX_PARTS):
        batch = parts[start : start + _MAX_PARTS]
        size = sum(map(len, batch))
        written = os.pwritev(fd, batch, offset)
        if written < size:
            # A full disk writes a part, and fails at the next call only.
            left = memoryview(b"".join(batch))
            while written < size:
                written += os.pwrite(fd, left[written:], offset + written)
        offset += size


class OpenFiles:
    """File descriptors of logs; beyond a number of them, the one that was not used for longest is closed.

    Args:
        most: how many; None: a share of what this process may open.
        append: what is written goes to the end of the file, wherever that is.
    """

    def __init__(self, most: int | None = None, *, append: bool = True) -> None:
        # Readable as well, to compare what a restart finds.
        self._flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if append else 0)
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = most or max(_LEAST_OPEN_FILES, allowed // _SHARE_OF_FILES)
        self._open: OrderedDict[Path, int] = OrderedDict()

    def open(self, path: Path) -> int:
        fd = self._open.get(path)
        if fd is not None:
            self._open.move_to_end(path)
            return fd
        while len(self._open) >= self._most:
            os.close(self._open.popitem(last=False)[1])
        fd = _open_or_make(path, self._flags)
        self._open[path] = fd
        return fd

    def forget(self, path: Path) -> None:
        """Close this one: another file will be of this name."""
        fd = self._open.pop(path, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def _open_or_make(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)
