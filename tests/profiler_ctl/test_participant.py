"""The rank's side: what the collector says, the steps, what is reported and what stands in the rank's log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rankd.collector.protocol.errors import RecordError
from rankd.profiler_ctl.asked import Asked, Body, ProfilerOptions, Value, estimated_bytes
from rankd.profiler_ctl.config import ProfilerConfig
from rankd.profiler_ctl.participant import ARMED_FOR, Participant

from .test_session import TRACE, ScriptedProfiler

STATIC = ProfilerConfig(enable_profiling=True, start_step=5, end_step=6, profiler_rank=(1,))


class Rank:
    """Rank 1 with a scripted profiler, and what it reports."""

    def __init__(self, folder: Path, config: ProfilerConfig | None = None, *, objection: str | None = None) -> None:
        self.reports: list[Body] = []
        self.made: list[tuple[ProfilerOptions, Path, int]] = []
        self.measured: list[int | None] = []
        self.now = 0.0

        def make(options: ProfilerOptions, rank_dir: Path, steps: int) -> ScriptedProfiler:
            self.made.append((options, rank_dir, steps))
            return ScriptedProfiler()(options, rank_dir, steps)

        def examine(asked: Asked, rank_dir: Path, measured: int | None) -> str | None:
            self.measured.append(measured)
            return objection

        self.side = Participant(
            1,
            config or ProfilerConfig(),
            self.reports.append,
            cwd=folder,
            profiler=make,
            examine=examine,
            aside=lambda work: work(),
            clock=lambda: self.now,
        )

    def hear(self, what: str, name: str = "p1", **more: Value) -> str:
        """The state that is reported then."""
        self.side.command({"do": what, "session": name, **more})
        return str(self.reports[-1]["state"])

    def propose(self, name: str = "p1", asked: Asked | None = None, **more: Value) -> str:
        return self.hear("propose", name, **(asked or Asked(2)).body(), **more)

    def commit(self, start: int, end: int, name: str = "p1", asked: Asked | None = None) -> str:
        return self.hear("commit", name, start=start, end=end, **(asked or Asked(2)).body())

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.side.step_begin(step)
            self.side.step_end(step)

    def states(self) -> list[object]:
        return [report["state"] for report in self.reports]


def test_a_session_on_demand_from_the_proposal_to_the_output(tmp_path: Path) -> None:
    """Every change is reported, with the step the rank is at; the output is where the key holder asked for it."""
    rank = Rank(tmp_path)
    rank.train(1, 3)
    asked = Asked(2, options=ProfilerOptions(level=1, stack=False), path="there")
    assert rank.propose(asked=asked, bytes_per_step=77) == "armed"
    assert rank.measured == [77]
    rank.side.step_begin(4)
    assert rank.commit(5, 6, asked=asked) == "planned"
    rank.side.step_end(4)
    rank.train(5, 8)
    assert rank.states() == ["armed", "armed", "planned", "recording", "exporting", "done"]
    assert [report["serial"] for report in rank.reports] == [1, 2, 3, 4, 5, 6]
    assert rank.made == [(asked.options, tmp_path / "there" / "rank_1", 2)]
    last = rank.reports[-1]
    assert (last["first"], last["last"], last["count"], last["bytes"]) == (5, 6, 2, len(TRACE))
    assert last["path"] == str(tmp_path / "there" / "rank_1" / "host_1_0_ascend_ms")
    (note,) = rank.side.notes()
    assert note.startswith(f"done: p1, steps 5-6, {len(TRACE)} bytes in {last['path']}, export ")
    assert rank.side.notes() == []


def test_sessions_one_after_the_other(tmp_path: Path) -> None:
    """The configuration's and two on demand in one process, each with its own steps and output."""
    rank = Rank(tmp_path, STATIC)
    rank.propose()
    rank.commit(2, 3)
    rank.train(1, 7)
    rank.propose("p2")
    rank.commit(8, 9, "p2")
    rank.train(8, 12)
    rank.side.close(1)
    assert [steps for _, _, steps in rank.made] == [2, 2, 2]
    assert len(list((tmp_path / "profile" / "rank_1").iterdir())) == 3
    assert sorted(note.split(" bytes")[0] for note in rank.side.notes()) == [
        f"done: p1, steps 2-3, {len(TRACE)}",
        f"done: p2, steps 8-9, {len(TRACE)}",
        f"done: steps 5-6, {len(TRACE)}",
    ]


