"""The callback in the PyNative Trainer of MindFormers, by a double of it (see double/mindformers/__init__.py)."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support import collected, comments, finish, values

from rankd.agent.adapters.mindformers import RankdCallback, coordinates
from rankd.collector.protocol.records import Comment, Record

# Starts a training, a collector or both in each test.
pytestmark = pytest.mark.slow

DOUBLE = Path(__file__).parent / "double"
# Where a user's shell gets it from.
REGISTER_PATH = subprocess.run(
    [sys.executable, "-m", "rankd.agent.adapters"], capture_output=True, text=True, check=True
).stdout.strip()

# A model of two parameters, whose gradients are known: `weight` grows by its size's worth of ones, times `scale`.
TRAINING = """
import numpy as np
from mindformers.pynative.tools.monitor import events
from mindformers.pynative.trainer.trainer import Trainer
from mindformers.tools.register.register import MindFormerRegister

class Parameter:
    def __init__(self, name, size):
        self.name, self.size, self.grad, self.hooks = name, size, None, []
    def register_hook(self, hook):
        self.hooks.append(hook)
        class Handle:
            remove = staticmethod(lambda: self.hooks.remove(hook))
        return Handle
    def backward(self, scale):
        gradient = np.full(self.size, scale, np.float32)
        for hook in self.hooks:
            assert hook(gradient) is None
        self.grad = gradient.copy() if self.grad is None else self.grad + gradient

class Model:
    def __init__(self, fail_at=0):
        self.parameters = [Parameter("layer.weight", 4), Parameter("layer.bias", 9)]
        self.calls, self.fail_at = 0, fail_at
    def trainable_params(self):
        return list(self.parameters)
    def forward_backward(self, scale):
        self.calls += 1
        if self.calls == self.fail_at:
            raise ValueError("the device is gone")
        for parameter in self.parameters:
            parameter.backward(scale)
        return np.float32(self.calls * scale)

