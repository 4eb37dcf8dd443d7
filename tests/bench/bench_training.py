"""What a training step pays for all metrics on every micro-step, in real MindSpore on a CPU.

200 parameter tensors, 12 million parameters, 4 micro-steps a step. Steps of these kinds by turns, in one process:

    no agent, again    the same twice: how far two equal kinds lie apart here
    off                an agent with no metric on
    rankd              every norm and every loss of every micro-step
    700 scalars        700 `agent.log` calls a micro-step
    hooks              MindFormers' way: a hook on each parameter that squares, sums, takes the root, copies to the host

Two ways to count. By difference: CPU time of the process against "no agent" of the same turn; that has everything in
it, and the noise of two whole steps. Counted: CPU time of the calls themselves on the training thread, and of the
agent's threads and libzmq's; what the caches lose by it is not in it. A bound is held against what is counted, because
two whole steps differ by more than it; the collector is a process of its own.

A micro-batch has 512 rows, as few as a model of this size is trained with; with more, a step takes longer and all the
rest weighs less. How much of a step the hooks cost depends on the machine (each waits for its copy to the host), so
they are measured in the same turns as the rest.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from .figures import Figure, command, median, ratio

LAYERS, WIDTH, MICRO_STEPS = 100, 346, 4
SCALARS = [f"layer.{i}.activation_scale" for i in range(700)]

MicroStep = Callable[[Tensor, Sequence[Tensor]], None]


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

    def __init__(self, rows: int) -> None:
        ms.set_seed(1)
        self.model = Model()
        self.weights = list(self.model.trainable_params())
        self._gradients = ms.value_and_grad(self.model, None, tuple(self.weights))
        self._batch = Tensor(np.random.default_rng(1).standard_normal((rows, WIDTH)).astype(np.float32))

    def step(self, micro_step: MicroStep) -> None:
        """Forward, backward and accumulation of each micro-batch; `micro_step` sees loss and accumulated gradients."""
        accumulated: list[Tensor] | None = None
        for _ in range(MICRO_STEPS):
            loss, gradients = self._gradients(self._batch)
            if accumulated is None:
                accumulated = list(gradients)
            else:
                accumulated = [a + g for a, g in zip(accumulated, gradients, strict=True)]
            micro_step(loss, accumulated)


class Counted:
    """CPU seconds of the calls that are made through it on this thread."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            self.seconds += time.thread_time() - before


class Agents:
    """Training steps with one agent of a configuration."""

    def __init__(self, loop: Loop, output: Path, monitor: Mapping[str, object]) -> None:
        config = AgentConfig.from_mapping({"monitor": dict(monitor), "rankd": {"output": str(output)}})
        self._loop = loop
        before = _tasks()
        self._agent = Agent(config, loop.model, rank=0, world_size=1)
        while not self._agent.connected:
            time.sleep(0.01)
        self._tasks = _tasks() - before
        self._number = 0

    def threads_seconds(self) -> float:
        """CPU time so far of its threads, libzmq's included."""
        return sum(map(_task_seconds, self._tasks))

    def step(self, counted: Counted, scalars: Sequence[str] = ()) -> None:
        agent, threads = self._agent, self.threads_seconds()
        self._number += 1

        def micro_step(loss: Tensor, gradients: Sequence[Tensor]) -> None:
            for name in scalars:
                agent.log(name, 0.5, level="micro_step")
            agent.micro_step(loss=loss, grads=gradients)

        context = agent.step(self._number)
        counted(context.__enter__)
        self._loop.step(lambda loss, gradients: counted(micro_step, loss, gradients))
        counted(agent.end_step, loss=1.0, lr=1e-3)
        counted(context.__exit__, None, None, None)
        counted.seconds += self.threads_seconds() - threads

    def close(self) -> None:
        self._agent.close()


def copied_norm(gradient: Tensor) -> None:
    """MindFormers' way: an operator each for square, sum and root, and a copy to the host."""
    ops.sqrt(ops.sum(ops.pow(gradient, 2))).asnumpy()


