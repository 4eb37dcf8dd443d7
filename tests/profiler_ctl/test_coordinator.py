"""All sessions of a run: choice of ranks and of the step, overlaps, limits, the configuration's session, restart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from rankd.collector.protocol.about import pack_text
from rankd.collector.protocol.errors import RankdError
from rankd.collector.protocol.steering import Decide, Move, Tell
from rankd.profiler_ctl.agreement import Phase
from rankd.profiler_ctl.asked import Asked, Body, ProfilerOptions, Value
from rankd.profiler_ctl.choosing import Choice
from rankd.profiler_ctl.config import ProfilerConfig
from rankd.profiler_ctl.coordinator import ARM_TIMEOUT, Coordinator, Limits
from rankd.profiler_ctl.differences import ABOUT

NOW = 100.0


def about(config: ProfilerConfig | None = None, **facts: str) -> dict[str, str]:
    section = {} if config is None else pack_text(ABOUT, json.dumps(config.to_mapping()))
    return {**section, **facts}


class Run:
    """A coordinator of four ranks that are at step 10 and do a step in half a second."""

    def __init__(
        self,
        limits: Limits | None = None,
        abouts: Mapping[int, Mapping[str, str]] | None = None,
        *,
        trained: bool = True,
        total_steps: int | None = None,
    ) -> None:
        self.coordinator = Coordinator(limits or Limits(), 1.0)
        self.serial = 0
        self.out: list[Move] = []
        for rank in range(4):
            known = (abouts or {}).get(rank, {})
            host = f"node{rank // 2}"
            self.coordinator.joined(rank, rank, 0.0, host=host, about=known, world_size=4, total_steps=total_steps)
        for step in range(1, 11) if trained else ():
            for rank in range(4):
                self.coordinator.at(rank, step, NOW - (10 - step) * 0.5)
        self.take()

    def take(self) -> list[Move]:
        new = self.coordinator.take()
        self.out += new
        return new

    def start(self, ranks: str = "0-1", steps: int = 3, at: int | None = None, **more: Any) -> Body:
        asked = Asked(steps, at, more.pop("options", ProfilerOptions()))
        return self.coordinator.ask("start", {**Choice(ranks, **more).body(), **asked.body()}, NOW)

    def report(self, name: str, rank: int, state: str, now: float = NOW, **more: Value) -> None:
        self.serial += 1
        body = {"session": name, "state": state, "serial": self.serial, **more}
        self.coordinator.reported(rank, body, now)

    def window(self, name: str) -> str:
        return str(self.coordinator.sessions[name].window)

    def lines(self) -> list[str]:
        self.take()
        return [each.text for each in self.out if isinstance(each, Decide) and each.text]


def test_the_step_is_chosen_so_that_the_command_arrives_in_time() -> None:
    """Two seconds (a beat and a margin) at half a second a step are four steps, and one is under way."""
    run = Run()
    assert run.start() == {"session": "p1", "ranks": "0-1", "count": 2}
    for rank in (0, 1):
        run.report("p1", rank, "armed", step=10)
    assert run.window("p1") == "15-17"


def test_the_decision_comes_before_anybody_is_told() -> None:
    """What is journalled stands first; the ranks not chosen hear nothing."""
    run = Run()
    run.start()
    proposed = run.take()
    assert [type(each) for each in proposed] == [Decide, Tell, Tell]
    for rank in (0, 1):
        run.report("p1", rank, "armed")
    decided, *told = run.take()
    assert isinstance(decided, Decide)
    assert (decided.facts["phase"], decided.facts["start"]) == ("committed", 15)
    assert [(each.rank, each.facts["do"]) for each in told if isinstance(each, Tell)] == [(0, "commit"), (1, "commit")]


def test_a_pace_that_is_not_known_is_waited_for() -> None:
    """Until the ranks' time to arm is over; then one more step is far enough, or training has not begun."""
    run = Run(trained=False)
    run.start("0")
    run.report("p1", 0, "armed", step=0)
    run.coordinator.tick(NOW + 1)
    assert run.coordinator.sessions["p1"].phase is Phase.PROPOSED
    run.coordinator.tick(NOW + ARM_TIMEOUT)
    assert "training has not begun" in run.coordinator.sessions["p1"].reason
    run.start("1")
    run.report("p2", 1, "armed", step=7)
    run.coordinator.tick(NOW + ARM_TIMEOUT)
    assert run.window("p2") == "9-11"


