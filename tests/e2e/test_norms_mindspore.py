"""Norms and losses of real MindSpore tensors (the CPU build): both paths agree with norms computed independently.

Each test runs a small program in a process of its own: MindSpore's context, pipeline and launch mode belong to the
process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

pytestmark = pytest.mark.mindspore

# A model of two layers, its gradients over micro-steps by value_and_grad, and their norms by plain numpy in float64.
PRELUDE = """
    import json, math
    import numpy as np
    import mindspore as ms
    from mindspore import Tensor, nn, ops
    from rankd.agent.losses import scalar
    from rankd.agent.norms import DeviceOperators, NormMonitor, trainable_names

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.layers = nn.CellList([nn.Dense(6, 6), nn.Dense(6, 6)])
            self.final_layernorm = nn.LayerNorm((6,))

        def construct(self, x):
            for layer in self.layers:
                x = ops.tanh(layer(x))
            return ops.square(self.final_layernorm(x)[:, :3]).mean()

    ms.set_seed(7)
    net = Net()
    names = trainable_names(net)
    grad_fn = ms.value_and_grad(net, None, net.trainable_params())
    rng = np.random.default_rng(3)
    batches = [Tensor(rng.normal(size=(4, 6)).astype(np.float32)) for _ in range(4)]
    everything = lambda name: True

    def independent(arrays):
        return [math.sqrt(float((a.astype(np.float64) ** 2).sum())) for a in arrays]

    def values(frame):
        return dict(zip(frame.names, frame.values))
"""


def run(program: str, **environment: str) -> Any:
    """Run `program` after the prelude; what it prints last, as JSON."""
    env = {**os.environ, "MS_DEV_LAUNCH_BLOCKING": "1", "OMP_NUM_THREADS": "1", "GLOG_v": "3", **environment}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PRELUDE) + textwrap.dedent(program)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("place", ["auto", "host", "device"])
@pytest.mark.parametrize("launch", ["blocking", "asynchronous"])
def test_norms_of_accumulated_gradients_agree_with_independent_ones(place: str, launch: str) -> None:
    """Four micro-steps through either path: the increments and the device norm are those of numpy in float64."""
    seen = run(
        f"""
        monitor = NormMonitor(names, everything, everything, place={place!r})
        accumulated, pendings, expected = None, [], []
        for batch in batches:
            _, grads = grad_fn(batch)
            accumulated = grads if accumulated is None else [a + g for a, g in zip(accumulated, grads)]
            pendings.append(monitor.micro_step(accumulated))
            expected.append(independent([a.asnumpy() for a in accumulated]))
        frames = [pending.fetch() for pending in pendings]
        previous = [0.0] * len(names)
        for frame, norms in zip(frames, expected):
            assert frame.names == tuple(names)
            np.testing.assert_allclose(frame.values, np.subtract(norms, previous), rtol=1e-4, atol=1e-7)
            previous = norms
        device = monitor.end_step()
        np.testing.assert_allclose(device.values, expected[-1], rtol=1e-6)
        print(json.dumps([device.metric, list(device.names)]))
        """,
        MS_DEV_LAUNCH_BLOCKING="1" if launch == "blocking" else "0",
    )
    assert seen == [
        "device_norm",
        [
            *(f"layers.{i}.{part}" for i in range(2) for part in ("weight", "bias")),
            "final_layernorm.gamma",
            "final_layernorm.beta",
        ],
    ]


def test_the_device_path_copies_once_a_micro_step_and_only_when_asked() -> None:
    """At most three operators a parameter and one stack; nothing is copied before the next micro-step."""
    seen = run(
        """
        operators = DeviceOperators()
        monitor = NormMonitor(names, everything, everything, place="device", operators=operators)
        log = []
        for batch in batches:
            pending = monitor.micro_step(grad_fn(batch)[1])
            log.append([pending.ready, operators.launched, operators.copies])
        monitor.end_step()
        log.append([pending.ready, operators.launched, operators.copies])
        print(json.dumps(log))
        """
    )
    each = 2 * 6 + 1
    assert seen == [[False, each * (i + 1), i] for i in range(4)] + [[True, each * 4, 4]]


def test_what_is_pending_is_what_was_measured_even_if_the_gradient_is_overwritten() -> None:
    """A deferred copy must not see the accumulator's later values: training adds to it in place."""
    seen = run(
        """
        monitor = NormMonitor(["w"], everything, everything, place="device")
        accumulator = ms.Parameter(Tensor(np.full(4, 1.0, np.float32)), name="w")
        first = monitor.micro_step([accumulator])
        ops.assign_add(accumulator, Tensor(np.full(4, 2.0, np.float32)))
        second = monitor.micro_step([accumulator])
        ops.assign(accumulator, Tensor(np.zeros(4, np.float32)))
        print(json.dumps([first.fetch().values, second.fetch().values, monitor.end_step().values]))
        """
    )
    assert seen == [[2.0], [4.0], [6.0]]


