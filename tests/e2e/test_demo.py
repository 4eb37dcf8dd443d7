"""`make demo` as a person runs it, with fewer steps: four real ranks, one ordered log, one rank profiled."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import yaml

from rankd.collector.config import OutputConfig, RankdConfig
from rankd.collector.outputs import optional_sinks
from rankd.collector.protocol.records import Comment, Record
from rankd.collector.protocol.speclog import parse
from rankd.collector.reading import read
from rankd.collector.sinks.prometheus import PrometheusSink

from . import reading
from .jobs import ROOT, end_all_in, environment, merged_lines_of, running_in

pytestmark = pytest.mark.mindspore

DEMO = ROOT / "deploy" / "example" / "demo.py"
PROFILER = yaml.safe_load((DEMO.parent / "train.yaml").read_text())["profiler"]
RANKS, STEPS, MICRO_STEPS = 4, 10, 4
HEADER = re.compile(rb'\[rank_(\d+)\] \{ "step": (\d+)(?:, "micro_step": (\d+))? \}')
# Sorts behind every micro-step.
AFTER_THE_MICRO_STEPS = 1_000


@dataclass(frozen=True)
class Run:
    """What the demo has shown and written, and what still ran when it had ended."""

    status: int
    shown: bytes
    errors: str
    folder: Path
    merged: bytes
    content: list[Record | Comment]
    still_running: list[psutil.Process]

    def values(self, metric: str, rank: int) -> dict[tuple[int, int | None], float | tuple[float, ...]]:
        """The values of a metric without names, by (step, micro_step)."""
        records = [r for r in self.content if isinstance(r, Record) and r.metric == metric and r.rank == rank]
        values = {(r.position.step, r.position.micro_step): r.value for r in records}
        assert len(values) == len(records)
        return values


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The demo, run once for all tests of this file."""
    folder = tmp_path_factory.mktemp("demo")
    assert PROFILER["end_step"] < STEPS
    try:
        done = subprocess.run(
            [sys.executable, DEMO, "--steps", str(STEPS)],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=240,
        )
        still_running = running_in(folder)
    finally:
        end_all_in(folder)
    errors = done.stderr.decode(errors="replace")
    assert done.returncode == 0, errors
    output = folder / "demo-output" / "rankd-output"
    merged = (output / "merged.log").read_bytes()
    content = list(parse(merged.splitlines(keepends=True)))
    return Run(done.returncode, done.stdout, errors, output, merged, content, still_running)


def test_the_log_is_in_order_of_step_micro_step_and_rank(run: Run) -> None:
    """Of the blocks and of the records; what a rank marks as late (a comment after its last step) holds no record."""
    lines = run.merged.splitlines()
    keys = []
    for before, line in pairwise([b"", *lines]):
        if (match := HEADER.fullmatch(line)) and b"] # late " not in before:
            rank, step, micro_step = (int(group or AFTER_THE_MICRO_STEPS) for group in match.groups())
            keys.append((step, micro_step, rank))
    assert keys == sorted(set(keys))
    order = [(r.position.key, r.rank) for r in run.content if isinstance(r, Record)]
    assert order == sorted(order)
    assert len(keys) == RANKS * STEPS * (MICRO_STEPS + 1)


def test_the_lines_of_each_rank_are_its_own_log(run: Run) -> None:
    """Byte for byte without the prefix, and nothing else is in merged.log but what the collector says."""
    rest = len(run.merged)
    for rank in range(RANKS):
        own = (run.folder / f"rank_{rank}" / "monitor.log").read_bytes()
        assert merged_lines_of(run.merged, rank) == own
        rest -= len(own) + own.count(b"\n") * len(f"[rank_{rank}] ")
    collectors = [line for line in run.merged.splitlines(keepends=True) if line.startswith(b"[collector] # ")]
    assert rest == sum(map(len, collectors))


def test_every_micro_step_and_step_of_every_rank_is_there(run: Run) -> None:
    """With all the metrics that the configuration asks for."""
    micro_steps = [(s, m) for s in range(1, STEPS + 1) for m in range(1, MICRO_STEPS + 1)]
    steps = [(s, None) for s in range(1, STEPS + 1)]
    norms: dict[tuple[str, int], set[tuple[int, int | None, str | None]]] = defaultdict(set)
    for record in run.content:
        if isinstance(record, Record) and record.name is not None:
            where = (record.position.step, record.position.micro_step, record.name)
            assert where not in norms[record.metric, record.rank]
            norms[record.metric, record.rank].add(where)
    blocks = ("decoder.layers.0", "decoder.layers.1", "mtp.layers.0.transformer_layer")
    layers = [f"{block}.self_attention.linear_qkv.weight" for block in blocks]
    final, words = "decoder.final_layernorm.weight", "embedding.word_embeddings.weight"
    for rank in range(RANKS):
        assert list(run.values("local_loss", rank)) == micro_steps
        for metric in ("device_loss", "loss", "lr", "grad_norm", "step_time_ms"):
            assert list(run.values(metric, rank)) == steps
        assert norms["local_norm", rank] == {(*at, name) for at in micro_steps for name in (*layers, final)}
        assert norms["device_norm", rank] == {(*at, name) for at in steps for name in (final, words)}


def test_the_loss_falls_and_ranks_differ(run: Run) -> None:
    """It is a training: the reduced loss, equal on all ranks, falls; each rank's own losses are its own."""
    losses = [run.values("device_loss", rank) for rank in range(RANKS)]
    assert all(each == losses[0] for each in losses)
    values = [value for value in losses[0].values() if isinstance(value, float)]
    assert len(values) == STEPS
    assert values[-1] < values[0] - 0.5
    assert len({run.values("local_loss", rank)[1, 1] for rank in range(RANKS)}) == RANKS


