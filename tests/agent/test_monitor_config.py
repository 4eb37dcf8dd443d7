"""`monitor_config:`, the older form, key by key (SPEC.md section 4): what is measured, written and told."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import collected, finish, script
from tests.support import values as recorded

from rankd.agent.config import AgentConfig
from rankd.collector.protocol.errors import ConfigError

from .training import Log, Model, run, values

NAN, INF = float("nan"), float("inf")

# The field notes' template, with intervals that a short test reaches.
TEMPLATE = {
    "monitor_on": True,
    "dump_path": "/data/train_runs/exp_001/monitor",
    "interval": 4,
    "step_interval": 1,
    "local_loss": True,
    "global_loss": True,
    "grad_norm": True,
    "nan_check": True,
    "exception_dump": True,
    "skip_nan_step": False,
    "print_interval": 2,
}


def older(**keys: object) -> dict[str, object]:
    return {"monitor_config": {"monitor_on": True, **keys}}


class Gradient:
    """A sharded gradient whose local part is `values`; counts how often it was measured."""

    def __init__(self, *values: float) -> None:
        self.values = np.array(values, np.float32)
        self.measured = 0

    def to_local(self) -> Any:
        self.measured += 1
        return self.values


@pytest.fixture
def gradients() -> tuple[Gradient, Gradient]:
    return Gradient(3.0, 4.0), Gradient(12.0)


def losses(*wrong: tuple[int, int], value: float = NAN) -> Callable[[int, int], float]:
    """A loss for each micro-step, `value` at some."""
    return lambda step, micro: value if (step, micro) in wrong else step + micro / 10


def anomalies(log: Log) -> list[str]:
    return [text.removeprefix("anomaly ") for _, _, text in log.remarks if text.startswith("anomaly ")]


# -- the switch, the place ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [{"monitor_on": False}, {}])
def test_monitor_on_is_the_master_switch(on: dict[str, object], gradients: Sequence[Gradient]) -> None:
    """「monitor_on是总开关」: without it nothing of the section is measured, checked, printed or sampled."""
    model = Model()
    section = {**TEMPLATE, **on} if on else {key: value for key, value in TEMPLATE.items() if key != "monitor_on"}
    config = AgentConfig.from_mapping({"monitor_config": section})
    assert config.rankd.output == Path("rankd-output")
    log = run({"monitor_config": section}, model, loss=losses((1, 1)), grads=lambda *_: gradients)
    assert model.asked == {}
    assert [gradient.measured for gradient in gradients] == [0, 0]
    assert {(step, frame.metric) for step, _, frame in log.frames} == {(s, "step_time_ms") for s in (1, 2, 3)}
    assert log.remarks == []


@pytest.mark.parametrize(
    ("path", "output"),
    [
        ("./monitor_output", "monitor_output"),
        pytest.param("./monitor/rank_{rank}", "monitor", id="dump_path: ./monitor/rank_{rank}"),
        ("/data/run1/rank_{rank}", "/data/run1"),
        ("/data/{rank}", "/data"),
        ("/data/exp_{rank}/monitor", "/data"),
        ("rank_{rank}", "."),
    ],
)
def test_dump_path(path: str, output: str) -> None:
    """`dump_path` 「决定监控产物落盘位置」; the folders of the ranks are `rank_N` below what stands before `{rank}`."""
    config = AgentConfig.from_mapping(older(dump_path=path))
    assert config.rankd.output == Path(output)
    says = [notice for notice in config.notices if notice.startswith("monitor_config.dump_path: ")]
    assert bool(says) == ("{rank}" in path and Path(path).name != "rank_{rank}")


def test_dump_path_against_rankd_output() -> None:
    """Both may name the same place; where they differ, the error names both."""
    config = AgentConfig.from_mapping({**older(dump_path="./m/rank_{rank}"), "rankd": {"output": "m"}})
    assert config.rankd.output == Path("m")
    with pytest.raises(ConfigError) as caught:
        AgentConfig.from_mapping({**older(dump_path="./m"), "rankd": {"output": "n"}})
    assert str(caught.value) == (
        "rankd.output: found n, but monitor_config.dump_path is m; remove one of them, or set both alike"
    )


# -- how often ---------------------------------------------------------------------------------------------------------


def test_interval_writes_every_nth_step(gradients: Sequence[Gradient]) -> None:
    """`interval` 「每多少个训练步记录一次监控数据」: between them no norm is computed, nothing recorded."""
    config = {**older(interval=3), "monitor": {"train_state": {"local_norm": True, "local_loss": True}}}
    log = run(config, Model(), range(1, 8), loss=losses(), grads=lambda *_: gradients, end={"loss": 1.0})
    assert {step for step, _, _ in log.frames} == {3, 6}
    assert [gradient.measured for gradient in gradients] == [2 * 4, 2 * 4]
    assert len(values(log, "local_norm")) == 8


def test_step_interval_computes_every_nth_step(gradients: Sequence[Gradient]) -> None:
    """`step_interval`: 「比如每步算 loss 但每 10 步才落盘一次」: the checks see every second step only."""
    config = {**older(step_interval=2, nan_check=True, local_loss=True, grad_norm=True)}
    log = run(config, Model(), range(1, 6), loss=losses((3, 1), (4, 2)), grads=lambda *_: gradients)
    assert [gradient.measured for gradient in gradients] == [2 * 4, 2 * 4]
    assert anomalies(log) == ["local_loss is nan at step 4 micro_step 2"]
    assert {step for step, _, _ in log.frames} == {2, 4}


def test_computed_each_step_and_written_each_tenth() -> None:
    """`step_interval` 1, `interval` 10: an anomaly of step 13 is told at once, and step 13 is not written."""
    config = older(interval=10, step_interval=1, nan_check=True, local_loss=True)
    log = run(config, None, range(1, 21), loss=losses((13, 2)))
    assert {step for step, _, _ in log.frames} == {10, 20}
    assert log.remarks == [(13, 2, "anomaly local_loss is nan at step 13 micro_step 2")]


def test_print_interval(capsys: pytest.CaptureFixture[str]) -> None:
    """「控制台是否按 print_interval 的节奏打印 loss 和 grad_norm」: a line of this rank every N steps."""
    end = {"loss": 4.86497, "grad_norm": 1.166702, "lr": 1e-3}
    log = run(older(print_interval=2, interval=4), None, range(1, 5), end=end)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" step_time_ms ")[0] for line in lines] == [
        f"[rank_3] step {step}/100 loss 4.86497 lr 0.001 grad_norm 1.1667" for step in (2, 4)
    ]
    assert {step for step, _, _ in log.frames} == {4}


def test_without_print_interval_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The console belongs to the training unless it is asked for."""
    run(older(local_loss=True), None, loss=losses(), end={"loss": 1.0})
    assert capsys.readouterr().out == ""


