"""The callback for `Model.train`, with real MindSpore (the CPU build); each training in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tests.support import collected, comments, finish, values

from rankd.collector.protocol.records import Comment, Record

pytestmark = pytest.mark.mindspore

# Two batches an epoch; what the callback should see is kept beside it, computed independently of it.
TRAINING = """
import json
import numpy as np
import mindspore as ms
from mindspore import Tensor, dataset, nn, ops
from mindspore.train import Callback, Model
from rankd.agent.adapters.mindspore_train import rankd_callback

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.fc = nn.Dense(4, 1)

    def construct(self, x):
        return self.fc(x)

class Losses(Callback):
    def __init__(self):
        self.seen = {}
    def on_train_step_end(self, run_context):
        p = run_context.original_args()
        self.seen[p.cur_step_num] = float(p.net_outputs.asnumpy())

class Fails(Callback):
    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == 3:
            raise ValueError("a callback of somebody else's")

rng = np.random.default_rng(5)
X, Y = rng.normal(size=(8, 4)).astype(np.float32), rng.normal(size=(8, 1)).astype(np.float32)
def data():
    return dataset.NumpySlicesDataset({"x": X, "y": Y}, shuffle=False).batch(4)

ms.set_seed(3)
net = Net()
def model(rate=0.1, **options):
    return Model(net, loss_fn=nn.MSELoss(), optimizer=nn.SGD(net.trainable_params(), rate), **options)
"""

YAML = """
monitor:
  train_state: {local_loss: True, device_loss: True, local_norm: weight, device_norm: bias}
rankd: {output: out}
"""


def training(tmp_path: Path, body: str, yaml: str = YAML) -> subprocess.Popen[str]:
    """Start a training script in tmp_path."""
    (tmp_path / "train.yaml").write_text(yaml)
    # In a file: graph mode reads the source of what it compiles.
    (tmp_path / "train.py").write_text(TRAINING + textwrap.dedent(body))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "MS_"))}
    return subprocess.Popen(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**clean, "MS_DEV_LAUNCH_BLOCKING": "1", "OMP_NUM_THREADS": "1", "GLOG_v": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def trained(tmp_path: Path, body: str, yaml: str = YAML) -> tuple[Any, list[Record | Comment], str]:
    """What the script printed last, as JSON; the merged log; what it complained of. It must end well."""
    said, complained = (process := training(tmp_path, body, yaml)).communicate(timeout=120)
    assert process.returncode == 0, complained
    return json.loads(said.splitlines()[-1]), collected(tmp_path), complained


def norms(content: list[Record | Comment], metric: str) -> dict[int, float]:
    """The values of a norm by step."""
    found = [r for r in content if isinstance(r, Record) and r.metric == metric]
    return {r.position.step: r.value for r in found if isinstance(r.value, float)}


def test_a_training_by_model_is_recorded(tmp_path: Path) -> None:
    """Each step's loss, learning rate and norms, equal to those computed beside it; the length is known."""
    body = """
    reference = Net()
    for ours, theirs in zip(reference.trainable_params(), net.trainable_params()):
        ours.set_data(ms.Tensor(theirs.asnumpy()))
    gradients = ms.value_and_grad(lambda x, y: nn.MSELoss()(reference(x), y), None, reference.trainable_params())
    norms = []
    update = nn.SGD(reference.trainable_params(), 0.1)
    for _ in range(3):
        for at in (0, 4):
            _, grads = gradients(Tensor(X[at:at + 4]), Tensor(Y[at:at + 4]))
            norms.append([float(np.linalg.norm(g.asnumpy().astype(np.float64))) for g in grads])
            update(grads)
    losses = Losses()
    model().train(3, data(), callbacks=[rankd_callback("train.yaml"), losses])
    print(json.dumps([losses.seen, norms]))
    """
    (losses, expected), content, _ = trained(tmp_path, body)
    assert values(content, "local_loss") == {(int(step), 1): loss for step, loss in losses.items()}
    assert values(content, "device_loss") == {(int(step), None): loss for step, loss in losses.items()}
    assert values(content, "lr") == {(step, None): pytest.approx(0.1) for step in range(1, 7)}
    assert norms(content, "local_norm") == {s: pytest.approx(w, abs=2e-6) for s, (w, _) in enumerate(expected, 1)}
    assert norms(content, "device_norm") == {s: pytest.approx(b, abs=2e-6) for s, (_, b) in enumerate(expected, 1)}
    assert "step:[    6/    6]" in (tmp_path / "out" / "merged.log").read_text()
    assert [c.kind for c in content if isinstance(c, Comment) and c.rank is None][-1] == "end"


