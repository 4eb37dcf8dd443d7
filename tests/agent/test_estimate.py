"""Estimates against what a run really leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support import collected, finish, script

from rankd.agent.config import AgentConfig
from rankd.agent.estimate import Shape, estimate
from rankd.collector.settings import load_yaml

NAMES = ("decoder.layers.0.weight", "decoder.layers.0.bias", "output.weight")


@pytest.mark.parametrize("interval", [1, 4])
def test_an_estimate_comes_true(tmp_path: Path, interval: int) -> None:
    """Lines are exact; bytes on disk, the journal's included, come within a fifth of a run of 200 steps."""
    yaml = f"""
    monitor: {{train_state: {{local_norm: [weight], device_norm: True, local_loss: True, device_loss: True}}}}
    monitor_config: {{monitor_on: True, interval: {interval}}}
    rankd: {{output: out}}
    """
    body = 'with Agent.from_yaml("train.yaml", model=Model(), total_steps=200) as a: train(a, steps=200)'
    assert finish(script(tmp_path, body, yaml=yaml)) == (0, "")
    collected(tmp_path)
    expected = estimate(AgentConfig.from_mapping(load_yaml(tmp_path / "train.yaml")), Shape(1, 4, 200, 1.0, NAMES))
    assert expected.complete
    own = (tmp_path / "out" / "rank_0" / "monitor.log").read_bytes()
    assert sum(not line.startswith(b"#") for line in own.splitlines()) == expected.step.lines * 200
    files = [*(tmp_path / "out").glob("**/*.log"), *(tmp_path / "out" / ".rankd" / "journal").glob("*")]
    size = sum(path.stat().st_size for path in files if path.name != "collector.log")
    assert expected.disk * 200 == pytest.approx(size, rel=0.2)


def test_only_what_is_asked_for_is_counted() -> None:
    """A configuration that asks for nothing has the step summary and its headers."""
    rows = estimate(AgentConfig(), Shape()).rows
    assert [row.metric for row in rows] == ["step summary", "(headers)"]


def test_intervals_divide() -> None:
    """What is written each tenth step, or micro-step, counts a tenth of it on average."""
    mapping = {
        "monitor": {"moe_monitor": {"save_tokens_per_expert_interval": 10}},
        "monitor_config": {"monitor_on": True, "interval": 10, "local_loss": True},
        "callbacks": [{"type": "MaxLogitsMonitor", "step_interval": 50}],
    }
    found = estimate(AgentConfig.from_mapping(mapping), Shape(micro_steps=5, experts=(("decoder.0", 4),)))
    records = {row.metric: row.amount.records for row in found.rows}
    assert records["local_loss"] == pytest.approx(0.5)
    assert records["tpe"] == pytest.approx(0.5)
    assert records["max_attention_logit"] == pytest.approx(0.02)
    assert not found.complete
