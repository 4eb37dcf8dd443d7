"""`rankd check`, pure: a configuration, a training and the machine go in, a report comes out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rankd.agent.check import Facts, Place, Report, examine, nearest_parts, training_of
from rankd.agent.check_text import render
from rankd.agent.config import AgentConfig
from rankd.agent.estimate import Shape, human_bytes

GOLDEN = Path(__file__).parent / "golden"
NAMES = (
    "embedding.word_embeddings.weight",
    *(
        f"decoder.layers.{layer}.{part}.weight"
        for layer in range(4)
        for part in ("input_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1")
    ),
    "decoder.final_layernorm.weight",
)
FACTS = Facts(
    {"python": "3.11.2", "rankd": "0.1.0", "mindspore": "2.10.0", "mindformers": None, "numpy": "1.26.4"},
    [Place("rankd.output", "runs/exp_001", None, 80_000_000_000)],
)

# What the two seed documents ask for, in one file.
FULL = """
monitor:
  train_state:
    local_norm: ["self_attention", "layernorm"]
    device_norm: True
    local_loss: True
    device_loss: True
  moe_monitor:
    save_tokens_per_expert_interval: 10
    target_layers: [0, 2]
callbacks:
  - type: MaxLogitsMonitor
    step_interval: 50
profiler:
  enable_profiling: True
  start_step: 5
  end_step: 6
  profiler_rank: [0, 9]
  profiler_level: 2
  profile_memory: True
rankd:
  output: runs/exp_001
  alerts:
    - {metric: grad_norm, times: 4}
"""

# An older YAML, for graph mode, that was carried over to the PyNative Trainer.
CARRIED_OVER = """
training: {steps: 100000, local_batch_size: 1, global_batch_size: 64}
parallelism: {tensor_parallel: 2, pipeline_parallel: 2, sequence_parallel: True}
runner_config: {epochs: 3, batch_size: 8, sink_mode: True}
load_checkpoint: ckpt
profile: True
moniter: {train_state: {local_loss: True}}
callbacks:
  - {type: CheckpointMonitor, keep_checkpoint_max: 5}
monitor_config:
  monitor_on: True
  dump_path: /tmp/monitor
  interval: 20
  step_interval: 1
  local_loss: True
  grad_norm: True
  skip_nan_step: True
"""


# The logs of a long training, in parts.
ROTATED = """
monitor: {train_state: {local_norm: True, local_loss: True}}
rankd:
  output: runs/exp_001
  logs: {rotate_size: 64MiB, rotate_every: 1d, keep_parts: 3, keep_size: 4GiB, keep_for: 30d}
  journal: {keep: 1GiB}