@pytest.mark.parametrize(("resume", "first"), [("initial_epoch=2", 5), ("initial_epoch=0", 1)])
def test_steps_are_global_after_a_resume(tmp_path: Path, resume: str, first: int) -> None:
    """With `initial_epoch` the steps of the earlier epochs count, and so does the length."""
    body = f"""
    model().train(4, data(), callbacks=[rankd_callback("train.yaml")], {resume})
    print("null")
    """
    _, content, _ = trained(tmp_path, body)
    assert sorted(step for step, _ in values(content, "local_loss")) == list(range(first, 9))
    assert "step:[    8/    8]" in (tmp_path / "out" / "merged.log").read_text()


def test_a_resume_that_model_does_not_know_of_can_be_told(tmp_path: Path) -> None:
    """`resumed_at=10`: the first step recorded is 11, whatever `Model` counts."""
    body = """
    model().train(1, data(), callbacks=[rankd_callback("train.yaml", resumed_at=10)])
    print("null")
    """
    _, content, _ = trained(tmp_path, body)
    assert sorted(step for step, _ in values(content, "local_loss")) == [11, 12]


def test_the_learning_rate_is_the_one_of_the_update(tmp_path: Path) -> None:
    """Constant, list, schedule, groups (the first), experimental optimizers: what the step's update has used."""
    body = """
    from mindspore.experimental import optim
    from rankd.agent.adapters.mindspore_train import learning_rate

    class Rates(Callback):
        def on_train_begin(self, _):
            self.seen = []
        def on_train_step_end(self, run_context):
            rate = learning_rate(run_context.original_args().optimizer)
            self.seen.append(float(rate.asnumpy().reshape(-1)[0]))

    def rates(optimizer):
        seen = Rates()
        Model(net, loss_fn=nn.MSELoss(), optimizer=optimizer).train(1, data(), callbacks=[seen])
        return seen.seen

    weight, bias = net.trainable_params()
    halving = nn.ExponentialDecayLR(0.5, 0.5, 1)
    found = [rates(nn.SGD([weight, bias], rate)) for rate in (0.25, [0.125, 0.75], halving)]
    found += [rates(nn.SGD([{"params": [weight], "lr": rate}, {"params": [bias]}], 0.1)) for rate in (0.25, halving)]
    experimental = learning_rate(optim.SGD([weight, bias], lr=0.125))
    print(json.dumps([found, float(experimental), learning_rate(None), learning_rate(object())]))
    """
    said, complained = (process := training(tmp_path, body)).communicate(timeout=120)
    assert process.returncode == 0, complained
    halving, constant = [0.5, 0.25], [0.25, 0.25]
    assert json.loads(said.splitlines()[-1]) == [
        [constant, [0.125, 0.75], halving, constant, halving],
        0.125,
        None,
        None,
    ]


def test_evaluation_inside_fit_disturbs_nothing(tmp_path: Path) -> None:
    """`Model.fit` enters and leaves the callbacks for each evaluation; the training is recorded to its end."""
    body = """
    fitted = model(metrics={"loss"})
    fitted.fit(3, data(), data(), callbacks=[rankd_callback("train.yaml")])
    print("null")
    """
    _, content, _ = trained(tmp_path, body)
    assert sorted(step for step, _ in values(content, "local_loss")) == [1, 2, 3, 4, 5, 6]


def test_an_exception_ends_in_the_log_where_it_happened(tmp_path: Path) -> None:
    """What ended the training is noted at its step; the exception itself is passed on as it was."""
    status, said = finish(
        training(tmp_path, 'model().train(3, data(), callbacks=[rankd_callback("train.yaml"), Fails()])')
    )
    assert status == 1
    assert "a callback of somebody else's" in said
    notes = [c for c in collected(tmp_path) if isinstance(c, Comment) and c.kind == "exception"]
    assert [n.text for n in notes] == ["ValueError: a callback of somebody else's"]


