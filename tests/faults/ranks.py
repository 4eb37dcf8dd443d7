"""Ranks of a made-up training: real agents, one thread each, in a process that a test may stop or kill.

Each rank writes down what it pushes: a line `B STEP MICRO_STEP VALUE` before the call, `P` after it has returned, and
`E` once the agent has closed with nothing left. The process takes one argument, the fields of `Orders` as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

SHIFT = "RANKD_TEST_CLOCK_SHIFT"
if shift := float(os.environ.get(SHIFT, "0")):
    # Before anybody reads the clock: this process lives `shift` seconds ahead.
    true_time = time.time
    time.time = lambda: true_time() + shift

from rankd.agent import Agent  # noqa: E402
from rankd.agent.config import AgentConfig  # noqa: E402
from rankd.collector.config import RankdConfig  # noqa: E402
from rankd.collector.protocol.records import Frame, NameTable  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Orders:
    """What the ranks of one process do.

    Attributes:
        section: the `rankd:` section.
        ranks, world_size: who they are.
        tag: tells this process from others of the same ranks; part of each value.
        told: the directory of their lists.
        first, last: steps; they end earlier, after a whole step, once the file `told/stop` is there.
        micro_steps, params: of each step.
        pace: seconds between two micro-steps.
        fork: at this step each rank forks a child that logs, and outlives its parent.
    """

    section: dict[str, Any]
    ranks: tuple[int, ...]
    world_size: int
    tag: int
    told: str
    first: int = 1
    last: int = 10
    micro_steps: int = 2
    params: int = 5
    pace: float = 0.01
    fork: int = 0


def value_of(tag: int, rank: int, step: int, micro_step: int) -> float:
    """The loss of this micro-step: no other one's, and exact as a float."""
    return float(((tag * 1_000 + rank) * 100_000 + step) * 100 + micro_step)


def list_of(told: Path, rank: int, tag: int) -> Path:
    """Where a rank writes what it pushes."""
    return told / f"rank_{rank}.{tag}"


class Rank:
    """One rank: pushes, and writes down what."""

    def __init__(self, orders: Orders, rank: int) -> None:
        self._orders = orders
        self._rank = rank
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._list = os.open(list_of(Path(orders.told), rank, orders.tag), flags, 0o644)
        self._stop = Path(orders.told) / "stop"
        self._names = NameTable(tuple(f"decoder.layers.{i}.weight" for i in range(orders.params)))
        self._pause = threading.Event()
        config = AgentConfig(rankd=RankdConfig.from_mapping({"start_collector": False, **orders.section}))
        self.agent = Agent(config, rank=rank, world_size=orders.world_size, total_steps=orders.last)

    def train(self) -> None:
        """All steps, then goodbye."""
        for step in range(self._orders.first, self._orders.last + 1):
            self._one_step(step)
            if self._stop.exists():
                break
        self.agent.close()
        self._note("E" if not self.agent.errors else f"X {dict(self.agent.errors)}")

    def _one_step(self, step: int) -> None:
        orders, agent = self._orders, self.agent
        if step == orders.fork and os.fork() == 0:
            agent.log("from_child", 1.0)
            agent.micro_step(frames=[Frame.scalar("local_loss", -1.0)])
            time.sleep(600)  # a data worker that outlives its parent; the test ends it by its id
            os._exit(0)
        with agent.step(step):
            for micro_step in range(1, orders.micro_steps + 1):
                value = value_of(orders.tag, self._rank, step, micro_step)
                norms = Frame.named("local_norm", self._names, [value / 1e12 + i for i in range(orders.params)])
                self._note(f"B {step} {micro_step} {value!r}")
                agent.micro_step(frames=[Frame.scalar("local_loss", value), norms])
                self._note(f"P {step} {micro_step} {value!r}")
                self._pause.wait(orders.pace)
            agent.end_step(loss=1 / step)

    def _note(self, line: str) -> None:
        os.write(self._list, f"{line}\n".encode())


def main() -> None:
    """Run all ranks to their end."""
    fields = json.loads(sys.argv[1])
    orders = Orders(**{**fields, "ranks": tuple(fields["ranks"])})
    ranks = [Rank(orders, rank) for rank in orders.ranks]
    threads = [threading.Thread(target=rank.train) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