"""


def report(text: str, shape: Shape | None = None, facts: Facts = FACTS) -> Report:
    """The report about a YAML, for a shape or for the one that the YAML tells."""
    mapping = yaml.safe_load(text)
    told, assumed = training_of(mapping, None, None, None, None)
    config = AgentConfig.from_mapping(mapping)
    return examine("train.yaml", mapping, config, shape or told, [] if shape else assumed, facts)


@pytest.mark.parametrize(
    ("name", "text", "shape", "facts"),
    [
        ("full", FULL, Shape(8, 4, 10_000, 2.0, NAMES, (("decoder.0", 64), ("decoder.2", 64))), FACTS),
        ("no_model", FULL, Shape(8, 4, 10_000), FACTS),
        (
            "carried_over",
            CARRIED_OVER,
            None,
            replace(
                FACTS,
                versions={**FACTS.versions, "mindformers": "2.1.0"},
                places=[Place("monitor_config.dump_path", "/tmp/monitor", "/tmp", 50_000_000)],
            ),
        ),
        ("nothing", "rankd: {output: runs/exp_001}", Shape(), FACTS),
        ("rotated", ROTATED, Shape(8, 4, 100_000, 2.0, NAMES), FACTS),
    ],
)
def test_the_report_as_text(name: str, text: str, shape: Shape | None, facts: Facts) -> None:
    """What a person reads (golden files)."""
    assert render(report(text, shape, facts)) == (GOLDEN / f"check_{name}.txt").read_text()


def test_the_report_as_json() -> None:
    """For machines the whole report is there, and nothing in it that JSON cannot hold."""
    mapping = report(FULL, Shape(2, 4, 100, 1.0, NAMES)).to_mapping()
    assert json.loads(json.dumps(mapping))["status"] == 0
    assert mapping["no_effect"] == ("profiler.profiler_rank: rank 9 is not in this job of 2 ranks (0-1); ignored",)


def test_a_filter_that_matches_nothing_is_an_error_with_the_nearest_names() -> None:
    """`local_norm: ["self_atention.linear_qkv", "layernorm"]`: the first one is told, with what it may have meant."""
    text = 'monitor: {train_state: {local_norm: ["self_atention.linear_qkv", "layernorm"]}}'
    found = report(text, Shape(names=NAMES))
    assert found.status == 1
    (error,) = found.errors
    assert error.startswith('monitor.train_state.local_norm: "self_atention.linear_qkv" matches none of the 18 ')
    assert error.endswith("; the nearest: self_attention.linear_qkv, self_attention.linear_proj")
    assert [(m.filter, len(m.names)) for m in found.filters] == [("self_atention.linear_qkv", 0), ("layernorm", 5)]


def test_misspelt_sections_are_warnings() -> None:
    """They count in the verdict, and are no errors: what is not ours may be the framework's."""
    found = report("rankdd: {output: x}\nprofilers: {}\nmonitors: {}\nmonitor: {train_state: {local_loss: True}}")
    assert (found.status, found.no_effect) == (0, ())
    assert list(found.warnings) == [
        "rankdd: not used by rankd; did you mean `rankd`?",
        "profilers: not used by rankd; did you mean `profiler`?",
        "monitors: not used by rankd; did you mean `monitor`?",
    ]
    assert render(found).endswith("usable (0 errors, 3 warnings)\n")


def test_without_a_model_no_filter_is_judged() -> None:
    """Whether a filter matches is not known without the model, so it is no error."""
    assert report('monitor: {train_state: {local_norm: "no such name"}}').status == 0


def test_nearest_parts_have_the_shape_of_what_was_written() -> None:
    """Suggestions are parts of names with as many dots; nothing is suggested where nothing is like it."""
    assert nearest_parts("layernrom", NAMES)[0] == "layernorm"
    assert nearest_parts("Decoder.Layers.0", NAMES)[0] == "decoder.layers.0"
    assert nearest_parts("qqqqqqqq", NAMES) == []
    assert nearest_parts("", NAMES) == []


@pytest.mark.parametrize(
    ("sections", "world_size", "expected"),
    [
        ({}, None, (1, 1, None)),
        ({"training": {"global_batch_size": 64, "local_batch_size": 2, "steps": 7}}, 8, (8, 4, 7)),
        ({"training": {"global_batch_size": 64}, "parallelism": {"tensor_parallel": 4}}, 8, (8, 32, None)),
        ({"training": {"global_batch_size": 10}}, 3, (3, 1, None)),
        ({"parallelism": {"tensor_parallel": 2, "pipeline_parallel": 4}}, None, (8, 1, None)),
        ({"training": "a text", "parallelism": {"tensor_parallel": True}}, None, (1, 1, None)),
    ],
)
def test_the_training_is_taken_from_mindformers_sections(
    sections: Mapping[str, object], world_size: int | None, expected: tuple[int, int, int | None]
) -> None:
    """Ranks, micro-steps and steps come from `training` and `parallelism`, as MindFormers computes them."""
    shape, assumed = training_of(sections, world_size, None, None, None)
    assert (shape.world_size, shape.micro_steps, shape.steps) == expected
    assert any("--world-size" in line for line in assumed) == (world_size is None)


def test_disk_that_will_not_do_is_told() -> None:
    """Free space is held against the estimate for the whole training, where its length is known."""
    facts = replace(FACTS, places=[Place("rankd.output", "out", None, 1_000)])
    text = "monitor: {train_state: {local_loss: True}}"
    (warning,) = report(text, Shape(steps=1_000), facts).warnings
    assert warning.startswith("rankd.output: out has 1 kB free, and 1000 steps need about ")
    assert report(text, Shape(), facts).warnings == ()


