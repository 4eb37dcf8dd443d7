"""Two nodes for real: msrun on each, real MindSpore, the example's training, one network between them."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.netns import ADDRESSES, Nodes, nodes_or_skip, two_nodes
from tests.support import wait_for

from rankd.collector.protocol.records import Comment, Record
from rankd.collector.protocol.speclog import parse

from .jobs import ROOT, end_all_in, environment

pytestmark = [pytest.mark.mindspore, pytest.mark.netns, pytest.mark.slow]

KEY = "two-nodes-0123456789abcdef-0123456789abcdef"
STEPS, MICRO_STEPS = 6, 2
# Two busy cores start two msrun, six interpreters with MindSpore and a collector.
PATIENCE = 240.0
# What the collector waits for a rank that is slow to come.
CONFIG = (ROOT / "deploy" / "example" / "train.yaml").read_text().partition("\nprofiler:")[0] + (
    "\nrankd:\n  output: {output}\n  exit_timeout: 60\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where everything of a test runs; what runs there still is ended after it."""
    nodes_or_skip()
    yield tmp_path
    end_all_in(tmp_path)


def msrun(nodes: Nodes, node: int, folder: Path, *, ranked: bool = True, **environ: str) -> Path:
    """Start one node's part of the job in a folder of its own; the file that gets what it says."""
    # As on a real node: the scripts beside the configuration, logs of msrun where it runs.
    for name in ("train.py", "model.py"):
        shutil.copy(ROOT / "deploy" / "example" / name, folder)
    command = [sys.executable, "-m", "mindspore.parallel.cluster.run", "--worker_num=4", "--local_worker_num=2"]
    command += [f"--master_addr={ADDRESSES[0]}", "--master_port=8118", "--join=True", "--tail_worker_log=0"]
    command += ["--log_dir=logs", "--cluster_time_out=90", *([f"--node_rank={node}"] if ranked else [])]
    command += ["train.py", "--config", "train.yaml", "--steps", str(STEPS), "--micro-steps", str(MICRO_STEPS)]
    env = environment() | {"MS_DEV_LAUNCH_BLOCKING": "1", "OMP_NUM_THREADS": "1"} | environ
    # msrun starts its workers with the `python` that it finds.
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    nodes.start(node, command, folder, env, folder / "msrun.txt")
    return folder / "msrun.txt"


def logs(folder: Path) -> str:
    """The ends of all logs."""
    paths = [*folder.rglob("*.log"), *folder.rglob("*.txt")]
    return "\n".join(f"== {p.relative_to(folder)}\n{p.read_text(errors='replace')[-1500:]}" for p in paths)


def run(folder: Path, outputs: tuple[str, str], *, ranked: bool = True, **environ: str) -> Path:
    """Run the job to the collector's end; rank 0's output directory."""
    folders = [folder / "node0", folder / "node1"]
    for place, output in zip(folders, outputs, strict=True):
        place.mkdir()
        (place / "train.yaml").write_text(CONFIG.format(output=output))
    merged = folders[0] / outputs[0] / "merged.log"
    with two_nodes() as nodes:
        for node, place in enumerate(folders):
            msrun(nodes, node, place, ranked=ranked, **environ)
        try:
            wait_for(lambda: merged.exists() and b"\n[collector] # end " in merged.read_bytes(), PATIENCE)
        except AssertionError:
            raise AssertionError(logs(folder)) from None
    return merged.parent


def check(output: Path) -> None:
    """All four ranks, in order, every micro-step of each with values of its own; nobody lost, nothing dropped."""
    with (output / "merged.log").open("rb") as log:
        content = list(parse(log))
    order = [(r.position.key, r.rank) for r in content if isinstance(r, Record)]
    assert order == sorted(order)
    losses = [r for r in content if isinstance(r, Record) and r.metric == "local_loss"]
    expected = [(s, m, r) for s in range(1, STEPS + 1) for m in range(1, MICRO_STEPS + 1) for r in range(4)]
    assert [(r.position.step, r.position.micro_step, r.rank) for r in losses] == expected
    assert len({r.value for r in losses}) == len(losses)
    device = [r for r in content if isinstance(r, Record) and r.metric == "device_loss"]
    for step in range(1, STEPS + 1):
        # Reduced over the ranks of both nodes: one value.
        assert len({r.value for r in device if r.position.step == step}) == 1
    assert {c.kind for c in content if isinstance(c, Comment)} <= {"attempt", "end"}
    said = (output / ".rankd" / "collector.log").read_text()
    assert re.search(rf"on tcp://{re.escape(ADDRESSES[0])}:\d+, for peers with the run's key", said), said
    assert KEY not in said


def test_no_shared_disk(folder: Path) -> None:
    """Each node writes below its own folder; node 1's agents find the collector by MS_SCHED_HOST and one key."""
    output = run(folder, ("out", "out"), RANKD_KEY=KEY)
    check(output)
    assert not (folder / "node1" / "out" / "merged.log").exists()
    assert KEY not in logs(folder)


@pytest.mark.parametrize("ranked", [True, False], ids=["node_rank", "without_node_rank"])
def test_a_shared_directory_needs_no_configuration(folder: Path, ranked: bool) -> None:
    """COMPLAINTS 13 and 29: one output directory, no key and no endpoint given; ranks are right with and without
    --node_rank; only the collector writes there."""
    output = run(folder, (f"{folder}/shared", f"{folder}/shared"), ranked=ranked)
    check(output)
    assert (output / ".rankd" / "key").stat().st_mode & 0o777 == 0o600
    assert (output / ".rankd" / "key").read_text().strip() not in logs(folder)