def test_a_rank_that_cannot_refuses_with_the_reason(tmp_path: Path) -> None:
    """What is in the way of its host, a step that is past, a session that has the profiler."""
    rank = Rank(tmp_path, objection="too little disk")
    assert (rank.propose(), rank.reports[-1]["reason"]) == ("refused", "too little disk")
    rank = Rank(tmp_path, STATIC)
    rank.train(1, 3)
    assert rank.propose("p1", Asked(1, at=3)) == "refused"
    assert rank.reports[-1]["reason"] == "step 3 is past: this rank is at step 3"
    assert rank.propose("p2", Asked(3, at=4)) == "refused"
    assert rank.reports[-1]["reason"] == "the profiler is busy with session static (steps 5-6)"
    assert rank.propose("p3") == "armed"
    assert rank.propose("p4") == "refused"
    assert rank.reports[-1]["reason"] == "the profiler is busy with session p3 (armed)"
    rank.side.step_begin(5)
    assert rank.propose("p5") == "refused"
    assert rank.made[0][2] == 2


def test_a_step_that_has_begun_is_missed_and_nothing_starts(tmp_path: Path) -> None:
    """Neither at that step nor at another one."""
    rank = Rank(tmp_path)
    rank.propose()
    rank.side.step_begin(7)
    assert rank.commit(7, 8) == "missed"
    assert "told too late" in str(rank.reports[-1]["reason"])
    rank.side.step_end(7)
    rank.train(8, 9)
    assert rank.made == []


def test_training_that_jumps_past_the_agreed_step_misses_it(tmp_path: Path) -> None:
    """The others would have started earlier."""
    rank = Rank(tmp_path)
    rank.propose()
    rank.commit(5, 7)
    rank.train(6, 8)
    assert (rank.states()[-1], rank.made) == ("missed", [])


def test_a_process_that_was_not_asked_says_so_and_never_takes_part(tmp_path: Path) -> None:
    """The one before it was; nor does a proposal that comes late bring it in."""
    rank = Rank(tmp_path)
    assert rank.commit(5, 6) == "unknown"
    assert rank.propose() == "unknown"
    assert rank.hear("abort", "p2") == "unknown"
    assert rank.propose("p2") == "unknown"
    rank.train(4, 8)
    assert rank.made == []


def test_stop_ends_a_recording_at_the_next_boundary(tmp_path: Path) -> None:
    """What was recorded is written; before its first step a session just ends."""
    rank = Rank(tmp_path)
    rank.propose()
    rank.commit(5, 9)
    rank.train(1, 5)
    rank.side.step_begin(6)
    assert rank.hear("stop", reason="stopped by request") == "recording"
    rank.side.step_end(6)
    rank.train(7, 8)
    last = rank.reports[-1]
    assert (last["state"], last["count"]) == ("done", 2)
    assert last["reason"] == "stopped by request; of the window 5-9, these steps were trained here: 5-6"
    rank.propose("p2")
    rank.commit(20, 21, "p2")
    assert rank.hear("stop", "p2", reason="stopped by request") == "aborted"
    rank.train(20, 22)
    assert len(rank.made) == 1


def test_an_armed_rank_that_hears_nothing_more_is_free_again(tmp_path: Path) -> None:
    """The collector is away for good; the reason says how long it waited."""
    rank = Rank(tmp_path)
    rank.propose()
    rank.now = ARMED_FOR
    rank.train(1, 1)
    assert rank.states()[-1] == "armed"
    rank.now = ARMED_FOR + 1
    rank.train(2, 2)
    assert rank.states()[-1] == "aborted"
    assert rank.propose("p2") == "armed"


def test_rank_0s_window_replaces_the_own_one_if_it_comes_in_time(tmp_path: Path) -> None:
    """With its options; after the own first step it is too late, and the own one goes on."""
    asked = Asked(3, 8, ProfilerOptions(level=2), "zero")
    rank = Rank(tmp_path, STATIC)
    rank.train(1, 3)
    assert rank.commit(8, 10, "static", asked) == "planned"
    rank.train(4, 12)
    assert rank.made == [(asked.options, tmp_path / "zero" / "rank_1", 3)]
    rank = Rank(tmp_path, STATIC)
    rank.train(1, 4)
    rank.side.step_begin(5)
    assert rank.commit(8, 10, "static", asked) == "recording"
    rank.side.step_end(5)
    rank.train(6, 12)
    assert [steps for _, _, steps in rank.made] == [2]


