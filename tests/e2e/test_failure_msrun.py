"""A rank that raises under msrun, which then kills the process groups of the others with SIGKILL."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from rankd.collector.protocol.records import Comment, Record

from .jobs import job, merged_lines_of, verify

pytestmark = pytest.mark.mindspore

RANKS = 4
FAILED = 2
CONFIG = """
monitor:
  train_state:
    local_loss: True
    device_loss: True
    local_norm: ["linear_qkv"]
rankd:
  output: out
"""


@dataclass(frozen=True)
class Outcome:
    """What the job left, and whether the collector ran when no rank did any more."""

    merged: bytes
    rank_logs: dict[int, bytes]
    content: list[Record | Comment]
    pushed: dict[int, list[tuple[int, int]]]
    collector_outlived_the_ranks: bool
    collector_log: str
    verified: subprocess.CompletedProcess[str]

    def comments(self, kind: str) -> list[tuple[int | None, str]]:
        """Rank and text of the comments of one kind."""
        return [(c.rank, c.text) for c in self.content if isinstance(c, Comment) and c.kind == kind]


def pairs(path: Path) -> list[tuple[int, int]]:
    """The micro-steps that a rank has noted: (step, micro_step)."""
    return [(int(step), int(micro_step)) for step, micro_step in map(str.split, path.read_text().splitlines())]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Run the job until the collector has ended. msrun itself takes half a minute longer, and is not waited for."""
    folder = tmp_path_factory.mktemp("failure")
    with job(folder, "failing.py", CONFIG, RANKS) as started:
        files = [folder / f"pushed_rank_{rank}.txt" for rank in range(RANKS)]
        started.wait_for("training", lambda: all(file.exists() and file.stat().st_size for file in files))
        started.wait_for("the end of all ranks", lambda: not started.ranks())
        outlived = bool(started.collector())
        started.wait_for("the collector's end", lambda: started.has_ended() and not started.collector(), 30)
        return Outcome(
            (started.output / "merged.log").read_bytes(),
            {rank: (started.output / f"rank_{rank}" / "monitor.log").read_bytes() for rank in range(RANKS)},
            started.content(),
            {rank: pairs(file) for rank, file in enumerate(files)},
            outlived,
            (started.output / ".rankd" / "collector.log").read_text(),
            verify(started.output),
        )


def test_the_scenario_is_the_one_that_is_meant(outcome: Outcome) -> None:
    """Rank 2 got as far as step 7, micro-step 2; 0 and 1 to the end of the micro-steps; 3 was stopped from outside."""
    assert outcome.pushed[FAILED][-1] == (7, 2)
    assert [outcome.pushed[rank][-1] for rank in (0, 1)] == [(7, 4)] * 2
    assert outcome.pushed[3][-1] >= (7, 1)
    killed = [text for _, text in outcome.comments("missing")]
    assert [text.split(":")[0] for text in killed] == ["rank 0", "rank 1", "rank 3"]


def test_the_collector_outlives_the_ranks_and_ends_by_itself(outcome: Outcome) -> None:
    """It says who is missing, in the log and in its summary, and that this was no good end."""
    assert outcome.collector_outlived_the_ranks
    # In the order in which they fell silent.
    assert sorted(text.split(":")[0] for _, text in outcome.comments("rank_lost")) == ["rank 0", "rank 1", "rank 3"]
    assert "no goodbye from ranks 0-1,3\n" in outcome.collector_log
    assert "(status 1)" in outcome.collector_log


def test_every_micro_step_that_any_rank_had_completed_is_there(outcome: Outcome) -> None:
    """Once, in order, up to the last one before the kill; at most the one whose noting was cut off is there besides."""
    seen: dict[int, list[tuple[int, int | None]]] = defaultdict(list)
    for record in outcome.content:
        if isinstance(record, Record) and record.metric == "local_loss":
            seen[record.rank].append((record.position.step, record.position.micro_step))
    for rank, pushed in outcome.pushed.items():
        assert seen[rank][: len(pushed)] == pushed, f"rank {rank}"
        assert len(seen[rank]) - len(pushed) in (0, 1), f"rank {rank}"


def test_the_files_prove_it(outcome: Outcome) -> None:
    """`rankd verify` finds nothing, the killed ranks' accounts included."""
    assert outcome.verified.returncode == 0, outcome.verified.stdout


def test_the_log_says_who_went_first_and_why(outcome: Outcome) -> None:
    """The exception stands in rank 2's own block of that micro-step, and at the end which rank it was."""
    assert outcome.comments("exception") == [(FAILED, "RuntimeError: the loss is not finite")]
    assert outcome.comments("first_failure") == [(None, f"rank {FAILED}: RuntimeError: the loss is not finite")]
    block = b'{ "step": 7, "micro_step": 3 }\n# exception RuntimeError: the loss is not finite\n'
    assert outcome.rank_logs[FAILED].endswith(block)


def test_the_merged_log_still_equals_the_ranks_logs(outcome: Outcome) -> None:
    """Byte for byte, without the prefix."""
    for rank, log in outcome.rank_logs.items():
        assert merged_lines_of(outcome.merged, rank) == log
