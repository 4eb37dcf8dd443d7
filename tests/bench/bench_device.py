"""The device path, counted: operators and copies to the host of a micro-step, whatever the device takes for one.

Real MindSpore operators, on CPU tensors with the device path forced; with no copy before the next micro-step has been
launched.

    python -m tests.bench.bench_device
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

os.environ.setdefault("MS_DEV_LAUNCH_BLOCKING", "1")

import numpy as np
from mindspore import Tensor

from rankd.agent.norms import DeviceOperators, NormMonitor

from .figures import Figure, command


def measure(args: argparse.Namespace) -> Iterator[Figure]:
    parameters, micro_steps = 20 if args.quick else 200, 8
    names = [f"decoder.layers.{i}.weight" for i in range(parameters)]
    for dtype in ("float32", "float16"):
        operators = DeviceOperators()
        monitor = NormMonitor(names, lambda _: True, lambda _: True, place="device", operators=operators)
        gradients = [Tensor(np.full((4, 4), 1 + i, dtype)) for i in range(parameters)]
        waited = 0
        for _ in range(micro_steps):
            before = operators.copies
            pending = monitor.micro_step(gradients)
            # The copy of the micro-step before; that of this one is not made yet.
            waited += pending.ready
            assert operators.copies - before <= 1
        monitor.end_step()
        per_parameter = operators.launched / parameters / micro_steps
        name = f"device operators a parameter and micro-step, {dtype}"
        note = "the one that stacks all of them included"
        yield Figure(name, per_parameter, "", 3 + 1 / parameters, note=note)
        yield Figure("  copies to the host a micro-step", operators.copies / micro_steps, "", 1)
        yield Figure("  copies that waited for what was just launched", waited, "", 0)
    yield Figure("MindFormers' way: copies to the host a micro-step", parameters, "", note="one a parameter")


if __name__ == "__main__":
    command(__doc__, measure)
