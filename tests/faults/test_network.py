"""Agents on two nodes and a bad network between them: nothing lost, nothing twice, and the order kept."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.jobs import end_all_in
from tests.netns import ADDRESSES, ADDRESSES6, Nodes, nodes_or_skip, two_nodes
from tests.support import comments, wait_for

from rankd.collector.protocol.records import Record
from rankd.collector.protocol.speclog import parse

pytestmark = [pytest.mark.netns, pytest.mark.slow]

KEY = "0123456789abcdef0123456789abcdef"
STEPS, MICRO_STEPS = 60, 2
# Two busy cores start five processes slowly.
PATIENCE = 150.0

AGENT = """
import sys, time
from pathlib import Path
from rankd.agent import Agent
from rankd.agent.config import AgentConfig
from rankd.collector.config import RankdConfig, SpoolConfig
from rankd.collector.protocol.records import Frame

output, rank, steps, endpoint = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] or None
config = AgentConfig(rankd=RankdConfig(
    output=Path(output), endpoint=endpoint, beat_interval=0.5, exit_timeout=90.0, lost_after=90.0,
    spool=SpoolConfig(directory=Path(output).parent / f"spool{rank}"),
))
with Agent(config, rank=rank, world_size=4) as agent:
    for step in range(1, steps + 1):
        with agent.step(step):
            for micro_step in (1, 2):
                agent.micro_step(frames=[Frame.scalar("local_loss", rank + step / 100 + micro_step / 1000)])
                time.sleep(0.1)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the processes of a test have their working directory; they are gone after it."""
    nodes_or_skip()
    yield tmp_path
    end_all_in(tmp_path)


def start_ranks(nodes: Nodes, outputs: tuple[Path, Path], folder: Path, endpoint: str = "", **environ: str) -> None:
    """Two ranks on each node; rank 0 starts the collector."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "MS_"))} | environ
    for rank in range(4):
        command = [sys.executable, "-c", AGENT, str(outputs[rank // 2]), str(rank), str(STEPS), endpoint]
        nodes.start(rank // 2, command, folder, clean, folder / f"rank_{rank}.txt")


def check(output: Path, folder: Path) -> None:
    """All of all ranks is in the log of `output`, once and in order, and nobody was given up."""
    log = output / "merged.log"
    said = [path.read_text() for path in (output / ".rankd" / "collector.log", *sorted(folder.glob("*.txt")))]
    assert log.exists(), said
    content = list(parse(log.read_bytes().splitlines(keepends=True)))
    records = [r for r in content if isinstance(r, Record) and r.metric == "local_loss"]
    expected = [(s, m, r) for s in range(1, STEPS + 1) for m in range(1, MICRO_STEPS + 1) for r in range(4)]
    assert [(r.position.step, r.position.micro_step, r.rank) for r in records] == expected, said
    for r in records:
        assert r.value == pytest.approx(r.rank + r.position.step / 100 + (r.position.micro_step or 0) / 1000)
    assert set(comments(content)) <= {"attempt", "end"}, said
    assert KEY not in "".join(said)


def ended(output: Path) -> bool:
    log = output / "merged.log"
    return log.exists() and b"[collector] # end" in log.read_bytes()


def reached(output: Path, step: int) -> bool:
    log = output / "merged.log"
    return log.exists() and b'"step": %d,' % step in log.read_bytes()


def wait_until_ended(output: Path, folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not ended(output):
        if time.monotonic() > deadline:
            said = [p.read_text() for p in (*output.glob(".rankd/collector.log"), *sorted(folder.glob("*.txt")))]
            raise AssertionError("\n---\n".join(said))
        time.sleep(0.1)


def test_a_link_that_is_cut_for_ten_seconds_costs_nothing(folder: Path) -> None:
    """No configuration but MindSpore's scheduler host, one output directory; cut in the middle of the training."""
    output = folder / "out"
    with two_nodes() as nodes:
        start_ranks(nodes, (output, output), folder, MS_SCHED_HOST=ADDRESSES[0])
        wait_for(lambda: reached(output, 15), PATIENCE)
        nodes.cut()
        whole_again = time.monotonic() + 10
        wait_for(lambda: time.monotonic() >= whole_again)
        assert not reached(output, 45)
        nodes.join()
        wait_until_ended(output, folder)
    check(output, folder)


def test_the_collectors_node_comes_back_with_another_address(folder: Path) -> None:
    """Its address goes, and the collector with it; started again at another one, all find it by the connection file."""
    output, another = folder / "out", "10.99.0.3"
    with two_nodes() as nodes:
        start_ranks(nodes, (output, output), folder, MS_SCHED_HOST=ADDRESSES[0])
        wait_for(lambda: reached(output, 15), PATIENCE)
        first = json.loads((output / ".rankd" / "connection.json").read_text())
        assert ADDRESSES[0] in first["endpoint"]
        nodes.move(0, ADDRESSES[0], another)
        os.kill(first["pid"], signal.SIGKILL)
        command = [sys.executable, "-m", "rankd.collector", "collect", str(output), "--near", another]
        collector = nodes.start(0, command, folder, os.environ, folder / "collector.txt")
        wait_until_ended(output, folder)
        assert collector.wait(PATIENCE) == 0
    assert f"on tcp://{another}:" in (folder / "collector.txt").read_text()
    check(output, folder)


def test_delay_and_loss_cost_nothing(folder: Path) -> None:
    """100 ms each way and 5 % loss, no shared directory, one key by the environment."""
    outputs = folder / "node0", folder / "node1"
    with two_nodes(delay=0.1, loss=0.05) as nodes:
        start_ranks(nodes, outputs, folder, MS_SCHED_HOST=ADDRESSES[0], RANKD_KEY=KEY)
        wait_until_ended(outputs[0], folder)
    check(outputs[0], folder)
    assert not (outputs[1] / "merged.log").exists()


def test_ipv6_and_an_explicit_endpoint(folder: Path) -> None:
    """COMPLAINTS 10: `rankd.endpoint` with an IPv6 address in brackets, and one key by the environment."""
    outputs = folder / "node0", folder / "node1"
    with two_nodes() as nodes:
        start_ranks(nodes, outputs, folder, f"tcp://[{ADDRESSES6[0]}]:7801", RANKD_KEY=KEY)
        wait_until_ended(outputs[0], folder)
    check(outputs[0], folder)


def test_without_a_key_another_nodes_agents_say_what_to_do(folder: Path) -> None:
    """No shared directory and no key: they do not connect in the clear, and name what to set."""
    outputs = folder / "node0", folder / "node1"
    with two_nodes() as nodes:
        start_ranks(nodes, outputs, folder, f"tcp://{ADDRESSES[0]}:7801")
        wait_for(lambda: "set RANKD_KEY to the same on all nodes" in (folder / "rank_2.txt").read_text(), PATIENCE)
