"""The outbox alone: numbers, bounds, window, gaps, goodbye, under any interleaving of its calls."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rankd.agent.outbox import MAX_HELD_ITEMS, Outbox
from rankd.agent.spool import Spool
from rankd.agent.store import LEAST_STORE_BYTES, RESERVE_BYTES, Entry, MemoryStore, Store
from rankd.collector.protocol.assembly import scalar_part
from rankd.collector.protocol.errors import ProtocolError
from rankd.collector.protocol.records import Frame, Level, NameTable
from rankd.collector.protocol.wire import (
    Block,
    Gap,
    Goodbye,
    Hello,
    Hole,
    Item,
    Note,
    Table,
    Tables,
    decode_item,
    encode_item,
    number_item,
)

HELLO = Hello(bytes(range(16)), "run", 0, 2, 1, "here", 1, 0.0)


def note(text: str, size: int = 0) -> bytes:
    """An item that is told from others by its text, of at least `size` bytes."""
    return encode_item(Note(0, 1, None, "test", text.ljust(size, "."), 0.0))


def decoded(raws: tuple[bytes, ...]) -> list[Item]:
    return [decode_item(raw, Tables()) for raw in raws]


def drained(outbox: Outbox) -> list[Item]:
    """All that the outbox still delivers to a collector that acknowledges at once."""
    out: list[Item] = []
    while items := decoded(outbox.take()):
        out += items
        outbox.acked(items[-1].seq)
    return out


@pytest.fixture(params=["memory", "spool"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store
    if request.param == "memory":
        made = MemoryStore(LEAST_STORE_BYTES)
    else:
        made = Spool.create(tmp_path / "x.spool", LEAST_STORE_BYTES, HELLO)
    yield made
    made.close(delivered=True)


def test_numbers_start_at_one_and_items_keep_their_order(store: Store) -> None:
    """Items come out in the order they were put, numbered 1, 2, 3."""
    outbox = Outbox(store)
    assert outbox.put((note("a"), note("b")))
    assert outbox.put((note("c"),))
    items = drained(outbox)
    assert [i.seq for i in items] == [1, 2, 3]
    assert [i.text for i in items if isinstance(i, Note)] == ["a", "b", "c"]


def test_a_block_that_does_not_fit_is_refused_whole(store: Store) -> None:
    """Of several items that belong together either all are accepted or none, and no number is used up."""
    outbox = Outbox(store)
    assert not outbox.put((note("small"), note("large", LEAST_STORE_BYTES)), records=7, at=(3, 2))
    assert outbox.next_seq == 1
    assert outbox.statistics().dropped == {store.full_cause: 7}
    assert outbox.take() == ()


def test_a_gap_comes_before_the_next_accepted_block(store: Store) -> None:
    """What was refused stands as one gap, from its first to its last position, before what follows it."""
    outbox = Outbox(store)
    size = LEAST_STORE_BYTES
    assert outbox.put((note("a"),), records=1, at=(1, 1))
    assert not outbox.put((note("b", size),), records=10, at=(1, 2))
    assert not outbox.put((note("c", size),), records=5, at=(2, None))
    assert outbox.put((note("d"),), records=1, at=(3, 1))
    _, gap, last = drained(outbox)
    assert gap == Gap(2, store.full_cause, 15, (1, 2), (2, None))
    assert isinstance(last, Note)
    assert (last.seq, last.text) == (3, "d")
    assert outbox.put((note("e"),))
    assert len(drained(outbox)) == 1


def test_goodbye_fits_into_a_full_store(store: Store) -> None:
    """However full the store is and however many causes there are, the gaps and the goodbye are put."""
    outbox = Outbox(store)
    while outbox.put((note("x", 100),), records=1, at=(1, 1)):
        pass
    while outbox.put((note("x"),), records=1, at=(1, 1)):
        pass
    for i in range(20):
        outbox.drop(f"{'cause ' * 9}{i}", 2**50, (2**62, 2**62))
    outbox.finish("é" * 5_000, 1.0)
    *_, goodbye = drained(outbox)
    assert isinstance(goodbye, Goodbye)
    counts = outbox.statistics()
    assert goodbye.produced == counts.produced
    assert goodbye.dropped == counts.dropped
    assert sum(goodbye.dropped.values()) == 20 * 2**50 + 2


def test_nothing_follows_the_goodbye() -> None:
    """A put after the end is refused and counted; a second finish changes nothing."""
    outbox = Outbox(MemoryStore(LEAST_STORE_BYTES))
    outbox.finish("end", 0.0)
    outbox.finish("again", 0.0)
    assert not outbox.put((note("late"),), records=2, at=(1, 1))
    assert outbox.statistics().dropped == {"finished": 2}
    assert len(drained(outbox)) == 1


def test_tiny_items_are_bounded_by_number() -> None:
    """The index, which lies in memory whatever the store, holds no more than MAX_HELD_ITEMS."""
    outbox = Outbox(MemoryStore(2**30))
    assert outbox.put([note("")] * MAX_HELD_ITEMS)
    assert not outbox.put((note(""),), records=1, at=(1, 1))
    assert outbox.statistics().dropped == {"outbox_full": 1}


def test_window_bounds_what_is_in_flight() -> None:
    """No more than the window is in flight, except for a single item that is larger."""
    outbox = Outbox(MemoryStore(2**20), window_bytes=1_000)
    for _ in range(10):
        outbox.put((note("x", 400),))
    assert len(outbox.take()) == 2
    assert len(outbox.take()) == 0
    assert not outbox.has_sendable
    outbox.acked(1)
    assert outbox.has_sendable
    outbox.acked(10)
    outbox.put((note("x", 5_000),))
    assert len(outbox.take()) == 1


def test_batches_are_cut_at_their_size() -> None:
    """A batch holds no more than was asked for, but at least one item."""
    outbox = Outbox(MemoryStore(2**20))
    for _ in range(10):
        outbox.put((note("x", 400),))
    assert len(outbox.take(1_000)) == 2
    assert len(outbox.take(10)) == 1


@pytest.mark.parametrize("call", ["acked", "rewind"])
def test_an_acknowledgement_of_what_does_not_exist_is_the_peers_fault(call: str) -> None:
    """A number beyond the last frees nothing."""
    outbox = Outbox(MemoryStore(LEAST_STORE_BYTES))
    outbox.put((note("a"),))
    outbox.take()
    with pytest.raises(ProtocolError, match="acknowledges item 2"):
        getattr(outbox, call)(2)
    assert outbox.held_items == 1


def test_a_store_too_small_is_refused() -> None:
    """A bound below the least of use is an error that names it."""
    with pytest.raises(ValueError, match=str(LEAST_STORE_BYTES)):
        MemoryStore(LEAST_STORE_BYTES - 1)


def test_an_item_is_numbered_once() -> None:
    """A number cannot be given over another one, and large numbers read back."""
    raw = number_item(note("a"), 2**40)
    assert decoded((raw,))[0].seq == 2**40
    with pytest.raises(ValueError, match="once"):
        number_item(raw, 2)


def test_abandoned_outbox_does_nothing() -> None:
    """After a fork the child's outbox refuses without a lock, and changes no count."""
    outbox = Outbox(MemoryStore(LEAST_STORE_BYTES))
    outbox.put((note("a"),), records=1)
    outbox._lock.acquire()  # the parent's sender held it when the process was forked
    outbox.abandon()
    assert not outbox.put((note("b"),), records=1)
    outbox.drop("x", 1)
    outbox.finish("end", 0.0)
    outbox.close()
    assert outbox.take() == ()
    assert outbox.statistics().produced == 1


