"""Profiling with real MindSpore on four ranks that msrun has started: one run, in which everything happens in turn.

The static window and two sessions on demand, on different ranks; a session that one rank refuses; one whose rank is
killed while it is armed. Each test reads what the one run has left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.e2e.jobs import Job, job, verify
from tests.support import comments

from rankd.collector.protocol.errors import RankdError
from rankd.profiler_ctl.requests import sessions

pytestmark = pytest.mark.mindspore

CONFIG = """
monitor:
  train_state: {local_loss: True}
profiler:
  enable_profiling: True
  start_step: 3
  end_step: 5
  profiler_rank: [1, 9]
  with_stack: False
rankd: {output: out, beat_interval: 0.2, linger: 1, lost_after: 20}
"""
TANH_A_STEP = 4


@dataclass
class Run:
    """What the run has left."""

    folder: Path
    job: Job
    said: dict[str, subprocess.CompletedProcess[str]]

    def session(self, name: str) -> dict[str, Any]:
        (found,) = [each for each in sessions(self.folder / "out") if each["name"] == name]
        return found

    def profiles(self, under: str) -> dict[str, list[Path]]:
        """The profiles of each rank below a folder."""
        ranks = (self.folder / under).glob("rank_*")
        return {rank.name: sorted(rank.glob("*_ascend_ms")) for rank in ranks if rank.is_dir()}


# Of each thing that is waited for, alone on 2 cores some seconds.
WITHIN = 60.0


def profile(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`rankd profile`, to its end."""
    command = [sys.executable, "-m", "rankd.collector", "profile", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("profiled")
    said: dict[str, subprocess.CompletedProcess[str]] = {}

    def state(name: str, rank: int | None = None) -> str:
        with contextlib.suppress(RankdError):
            for session in sessions(folder / "out"):
                if session["name"] == name:
                    parts = {part["rank"]: part for part in session["parts"]}
                    return str(session["phase"] if rank is None else parts[rank].get("state"))
        return ""

    with job(folder, "profiled.py", CONFIG, ranks=4) as started:
        started.wait_for("the static window", lambda: state("static") == "done", WITHIN)
        # A rank may still be looking for the collector; what all have sent is released.
        logs = [folder / "out" / f"rank_{rank}" / "monitor.log" for rank in range(4)]
        started.wait_for("all ranks", lambda: all(log.exists() for log in logs), WITHIN)
        said["p1"] = profile(folder, "start", "out", "--ranks", "0,2", "--steps", "3", "--wait")
        said["p2"] = profile(folder, "start", "out", "--slowest", "1", "--ranks", "2", "--steps", "2", "--level", "1",
                             "--memory", "--stack", "--output", "elsewhere", "--wait")  # fmt: skip
        for asked in said.values():
            assert asked.returncode == 0, (asked.stdout, asked.stderr)
        (folder / "refused").mkdir()
        (folder / "refused" / "rank_2").write_text("a file where the directory should be")
        said["p3"] = profile(folder, "start", "out", "--ranks", "0-2", "--output", "refused")
        said["summary"] = profile(folder, "summary", "out", "p1")
        said["list"] = profile(folder, "list", "out")
        # Rank 3 answers nothing, so that rank 2 stays armed; then rank 2 is killed.
        ranks = {int(process.environ()["MS_NODE_ID"]): process for process in started.ranks()}
        ranks[3].suspend()
        killed = subprocess.Popen([sys.executable, "-m", "rankd.collector", "profile", "start", "out", "--ranks", "2-3",
                                  "--output", "killed"], cwd=folder, stdout=subprocess.PIPE, text=True)  # fmt: skip
        try:
            started.wait_for("rank 2 is armed", lambda: state("p4", 2) == "armed", WITHIN)
            os.kill(ranks[2].pid, signal.SIGKILL)
            out, _ = killed.communicate(timeout=60)
        finally:
            killed.kill()
            with contextlib.suppress(psutil.NoSuchProcess):
                ranks[3].resume()
        said["p4"] = subprocess.CompletedProcess(killed.args, killed.returncode, out)
        started.wait_for("the collector's last line", started.has_ended, WITHIN)
        started.wait_for("the collector's end", lambda: not started.collector(), WITHIN)
        yield Run(folder, started, said)


def tanh_in(profiled: Path) -> int:
    (trace,) = profiled.rglob("trace_view.json")
    return sum(event.get("name") == "Tanh" for event in json.loads(trace.read_text()))


@pytest.mark.parametrize(
    ("name", "under", "ranks", "steps"),
    [("static", "profile", [1], 3), ("p1", "profile", [0, 2], 3), ("p2", "elsewhere", [2], 2)],
)
def test_each_session_yields_exactly_its_steps_on_its_ranks(
    name: str, under: str, ranks: list[int], steps: int, run: Run
) -> None:
    """Counted by the operators in the trace, in the rank's own directory; all its ranks at one step."""
    session = run.session(name)
    assert (session["phase"], session["reason"]) == ("done", "")
    assert session["end"] - session["start"] + 1 == steps
    assert [part["rank"] for part in session["parts"]] == ranks
    for part in session["parts"]:
        assert (part["first"], part["last"], part["covered"]) == (session["start"], session["end"], True)
        path = Path(part["path"])
        assert path.parent == run.folder / under / f"rank_{part['rank']}"
        assert tanh_in(path) == TANH_A_STEP * steps
        assert part["bytes"] == sum(
            file.stat().st_size for file in path.rglob("*") if file.is_file() and file.name != "rankd.json"
        )


def test_nothing_is_written_anywhere_else(run: Run) -> None:
    """One profile for each session and rank; rank 3 has none, and never imported what makes the profiler."""
    assert {rank: len(paths) for rank, paths in run.profiles("profile").items()} == {
        "rank_0": 1,
        "rank_1": 1,
        "rank_2": 1,
    }
    assert {rank: len(paths) for rank, paths in run.profiles("elsewhere").items()} == {"rank_2": 1}
    imported = {rank: (run.folder / f"imported_rank_{rank}.txt").read_text() for rank in range(4)}
    assert imported == {0: "True", 1: "True", 2: "True", 3: "False"}


def test_a_rank_that_refuses_calls_it_off_for_all(run: Run) -> None:
    """Nothing starts on any rank; the command says who and why, with status 1."""
    assert run.said["p3"].returncode == 1
    assert (
        f"p3: aborted, 1 step, ranks 0-2, level 0 (rank 2: {run.folder}/refused/rank_2 cannot" in run.said["p3"].stdout
    )
    assert run.session("p3")["phase"] == "aborted"
    assert sorted(path.name for path in (run.folder / "refused").iterdir()) == ["rank_2"]


def test_a_rank_that_is_killed_while_armed_calls_it_off(run: Run) -> None:
    """The other one, which msrun kills then, never starts either."""
    assert run.said["p4"].returncode == 1, run.said["p4"].stdout
    assert run.session("p4")["phase"] == "aborted"
    assert run.session("p4")["reason"] in ("rank 2: lost", "rank 3: lost")
    assert not (run.folder / "killed").exists()


def test_the_log_tells_it_all_and_the_run_is_whole(run: Run) -> None:
    """Proposals, steps and ends in the collector's lines, the outputs in the ranks' own; the unknown rank is named."""
    told = comments(run.job.content())["profile"]
    for line in ("static steps 3-5 on rank 1", "p1 proposed to ranks 0,2: 3 steps, level 0", "p3 aborted: rank 2: "):
        assert [text for text in told if text.startswith(line)], told
    p1 = run.session("p1")
    assert f"p1 steps {p1['start']}-{p1['end']} on ranks 0,2" in told
    assert len([text for text in told if text.startswith(f"done: p1, steps {p1['start']}-{p1['end']}, ")]) == 2
    logs = [path.read_text(errors="replace") for path in run.folder.rglob("worker_*.log")]
    assert sum("rank 9 is not in this job of 4 ranks (0-3); ignored" in log for log in logs) == 1
    assert verify(run.folder / "out").returncode == 0


def test_the_summary_shows_who_waits_for_whom(run: Run) -> None:
    """Rank 0 sleeps before the collective; its profile shows the steps and operators beside rank 2's."""
    said = run.said["summary"].stdout
    assert run.said["summary"].returncode == 0
    assert "session p1\n" in said
    (row,) = [line.split() for line in said.splitlines() if line.startswith("in collectives")]
    rank_0, rank_2 = map(float, row[-2:])
    assert rank_0 < rank_2
    assert "Tanh" in said
    assert [line.split(":")[0] for line in run.said["list"].stdout.splitlines()] == ["static", "p1", "p2", "p3"]