@pytest.mark.parametrize(
    ("at", "said"), [(10, "step 10 is past"), (12, "step 12 is too near"), (99, "training ends at step 100")]
)
def test_a_step_that_cannot_be_is_refused(at: int, said: str) -> None:
    """Past or beyond the end at once; too near once all have armed."""
    run = Run(total_steps=100)
    if at == 12:
        run.start(at=at)
        for rank in (0, 1):
            run.report("p1", rank, "armed")
        session = run.coordinator.sessions["p1"]
        assert session.phase is Phase.ABORTED
        assert said in session.reason
        return
    with pytest.raises(RankdError, match=said):
        run.start(at=at)


def test_sessions_that_overlap_on_a_rank_are_refused_with_the_name_of_the_other() -> None:
    """While the other's steps are undecided, and where they are the same; other ranks and other steps are free."""
    run = Run()
    run.start("0-1", at=50)
    with pytest.raises(RankdError, match=r"p1 has been proposed to rank 1"):
        run.start("1-2")
    for rank in (0, 1):
        run.report("p1", rank, "armed")
    with pytest.raises(RankdError, match=r"p1 profiles steps 50-52 on rank 1"):
        run.start("1-2", at=52)
    run.start("1-2", at=53)
    run.start("3", at=51)
    # Chosen by the collector, and so before them.
    run.start("0", steps=2)
    run.report("p4", 0, "armed")
    assert run.window("p4") == "15-16"


def test_ranks_are_chosen_by_what_they_are_and_do() -> None:
    """Each condition narrows the one before."""
    run = Run(abouts={rank: about(pp=str(rank % 2)) for rank in range(4)})
    assert run.start("all", one_per_node=True)["ranks"] == "0,2"
    assert run.start("1-3", pp_stage=1, at=90)["ranks"] == "1,3"
    run = Run()
    for rank in (0, 1, 3):
        run.coordinator.at(rank, 11, NOW)
    assert run.start("all", slowest=1)["ranks"] == "2"


@pytest.mark.parametrize(
    ("ranks", "more", "said"),
    [
        ("2,9", {}, r"rank 9 is not in this job \(this job has ranks 0-3\)"),
        ("3", {}, "rank 3 is not connected"),
        ("0-2", {"pp_stage": 1}, "no rank has said its pipeline stage"),
        ("x", {}, "allowed: ranks"),
    ],
)
def test_ranks_that_are_not_there_are_refused_by_name(ranks: str, more: dict[str, Any], said: str) -> None:
    """Nothing is proposed to anybody."""
    run = Run()
    run.coordinator.gone(3, "done", NOW)
    with pytest.raises(RankdError, match=said):
        run.start(ranks, **more)
    assert run.coordinator.sessions == {}


def test_the_limits_hold() -> None:
    """So many sessions, and so many bytes: of those that were, and what one more may need."""
    run = Run(Limits(sessions=1))
    run.start()
    with pytest.raises(RankdError, match=r"rankd\.profile\.sessions"):
        run.start("2")
    run = Run(Limits(size=2**30))
    light = ProfilerOptions(stack=False)
    run.start("0", steps=2, options=light)
    run.report("p1", 0, "armed")
    run.report("p1", 0, "done", bytes=2**29, count=2)
    with pytest.raises(RankdError, match=rf"hold {2**29} bytes, and this one may need {2 * 2**28 * 2} more"):
        run.start("1", steps=2, options=light)
    assert run.start("1", steps=1, options=ProfilerOptions())["session"] == "p2"


def test_what_was_measured_goes_along_with_the_next_proposal() -> None:
    """For the rank's look at its disk."""
    run = Run()
    run.start("0", steps=2)
    run.report("p1", 0, "armed")
    run.report("p1", 0, "done", bytes=1_000, count=2)
    run.take()
    run.start("1")
    told = [each for each in run.take() if isinstance(each, Tell)]
    assert told[0].facts["bytes_per_step"] == 500


def test_a_restart_goes_on_with_what_is_decided_and_calls_off_the_rest() -> None:
    """From the journal's facts alone; names are not used twice; what ended stays ended."""
    run = Run()
    run.start("0", at=50)
    run.report("p1", 0, "armed")
    run.start("1", at=60)
    run.start("2", at=40)
    run.report("p3", 2, "armed")
    run.report("p3", 2, "done", bytes=7, count=3)
    run.take()
    facts = {each.key: each.facts for each in run.out if isinstance(each, Decide)}
    again = Coordinator(Limits(), 1.0, list(facts.items()), NOW)
    phases = {name: session.phase.value for name, session in again.sessions.items()}
    assert phases == {"p1": "committed", "p2": "aborted", "p3": "done"}
    assert again.bytes_of(again.sessions["p3"]) == 7
    again.take()
    again.joined(0, 1, NOW, world_size=4)
    assert [each.facts["start"] for each in again.take() if isinstance(each, Tell)] == [50]
    again.joined(3, 4, NOW, world_size=4)
    body = {**Choice("3").body(), **Asked(1).body()}
    assert again.ask("start", body, NOW)["session"] == "p4"


