"""agent/config.py: `monitor:` and the other sections of the training YAML (SPEC.md section 4)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rankd.agent.config import (
    AgentConfig,
    Filter,
    MoeMonitorConfig,
    MonitorConfig,
    OlderMonitorConfig,
    TrainStateConfig,
)
from rankd.collector.config import RankdConfig
from rankd.collector.protocol.errors import ConfigError
from rankd.profiler_ctl.config import ProfilerConfig

_NAME = "decoder.layers.0.self_attention.q_layernorm.weight"

Load = Callable[[str], AgentConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Reads a YAML text through a file."""

    def from_text(text: str) -> AgentConfig:
        (tmp_path / "train.yaml").write_text(text)
        return AgentConfig.from_yaml(tmp_path / "train.yaml")

    return from_text


def lines_of(mapping: dict[str, object]) -> list[str]:
    """The lines of the error that this configuration gives."""
    with pytest.raises(ConfigError) as caught:
        AgentConfig.from_mapping(mapping)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("value", "on", "matches"),
    [
        pytest.param(True, True, True, id="True 监控全部可训练参数"),
        pytest.param("layers.0", True, True, id="layers.0 匹配名字含该子串的参数"),
        pytest.param("layers.1", True, False, id="another layer"),
        pytest.param(["attention", "layernorm"], True, True, id="字符串列表按参数名子串过滤"),
        pytest.param(["embedding", "router"], True, False, id="none of the list"),
        pytest.param(["", "embedding"], True, False, id="an empty string in a list is ignored"),
        pytest.param("", False, False, id="空字符串关闭"),
        pytest.param(False, False, False, id="False 关闭"),
        pytest.param([], False, False, id="an empty list is off"),
        pytest.param([""], False, False, id="a list of empty strings is off"),
    ],
)
def test_filters(value: object, on: bool, matches: bool) -> None:
    """`local_norm` and `device_norm` choose by substring; what can match nothing is off."""
    state = AgentConfig.from_mapping({"monitor": {"train_state": {"local_norm": value}}}).monitor.train_state
    assert bool(state.local_norm) is on
    assert bool(state) is on
    assert state.local_norm.matches(_NAME) is matches
    assert not state.device_norm


@pytest.mark.parametrize("key", ["local_norm", "device_norm"])
@pytest.mark.parametrize("value", [1, None, 0.5, {"a": 1}])
def test_filters_of_other_types(key: str, value: object) -> None:
    """A filter is bool, text or a list of text."""
    line = lines_of({"monitor": {"train_state": {key: value}}})[0]
    assert line.startswith(f"monitor.train_state.{key}: found {value!r} ({type(value).__name__}), allowed: true, false")


def test_a_list_of_other_types() -> None:
    """Each wrong element of a filter is named by its index; `on` in a list is a boolean to YAML."""
    found = lines_of({"monitor": {"train_state": {"local_norm": ["a", 3, True]}}})
    assert [line.split(":")[0] for line in found] == [f"monitor.train_state.local_norm[{i}]" for i in (1, 2)]
    assert "put text in quotes" in found[1]


@given(st.booleans() | st.text() | st.lists(st.text()))
def test_filters_read_back_equal(value: object) -> None:
    """A filter written out and read again is the same filter."""
    assert Filter.of(Filter.of(value).to_value()) == Filter.of(value)


@pytest.mark.parametrize("key", ["local_loss", "device_loss"])
def test_losses(key: str) -> None:
    """「四个开关相互独立，可任意组合」: a loss alone turns the monitor on, and is a bool."""
    state = AgentConfig.from_mapping({"monitor": {"train_state": {key: True}}}).monitor.train_state
    assert state
    assert not state.local_norm
    assert getattr(state, key) is True
    assert lines_of({"monitor": {"train_state": {key: "True"}}}) == [
        f"monitor.train_state.{key}: found 'True' (str), allowed: true or false; leave out the quotes"
    ]


def test_nothing_is_on_by_default() -> None:
    """「只有『激活』的子监控才会被创建」: without keys nothing is active."""
    assert not TrainStateConfig()
    assert not MoeMonitorConfig()
    assert AgentConfig.from_mapping({}) == AgentConfig(MonitorConfig(), ProfilerConfig(), RankdConfig(), ())


