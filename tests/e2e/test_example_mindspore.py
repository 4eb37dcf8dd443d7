"""The demo's model, without agent and launcher: what its configuration names exists, and it learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.mindspore

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "example"


def run(program: str) -> Any:
    """Run `program` beside the example's files; what it prints last, as JSON."""
    env = {**os.environ, "MS_DEV_LAUNCH_BLOCKING": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=EXAMPLE, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_every_filter_of_the_examples_configuration_matches_a_parameter() -> None:
    """The names are Megatron's, and nobody copies a filter that chooses nothing."""
    names = run("import json\nfrom model import Model\nprint(json.dumps([p.name for p in Model().trainable_params()]))")
    assert {
        "embedding.word_embeddings.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.q_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.1.mlp.linear_fc1.weight",
        "mtp.layers.0.transformer_layer.mlp.router.weight",
        "decoder.final_layernorm.weight",
    } <= set(names)
    train_state = yaml.safe_load((EXAMPLE / "train.yaml").read_text())["monitor"]["train_state"]
    for word in train_state["local_norm"] + train_state["device_norm"]:
        assert any(word in name for name in names), word


def test_the_examples_model_learns() -> None:
    """Twenty steps with one batch each take more than a nat off the loss, with different data on different ranks."""
    losses = run(
        "import json\n"
        "import mindspore as ms\n"
        "from mindspore import nn\n"
        "from model import Model, batches\n"
        "ms.set_seed(1)\n"
        "net = Model()\n"
        "step = ms.value_and_grad(net, None, net.trainable_params())\n"
        "optimizer = nn.Adam(net.trainable_params(), learning_rate=1e-2)\n"
        "data, other = batches(1, 0), batches(1, 1)\n"
        "assert (next(data).asnumpy() != next(other).asnumpy()).any()\n"
        "losses = []\n"
        "for _ in range(20):\n"
        "    loss, grads = step(next(data))\n"
        "    optimizer(grads)\n"
        "    losses.append(float(loss))\n"
        "print(json.dumps(losses))\n"
    )
    assert losses[-1] < losses[0] - 1
