"""agent/sampling.py: which steps are computed, written, printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankd.agent.sampling import Due, Rates, Sampling
from rankd.collector.protocol.errors import RecordError

EVERY = st.integers(1, 60)


def computed(sampling: Sampling, steps: int = 60) -> list[int]:
    return [step for step in range(1, steps + 1) if sampling.due(step).compute]


def written(sampling: Sampling, steps: int = 60) -> list[int]:
    return [step for step in range(1, steps + 1) if sampling.due(step).write]


def test_by_default_every_step_is_written() -> None:
    """Without `monitor_config` nothing is left out and nothing is printed."""
    assert Sampling().due(1) == Due(compute=True, write=True, console=False)


def test_compute_each_step_write_each_tenth() -> None:
    """「比如每步算 loss 但每 10 步才落盘一次」: `step_interval` 1, `interval` 10, with a health check."""
    sampling = Sampling(Rates(compute=1, write=10), watched=True)
    assert written(sampling) == [10, 20, 30, 40, 50, 60]
    assert computed(sampling) == list(range(1, 61))


def test_what_nobody_looks_at_is_not_computed() -> None:
    """`interval` 20 without health checks: the 19 steps between cost nothing."""
    assert computed(Sampling(Rates(compute=1, write=20))) == [20, 40, 60]


def test_printed_steps_are_computed() -> None:
    """`print_interval` 5, `interval` 20: the console's steps are computed and not written."""
    sampling = Sampling(Rates(1, 20, 5))
    assert sampling.due(5) == Due(compute=True, write=False, console=True)
    assert sampling.due(20) == Due(compute=True, write=True, console=True)
    assert sampling.due(21) == Due(compute=False, write=False, console=False)


@given(EVERY, EVERY, st.none() | EVERY, st.booleans(), st.integers(1, 10_000))
def test_only_computed_steps_come_out(compute: int, write: int, console: int | None, watched: bool, step: int) -> None:
    """Whatever the intervals: written and printed steps are multiples of `step_interval` and of their own interval."""
    due = Sampling(Rates(compute, write, console), watched=watched).due(step)
    assert due.write == (step % compute == 0 and step % write == 0)
    assert due.console == (console is not None and step % compute == 0 and step % console == 0)
    assert due.compute == (step % compute == 0 and (due.write or due.console or watched))


@given(EVERY, EVERY, st.integers(1, 50), st.integers(0, 50))
def test_other_rates_for_some_steps_and_back(old: int, new: int, first: int, length: int) -> None:
    """An override holds from its first step to its last, both included; then the configuration's rates hold again."""
    plain, changed = Sampling(Rates(write=old)), Sampling(Rates(write=old))
    changed.override(Rates(write=new), first, first + length)
    for step in range(1, 120):
        inside = first <= step <= first + length
        assert changed.due(step) == (Sampling(Rates(write=new)) if inside else plain).due(step)


def test_ranks_that_are_told_at_different_times_change_at_the_same_step() -> None:
    """A decision depends on the step alone, so it does not matter when a rank hears of it, if before the step."""
    early, late = Sampling(Rates(write=20)), Sampling(Rates(write=20))
    early.override(Rates(write=1), 50)
    for step in range(1, 45):
        assert early.due(step) == late.due(step)
    late.override(Rates(write=1), 50)
    assert written(early, 60) == written(late, 60) == [20, 40, *range(50, 61)]


def test_what_was_said_before_holds_until_the_newest_begins() -> None:
    """Every step from 50 to 99, then as configured from 60 on, said at 52: 50 to 59 are written all the same."""
    sampling = Sampling(Rates(write=20))
    sampling.override(Rates(write=1), 50, 99)
    sampling.override(sampling.configured, 60)
    assert written(sampling, 120) == [20, 40, *range(50, 60), 60, 80, 100, 120]
    sampling.override(Rates(write=30), 50)
    assert written(sampling, 120) == [20, 40, 60, 90, 120]


@pytest.mark.parametrize("arguments", [(0,), (1, 0), (1, 1, 0), (True,)])
def test_intervals_are_positive(arguments: tuple[int, ...]) -> None:
    """An interval of zero has no meaning."""
    with pytest.raises(RecordError):
        Rates(*arguments)


@pytest.mark.parametrize("window", [(0, None), (5, 4)])
def test_a_window_that_cannot_be(window: tuple[int, int | None]) -> None:
    """Steps are counted from 1, and a window ends after its beginning."""
    with pytest.raises(RecordError):
        Sampling().override(Rates(), *window)