@pytest.mark.parametrize(
    ("breakage", "complaint"),
    [
        ("import rankd.agent.adapters.mindspore_train as a; a.loss_of = lambda _: 1 / 0", "division by zero"),
        ("import rankd.agent.agent as a; a.Agent.__init__ = lambda *_, **__: 1 / 0", "division by zero"),
    ],
)
def test_what_goes_wrong_in_rankd_does_not_stop_the_training(tmp_path: Path, breakage: str, complaint: str) -> None:
    """An error of rankd's own is said once, and the training comes to its end."""
    body = f"""
    {breakage}
    losses = Losses()
    model().train(2, data(), callbacks=[rankd_callback("train.yaml"), losses])
    print(len(losses.seen))
    """
    said, complained = (process := training(tmp_path, body)).communicate(timeout=120)
    assert process.returncode == 0, complained
    assert said.split()[-1] == "4"
    assert complaint in complained
    assert complained.count("training goes on") == 1, complained


def test_an_anomaly_stops_the_training_after_its_step(tmp_path: Path) -> None:
    """`rankd.on_anomaly: stop`: AnomalyError out of `Model.train`; the function is called, the step is whole."""
    yaml = YAML.replace("output: out", "output: out, on_anomaly: stop, alerts: [{metric: local_loss, above: 1.0e-9}]")
    body = """
    tell = lambda anomaly: print("told", anomaly.step, anomaly.metric)
    model().train(3, data(), callbacks=[rankd_callback("train.yaml", on_anomaly=tell)])
    """
    process = training(tmp_path, body, yaml)
    said, complained = process.communicate(timeout=120)
    assert process.returncode == 1
    assert complained.splitlines()[-1].startswith("rankd.agent.anomaly.AnomalyError: local_loss is ")
    assert said.split("\n") == ["told 1 local_loss", ""]
    content = collected(tmp_path)
    assert [list(values(content, metric)) for metric in ("local_loss", "lr")] == [[(1, 1)], [(1, None)]]
    (text,) = comments(content)["exception"]
    assert comments(content)["first_failure"] == [f"rank 0: {text}"]


def test_a_wrong_configuration_is_said_where_the_callback_is_made(tmp_path: Path) -> None:
    """That is before the training, in the user's own script: it is raised there."""
    status, said = finish(training(tmp_path, 'rankd_callback("train.yaml")', "rankd: {outputt: x}"))
    assert status == 1
    assert "train.yaml: rankd.outputt: unknown key; did you mean `output`?" in said


def test_graph_mode_has_losses_and_says_that_it_has_no_norms(tmp_path: Path) -> None:
    """Hooks would be compiled into the graph; so the norms that were asked for are left out, with a warning."""
    body = """
    ms.set_context(mode=ms.GRAPH_MODE)
    losses = Losses()
    model().train(2, data(), callbacks=[rankd_callback("train.yaml"), losses])
    print(json.dumps(losses.seen))
    """
    losses, content, complained = trained(tmp_path, body)
    assert values(content, "local_loss") == {(int(step), 1): loss for step, loss in losses.items()}
    assert norms(content, "local_norm") == {}
    assert "not to be had in graph mode" in complained


def test_a_dataset_sink_is_one_step_with_its_length(tmp_path: Path) -> None:
    """Model calls back once a sink in graph mode on a device: its last step is recorded, and how many it stands for.

    The CPU build has no sink; the events are those of Model._train_dataset_sink_process, with its own classes.
    """
    body = """
    from mindspore.train.callback import RunContext, _InternalCallbackParam
    callback = rankd_callback("train.yaml")
    p = _InternalCallbackParam()
    p.cur_step_num, p.epoch_num, p.batch_num, p.network, p.train_network = 0, 2, 5, net, net
    p.optimizer, p.dataset_sink_mode = None, True
    context = RunContext(p)
    with callback:
        callback.on_train_begin(context)
        for epoch in (1, 2):
            p.cur_epoch_num = epoch
            callback.on_train_epoch_begin(context)
            p.cur_step_num += 5
            callback.on_train_step_begin(context)
            p.net_outputs = (Tensor(float(epoch)), Tensor(False))
            callback.on_train_step_end(context)
            callback.on_train_epoch_end(context)
        callback.on_train_end(context)
    print("null")
    """
    _, content, _ = trained(tmp_path, body, "monitor: {train_state: {local_loss: True}}\nrankd: {output: out}\n")
    assert values(content, "local_loss") == {(5, 1): 1.0, (10, 1): 2.0}
    assert values(content, "sink_steps") == {(5, None): 5.0, (10, None): 5.0}