def test_a_sender_that_ends_late_finds_a_closed_outbox(store: Store) -> None:
    """What it hears then changes nothing; the file keeps what was not acknowledged before."""
    outbox = Outbox(store)
    outbox.put([note("a"), note("b")], records=2)
    outbox.take()
    outbox.close()
    outbox.acked(2)
    outbox.rewind(1)
    assert outbox.take() == ()
    if isinstance(store, Spool):
        assert store.path.exists()


def test_two_threads_lose_nothing() -> None:
    """One thread puts while another takes and acknowledges; all arrives once, in order."""
    outbox = Outbox(MemoryStore(2**20))
    got: list[int] = []

    def deliver() -> None:
        while len(got) < 5_000:
            items = decoded(outbox.take(2_000))
            got.extend(i.seq for i in items)
            if items:
                outbox.acked(items[-1].seq)

    thread = threading.Thread(target=deliver, daemon=True)
    thread.start()
    for _ in range(5_000):
        while not outbox.put((note("x", 50),)):
            outbox._pending.clear()  # retried, so nothing is missing
    thread.join(30)
    assert got == list(range(1, 5_001))
    assert outbox.held_items == 0


def hold(outbox: Outbox, *names: str, at: tuple[int, int | None] = (1, 1)) -> None:
    for name in names:
        level = Level.STEP if at[1] is None else Level.MICRO_STEP
        assert outbox.hold(scalar_part(name, level, 0.5), at, 1.5)


