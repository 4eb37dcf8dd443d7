"""agent/summary.py: the step summary."""

from __future__ import annotations

import itertools

from rankd.agent.monitor import StepEnd
from rankd.agent.summary import StepSummary


def recorded(summary: StepSummary, **given: object) -> dict[str, float]:
    summary.begin_step(1)
    return {frame.metric: frame.values[0] for frame in summary.end_step(StepEnd(given)).frames}


def test_what_is_given_is_recorded_and_the_time_is_measured() -> None:
    """loss, global_loss, lr, grad_norm and throughput as the loop gives them; the step's time in milliseconds."""
    given = {"loss": 0.5, "global_loss": 0.25, "lr": 1e-3, "grad_norm": 2, "throughput": 7.0}
    assert recorded(StepSummary(clock=itertools.count(0, 0.25).__next__), **given) == {**given, "step_time_ms": 250.0}


def test_only_what_is_given() -> None:
    """「step summary prints only the fields that were given」."""
    assert recorded(StepSummary(clock=itertools.count(0, 0.25).__next__), lr=1e-3) == {
        "lr": 1e-3,
        "step_time_ms": 250.0,
    }


def test_global_loss_is_the_reduced_loss_where_none_is_given() -> None:
    """`monitor_config.global_loss` 「会做跨卡聚合反映全局真实损失」: the loop's reduced loss."""
    assert recorded(StepSummary(global_loss=True), loss=0.5)["global_loss"] == 0.5
    assert recorded(StepSummary(global_loss=True), loss=0.5, global_loss=0.25)["global_loss"] == 0.25
    assert "global_loss" not in recorded(StepSummary(global_loss=True))
    assert "global_loss" not in recorded(StepSummary(), loss=0.5)


def test_a_step_that_was_not_ended_has_no_summary() -> None:
    """Where the loop does not call end_step, there is nothing to sum up."""
    summary = StepSummary()
    summary.begin_step(1)
    assert summary.end_step(StepEnd(called=False)).frames == ()
