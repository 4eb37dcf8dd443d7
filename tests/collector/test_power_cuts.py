"""The journal loses its end at any moments, while ranks live, die, come again, and are delivered from their spools.

Real outboxes over spool files, and the core; no process, so that a hundred such runs are seen. The same with processes
is in tests/faults/test_power_failure.py.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path

import pytest

from rankd.agent.outbox import Outbox
from rankd.agent.spool import Spool
from rankd.collector.entries import Back, Checkpoint, Ended, Lost, Opened, decode_entry
from rankd.collector.protocol.records import Frame, NameTable, RankBlock
from rankd.collector.protocol.wire import Block, Note, Table, encode_item
from rankd.collector.run import RankState, Run

from .streams import Core, hello


class Process:
    """One process of a rank: pushes steps of two micro-steps, now and then nothing, a note, or more than fits."""

    def __init__(
        self, rank: int, world_size: int, number: int, step: int, directory: Path, source: random.Random
    ) -> None:
        self.hello = dataclasses.replace(hello(rank, world_size), session=number.to_bytes(16, "big"), pid=number)
        self.spool = Spool.create(directory / f"rank_{rank}.{number}.spool", 2**16, self.hello)
        self.outbox = Outbox(self.spool, window_bytes=4_000)
        self.rank, self.step, self.micro_step = rank, step, 0
        self.joined = False
        # (step, micro_step, value, how many records of it).
        self.pushed: list[tuple[int, int | None, float, int]] = []
        self._tables: dict[NameTable, int] = {}
        self._source = source

    def push(self) -> None:
        """The next position."""
        source = self._source
        self.micro_step += 1
        micro_step = self.micro_step if self.micro_step < 3 else None
        names = NameTable(tuple(f"{i}.weight" for i in range(source.choice([1, 2, 3]))))
        new = {} if names in self._tables else {names: len(self._tables) + 1}
        ids = {**self._tables, **new}
        value = source.random()
        metric = "device_norm" if micro_step is None else "local_norm"
        frames = (Frame.named(metric, names, [value] * len(names)),) if value < 0.8 else ()
        block = Block(0, self.step, micro_step, complete=True, time=0.0, frames=frames)
        raws = [*(encode_item(Table(0, number, table)) for table, number in new.items()), encode_item(block, ids)]
        if source.random() < 0.1:
            self.outbox.drop("too_large", 3)
        if self.outbox.put(raws, records=block.record_count, at=(self.step, micro_step)):
            self._tables = ids
            self.pushed += [(self.step, micro_step, value, len(names))] if frames else []
        if source.random() < 0.1:
            self.outbox.put([encode_item(Note(0, self.step, micro_step, "note", "n", 0.0))], at=(self.step, micro_step))
        if micro_step is None:
            self.step, self.micro_step = self.step + 1, 0

    def die(self, *, with_tables: bool) -> None:
        """From now on this is what delivers its spool."""
        self.spool.close(delivered=False)
        if not with_tables:
            self.spool.path.with_name(self.spool.path.name + ".tables").unlink(missing_ok=True)
        self.spool = Spool.open(self.spool.path)
        self.outbox = Outbox.recovered(self.spool, self.spool.entries, self.spool.next_seq)
        self.hello = dataclasses.replace(self.hello, recovered=True)
        self.joined = False


class Cuts:
    """A run, and what befalls it."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.source = random.Random(seed)
        self.held_bytes = self.source.choice([0, 1_000, 10**9])
        self.core = Core(self.held_bytes)
        self.directory = directory
        self.all: list[Process] = []
        self.dead: list[Process] = []
        world_size = self.source.choice([1, 2, 3])
        self.living = [self.process(rank, world_size, 1) for rank in range(world_size)]

    def process(self, rank: int, world_size: int, step: int) -> Process:
        self.all.append(Process(rank, world_size, len(self.all) + 1, step, self.directory, self.source))
        return self.all[-1]

    def deliver(self, process: Process, most: int = 10) -> None:
        """Some messages; acknowledgements may get lost."""
        intake, outbox = self.core.run.intake, process.outbox
        if intake.session(process.hello.session) is None:
            self.core.apply(Opened(process.hello))
        session = intake.session(process.hello.session)
        assert session is not None
        if not process.joined:
            outbox.rewind(session.stored)
            process.joined = True
        while most and (items := outbox.take(self.source.choice([50, 500, 5_000]))):
            admitted = intake.admit(session, items)
            if admitted.raws:
                self.core.apply(self.core.run.admitted(admitted))
            if self.source.random() < 0.9:
                outbox.acked(session.admitted)
            most -= 1

    def deliver_all(self, process: Process) -> None:
        while process.outbox.held_items:
            process.joined = False
            self.deliver(process, 1_000)

    def power_failure(self) -> None:
        """The journal ends earlier, as a rule a little; everybody says hello again."""
        core, count = self.core, len(self.core.entries)
        kept = self.source.choice([self.source.randrange(count + 1), max(0, count - self.source.randrange(6))])
        core.entries, core.released = core.entries[:kept], []
        core.run = Run(core.fetch, held_bytes=self.held_bytes)
        for reference in range(kept):
            entry = decode_entry(core.fetch(reference))
            assert not isinstance(entry, Checkpoint)
            core.released += core.run.apply(entry, reference)
        self.hung_up()

    def hung_up(self) -> None:
        for process in (*self.living, *self.dead):
            process.joined = False

    def death(self, index: int) -> None:
        """And the next process of that rank, which resumes somewhat before."""
        process = self.living[index]
        process.die(with_tables=self.source.random() < 0.8)
        self.dead.append(process)
        step = max(1, process.step - self.source.choice([0, 0, 1, 3]))
        self.living[index] = self.process(process.rank, len(self.living), step)

    def silence(self, rank: int) -> None:
        run = self.core.run
        if rank in run.counting():
            self.core.apply(Lost(rank, 60.0))
        elif rank in run.ranks and run.ranks[rank].state is RankState.LOST and run.intake.current(rank) is not None:
            self.core.apply(Back(rank))

    def happen(self) -> None:
        """Anything."""
        index = self.source.randrange(len(self.living))
        process, dice = self.living[index], self.source.random()
        if dice < 0.5:
            for _ in range(self.source.randrange(6)):
                process.push()
        elif dice < 0.8:
            self.deliver(process)
        elif dice < 0.85:
            self.core.restart()
            self.hung_up()
        elif dice < 0.92:
            self.power_failure()
        elif dice < 0.96:
            self.death(index)
        elif dice < 0.98:
            for each in self.dead[-1:]:
                self.deliver_all(each)
        else:
            self.silence(process.rank)
        if self.source.random() < 0.3:
            self.core.restart()

    def end(self) -> None:
        """All is delivered, and all say goodbye."""
        for process in self.living:
            process.outbox.finish("done", 0.0)
        for process in (*self.dead, *self.living):
            self.deliver_all(process)
            process.outbox.close()
        self.core.apply(Ended())


