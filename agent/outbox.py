"""What this process has produced and the collector has not yet acknowledged, in the order of its numbers.

No socket, no file, no clock. The bytes of the items lie in a `Store`; the outbox keeps the numbers, the window and the
counts.

Scalars that come one by one (`hold`) are gathered into a block for each position, which is put before anything else
is. Until then the store has them jotted down, each with the number that its block will have, so they are as safe as
what was put.

A collector whose node loses power may have lost what it had acknowledged. Then `rewind` goes back behind what is still
here, and `take` gives first what stands for it: the definitions of name tables, which the store remembers, and a `Hole`
for all between them.

How two threads share it: the training thread calls `put`, `hold`, `drop` and `finish`; the sender thread calls `take`,
`acked` and `rewind`. One lock protects the index (the two queues, what is gathered, the numbers, the counts) and the
store's room; it is held for the time of one append or of moving entries from one queue to the other. `take` reads the
bytes after it has released the lock: only `acked` and `rewind` free them, and those belong to the same thread as
`take`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from ..collector.protocol.assembly import block_head, join_block
from ..collector.protocol.errors import ProtocolError
from ..collector.protocol.items import MAX_FRAMES_PER_BLOCK
from ..collector.protocol.wire import Gap, Goodbye, Hole, encode_item, is_table, number_item
from .store import RESERVE_BYTES, RUN_SEQ, Entry, Store

__all__ = ["BATCH_BYTES", "MAX_HELD_ITEMS", "WINDOW_BYTES", "At", "Outbox", "OutboxStatistics"]

# At most this much is on its way and not acknowledged. 1,024 ranks that catch up at once then ask at most 1 GiB of the
# collector's queues, and one rank over a link of 1 ms still moves 1 GB/s.
WINDOW_BYTES = 2**20
# One message: large enough that its overhead does not count, small enough that acknowledgements keep coming.
BATCH_BYTES = 2**18
# Half of what the protocol allows in one message.
_BATCH_ITEMS = 32_768
# The index costs some 200 bytes an item in memory wherever the bytes are, so tiny items are bounded by number: 50 MB.
MAX_HELD_ITEMS = 2**18
_MAX_CAUSES = 8
_OTHER_CAUSES = "other"
_MAX_CAUSE_BYTES = 64
_MAX_REASON_BYTES = 512
At: TypeAlias = "tuple[int, int | None]"
"""A place in training as the wire has it: (step, micro_step or None)."""


@dataclass(frozen=True, slots=True)
class OutboxStatistics:
    """The state of an outbox at one moment.

    Attributes:
        held_items, held_bytes: accepted and not acknowledged.
        in_flight_bytes: of those, sent and not acknowledged.
        produced: records that were offered; `produced` less all of `dropped` were accepted.
        dropped: records refused, by cause.
        last_seq: the number of the newest item; 0: none yet.
        acked_seq: the collector's journal has everything up to this number.
    """

    held_items: int
    held_bytes: int
    in_flight_bytes: int
    produced: int
    dropped: Mapping[str, int]
    last_seq: int
    acked_seq: int


@dataclass(slots=True)
class _Pending:
    """Refusals of one cause for which no gap has been put yet."""

    records: int
    first: At
    last: At


@dataclass(slots=True)
class _Gathered:
    """The block that the scalars of one position are gathered into."""

    seq: int
    head: bytes
    parts: list[bytes]


# A block without its parts: at most three numbers of 9 bytes, a time, and some headers.
_LARGEST_HEAD = 64


class Outbox:
    """The items between the training thread and the collector's journal.

    One thread puts; another sends. Neither calls from a signal handler: the lock is not re-entrant.
    """

    def __init__(self, store: Store, window_bytes: int = WINDOW_BYTES) -> None:
        self._store = store
        self._window = window_bytes
        self._lock = threading.Lock()
        self._unsent: deque[Entry] = deque()
        self._in_flight: deque[Entry] = deque()
        self._held_bytes = 0
        self._in_flight_bytes = 0
        self._acked = 0
        self._produced = 0
        self._dropped: dict[str, int] = {}
        self._pending: dict[str, _Pending] = {}
        self._gathered: dict[At, _Gathered] = {}
        # What the store will take for all of it.
        self._gathered_cost = 0
        self._at: At = (1, None)
        # Records accepted so far. Of what is held: the number of an item, how many were accepted up to it, and where
        # it belongs; and of what is not held any more, how many there were, and where the last belonged.
        self._accepted = 0
        self._marks: deque[tuple[int, int, At]] = deque()
        self._let_go: tuple[int, At | None] = (0, None)
        # What stands for items that were let go of, and is to be sent before those that are held.
        self._again: deque[bytes] = deque()
        self._run = ""
        self._finished = False
        self._abandoned = False
        self._recovered = False

    @classmethod
    def recovered(cls, store: Store, entries: Sequence[Entry], next_seq: int) -> Outbox:
        """The outbox of a process that is gone, over what its store still has; it accepts nothing new."""
        self = cls(store)
        self._unsent.extend(entries)
        self._held_bytes = sum(entry.size for entry in entries)
        self._acked = entries[0].seq - 1 if entries else next_seq - 1
        self._finished = self._recovered = True
        return self

    # -- the training thread ------------------------------------------------------------------------------------------

    def put(self, raws: Sequence[bytes], *, records: int = 0, at: At | None = None) -> bool:
        """Accept items, encoded with seq 0, all or none; they get their numbers here.

        Args:
            raws: what belongs together: the definitions of new name tables, then the block that uses them.
            records: how many records they hold, for the counts.
            at: where they belong, for the gap if they are refused; None: where the last ones belonged.

        Returns:
            False: refused and counted. No number is used up; tables among `raws` are not defined.
        """
        if self._abandoned:
            return False
        with self._lock:
            self._settle()
            self._produced += records
            self._at = at = at or self._at
            cause = self._refusal()
            if cause is None:
                numbered = self._number([*self._gaps(), *raws])
                if self._cost(numbered) + RESERVE_BYTES <= self._store.room():
                    self._append(numbered)
                    self._mark(records, at)
                    self._pending.clear()
                    return True
                cause = self._store.full_cause
            self._count_drop(cause, records, at)
            return False

    def hold(self, part: bytes, at: At, time: float) -> bool:
        """Accept one scalar (`assembly.scalar_part`) into the block of position `at`, which goes before the next `put`.

        Args:
            part: the encoded scalar.
            at: a position that is not completed yet.
            time: the block's, if this is its first.

        Returns:
            False: refused and counted.
        """
        if self._abandoned:
            return False
        with self._lock:
            self._produced += 1
            self._at = at
            cause = self._refusal()
            if cause is None and self._hold(part, at, time):
                return True
            self._count_drop(cause or self._store.full_cause, 1, at)
            return False

    def drop(self, cause: str, records: int, at: At | None = None) -> None:
        """Count records that could not even be offered (too large to encode, for one); they stand in the next gap."""
        if self._abandoned:
            return
        with self._lock:
            self._produced += records
            self._at = at = at or self._at
            self._count_drop(cause, records, at)

    def finish(self, reason: str, time: float) -> None:
        """Put what gaps are due and the goodbye, for which room was kept; nothing is accepted after it."""
        if self._abandoned:
            return
        with self._lock:
            if self._finished:
                return
            self._settle()
            text = reason.encode(errors="replace")[:_MAX_REASON_BYTES].decode(errors="ignore")
            goodbye = Goodbye(0, text, self._produced, dict(self._dropped), time)
            numbered = self._number([*self._gaps(), encode_item(goodbye)])
            assert self._cost(numbered) <= self._store.room(), "the reserve is too small for the end"
            self._append(numbered)
            self._pending.clear()
            self._finished = True

    # -- the sender thread --------------------------------------------------------------------------------------------

    def take(self, max_bytes: int = BATCH_BYTES) -> tuple[bytes, ...]:
        """The next unsent items that fit the window and `max_bytes`; they are now in flight. Empty: nothing to send.

        A single item that is larger than either goes alone.
        """
        batch: list[Entry] = []
        size = 0
        with self._lock:
            if self._again:
                return self._take_again(max_bytes)
            while self._unsent and not self._abandoned and len(batch) < _BATCH_ITEMS:
                more = self._unsent[0].size
                if batch and size + more > max_bytes:
                    break
                if self._in_flight and self._in_flight_bytes + more > self._window:
                    break
                entry = self._unsent.popleft()
                self._in_flight.append(entry)
                self._in_flight_bytes += more
                size += more
                batch.append(entry)
        try:
            return tuple([self._store.read(entry) for entry in batch])
        except ValueError:
            if not self._abandoned:
                raise
            return ()  # closed just now: the sender was slower to end than it is given time

    def acked(self, seq: int) -> None:
        """The journal has everything up to `seq`: forget it. An older number than before changes nothing.

        Raises:
            ProtocolError: no item has this number yet.
        """
        with self._lock:
            if self._abandoned:
                return  # the sender was slower to end than it is given time: what it hears now the next start hears too
            if seq > (last := self._last()) and not self._recovered:
                # A recovered file may lack its newest pages, where the machine went down and not only the process.
                raise ProtocolError(f"the collector acknowledges item {seq}, but this process produced {last}")
            newest: Entry | None = None
            for queue in (self._in_flight, self._unsent):
                while queue and queue[0].seq <= seq:
                    newest = queue.popleft()
                    self._held_bytes -= newest.size
                    if queue is self._in_flight:
                        self._in_flight_bytes -= newest.size
            if newest is not None:
                self._acked = newest.seq
                self._store.free(newest)
                while self._marks and self._marks[0][0] <= newest.seq:
                    self._let_go = self._marks.popleft()[1:]

    def joined(self, run: str) -> None:
        """A collector of this run has let the process in: what is held belongs there, and to no other run."""
        with self._lock:
            if not (self._abandoned or self._recovered or run == self._run):
                self._run = run
                self._store.remember(RUN_SEQ, run.encode())

    def rewind(self, acked: int) -> int:
        """A welcome: the journal has everything up to `acked`; all else counts as not sent.

        Returns:
            How many items were acknowledged before and are not in the journal any more; nobody has them.

        Raises:
            ProtocolError: no item has this number yet.
        """
        self.acked(acked)
        with self._lock:
            self._unsent.extendleft(reversed(self._in_flight))
            self._in_flight.clear()
            self._in_flight_bytes = 0
            self._again.clear()
            if self._abandoned or acked >= self._acked:
                return 0
            self._again.extend(self._standing_for(acked))
            return self._acked - acked

    # -- either -------------------------------------------------------------------------------------------------------

    @property
    def next_seq(self) -> int:
        """The number that the next new item will get."""
        with self._lock:
            return self._last() + 1

    @property
    def held_items(self) -> int:
        """How many items are accepted and not acknowledged."""
        return len(self._unsent) + len(self._in_flight)

    @property
    def has_in_flight(self) -> bool:
        """Something was sent and is not acknowledged."""
        return bool(self._in_flight)

    @property
    def has_unsent(self) -> bool:
        """Something has not been sent; the window may be closed to it."""
        return bool(self._unsent or self._again)

    @property
    def has_sendable(self) -> bool:
        """`take` would give something."""
        with self._lock:
            if self._again:
                return True
            if not self._unsent:
                return False
            return not self._in_flight or self._in_flight_bytes + self._unsent[0].size <= self._window

    def statistics(self) -> OutboxStatistics:
        """All counts, of one moment."""
        with self._lock:
            return OutboxStatistics(
                len(self._unsent) + len(self._in_flight),
                self._held_bytes,
                self._in_flight_bytes,
                self._produced,
                MappingProxyType(dict(self._dropped)),
                self._last(),
                self._acked,
            )

    def close(self) -> None:
        """Accept nothing more and close the store; a spool file goes if all, goodbye included, is acknowledged.

        Call it after the sender has ended.
        """
        if self._abandoned:
            return
        with self._lock:
            self._abandoned = True
            self._store.close(delivered=self._finished and not self.held_items)

    def abandon(self) -> None:
        """This is the child of a fork: do nothing from now on, and leave the parent's store as it is."""
        self._abandoned = True
        # The parent's sender may have held it at the moment of the fork; nobody here would release it.
        self._lock = threading.Lock()
        self._unsent, self._in_flight = deque(), deque()
        self._gathered, self._again = {}, deque()
        self._store.abandon()

    # -- inside, under the lock ---------------------------------------------------------------------------------------

    def _refusal(self) -> str | None:
        if self._finished:
            return "finished"
        return "outbox_full" if self.held_items >= MAX_HELD_ITEMS else None

    def _hold(self, part: bytes, at: At, time: float) -> bool:
        """False: no room."""
        if self._pending and not self._put_gaps(self._store.cost(_LARGEST_HEAD + len(part))):
            return False
        for _ in range(2):
            block, parts, more = self._gathered.get(at), [part], len(part)
            if block is None:
                block = _Gathered(self._last() + 1 + len(self._gathered), block_head(*at, time), [])
                parts, more = [block.head, part], self._store.cost(_LARGEST_HEAD) + more
            if self._gathered_cost + more + RESERVE_BYTES > self._store.room():
                return False
            if len(block.parts) < MAX_FRAMES_PER_BLOCK and self._store.jot(block.seq, parts):
                self._gathered[at] = block
                self._gathered_cost += more
                block.parts.append(part)
                return True
            self._settle()
        return False

    def _put_gaps(self, after: int) -> bool:
        """Put the gaps that are due, if `after` has room as well."""
        # The numbers of what is gathered are given: nothing may come in between.
        self._settle()
        gaps = self._number(self._gaps())
        if self._cost(gaps) + after + RESERVE_BYTES > self._store.room():
            return False
        self._append(gaps)
        self._pending.clear()
        return True

    def _settle(self) -> None:
        """Append what is gathered; there is room for it, since `hold` has accepted it."""
        if self._gathered:
            blocks = [join_block(block.head, block.parts) for block in self._gathered.values()]
            first = self._last() + 1
            self._append(self._number(blocks))
            for seq, (at, block) in enumerate(self._gathered.items(), first):
                self._mark(len(block.parts), at, seq)
            self._gathered.clear()
            self._gathered_cost = 0

    def _count_drop(self, cause: str, records: int, at: At) -> None:
        known = self._dropped
        if cause not in known and (len(known) >= _MAX_CAUSES - 1 or len(cause.encode()) > _MAX_CAUSE_BYTES):
            cause = _OTHER_CAUSES
        known[cause] = known.get(cause, 0) + records
        pending = self._pending.setdefault(cause, _Pending(0, at, at))
        pending.records += records
        pending.last = at

    def _gaps(self) -> list[bytes]:
        if not self._pending:
            return []
        return [encode_item(Gap(0, cause, p.records, p.first, p.last)) for cause, p in self._pending.items()]

    def _mark(self, records: int, at: At, seq: int | None = None) -> None:
        """These records were accepted, up to the item `seq` (None: the newest)."""
        if records:
            self._accepted += records
            self._marks.append((self._last() if seq is None else seq, self._accepted, at))

    def _standing_for(self, acked: int) -> Iterator[bytes]:
        """For the items after `acked` that were let go of: the tables among them, and holes for the rest."""
        accepted, last = (None, None) if self._recovered else self._let_go
        first = acked + 1
        for seq, raw in self._store.remembered():
            if acked < seq <= self._acked:
                if first < seq:
                    yield encode_item(Hole(seq - 1, first, accepted, last))
                yield raw
                first = seq + 1
        if first <= self._acked:
            yield encode_item(Hole(self._acked, first, accepted, last))

    def _take_again(self, max_bytes: int) -> tuple[bytes, ...]:
        batch = [self._again.popleft()]
        size = len(batch[0])
        while self._again and size + len(self._again[0]) <= max_bytes and len(batch) < _BATCH_ITEMS:
            size += len(self._again[0])
            batch.append(self._again.popleft())
        return tuple(batch)

    def _number(self, raws: Sequence[bytes]) -> list[bytes]:
        return [number_item(raw, seq) for seq, raw in enumerate(raws, self._last() + 1)]

    def _cost(self, raws: Sequence[bytes]) -> int:
        return sum([self._store.cost(len(raw)) for raw in raws])

    def _newest(self) -> Entry | None:
        queue = self._unsent or self._in_flight
        return queue[-1] if queue else None

    def _last(self) -> int:
        newest = self._newest()
        return self._acked if newest is None else newest.seq

    def _append(self, numbered: Sequence[bytes]) -> None:
        # Ctrl-C may interrupt this anywhere. Items exist once the queue has them, which is one step; the numbers, and
        # where the next one goes, follow from the queue.
        entries: list[Entry] = []
        newest, seq = self._newest(), self._last()
        for raw in numbered:
            seq += 1
            newest = self._store.append(seq, raw, newest)
            entries.append(newest)
        self._unsent.extend(entries)
        self._held_bytes += sum([entry.size for entry in entries])
        for entry, raw in zip(entries, numbered, strict=True):
            if is_table(raw):
                self._store.remember(entry.seq, raw)
