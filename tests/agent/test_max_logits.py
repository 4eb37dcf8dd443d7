"""agent/max_logits.py: `callbacks: - type: MaxLogitsMonitor`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rankd.agent.config import AgentConfig
from rankd.agent.max_logits import MaxLogitsMonitor, track
from rankd.agent.monitor import StepEnd
from rankd.collector.protocol.errors import ConfigError

from .training import Log, Model, run, run_step, values

NAME = "decoder.layers.0.self_attention.core_attention.max_logits_val"
MUON = {"optimizer": {"type": "Muon", "qk_clip_enabled": True}}


def callback(step_interval: int = 1, **more: object) -> dict[str, object]:
    return {"callbacks": [{"type": "MaxLogitsMonitor", "step_interval": step_interval, **more}]}


def attention(model: Model, name: str = NAME) -> Any:
    """A forward pass that raises the layer's maxima to (step, micro / 10)."""
    model.logits[name] = np.zeros(2, np.float32)

    def forward(step: int, micro: int) -> None:
        np.maximum(model.logits[name], np.array([step, micro / 10], np.float32), out=model.logits[name])

    return forward


def rounded(log: Log) -> dict[int, list[float]]:
    return {
        step: [round(v, 5) for v in named[NAME]]  # type: ignore[index]
        for (step, _), named in values(log, "max_attention_logit").items()
    }


def test_each_step_has_its_own_maxima() -> None:
    """「在每个训练步收集模型各层的最大注意力 logit」, and 「每步结束时重置层内累计值」."""
    model = Model()
    log = run(callback(), model, (3, 2, 1), forward=attention(model))
    assert rounded(log) == {3: [3.0, 0.4], 2: [2.0, 0.4], 1: [1.0, 0.4]}
    assert all(micro is None for _, micro in values(log, "max_attention_logit"))


def test_step_interval() -> None:
    """`step_interval` > 1: 「当前步不是输出步时，仅重置累计值、不打印」: nothing is read in those steps."""
    model = Model()
    log = run(callback(2), model, (1, 2, 3, 4), forward=attention(model))
    assert rounded(log) == {2: [2.0, 0.4], 4: [4.0, 0.4]}
    assert model.asked == {"get_max_attention_logit": 2, "reset_max_attention_logit": 4}


def test_no_data() -> None:
    """「无数据则只重置」: said once, with what to do."""
    model = Model()
    log = run(callback(), model)
    assert values(log, "max_attention_logit") == {}
    assert model.asked["reset_max_attention_logit"] == 3


def test_no_data_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """「配置写了但指标不打印」: a model without maxima, or without the methods, says how to get them."""
    for model in (Model(), object()):
        caplog.clear()
        run(callback(), model)
        (record,) = caplog.records
        assert "track_max_attention_logit: True" in record.getMessage()


class NoTensor:
    """Can be reset like one, and that is all."""

    def __setitem__(self, key: object, value: object) -> None:
        pass


def test_reset_even_where_collecting_fails() -> None:
    """「无论是否打印，每步末都会调用 reset_max_attention_logit() 清零」: also after an error of ours."""
    model = Model()
    model.logits["broken"] = NoTensor()
    log = run(callback(), model, (1,))
    assert model.asked["reset_max_attention_logit"] == 1
    assert "expected a tensor" in log.errors[0][1]


def test_an_abandoned_step_leaves_no_maxima_behind() -> None:
    """An exception ends a step: its maxima do not appear in the next one."""
    model, log = Model(), Log()
    forward = attention(model)
    monitor = MaxLogitsMonitor(model, 1)
    run_step(monitor, log, 9, forward=forward, fails_after=2)
    run_step(monitor, log, 1, forward=forward)
    assert rounded(log) == {1: [1.0, 0.4]}


def test_the_end_of_a_step_counts_once() -> None:
    """A loop that ends a step twice does not get a second record, of zeros."""
    model, log = Model(), Log()
    monitor = MaxLogitsMonitor(model, 1)
    run_step(monitor, log, 1, forward=attention(model))
    before = dict(model.asked)
    log.take(1, None, monitor.end_step(StepEnd()))
    assert len(log.frames) == 1
    assert model.asked == before


