"""One profiling session on one rank, as a table of transitions. Pure: steps in, actions out.

A missing entry of the table is the error: such an event cannot happen in that state.

The table is meant to grow sideways. A session that all ranks agree on first is proposed, armed and acknowledged, and
then committed or aborted; PLANNED is the state a rank is in once its session is committed, so those states come before
it, ABORTED beside SKIPPED, and nothing from PLANNED on changes. A session from the configuration starts committed:
every rank has read the same file.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..collector.protocol.errors import ConfigError, ProfilerError

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

    def __str__(self) -> str:
        return f"{self.start_step}..{self.end_step}"


class State(enum.Enum):
    """How far a session is. `final` ones are never left."""

    PLANNED = "planned"  # its window lies ahead
    RECORDING = "recording"
    EXPORTING = "exporting"  # recorded; the profiler writes, in a process of its own
    DONE = "done"  # written and checked
    FAILED = "failed"
    SKIPPED = "skipped"  # nothing was to be recorded here

    @property
    def final(self) -> bool:
        return self in (State.DONE, State.FAILED, State.SKIPPED)


class Event(enum.Enum):
    """What can happen to a session; the steps by where they lie to its window."""

    BEGIN_BEFORE = "a step before the window begins"
    BEGIN_INSIDE = "a step of the window begins"
    BEGIN_AFTER = "a step after the window begins"
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


def _stay(state: State, action: Action, *events: Event) -> dict[Event, tuple[State, Action]]:
    return dict.fromkeys(events, (state, action))


TRANSITIONS: dict[State, dict[Event, tuple[State, Action]]] = {
    State.PLANNED: {
        **_stay(State.PLANNED, Action.NOTHING, Event.BEGIN_BEFORE, Event.END_BEFORE),
        Event.BEGIN_INSIDE: (State.RECORDING, Action.START),
        Event.BEGIN_AFTER: (State.SKIPPED, Action.NOTHING),
        Event.CLOSED: (State.SKIPPED, Action.NOTHING),
        Event.FAILED: (State.FAILED, Action.NOTHING),
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
        Event.FAILED: (State.FAILED, Action.ABANDON),
    },
    State.EXPORTING: {
        **_stay(State.EXPORTING, Action.POLL, *_STEPS),
        Event.CLOSED: (State.EXPORTING, Action.AWAIT),
        Event.WRITTEN: (State.DONE, Action.NOTHING),
        Event.FAILED: (State.FAILED, Action.ABANDON),
    },
    State.DONE: _stay(State.DONE, Action.NOTHING, *_STEPS, Event.CLOSED),
    State.FAILED: _stay(State.FAILED, Action.NOTHING, *_STEPS, Event.CLOSED),
    State.SKIPPED: _stay(State.SKIPPED, Action.NOTHING, *_STEPS, Event.CLOSED),
}


class Plan:
    """A session's state, the steps it has recorded, and why it ended as it did.

    Args:
        window: the steps to record.
        skip: why this rank does not take part (it is not chosen, its rank is not certain); None: it does.
    """

    def __init__(self, window: Window, skip: str | None = None) -> None:
        self.window = window
        self.state = State.PLANNED if skip is None else State.SKIPPED
        self.reason = skip
        self.steps: list[int] = []

    def step_begin(self, step: int) -> Action:
        """The global step `step` (1-based) begins."""
        if step in self.window:
            return self._on(Event.BEGIN_INSIDE)
        before = step < self.window.start_step
        if self.state is State.PLANNED and not before:
            self.reason = f"training starts at step {step}, after the window {self.window}"
        return self._on(Event.BEGIN_BEFORE if before else Event.BEGIN_AFTER)

    def step_end(self, step: int) -> Action:
        """The global step `step` ends; without a `step_begin` of it, ProfilerError."""
        if self.state is State.RECORDING and step in self.window:
            self.steps.append(step)
        if step not in self.window:
            return self._on(Event.END_BEFORE if step < self.window.start_step else Event.END_AFTER)
        return self._on(Event.END_LAST if step == self.window.end_step else Event.END_INSIDE)

    def written(self) -> Action:
        """The output is complete and has been checked."""
        action = self._on(Event.WRITTEN)
        if len(self.steps) < len(self.window):
            steps = f"{self.steps[0]}..{self.steps[-1]}" if self.steps else "none in full"
            self.reason = f"of the window {self.window}, these steps were trained here: {steps}"
        return action

    def failed(self, reason: str) -> Action:
        """The profiler failed, for `reason`."""
        action = self._on(Event.FAILED)
        self.reason = reason
        return action

    def closed(self) -> Action:
        """Training is over."""
        if self.state is State.PLANNED:
            self.reason = f"training ended before the window {self.window}"
        return self._on(Event.CLOSED)

    def _on(self, event: Event) -> Action:
        try:
            self.state, action = TRANSITIONS[self.state][event]
        except KeyError:
            raise ProfilerError(f"a session that is {self.state.value} cannot see this: {event.value}") from None
        return action