def bare_pass(counted: Counted) -> MicroStep:
    """Reads each gradient once, and does no more: what no way to compute a norm can do without."""

    def read(arrays: Sequence[Any]) -> None:
        for array in arrays:
            array.dot(array)

    def micro_step(_: Tensor, gradients: Sequence[Tensor]) -> None:
        arrays = [gradient.asnumpy().reshape(-1) for gradient in gradients]
        counted(read, arrays)

    return micro_step


def _tasks() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def _task_seconds(task: int) -> float:
    try:
        return int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return 0.0  # one that looked for leftovers, and has ended


Kind = Callable[[Counted], None]


def measure_steps(steps: int, kinds: dict[str, Kind]) -> dict[str, tuple[list[float], list[float]]]:
    """CPU seconds of each step by kind: of the process, and counted."""
    for kind in kinds.values():
        kind(Counted())
    out: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in kinds}
    for _ in range(steps):
        for name, kind in kinds.items():
            counted, before = Counted(), time.process_time()
            kind(counted)
            out[name][0].append(time.process_time() - before)
            out[name][1].append(counted.seconds)
    return out


def measure(args: argparse.Namespace) -> Iterator[Figure]:
    loop = Loop(args.rows)
    everything = {"local_norm": True, "local_loss": True, "device_norm": True, "device_loss": True}

    def with_hooks(_: Counted) -> None:
        # Each fires with the micro-batch's gradient, on the calling thread.
        handles: list[Any] = [weight.register_hook(copied_norm) for weight in loop.weights]
        loop.step(lambda _loss, _gradients: None)
        for handle in handles:
            handle.remove()

    def plain(_: Counted) -> None:
        loop.step(lambda _loss, _gradients: None)

    with tempfile.TemporaryDirectory(prefix="rankd-bench-", ignore_cleanup_errors=True) as folder:
        outputs = iter(range(9))
        agents = [Agents(loop, Path(folder) / str(next(outputs)), m) for m in ({}, {"train_state": everything}, {})]
        off, on, scalars = agents
        kinds: dict[str, Kind] = {
            "no agent": plain,
            "again": plain,
            "off": off.step,
            "bare": lambda counted: loop.step(bare_pass(counted)),
            "rankd": on.step,
            "scalars": lambda counted: scalars.step(counted, SCALARS),
            "hooks": with_hooks,
        }
        seconds = measure_steps(2 if args.quick else args.steps, kinds)
        for agent in agents:
            agent.close()
    yield from figures(seconds)


def figures(seconds: dict[str, tuple[list[float], list[float]]]) -> Iterator[Figure]:
    base = seconds["no agent"][0]
    step = median(base)
    by_difference = {name: 100 * (ratio(process, base) - 1) for name, (process, _) in seconds.items()}
    counted = {name: 100 * median(values) / step for name, (_, values) in seconds.items()}

    def both(name: str) -> str:
        return f"by difference {by_difference[name]:+.1f} % (the same twice: {by_difference['again']:+.1f} %)"

    yield Figure("a step without an agent", 1_000 * step, "ms CPU")
    yield Figure("all metrics, of a step", counted["rankd"], "%", 1.5, note=both("rankd"))
    yield Figure("  its limit: reading the gradients once", counted["bare"], "%")
    yield Figure("off, of a step", counted["off"], "%", 0.1, note=both("off"))
    yield Figure("700 scalars a micro-step, of a step", counted["scalars"], "%", 1.5, note=both("scalars"))
    yield Figure("MindFormers' way, of a step", by_difference["hooks"], "%")
    if by_difference["hooks"] > 0:
        yield Figure("all metrics, of MindFormers' way", counted["rankd"] / by_difference["hooks"], "x", 1 / 8)


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=5, help="of each kind")
    parser.add_argument("--rows", type=int, default=512, help="of a micro-batch")


if __name__ == "__main__":
    command(__doc__, measure, declare)
