"""The outbox's bytes in a file that outlives the process: a bounded ring, mapped into memory.

What has been copied into the mapping belongs to the system's page cache, so it is there after SIGKILL, without one
system call for an append. It does not survive the machine.

::

    0     header      magic, version, where the ring starts, its size, length of the hello; checksum
    64    tail A      where the oldest live record starts, its number; checksum
    96    tail B      the same; written alternately, so that one is whole whenever the process dies
    128   hello       the encoded Hello of this process: all that is needed to deliver the rest later
    4096m notebook    parts of the item that comes next: length, checksum of all else, the item's number, part
    4096n ring        records: length, checksum of all else, number, payload; one may go on at the ring's start

Offsets only ever grow (the place is `offset % capacity`), and so do the numbers: what a former lap left behind never
has the number that is expected next, and recovery stops there. The same goes for the notebook: parts of an item that
the ring has by now bear a number that has passed. A file without a notebook (n = m) is of an older rankd.

Beside it, and as long as it, lies a file of name tables: records like those of the ring, of the items that define them.
They are wanted again where a collector has lost the end of its journal. The run that was joined stands there as well.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..collector.protocol.assembly import join_block
from ..collector.protocol.errors import ProtocolError, VersionError
from ..collector.protocol.tables import MAX_TABLE_BYTES
from ..collector.protocol.wire import MAX_ITEM_BYTES, Hello, decode_message, encode_message, number_item
from .store import LEAST_STORE_BYTES, RUN_SEQ, Entry

__all__ = ["SPOOL_SUFFIX", "SPOOL_VERSION", "Spool", "find_spools", "owner", "remove_unfinished"]

SPOOL_SUFFIX = ".spool"
# What a file is called until it is locked and whole: nobody may take it for one that a dead process has left.
_UNFINISHED_SUFFIX = ".unfinished"
# Making one takes milliseconds, and on a bad day seconds.
_UNFINISHED_AGE = 600.0
SPOOL_VERSION = 1
_MAGIC = b"rankdspl"
_TABLES_SUFFIX = ".tables"
# A collector takes no more text of name tables from one process.
_MOST_TABLES_BYTES = MAX_TABLE_BYTES
_HEADER = struct.Struct("<8sIIQI")
_HEADER_SUM = struct.Struct("<I")
_TAIL = struct.Struct("<QQ")
_TAIL_SUM = struct.Struct("<I")
_TAIL_PLACES = (64, 96)
_HELLO_PLACE = 128
_RECORD = struct.Struct("<IIQ")
_RECORD_HEAD = struct.Struct("<IQ")
_PAGE = 4_096
# Some 2,000 scalars; when it is full they go into the ring as a block, and it begins anew.
_NOTEBOOK_BYTES = 2**17
# A hello carries at most 64 facts; a header beyond this is not ours.
_MAX_HELLO_BYTES = 2**17
# What an item grows by when it gets its number.
_LONGEST_NUMBER = 8

_spools: weakref.WeakSet[Spool] = weakref.WeakSet()


class Spool:
    """A `Store` over a ring file. Make one with `create`, or with `open` from what a dead process has left."""

    full_cause = "spool_full"

    def __init__(
        self, path: Path, lock_fd: int, ring_start: int, capacity: int, hello: Hello, *, populate: bool
    ) -> None:
        """For `create` and `open`."""
        self.path = path
        self.hello = hello
        self.entries: Sequence[Entry] = ()
        """What `open` found that was not acknowledged, oldest first."""
        self.next_seq = 1
        """The number after the last that `open` found."""
        self._lock_fd = lock_fd
        self._start = ring_start
        self._notebook = 0
        self._jotted = 0
        # What was remembered; None: the file beside this one has it.
        self._remembered: list[tuple[int, bytes]] | None = None
        self._capacity = capacity
        self._head = 0
        self._tail = 0
        self._tail_turn = 0
        # The mapping keeps a duplicate of its descriptor, and would pass the lock on to children of a fork. So it gets
        # an open file of its own, which has no lock.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Populated, so that the training thread does not meet each page for the first time.
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
            self._map = mmap.mmap(fd, ring_start + capacity, flags)
        finally:
            os.close(fd)
        _spools.add(self)

    @classmethod
    def create(cls, path: Path, size: int, hello: Hello) -> Spool:
        """A new spool file of `size` bytes for records, readable by this user only.

        Args:
            path: must not exist; on a disk of this host (a mapping over a network file system may stall an append).
            size: taken from the disk now, so that a full disk shows here and not as SIGBUS in the middle of training.
            hello: who this process is; its `next_seq` does not matter.

        Raises:
            OSError: no room, no permission, or the file exists. The caller keeps its items in memory instead.
            ValueError: `size` is below LEAST_STORE_BYTES.
        """
        if size < LEAST_STORE_BYTES:
            raise ValueError(f"a spool needs at least {LEAST_STORE_BYTES} bytes, got {size}")
        about = encode_message(hello)
        ring_start = _notebook_start(len(about)) + _NOTEBOOK_BYTES
        unfinished = path.with_name(path.name + _UNFINISHED_SUFFIX)
        fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            disk = os.fstatvfs(fd)
            if ring_start + size > disk.f_bavail * disk.f_frsize:
                # Said before, and not found out by taking all that the others have.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.posix_fallocate(fd, 0, ring_start + size)
            spool = cls(unfinished, fd, ring_start, size, hello, populate=True)
            spool._remembered = []
            spool._write_header(about)
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            unfinished.rename(path)
        except BaseException:
            os.close(fd)
            unfinished.unlink(missing_ok=True)
            raise
        spool.path = path
        return spool

    @classmethod
    def open(cls, path: Path) -> Spool:
        """Take over what a process that is gone has left: `hello`, and `entries` up to the first torn record.

        Raises:
            BlockingIOError: the process still lives (or somebody else is delivering this).
            FileNotFoundError: all of it has been delivered meanwhile.
            OSError: it cannot be read.
            VersionError: written by another version.
            ProtocolError: not a spool, or its header was never finished.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ring_start, capacity, about = _read_header(path, fd)
            hello = decode_message(about)
            if not isinstance(hello, Hello):
                raise ProtocolError(f"{path} does not say whose it is")
            spool = cls(path, fd, ring_start, capacity, hello, populate=False)
        except BaseException:
            os.close(fd)
            raise
        spool._notebook = spool._jotted = _notebook_start(len(about))
        spool._recover()
        return spool

    # -- the store ----------------------------------------------------------------------------------------------------

    def cost(self, size: int) -> int:
        return size + _RECORD.size

    def room(self) -> int:
        return self._capacity - (self._head - self._tail)

    def append(self, seq: int, raw: bytes, after: Entry | None) -> Entry:
        size = len(raw)
        where = self._tail if after is None else after.where + _RECORD.size + after.size
        total = zlib.crc32(raw, zlib.crc32(_RECORD_HEAD.pack(size, seq)))
        self._write(where + _RECORD.size, raw)
        self._write(where, _RECORD.pack(size, total, seq))
        self._head = where + _RECORD.size + size
        # What was jotted down belongs to this item, or to the next ones of the same call.
        self._jotted = self._notebook
        return Entry(seq, where, size)

    def jot(self, seq: int, parts: Sequence[bytes]) -> bool:
        if self._jotted + sum([_RECORD.size + len(part) for part in parts]) > self._start:
            return False
        for part in parts:
            size = len(part)
            total = zlib.crc32(part, zlib.crc32(_RECORD_HEAD.pack(size, seq)))
            end = self._jotted + _RECORD.size + size
            self._map[self._jotted : end] = _RECORD.pack(size, total, seq) + part
            self._jotted = end
        return True

    def read(self, entry: Entry) -> bytes:
        return self._read(entry.where + _RECORD.size, entry.size)

    def remember(self, seq: int, raw: bytes) -> None:
        if self._remembered is not None:
            self._remembered.append((seq, raw))
        with contextlib.suppress(OSError):
            # Some times in a run. Not open in between: a fork would have it too.
            fd = os.open(_tables_path(self.path), _TABLES_FLAGS, 0o600)
            try:
                before = os.fstat(fd).st_size
                # Where the file is gone, what it held goes into the next one.
                known = self._remembered if self._remembered and not before else [(seq, raw)]
                whole = b"".join([_record(*each) for each in known])
                if before + len(whole) <= _MOST_TABLES_BYTES and os.write(fd, whole) < len(whole):
                    os.ftruncate(fd, before)  # a full disk: the next one may be smaller
            finally:
                os.close(fd)

    def remembered(self) -> Sequence[tuple[int, bytes]]:
        # A process that lives needs them for all that it is still going to send, and its file may be gone: the disk was
        # full, or somebody has tidied the temporary directory, where it is the one file that nobody touches.
        if self._remembered is not None:
            return self._remembered
        try:
            fd = os.open(_tables_path(self.path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return ()
        with os.fdopen(fd, "rb") as file:
            return list(_records(file.read(_MOST_TABLES_BYTES)))

    @property
    def run(self) -> str:
        """The run whose collector has let the process in; empty: none had, or it is not known."""
        known = [raw for seq, raw in self.remembered() if seq == RUN_SEQ]
        return known[-1].decode(errors="replace") if known else ""

    def free(self, entry: Entry) -> None:
        end = entry.where + _RECORD.size + entry.size
        # The file says so before the bytes may be written over.
        self._write_tail(end, entry.seq + 1)
        self._tail = end

    def close(self, *, delivered: bool) -> None:
        if self._lock_fd < 0:
            return
        self._map.close()
        if delivered:
            # Before the lock is given up, so that nobody recovers a file that is about to go.
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
                _tables_path(self.path).unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = -1

    def abandon(self) -> None:
        # The lock lives as long as any copy of this descriptor: a worker that outlives its parent must not keep it.
        # The mapping is left alone.
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self._lock_fd = -1
        self._remembered = None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _write(self, offset: int, raw: bytes) -> None:
        at = offset % self._capacity
        first = self._start + at
        straight = self._capacity - at
        if len(raw) <= straight:
            self._map[first : first + len(raw)] = raw
        else:
            self._map[first : first + straight] = raw[:straight]
            self._map[self._start : self._start + len(raw) - straight] = raw[straight:]

    def _read(self, offset: int, size: int) -> bytes:
        at = offset % self._capacity
        first = self._start + at
        straight = self._capacity - at
        if size <= straight:
            return self._map[first : first + size]
        return self._map[first : first + straight] + self._map[self._start : self._start + size - straight]

    def _write_header(self, about: bytes) -> None:
        self._write_tail(0, 1)
        self._notebook = self._jotted = _notebook_start(len(about))
        self._map[_HELLO_PLACE : _HELLO_PLACE + len(about)] = about
        head = _HEADER.pack(_MAGIC, SPOOL_VERSION, self._start, self._capacity, len(about))
        whole = head + _HEADER_SUM.pack(zlib.crc32(about, zlib.crc32(head)))
        self._map[: len(whole)] = whole

    def _write_tail(self, offset: int, seq: int) -> None:
        place = _TAIL_PLACES[self._tail_turn]
        self._tail_turn ^= 1
        tail = _TAIL.pack(offset, seq)
        whole = tail + _TAIL_SUM.pack(zlib.crc32(tail))
        self._map[place : place + len(whole)] = whole

    def _read_tail(self) -> tuple[int, int]:
        found: list[tuple[int, int, int]] = []
        for turn, place in enumerate(_TAIL_PLACES):
            tail = self._map[place : place + _TAIL.size]
            (total,) = _TAIL_SUM.unpack_from(self._map, place + _TAIL.size)
            if total == zlib.crc32(tail) and any(tail):
                found.append((*_TAIL.unpack(tail), turn))
        if not found:
            raise ProtocolError(f"{self.path}: neither of its two tails is whole")
        offset, seq, turn = max(found)
        self._tail_turn = turn ^ 1
        return offset, seq

    def _recover(self) -> None:
        try:
            self._tail, seq = self._read_tail()
        except ProtocolError:
            self.close(delivered=False)
            raise
        entries = []
        offset, end = self._tail, self._tail + self._capacity
        while offset + _RECORD.size <= end:
            size, total, found = _RECORD.unpack(self._read(offset, _RECORD.size))
            if found != seq or size > MAX_ITEM_BYTES or offset + _RECORD.size + size > end:
                break
            raw = self._read(offset + _RECORD.size, size)
            if zlib.crc32(raw, zlib.crc32(_RECORD_HEAD.pack(size, seq))) != total:
                break
            entries.append(Entry(seq, offset, size))
            offset += _RECORD.size + size
            seq += 1
        self._head = offset
        for raw in self._read_notebook(seq):
            # What fits was jotted down, and has its number to come. Whatever else is there is not ours, and
            # would lie over the oldest records.
            if raw[2:3] != b"\0" or self.cost(len(raw) + _LONGEST_NUMBER) > self.room():
                break
            entries.append(self.append(seq, number_item(raw, seq), entries[-1] if entries else None))
            seq += 1
        self.entries = entries
        self.next_seq = seq

    def _read_notebook(self, seq: int) -> list[bytes]:
        """The items, `seq` and the next ones, whose parts were jotted down and that were never appended."""
        items: dict[int, list[bytes]] = {}
        place = self._notebook
        while place + _RECORD.size <= self._start:
            size, total, found = _RECORD.unpack_from(self._map, place)
            end = place + _RECORD.size + size
            if end > self._start or found > seq + len(items):
                break
            part = self._map[place + _RECORD.size : end]
            if zlib.crc32(part, zlib.crc32(_RECORD_HEAD.pack(size, found))) != total:
                break
            # Of several blocks the first may have been appended, and not the others: what has passed is stepped over.
            if found >= seq:
                items.setdefault(found, []).append(part)
            place = end
        # The process may have died between a head and its first part.
        return [join_block(head, parts) for head, *parts in items.values() if parts]


def find_spools(directory: Path, rank: int | None = None) -> list[Path]:
    """The spool files in `directory`, those of living processes included; empty where there is no such directory.

    Args:
        rank: those only whose name begins as this rank's do (`spools`); whose they are, `owner` tells.
    """
    return sorted(directory.glob(f"{'' if rank is None else f'rank_{rank}.'}*{SPOOL_SUFFIX}"))


def owner(path: Path) -> Hello | None:
    """Whose spool this is, alive or not; None where that cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        hello = decode_message(_read_header(path, fd)[2])
    except (OSError, ProtocolError):
        return None
    finally:
        os.close(fd)
    return hello if isinstance(hello, Hello) else None


def remove_unfinished(directory: Path) -> None:
    """Remove what a process left that was killed while it made its spool: nothing was in it yet; or removed it."""
    for path in directory.glob(f"*{SPOOL_SUFFIX}{_UNFINISHED_SUFFIX}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _UNFINISHED_AGE:
                path.unlink()
    for path in directory.glob(f"*{SPOOL_SUFFIX}{_TABLES_SUFFIX}"):
        if not path.with_name(path.name.removesuffix(_TABLES_SUFFIX)).exists():
            with contextlib.suppress(OSError):
                path.unlink()


def _tables_path(spool: Path) -> Path:
    return spool.with_name(spool.name + _TABLES_SUFFIX)


_TABLES_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


def _record(seq: int, raw: bytes) -> bytes:
    return _RECORD.pack(len(raw), zlib.crc32(raw, zlib.crc32(_RECORD_HEAD.pack(len(raw), seq))), seq) + raw


def _records(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """The records (number, payload) that lie one after the other, up to the first that is not whole."""
    at = 0
    while at + _RECORD.size <= len(raw):
        size, total, seq = _RECORD.unpack_from(raw, at)
        payload = raw[at + _RECORD.size : at + _RECORD.size + size]
        if len(payload) < size or zlib.crc32(payload, zlib.crc32(_RECORD_HEAD.pack(size, seq))) != total:
            return
        yield seq, payload
        at += _RECORD.size + size


def _notebook_start(hello_bytes: int) -> int:
    return -(-(_HELLO_PLACE + hello_bytes) // _PAGE) * _PAGE


def _read_header(path: Path, fd: int) -> tuple[int, int, bytes]:
    head = os.pread(fd, _HEADER.size + _HEADER_SUM.size, 0)
    if len(head) < _HEADER.size + _HEADER_SUM.size or not head.startswith(_MAGIC):
        raise ProtocolError(f"{path} is no spool file, or was never finished")
    _, version, ring_start, capacity, length = _HEADER.unpack_from(head)
    if version != SPOOL_VERSION:
        raise VersionError(f"{path} is a spool of version {version}, this is version {SPOOL_VERSION}")
    about = os.pread(fd, min(length, _MAX_HELLO_BYTES), _HELLO_PLACE)
    (total,) = _HEADER_SUM.unpack_from(head, _HEADER.size)
    if total != zlib.crc32(about, zlib.crc32(head[: _HEADER.size])):
        raise ProtocolError(f"{path}: its header is damaged")
    if capacity < LEAST_STORE_BYTES or os.fstat(fd).st_size < ring_start + capacity:
        raise ProtocolError(f"{path} is shorter than its header says")
    return ring_start, capacity, about


def _forked() -> None:
    for spool in list(_spools):
        spool.abandon()


# Also of spools that no outbox has: the lock is held as long as any process has a copy of the descriptor.
os.register_at_fork(after_in_child=_forked)
