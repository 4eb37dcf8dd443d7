"""Two processes that claim what only one can be: the collector decides, both are told, and nothing is mixed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import CollectorProcess, free_port, wait_for

from rankd.collector.protocol.records import Record
from rankd.collector.protocol.speclog import parse

pytestmark = pytest.mark.slow

PATIENCE = 60.0
# Logs 7 as rank 0, or 9 as the other one, until it is told to end.
CLAIM = """
import logging, sys, time
from pathlib import Path
from rankd.agent import Agent
from rankd.agent.config import AgentConfig
from rankd.collector.config import RankdConfig, SpoolConfig

logging.basicConfig(level=logging.INFO)
output, rank, world, value = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
config = AgentConfig(rankd=RankdConfig(
    output=output, start_collector=False, beat_interval=0.2, exit_timeout=2.0,
    spool=SpoolConfig(directory=output.parent / f"spools{value:.0f}"),
))
with Agent(config, rank=rank, world_size=world) as agent:
    for step in range(1, 4):
        with agent.step(step):
            agent.log("mine", value)
    while not agent.connected and len(sys.argv) < 6:
        time.sleep(0.01)
    print("connected", flush=True)
    sys.stdin.readline()
"""


def claim(collector: CollectorProcess, log: Path, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    """Start a process that says it is a rank."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "MS_", "SLURM_"))} | environ
    with log.open("w") as said:
        return subprocess.Popen(
            [sys.executable, "-c", CLAIM, str(collector.output), *arguments],
            env=clean,
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            text=True,
        )


@pytest.mark.parametrize(
    ("second", "environ", "told"),
    [
        (("0", "1"), {}, "rank 0 is taken by process"),
        (("1", "2"), {}, "says world_size 2, but rank 0"),
        (("0", "1"), {"MS_SCHED_PORT": "9000"}, "rank 0 is taken by process"),
    ],
    ids=["one_rank_twice", "another_world", "another_job"],
)
def test_the_first_stays_and_the_second_is_told(
    tmp_path: Path, second: tuple[str, str], environ: dict[str, str], told: str
) -> None:
    """COMPLAINTS 8, 12 and 13: only what the first has logged is in the files; the collector's log names both."""
    collector = CollectorProcess(tmp_path / "out", lost_after=60.0)
    logs = tmp_path / "first.txt", tmp_path / "second.txt"
    first = claim(collector, logs[0], "0", "1", "7", MS_SCHED_PORT="8118")
    try:
        wait_for(lambda: "connected" in logs[0].read_text(), PATIENCE)
        other = claim(collector, logs[1], *second, "9", "at once", **environ)
        try:
            wait_for(lambda: told in collector.said(), PATIENCE)
            wait_for(lambda: told in logs[1].read_text(), PATIENCE)
            # Killed, it says no goodbye; what it has is in its own spool.
            other.send_signal(signal.SIGKILL)
        finally:
            other.communicate()
        first.communicate("end\n", timeout=PATIENCE)
        assert first.returncode == 0
        status, said = collector.ended()
        assert status == 0, said
    finally:
        first.kill()
        first.communicate()
        if collector.process.poll() is None:
            collector.kill()
    assert mine(tmp_path / "out") == [7.0] * 3


# Logs 9 as one rank of two, of a job that would start its own collector.
SECOND_JOB = """
import logging, sys
from pathlib import Path
from rankd.agent import Agent
from rankd.agent.config import AgentConfig
from rankd.collector.config import RankdConfig, SpoolConfig

logging.basicConfig(level=logging.INFO)
output, rank, endpoint = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
config = AgentConfig(rankd=RankdConfig(
    output=output, endpoint=endpoint, exit_timeout=0.5, spool=SpoolConfig(directory=output.parent / "spools"),
))
with Agent(config, rank=rank, world_size=2) as agent:
    with agent.step(1):
        agent.log("mine", 9.0)
    sys.stdin.readline()
"""


def test_two_jobs_with_one_port_on_one_host(tmp_path: Path) -> None:
    """COMPLAINTS 12: rank 1 of the second job comes while the first waits for its own: it is refused and told.

    The second job's collector says why it cannot listen. Once the port is another one, what was kept is delivered.
    """
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    collector = CollectorProcess(tmp_path / "first", endpoint=endpoint, lost_after=60.0)
    ranks: list[subprocess.Popen[str]] = []
    second = tmp_path / "second"

    def start(output: Path, rank: int, script: str, *more: str) -> None:
        command = [sys.executable, "-c", script, str(output), str(rank), *more]
        with (tmp_path / f"{output.name}{rank}.txt").open("w") as said:
            ranks.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=said, text=True))

    def said(name: str) -> str:
        path = tmp_path / name
        return path.read_text() if path.exists() else ""

    try:
        start(collector.output, 0, CLAIM, "2", "7")
        wait_for(lambda: "connected" in said("first0.txt"))
        for rank in (1, 0):
            start(second, rank, SECOND_JOB, endpoint)
            wait_for(lambda r=rank: f"two jobs meet at {endpoint}" in said(f"second{r}.txt"))  # type: ignore[misc]
        wait_for(lambda: f"cannot listen on {endpoint}" in said("second/.rankd/collector.log"))
        # Now the rest of the first job.
        start(collector.output, 1, CLAIM, "2", "7")
        wait_for(lambda: "connected" in said("first1.txt"))
        for process in ranks:
            process.communicate("end\n", timeout=PATIENCE)
        collector.ends()
        assert "× another job" in collector.said()
        other = CollectorProcess(second, spool={"directory": str(tmp_path / "spools")})
        other.ends()
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
        if collector.process.poll() is None:
            collector.kill()
    assert mine(collector.output) == [7.0] * 6
    assert mine(second) == [9.0] * 2


def mine(output: Path) -> list[object]:
    """What stands in the log."""
    with (output / "merged.log").open("rb") as log:
        return [r.value for r in parse(log) if isinstance(r, Record) and r.metric == "mine"]
