"""The table of a profiling session."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankd.collector.protocol.errors import ConfigError, ProfilerError
from rankd.profiler_ctl.plan import TRANSITIONS, Action, Event, Plan, State, Window


def run_steps(plan: Plan, first: int, last: int) -> list[Action]:
    """Train from `first` to `last`; the actions other than nothing."""
    actions = [call(step) for step in range(first, last + 1) for call in (plan.step_begin, plan.step_end)]
    return [action for action in actions if action is not Action.NOTHING]


def test_a_window_is_recorded_from_its_first_to_its_last_step_both_included() -> None:
    """Started where step 5 begins, stopped where step 7 ends; three steps are told."""
    plan = Plan(Window(5, 7))
    assert run_steps(plan, 1, 7) == [Action.START, Action.STEP, Action.STEP, Action.LAST_STEP]
    assert plan.steps == [5, 6, 7]
    assert plan.state is State.EXPORTING
    assert plan.written() is Action.NOTHING
    assert (plan.state, plan.reason) == (State.DONE, None)


def test_a_window_of_one_step_starts_and_ends_with_it() -> None:
    """The default window is step 1 alone."""
    plan = Plan(Window(1, 1))
    assert run_steps(plan, 1, 1) == [Action.START, Action.LAST_STEP]


def test_a_resume_inside_the_window_records_the_rest_of_it() -> None:
    """Steps are global ones: training that goes on at step 6 has two steps of 5-7 left."""
    plan = Plan(Window(5, 7))
    assert run_steps(plan, 6, 7) == [Action.START, Action.STEP, Action.LAST_STEP]
    plan.written()
    assert plan.steps == [6, 7]
    assert plan.reason == "of the window 5-7, these steps were trained here: 6-7"


def test_a_resume_after_the_window_is_skipped_with_the_reason() -> None:
    """Nothing is started, and the report says why."""
    plan = Plan(Window(5, 7))
    assert run_steps(plan, 8, 12) == []
    assert plan.state is State.SKIPPED
    assert plan.reason == "training starts at step 8, after the window 5-7"


def test_training_that_ends_before_the_window_is_skipped_with_the_reason() -> None:
    """Too few steps for the window that was asked for."""
    plan = Plan(Window(5, 7))
    run_steps(plan, 1, 4)
    assert plan.closed() is Action.NOTHING
    assert (plan.state, plan.reason) == (State.SKIPPED, "training ended before the window 5-7")


@pytest.mark.parametrize("first_after", [1, 9])
def test_steps_that_leave_the_window_early_stop_the_recording(first_after: int) -> None:
    """Training goes back to before the window, or jumps past it: what was recorded is written."""
    plan = Plan(Window(5, 7))
    run_steps(plan, 5, 5)
    assert plan.step_begin(first_after) is Action.STOP
    assert plan.state is State.EXPORTING


def test_training_that_ends_inside_the_window_stops_and_then_awaits_the_output() -> None:
    """Two closings: the first ends the recording, the second waits for what it gives."""
    plan = Plan(Window(5, 7))
    run_steps(plan, 4, 5)
    assert plan.step_begin(6) is Action.NOTHING
    assert [plan.closed(), plan.closed()] == [Action.STOP, Action.AWAIT]
    assert plan.steps == [5]


def test_an_abandoned_step_that_begins_again_is_recorded_once() -> None:
    """A step that raised and is tried again is one step of the window."""
    plan = Plan(Window(5, 6))
    assert [plan.step_begin(5), plan.step_begin(5), plan.step_end(5)] == [Action.START, Action.NOTHING, Action.STEP]
    assert plan.steps == [5]


def test_while_the_output_is_written_every_step_looks_for_it() -> None:
    """Training goes on meanwhile, and may be over before."""
    plan = Plan(Window(1, 1))
    run_steps(plan, 1, 1)
    assert run_steps(plan, 2, 3) == [Action.POLL] * 4
    assert plan.closed() is Action.AWAIT


@pytest.mark.parametrize("last", [0, 5, 7])
def test_a_failure_ends_the_session_with_its_reason(last: int) -> None:
    """Before the recording there is nothing to let go of; later there is."""
    plan = Plan(Window(5, 7))
    run_steps(plan, 1, last)
    assert plan.failed("disk full") is (Action.ABANDON if last else Action.NOTHING)
    assert (plan.state, plan.reason) == (State.FAILED, "disk full")
    assert run_steps(plan, last + 1, 9) == []


def test_a_rank_that_does_not_take_part_is_skipped_from_the_start() -> None:
    """With the reason that was given, which nothing replaces."""
    plan = Plan(Window(1, 2), skip="rank 3 is not in profiler_rank")
    assert run_steps(plan, 1, 9) == []
    plan.closed()
    assert (plan.state, plan.reason) == (State.SKIPPED, "rank 3 is not in profiler_rank")


def test_an_event_that_cannot_happen_is_an_error_and_changes_nothing() -> None:
    """A missing entry of the table: the end of a step of the window that never began, output before a recording."""
    plan = Plan(Window(1, 2))
    with pytest.raises(ProfilerError, match="planned cannot see this: a step of the window ends"):
        plan.step_end(1)
    with pytest.raises(ProfilerError, match="the output is complete"):
        plan.written()
    assert plan.state is State.PLANNED


@pytest.mark.parametrize(("start", "end"), [(0, 1), (-1, 1), (True, 2), (1.0, 2), (1, None), (3, 2)])
def test_a_window_is_two_positive_integers_in_order(start: int, end: int) -> None:
    """Anything else is an error of the configuration."""
    with pytest.raises(ConfigError, match="_step"):
        Window(start, end)


def test_the_table_has_an_entry_for_every_state_and_never_leaves_a_final_one() -> None:
    """And each state that is not final can fail, and can be closed."""
    assert set(TRANSITIONS) == set(State)
    for state, row in TRANSITIONS.items():
        assert Event.CLOSED in row
        assert (Event.FAILED in row) is not state.final
        if state.final:
            assert all(entry == (state, Action.NOTHING) for entry in row.values())


jumps = st.lists(st.integers(1, 12), max_size=12)


@settings(deadline=None)  # a busy machine is no bug
@given(jumps, st.integers(1, 8), st.integers(0, 4), st.booleans())
def test_whatever_steps_are_trained_the_session_ends_and_records_only_its_window(
    steps: list[int], start: int, extra: int, works: bool
) -> None:
    """Any order of steps: a START only if training reaches the window, no step told without it, a final state."""
    window = Window(start, start + extra)
    plan = Plan(window)
    actions = [call(step) for step in steps for call in (plan.step_begin, plan.step_end)]
    while not plan.state.final:
        actions.append(plan.closed())
        if actions[-1] is Action.AWAIT:
            _ = plan.written() if works else plan.failed("no output")
    reached = next((step for step in steps if step >= start), None)
    assert actions.count(Action.START) == (1 if reached is not None and reached in window else 0)
    told = [action for action in actions if action in (Action.STEP, Action.LAST_STEP)]
    assert len(told) == len(plan.steps) <= max(len(steps), 1)
    assert all(step in window for step in plan.steps)
    if Action.START in actions:
        assert plan.state is (State.DONE if works else State.FAILED)
        first = actions.index(Action.START)
        assert not set(actions[:first]) - {Action.NOTHING}
    else:
        assert plan.state is State.SKIPPED
