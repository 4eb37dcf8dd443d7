"""A real training with every metric on: what stands in the log agrees with what was computed independently.

The example's model trains in a process of its own, the collector in another. Beside the agent, the loop computes each
value by other means: norms by numpy in float64, token counts by the router's own scores, maxima by the attention's.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from rankd.collector.protocol.records import Record
from rankd.collector.protocol.speclog import parse

pytestmark = pytest.mark.mindspore

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "example"
STEPS, MICRO_STEPS, INTERVAL = 4, 3, 2

YAML = f"""
monitor:
  train_state: {{local_norm: True, local_loss: True, device_norm: True, device_loss: True}}
  moe_monitor: {{save_tokens_per_expert_interval: {INTERVAL}}}
monitor_config: {{monitor_on: True, local_loss: True, global_loss: True, grad_norm: True, nan_check: True}}
callbacks: [{{type: MaxLogitsMonitor}}]
rankd: {{output: out, exit_timeout: 20}}
"""

# `zero`: when the counts are zeroed by the loop, as frameworks do.
TRAINING = """
    import json, math
    import numpy as np
    import mindspore as ms
    from mindspore import nn, ops
    from model import EXPERTS_PER_TOKEN, CoreAttention, Model, MoELayer, batches
    from rankd.agent import Agent

    ms.set_seed(1)
    net = Model()
    weights = net.trainable_params()
    moe = [cell for _, cell in net.cells_and_names() if isinstance(cell, MoELayer)]
    cores = {n: c for n, c in net.cells_and_names() if isinstance(c, CoreAttention)}
    forward_backward = ms.value_and_grad(net, None, weights)
    optimizer = nn.Adam(weights, learning_rate=1e-2)
    data = batches(1, 0)
    expected = []

    def note(metric, step, micro_step, name, value):
        expected.append([metric, step, micro_step, name, value])

    # What the layers see, by hooks of the framework's on the forward pass; the values are computed by numpy.
    tokens, logits = {}, {}

    def router_hook(index):
        def hook(cell, inputs, output):
            scores = output.asnumpy().astype(np.float64)
            best = np.argsort(-scores, -1)[:, :EXPERTS_PER_TOKEN]
            tokens[index] = np.bincount(best.reshape(-1), minlength=scores.shape[-1])
        return hook

    def core_hook(name):
        def hook(cell, inputs, output):
            query, key = (t.asnumpy().astype(np.float64) for t in inputs[:2])
            scores = query @ key.swapaxes(-1, -2) / math.sqrt(query.shape[-1])
            seen = np.tril(np.ones(scores.shape[-2:], bool))
            largest = np.where(seen, scores, -np.inf).max((0, 2, 3))
            logits[name] = np.maximum(logits.get(name, 0.0), largest)
        return hook

    for index, cell in enumerate(moe):
        cell.router.register_forward_hook(router_hook(index))
    for name, cell in cores.items():
        cell.register_forward_hook(core_hook(name))

    def norm(array):
        return math.sqrt(float((array.astype(np.float64) ** 2).sum()))

    with Agent.from_yaml("train.yaml", model=net, total_steps=STEPS, micro_steps=MICRO_STEPS) as agent:
        for step in range(1, STEPS + 1):
            with agent.step(step):
                accumulated, previous, losses = None, [0.0] * len(weights), []
                for micro_step in range(1, MICRO_STEPS + 1):
                    if zero == "in the middle" and micro_step == 2:
                        for cell in moe:
                            ops.assign(cell.tokens_per_expert, ops.zeros_like(cell.tokens_per_expert))
                    loss, grads = forward_backward(next(data))
                    accumulated = list(grads) if accumulated is None else [a + g for a, g in zip(accumulated, grads)]
                    agent.micro_step(loss=loss, grads=accumulated)
                    losses.append(float(loss))
                    note("local_loss", step, micro_step, None, losses[-1])
                    norms = [norm(a.asnumpy()) for a in accumulated]
                    for parameter, new, old in zip(weights, norms, previous):
                        note("local_norm", step, micro_step, parameter.name, new - old)
                    previous = norms
                    if ((step - 1) * MICRO_STEPS + micro_step) % INTERVAL == 0:
                        for index, name in enumerate(["decoder.1", "mtp.0.0"]):
                            note("tpe", step, micro_step, name, tokens[index].tolist())
                optimizer(tuple(accumulated))
                mean = sum(losses) / MICRO_STEPS
                agent.end_step(loss=ms.Tensor(mean, ms.float32), lr=1e-2)
                note("device_loss", step, None, None, mean)
                note("loss", step, None, None, mean)
                note("global_loss", step, None, None, mean)
                note("lr", step, None, None, 1e-2)
                for parameter, value in zip(weights, norms):
                    note("device_norm", step, None, parameter.name, value)
                note("grad_norm", step, None, None, norm(np.concatenate([a.asnumpy().ravel() for a in accumulated])))
                for name, value in logits.items():
                    note("max_attention_logit", step, None, name + ".max_logits_val", value.tolist())
                logits.clear()
            if zero == "between steps":
                for cell in moe:
                    cell.tokens_per_expert = ops.zeros_like(cell.tokens_per_expert)
        assert not agent.errors, agent.errors
    print(json.dumps(expected))
