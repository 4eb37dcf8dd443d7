"""The journal: append-only segments on disk that everything else can be made from again.

A segment is a magic line and then entries: length and CRC-32 (both little-endian uint32), payload. An entry counts
from the moment all its bytes are there with the right checksum; at the end of the last segment anything else is a torn
tail, left by a crash in the middle of a write, and is cut. Anywhere else it is damage, and an error: nothing is skipped
in silence.

`durability`: with `process`, what `append` has returned for survives the end of this process by whatever cause (the
kernel has it); with `disk` it also survives a power failure (fsync).
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .protocol.errors import JournalError

__all__ = ["MAX_ENTRY_BYTES", "Journal", "Tail", "read_segment", "segments", "tail_of"]

MAGIC = b"rankd journal 1\n"
_HEAD = struct.Struct("<II")
_NAME = re.compile(r"\d{8}\.journal")
# One message's worth of items and the entry around it; a larger length is damage, not data.
MAX_ENTRY_BYTES = 64 * 2**20


def segments(directory: Path) -> list[Path]:
    """The segments of a journal, oldest first; empty where there is none."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name))


def read_segment(path: Path) -> Iterator[tuple[int, bytes]]:
    """The whole entries of a segment: (offset just behind the entry, payload); ends at the first that is not whole.

    Raises:
        JournalError: the file is no segment.
    """
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
        if magic != MAGIC:
            if MAGIC.startswith(magic):
                return  # the crash came before the first entry
            raise JournalError(f"{path} is not a segment of a rankd journal (it begins with {magic[:16]!r})")
        offset = len(MAGIC)
        while True:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return
            length, crc = _HEAD.unpack(head)
            payload = file.read(length) if length <= MAX_ENTRY_BYTES else b""
            if len(payload) < length or zlib.crc32(payload) != crc:
                return
            offset += _HEAD.size + length
            yield offset, payload


@dataclass(frozen=True, slots=True)
class Tail:
    """What stands behind the last whole entry of a segment: `size` bytes from `offset` on.

    `torn`: it is the beginning of an entry, or zeros: what a crash leaves of a write that nobody was told of. Anything
    else is damage.
    """

    offset: int
    size: int
    torn: bool


def tail_of(path: Path, offset: int) -> Tail:
    """What a segment holds from `offset` on, where its whole entries end."""
    with path.open("rb") as file:
        size = max(0, file.seek(0, os.SEEK_END) - offset)
        file.seek(offset)
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return Tail(offset, size, torn=True)
        length, _ = _HEAD.unpack(head)
        # A power failure leaves zeros where the file's size was stored before its bytes.
        torn = length <= MAX_ENTRY_BYTES and length > size - _HEAD.size
        return Tail(offset, size, torn or (not any(head) and _only_zeros(file)))


def _only_zeros(file: BinaryIO) -> bool:
    return not any(any(chunk) for chunk in iter(lambda: file.read(2**16), b""))


class Journal:
    """The writing side, held by one collector. Call `replay` to its end once, then `append`.

    Raises:
        JournalError: the directory cannot be used; says why.
    """

    def __init__(self, directory: Path, *, segment_size: int = 64 * 2**20, durability: str = "process") -> None:
        self._directory = directory
        self._segment_size = segment_size
        self._sync = durability == "disk"
        self._fd = -1
        self._size = 0
        self._number = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise JournalError(f"the journal needs the directory {directory}: {e.strerror}") from e

    @property
    def size(self) -> int:
        """Bytes in the newest segment."""
        return self._size

    def replay(self) -> Iterator[bytes]:
        """All payloads so far; afterwards the torn tail of the last segment is cut and `append` goes on there.

        Raises:
            JournalError: damage before the end.
        """
        paths = segments(self._directory)
        for path in paths:
            end = len(MAGIC)
            for end, payload in read_segment(path):  # noqa: B007 - the last offset is where the whole entries end
                yield payload
            if path != paths[-1] and path.stat().st_size != end:
                raise JournalError(
                    f"{path} is damaged at byte {end} of {path.stat().st_size}: an entry's checksum is wrong and later "
                    "segments follow. Restore the file, or move the journal away to start a new one"
                )
        if paths:
            self._number = int(paths[-1].stem)
            self._resume(paths[-1], end)
        else:
            self._start_segment()

    def append(self, payloads: Iterable[bytes]) -> None:
        """Write these entries, all or none of them; when this returns, they are stored as `durability` says.

        Raises:
            OSError: not possible now (disk full, quota, …); the journal is as it was before, and may be tried again.
        """
        parts = [part for p in payloads for part in (_HEAD.pack(len(p), zlib.crc32(p)), p)]
        if not parts:
            return
        if self._size >= self._segment_size:
            self._start_segment()
        data = memoryview(b"".join(parts))
        try:
            _write_all(self._fd, data)
            if self._sync:
                os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _start_segment(self) -> None:
        path = self._directory / f"{self._number + 1:08}.journal"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o640)
        try:
            _write_all(fd, memoryview(MAGIC))
        except OSError:
            os.close(fd)
            path.unlink()
            raise
        self.close()
        self._fd, self._size, self._number = fd, len(MAGIC), self._number + 1

    def _resume(self, path: Path, end: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(self._fd, end if path.stat().st_size >= len(MAGIC) else 0)
        if os.fstat(self._fd).st_size == 0:
            _write_all(self._fd, memoryview(MAGIC))
        self._size = os.fstat(self._fd).st_size


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
