"""Follows a text file that another process writes: whole lines, each once, whatever happens to the file meanwhile.

- Renamed, and another one made in its place (rotation): the old one is read to its end, then the new one from its
  start.
- Truncated to nothing, or replaced by something else in place (copy and truncate): from the start again.
- Cut somewhere in the middle and written again from there (a collector that was restarted after a power failure): what
  comes again as it was is passed over.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["GrowingFile"]

# What is taken at once: bounds the memory, and how long the first line waits for the last one.
_PIECE = 2**20
# How much of what was given is remembered. A collector cuts at most what one write had written.
_KEPT = 8 * 2**20
# These last bytes must still be there before anything that is new: if not, the file has become another one.
_ANCHOR = 256


class GrowingFile:
    """One file, followed from a position on.

    Args:
        path: it need not be there yet.
        position: where to start, at the start of a line; only where the file is there.
    """

    def __init__(self, path: Path, position: int = 0) -> None:
        self._path = path
        self._fd = -1
        self._old = False  # another file was seen in the place of this one
        self._position = 0  # what was given ends here
        self._kept = bytearray()  # the last of what was given
        self._again = b""  # what was given before from `_position` on, before the file was cut there
        self._open()
        if position and self._fd >= 0:
            self._position = position
            length = min(position, _KEPT)
            self._kept += os.pread(self._fd, length, position - length)

    def lines(self) -> bytes:
        """The whole lines that have come; empty when there are none now (look again soon)."""
        if self._fd < 0 and not self._open():
            return b""
        self._look_for_cuts()
        while data := self._whole_lines():
            new = self._unseen(data)
            if new:
                return new
        return self._next_file()

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> bool:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        self._restart()
        return True

    def _restart(self) -> None:
        self._position, self._kept, self._again, self._old = 0, bytearray(), b"", False

    def _look_for_cuts(self) -> None:
        size = os.fstat(self._fd).st_size
        cut = self._position - size
        if size > 0 and 0 < cut < len(self._kept):
            # Back to the start of the line that was cut: only whole lines are compared.
            start = self._kept.rfind(b"\n", 0, -cut) + 1
            self._again = bytes(self._kept[start:]) + self._again
            self._position -= len(self._kept) - start
            del self._kept[start:]
        elif cut > 0:
            self._restart()
        anchor = self._kept[-_ANCHOR:]
        if anchor and os.pread(self._fd, len(anchor), self._position - len(anchor)) != anchor:
            self._restart()

    def _whole_lines(self) -> bytes:
        length = _PIECE
        while True:
            data = os.pread(self._fd, length, self._position)
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

    def _next_file(self) -> bytes:
        """At the end of this file: go over to the one that has taken its place, if there is one."""
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return b""  # renamed, and the new one is not made yet
        here = os.fstat(self._fd)
        if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino):
            return b""
        if not self._old:
            # Look once more before it is left: whoever renamed it may still write a last line to it.
            self._old = True
            return b""
        os.close(self._fd)
        self._fd = -1
        return self.lines() if self._open() else b""


def _common(a: bytes, b: bytes) -> int:
    """How many first bytes are the same."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
