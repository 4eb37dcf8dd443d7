"""The index of the merged log: OUTPUT/.rankd/merged.index, entries of fixed size, each about one *chunk* of the log.

A chunk is some blocks of the log one after the other, a mebibyte of them or a little more; it ends where a block ends.
Its entry says where it ends, at which position it begins, and which ranks have lines in it. So a reader finds a step by
bisection, and a rank's last lines without reading the others'. 10 GB of log have 400 kB of index.

The entry is written when the next chunk begins; the end of the log has none yet. The index is a function of what is
released, like the logs, and is resumed with them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..protocol.records import Comment, RankBlock

__all__ = ["CHUNK_BYTES", "MERGED_INDEX", "Chunk", "IndexWriter", "rank_mask", "read_entries"]

MERGED_INDEX = ".rankd/merged.index"

# Reading a chunk that turns out to be of no use costs a millisecond; a smaller one would make the index longer.
CHUNK_BYTES = 2**20
# end, ranks, step, micro_step (its sort key), attempt, flags
_ENTRY = struct.Struct("<QQQQII")
_MASK_BITS = 64
_ALL_RANKS = 2**_MASK_BITS - 1
_UNORDERED = 1

# (attempt, step, micro_step or "after all"): Position.key
_Key = tuple[int, int, int]
_START: _Key = (0, 0, 0)


def rank_mask(ranks: Iterable[int]) -> int:
    """The bits of these ranks: exact up to 64 ranks, above that ranks share them."""
    mask = 0
    for rank in ranks:
        mask |= 1 << rank % _MASK_BITS
    return mask


@dataclass(frozen=True, slots=True)
class Chunk:
    """One part of the log.

    Attributes:
        start, end: its bytes.
        ranks: the bits of the ranks that have lines here (`rank_mask`).
        key: of the first position here; the next chunk's is that of the last one, at most.
        open: the end of the log, which has no entry yet; of its key, only the attempt is known.
        unordered: some lines here may be of any position (late blocks, or nothing is known about them).
    """

    start: int
    end: int
    ranks: int = _ALL_RANKS
    key: _Key = _START
    unordered: bool = True
    open: bool = False


def read_entries(raw: bytes) -> Iterator[Chunk]:
    """The chunks that an index names; ends where it is no index any more (torn, or of another log)."""
    start, latest = 0, _START
    for end, ranks, step, micro_step, attempt, flags in _ENTRY.iter_unpack(
        raw[: len(raw) // _ENTRY.size * _ENTRY.size]
    ):
        key = (attempt, step, micro_step)
        if end <= start or key < latest:
            return
        yield Chunk(start, end, ranks, key, bool(flags & _UNORDERED))
        start, latest = end, key


class IndexWriter:
    """Makes the index from what is released. Between two entries, all it knows is what `freeze` gives."""

    def __init__(self, size: int = 0) -> None:
        """`size`: what the merged log holds already, of which nothing is known."""
        self._start = 0
        self._end = size
        self._ranks = _ALL_RANKS if size else 0
        self._unordered = size > 0
        self._key: _Key | None = _START if size else None
        self._latest: _Key = _START

    def take(self, each: RankBlock | Comment, size: int) -> bytes:
        """What this adds to the index (mostly nothing), if its lines in the merged log are `size` bytes."""
        if not size:
            return b""
        entry = self._close() if self._end - self._start >= CHUNK_BYTES else b""
        self._end += size
        if each.rank is not None:
            self._ranks |= 1 << each.rank % _MASK_BITS
        if isinstance(each, RankBlock):
            if each.late:
                self._unordered = True
            else:
                self._latest = each.position.key
                if self._key is None:
                    self._key = self._latest
        return entry

    def _close(self) -> bytes:
        attempt, step, micro_step = self._key or self._latest
        entry = _ENTRY.pack(self._end, self._ranks, step, micro_step, attempt, _UNORDERED * self._unordered)
        self._start, self._ranks, self._unordered, self._key = self._end, 0, False, None
        return entry

    def freeze(self) -> Mapping[str, int]:
        """All of it, as numbers for a checkpoint."""
        key = self._key or (-1, -1, -1)
        numbers = (self._start, self._end, self._ranks, int(self._unordered), *key, *self._latest)
        return {f"{MERGED_INDEX}:{name}": number for name, number in zip(_FROZEN, numbers, strict=True)}

    @classmethod
    def thaw(cls, frozen: Mapping[str, int], size: int) -> IndexWriter:
        """What `freeze` gave, if it was of a merged log of this size; otherwise one that knows nothing of it."""
        numbers = [frozen.get(f"{MERGED_INDEX}:{name}") for name in _FROZEN]
        known = [number for number in numbers if number is not None]
        self = cls(size)
        if len(known) < len(_FROZEN) or known[1] != size:
            return self
        self._start, self._end, self._ranks, self._unordered = known[0], known[1], known[2], bool(known[3])
        self._key = None if known[4] < 0 else (known[4], known[5], known[6])
        self._latest = (known[7], known[8], known[9])
        return self


_FROZEN = ("start", "end", "ranks", "unordered", "attempt", "step", "micro_step", "latest_attempt", "latest_step",
           "latest_micro_step")  # fmt: skip
