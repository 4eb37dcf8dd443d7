"""Both sides of profiling sessions over a wire that loses, delays and reorders, while collector and ranks restart.

The clock, the wire and what is chosen next are the test's; the profiler is a stand-in that writes a small trace.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import defaultdict
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from rankd.collector.protocol.errors import RankdError
from rankd.collector.protocol.steering import Decide
from rankd.profiler_ctl.agreement import Phase
from rankd.profiler_ctl.asked import STATIC, Asked, Body, ProfilerOptions
from rankd.profiler_ctl.choosing import Choice
from rankd.profiler_ctl.config import ProfilerConfig
from rankd.profiler_ctl.coordinator import Coordinator, Limits
from rankd.profiler_ctl.participant import Participant
from rankd.profiler_ctl.plan import State

RANKS = 3
TRACE = json.dumps([{"name": "MatMul", "ph": "X"}])


class Instant:
    """A profiler whose output is there at once."""

    def __init__(self, rank_dir: Path) -> None:
        self._output = rank_dir / f"host_1_{len(list(rank_dir.iterdir())):03}_ascend_ms"

    def step(self) -> None:
        pass

    def stop(self) -> None:
        self._output.mkdir()
        (self._output / "trace_view.json").write_text(TRACE)

    def wait(self, seconds: float) -> bool:
        return True

    def abandon(self) -> None:
        pass


class World:
    """A collector, its journal, ranks, and the messages on their way."""

    def __init__(self, seed: int, folder: Path, config: ProfilerConfig | None = None) -> None:
        self.random = random.Random(seed)
        # How much of what happens is training: from a slow one to one that outruns every message.
        self.haste = self.random.choice((0.3, 0.5, 0.7))
        self.folder = folder
        self.config = config or ProfilerConfig()
        self.now = 0.0
        self.journal: dict[str, Body] = {}
        self.decided: list[Decide] = []
        self.processes = [0] * RANKS
        self.steps = [0] * RANKS
        self.inside = [False] * RANKS
        self.up: list[list[Body]] = [[] for _ in range(RANKS)]
        self.down: list[list[Body]] = [[] for _ in range(RANKS)]
        # By session: the steps at which a rank has started.
        self.starts: dict[str, set[int]] = defaultdict(set)
        self.participants = [self._participant(rank) for rank in range(RANKS)]
        self.coordinator = self._collector()
        for rank in range(RANKS):
            self.join(rank)

    def _participant(self, rank: int) -> Participant:
        self.processes[rank] += 1
        self.inside[rank] = False

        def make(options: ProfilerOptions, rank_dir: Path, steps: int) -> Instant:
            recording = [n for n in (STATIC, *self.names()) if self._state(rank, n) is State.RECORDING]
            assert len(recording) == 1
            self.starts[recording[0]].add(self.steps[rank])
            return Instant(rank_dir)

        return Participant(
            rank,
            self.config,
            lambda body: self.up[rank].append(body),
            cwd=self.folder,
            profiler=make,
            examine=lambda *_: "no luck" if self.random.random() < 0.03 else None,
            aside=lambda work: work(),
            clock=lambda: self.now,
        )

    def _collector(self) -> Coordinator:
        # Beats that are younger than they say: steps are chosen too near, and some ranks hear of them too late.
        haste = self.random.choice((0.0, -0.8))
        return Coordinator(Limits(), 0.3 + haste, list(self.journal.items()), self.now)

    def names(self) -> list[str]:
        return [f"p{n}" for n in range(1, 40)]

    def _state(self, rank: int, name: str) -> State | None:
        session = self.participants[rank].session(name)
        return None if session is None else session.plan.state

    def settle(self, crash: bool = False) -> None:
        """Journal and send; a collector that crashes has journalled some of it and sent less."""
        out = self.coordinator.take()
        if crash:
            out = out[: self.random.randint(0, len(out))]
        for each in out:
            if isinstance(each, Decide):
                self.journal[each.key] = each.facts
                self.decided.append(each)
            elif not crash or self.random.random() < 0.5:
                self.down[each.rank].append(each.facts)

    # -- what can happen ----------------------------------------------------------------------------------------------

    def train(self, rank: int) -> None:
        """A step begins or ends."""
        if self.inside[rank]:
            self.participants[rank].step_end(self.steps[rank])
        else:
            self.steps[rank] += 1
            self.participants[rank].step_begin(self.steps[rank])
        self.inside[rank] = not self.inside[rank]
        self.participants[rank].notes()
        if self.random.random() < 0.5:
            self.coordinator.at(rank, self.steps[rank], self.now)

    def deliver(self, rank: int, *, orderly: bool = False) -> None:
        """A message arrives, not always the first one; some arrive twice."""
        for queue, take in ((self.down[rank], self._to_rank), (self.up[rank], self._to_collector)):
            if queue:
                index = 0 if orderly or self.random.random() < 0.7 else self.random.randrange(len(queue))
                twice = not orderly and self.random.random() < 0.1
                take(rank, queue[index] if twice else queue.pop(index))

    def _to_rank(self, rank: int, body: Body) -> None:
        self.participants[rank].command(body)

    def _to_collector(self, rank: int, body: Body) -> None:
        self.coordinator.reported(rank, body, self.now)

    def lose(self, rank: int) -> None:
        """A message is lost."""
        for queue in (self.down[rank], self.up[rank]):
            if queue and self.random.random() < 0.5:
                queue.pop(self.random.randrange(len(queue)))

    def join(self, rank: int) -> None:
        """The rank's connection is a new one: what was on its way is gone."""
        self.up[rank].clear()
        self.down[rank].clear()
        self.coordinator.joined(rank, self.processes[rank], self.now, world_size=RANKS)

    def restart_rank(self, rank: int) -> None:
        """A new process of a rank, which may go on from an earlier step."""
        self.participants[rank] = self._participant(rank)
        self.steps[rank] = max(0, self.steps[rank] - self.random.randint(0, 3))
        if self.random.random() < 0.5:
            self.coordinator.gone(rank, "its process is gone", self.now)
        self.join(rank)

    def restart_collector(self) -> None:
        """The collector dies between two things that it does, and is made again from the journal."""
        self.settle(crash=True)
        self.coordinator = self._collector()
        for rank in range(RANKS):
            self.join(rank)

    def ask(self) -> None:
        """Somebody asks for a session, or for the end of all."""
        try:
            if self.random.random() < 0.2:
                self.coordinator.ask("stop", {}, self.now)
                return
            ranks = ",".join(map(str, sorted(self.random.sample(range(RANKS), self.random.randint(1, RANKS)))))
            at = None if self.random.random() < 0.7 else max(self.steps) + self.random.randint(1, 20)
            asked = Asked(self.random.randint(1, 4), at)
            self.coordinator.ask("start", {**Choice(ranks).body(), **asked.body()}, self.now)
        except RankdError:
            pass

    def storm(self, turns: int) -> None:
        """Anything, in any order."""
        for _ in range(turns):
            rank = self.random.randrange(RANKS)
            chance = self.random.random()
            self.now += self.random.random() * 0.4
            if chance < self.haste:
                self.train(rank)
            elif chance < 0.86:
                self.deliver(rank)
            elif chance < 0.89:
                self.lose(rank)
            elif chance < 0.92:
                self.join(rank)
            elif chance < 0.93:
                self.restart_rank(rank)
            elif chance < 0.935:
                self.restart_collector()
            elif chance < 0.94:
                self.coordinator.gone(rank, "silent", self.now)
            elif chance < 0.98:
                self.ask()
            self.coordinator.tick(self.now)
            self.settle()
            self.check()

    def calm(self, turns: int) -> None:
        """Everybody is there, and everything arrives."""
        for rank in range(RANKS):
            self.join(rank)
        for _ in range(turns):
            self.now += 1.0
            for rank in range(RANKS):
                self.train(rank)
                for _ in range(5):
                    self.deliver(rank, orderly=True)
            self.coordinator.tick(self.now)
            self.settle()
            self.check()

    def check(self) -> None:
        """What holds at every moment."""
        for name, steps in self.starts.items():
            if name == STATIC:
                continue
            assert len(steps) == 1, f"{name} started at {steps}"
            phases = [str(each.facts["phase"]) for each in self.decided if each.key == name]
            assert Phase.COMMITTED.value in phases, f"{name} started and was never committed: {phases}"
            assert Phase.ABORTED.value not in phases
            assert {each.facts["start"] for each in self.decided if each.key == name} <= {None, *steps}


