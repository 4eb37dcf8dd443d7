"""Trains on 4 ranks until rank 2 raises in micro-step 3 of step 7; each rank notes what it has pushed.

usage: failing.py --config YAML (started by msrun); leaves pushed_rank_N.txt in the working directory, a line
`STEP MICRO_STEP` for each micro-step that was pushed. A line is written after the push, and is in the file at once.

Of the other ranks, 0 and 1 come to the step's collective and wait there; rank 3 has more micro-batches than anyone and
is in the middle of them when msrun kills it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import mindspore as ms
from deploy.example.model import Model, batches
from mindspore import Tensor, nn, ops
from mindspore.communication import get_rank, init

from rankd.agent import Agent

FAILING = (2, 7, 3)
MICRO_STEPS = 4


def add(accumulated: list[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """The sums; `accumulated` is empty before the first micro-step."""
    return [a + g for a, g in zip(accumulated, gradients, strict=True)] if accumulated else list(gradients)


def micro_steps(rank: int, step: int) -> Iterable[int]:
    """The numbers of this step's micro-steps."""
    return itertools.count(1) if (rank, step) == (3, FAILING[1]) else range(1, MICRO_STEPS + 1)


def main(config: str) -> None:
    """Train until the failure."""
    init()
    rank = get_rank()
    ms.set_seed(1)
    net = Model()
    parameters = net.trainable_params()
    forward_backward = ms.value_and_grad(net, None, parameters)
    optimizer = nn.SGD(parameters, learning_rate=0.05)
    data = batches(seed=5, rank=rank)

    with Path(f"pushed_rank_{rank}.txt").open("w") as pushed, Agent.from_yaml(config, model=net) as agent:
        for step in itertools.count(1):
            with agent.step(step):
                accumulated: list[Tensor] = []
                for micro_step in micro_steps(rank, step):
                    if (rank, step, micro_step) == FAILING:
                        raise RuntimeError("the loss is not finite")
                    loss, gradients = forward_backward(next(data))
                    accumulated = add(accumulated, gradients)
                    agent.micro_step(loss=loss, grads=accumulated)
                    print(step, micro_step, file=pushed, flush=True)
                mean = ops.AllReduce()(loss) / 4
                optimizer(tuple(accumulated))
                agent.end_step(loss=mean)


if __name__ == "__main__":
    main(sys.argv[sys.argv.index("--config") + 1])
