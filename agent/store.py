"""Where the bytes of the items lie that are not yet acknowledged: what an outbox asks of it, and one in memory.

`spool.Spool` is the one that outlives the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

__all__ = ["LEAST_STORE_BYTES", "RESERVE_BYTES", "RUN_SEQ", "Entry", "MemoryStore", "Store"]

# Kept free for the end: a gap for each cause (at most 125 bytes) and the goodbye (at most 1,200), with the stores' own
# costs. Whatever happened before, the process can say how much it lost.
RESERVE_BYTES = 4_096
# A store below this would refuse nearly everything.
LEAST_STORE_BYTES = 4 * RESERVE_BYTES
# Items are numbered from 1.
RUN_SEQ = 0


class Entry(NamedTuple):
    """One stored item: its number, where the store has it, and its length in bytes."""

    seq: int
    where: int
    size: int


class Store(Protocol):
    """Where the bytes of the items lie, oldest first. The outbox calls it under its lock, except for `read`."""

    full_cause: str
    """What a refusal for want of room is called in counts and gaps."""

    def cost(self, size: int) -> int:
        """How much of `room` an item of `size` bytes takes."""

    def room(self) -> int:
        """The bytes that are free."""

    def append(self, seq: int, raw: bytes, after: Entry | None) -> Entry:
        """Keep an item that fits, behind `after` (None: nothing is held); what lay there counts no more."""

    def jot(self, seq: int, parts: Sequence[bytes]) -> bool:
        """Keep parts of the item `seq`, the first of which is its head, until it is appended.

        Returns:
            False: no room for more parts; append what they belong to, and begin again.
        """

    def read(self, entry: Entry) -> bytes:
        """The bytes of an item that has not been freed."""

    def remember(self, seq: int, raw: bytes) -> None:
        """Keep a copy of this item as long as the store is there; `free` leaves it alone. One that cannot be kept is
        missing in `remembered`. RUN_SEQ is the number of no item: that is the id of the run."""

    def remembered(self) -> Sequence[tuple[int, bytes]]:
        """The numbers and bytes of what was remembered, oldest first."""

    def free(self, entry: Entry) -> None:
        """Forget this item and all before it."""

    def close(self, *, delivered: bool) -> None:
        """Give up the resources; `delivered`: nothing is left that anybody needs."""

    def abandon(self) -> None:
        """This is the child of a fork: the store is the parent's. Let go without changing anything."""


class MemoryStore:
    """A store in the process's own memory; what it holds is lost with the process.

    Raises:
        ValueError: `limit` is below LEAST_STORE_BYTES.
    """

    full_cause = "outbox_full"
    # A bytes object, its place in the index and in the dictionary, beside the bytes themselves.
    _OVERHEAD = 128

    def __init__(self, limit: int) -> None:
        if limit < LEAST_STORE_BYTES:
            raise ValueError(f"an outbox needs at least {LEAST_STORE_BYTES} bytes, got {limit}")
        self._limit = limit
        self._used = 0
        self._raws: dict[int, bytes] = {}
        self._remembered: list[tuple[int, bytes]] = []
        self._oldest = 1

    def cost(self, size: int) -> int:
        return size + self._OVERHEAD

    def room(self) -> int:
        return self._limit - self._used

    def append(self, seq: int, raw: bytes, after: Entry | None) -> Entry:  # noqa: ARG002 - the number is enough here
        if (before := self._raws.get(seq)) is not None:
            self._used -= self.cost(len(before))
        self._raws[seq] = raw
        self._used += len(raw) + self._OVERHEAD
        return Entry(seq, seq, len(raw))

    def jot(self, seq: int, parts: Sequence[bytes]) -> bool:  # noqa: ARG002 - nothing of it would outlive the process
        return True

    def read(self, entry: Entry) -> bytes:
        return self._raws[entry.seq]

    def remember(self, seq: int, raw: bytes) -> None:
        self._remembered.append((seq, raw))

    def remembered(self) -> Sequence[tuple[int, bytes]]:
        return self._remembered

    def free(self, entry: Entry) -> None:
        for seq in range(self._oldest, entry.seq + 1):
            self._used -= self.cost(len(self._raws.pop(seq)))
        self._oldest = entry.seq + 1

    def close(self, *, delivered: bool) -> None:  # noqa: ARG002 - memory is given up either way
        self._raws.clear()

    def abandon(self) -> None:
        self._raws = {}
        self._remembered = []
