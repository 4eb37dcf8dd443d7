"""The journal: append-only segments on disk that everything else can be made from again.

A segment is a magic line and then entries: length and CRC-32 (both little-endian uint32), payload, which is never
empty. An entry counts from the moment all its bytes are there with the right checksum; at the end of the last segment
anything else is a torn tail, left by a crash in the middle of a write, and is cut. Anywhere else it is damage, and an
error: nothing is skipped in silence. But a power failure may take the end of a segment and leave a later one, or leave
of a later one its name only: then the journal ends where the first of them does, and what follows is set aside.

Every segment but the first begins with a checkpoint: an entry from which the state before it can be made without the
earlier segments. So reading starts at the last segment, and earlier ones may be deleted. A *reference* is the place of
an entry: segment and offset in one integer, which grows from entry to entry.

`durability`: with `process`, what `append` has returned for survives the end of this process by whatever cause (the
kernel has it); with `disk` it also survives a power failure (fsync). The names of the segments do as well: an entry in
a file that nobody finds is lost.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .disk import set_aside, sync_directory, sync_tree
from .protocol.errors import JournalError
from .protocol.wording import counted

__all__ = [
    "MAGIC",
    "MAX_CHECKPOINT_BYTES",
    "MAX_ENTRY_BYTES",
    "EntryReader",
    "Journal",
    "Tail",
    "read_segment",
    "reference",
    "segment_of",
    "segments",
    "tail_of",
]

log = logging.getLogger("rankd.collector")

# The first bytes of each segment.
MAGIC = b"rankd journal 1\n"
_HEAD = struct.Struct("<II")
_NAME = re.compile(r"\d{8}\.journal")
_UNFINISHED = ".unfinished"
_SET_ASIDE = ".cut"
# Written pages are on the disk after this many seconds, whatever the system's settings (Linux: 35 s): what a power
# failure may have taken is younger.
_WRITEBACK = 120.0
# What is cut short at the end, and no longer than this, is a write that a crash has cut, of no use to anybody.
_SMALL_WRITE = 2**16
# A disk writes so many bytes or none of them.
_SECTOR = 512
# A reference is segment * _OFFSETS + offset; no segment is a tebibyte.
_OFFSETS = 2**40
# Segments that are open for reading back; a stalled rank makes the others' blocks wait in several.
_MAX_READERS = 16
_APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
# One message's worth of items and the entry around it; a larger length is damage, not data.
MAX_ENTRY_BYTES = 64 * 2**20
# Of the first entry of a segment: all name tables of a run may come to 512 MiB, and 25 million items that wait to as
# much. The length has 32 bits.
MAX_CHECKPOINT_BYTES = 2**30


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
            raise JournalError(f"{path} is not a segment of a rankd journal (it begins with {magic[:16]!r})")
        offset = len(MAGIC)
        while True:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return
            length, crc = _HEAD.unpack(head)
            # Zeros, as a power failure leaves them, would pass for empty entries: their checksum is right.
            payload = file.read(length) if length <= _most_bytes(offset) else b""
            if not payload or len(payload) < length or zlib.crc32(payload) != crc:
                return
            offset += _HEAD.size + length
            yield offset, payload


def _most_bytes(offset: int) -> int:
    """Of the entry that begins there."""
    return MAX_CHECKPOINT_BYTES if offset == len(MAGIC) else MAX_ENTRY_BYTES


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
        torn = length <= _most_bytes(offset) and length > size - _HEAD.size
        return Tail(offset, size, torn or (not any(head) and _only_zeros(file)))


def _is_begun(path: Path) -> bool:
    """False: nothing of it was on the disk but its name and perhaps its size.

    Then it is a part of the magic line, or zeros, or ends within its first entry (the very first segment needs none).
    """
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
        if magic != MAGIC:
            return not (MAGIC.startswith(magic) or (not any(magic) and _only_zeros(file)))
    tail = tail_of(path, len(MAGIC))
    return path.stem == f"{1:08}" or not tail.torn or next(read_segment(path), None) is not None


def _is_cut(path: Path) -> bool:
    """Its whole entries are followed by the beginning of one, or by what ends with zeros: a size without its bytes."""
    end = len(MAGIC)
    for next_end, _ in read_segment(path):
        end = next_end
    tail = tail_of(path, end)
    with path.open("rb") as file:
        file.seek(-min(tail.size, _SECTOR), os.SEEK_END)
        return tail.size > 0 and (tail.torn or _only_zeros(file))


def _keep_tail(tail: Tail, path: Path) -> None:
    """Say what is cut from the end of the journal, and keep it where it may be more than a write that was cut short."""
    if tail.size == 0:
        return
    what = f"{path}: cutting {counted(tail.size, 'byte')} from byte {tail.offset} on"
    if tail.torn and tail.size <= _SMALL_WRITE:
        log.warning("%s, no whole entry", what)
        return
    with path.open("rb") as file:
        file.seek(tail.offset)
        aside = set_aside(path, tail.offset, iter(lambda: file.read(2**20), b""))
    kept = "zeros" if aside is None else f"they are kept in {aside.name}"
    if tail.torn:
        log.warning("%s, no whole entry; %s", what, kept)
    else:
        log.warning(
            "%s: an entry there is damaged, and none behind it can be used; %s. What the logs hold of them is kept in "
            "files *.cut beside the logs", what, kept,
        )  # fmt: skip


def _only_zeros(file: BinaryIO) -> bool:
    return not any(any(chunk) for chunk in iter(lambda: file.read(2**16), b""))


def reference(segment: int, offset: int) -> int:
    """The reference of the entry that begins there."""
    return segment * _OFFSETS + offset


def segment_of(reference: int) -> int:
    """The number of the segment that an entry is in."""
    return reference // _OFFSETS


class EntryReader:
    """Reads single entries back, by their references; keeps some segments open."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: OrderedDict[int, int] = OrderedDict()

    def fetch(self, reference: int) -> bytes:
        """The payload of an entry.

        Raises:
            JournalError: it is not there any more, or damaged.
        """
        number, offset = divmod(reference, _OFFSETS)
        path = _path(self._directory, number)
        try:
            fd = self._fd(number)
            length, crc = _HEAD.unpack(os.pread(fd, _HEAD.size, offset))
            payload = os.pread(fd, length, offset + _HEAD.size)
        except (OSError, struct.error) as e:
            raise JournalError(f"{path} cannot be read at byte {offset}: {e}") from e
        if len(payload) != length or zlib.crc32(payload) != crc:
            raise JournalError(f"{path} is damaged at byte {offset}: an entry's checksum is wrong")
        return payload

    def close(self) -> None:
        """Let go of the files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _fd(self, number: int) -> int:
        fd = self._open.pop(number, -1)
        if fd < 0:
            fd = os.open(_path(self._directory, number), os.O_RDONLY | os.O_CLOEXEC)
        self._open[number] = fd
        if len(self._open) > _MAX_READERS:
            os.close(self._open.popitem(last=False)[1])
        return fd


def _path(directory: Path, number: int) -> Path:
    return directory / f"{number:08}.journal"


class Journal:
    """The writing side, held by one collector. Call `replay` to its end once, then `append`.

    Args:
        segment_size: bytes after which `due` asks for the next segment.
        durability: `process` or `disk`; see above.
        keep: bytes of older segments that `forget` leaves; None: all.

    Raises:
        JournalError: the directory cannot be used; says why.
    """

    def __init__(
        self,
        directory: Path,
        *,
        segment_size: int = 64 * 2**20,
        durability: str = "process",
        keep: int | None = None,
    ) -> None:
        self._directory = directory
        self._segment_size = segment_size
        self._sync = durability == "disk"
        self._keep = keep
        self._fd = -1
        self._size = 0
        self._begun = len(MAGIC)  # bytes of the newest segment up to behind its checkpoint
        self._number = 0
        self._reader = EntryReader(directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise JournalError(f"the journal needs the directory {directory}: {e.strerror}") from e

    @property
    def due(self) -> bool:
        """The newest segment has reached its size: time for `rotate`.

        However large the checkpoint at its beginning is, as much must follow it: otherwise a run whose state outgrows
        a segment would write nothing but checkpoints.
        """
        return self._size >= max(self._segment_size, 2 * self._begun)

    @property
    def end(self) -> int:
        """The reference that the next entry will get."""
        return self._reference(self._size)

    def replay(self, *usable: Callable[[bytes], bool]) -> Iterator[tuple[int, bytes]]:
        """The entries (reference, payload) from the newest usable checkpoint on, which comes first where there is one.

        Afterwards the torn tail is cut and `append` goes on there.

        Args:
            usable: whether the state can be made from this checkpoint; if not, reading starts one earlier. Where there
                is no such checkpoint, and the first segment is gone, the next question is asked of all, and so on.

        Raises:
            JournalError: a segment that is none, or is damaged before its end; no checkpoint is usable.
        """
        for left in self._directory.glob(f"*{_UNFINISHED}"):
            left.unlink()
        paths = self._up_to_a_cut(segments(self._directory))
        if not paths:
            self._number = 1
            self._resume(self._write_segment(MAGIC), len(MAGIC))
            return
        end = len(MAGIC)
        for path in paths[self._first(paths, usable or (lambda _: True,)) :]:
            self._number = int(path.stem)
            end = self._begun = len(MAGIC)
            for next_end, payload in read_segment(path):
                if end == len(MAGIC) and self._number > 1:
                    self._begun = next_end
                yield self._reference(end), payload
                end = next_end
            if path != paths[-1] and path.stat().st_size != end:
                raise JournalError(
                    f"{path} is damaged at byte {end} of {path.stat().st_size}, and later segments follow. Restore it, "
                    "or move the journal away to start a new one"
                )
        _keep_tail(tail_of(paths[-1], end), paths[-1])
        self._resume(paths[-1], end)

    def _up_to_a_cut(self, paths: list[Path]) -> list[Path]:
        """Those that a power failure has left whole, and the first that it has not; later ones are set aside."""
        young = max((path.stat().st_mtime for path in paths), default=0.0) - _WRITEBACK
        for index, path in enumerate(paths):
            if path.stat().st_mtime < young and path != paths[-1]:
                continue
            kept = index + 1
            if not _is_begun(path) and (index or path.stem == _path(self._directory, 1).stem):
                kept = index
            elif path == paths[-1] or not _is_cut(path):
                continue
            for later in paths[kept:]:
                aside = later.with_name(later.name + _SET_ASIDE)
                log.warning(
                    "the journal ends before %s, as a power failure leaves it; that is set aside as %s, and is of no "
                    "use any more", later, aside.name,
                )  # fmt: skip
                later.rename(aside)
            return paths[:kept]
        return paths

    @staticmethod
    def _first(paths: list[Path], usable: Sequence[Callable[[bytes], bool]]) -> int:
        """Where to start reading."""
        whole = int(paths[0].stem) == 1
        for question in usable:
            for index in range(len(paths) - 1, -1 + whole, -1):
                checkpoint = next(read_segment(paths[index]), None)
                if checkpoint is not None and question(checkpoint[1]):
                    return index
            if whole:
                return 0
        raise JournalError(
            f"none of the segments from {paths[0]} on has all that it needs, and earlier ones are gone; restore them, "
            "or move the journal away to start a new one"
        )

    def append(self, payloads: Iterable[bytes]) -> list[int]:
        """Write these entries, all or none of them, and return their references.

        When this returns they are stored as `durability` says.

        Raises:
            OSError: not possible now (disk full, quota, …); the journal is as it was before, and may be tried again.
        """
        parts: list[bytes] = []
        references: list[int] = []
        end = self._size
        for payload in payloads:
            references.append(self._reference(end))
            parts += (_HEAD.pack(len(payload), zlib.crc32(payload)), payload)
            end += _HEAD.size + len(payload)
        if not parts:
            return []
        try:
            _write_all(self._fd, memoryview(b"".join(parts)))
            if self._sync:
                os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size = end
        return references

    def rotate(self, checkpoint: bytes) -> None:
        """Begin the next segment with this payload.

        Raises:
            OSError: as `append`.
        """
        self._number += 1
        try:
            path = self._write_segment(MAGIC + _HEAD.pack(len(checkpoint), zlib.crc32(checkpoint)) + checkpoint)
            # Before the other one is closed: where there are too few descriptors, a socket would take its number.
            fd = os.open(path, _APPENDING)
        except OSError:
            self._number -= 1
            raise
        os.close(self._fd)
        self._fd = fd
        self._begun = self._size = len(MAGIC) + _HEAD.size + len(checkpoint)

    def put_off(self) -> None:
        """No checkpoint can be written now: be `due` again when the newest segment has grown to twice its size."""
        self._begun = self._size

    def fetch(self, reference: int) -> bytes:
        """The payload of an entry.

        Raises:
            JournalError: it is not there any more, or damaged.
        """
        return self._reader.fetch(reference)

    def holds(self, reference: int) -> bool:
        """The segment of this entry is still there."""
        return _path(self._directory, segment_of(reference)).exists()

    def forgettable(self, needed: int) -> list[Path]:
        """The oldest segments beyond what is to be kept; none from the entry `needed` on."""
        if self._keep is None:
            return []
        older = segments(self._directory)[:-1]
        total = sum(path.stat().st_size for path in older)
        gone = []
        for path in older:
            if total <= self._keep or int(path.stem) >= segment_of(needed):
                break
            total -= path.stat().st_size
            gone.append(path)
        return gone

    def forget(self, needed: int) -> list[Path]:
        """Delete what is `forgettable`, oldest first. What was made of it must be on the disk (`syncing`).

        Returns:
            What was deleted.

        Raises:
            OSError: not possible now; what is left goes the next time.
        """
        gone = self.forgettable(needed)
        for path in gone:
            path.unlink(missing_ok=True)
        return gone

    def close(self) -> None:
        """Let go of the files."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._reader.close()

    def _reference(self, offset: int) -> int:
        return reference(self._number, offset)

    def _write_segment(self, data: bytes) -> Path:
        """A new segment that appears with all of its first bytes, or not at all."""
        path = _path(self._directory, self._number)
        unfinished = path.with_suffix(_UNFINISHED)
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        try:
            _write_all(fd, memoryview(data))
            if self._sync:
                os.fsync(fd)
        except OSError:
            unfinished.unlink()
            raise
        finally:
            os.close(fd)
        unfinished.rename(path)
        if self._sync:
            # The first one lies in directories that are as new.
            (sync_tree if self._number == 1 else sync_directory)(self._directory)
        return path

    def _resume(self, path: Path, end: int) -> None:
        self._fd = os.open(path, _APPENDING)
        os.ftruncate(self._fd, end)
        self._size = end


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
