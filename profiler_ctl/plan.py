"""One profiling session on one rank, as a table of transitions. Pure: steps in, actions out.

A missing entry of the table is the error: such an event cannot happen in that state.

A session on demand begins PROPOSED: the rank looks whether it can take part, and is ARMED or has REFUSED. Nothing is
recorded before the collector has named one step for all ranks of the session (`agreement.py`), and then at that step or
never: who hears of it too late has MISSED it. A session from the configuration begins PLANNED, because every rank has
read its window; if the collector has another one (rank 0's) in time, that replaces it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..collector.protocol.errors import ConfigError, ProfilerError
from ..collector.protocol.ranges import span, steps_text

__all__ = ["Action", "Event", "Plan", "State", "Window"]


@dataclass(frozen=True, slots=True)
class Window:
    """The steps that are profiled: global steps, `start_step` and `end_step` both included.

    Raises:
        ConfigError: not two positive integers in order.
    """

    start_step: int
    end_step: int

    def __post_init__(self) -> None:
        for key in ("start_step", "end_step"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{key} must be a positive integer, got {value!r}")
        if self.end_step < self.start_step:
            raise ConfigError(f"end_step must be start_step ({self.start_step}) or later, got {self.end_step}")

    def __contains__(self, step: int) -> bool:
        return self.start_step <= step <= self.end_step

    def __len__(self) -> int:
        return self.end_step - self.start_step + 1

    @property
    def steps(self) -> str:
        """`step 5`, `steps 5-7`."""
        return steps_text(self.start_step, self.end_step)

    def __str__(self) -> str:
        return span(self.start_step, self.end_step)


class State(enum.Enum):
    """How far a session is. `final` ones are never left."""

    PROPOSED = "proposed"  # whether this rank can take part is being looked at
    ARMED = "armed"  # it can; which step is not decided
    PLANNED = "planned"  # its window lies ahead
    RECORDING = "recording"
    EXPORTING = "exporting"  # recorded; the profiler writes, in a process of its own
    DONE = "done"  # written and checked
    FAILED = "failed"
    SKIPPED = "skipped"  # nothing was to be recorded here
    REFUSED = "refused"  # this rank cannot take part
    ABORTED = "aborted"  # called off before it began
    MISSED = "missed"  # this rank heard of the step when that had begun, or never came to it

    @property
    def final(self) -> bool:
        return self in _FINAL


_FINAL = (State.DONE, State.FAILED, State.SKIPPED, State.REFUSED, State.ABORTED, State.MISSED)


class Event(enum.Enum):
    """What can happen to a session; the steps by where they lie to its window (before it, while there is none)."""

    PASSED = "this rank can take part"
    REFUSED = "this rank cannot take part"
    COMMITTED = "the window is decided, and lies ahead"
    LATE = "the window is decided, and has begun without this rank"
    ABORTED = "the session is called off"
    STOPPED = "the session is to end early"

    BEGIN_BEFORE = "a step before the window begins"
    BEGIN_INSIDE = "a step of the window begins"
    BEGIN_AFTER = "a step after the window begins"
    BEGIN_LATE = "a step begins, and the window's first one, which was agreed on, was never trained here"
    BEGIN_STOPPING = "a step begins, and the session is to end early"
    END_STOPPING = "a recorded step ends, and the session is to end early"
    END_BEFORE = "a step before the window ends"
    END_INSIDE = "a step of the window ends, not its last"
    END_LAST = "the window's last step ends"
    END_AFTER = "a step after the window ends"
    WRITTEN = "the output is complete"
    FAILED = "the profiler failed"
    CLOSED = "training is over"


class Action(enum.Enum):
    """What the session has to do now."""

    NOTHING = "nothing"
    START = "start the profiler"
    STEP = "tell the profiler that a recorded step has ended"
    LAST_STEP = "the same, and that it was the last"
    STOP = "stop the profiler early; it writes what it has"
    POLL = "see whether the output is complete"
    AWAIT = "wait for the output, with a deadline"
    ABANDON = "let go of the profiler"


_STEPS = (
    Event.BEGIN_BEFORE,
    Event.BEGIN_INSIDE,
    Event.BEGIN_AFTER,
    Event.END_BEFORE,
    Event.END_INSIDE,
    Event.END_LAST,
    Event.END_AFTER,
)
_SAID = (Event.COMMITTED, Event.LATE, Event.ABORTED, Event.STOPPED)


def _stay(state: State, action: Action, *events: Event) -> dict[Event, tuple[State, Action]]:
    return dict.fromkeys(events, (state, action))


def _end(state: State, *events: Event) -> dict[Event, tuple[State, Action]]:
    return dict.fromkeys(events, (state, Action.NOTHING))


TRANSITIONS: dict[State, dict[Event, tuple[State, Action]]] = {
    State.PROPOSED: {
        **_stay(State.PROPOSED, Action.NOTHING, Event.BEGIN_BEFORE, Event.END_BEFORE),
        Event.PASSED: (State.ARMED, Action.NOTHING),
        **_end(State.REFUSED, Event.REFUSED, Event.FAILED),
        # A step for a rank that has not said that it can: it was said by a process before this one.
        **_end(State.MISSED, Event.COMMITTED, Event.LATE),
        **_end(State.ABORTED, Event.ABORTED, Event.STOPPED, Event.CLOSED),
    },
    State.ARMED: {
        **_stay(State.ARMED, Action.NOTHING, Event.BEGIN_BEFORE, Event.END_BEFORE),
        Event.COMMITTED: (State.PLANNED, Action.NOTHING),
        **_end(State.MISSED, Event.LATE),
        **_end(State.ABORTED, Event.ABORTED, Event.STOPPED, Event.CLOSED),
        **_end(State.FAILED, Event.FAILED),
    },
    State.PLANNED: {
        **_stay(State.PLANNED, Action.NOTHING, Event.BEGIN_BEFORE, Event.END_BEFORE, Event.COMMITTED, Event.LATE),
        Event.BEGIN_INSIDE: (State.RECORDING, Action.START),
        **_end(State.SKIPPED, Event.BEGIN_AFTER, Event.CLOSED),
        **_end(State.MISSED, Event.BEGIN_LATE),
        **_end(State.ABORTED, Event.ABORTED, Event.STOPPED),
        **_end(State.FAILED, Event.FAILED),
    },
    State.RECORDING: {
        # Also a step that was abandoned and begins again.
        Event.BEGIN_INSIDE: (State.RECORDING, Action.NOTHING),
        Event.END_INSIDE: (State.RECORDING, Action.STEP),
        Event.END_LAST: (State.EXPORTING, Action.LAST_STEP),
        # Training skipped the window's last steps, or went back to before the window.
        Event.BEGIN_AFTER: (State.EXPORTING, Action.STOP),
        Event.BEGIN_BEFORE: (State.EXPORTING, Action.STOP),
        Event.CLOSED: (State.EXPORTING, Action.STOP),
        # The profiler is the training thread's: it ends where that comes by.
        **_stay(State.RECORDING, Action.NOTHING, *_SAID),
        Event.BEGIN_STOPPING: (State.EXPORTING, Action.STOP),
        Event.END_STOPPING: (State.EXPORTING, Action.LAST_STEP),
        Event.FAILED: (State.FAILED, Action.ABANDON),
    },
    State.EXPORTING: {
        **_stay(State.EXPORTING, Action.POLL, *_STEPS),
        **_stay(State.EXPORTING, Action.NOTHING, *_SAID),
        Event.CLOSED: (State.EXPORTING, Action.AWAIT),
        Event.WRITTEN: (State.DONE, Action.NOTHING),
        Event.FAILED: (State.FAILED, Action.ABANDON),
    },
    # What is over stays over: what is said of it comes late, or again. PASSED, REFUSED: it was called off meanwhile.
    **{
        state: _stay(state, Action.NOTHING, *_STEPS, *_SAID, Event.CLOSED, Event.PASSED, Event.REFUSED)
        for state in _FINAL
    },
}


class Plan:
    """A session's state, the steps it has recorded, and why it ended as it did.

    Args:
        window: the steps to record; None: the session is proposed, and `commit` will tell.
        skip: why this rank does not take part (it is not chosen, its rank is not certain); None: it does.
    """

    def __init__(self, window: Window | None, skip: str | None = None) -> None:
        self.window = window
        # Agreed on among ranks: at its first step or never. Otherwise a resume inside the window records the rest.
        self.exact = window is None
        self.state = State.SKIPPED if skip is not None else State.PROPOSED if window is None else State.PLANNED
        self.reason = skip
        self.steps: list[int] = []
        self._stopping = False

    @property
    def planned(self) -> str:
        """The steps to record, for a person: `steps 5-7`."""
        return "steps that are not decided yet" if self.window is None else self.window.steps

    # -- what is said -------------------------------------------------------------------------------------------------

    def passed(self) -> Action:
        """This rank can take part."""
        return self._on(Event.PASSED)

    def refused(self, reason: str) -> Action:
        """This rank cannot take part, for `reason`."""
        return self._on(Event.REFUSED, reason)

    def commit(self, window: Window, step: int) -> Action:
        """The window is decided. A window that was agreed on before stays; one of the configuration is replaced.

        Args:
            step: the global step that began last here; 0: none.
        """
        open_ = self.state is State.ARMED or (self.state is State.PLANNED and not self.exact)
        if step >= window.start_step:
            early = self.state is State.PROPOSED
            why = "had not been armed when" if early else f"is at step {step} and was told too late that"
            return self._on(Event.LATE, f"this rank {why} the window {window} was decided")
        if open_:
            self.window = window
        return self._on(Event.COMMITTED, "a process before this one was armed" if not open_ else None)

    def abort(self, reason: str) -> Action:
        """The session is called off; one that records goes on."""
        return self._on(Event.ABORTED, reason)

    def stop(self, reason: str) -> Action:
        """The session is to end early: at once where nothing is recorded, else at the next boundary of a step."""
        if self.state is State.RECORDING and not self._stopping:
            self._stopping, self.reason = True, reason
        return self._on(Event.STOPPED, reason)

    # -- what happens -------------------------------------------------------------------------------------------------

    def step_begin(self, step: int) -> Action:
        """The global step `step` (1-based) begins."""
        window = self.window
        if window is None:
            return self._on(Event.BEGIN_BEFORE)
        if self._stopping and self.state is State.RECORDING:
            return self._on(Event.BEGIN_STOPPING)
        if self.exact and self.state is State.PLANNED and step > window.start_step:
            return self._on(Event.BEGIN_LATE, f"step {window.start_step} was not trained here; this is step {step}")
        if step in window:
            return self._on(Event.BEGIN_INSIDE)
        before = step < window.start_step
        why = None if before else f"training starts at step {step}, after the window {window}"
        return self._on(Event.BEGIN_BEFORE if before else Event.BEGIN_AFTER, why)

    def step_end(self, step: int) -> Action:
        """The global step `step` ends; without a `step_begin` of it, ProfilerError."""
        window = self.window
        if window is None:
            return self._on(Event.END_BEFORE)
        if self.state is State.RECORDING and step in window:
            self.steps.append(step)
        if self._stopping and self.state is State.RECORDING:
            return self._on(Event.END_STOPPING)
        if step not in window:
            return self._on(Event.END_BEFORE if step < window.start_step else Event.END_AFTER)
        return self._on(Event.END_LAST if step == window.end_step else Event.END_INSIDE)

    def written(self) -> Action:
        """The output is complete and has been checked."""
        action = self._on(Event.WRITTEN)
        if self.window is not None and len(self.steps) < len(self.window):
            steps = span(self.steps[0], self.steps[-1]) if self.steps else "none in full"
            why = f"{self.reason}; " if self._stopping else ""
            self.reason = f"{why}of the window {self.window}, these steps were trained here: {steps}"
        return action

    def failed(self, reason: str) -> Action:
        """The profiler failed, for `reason`."""
        action = self._on(Event.FAILED)
        self.reason = reason
        return action

    def closed(self) -> Action:
        """Training is over."""
        when = "its step was decided" if self.window is None else f"the window {self.window}"
        return self._on(Event.CLOSED, f"training ended before {when}")

    def _on(self, event: Event, reason: str | None = None) -> Action:
        """`reason` becomes that of the session where the event ends it with nothing recorded."""
        before = self.state
        try:
            self.state, action = TRANSITIONS[before][event]
        except KeyError:
            raise ProfilerError(f"a session that is {before.value} cannot see this: {event.value}") from None
        if reason is not None and self.state.final and not before.final:
            self.reason = reason
        return action
