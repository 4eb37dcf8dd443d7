"""`rankd simulate`: try network and disk before a job, without MindSpore.

Real agents, in a few processes, push made-up metrics through real sockets to a real collector; what is measured is what
a job would see: records per second, and the time from a push to the readable line in merged.log.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import re
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

from ..collector.config import RankdConfig
from ..collector.growing import GrowingFile
from ..collector.protocol.arguments import whole_number
from ..collector.protocol.errors import ConfigError, RankdError
from ..collector.protocol.records import Frame, NameTable
from ..collector.protocol.wording import counted
from .agent import Agent
from .config import AgentConfig

__all__ = ["add_arguments", "run"]

_HEADER = re.compile(rb'\[rank_(\d+)\] \{ "step": (\d+), "micro_step": (\d+) \}$', re.MULTILINE)
_IN_HEADER = b'] { "step": '
# How often merged.log is looked at; what is printed as latency is at most this much too high.
_LOOK = 0.002
# How long the last lines may take after the last rank has ended.
_SETTLE = 60.0
# How long the collector may take to start and to welcome all ranks.
_JOIN = 15.0
# A process here has many agents, each with a sender thread, where a rank's has one. With Python's own 5 ms they would
# wait for each other, and that would be taken for the collector's latency.
_SWITCH_INTERVAL = 0.000_2

# (rank, step, micro_step)
_Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What each process simulates."""

    rankd: RankdConfig
    ranks: int
    steps: int
    micro_steps: int
    params: int
    rate: float

    @property
    def output(self) -> Path:
        return Path(self.rankd.output)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    positive = whole_number(1)
    parser.add_argument("--output", type=Path, required=True, help="output directory; must not hold a run yet")
    parser.add_argument("--config", type=Path, metavar="YAML",
                        help="a training YAML whose `rankd:` section holds here too (outputs, logs, …), except for "
                        "output and on_anomaly")  # fmt: skip
    parser.add_argument("--endpoint", help="a running collector's tcp://HOST:PORT; default: start one here")
    parser.add_argument("--ranks", type=positive, default=8, help="number of ranks (default 8)")
    parser.add_argument("--steps", type=positive, default=20, help="training steps (default 20)")
    parser.add_argument("--micro-steps", type=positive, default=4, help="micro-steps in a step (default 4)")
    parser.add_argument("--params", type=positive, default=700, help="parameters, one norm each (default 700)")
    parser.add_argument("--rate", type=float, default=10.0, help="micro-steps per second; 0: flat out (default 10)")
    parser.add_argument("--processes", type=positive, default=0, help="processes for the ranks (default: one a core)")


def run(args: argparse.Namespace) -> int:
    """Simulate and print the figures; 1 if a line that was pushed never came out."""
    if (args.output / "merged.log").exists():
        raise ConfigError(f"{args.output} holds a run already; give --output a fresh directory")
    plan = _Plan(RankdConfig(), args.ranks, args.steps, args.micro_steps, args.params, args.rate)
    plan = replace(plan, rankd=_section(args, plan))
    processes = min(args.processes or os.cpu_count() or 1, plan.ranks)
    ranks, places = counted(plan.ranks, "rank"), counted(processes, "process", "processes")
    steps, micro_steps = counted(plan.steps, "step"), counted(plan.micro_steps, "micro-step")
    print(f"{ranks} in {places}: {steps} of {micro_steps}, {counted(plan.params, 'norm')} each, "
          f"at {plan.rate or 'any number of'} micro-steps/s", flush=True)  # fmt: skip
    follower = _Follower(plan)
    follower.start()
    pushed = _run_processes(plan, processes)
    follower.finish(_SETTLE)
    return _report(plan, pushed, follower.seen)


def _section(args: argparse.Namespace, plan: _Plan) -> RankdConfig:
    """What agents and collector are told: the YAML's section where one is given, made fit for made-up metrics."""
    section = RankdConfig() if args.config is None else AgentConfig.from_yaml(args.config).rankd
    return replace(
        section,
        spool=replace(section.spool, size=min(section.spool.size, _spool_size(plan))),
        output=args.output,
        endpoint=args.endpoint or section.endpoint,
        start_collector=section.start_collector and not args.endpoint,
        on_anomaly="log",  # there is no training that could be stopped
    )


# -- the ranks --------------------------------------------------------------------------------------------------------


