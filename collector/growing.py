"""Follows a text file that another process writes: whole lines, each once, whatever happens to the file meanwhile.

- Rotated by the collector (`sinks.parts`): it goes on at the next byte of the log, in whichever part that is by now,
  compressed or not.
- Renamed by something else, and another one made in its place: the old one is read to its end, then the new one from
  its start.
- Truncated to nothing, or replaced by something else in place (copy and truncate): from the start again.
- Cut somewhere in the middle and written again from there (a collector that was restarted after a power failure): what
  comes again as it was is passed over.
"""

from __future__ import annotations

import os
from pathlib import Path

from .sinks.gzipped import GzipReader
from .sinks.parts import Layout, LogReader, Part, layout_of

__all__ = ["GrowingFile"]

# What is taken at once: bounds the memory, and how long the first line waits for the last one.
_PIECE = 2**20
# How much of what was given is remembered. A collector cuts at most what one write had written.
_KEPT = 8 * 2**20
# These last bytes must still be there before anything that is new: if not, the file has become another one.
_ANCHOR = 256


class GrowingFile:
    """One file, followed from a position on; with its closed parts (`sinks.parts`) it is one log.

    Attributes:
        missed: bytes that were deleted, or lost, before they could be given.

    Args:
        path: it need not be there yet.
        position: where in the log to start, at the start of a line; only where the log is there.
    """

    def __init__(self, path: Path, position: int = 0) -> None:
        self._path = path
        self.missed = 0
        self._file: _Opened | None = None
        self._at = position  # where in the log to go on, while no file is open
        self._base = 0  # where in the log the open file begins
        self._old = False  # another file was seen in the place of this one
        self._position = 0  # in the file: what was given ends here
        self._kept = bytearray()  # the last of what was given
        self._again = b""  # what was given before from `_position` on, before the file was cut there
        if position:
            with LogReader(path) as log:
                start = max(log.start, position - _KEPT)
                self._kept += log.read(start, position - start)
        self._go_on_at(position)

    def lines(self) -> bytes:
        """The whole lines that have come; empty when there are none now (look again soon).

        Raises:
            OSError: it cannot be read.
        """
        while self._file is not None or self._go_on_at(self._at):
            self._look_for_cuts()
            while data := self._whole_lines():
                new = self._unseen(data)
                if new:
                    return new
            if not self._next_file():
                break
        return b""

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _restart(self) -> None:
        self._position, self._kept, self._again, self._old = 0, bytearray(), b"", False

    def _go_on_at(self, position: int, layout: Layout | None = None) -> bool:
        """Open the file with this byte of the log; False: it is not there (yet)."""
        layout = layout_of(self._path) if layout is None else layout
        part = next((part for part in layout.parts if part.start <= position < part.end), None)
        after = next((each.start for each in layout.parts if each.start > position), layout.base)
        if part is None and position < after:  # a hole
            self.missed += after - position
            self._kept.clear()
            return self._go_on_at(after, layout)
        self.close()
        self._at = position
        try:
            self._file = _Opened(self._path, None) if part is None else _Opened(part.path, part)
        except FileNotFoundError:
            return False
        if part is None and self._file.identity != layout.live:  # rotated since
            return self._go_on_at(position)
        self._base = layout.base if part is None else part.start
        self._position, self._again, self._old = position - self._base, b"", False
        return True

    def _look_for_cuts(self) -> None:
        assert self._file is not None
        if self._file.part is not None:
            return
        size = self._file.size()
        cut = self._position - size
        if size > 0 and 0 < cut < len(self._kept):
            # Back to the start of the line that was cut: only whole lines are compared.
            start = self._kept.rfind(b"\n", 0, -cut) + 1
            self._again = bytes(self._kept[start:]) + self._again
            self._position -= len(self._kept) - start
            del self._kept[start:]
        elif cut > 0:
            self._restart()
        anchor = self._kept[-min(_ANCHOR, self._position) :] if self._position else b""
        if anchor and self._file.read(self._position - len(anchor), len(anchor)) != anchor:
            self._restart()

    def _whole_lines(self) -> bytes:
        assert self._file is not None
        length = _PIECE
        while True:
            data = self._file.read(self._position, length)
            end = data.rfind(b"\n") + 1
            if end or len(data) < length:
                break
            length *= 2  # a line that is longer than a piece
        self._position += end
        whole = data[:end]
        self._kept += whole
        if len(self._kept) > 2 * _KEPT:  # not each time: it moves all the rest
            del self._kept[:-_KEPT]
        return whole

    def _unseen(self, data: bytes) -> bytes:
        """Without the lines that were given before the file was cut."""
        if not self._again:
            return data
        same = _common(data, self._again)
        known = data.rfind(b"\n", 0, same) + 1
        differs = same < min(len(data), len(self._again))
        self._again = b"" if differs else self._again[known:]
        return data[known:]

    def _next_file(self) -> bool:
        """At the end of this file: go over to the one with what comes next, if there is one."""
        assert self._file is not None
        part = self._file.part
        end = self._base + self._position
        if part is not None:
            self.missed += part.end - end  # of a part that was cut
            return self._go_on_at(part.end)
        try:
            there = self._path.stat()
        except FileNotFoundError:  # renamed, and the new one is not made yet, or is closed already
            layout = layout_of(self._path)
            return layout.base > end and self._go_on_at(end, layout)
        if (there.st_dev, there.st_ino) == self._file.identity:
            return False
        if not self._old:
            # Look once more before it is left: whoever renamed it may still write a last line to it.
            self._old = True
            return False
        layout = layout_of(self._path)
        if layout.parts or self._base:
            return self._go_on_at(end, layout)
        self._restart()  # something else has renamed it: another log
        return self._go_on_at(0, layout)


class _Opened:
    """A file that is read: the one that grows, or a closed part of it."""

    def __init__(self, path: Path, part: Part | None) -> None:
        self.part = part
        self._gzip = GzipReader(path) if part is not None and part.compressed else None
        self._fd = -1 if self._gzip is not None else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = None if self._fd < 0 else os.fstat(self._fd)
        self.identity = None if found is None else (found.st_dev, found.st_ino)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, offset: int, count: int) -> bytes:
        if self.part is not None:
            count = min(count, self.part.end - self.part.start - offset)
        return os.pread(self._fd, count, offset) if self._gzip is None else self._gzip.read(offset, count)

    def close(self) -> None:
        if self._gzip is not None:
            self._gzip.close()
        else:
            os.close(self._fd)


def _common(a: bytes, b: bytes) -> int:
    """How many first bytes are the same."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
