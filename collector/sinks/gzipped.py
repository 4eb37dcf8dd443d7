"""Gzip files that can be read from anywhere: many members, each a mebibyte of text, and each says how long it is.

RFC 1952 lets a file be several members one after the other, and a member's header hold fields of anybody's. Ours (`Rk`)
is the member's length in the file and that of its text, so a reader hops from header to header and decompresses only
what it wants. For `zcat`, `zgrep` and all others it is a gzip file like any other. The idea is that of BGZF (htslib).
"""

from __future__ import annotations

import bisect
import errno
import gzip
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

__all__ = ["MEMBER_BYTES", "DamagedPartError", "GzipReader", "compress"]

# Larger members compress hardly better, and a reader of one line decompresses one.
MEMBER_BYTES = 2**20
# On a log of norms: 180 MB/s of one processor and 9.1 % of the size; zlib's usual 6 gives 115 MB/s and 8.5 %.
_LEVEL = 4

# magic, method deflate, flag FEXTRA; no time, no level, system unknown; length of the fields; ours: its name, its
# length, the member's length, the text's length
_HEAD = struct.Struct("<4sIBBH2sHII")
_MAGIC = b"\x1f\x8b\x08\x04"
_FIELD = b"Rk"
_FIELD_BYTES = 8
_UNKNOWN_SYSTEM = 255
# checksum and length of the text
_TAIL = struct.Struct("<II")


class DamagedPartError(OSError):
    """A compressed part that is not what was written."""


def _member(text: bytes) -> bytes:
    deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = deflate.compress(text) + deflate.flush()
    length = _HEAD.size + len(body) + _TAIL.size
    head = _HEAD.pack(_MAGIC, 0, 0, _UNKNOWN_SYSTEM, _FIELD_BYTES + 4, _FIELD, _FIELD_BYTES, length, len(text))
    return head + body + _TAIL.pack(zlib.crc32(text), len(text))


def compress(source: int, target: int, size: int, stop: Callable[[], bool] = lambda: False) -> bool:
    """Compress the first `size` bytes of one open file into another; False: it was stopped before its end.

    Raises:
        OSError: not possible (disk full); or `source` is shorter than that.
    """
    for at in range(0, size, MEMBER_BYTES):
        if stop():
            return False
        wanted = min(MEMBER_BYTES, size - at)
        text = os.pread(source, wanted, at)
        if len(text) < wanted:
            raise DamagedPartError(errno.EIO, f"it ends at byte {at + len(text)}, and should have {size}")
        data = memoryview(_member(text))
        while data:
            data = data[os.write(target, data) :]
    return True


class GzipReader:
    """The text of one gzip file, from anywhere. One that others have compressed is read too, from its beginning on.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._texts = [0]  # where the text of each member begins, and where the next one's will
        self._places = [0]  # the same of the members themselves
        self._foreign: gzip.GzipFile | None = None
        self._latest: tuple[int, bytes] = (-1, b"")  # a member's number and text

    def close(self) -> None:
        """Let go of the file."""
        if self._foreign is not None:
            self._foreign.close()
            self._foreign = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, offset: int, count: int) -> bytes:
        """So many bytes of the text from there; fewer at its end.

        Raises:
            DamagedPartError: it is no gzip file, or its checksum is wrong.
        """
        try:
            pieces = []
            while count > 0 and (piece := self._some(offset, count)):
                pieces.append(piece)
                offset, count = offset + len(piece), count - len(piece)
            return b"".join(pieces)
        except (zlib.error, EOFError, gzip.BadGzipFile, struct.error) as e:
            raise DamagedPartError(errno.EIO, f"is damaged ({e})", str(self._path)) from e

    def _some(self, offset: int, count: int) -> bytes:
        while offset >= self._texts[-1] and self._hop():
            pass
        if self._foreign is not None:
            self._foreign.seek(offset)
            return self._foreign.read(count)
        if offset >= self._texts[-1]:
            return b""
        number = bisect.bisect_right(self._texts, offset) - 1
        at = offset - self._texts[number]
        return self._text(number)[at : at + count]

    def _hop(self) -> bool:
        """To the header of the next member; False: there is none, or somebody else has written it."""
        if self._foreign is not None:
            return False
        head = os.pread(self._fd, _HEAD.size, self._places[-1])
        if not head:
            return False
        magic, _, _, _, _, field, _, length, size = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
        if magic != _MAGIC or field != _FIELD:
            self._foreign = gzip.GzipFile(self._path)
            return False
        # Lengths that ours never have are not believed: a buffer of that size would be made.
        if not (_HEAD.size < length <= 2 * MEMBER_BYTES and 0 < size <= MEMBER_BYTES):
            raise EOFError(f"its member at byte {self._places[-1]} says that it has {length} bytes")
        self._places.append(self._places[-1] + length)
        self._texts.append(self._texts[-1] + size)
        return True

    def _text(self, number: int) -> bytes:
        # Readers take pieces in order: what is left of a member is wanted next.
        if self._latest[0] != number:
            start, end = self._places[number], self._places[number + 1]
            raw = os.pread(self._fd, end - start, start)
            size = self._texts[number + 1] - self._texts[number]
            inflate = zlib.decompressobj(zlib.MAX_WBITS + 16)
            text = inflate.decompress(raw, size + 1)
            if len(text) != size or not inflate.eof:
                raise EOFError(f"its member at byte {start} is not as long as it says")
            self._latest = (number, text)
        return self._latest[1]
