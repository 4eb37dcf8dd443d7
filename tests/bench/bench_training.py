"""What a training step pays for all metrics on every micro-step, in real MindSpore on a CPU.

200 parameter tensors, 12 million parameters, 4 micro-steps a step. Steps of three kinds by turns in one process:
without an agent; with one that records every norm and every loss; with a hook on each parameter that squares, sums,
takes the root and copies to the host, as MindFormers 2.1.0 does. Counted is the CPU time of the process, its sender
thread included; the collector is a process of its own.

    python tests/bench/bench_training.py [--steps 12]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# The asynchronous pipeline of MindSpore spins while it waits, which would count as work.
os.environ.setdefault("MS_DEV_LAUNCH_BLOCKING", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from rankd.agent import Agent
from rankd.agent.config import AgentConfig

LAYERS, WIDTH, BATCH, MICRO_STEPS = 100, 346, 64, 4


class Model(nn.Cell):
    """100 dense layers: 200 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList([nn.Dense(WIDTH, WIDTH) for _ in range(LAYERS)])

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * ops.tanh(layer(x))
        return (x * x).mean()


class Loop:
    """One training, whose steps can be run with or without an agent."""

    def __init__(self) -> None:
        ms.set_seed(1)
        self.model = Model()
        self.weights = list(self.model.trainable_params())
        self._gradients = ms.value_and_grad(self.model, None, tuple(self.weights))
        self._batch = Tensor(np.random.default_rng(1).standard_normal((BATCH, WIDTH)).astype(np.float32))

    def step(self, micro_step: Callable[[Tensor, Sequence[Tensor]], None]) -> None:
        """Forward, backward and accumulation of each micro-batch; `micro_step` sees loss and accumulated gradients."""
        accumulated: list[Tensor] | None = None
        for _ in range(MICRO_STEPS):
            loss, gradients = self._gradients(self._batch)
            if accumulated is None:
                accumulated = list(gradients)
            else:
                accumulated = [a + g for a, g in zip(accumulated, gradients, strict=True)]
            micro_step(loss, accumulated)


def copied_norm(gradient: Tensor) -> None:
    """MindFormers' way: an operator each for square, sum and root, and a copy to the host."""
    ops.sqrt(ops.sum(ops.pow(gradient, 2))).asnumpy()


def cpu_seconds(call: Callable[[], None]) -> float:
    before = time.process_time()
    call()
    return time.process_time() - before


def config(output: str) -> AgentConfig:
    """Everything on, at every micro-step."""
    everything = {"local_norm": True, "local_loss": True, "device_norm": True, "device_loss": True}
    return AgentConfig.from_mapping({"monitor": {"train_state": everything}, "rankd": {"output": output}})


def measure(steps: int, output: str) -> dict[str, list[float]]:
    """CPU seconds of each step, by kind."""
    loop = Loop()
    agent = Agent(config(output), loop.model, total_steps=steps, rank=0, world_size=1)
    number = 0

    def plain() -> None:
        loop.step(lambda _loss, _gradients: None)

    def with_agent() -> None:
        nonlocal number
        number += 1
        with agent.step(number):
            loop.step(lambda loss, gradients: agent.micro_step(loss=loss, grads=gradients))
            agent.end_step(loss=1.0, lr=1e-3)

    def with_hooks() -> None:
        # Each fires with the micro-batch's gradient, on the calling thread.
        handles: list[Any] = [weight.register_hook(copied_norm) for weight in loop.weights]
        loop.step(lambda _loss, _gradients: None)
        for handle in handles:
            handle.remove()

    kinds = {"no agent": plain, "rankd": with_agent, "hooks": with_hooks}
    for kind in kinds.values():
        kind()
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(steps):
        for name, kind in kinds.items():
            seconds[name].append(cpu_seconds(kind))
    agent.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rankd-bench-") as output:
        seconds = measure(args.steps, str(Path(output) / "out"))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; medians of {args.steps} steps of each kind by turns")
    base = statistics.median(seconds["no agent"])
    for name, values in seconds.items():
        ratio = statistics.median(v / b for v, b in zip(values, seconds["no agent"], strict=True))
        print(f"{name:9} {statistics.median(values) * 1_000:8.1f} ms CPU a step, {ratio:.3f} x no agent")
    costs = {name: statistics.median(values) - base for name, values in seconds.items()}
    if costs["hooks"] > 0:
        print(f"rankd costs {costs['rankd'] / costs['hooks']:.2f} of what the hooks cost")


if __name__ == "__main__":
    main()