def test_intervals_that_do_not_fit_are_said() -> None:
    """「interval与step_interval的区别…这是最容易配错的地方」: what comes of intervals that are no multiples."""
    notices = AgentConfig.from_mapping(older(step_interval=4, interval=10, print_interval=2)).notices
    (notice,) = notices
    assert notice == (
        "monitor_config.interval: only what is computed comes out, so with step_interval 4 and interval 10 "
        "that is every 20 steps"
    )


# -- what --------------------------------------------------------------------------------------------------------------


def test_local_loss() -> None:
    """`local_loss` 「保留单卡视角」: each micro-batch's loss of this rank; also where the newer form says it."""
    log = run(older(local_loss=True), None, (1,), loss=losses(), micro_steps=2)
    assert values(log, "local_loss") == {(1, 1): 1.1, (1, 2): 1.2}
    both = {**older(local_loss=True), "monitor": {"train_state": {"local_loss": True}}}
    assert values(run(both, None, (1,), loss=losses()), "local_loss")
    assert not values(run(older(), None, (1,), loss=losses()), "local_loss")


def test_global_loss() -> None:
    """`global_loss` 「会做跨卡聚合反映全局真实损失」: recorded each step."""
    log = run(older(global_loss=True), None, end={"loss": 0.5})
    assert values(log, "global_loss") == {(s, None): 0.5 for s in (1, 2, 3)}


def test_grad_norm_is_made_of_all_parameters(gradients: Sequence[Gradient]) -> None:
    """`grad_norm` 「梯度范数」: the norm of the whole gradient accumulated; no parameter is written for it."""
    log = run(older(grad_norm=True), Model(), grads=lambda *_: gradients)
    assert values(log, "grad_norm") == {(s, None): 13.0 for s in (1, 2, 3)}
    assert not values(log, "local_norm")
    assert not values(log, "device_norm")