def test_scalars_are_gathered_into_a_block_for_each_position(store: Store) -> None:
    """Both go before whatever is put next, in the order in which their first scalars came."""
    outbox = Outbox(store)
    hold(outbox, "a", "b")
    hold(outbox, "c", at=(1, None))
    hold(outbox, "d")
    assert outbox.take() == ()
    assert outbox.put((note("after"),))
    first, second, last = drained(outbox)
    assert isinstance(first, Block)
    assert isinstance(second, Block)
    assert [frame.metric for frame in first.frames] == ["a", "b", "d"]
    assert [frame.metric for frame in second.frames] == ["c"]
    assert (first.seq, first.step, first.micro_step, first.complete, first.time) == (1, 1, 1, False, 1.5)
    assert last == Note(3, 1, None, "test", "after", 0.0)


def test_a_scalar_without_room_is_refused_and_those_before_it_stay(store: Store) -> None:
    """What was accepted has its room; the gap stands behind it."""
    outbox = Outbox(store)
    accepted = 0
    while outbox.hold(scalar_part("x" * 200, Level.STEP, 1.0), (1, None), 0.0):
        accepted += 1
    assert not outbox.hold(scalar_part("x" * 200, Level.STEP, 1.0), (2, None), 0.0)
    outbox.finish("end", 0.0)
    *blocks, gap, goodbye = drained(outbox)
    assert sum(len(block.frames) for block in blocks if isinstance(block, Block)) == accepted > 10
    assert isinstance(gap, Gap)
    assert (gap.records, gap.last) == (2, (2, None))
    assert isinstance(goodbye, Goodbye)
    assert goodbye.produced == accepted + 2


def norms(table_id: int, step: int, *, defines: bool) -> tuple[bytes, ...]:
    """A block of two records, and the definition of its names."""
    names = NameTable((f"{table_id}.weight", f"{table_id}.bias"))
    block = Block(0, step, 1, True, 0.0, (Frame.named("local_norm", names, [1.0, 2.0]),))
    return (*([encode_item(Table(0, table_id, names))] if defines else []), encode_item(block, {names: table_id}))


def filled(store: Store) -> Outbox:
    """Ten items: table 1 and blocks of the steps 1 to 3, table 2 and step 4, steps 5 and 6, two scalars, a note."""
    outbox = Outbox(store)
    for step in range(1, 7):
        assert outbox.put(norms(1 + (step == 4), step, defines=step in (1, 4)), records=2, at=(step, 1))
    assert outbox.hold(scalar_part("x", Level.MICRO_STEP, 1.0), (7, 1), 0.0)
    assert outbox.hold(scalar_part("y", Level.MICRO_STEP, 1.0), (7, 1), 0.0)
    assert outbox.put((note("end"),))
    return outbox