def test_one_rank_profiled_and_no_other(run: Run) -> None:
    """profile/rank_1 holds a trace with something in it; the other ranks have no folder there."""
    (chosen,) = PROFILER["profiler_rank"]
    assert [path.name for path in (run.folder / "profile").iterdir()] == [f"rank_{chosen}"]
    (trace,) = (run.folder / "profile" / f"rank_{chosen}").rglob("trace_view.json")
    assert trace.stat().st_size > 10_000
    assert not [path for path in run.folder.parent.rglob("*_ascend_ms") if f"rank_{chosen}" not in path.parts]


def test_the_profile_stands_in_the_log_of_its_rank(run: Run) -> None:
    """One line: the steps, the size, and where it is."""
    comments = [each for each in run.content if isinstance(each, Comment) and each.kind == "profile"]
    (told,) = (comment for comment in comments if comment.rank is not None)
    (trace,) = (run.folder / "profile").glob("*/*_ascend_ms")
    size = sum(path.stat().st_size for path in trace.rglob("*") if path.is_file() and path.name != "rankd.json")
    assert told.rank == PROFILER["profiler_rank"][0]
    steps = f"{PROFILER['start_step']}-{PROFILER['end_step']}"
    assert told.text.startswith(f"done: steps {steps}, {size} bytes in {trace}, export ")
    ours = [comment.text for comment in comments if comment.rank is None]
    assert ours == [
        f"static steps {steps} on rank {told.rank}",
        f"static done: steps {steps} on rank {told.rank}, {size} bytes",
    ]
    # In a block of its step; only after the last step, when there is none to come, it is late.
    late = {comment.text for comment in run.content if isinstance(comment, Comment) and comment.kind == "late"}
    assert late <= {f"attempt 1 step {STEPS}"}


def test_the_collector_ended_by_itself_with_a_summary(run: Run) -> None:
    """Everything produced was written; the same figures stand at the end of merged.log; its status was 0."""
    records = sum(isinstance(each, Record) for each in run.content)
    end = f"[collector] # end attempt 1: {records} records of {RANKS} ranks, 0 dropped"
    assert run.merged.splitlines()[-1].decode() == end
    summary = (run.folder / ".rankd" / "collector.log").read_text()
    # rank, attempt, process and host, state, last position, written, waiting, produced, dropped
    row = re.compile(r"^ +(\d+) +1 +\d+ on \S+ +done +step (\d+) +(\d+) +0 +(\d+) +0$", re.MULTILINE)
    share = records // RANKS
    assert row.findall(summary) == [(str(rank), str(STEPS), str(share), str(share)) for rank in range(RANKS)]
    assert summary.endswith(f"logs: {run.folder / 'merged.log'} (status 0)\n")
    assert "WARNING" not in summary


def test_every_reading_command(run: Run, tmp_path: Path) -> None:
    """Each gives what was recorded, and `rankd verify` proves it."""
    exact = list(read(run.folder))
    records = [each for each in run.content if isinstance(each, Record)]
    assert len(exact) == len(records) > 0
    reading.check_tail(run.folder, exact)
    reading.check_status(run.folder, exact, RANKS)
    reading.check_read(run.folder, exact)
    reading.check_exports(run.folder, exact, tmp_path)
    reading.check_parse(run.folder, exact)
    reading.check_verify_and_rebuild(run.folder, exact, RANKS, tmp_path)
    reading.check_asking(run.folder)


def test_every_output(run: Run, tmp_path: Path) -> None:
    """The outputs, given what the collector has released: all records in the files, a point a step, latest values."""
    outputs = (OutputConfig("jsonl"), OutputConfig("csv"), OutputConfig("tensorboard"))
    for sink in optional_sinks(RankdConfig(output=tmp_path, outputs=outputs), lambda _: "node"):
        sink.write(reading.release(run.folder))
        sink.close()
    rows = [reading.row_of(record) for record in read(run.folder)]
    assert list(reading.jsonl_rows(tmp_path / "records.jsonl")) == rows
    assert list(reading.csv_rows(tmp_path / "records.csv")) == rows
    events = reading.event_values(tmp_path / "tensorboard" / "attempt_1")
    reduced = {step: value for (step, _), value in run.values("device_loss", 0).items()}
    assert events["device_loss/rank_0"] == pytest.approx(reduced, rel=1e-6)
    assert events["device_norm/embedding"] == dict.fromkeys(range(1, STEPS + 1), RANKS)
    prometheus = PrometheusSink("127.0.0.1:0", lambda _: "node")
    prometheus.write(reading.release(run.folder))
    latest, _, beyond = prometheus.snapshot()
    prometheus.close()
    assert beyond == 0
    assert latest["device_loss"] == dict.fromkeys(range(RANKS), reduced[STEPS])
    assert latest["step"] == dict.fromkeys(range(RANKS), STEPS)


def test_nothing_still_runs(run: Run) -> None:
    """Neither msrun nor ranks nor collector, and the demo had to end none of them itself."""
    assert run.still_running == []
    assert run.errors == ""


def test_the_terminal_shows_the_log_and_then_what_there_is(run: Run) -> None:
    """merged.log as it stands, then the files, the profile's line and how to look at the logs again."""
    before, log, after = run.shown.partition(run.merged)
    assert log
    assert before.count(b"\n") == 3
    for said in ("monitor.log", "trace_view.json", "# profile done: steps 5-7", "tail -F demo-output/"):
        assert said in after.decode()
