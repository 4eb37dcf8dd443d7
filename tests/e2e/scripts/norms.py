"""Trains on every rank, and writes what the norms are, computed from the same gradients by numpy in float64.

usage: norms.py --config YAML (started by msrun); leaves truth_rank_N.json in the working directory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import mindspore as ms
import numpy as np
from deploy.example.model import Model, batches
from mindspore import Tensor, nn, ops
from mindspore.communication import get_rank, init

from rankd.agent import Agent

STEPS = 3
# What each micro-step's loss is multiplied by: against the direction of the first, the accumulated norm shrinks.
WEIGHTS = (1.0, -0.75, 2.0)


def add(accumulated: list[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """The sums; `accumulated` is empty before the first micro-step."""
    return [a + g for a, g in zip(accumulated, gradients, strict=True)] if accumulated else list(gradients)


def norms(gradients: Sequence[Tensor]) -> list[float]:
    """The L2 norms, in float64 from the first operation on."""
    return [float(np.sqrt(np.square(gradient.asnumpy().astype(np.float64)).sum())) for gradient in gradients]


def main(config: str) -> None:
    """Train, and write the truth."""
    init()
    rank = get_rank()
    ms.set_seed(1)
    net = Model()
    parameters = net.trainable_params()
    names = [parameter.name for parameter in parameters]
    forward_backward = ms.value_and_grad(lambda ids, weight: net(ids) * weight, None, parameters)
    optimizer = nn.SGD(parameters, learning_rate=0.05)
    data = batches(seed=3, rank=rank)
    truth: list[tuple[str, int, int | None, str, float]] = []

    with Agent.from_yaml(config, model=net) as agent:
        for step in range(1, STEPS + 1):
            with agent.step(step):
                accumulated: list[Tensor] = []
                before = [0.0] * len(names)
                for micro_step, weight in enumerate(WEIGHTS, start=1):
                    loss, gradients = forward_backward(next(data), weight)
                    accumulated = add(accumulated, gradients)
                    agent.micro_step(loss=loss, grads=accumulated)
                    now = norms(accumulated)
                    rows = zip(names, now, before, strict=True)
                    truth += [("local_norm", step, micro_step, name, after - earlier) for name, after, earlier in rows]
                    before = now
                truth += [("device_norm", step, None, *row) for row in zip(names, before, strict=True)]
                optimizer(tuple(ops.AllReduce()(gradient) for gradient in accumulated))
                agent.end_step()
    Path(f"truth_rank_{rank}.json").write_text(json.dumps(truth))


if __name__ == "__main__":
    main(sys.argv[sys.argv.index("--config") + 1])
