"""Profiling as a part of the collector: what ranks do becomes news, what is decided becomes moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rankd.collector.protocol.messages import Facts
from rankd.collector.protocol.steering import Decide, Move, Rank, Tell
from rankd.profiler_ctl.asked import Asked, Value
from rankd.profiler_ctl.choosing import Choice
from rankd.profiler_ctl.coordinator import Limits
from rankd.profiler_ctl.part import ProfilingPart


@dataclass
class Now:
    """Ranks at these steps (`protocol.steering.Ranks`)."""

    steps: dict[int, int]
    now: float = 100.0
    seconds_per_step: float | None = 0.5
    beat_interval: float = 1.0
    world_size: int = 3
    gone: dict[int, str] = field(default_factory=dict)

    def connected(self) -> Sequence[Rank]:
        return [Rank(r, step, 0.2, "node", {}, process=r, total_steps=1_000) for r, step in sorted(self.steps.items())]

    def get(self, rank: int) -> Rank | None:
        return next((each for each in self.connected() if each.rank == rank), None)

    def left(self, rank: int) -> str | None:
        return self.gone.get(rank)


class Both:
    """A part with its ranks, and all moves."""

    def __init__(self) -> None:
        self.part = ProfilingPart(Limits(), 1.0)
        self.ranks = Now({0: 10, 1: 10, 2: 10})
        self.serial = 0
        for rank in self.ranks.steps:
            self.part.joined(rank, self.ranks)
        self.part.tick(self.ranks)

    def start(self, ranks: str = "0-1") -> Sequence[Move]:
        moves, answer = self.part.asked("profile.start", {**Choice(ranks).body(), **Asked(2).body()}, self.ranks)
        assert answer["session"] == "p1"
        return moves

    def report(self, rank: int, state: str, **more: Value) -> Sequence[Move]:
        self.serial += 1
        facts: Facts = {"session": "p1", "state": state, "serial": self.serial, **more}
        return self.part.reported(rank, "profile", facts, self.ranks)

    def session(self) -> Mapping[str, object]:
        (session,) = self.part.status()
        return session


def told(moves: Sequence[Move]) -> list[tuple[int, Value]]:
    return [(move.rank, move.facts["do"]) for move in moves if isinstance(move, Tell)]


def test_a_session_from_the_question_to_its_end() -> None:
    """The kind of every move is the part's; the pace is the run's where the ranks' own is not known."""
    both = Both()
    assert told(both.start()) == [(0, "propose"), (1, "propose")]
    both.report(0, "armed", step=10)
    moves = both.report(1, "armed", step=10)
    assert told(moves) == [(0, "commit"), (1, "commit")]
    (decided,) = [move for move in moves if isinstance(move, Decide)]
    # 2 s of margin at 0.5 s a step, and one under way.
    assert (decided.kind, decided.key, decided.facts["start"]) == ("profile", "p1", 15)
    for rank in (0, 1):
        both.report(rank, "done", bytes=10, count=2)
    assert (both.session()["phase"], both.session()["bytes"]) == ("done", 20)
    assert both.part.asked("profile.status", {}, both.ranks)[1] == {"sessions": both.part.status()}


def test_a_rank_that_has_left_is_noticed() -> None:
    """Before the step is decided that calls it off; the collector's end notices it at once."""
    both = Both()
    both.start()
    both.report(0, "armed")
    both.ranks.gone[1] = "lost"
    both.ranks.now += 0.1
    assert told(both.part.tick(both.ranks)) == [(0, "abort")]
    assert both.session()["reason"] == "rank 1: lost"
    both = Both()
    both.start("2")
    both.report(2, "armed")
    both.ranks.gone[2] = "ended"
    both.part.ending(both.ranks)
    assert (both.session()["phase"], both.session()["reason"]) == ("failed", "rank 2: ended")


def test_a_rank_that_is_not_connected_is_told_when_it_is_back() -> None:
    """Meanwhile it cannot be chosen."""
    both = Both()
    both.start()
    del both.ranks.steps[1]
    both.report(0, "armed")
    both.ranks.now += 5.0
    assert told(both.part.tick(both.ranks)) == []
    both.ranks.steps[1] = 11
    assert told(both.part.joined(1, both.ranks)) == [(1, "propose")]


def test_a_command_that_a_rank_could_not_obey_is_a_refusal() -> None:
    """Another version, no key: the reason is the rank's."""
    both = Both()
    both.start()
    both.part.reported(1, "profile", {"session": "p1", "do": "propose", "refused": "no proof of the key"}, both.ranks)
    assert both.session()["reason"] == "rank 1: no proof of the key"


def test_a_collector_that_starts_again_takes_up_what_was_decided() -> None:
    """From the newest decisions; the ranks are told as they come back."""
    both = Both()
    moves = [*both.start(), *both.report(0, "armed"), *both.report(1, "armed")]
    decisions = {move.key: move.facts for move in moves if isinstance(move, Decide)}
    again = ProfilingPart(Limits(), 1.0)
    again.restore(decisions)
    assert told(again.joined(0, both.ranks)) == [(0, "commit")]