def test_disk_that_will_do_because_older_parts_are_deleted() -> None:
    """What `rankd.logs` and `rankd.journal.keep` leave is what needs room, not all that was ever written."""
    shape = Shape(8, 4, 1_000_000, 1.0, NAMES)
    facts = replace(FACTS, places=[Place("rankd.output", "out", None, 3_000_000_000)])
    everything = "monitor: {train_state: {local_norm: True}}\nrankd: {output: out"
    limited = ", logs: {rotate_size: 10MiB, keep_size: 100MiB}, journal: {keep: 0, segment_size: 1MiB}"
    (warning,) = report(f"{everything}}}", shape, facts).warnings
    assert warning.startswith("rankd.output: out has 3 GB free, and 1000000 steps need about ")
    assert report(f"{everything}{limited}}}", shape, facts).warnings == ()


def test_hidden_messages_and_temporary_output_are_told() -> None:
    """Output that will be cleared, and levels that hide rankd's messages, are warnings and not errors."""
    facts = replace(FACTS, hidden=["logging: hidden"], places=[Place("rankd.output", "/tmp/x", "/tmp")])
    found = report("monitor: {train_state: {local_loss: True}}", None, facts)
    assert found.status == 0
    assert found.warnings == (
        "rankd.output: /tmp/x lies in /tmp, which is cleared; choose a lasting directory",
        "logging: hidden",
    )


def test_versions_that_do_not_go_together_are_told() -> None:
    """numpy 2 with MindSpore 2.10; norms that MindFormers prints with another meaning."""
    facts = replace(FACTS, versions={"mindspore": "2.10.0", "numpy": "2.1.0", "mindformers": "2.1.0"})
    numpy, norms = report("monitor: {train_state: {local_norm: True}}", None, facts).warnings
    assert "install numpy<2" in numpy
    assert "set micro_batch for the same" in norms


def test_mindformers_needs_the_callback_and_where_it_is() -> None:
    """A YAML of the PyNative Trainer without RankdCallback, or with a REGISTER_PATH that is elsewhere, is told."""
    text = "training: {steps: 1}\nmonitor: {train_state: {local_loss: True}}\n"
    (missing,) = report(text).warnings
    assert missing.startswith("callbacks: no RankdCallback")
    text += "callbacks: [{type: RankdCallback, auto_register: rankd_callback.RankdCallback}]"
    (elsewhere,) = report(text, None, replace(FACTS, register_path=("a", "b"))).warnings
    assert "REGISTER_PATH is 'a' here" in elsewhere
    assert report(text, None, replace(FACTS, register_path=("b", "b"))).warnings == ()


def test_the_callbacks_own_entry_is_checked() -> None:
    """A misspelt key of `type: RankdCallback` is told before the job, with the nearest one."""
    entry = {"type": "RankdCallback", "auto_register": "rankd_callback.RankdCallback", "keep_stok": False}
    with pytest.raises(ValueError, match=r"callbacks\[0\]\.keep_stok: unknown key; did you mean `keep_stock`"):
        AgentConfig.from_mapping({"callbacks": [entry]})
    right = {**{k: v for k, v in entry.items() if k != "keep_stok"}, "keep_stock": False}
    assert AgentConfig.from_mapping({"callbacks": [right]}).notices == ()


def test_the_order_of_callbacks_that_reset_is_told() -> None:
    """MaxLogitsMonitor before RankdCallback resets what rankd is to read."""
    text = "callbacks: [{type: MaxLogitsMonitor}, {type: RankdCallback}]"
    (notice,) = report(text).no_effect
    assert "list RankdCallback first" in notice
    assert report("callbacks: [{type: RankdCallback}, {type: MaxLogitsMonitor}]").no_effect == ()