@pytest.mark.parametrize("seed", range(100))
def test_whatever_the_journal_loses_is_told_and_nothing_else_is_wrong(tmp_path: Path, seed: int) -> None:
    """Living ranks are never refused, no record comes twice, the accounts add up at each moment and say exactly what is
    missing of those that said goodbye, and the journal makes the same log again.
    """
    cuts = Cuts(seed, tmp_path)
    for _ in range(80):
        cuts.happen()
        assert list(cuts.core.run.accounts.discrepancies(complete=False)) == []
    cuts.end()
    run = cuts.core.run
    assert list(run.accounts.discrepancies(complete=False)) == []
    assert cuts.core.replayed() == cuts.core.released
    there = Counter(
        (block.rank, block.position.step, block.position.micro_step, frame.values[0])
        for block in cuts.core.released
        if isinstance(block, RankBlock)
        for frame in block.frames
    )
    assert set(there.values()) <= {1}
    assert set(there) <= {(process.rank, *pushed[:3]) for process in cuts.all for pushed in process.pushed}
    for process in cuts.living:
        session = run.intake.session(process.hello.session)
        assert session is not None
        account = run.accounts.processes[session.number]
        assert account.received + account.lost == sum(pushed[3] for pushed in process.pushed)
        written = sum(pushed[3] for pushed in process.pushed if (process.rank, *pushed[:3]) in there)
        assert account.written == written
    assert not list(tmp_path.iterdir())