def test_a_misspelt_key() -> None:
    """The misspelt key, its path, and the key that was meant."""
    assert lines_of({"monitor": {"train_state": {"local_nrom": True}}}) == [
        (
            "monitor.train_state.local_nrom: unknown key; did you mean `local_norm`? "
            "allowed: local_norm, local_loss, device_norm, device_loss"
        )
    ]


@pytest.mark.parametrize(
    ("section", "layers"),
    [
        pytest.param({"target_layers": 3}, 3, id="int 展开为 range(3)"),
        pytest.param({"target_layers": [0, 2, 4]}, (0, 2, 4), id="list[int] 精确匹配这些层 id"),
        pytest.param({}, None, id="None 自动发现"),
    ],
)
def test_moe_monitor(section: dict[str, object], layers: object) -> None:
    """「moe_monitor 在 save_tokens_per_expert_interval 为正整数时激活」."""
    written = {"monitor": {"moe_monitor": {"save_tokens_per_expert_interval": 10, **section}}}
    moe = AgentConfig.from_mapping(written).monitor.moe_monitor
    assert moe
    assert (moe.save_tokens_per_expert_interval, moe.target_layers) == (10, layers)
    assert MoeMonitorConfig.from_mapping(moe.to_mapping()) == moe


@pytest.mark.parametrize(
    ("section", "wrong_type", "where"),
    [
        pytest.param(
            {"save_tokens_per_expert_interval": True}, True, "save_tokens_per_expert_interval", id="写 bool 会报错"
        ),
        ({"save_tokens_per_expert_interval": 1.5}, True, "save_tokens_per_expert_interval"),
        pytest.param({"save_tokens_per_expert_interval": 0}, False, "save_tokens_per_expert_interval", id="须为正整数"),
        ({"save_tokens_per_expert_interval": -1}, False, "save_tokens_per_expert_interval"),
        ({"target_layers": True}, True, "target_layers"),
        ({"target_layers": "3"}, True, "target_layers"),
        ({"target_layers": 0}, False, "target_layers"),
        ({"target_layers": [0, True]}, True, "target_layers[1]"),
        ({"target_layers": [-1]}, False, "target_layers[0]"),
    ],
)
def test_moe_monitor_refuses(section: dict[str, object], wrong_type: bool, where: str) -> None:
    """「写 True/False 会在配置校验阶段报 TypeError」; zero or less is a ValueError only."""
    with pytest.raises(ConfigError) as caught:
        AgentConfig.from_mapping({"monitor": {"moe_monitor": section}})
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TypeError) is wrong_type
    assert str(caught.value).startswith(f"monitor.moe_monitor.{where}: found ")


def test_the_whole_yaml(load: Load) -> None:
    """One training YAML, with sections that are none of our business, gives all three sections and no notice."""
    config = load(
        """
        model: {hidden_size: 8, layers: [1, 2]}
        optimizer: {type: AdamW}
        checkpoint: {save_interval: 10}
        monitor:
          train_state:
            local_norm: ["attention", "layernorm"]
            local_loss: True
          moe_monitor:
        profiler: {enable_profiling: True, start_step: 5, end_step: 7, profiler_rank: [0]}
        rankd: {output: /logs/run1, endpoint: "tcp://[::1]:5555"}
        """
    )
    assert config == AgentConfig(
        MonitorConfig(TrainStateConfig(local_norm=Filter(substrings=("attention", "layernorm")), local_loss=True)),
        ProfilerConfig(enable_profiling=True, start_step=5, end_step=7, profiler_rank=(0,)),
        RankdConfig(output=Path("/logs/run1"), endpoint="tcp://[::1]:5555"),
    )


def test_all_sections_errors_are_one(load: Load, tmp_path: Path) -> None:
    """What is wrong in any section stands in one error, each line with the file and the dotted path."""
    with pytest.raises(ConfigError) as caught:
        load(
            """
            monitor: {train_state: {local_loss: 1}}
            profiler: {start_step: 5}
            rankd: {linger: -1}
            monitor_config: {interval: 0}
            callbacks: [{type: MaxLogitsMonitor, step_interval: 0}]
            """
        )
    file = tmp_path / "train.yaml"
    assert [line.split(": found ")[0] for line in str(caught.value).splitlines()] == [
        f"{file}: monitor.train_state.local_loss",
        f"{file}: profiler.start_step",
        f"{file}: rankd.linger",
        f"{file}: monitor_config.interval",
        f"{file}: callbacks[0].step_interval",
    ]