@pytest.mark.parametrize(
    ("acked", "known", "stands_for_it"),
    [
        (8, 0, [(1, 1), Hole(4, 2, 12, (6, 1)), (5, 2), Hole(8, 6, 12, (6, 1))]),
        (8, 1, [Hole(4, 2, 12, (6, 1)), (5, 2), Hole(8, 6, 12, (6, 1))]),
        (8, 5, [Hole(8, 6, 12, (6, 1))]),
        (5, 4, [(5, 2)]),
        (5, 3, [Hole(4, 4, 6, (3, 1)), (5, 2)]),
        (9, 8, [Hole(9, 9, 14, (7, 1))]),
        (8, 8, []),
    ],
)
def test_what_a_journal_has_lost_is_told_and_its_tables_come_again(
    store: Store, acked: int, known: int, stands_for_it: list[Hole | tuple[int, int]]
) -> None:
    """A welcome behind what was acknowledged: tables as they were, holes between them, then all that is still here."""
    outbox = filled(store)
    outbox.take()
    outbox.acked(acked)
    for _ in range(2):
        assert outbox.rewind(known) == acked - known
        assert outbox.has_sendable
        assert len(outbox.take(1)) == 1
    outbox.rewind(known)
    tables, items = Tables(), []
    for table_id in (1, 2):
        tables.define(table_id, NameTable((f"{table_id}.weight", f"{table_id}.bias")))
    while raws := outbox.take():
        items += [decode_item(raw, tables) for raw in raws]
    told = [item for item in items if item.seq <= acked]
    assert [(i.seq, i.table_id) if isinstance(i, Table) else i for i in told] == stands_for_it
    assert [item.seq for item in items if item.seq > acked] == list(range(acked + 1, 11))
    assert not outbox.has_unsent


def test_a_dead_process_can_tell_what_a_journal_has_lost(tmp_path: Path) -> None:
    """Its tables lie beside its spool, whatever was acknowledged; both files go when all is delivered."""
    path = tmp_path / "x.spool"
    store = Spool.create(path, LEAST_STORE_BYTES, HELLO)
    outbox = filled(store)
    outbox.take()
    outbox.acked(8)
    store.close(delivered=False)
    beside = path.with_name("x.spool.tables")
    with beside.open("ab") as file:
        file.write(b"torn")
    spool = Spool.open(path)
    outbox = Outbox.recovered(spool, spool.entries, spool.next_seq)
    assert outbox.rewind(0) == 8
    raws = outbox.take()
    assert [decode_item(raw, Tables()) for raw in raws][1::2] == [Hole(4, 2), Hole(8, 6)]
    assert [item.seq for item in decoded(raws[::2])] == [1, 5]
    outbox.rewind(10)
    outbox.acked(outbox.next_seq)
    outbox.close()
    assert list(tmp_path.iterdir()) == []