def test_grad_norm_that_the_loop_gives_costs_nothing(gradients: Sequence[Gradient]) -> None:
    """「grad_norm的计算本身涉及全参数遍历，在大模型上开销不小」: given once, it is not computed in the next step."""
    log = run(older(grad_norm=True), Model(), grads=lambda *_: gradients, end={"grad_norm": 7.0})
    assert values(log, "grad_norm") == {(s, None): 7.0 for s in (1, 2, 3)}
    assert [gradient.measured for gradient in gradients] == [4, 4]


@pytest.mark.parametrize(
    ("state", "kind", "found"),
    [
        pytest.param({"local_norm": True}, "increment", True, id="all parameters, for local_norm"),
        pytest.param({"device_norm": True}, "increment", True, id="all parameters, for device_norm"),
        pytest.param({"local_norm": "a", "device_norm": "b"}, "increment", True, id="all parameters, together"),
        pytest.param({"local_norm": "a"}, "increment", False, id="not all parameters"),
        pytest.param({"local_norm": True}, "micro_batch", False, id="norms of micro-batches add up to nothing"),
    ],
)
def test_grad_norm_at_no_extra_cost(state: object, kind: str, found: bool, gradients: Sequence[Gradient]) -> None:
    """Where all parameters are measured anyway, the summary has a grad_norm, also without asking."""
    config = {"monitor": {"train_state": state}, "rankd": {"local_norm_kind": kind}}
    log = run(config, Model(), (1,), grads=lambda *_: gradients)
    assert values(log, "grad_norm") == ({(1, None): 13.0} if found else {})


def test_a_parameter_without_a_gradient_adds_nothing_to_grad_norm() -> None:
    """A missing gradient is zero in the norm of all."""
    log = run(older(grad_norm=True), Model(), (1,), grads=lambda *_: (Gradient(3.0, 4.0), None))
    assert values(log, "grad_norm") == {(1, None): 5.0}


def test_what_was_asked_for_and_does_not_come_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """「配置写了但指标不打印。这是最高频的问题」: after the first written step one line names the keys."""
    config = {**older(interval=2, global_loss=True, grad_norm=True, local_loss=True)}
    run(config, Model(), range(1, 7), loss=losses())
    (record,) = caplog.records
    assert record.getMessage() == (
        "asked for, and not given by the training loop in step 2 (see Agent.micro_step and end_step): "
        "monitor_config.global_loss, monitor_config.grad_norm"
    )


def test_nothing_is_missing_in_the_template(caplog: pytest.LogCaptureFixture, gradients: Sequence[Gradient]) -> None:
    """The field notes' template with a loop that gives what it has: every metric comes, and nothing is warned of."""
    config = {"monitor_config": TEMPLATE}
    log = run(config, Model(), range(1, 9), loss=losses(), grads=lambda *_: gradients, end={"loss": 2.5})
    metrics = {frame.metric for _, _, frame in log.frames}
    assert metrics == {"local_loss", "loss", "global_loss", "grad_norm", "step_time_ms"}
    assert {step for step, _, _ in log.frames} == {4, 8}
    assert (caplog.records, log.errors, log.remarks) == ([], [], [])


# -- health ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "word"), [(NAN, "nan"), (INF, "inf"), (-INF, "-inf")])
def test_nan_check(value: float, word: str) -> None:
    """`nan_check` 「在检测到 nan 或 inf 时触发动作」: a note with metric, value and position."""
    log = run(older(nan_check=True, local_loss=True), None, loss=losses((2, 3), value=value))
    assert log.remarks == [(2, 3, f"anomaly local_loss is {word} at step 2 micro_step 3")]


def test_nan_check_names_the_parameter(gradients: Sequence[Gradient]) -> None:
    """A norm that is not finite: the first parameter, and how many there are."""
    gradients[1].values[0] = NAN
    config = {**older(nan_check=True), "monitor": {"train_state": {"device_norm": True}}}
    log = run(config, Model(), (1,), grads=lambda *_: gradients)
    assert anomalies(log) == [
        "device_norm is nan at step 1: b (1 of 2 values not finite)",
        "grad_norm is nan at step 1",
    ]