"""


def train(folder: Path, zero: str) -> tuple[list[list[Any]], list[Record]]:
    """Train in `folder`; what was computed independently, and what the log says."""
    (folder / "train.yaml").write_text(YAML)
    head = f"zero, STEPS, MICRO_STEPS, INTERVAL = {zero!r}, {STEPS}, {MICRO_STEPS}, {INTERVAL}\n"
    program = head + textwrap.dedent(TRAINING)
    env = {**os.environ, "MS_DEV_LAUNCH_BLOCKING": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE)}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    with (folder / "out" / "rank_0" / "monitor.log").open("rb") as log:
        content = list(parse(log, rank=0))
    return json.loads(done.stdout.strip().splitlines()[-1]), [r for r in content if isinstance(r, Record)]


def close(metric: str, said: Any, computed: Any) -> bool:
    """Whether a printed value is what was computed, as far as the log prints it and float32 knows it."""
    if metric == "tpe":
        return bool(list(said) == computed)
    pairs = zip(said, computed, strict=True) if isinstance(said, tuple) else [(said, computed)]
    digits = 6e-4 if metric == "max_attention_logit" else 1e-5
    return all(math.isclose(a, b, rel_tol=digits, abs_tol=2e-6) for a, b in pairs)


@pytest.mark.parametrize("zero", ["never", "between steps", "in the middle"])
def test_every_metric_agrees_with_what_was_computed_independently(tmp_path: Path, zero: str) -> None:
    """Each value of each metric, with the experts' counts running on, and zeroed between or inside of steps."""
    expected, records = train(tmp_path, zero)
    said = {(r.metric, r.position.step, r.position.micro_step, r.name): r.value for r in records}
    computed = {(metric, step, micro, name): value for metric, step, micro, name, value in expected}
    timed = {key: said.pop(key) for key in list(said) if key[0] == "step_time_ms"}
    assert len(timed) == STEPS
    assert said.keys() == computed.keys()
    wrong = [(key, said[key], computed[key]) for key in said if not close(key[0], said[key], computed[key])]
    assert wrong == []
    assert {r.iteration for r in records if r.metric == "tpe"} == {2, 4, 6, 8, 10, 12}


def test_the_device_path_reads_the_same_counts_and_maxima(tmp_path: Path) -> None:
    """Values that lie on a device are joined there and copied once: forced on the host's tensors, it gives the same."""
    program = """
        import json
        import numpy as np
        import mindspore as ms
        from mindspore import Parameter, Tensor, ops
        from rankd.agent.tensors import Snapshot

        for dtypes in ((ms.float32,) * 3, (ms.float32, ms.int32, ms.float16), (ms.int64,)):
            tensors = [Parameter(Tensor(np.arange(3 + i).reshape(1, -1), d)) for i, d in enumerate(dtypes)]
            snapshots = [Snapshot(tensors, place) for place in ("host", "device")]
            assert [s.ready for s in snapshots] == [True, False]
            for tensor in tensors:
                ops.assign(tensor, ops.zeros_like(tensor))
            for snapshot in snapshots:
                got = snapshot.fetch()
                assert [a.tolist() for a in got] == [list(range(3 + i)) for i in range(len(dtypes))], got
                assert snapshot.ready
        assert Snapshot([]).fetch() == []
        print(json.dumps("same"))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == "same"