class Delivery(RuleBasedStateMachine):
    """An outbox, a wire that may break, and a journal that checks: nothing lost, nothing twice, no holes."""

    @initialize(kind=st.sampled_from(["memory", "spool", "killed"]), window=st.integers(200, 5_000))
    def begin(self, kind: str, window: int) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.store: Store = MemoryStore(LEAST_STORE_BYTES)
        if kind != "memory":
            self.store = Spool.create(Path(self.directory.name) / "x.spool", LEAST_STORE_BYTES, HELLO)
        self.killed = kind == "killed"
        self.outbox = Outbox(self.store, window)
        self.accepted: list[str] = []
        self.held: list[str] = []
        self.wire: list[list[Item]] = []
        self.journal: list[Item] = []
        self.names = iter(range(10**9))

    @rule(sizes=st.lists(st.integers(1, 4_000), min_size=1, max_size=4), step=st.integers(1, 9))
    def put(self, sizes: list[int], step: int) -> None:
        texts = [f"{next(self.names)}".ljust(size, ".") for size in sizes]
        if self.outbox.put([note(text) for text in texts], records=len(sizes), at=(step, 1)):
            self.accepted += texts

    @rule(count=st.integers(1, 300), micro_step=st.sampled_from([1, None]))
    def hold(self, count: int, micro_step: int | None) -> None:
        level = Level.STEP if micro_step is None else Level.MICRO_STEP
        for _ in range(count):
            name = f"scalar_{next(self.names)}"
            if self.outbox.hold(scalar_part(name, level, 1.0), (1, micro_step), 0.0):
                self.held.append(name)

    @rule(records=st.integers(1, 5))
    def drop(self, records: int) -> None:
        self.outbox.drop("too_large", records, (1, None))

    @rule(size=st.integers(1, 5_000))
    def take(self, size: int) -> None:
        if items := decoded(self.outbox.take(size)):
            self.wire.append(items)

    @precondition(lambda self: bool(self.wire))
    @rule()
    def arrive(self) -> None:
        for item in self.wire.pop(0):
            if item.seq > len(self.journal):
                assert item.seq == len(self.journal) + 1, "a hole"
                self.journal.append(item)

    @rule(back=st.integers(0, 3))
    def acknowledge(self, back: int) -> None:
        self.outbox.acked(max(0, len(self.journal) - back))

    @rule()
    def reconnect(self) -> None:
        self.wire.clear()
        self.outbox.rewind(len(self.journal))

    @invariant()
    def bounded(self) -> None:
        counts = self.outbox.statistics()
        assert counts.held_bytes <= LEAST_STORE_BYTES - RESERVE_BYTES
        assert counts.acked_seq + counts.held_items == counts.last_seq

    def teardown(self) -> None:
        if not hasattr(self, "outbox"):
            return
        produced, dropped = self.outbox.statistics().produced, self.outbox.statistics().dropped
        if self.killed:
            self.store.close(delivered=False)
            spool = Spool.open(Path(self.directory.name) / "x.spool")
            self.outbox = Outbox.recovered(spool, spool.entries, spool.next_seq)
        self.outbox.finish("end", 0.0)
        while self.outbox.held_items:
            self.reconnect()
            while items := decoded(self.outbox.take()):
                self.wire.append(items)
                self.arrive()
                self.outbox.acked(len(self.journal))
        assert [i.text for i in self.journal if isinstance(i, Note)] == self.accepted
        frames = [frame.metric for i in self.journal if isinstance(i, Block) for frame in i.frames]
        assert sorted(frames) == sorted(self.held)
        assert produced == len(self.accepted) + len(self.held) + sum(dropped.values())
        if not self.killed:
            assert sum(i.records for i in self.journal if isinstance(i, Gap)) == sum(dropped.values())
            assert isinstance(self.journal[-1], Goodbye)
        self.outbox.close()
        assert not list(Path(self.directory.name).iterdir())
        self.directory.cleanup()


TestDelivery = Delivery.TestCase
TestDelivery.settings = settings(stateful_step_count=40)


def test_a_sender_that_is_slower_than_the_end_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has taken something, and reads it when the spool is closed: no error, the file keeps it."""
    spool = Spool.create(tmp_path / "x.spool", LEAST_STORE_BYTES, HELLO)
    outbox = Outbox(spool)
    assert outbox.put([encode_item(Note(0, 1, None, "note", "n", 0.0))])
    read = spool.read

    def late(entry: Entry) -> bytes:
        outbox.close()
        return read(entry)

    monkeypatch.setattr(spool, "read", late)
    assert outbox.take() == ()
    again = Spool.open(tmp_path / "x.spool")
    assert [entry.seq for entry in again.entries] == [1]
    again.close(delivered=True)
