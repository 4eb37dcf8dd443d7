"""From a push to the readable line in merged.log, two ways, with 700 norms a micro-step.

*Blocks that are ready*: one process sends each rank's encoded block at its time, over a connection a rank; that is the
collector with its sockets, and little else. *Agents*: `rankd simulate`, whose agents share a few processes; they take
more CPU time than the collector does, and both are stated. A line waits for the slowest rank of its micro-step, so with
less than a core for each side the machine is what is measured. 1,024 agents do not fit a small machine.

    python -m tests.bench.bench_latency [--seconds 15]
"""

from __future__ import annotations

import argparse
import bisect
import functools
import math
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from .bench_collector import Driver, rankd_collector
from .figures import Figure, command

_LATENCY = re.compile(r"p50 ([\d.]+) ms, p99 ([\d.]+) ms")
_HEADER = re.compile(rb'^\[rank_(\d+)\] \{ "step": (\d+), "micro_step": 1 \}$', re.MULTILINE)
# What a bound is stated for.
_MANY_RANKS = 1_024
# Micro-steps a step of an agent.
_MICRO_STEPS = 4
_LOOK = 0.001
_PATIENCE = 60.0


class Growth(threading.Thread):
    """Notes when a file had which size: cheap enough not to disturb what it watches."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self._path = path
        self.stop = threading.Event()
        self.times: list[float] = []
        self.sizes: list[int] = [0]

    def run(self) -> None:
        while not self.stop.wait(_LOOK):
            size = self._path.stat().st_size if self._path.exists() else 0
            if size > self.sizes[-1]:
                self.times.append(time.monotonic())
                self.sizes.append(size)

    def when(self, size: int) -> float:
        """When it had at least `size` bytes."""
        return self.times[bisect.bisect_left(self.sizes, size) - 1]


def note_time(pushed: dict[tuple[int, int], float], number: int, rank: int) -> None:
    pushed.setdefault((rank, number), time.monotonic())


def ready_blocks(ranks: int, rate: float, seconds: float) -> tuple[float, float, str]:
    """Median and 99th percentile in ms of blocks that need not be made."""
    output = Path(tempfile.mkdtemp(prefix="rankd-bench-"))
    pushed: dict[tuple[int, int], float] = {}
    count = max(2, round(seconds * rate))
    try:
        with rankd_collector(output) as (endpoint, process):
            driver = Driver(endpoint, ranks)
            driver.push(1)
            growth = Growth(output / "merged.log")
            growth.start()
            before, own, due = process.cpu_times(), time.process_time(), time.monotonic()
            for number in range(2, count + 2):
                due += 1 / rate
                time.sleep(max(0.0, due - time.monotonic()))
                driver.push(number, sent=functools.partial(note_time, pushed, number))
            after, own = process.cpu_times(), time.process_time() - own
            # The last acknowledgement comes before the last line.
            deadline = time.monotonic() + _PATIENCE
            text = b""
            while len(found := list(_HEADER.finditer(text))) < ranks * (count + 1) and time.monotonic() < deadline:
                time.sleep(0.2)
                text = (output / "merged.log").read_bytes()
            growth.stop.set()
            growth.join()
            driver.close()
    finally:
        shutil.rmtree(output)
    places = [(int(m[1]), int(m[2]), m.end()) for m in found if int(m[2]) > 1]
    latencies = sorted((growth.when(end) - pushed[rank, step]) * 1_000 for rank, step, end in places)
    cpu = after.user + after.system - before.user - before.system
    note = f"CPU: collector {cpu:.1f} s, the pushing process {own:.1f} s, in {count / rate:.0f} s"
    return latencies[len(latencies) // 2], latencies[math.ceil(0.99 * len(latencies)) - 1], note


def agents(ranks: int, rate: int, seconds: float) -> tuple[float, float, str]:
    """The same of agents, their own part included."""
    output = Path(tempfile.mkdtemp(prefix="rankd-bench-"))
    steps = max(1, round(seconds * rate / _MICRO_STEPS))
    try:
        with rankd_collector(output) as (endpoint, process):
            before, children = process.cpu_times(), resource.getrusage(resource.RUSAGE_CHILDREN)
            line = [sys.executable, "-m", "rankd.collector", "simulate", "--output", str(output)]
            line += ["--endpoint", endpoint, "--ranks", str(ranks), "--rate", str(rate)]
            line += ["--steps", str(steps), "--micro-steps", str(_MICRO_STEPS)]
            done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=_PATIENCE + seconds)
            after, used = process.cpu_times(), resource.getrusage(resource.RUSAGE_CHILDREN)
    finally:
        shutil.rmtree(output)
    found = _LATENCY.search(done.stdout)
    assert found, done.stdout
    cpu = after.user + after.system - before.user - before.system
    ranks_cpu = used.ru_utime + used.ru_stime - children.ru_utime - children.ru_stime
    note = f"CPU: collector {cpu:.1f} s, agents {ranks_cpu:.1f} s with their start, in {seconds:.0f} s"
    return float(found[1]), float(found[2]), note


def measure(args: argparse.Namespace) -> Iterator[Figure]:
    seconds = 2.0 if args.quick else args.seconds
    p50, p99, note = ready_blocks(64, 10, seconds)
    yield Figure("push to line, 64 ranks x 10/s, ready blocks: p50", p50, "ms", 20, note=note)
    yield Figure("push to line, 64 ranks x 10/s, ready blocks: p99", p99, "ms", 50)
    many = 128 if args.quick else _MANY_RANKS
    p50, p99, note = ready_blocks(many, 1, seconds)
    yield Figure(f"push to line, {many:,} ranks x 1/s, ready blocks: p50", p50, "ms", note=note)
    # The bound is one of that many ranks; fewer say nothing about it.
    bound = 400 if many == _MANY_RANKS else None
    yield Figure(f"push to line, {many:,} ranks x 1/s, ready blocks: p99", p99, "ms", bound)
    for ranks, bounds in ((8, (None, None)), (64, (20, 50))):
        p50, p99, note = agents(ranks, 10, seconds)
        yield Figure(f"push to line, {ranks} ranks x 10/s, agents: p50", p50, "ms", bounds[0], note=note)
        yield Figure(f"push to line, {ranks} ranks x 10/s, agents: p99", p99, "ms", bounds[1])


def declare(parser: argparse.ArgumentParser) -> None:
    # Of 6 s the 99th percentile would be the first micro-step, with which name tables and 64 log files come.
    parser.add_argument("--seconds", type=float, default=15.0, help="of pushing")


if __name__ == "__main__":
    command(__doc__, measure, declare)