def test_chunks_and_wrappers() -> None:
    """The layers of all chunks; a wrapper (`network`, `model`) is looked through."""
    first, second = Model(), Model()
    forwards = attention(first, "decoder.layers.0.x"), attention(second, "decoder.layers.1.x")
    chunks = [SimpleNamespace(network=SimpleNamespace(model=first)), second]

    def forward(step: int, micro: int) -> None:
        for each in forwards:
            each(step, micro)

    log = run(callback(), chunks, (1,), forward=forward)
    assert list(values(log, "max_attention_logit")[1, None]) == ["decoder.layers.0.x", "decoder.layers.1.x"]  # type: ignore[call-overload]
    assert first.asked == second.asked == {"get_max_attention_logit": 1, "reset_max_attention_logit": 1}


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, None])
def test_step_interval_must_be_positive(value: object) -> None:
    """`step_interval` 「必须为正整数，否则在构造时抛 ValueError」."""
    with pytest.raises(ValueError, match=r"callbacks\[0\]\.step_interval"):
        AgentConfig.from_mapping({"callbacks": [{"type": "MaxLogitsMonitor", "step_interval": value}]})


def test_two_callbacks_of_the_name() -> None:
    """The second would see nothing but zeros."""
    with pytest.raises(ConfigError, match=r"callbacks\[2\]: a second MaxLogitsMonitor, after callbacks\[0\]"):
        AgentConfig.from_mapping(
            {"callbacks": [{"type": "MaxLogitsMonitor"}, {"type": "X"}, {"type": "MaxLogitsMonitor"}]}
        )


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        pytest.param(MUON, True, id="优化器为 Muon 且 qk_clip_enabled 为真"),
        pytest.param(callback(), True, id="callbacks 中已配置 MaxLogitsMonitor"),
        pytest.param(callback(enable_logging=False), False, id="a callback that only resets"),
        pytest.param({"optimizer": {"type": "Muon", "qk_clip_enabled": False}}, False, id="Muon without clip"),
        pytest.param({"optimizer": {"type": "AdamW", "qk_clip_enabled": True}}, False, id="another optimizer"),
        pytest.param({}, False, id="neither"),
    ],
)
def test_track_max_attention_logit(config: dict[str, object], needed: bool) -> None:
    """「满足任一条件时，track_max_attention_logit 被置为 True」, in a section or an object."""
    read = AgentConfig.from_mapping(config)
    section: dict[str, object] = {"hidden_size": 8}
    built = SimpleNamespace(track_max_attention_logit=False)
    assert read.track_max_attention_logit is track(read, section) is track(read, built) is needed
    assert section.get("track_max_attention_logit", False) is built.track_max_attention_logit is needed


def test_a_model_with_a_switch_of_its_own_is_switched_on() -> None:
    """A model that asks its attribute `track_max_attention_logit` at each forward pass; one without it gets none."""
    inner = SimpleNamespace(track_max_attention_logit=False)
    MaxLogitsMonitor(SimpleNamespace(network=inner), 1)
    assert inner.track_max_attention_logit is True
    bare = SimpleNamespace()
    MaxLogitsMonitor(bare, 1)
    assert not hasattr(bare, "track_max_attention_logit")


@pytest.mark.parametrize("config", [MUON, {**MUON, **callback(enable_logging=False)}])
def test_muon_alone_resets_and_records_nothing(config: dict[str, object]) -> None:
    """「自动开启的是『追踪』，不是『打印』」: Muon + QK clip alone resets each step, and reads nothing."""
    model = Model()
    log = run(config, model, forward=attention(model))
    assert values(log, "max_attention_logit") == {}
    assert model.asked == {"reset_max_attention_logit": 3}


def test_off_costs_nothing() -> None:
    """Without the callback and without QK clip the model is not asked for anything."""
    model = Model()
    run({"callbacks": [{"type": "CheckpointCallback"}], "optimizer": {"type": "Muon"}}, model)
    assert model.asked == {}


def test_without_a_model() -> None:
    """The callback needs the model, and says so; QK clip alone leaves the reset to the framework."""
    with pytest.raises(ConfigError, match="pass model= to the agent"):
        run(callback())
    run(MUON)