def test_a_key_twice(load: Load) -> None:
    """A key that stands twice is an error, where PyYAML would keep the last one."""
    with pytest.raises(ConfigError, match=r"line 3: the key 'local_loss' stands twice, first in line 2"):
        load("monitor: {train_state: {\n local_loss: True,\n local_loss: False}}\n")


@pytest.mark.parametrize(
    ("mapping", "notices"),
    [
        pytest.param(
            {"monitor": {"moe_monitor": {"save_tokens_per_expert_interval": 10, "target_layers": [0]}}},
            [],
            id="moe_monitor",
        ),
        pytest.param(
            {"monitor": {"moe_monitor": {"save_tokens_per_expert_interval": None, "target_layers": 2}}},
            ["monitor.moe_monitor.target_layers: it has no effect while save_tokens_per_expert_interval is not set"],
            id="target_layers alone",
        ),
        pytest.param(
            {"monitor": {"tensorboard": {"output_dir": "x"}, "health_checkpoint": None}},
            ["monitor.tensorboard: not used by rankd", "monitor.health_checkpoint: not used by rankd"],
            id="the framework's",
        ),
        pytest.param(
            {"callbacks": [{"type": "CheckpointCallback", "x": 1}, {"type": "MaxLogitsMonitor", "step_interval": 50}]},
            ["callbacks[0] (CheckpointCallback): not used by rankd"],
            id="callbacks",
        ),
        pytest.param(
            {"callbacks": [{"type": "MaxLogitMonitor"}]},
            ["callbacks[0] (MaxLogitMonitor): not used by rankd; did you mean `MaxLogitsMonitor`?"],
            id="a misspelt callback",
        ),
        pytest.param({"callbacks": None}, [], id="no callbacks"),
        pytest.param(
            {"optimizer": {"type": "Muon", "qk_clip_enabled": True}},
            [],
            id="Muon with QK clip",
        ),
        pytest.param({"optimizer": {"type": "Muon"}}, [], id="Muon alone"),
        pytest.param(
            {"monitor_config": {"monitor_on": True, "interval": 20, "target": ["x"]}},
            ["monitor_config.target: not used by rankd"],
            id="monitor_config",
        ),
        pytest.param(
            {"monitor_config": {"local_loss": True}},
            ["monitor_config: monitor_on is not true, so the section asks for nothing"],
            id="第一步确认 monitor_on 是 True",
        ),
        pytest.param({"monitor_config": None}, [], id="an empty monitor_config"),
    ],
)
def test_notices(mapping: dict[str, object], notices: list[str]) -> None:
    """What is written and not acted on is named; what is none of our business is not."""
    assert list(AgentConfig.from_mapping(mapping).notices) == notices


@pytest.mark.parametrize(
    ("mapping", "warnings"),
    [
        *(
            pytest.param({name: {}}, [f"{name}: not used by rankd; did you mean `{meant}`?"], id=name)
            for name, meant in {
                "moniter": "monitor",
                "monitors": "monitor",
                "Monitor": "monitor",
                "profiller": "profiler",
                "profilers": "profiler",
                "callback": "callbacks",
                "rankdd": "rankd",
                "monitor-config": "monitor_config",
                # A level too far out.
                "train_state": "monitor.train_state",
            }.items()
        ),
        pytest.param({"rankdd": None}, ["rankdd: not used by rankd; did you mean `rankd`?"], id="empty"),
        pytest.param(
            dict.fromkeys(
                (
                    *("run_mode", "checkpoint", "training", "parallelism", "optimizer", "lr_scheduler", "model"),
                    *("train_dataset", "context", "recompute", "recompute_comm", "swap", "lora_config", "inference"),
                    *("runner_config", "trainer", "processor", "parallel", "moe_config", "metric", "eval_callbacks"),
                )
            ),
            [],
            id="the framework's own sections",
        ),
        pytest.param({"profile": True, "profiler_level": 1}, [], id="the framework's own switches"),
        pytest.param({1: {}}, [], id="no name"),
    ],
)
def test_sections_that_were_probably_misspelt(mapping: dict[str, object], warnings: list[str]) -> None:
    """They are warned of and are no error; what is none of our business is neither."""
    config = AgentConfig.from_mapping(mapping)
    assert list(config.warnings) == warnings
    assert not any("did you mean" in notice for notice in config.notices)