CONFIG = {
    "training": {"steps": 3, "local_batch_size": 1, "global_batch_size": 4},
    "monitor": {"train_state": {"local_norm": "weight", "device_norm": True, "local_loss": True, "device_loss": True}},
    "callbacks": [{"type": "RankdCallback", "auto_register": "rankd_callback.RankdCallback"}],
    "rankd": {"output": "out", "exit_timeout": 60},
}
"""


def training(tmp_path: Path, body: str, *, strict: bool = True, **environ: str) -> subprocess.Popen[str]:
    """Start a script that trains with the double; `strict`: warnings are errors (MindSpore has some of its own)."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "MS_"))}
    paths = {"PYTHONPATH": str(DOUBLE), "REGISTER_PATH": REGISTER_PATH}
    return subprocess.Popen(
        [sys.executable, *(["-W", "error"] if strict else []), "-c", TRAINING + textwrap.dedent(body)],
        cwd=tmp_path,
        env={**clean, **paths, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended_well(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it said on stdout and stderr; it must have ended well."""
    said, complained = process.communicate(timeout=60)
    assert process.returncode == 0, complained
    return said, complained


def norms(content: list[Record | Comment], metric: str, name: str) -> dict[tuple[int, int | None], float]:
    """The values of a norm of one parameter, by (step, micro_step)."""
    found = [r for r in content if isinstance(r, Record) and r.metric == metric and r.name == name]
    return {(r.position.step, r.position.micro_step): r.value for r in found if isinstance(r.value, float)}


def test_micro_steps_come_through_by_configuration_alone(tmp_path: Path) -> None:
    """`type: RankdCallback`: losses as they were before the division, norms of the accumulated gradient."""
    said, complained = ended_well(training(tmp_path, "Trainer(CONFIG, Model(), lr_scheduler=lambda s: s / 8).train()"))
    assert complained == ""
    content = collected(tmp_path)
    expected = {(step, micro): 4.0 * (step - 1) + micro for step in (1, 2, 3) for micro in (1, 2, 3, 4)}
    assert values(content, "local_loss") == expected
    assert values(content, "device_loss") == {(step, None): 4.0 * (step - 1) + 2.5 for step in (1, 2, 3)}
    # Ones times 1/4 each micro-step: the norm of four elements grows by 0.5 each time.
    assert norms(content, "local_norm", "layer.weight") == pytest.approx(
        {(step, micro): 0.5 for step in (1, 2, 3) for micro in (1, 2, 3, 4)}
    )
    assert norms(content, "local_norm", "layer.bias") == {}
    # Of all four together, before the optimizer has clipped it.
    assert norms(content, "device_norm", "layer.bias") == {(step, None): 3.0 for step in (1, 2, 3)}
    assert values(content, "lr") == {(step, None): step / 8 for step in (1, 2, 3)}
    assert values(content, "grad_norm")[2, None] == pytest.approx(math.sqrt(13), abs=1e-6)
    assert (3, None) in values(content, "throughput")
    assert (tmp_path / "out" / "merged.log").read_text().count("step:[    3/    3]") == 1
    assert "stock" in said


def test_the_trainer_sees_the_monitor_it_would_have_seen(tmp_path: Path) -> None:
    """With keep_stock the framework's monitor gets every call, in order; and a second Trainer is not disturbed."""
    body = """
    from types import SimpleNamespace
    plain = {k: v for k, v in CONFIG.items() if k not in ("callbacks", "rankd")}
    Trainer(plain, Model()).train()
    without = [e for e in events]
    events.clear()
    Trainer(CONFIG, Model()).train()
    assert events == without, events
    events.clear()
    Trainer(plain, Model()).train()
    assert events == without, events
    """
    ended_well(training(tmp_path, body))


def test_the_stock_monitors_can_be_replaced(tmp_path: Path) -> None:
    """`keep_stock: false`: the framework's own lines are gone, its TensorBoard and our records stay."""
    body = """
    CONFIG["callbacks"][0]["keep_stock"] = False
    CONFIG["monitor"]["tensorboard"] = {"output_dir": "tb"}
    Trainer(CONFIG, Model()).train()
    assert ("built", "", "tensorboard=True") in events
    """
    said, _ = ended_well(training(tmp_path, body))
    assert "stock" not in said
    assert len(values(collected(tmp_path), "local_loss")) == 12


@pytest.mark.slow
def test_micro_batch_norms_come_from_hooks(tmp_path: Path) -> None:
    """`rankd.local_norm_kind: micro_batch`: the norm of each micro-batch's own gradient; the hooks come off again."""
    body = """
    CONFIG["rankd"]["local_norm_kind"] = "micro_batch"
    CONFIG["monitor"]["train_state"]["device_norm"] = False
    model = Model()
    Trainer(CONFIG, model).train()
    assert [len(p.hooks) for p in model.parameters] == [0, 0]
    """
    ended_well(training(tmp_path, body))
    expected = {(step, micro): 0.5 for step in (1, 2, 3) for micro in (1, 2, 3, 4)}
    assert norms(collected(tmp_path), "local_norm", "layer.weight") == pytest.approx(expected)


@pytest.mark.slow
def test_steps_go_on_after_a_resume(tmp_path: Path) -> None:
    """Steps are global: after a resume from step 2 the first one recorded is 3."""
    ended_well(training(tmp_path, "Trainer(CONFIG, Model()).train(global_step=2)"))
    assert values(collected(tmp_path), "local_loss") == {(3, m): float(m) for m in (1, 2, 3, 4)}


def test_what_led_to_an_exception_is_in_the_log(tmp_path: Path) -> None:
    """No callback is called after an exception: what was done of the failing step is there, and the reason."""
    status, said = finish(training(tmp_path, "Trainer(CONFIG, Model(fail_at=7)).train()"))
    assert status == 1
    assert "RuntimeError: Error in training step 1." in said
    content = collected(tmp_path)
    assert [key for key in values(content, "local_loss") if key[0] == 2] == [(2, 1), (2, 2)]
    comments = [c for c in content if isinstance(c, Comment) and c.kind == "exception"]
    assert [c.text for c in comments] == ["RuntimeError: Error in training step 1."]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("breakage", "complaint"),
    [
        ('CONFIG["rankd"]["no_such_key"] = 1', "rankd.no_such_key: unknown key"),
        ('CONFIG["rankd"]["output"] = "train/../\\0"', "rankd.output"),
        ("import rankd.agent.agent as a; a.Agent.micro_step = lambda *_, **__: 1 / 0", "division by zero"),
        ("import mindformers.pynative.trainer.utils as u; del u.get_grad", "get_grad"),
    ],
)
def test_what_goes_wrong_in_rankd_does_not_stop_the_training(tmp_path: Path, breakage: str, complaint: str) -> None:
    """A wrong configuration, an error of rankd's own, another MindFormers: said once, and the training goes on."""
    body = f"""
    {breakage}
    Trainer(CONFIG, Model()).train()
    assert events[-1] == ("close",)
    """
    _, complained = ended_well(training(tmp_path, body))
    assert complaint in complained
    assert complained.count("training goes on") == 1


@pytest.mark.slow
def test_an_argument_that_does_not_exist_is_said_before_the_training(tmp_path: Path) -> None:
    """A misspelt key of the callback's own entry ends the Trainer's construction, as any callback's would."""
    status, said = finish(training(tmp_path, 'CONFIG["callbacks"][0]["keep_stok"] = True; Trainer(CONFIG, Model())'))
    assert status == 1
    assert "keep_stok" in said
    status, said = finish(training(tmp_path, 'CONFIG["callbacks"][0]["keep_stock"] = "no"; Trainer(CONFIG, Model())'))
    assert status == 1
    assert "keep_stock is true or false, got 'no'" in said
    with pytest.raises(TypeError, match=r"on_anomaly is a function, got 'stop'; see rankd\.on_anomaly"):
        RankdCallback(on_anomaly="stop")  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_anomaly_stops_the_trainer(tmp_path: Path) -> None:
    """`rankd.on_anomaly: stop`: the callback's function is called, and AnomalyError comes out of `Trainer.train`."""
    body = """
    from rankd.agent.adapters.mindformers import RankdCallback
    CONFIG["rankd"] |= {"alerts": [{"metric": "local_loss", "above": 5.5}], "on_anomaly": "stop"}
    del CONFIG["callbacks"]
    tell = lambda anomaly: print("told", anomaly.step, anomaly.micro_step)
    Trainer(CONFIG, Model(), callbacks=[RankdCallback(on_anomaly=tell)]).train()
    """
    process = training(tmp_path, body)
    said, complained = process.communicate(timeout=120)
    text = "local_loss is 6, above 5.5, at step 2 micro_step 2"
    assert (process.returncode, complained.splitlines()[-1]) == (1, f"rankd.agent.anomaly.AnomalyError: {text}")
    assert said.count("told 2 2") == said.count("told") == 1
    told = comments(collected(tmp_path))
    assert (told["anomaly"], told["exception"]) == ([text], [f"AnomalyError: {text}"])
    assert told["first_failure"] == [f"rank 0: AnomalyError: {text}"]


@pytest.mark.slow
def test_with_a_pipeline_the_steps_are_recorded(tmp_path: Path) -> None:
    """The Trainer tells of no micro-steps with pipeline parallelism: the step's own values are recorded."""
    body = """
    CONFIG["parallelism"] = {"pipeline_parallel": 2}
    CONFIG["monitor"]["train_state"] = {"local_loss": True, "device_loss": True}
    Trainer(CONFIG, Model()).train()
    """
    ended_well(training(tmp_path, body))
    content = collected(tmp_path)
    assert values(content, "local_loss") == {}
    assert len(values(content, "device_loss")) == 3


@pytest.mark.slow
def test_rankd_profiles_in_the_trainers_place(tmp_path: Path) -> None:
    """There is one profiler a process: the Trainer's own is off where rankd has read the same section."""
    body = """
    CONFIG["profiler"] = {"enable_profiling": True, "start_step": 9, "end_step": 9}
    Trainer(CONFIG, Model()).train()
    assert ("stock profiler", "False") in events
    """
    ended_well(training(tmp_path, body))


@pytest.mark.slow
def test_a_script_of_ones_own_can_register_the_callback(tmp_path: Path) -> None:
    """`register()` makes the name known without REGISTER_PATH; an instance can be passed to the Trainer as well."""
    body = """
    from rankd.agent.adapters.mindformers import RankdCallback, register
    register()
    del CONFIG["callbacks"][0]["auto_register"]
    Trainer(CONFIG, Model())
    del CONFIG["callbacks"]
    Trainer(CONFIG, Model(), callbacks=[RankdCallback()]).train()
    """
    ended_well(training(tmp_path, body, REGISTER_PATH=""))
    assert len(values(collected(tmp_path), "local_loss")) == 12


@pytest.mark.mindspore
def test_tensors_of_mindspore_come_through(tmp_path: Path) -> None:
    """With real tensors and gradients (the CPU build): losses and norms equal those computed beside the Trainer."""
    body = """
    import json
    import mindspore as ms
    from mindspore import Tensor, nn, ops

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.fc = nn.Dense(4, 3)
            self.batches, self.seen = np.random.default_rng(2).normal(size=(12, 5, 4)).astype(np.float32), []
            self.grad_fn = ms.value_and_grad(self.scaled, None, self.trainable_params())
            for parameter in self.trainable_params():
                parameter.grad = None

        def scaled(self, x, scale):
            return ops.square(self.fc(x)).mean() * scale

        def forward_backward(self, scale):
            loss, grads = self.grad_fn(Tensor(self.batches[len(self.seen)]), scale)
            for parameter, grad in zip(self.trainable_params(), grads):
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
            norms = [float(np.linalg.norm(p.grad.asnumpy().astype("d"))) for p in self.trainable_params()]
            self.seen.append((float(loss.asnumpy()) / scale, norms))
            return loss

    net = Net()
    Trainer(CONFIG, net).train()
    print(json.dumps(net.seen))
    """
    environ = {"MS_DEV_LAUNCH_BLOCKING": "1", "OMP_NUM_THREADS": "1", "GLOG_v": "3"}
    said, _ = ended_well(training(tmp_path, body, strict=False, **environ))
    seen = json.loads(said.splitlines()[-1])
    content = collected(tmp_path)
    places = [(step, micro_step) for step in (1, 2, 3) for micro_step in (1, 2, 3, 4)]
    assert values(content, "local_loss") == {
        place: pytest.approx(loss, rel=1e-6) for place, (loss, _) in zip(places, seen, strict=True)
    }
    accumulated = [norms[0] for _, norms in seen]
    before = [0.0 if micro == 1 else accumulated[i - 1] for i, (_, micro) in enumerate(places)]
    increments = {p: pytest.approx(a - b, abs=2e-6) for p, a, b in zip(places, accumulated, before, strict=True)}
    assert norms(content, "local_norm", "fc.weight") == increments
    assert norms(content, "device_norm", "fc.weight") == {
        (step, None): pytest.approx(accumulated[4 * step - 1], abs=2e-6) for step in (1, 2, 3)
    }


@pytest.mark.parametrize(
    ("rank", "world_size", "degrees", "place"),
    [
        (5, 8, (1, 1, 2, 1), {"pp": 0, "dp": 2, "cp": 0, "tp": 1, "ep": 0}),
        (5, 8, (2, 1, 2, 2), {"pp": 1, "dp": 0, "cp": 0, "tp": 1, "ep": 1}),
        (11, 16, (1, 2, 2, 4), {"pp": 0, "dp": 2, "cp": 1, "tp": 1, "ep": 3}),
        (0, 8, (3, 1, 1, 1), {}),
    ],
)
def test_a_ranks_place_in_the_layout(
    rank: int, world_size: int, degrees: tuple[int, int, int, int], place: dict[str, int]
) -> None:
    """Coordinates follow the Trainer's meshes; degrees that do not fit the world give none."""
    names = ("pipeline_parallel", "context_parallel", "tensor_parallel", "expert_parallel")
    assert coordinates(rank, world_size, SimpleNamespace(**dict(zip(names, degrees, strict=True)))) == place
    assert coordinates(rank, world_size, None) == {}