@given(st.integers(0, 2**32))
def test_no_two_ranks_of_a_session_start_at_different_steps_and_all_sessions_end(seed: int) -> None:
    """Whatever is lost, late, doubled or restarted; nobody starts what was called off before a step was decided."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(seed, Path(folder))
        world.storm(200)
        world.calm(60)
        for rank in range(RANKS):
            world.participants[rank].close()
            for _ in range(20):
                world.deliver(rank, orderly=True)
            world.coordinator.gone(rank, "done", world.now)
        world.settle()
        world.check()
        assert [s.name for s in world.coordinator.sessions.values() if not s.phase.final] == []
        for rank in range(RANKS):
            states = {name: world._state(rank, name) for name in world.names()}
            assert [name for name, state in states.items() if state is not None and not state.final] == []


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(1, RANKS), st.integers(1, 5))
def test_on_a_good_wire_every_session_records_its_steps_on_all_its_ranks(seed: int, ranks: int, steps: int) -> None:
    """Exactly the steps asked for, at one step."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(seed, Path(folder))
        for participant in world.participants:
            participant._examine = lambda *_: None
        world.calm(8)
        body = {**Choice(f"0-{ranks - 1}").body(), **Asked(steps).body()}
        assert world.coordinator.ask("start", body, world.now)["session"] == "p1"
        world.calm(60)
        session = world.coordinator.sessions["p1"]
        assert (session.phase, session.reason) == (Phase.DONE, "")
        for rank in range(ranks):
            report = world.participants[rank].session("p1")
            assert report is not None
            assert len(report.report.steps) == steps
        assert len(world.starts["p1"]) == 1
        assert world.coordinator.measured(session.asked.options) == len(TRACE) // steps
