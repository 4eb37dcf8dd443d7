"""Trains on every rank until it is killed, a tenth of a second a step; the ranks are in step by a collective.

usage: profiled.py --config YAML (started by msrun); leaves in the working directory imported_rank_N.txt, which says
whether the module that makes the profiler has been imported by now.

Four Tanh a step, so a profile of n steps holds 4·n of them.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_rank, init

from rankd.agent import Agent

MICRO_STEPS = 4


def main(config: str) -> None:
    """Train."""
    init()
    rank = get_rank()
    net = nn.Dense(8, 8)
    forward_backward = ms.value_and_grad(lambda x: ops.tanh(net(x)).sum(), None, net.trainable_params())
    batch = Tensor(np.ones((4, 8), np.float32))
    with Agent.from_yaml(config, model=net) as agent:
        for step in itertools.count(1):
            with agent.step(step):
                for _ in range(MICRO_STEPS):
                    loss, _ = forward_backward(batch)
                    agent.micro_step(loss=loss)
                # Rank 0 is the slow one, for which the others wait.
                time.sleep(0.1 if rank == 0 else 0.001)
                agent.end_step(loss=ops.AllReduce()(loss))
            imported = "rankd.profiler_ctl.mindspore_profiler" in sys.modules
            Path(f"imported_rank_{rank}.txt").write_text(str(imported))


if __name__ == "__main__":
    main(sys.argv[sys.argv.index("--config") + 1])