def test_stop_ends_one_session_or_all() -> None:
    """And says which; a name that is none is refused."""
    run = Run()
    run.start("0")
    run.start("1")
    with pytest.raises(RankdError, match="no session 'p9'; there are: p1, p2"):
        run.coordinator.ask("stop", {"session": "p9"}, NOW)
    assert run.coordinator.ask("stop", {"session": "p2"}, NOW) == {"stopped": "p2"}
    assert run.coordinator.ask("stop", {}, NOW) == {"stopped": "p1"}
    with pytest.raises(RankdError, match="allowed: start, stop"):
        run.coordinator.ask("begin", {}, NOW)


STATIC = ProfilerConfig(enable_profiling=True, start_step=20, end_step=22, profiler_rank=(0, 1))


def test_the_configurations_window_is_a_session_like_others() -> None:
    """Committed at once, reported by the chosen ranks, in the way of others."""
    run = Run(abouts=dict.fromkeys(range(4), about(STATIC)))
    session = run.coordinator.sessions["static"]
    assert (session.phase, list(session.parts), run.window("static")) == (Phase.COMMITTED, [0, 1], "20-22")
    told = {each.rank for each in run.out if isinstance(each, Tell)}
    assert told == {0, 1}
    with pytest.raises(RankdError, match=r"static profiles steps 20-22 on rank 1"):
        run.start("1-2", at=21)
    for rank in (0, 1):
        run.report("static", rank, "done", bytes=5, count=3)
    assert run.lines() == [
        "static steps 20-22 on ranks 0-1",
        "static done: steps 20-22 on ranks 0-1, 10 bytes",
    ]


def test_ranks_whose_configurations_differ_are_named_and_rank_0s_is_used() -> None:
    """In a line of the log that says in what; a rank that rank 0 does not choose is told to leave it."""
    other = ProfilerConfig(enable_profiling=True, start_step=20, end_step=29, profiler_rank=(0, 1, 3))
    run = Run(abouts={0: about(STATIC), 1: about(STATIC), 3: about(other)})
    run.coordinator.tick(NOW)
    assert run.lines()[-1] == (
        "the ranks' profiler sections differ, and rank 0's is used: rank 2: enable_profiling false (rank 0: true); "
        "rank 3: end_step 29 (rank 0: 22); rank 3: profiler_rank [0, 1, 3] (rank 0: [0, 1])"
    )
    aborts = [each.rank for each in run.out if isinstance(each, Tell) and each.facts["do"] == "abort"]
    assert aborts == [3]


def test_ranks_that_agree_are_not_warned_of() -> None:
    """Nor where none profiles."""
    for config in (STATIC, None):
        run = Run(abouts=dict.fromkeys(range(4), about(config)))
        run.coordinator.tick(NOW + 60)
        assert not [line for line in run.lines() if "differ" in line]


def test_a_new_start_of_the_job_has_a_window_of_its_own() -> None:
    """Its rank 0 is another process."""

    def phase() -> str:
        return run.coordinator.sessions["static"].phase.value

    run = Run(abouts=dict.fromkeys(range(4), about(STATIC)))
    for rank in (0, 1):
        run.report("static", rank, "done", bytes=5, count=3)
    assert phase() == "done"
    run.coordinator.joined(0, 9, NOW, about=about(STATIC), world_size=4)
    assert phase() == "committed"
    # The same process on another connection begins nothing.
    run.report("static", 0, "done")
    run.report("static", 1, "done")
    run.coordinator.joined(0, 9, NOW, about=about(STATIC), world_size=4)
    assert phase() == "done"


def test_a_report_of_who_is_not_asked_changes_nothing() -> None:
    """A session that is none, a rank that is not in it, a section that is no JSON."""
    run = Run(abouts={0: {f"{ABOUT}.1": "{"}})
    run.report("p9", 0, "done")
    run.start("0")
    run.take()
    run.report("p1", 3, "refused")
    assert run.take() == []