def test_an_anomaly_is_told_once_until_it_recovers() -> None:
    """「同一个异常类型在短时间内只 dump 一次，避免重复写」: again after a finite value; each kind apart."""
    ill = losses((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (3, 4))
    log = run(older(nan_check=True, local_loss=True), None, loss=ill, end={"loss": NAN})
    assert anomalies(log) == [
        "local_loss is nan at step 1 micro_step 1",
        "loss is nan at step 1",
        "local_loss is nan at step 3 micro_step 4",
    ]


def test_warmup_steps() -> None:
    """`warmup_steps` 「前 N 步只记录不告警」: recorded, and told from step N + 1 on; N counts global steps."""
    log = run(older(nan_check=True, warmup_steps=2, local_loss=True), None, loss=lambda *_: NAN)
    assert len(values(log, "local_loss")) == 12
    assert anomalies(log) == ["local_loss is nan at step 3 micro_step 1"]


def test_without_nan_check_nothing_is_told() -> None:
    """nan and inf are values like any other unless they are asked about."""
    log = run(older(local_loss=True), None, loss=lambda *_: NAN)
    assert log.remarks == []
    assert all(math.isnan(value) for value in values(log, "local_loss").values())  # type: ignore[arg-type]


def test_exception_dump_writes_the_step_of_an_anomaly() -> None:
    """`exception_dump` 「会在异常时保存现场」: a step that was to be left out is written, what came before included."""
    config = older(interval=100, nan_check=True, exception_dump=True, local_loss=True)
    log = run(config, None, loss=losses((2, 3)), end={"loss": 1.0})
    assert [(step, micro, frame.metric) for step, micro, frame in log.frames][:4] == [
        (2, micro, "local_loss") for micro in (1, 2, 3, 4)
    ]
    assert {step for step, _, _ in log.frames} == {2}
    assert values(log, "loss") == {(2, None): 1.0}


def test_exception_dump_writes_the_step_that_the_training_raised_in() -> None:
    """The micro-steps before an exception, of a step that was to be left out, are written."""
    config = older(interval=100, exception_dump=True, local_loss=True)
    log = run(config, None, (7,), loss=losses(), fails_after=2)
    assert values(log, "local_loss") == {(7, 1): 7.1, (7, 2): 7.2}


def test_without_exception_dump_the_step_stays_out() -> None:
    """The note is there, and nothing else of the step."""
    log = run(older(interval=100, nan_check=True, local_loss=True), None, loss=losses((2, 3)))
    assert log.frames == []
    assert len(log.remarks) == 1
    assert not run(older(interval=100, local_loss=True), None, (7,), loss=losses(), fails_after=2).frames


@pytest.mark.parametrize(
    ("keys", "start"),
    [
        pytest.param({"skip_nan_step": True}, "skip_nan_step: rankd only observes", id="skip_nan_step"),
        pytest.param({"exception_dump": True}, "exception_dump: the step's records are kept", id="exception_dump"),
        pytest.param({"warmup_steps": 5}, "warmup_steps: it has no effect while nan_check", id="warmup_steps alone"),
        pytest.param({"warmup_steps": 5, "nan_check": True, "skip_nan_step": False}, None, id="nothing to say"),
    ],
)
def test_what_rankd_does_not_do_keeps_a_notice(keys: dict[str, object], start: str | None) -> None:
    """「旧配置写进去不会报错但会被静默忽略」 must not happen: each key that is not done, or in part, is named."""
    notices = AgentConfig.from_mapping(older(**keys)).notices
    assert [notice.split(".", 1)[1].startswith(start or "") for notice in notices] == ([] if start is None else [True])


# -- in a process ------------------------------------------------------------------------------------------------------


def test_an_anomaly_in_the_log(tmp_path: Path) -> None:
    """Every third step is written and step 2 by its anomaly: in order, with the note in its micro-step's block."""
    yaml = """
monitor_config:
  monitor_on: True
  dump_path: out/rank_{rank}
  interval: 3
  local_loss: True
  nan_check: True
  exception_dump: True
"""
    body = """
    with Agent.from_yaml("train.yaml", model=Model(), total_steps=4) as a:
        for step in range(1, 5):
            with a.step(step):
                for micro_step in (1, 2, 3):
                    a.micro_step(loss=float("nan") if (step, micro_step) == (2, 2) else 1.0)
                a.end_step(loss=1.0)
    """
    status, said = finish(script(tmp_path, body, yaml=yaml))
    assert status == 0, said
    content = collected(tmp_path)
    assert list(recorded(content, "local_loss")) == [(s, m) for s in (2, 3) for m in (1, 2, 3)]
    lines = (tmp_path / "out" / "rank_0" / "monitor.log").read_text().splitlines()
    assert [line for line in lines if line.startswith("# ") and "attempt" not in line] == [
        "# anomaly local_loss is nan at step 2 micro_step 2"
    ]
    assert lines[lines.index("# anomaly local_loss is nan at step 2 micro_step 2") - 1] == (
        '{ "micro_step": 2, "local_loss": nan }'
    )
