"""Two processes that claim what only one can be: the collector decides, both are told, and nothing is mixed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import CollectorProcess, wait_for

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
    with (tmp_path / "out" / "merged.log").open("rb") as log:
        values = [r.value for r in parse(log) if isinstance(r, Record) and r.metric == "mine"]
    assert values == [7.0] * 3