@pytest.mark.parametrize("place", ["host", "device"])
def test_half_types_are_widened_and_views_are_measured_whole(place: str) -> None:
    """float16 and bfloat16 whose squares overflow float16, a transposed view, a 0-d tensor, and one without values."""
    seen = run(
        f"""
        grid = Tensor(np.arange(12, dtype=np.float32).reshape(3, 4))
        gradients = [
            Tensor(np.full((8, 8), 300.0), ms.float16),
            Tensor(np.full((8, 8), 300.0), ms.bfloat16),
            grid.T,
            Tensor(-2.0, ms.float32),
            None,
        ]
        operators = DeviceOperators()
        monitor = NormMonitor(list("abcde"), everything, None, place={place!r}, operators=operators)
        print(json.dumps([values(monitor.micro_step(gradients).fetch()), operators.launched]))
        """
    )
    norms, launched = seen
    assert norms == pytest.approx({"a": 2400.0, "b": 2400.0, "c": 506.0**0.5, "d": 2.0})
    assert launched == (3 + 3 + 2 + 2 + 1 if place == "device" else 0)


def test_a_huge_norm_is_right_on_the_host_and_from_the_second_time_on_the_device() -> None:
    """The device's first look at a norm above 2**64 overflows; later ones are right, be they huge or small."""
    seen = run(
        """
        huge, small = (Tensor(np.full(16, v, np.float32)) for v in (1e25, 1.0))
        series = [huge, huge, small, small]
        out = []
        for place in ("host", "device"):
            monitor = NormMonitor(["w"], everything, None, "micro_batch", place=place)
            out.append([repr(monitor.micro_step([g]).fetch().values[0]) for g in series])
        print(json.dumps(out))
        """
    )
    host, device = ([float(v) for v in row] for row in seen)
    assert host == pytest.approx([4e25, 4e25, 4.0, 4.0], rel=1e-6)
    assert device == pytest.approx([float("inf"), 4e25, 4.0, 4.0], rel=1e-6)


def test_a_step_given_up_with_values_on_the_device_leaves_nothing_behind() -> None:
    """The pending value is discarded, and the next step is right."""
    seen = run(
        """
        monitor = NormMonitor(["w"], everything, everything, place="device")
        given_up = monitor.micro_step([Tensor(np.full(4, 9.0, np.float32))])
        monitor.reset()
        after = monitor.micro_step([Tensor(np.full(4, 1.0, np.float32))])
        print(json.dumps([given_up.fetch(), after.fetch().values, monitor.end_step().values]))
        """
    )
    assert seen == [None, [2.0], [2.0]]


@pytest.mark.parametrize("place", ["host", "device"])
def test_losses_of_every_float_type_are_read(place: str) -> None:
    """0-d and one-element tensors; a tensor on a device is copied when it is handed over, not when it is read."""
    seen = run(
        f"""
        tensors = [Tensor(1.5, t) for t in (ms.float16, ms.bfloat16, ms.float32, ms.float64)]
        tensors += [Tensor([1.5], ms.float32), Tensor([[float("inf")]], ms.bfloat16), Tensor(3, ms.int32)]
        read = [scalar(t, place={place!r}) for t in tensors]
        sum_of_losses = ms.Parameter(Tensor(1.0, ms.float32), name="sum")
        pending = scalar(sum_of_losses, place={place!r})
        ops.assign_add(sum_of_losses, Tensor(5.0, ms.float32))
        refused = []
        for bad in (Tensor([1.0, 2.0]), Tensor(np.zeros((2, 0), np.float32))):
            try:
                scalar(bad)
            except Exception as error:
                refused.append(f"{{type(error).__name__}}: {{error}}")
        print(json.dumps([[repr(p.fetch()) for p in read], pending.fetch(), read[0].ready, refused]))
        """
    )
    assert seen[0] == ["1.5", "1.5", "1.5", "1.5", "1.5", "inf", "3.0"]
    assert seen[1:3] == [1.0, True]
    assert [text.split(",")[0] for text in seen[3]] == ["RecordError: loss must have one element"] * 2