def test_a_rank_takes_rank_0s_choice_of_ranks(tmp_path: Path) -> None:
    """In where its own file leaves it out, and out where that lets it in."""
    rank = Rank(tmp_path)
    assert rank.commit(5, 6, "static") == "planned"
    rank.train(1, 8)
    assert [steps for _, _, steps in rank.made] == [2]
    rank = Rank(tmp_path, STATIC)
    assert rank.hear("abort", "static", reason="rank 0's configuration does not choose this rank") == "aborted"
    rank.train(1, 8)
    assert rank.made == []
    assert rank.side.notes() == ["aborted: no steps (rank 0's configuration does not choose this rank)"]


def test_only_the_ranks_of_the_configuration_write(tmp_path: Path) -> None:
    """`profiler_rank: [0, 3]` of 8 gives two directories, rank_0 and rank_3 (torchtitan 1035)."""
    config = ProfilerConfig(enable_profiling=True, end_step=2, profiler_rank=(0, 3))
    for rank in range(8):
        side = Participant(rank, config, lambda _: None, cwd=tmp_path, profiler=ScriptedProfiler())
        for step in range(1, 4):
            side.step_begin(step)
            side.step_end(step)
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["rank_0", "rank_3"]


def test_a_profiler_that_raises_costs_its_rank_the_session_and_no_more(tmp_path: Path) -> None:
    """The steps go on, and the report says failed, and why (VeOmni 957)."""
    rank = Rank(tmp_path)
    rank.side._factory = ScriptedProfiler(fails="step")
    rank.propose()
    rank.commit(2, 3)
    rank.train(1, 9)
    assert (rank.states()[-1], rank.reports[-1]["reason"]) == ("failed", "OSError: no luck in step")
    assert rank.propose("p2") == "armed"


def test_training_that_ends_ends_all_sessions(tmp_path: Path) -> None:
    """And then nothing is answered any more."""
    rank = Rank(tmp_path, STATIC)
    rank.propose()
    rank.train(1, 2)
    rank.side.close(1)
    assert sorted(map(str, rank.states()[-2:])) == ["aborted", "skipped"]
    before = len(rank.reports)
    rank.side.command({"do": "propose", "session": "p2", **Asked(1).body()})
    assert len(rank.reports) == before


@pytest.mark.parametrize(
    "body",
    [
        {"do": "dance", "session": "p1"},
        {"do": "propose"},
        {"do": "propose", "session": "p1", "steps": 1},
        {"do": "propose", "session": "p1", **Asked(1).body(), "path": "../../x"},
        {"do": "propose", "session": "p1", **Asked(1).body(), "steps": True},
        {"do": "commit", "session": "p1", **Asked(1).body(), "start": 5},
    ],
)
def test_a_command_that_is_none_is_refused_and_changes_nothing(body: Body, tmp_path: Path) -> None:
    """Whatever it is."""
    rank = Rank(tmp_path)
    with pytest.raises(RecordError):
        rank.side.command(body)
    assert rank.reports == []
    assert rank.side.session("p1") is None


def test_many_sessions_are_not_all_remembered(tmp_path: Path) -> None:
    """Those that are over are forgotten in the end, and stay over."""
    rank = Rank(tmp_path)
    for number in range(600):
        rank.propose(f"p{number}")
        rank.hear("abort", f"p{number}")
        rank.side.notes()
    assert rank.side.session("p0") is None
    assert rank.side.session("p599") is not None
    assert len(rank.side._sessions) + len(rank.side._unknown) < 520


def test_the_host_is_looked_at_without_importing_mindspore(tmp_path: Path) -> None:
    """No MindSpore, no directory, too little disk: each a reason of its own."""
    (tmp_path / "file").write_text("")
    code = f"""
import sys
from pathlib import Path
from rankd.profiler_ctl.asked import Asked
from rankd.profiler_ctl.participant import obstacle
folder = Path({str(tmp_path)!r})
print(obstacle(Asked(1), folder / "not" / "yet" / "rank_1", 1))
print(obstacle(Asked(1), folder / "file" / "rank_1", 1))
print(obstacle(Asked(9), folder / "rank_1", 2**60))
assert "mindspore" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first in ("None", "MindSpore is not installed here")
    if first == "None":
        assert second == f"{tmp_path / 'file'} cannot be written to"
        assert third.startswith("too little disk: ")


def test_the_estimate_follows_what_was_measured() -> None:
    """Twice that; before anything was, level, stacks and memory count."""
    assert estimated_bytes(ProfilerOptions(), 3, 1_000) == 6_000
    light, heavy = ProfilerOptions(stack=False), ProfilerOptions(level=2, memory=True)
    assert estimated_bytes(light, 2, None) < estimated_bytes(heavy, 2, None)
