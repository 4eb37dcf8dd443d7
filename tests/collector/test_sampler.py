"""`rankd sample`, the collector's side: one first step for all ranks, which none of them has reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankd.agent.resampling import Resampling
from rankd.agent.sampling import Rates, Sampling
from rankd.collector.protocol.errors import RankdError
from rankd.collector.protocol.messages import Facts
from rankd.collector.protocol.steering import Decide, Move, Rank, Tell, sampled_text
from rankd.collector.sampler import Sampler


@dataclass
class Now:
    """Ranks at these steps (`protocol.steering.Ranks`)."""

    steps: Mapping[int, int]
    seconds_per_step: float | None = 1.0
    now: float = 0.0
    beat_interval: float = 1.0
    world_size: int = field(default=4)

    def connected(self) -> Sequence[Rank]:
        return [Rank(rank, step, 0.0, "node", {}) for rank, step in sorted(self.steps.items())]

    def get(self, rank: int) -> Rank | None:
        return next((each for each in self.connected() if each.rank == rank), None)

    def left(self, rank: int) -> str | None:
        return None if rank in self.steps else "lost"


def decided(moves: Sequence[Move]) -> Facts:
    """What was decided, and told to somebody after that."""
    (decision, *told) = moves
    assert isinstance(decision, Decide)
    assert all(isinstance(move, Tell) and move.facts == decision.facts for move in told)
    return decision.facts


def test_the_first_step_lies_ahead_of_all_ranks() -> None:
    """By more steps the faster they go; the decision comes before it is told, to each connected rank."""
    slow, _ = Sampler().asked("sample", {"interval": 1, "for_steps": 500}, Now({0: 70, 3: 72}, 4.0))
    fast, _ = Sampler().asked("sample", {"interval": 1}, Now({0: 70, 3: 72}, 0.01))
    assert decided(slow)["first"] == 72 + 2
    assert decided(slow)["last"] == 72 + 2 + 499
    assert decided(fast)["first"] == 72 + 1 + 200
    assert [move.rank for move in slow if isinstance(move, Tell)] == [0, 3]
    assert isinstance(slow[0], Decide)
    assert slow[0].text == "steps 74-573: interval 1"


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (
            {"print_interval": 4, "interval": 2, "step_interval": 1, "for_steps": 9},
            "steps 20-28: step_interval 1, interval 2, print_interval 4",
        ),
        ({"interval": 5, "for_steps": 1}, "step 20: interval 5"),
        ({"interval": 5, "print_interval": 1}, "from step 20 on: interval 5, print_interval 1"),
        ({}, "from step 20 on: as configured"),
    ],
)
def test_the_log_and_the_command_say_the_same(asked: Facts, text: str) -> None:
    """The rates in one order, whatever order they were asked for in, or have when they come back to the command."""
    sampler, now = Sampler(), Now({0: 18}, 4.0)
    moves, answer = sampler.asked("sample", asked, now)
    assert isinstance(moves[0], Decide)
    assert moves[0].text == text
    assert sampled_text(dict(sorted(answer["facts"].items()))) == text
    assert sampled_text(dict(sorted(answer["facts"].items(), reverse=True))) == text


def test_ranks_confirm_and_a_late_one_moves_the_step_for_all() -> None:
    """Nobody counts as confirmed for the step that did not hold."""
    sampler, now = Sampler(), Now({0: 10, 1: 10})
    first = decided(sampler.asked("sample", {"interval": 1, "for_steps": 3}, now)[0])
    assert sampler.reported(0, "sample", {"number": first["number"], "late": False}, now) == ()
    again = decided(sampler.reported(1, "sample", {"number": first["number"], "late": True}, Now({0: 13, 1: 14})))
    assert int(again["first"] or 0) > 14
    assert int(again["last"] or 0) == int(again["first"] or 0) + 2
    # Of the step that did not hold.
    assert sampler.reported(0, "sample", {"number": first["number"], "late": True}, now) == ()
    _, answer = sampler.asked("sample.status", {}, now)
    assert (answer["confirmed"], answer["waiting"]) == ([], [0, 1])
    for rank in (0, 1):
        sampler.reported(rank, "sample", {"number": again["number"], "late": False}, now)
    _, answer = sampler.asked("sample.status", {}, Now({0: 20}))
    assert (answer["confirmed"], answer["waiting"]) == ([0, 1], [])


def test_who_comes_later_is_told_and_moves_nothing() -> None:
    """A restarted rank, or one that was not connected: it takes the same steps, whatever it has reached."""
    sampler, now = Sampler(), Now({0: 10})
    facts = decided(sampler.asked("sample", {"interval": 1}, now)[0])
    assert sampler.joined(1, now) == (Tell(1, "sample", facts),)
    assert sampler.reported(1, "sample", {"number": facts["number"], "late": True}, now) == ()
    restarted = Sampler()
    restarted.restore({"newest": facts})
    assert restarted.joined(0, now) == (Tell(0, "sample", facts),)
    assert int(decided(restarted.asked("sample", {}, now)[0])["number"] or 0) > int(facts["number"] or 0)


def test_it_is_not_tried_for_ever() -> None:
    """A rank that always says late (its clock of steps is not ours) ends it."""
    sampler, now = Sampler(), Now({0: 1})
    facts = decided(sampler.asked("sample", {"interval": 1}, now)[0])
    for _ in range(50):
        moves = sampler.reported(0, "sample", {"number": facts["number"], "late": True}, now)
        if not moves:
            return
        facts = decided(moves)
    pytest.fail("it goes on for ever")


@pytest.mark.parametrize(
    "facts", [{"interval": 0}, {"for_steps": -1}, {"interval": "x"}, {"speed": 3}, {"interval": True}]
)
def test_what_makes_no_sense_is_refused(facts: Facts) -> None:
    """With what was found."""
    with pytest.raises(RankdError, match=next(iter(facts))):
        Sampler().asked("sample", facts, Now({0: 1}))


def test_without_ranks_there_is_nobody_to_tell() -> None:
    """Before the first hello, and after the end."""
    with pytest.raises(RankdError, match="no rank is connected"):
        Sampler().asked("sample", {"interval": 1}, Now({}))


@given(st.data())
def test_all_ranks_write_the_same_steps_from_the_confirmed_one_on(data: st.DataObject) -> None:
    """Whenever which rank gets which command, while they train on: from the last decided step on they agree."""
    steps = {rank: data.draw(st.integers(1, 30), label=f"rank {rank}") for rank in range(3)}
    samplings = {rank: Sampling(Rates(write=10)) for rank in steps}
    handlers = {rank: Resampling(samplings[rank], lambda r=rank: steps[r]) for rank in steps}  # type: ignore[misc]
    sampler, queue = Sampler(), dict[int, Facts]()

    def make(moves: Sequence[Move]) -> None:
        # Of each rank the newest command: they come in order.
        queue.update({move.rank: move.facts for move in moves if isinstance(move, Tell)})

    make(sampler.asked("sample", {"interval": 3, "for_steps": 9}, Now(dict(steps), 2.0))[0])
    while queue:
        rank = data.draw(st.sampled_from(sorted(queue)))
        steps[rank] += data.draw(st.sampled_from([0, 0, 1, 9]))
        (report,) = handlers[rank](queue.pop(rank))
        make(sampler.reported(rank, "sample", report.facts, Now(dict(steps), 2.0)))
    _, answer = sampler.asked("sample.status", {}, Now(dict(steps)))
    if answer["confirmed"] == [0, 1, 2]:
        first = answer["facts"]["first"]
        for step in range(first, first + 20):
            wanted = step % 3 == 0 if step <= first + 8 else step % 10 == 0
            assert {samplings[rank].due(step).write for rank in steps} == {wanted}