def _run_processes(plan: _Plan, processes: int) -> dict[_Key, float]:
    """Run all ranks; when each block was pushed, on the clock that all processes of a host share."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    workers, pipes = [], []
    for number in range(processes):
        ours, theirs = context.Pipe(duplex=False)
        ranks = range(number, plan.ranks, processes)
        worker = context.Process(target=_work, args=(plan, ranks, barrier, theirs), name=f"ranks-{number}")
        worker.start()
        theirs.close()
        workers.append(worker)
        pipes.append(ours)
    pushed: dict[_Key, float] = {}
    try:
        for worker, pipe in zip(workers, pipes, strict=True):
            try:
                pushed.update(pipe.recv())
            except EOFError:
                raise RankdError(f"{worker.name} failed; its error stands above") from None
    finally:
        for worker in workers:
            worker.join(_SETTLE)
            worker.kill()
    return pushed


def _work(plan: _Plan, ranks: Sequence[int], barrier: Barrier, result: Connection) -> None:
    sys.setswitchinterval(_SWITCH_INTERVAL)
    config = AgentConfig(rankd=plan.rankd)
    agents = [Agent(config, rank=rank, world_size=plan.ranks, total_steps=plan.steps) for rank in ranks]
    pushed: dict[_Key, float] = {}
    frames = [_frames(plan.params, rank) for rank in ranks]
    pace = _pace(plan.rate)
    _wait_until_joined(agents)
    barrier.wait(_SETTLE)
    for step in range(1, plan.steps + 1):
        contexts = [agent.step(step) for agent in agents]
        for context in contexts:
            context.__enter__()
        for micro_step in range(1, plan.micro_steps + 1):
            next(pace)
            for rank, agent, frame in zip(ranks, agents, frames, strict=True):
                pushed[rank, step, micro_step] = time.monotonic()
                agent.micro_step(frames=frame)
        for agent, context in zip(agents, contexts, strict=True):
            agent.end_step(loss=1 / step)
            context.__exit__(None, None, None)
    closing = [threading.Thread(target=agent.close) for agent in agents]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()
    result.send(pushed)


def _spool_size(plan: _Plan) -> int:
    """Room for all that a rank makes, so that only the collector's pace is measured; all ranks are on one disk."""
    names = 64 * plan.params
    micro_step = 16 * plan.params + 1_024
    return names + plan.steps * (plan.micro_steps + 1) * micro_step + 2**17


def _wait_until_joined(agents: Sequence[Agent]) -> None:
    """Start with the collector there, so that its own start is not measured; without one, start all the same."""
    deadline = time.monotonic() + _JOIN
    while not all(agent.connected for agent in agents) and time.monotonic() < deadline:
        time.sleep(_LOOK)


def _frames(params: int, rank: int) -> list[Frame]:
    """A micro-step's frames: a loss, and a norm for each of `params` parameters."""
    source = random.Random(rank)  # noqa: S311 - made-up metrics
    names = NameTable(tuple(f"decoder.layers.{i // 7}.self_attention.linear_{i % 7}.weight" for i in range(params)))
    norms = [source.lognormvariate(-3, 1) for _ in range(params)]
    return [Frame.scalar("local_loss", source.random()), Frame.named("local_norm", names, norms)]


def _pace(rate: float) -> Iterator[None]:
    """Each `next` returns when the next micro-step is due."""
    due = time.monotonic()
    while True:
        due += 1 / rate if rate else 0.0
        time.sleep(max(0.0, due - time.monotonic()))
        yield


# -- the log ----------------------------------------------------------------------------------------------------------


class _Follower(threading.Thread):
    """Reads merged.log as it grows and notes when each block's header became readable."""

    def __init__(self, plan: _Plan) -> None:
        super().__init__(name="rankd-follower", daemon=True)
        self.seen: dict[_Key, float] = {}
        self._path = plan.output / "merged.log"
        self._expected = plan.ranks * plan.steps * plan.micro_steps
        self._deadline = math.inf

    def run(self) -> None:
        log = GrowingFile(self._path)
        try:
            while len(self.seen) < self._expected and time.monotonic() < self._deadline:
                lines = log.lines()
                if not lines:
                    time.sleep(_LOOK)
                    continue
                now = time.monotonic()
                for match in _headers(lines):
                    rank, step, micro_step = map(int, match.groups())
                    self.seen[rank, step, micro_step] = now
        finally:
            log.close()

    def finish(self, patience: float) -> None:
        """Wait until all is seen, at most `patience` seconds."""
        self._deadline = time.monotonic() + patience
        self.join(patience + 1)


def _headers(lines: bytes) -> Iterator[re.Match[bytes]]:
    """The block headers of micro-steps. Searched for as plain text: the expression alone, over each line, takes as much
    CPU time as the collector, and would be measured with it.
    """
    place = lines.find(_IN_HEADER)
    while place >= 0:
        if match := _HEADER.match(lines, lines.rfind(b"\n", 0, place) + 1):
            yield match
        place = lines.find(_IN_HEADER, place + 1)


def _report(plan: _Plan, pushed: dict[_Key, float], seen: dict[_Key, float]) -> int:
    missing = pushed.keys() - seen.keys()
    latencies = sorted((seen[key] - when) * 1_000 for key, when in pushed.items() if key in seen)
    if latencies:
        seconds = max(seen.values()) - min(pushed.values())
        records = len(latencies) * (plan.params + 1)
        print(f"records: {records} in {seconds:.2f} s, {records / seconds:,.0f} records/s through to merged.log")
        p50, p99 = statistics.median(latencies), latencies[math.ceil(0.99 * len(latencies)) - 1]
        print(f"push to readable line: p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {latencies[-1]:.1f} ms")
    if missing:
        rank, step, micro_step = min(missing)
        first = f"rank {rank} step {step} micro_step {micro_step}"
        print(f"MISSING: {len(missing)} of {counted(len(pushed), 'block')} never came out, the first of them {first}; "
              f"see {plan.output / '.rankd' / 'collector.log'}")  # fmt: skip
        return 1
    print(f"complete: {counted(len(pushed), 'block')} of {counted(plan.ranks, 'rank')} in {plan.output / 'merged.log'}")
    return 0