def test_what_is_an_anomaly_is_listed() -> None:
    """Each check and each alert with its line, and what becomes of it."""
    text = """
monitor: {train_state: {local_loss: True}}
monitor_config: {monitor_on: True, nan_check: True, exception_dump: True, warmup_steps: 100}
rankd:
  alerts: [{metric: local_loss, times: 3, window: 50}, {metric: grad_norm, above: 10}]
  on_anomaly: stop
"""
    found = report(text)
    assert found.alerts == (
        "any metric that is nan or inf (monitor_config.nan_check)",
        "local_loss above 3 times the median of the last 50 values (rankd.alerts[0])",
        "grad_norm above 10 (rankd.alerts[1])",
        (
            "from step 101 on: a line in the log, its step written also where it is not due, and AnomalyError raised "
            "into the training"
        ),
    )
    assert "\nAnomalies\n  any metric" in render(found)
    assert report("monitor: {train_state: {local_loss: True}}").alerts == ()


@pytest.mark.parametrize(
    ("sections", "notices"),
    [
        (
            "rankd: {alerts: [{metric: local_loss, above: 5}, {metric: loss, above: 5}]}",
            ["rankd.alerts[0]: it has no effect while local_loss is not recorded (monitor.train_state.local_loss)"],
        ),
        (
            """
            rankd: {alerts: [{metric: tpe, below: 5}]}
            monitor: {train_state: {local_loss: True}}
            """,
            [
                (
                    "rankd.alerts[0]: it has no effect while tpe is not recorded "
                    "(monitor.moe_monitor.save_tokens_per_expert_interval)"
                )
            ],
        ),
        (
            """
            rankd: {alerts: [{metric: max_attention_logit, above: 5}]}
            callbacks: [{type: MaxLogitsMonitor, enable_logging: False}]
            """,
            [
                (
                    "rankd.alerts[0]: it has no effect while max_attention_logit is not recorded "
                    "(a callback of type MaxLogitsMonitor)"
                )
            ],
        ),
        (
            """
            rankd: {alerts: [{metric: local_loss, above: 5}, {metric: tpe, above: 5}]}
            monitor: {moe_monitor: {save_tokens_per_expert_interval: 5}}
            monitor_config: {monitor_on: True, local_loss: True, warmup_steps: 5}
            """,
            [],
        ),
        (
            "rankd: {on_anomaly: stop}",
            ["rankd.on_anomaly: stop has no effect without rankd.alerts while monitor_config.nan_check is not true"],
        ),
        (
            "rankd: {on_anomaly: stop, alerts: [{metric: loss, above: 5}]}",
            ["rankd.on_anomaly: nan and inf do not stop the training while monitor_config.nan_check is not true"],
        ),
    ],
)
def test_alerts_without_effect_are_told(sections: str, notices: list[str]) -> None:
    """An alert on a metric that is not recorded, and a stop that nothing brings about."""
    assert list(report(sections).no_effect) == notices


@pytest.mark.parametrize(
    ("switches", "size"),
    [
        ("profile_cpu: False, with_stack: False", "small"),
        ("", "medium"),
        ("profiler_level: 2, profile_memory: True", "large"),
        ("profiler_level: 2, profile_memory: True, end_step: 100", "huge"),
    ],
)
def test_the_profile_has_a_size_class(switches: str, size: str) -> None:
    """Level, stacks, memory and the length of the window make the class; it is no measurement."""
    found = report(f"profiler: {{enable_profiling: True, {switches}}}").profiler
    assert found is not None
    assert found.size.startswith(size)


def test_a_profiler_window_that_is_never_reached_is_told() -> None:
    """`start_step` behind the last step of the training."""
    found = report("profiler: {enable_profiling: True, start_step: 50, end_step: 51}", Shape(steps=20)).profiler
    assert found is not None
    assert found.steps == "50-51 (2 steps), never reached: the training has 20 steps"


def test_numbers_for_people() -> None:
    """Bytes in powers of 1,000 with three digits."""
    assert [human_bytes(n) for n in (0, 999, 1_000, 1.5e6, 999_499, 999_600, 2e12, 5e15)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.5 MB",
        "999 kB",
        "1 MB",
        "2 TB",
        "5,000 TB",
    ]