@pytest.mark.parametrize(
    ("callbacks", "line"),
    [
        (
            [{"type": "MaxLogitsMonitor", "step_interval": True}],
            (
                "callbacks[0].step_interval: found True (bool), allowed: a positive integer; "
                "YAML reads yes, on and true (no, off and false) as booleans: write a number"
            ),
        ),
        (
            [{"type": "X"}, {"type": "MaxLogitsMonitor", "interval": 5}],
            (
                "callbacks[1].interval: unknown key; did you mean `step_interval`? "
                "allowed: type, step_interval, enable_logging"
            ),
        ),
        (
            [{"tpye": "MaxLogitsMonitor"}],
            (
                "callbacks[0]: found {'tpye': 'MaxLogitsMonitor'}, allowed: a callback's `type:` and its arguments; "
                "the key `type` is missing"
            ),
        ),
        ([{"type": 3}], "callbacks[0].type: found 3 (int), allowed: text, the name of a callback"),
        (["X"], "callbacks[0]: found 'X' (str), allowed: a callback's `type:` and its arguments"),
        ({"type": "X"}, "callbacks: found {'type': 'X'} (dict), allowed: a list, each of it a callback's `type:` and"),
    ],
)
def test_wrong_callbacks(callbacks: object, line: str) -> None:
    """A wrong callback is named by its place in the list; `step_interval` 「须为正整数」."""
    assert lines_of({"callbacks": callbacks})[0].startswith(line)


def test_the_field_notes_template() -> None:
    """The field notes' template of `monitor_config` is read key by key."""
    section = {
        "monitor_on": True,
        "dump_path": "./monitor/rank_{rank}",
        "interval": 20,
        "step_interval": 1,
        "local_loss": True,
        "global_loss": True,
        "grad_norm": True,
        "nan_check": True,
        "exception_dump": True,
        "skip_nan_step": False,
        "print_interval": 20,
        "warmup_steps": 100,
    }
    assert OlderMonitorConfig.from_mapping(section).to_mapping() == {**section, "dump_path": "monitor/rank_{rank}"}


@pytest.mark.parametrize(("new", "old", "on"), [(True, True, True), (True, False, False), (False, True, False)])
def test_two_forms_may_stand_side_by_side(new: bool, old: bool, on: bool) -> None:
    """Both forms may stand in one file where they agree, or where the older one is off."""
    AgentConfig.from_mapping(
        {
            "monitor": {"train_state": {"local_loss": new}},
            "monitor_config": {"monitor_on": on, "local_loss": old},
        }
    )


def test_two_forms_that_contradict() -> None:
    """Where both forms set one thing to different values, the error names both."""
    found = lines_of(
        {
            "monitor": {"train_state": {"local_loss": False}},
            "monitor_config": {"monitor_on": True, "local_loss": True},
        }
    )
    assert found == [
        (
            "monitor.train_state.local_loss: found False, but monitor_config.local_loss is True; "
            "remove one of them, or set both alike"
        )
    ]


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates()
_KEYS = st.sampled_from(
    [
        *("monitor", "profiler", "rankd", "callbacks", "monitor_config", "optimizer", "train_state", "moe_monitor"),
        *("local_norm", "target_layers", "start_step", "spool", "endpoint", "type", "monitor_on", "moniter"),
    ]
)
_GARBAGE = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS | _SCALARS, inner, max_size=4)
)


@given(st.dictionaries(_KEYS, _GARBAGE))
def test_garbage_is_a_config_error(mapping: Any) -> None:
    """Whatever stands in the sections, the configuration is read or it is a ConfigError."""
    with contextlib.suppress(ConfigError):
        assert isinstance(AgentConfig.from_mapping(mapping), AgentConfig)


@given(st.dictionaries(_KEYS, _GARBAGE).map(lambda tree: yaml.safe_dump(tree).encode()) | st.binary(max_size=200))
def test_a_garbage_file_is_a_config_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Whatever the file holds, it is read or it is a ConfigError."""
    file = tmp_path_factory.getbasetemp() / "garbage.yaml"
    file.write_bytes(content)
    with contextlib.suppress(ConfigError):
        assert isinstance(AgentConfig.from_yaml(file), AgentConfig)
