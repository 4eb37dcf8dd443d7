"""Pure: the floors of the ranks, and what may be released now.

A rank's *floor* is the smallest position at which it may still produce. A held position is released once it lies below
the floor of every rank that counts; then the ranks' items at that position come out in rank order. No clock is
involved: who counts is told from outside (`expect`, `drop`).

Only the lowest held position (the head) is watched: the set of ranks that still hold it up is computed when it becomes
the head, and shrinks as floors rise. So an arriving item costs the same with 8 and with 1,024 ranks.
"""

from __future__ import annotations

import heapq
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, Generic, TypeAlias, TypeVar

__all__ = ["START", "Floor", "Key", "Ordering", "above", "at"]

# Position.key: (attempt, step, micro_step or "after all").
Key: TypeAlias = tuple[int, int, int]
# A key, and 0 for "at it", 1 for "just above it".
Floor: TypeAlias = tuple[int, int, int, int]

START: Floor = (0, 0, 0, 0)

_T = TypeVar("_T")


def at(key: Key) -> Floor:
    """The floor of a rank that may still produce at `key`."""
    return (*key, 0)


def above(key: Key) -> Floor:
    """The floor of a rank that has completed `key`."""
    return (*key, 1)


class _Place(Generic[_T]):
    """What is held at one position, in the order in which it came: of each item its rank, and the item.

    As flat as it is because a rank that stands still makes hundreds of thousands of items wait.
    """

    __slots__ = ("items", "ranks")

    def __init__(self) -> None:
        self.ranks = array("I")
        self.items: list[_T] = []

    def by_rank(self) -> list[tuple[int, list[_T]]]:
        """The ranks in order, with their items."""
        in_order = sorted(range(len(self.ranks)), key=self.ranks.__getitem__)
        return [(rank, [self.items[i] for i in places]) for rank, places in groupby(in_order, self.ranks.__getitem__)]


def _bytes(ranks: array[int]) -> bytes:
    """As little-endian uint32, whatever this machine has."""
    return struct.pack(f"<{len(ranks)}I", *ranks)


def _ranks(raw: bytes) -> array[int]:
    return array("I", struct.unpack(f"<{len(raw) // 4}I", raw))


class Ordering(Generic[_T]):
    """Holds items until every rank that counts has passed their position."""

    def __init__(self) -> None:
        self._floors: dict[int, Floor] = {}
        self._counting: set[int] = set()
        self._held: dict[Key, _Place[_T]] = {}
        self._heap: list[Key] = []
        # How many items of each rank are held.
        self._held_of: Counter[int] = Counter()
        self._head: Key | None = None
        self._waiting: set[int] = set()
        # The highest position released so far; what comes at or below it is late.
        self.passed: Key = (0, 0, 0)

    def expect(self, rank: int) -> None:
        """From now on the rank counts: nothing is released above its floor."""
        self._counting.add(rank)
        if self._head is not None and self.floor(rank) < above(self._head):
            self._waiting.add(rank)

    def drop(self, rank: int) -> None:
        """The rank no longer counts (it said goodbye, is lost, or holds the others up)."""
        self._counting.discard(rank)
        self._waiting.discard(rank)

    def counts(self, rank: int) -> bool:
        return rank in self._counting

    def floor(self, rank: int) -> Floor:
        return self._floors.get(rank, START)

    def raise_floor(self, rank: int, floor: Floor) -> None:
        """The rank will produce nothing below `floor` any more; a lower floor than the known one changes nothing."""
        if floor <= self.floor(rank):
            return
        self._floors[rank] = floor
        if rank in self._waiting and self._head is not None and floor >= above(self._head):
            self._waiting.discard(rank)

    def is_late(self, key: Key) -> bool:
        """Whether this position has been released already."""
        return key <= self.passed

    def hold(self, rank: int, key: Key, item: _T) -> None:
        """Keep an item of a position that is not late."""
        place = self._held.get(key)
        if place is None:
            place = self._held[key] = _Place()
            heapq.heappush(self._heap, key)
        place.ranks.append(rank)
        place.items.append(item)
        self._held_of[rank] += 1

    def held_of(self, rank: int) -> int:
        """How many items of this rank are held."""
        return self._held_of[rank]

    def release(self) -> Iterator[tuple[Key, list[tuple[int, list[_T]]]]]:
        """What may be released now: positions in order, and for each its ranks in order with their items."""
        while self._heap and not self._blocked(self._heap[0]):
            key = heapq.heappop(self._heap)
            self.passed = key
            self._head = None
            by_rank = self._held.pop(key).by_rank()
            for rank, items in by_rank:
                self._held_of[rank] -= len(items)
            yield key, by_rank

    def _blocked(self, key: Key) -> bool:
        if key != self._head:
            self._head = key
            bound = above(key)
            self._waiting = {rank for rank in self._counting if self.floor(rank) < bound}
        return bool(self._waiting)

    def waiting(self) -> tuple[Key, frozenset[int]] | None:
        """The lowest held position and the ranks that hold it up; None where nothing is held up."""
        if not self._heap or not self._blocked(self._heap[0]):
            return None
        return self._heap[0], frozenset(self._waiting)

    def held(self) -> Iterator[_T]:
        """Everything held, in no order."""
        for place in self._held.values():
            yield from place.items

    def counting(self) -> frozenset[int]:
        """The ranks that count now."""
        return frozenset(self._counting)

    def freeze(self, item: Callable[[_T], bytes]) -> list[Any]:
        """The whole state as lists, integers and bytes; `item` makes bytes of an item, always as many."""
        held = [[*key, _bytes(place.ranks), b"".join(map(item, place.items))] for key, place in self._held.items()]
        return [[[r, *f] for r, f in self._floors.items()], sorted(self._counting), list(self.passed), held]

    @classmethod
    def thaw(cls, frozen: list[Any], item: Callable[[bytes], _T]) -> Ordering[_T]:
        """The state that `freeze` gave."""
        self = cls()
        floors, counting, passed, held = frozen
        self._floors = {rank: (a, s, m, above) for rank, a, s, m, above in floors}
        self._counting = set(counting)
        self.passed = (passed[0], passed[1], passed[2])
        for a, s, m, ranks, raw in held:
            place = self._held[a, s, m] = _Place()
            place.ranks = _ranks(ranks)
            size = len(raw) // len(place.ranks)
            place.items = [item(raw[start : start + size]) for start in range(0, len(raw), size)]
            self._held_of.update(place.ranks)
        self._heap = sorted(self._held)
        return self
