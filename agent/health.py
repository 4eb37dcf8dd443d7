"""Pure: what looks at the values that were measured, and the check for nan and inf (`monitor_config.nan_check`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from ..collector.protocol.records import Frame
from ..collector.protocol.wording import counted
from .anomaly import Anomaly
from .monitor import Measured, MicroBatch, Monitor, Pending, Remark, StepEnd

__all__ = ["ANOMALY", "Check", "NanCheck", "Watched", "look", "name_of", "place"]

# The kind of the note in the log: `# anomaly …`.
ANOMALY = "anomaly"


class Check(Protocol):
    """Looks at values."""

    def look(self, step: int, micro_step: int | None, frames: Sequence[Frame]) -> list[Remark]:
        """The remarks about these frames of one position."""


def look(checks: Iterable[Check], step: int, micro_step: int | None, frames: Sequence[Frame]) -> list[Remark]:
    """What all of these checks have to say."""
    return [remark for check in checks for remark in check.look(step, micro_step, frames)]


class Watched(Monitor):
    """A monitor with intervals of its own, whose values are looked at.

    Args:
        inner: what measures.
        checks: look at all of it.
    """

    def __init__(self, inner: Monitor, checks: Sequence[Check]) -> None:
        self._inner = inner
        self._checks = checks
        self._step = 0

    def begin_step(self, step: int, /) -> None:
        self._step = step
        self._inner.begin_step(step)

    def micro_step(self, batch: MicroBatch, /) -> Pending | None:
        pending = self._inner.micro_step(batch)
        if pending is None:
            return None
        return Pending(lambda: self._looked_at(batch.micro_step, pending.fetch()), pending.ready)

    def end_step(self, end: StepEnd, /) -> Measured:
        return self._looked_at(None, self._inner.end_step(end))

    def reset(self) -> Measured:
        return self._inner.reset()

    def _looked_at(self, micro_step: int | None, measured: Measured) -> Measured:
        found = look(self._checks, self._step, micro_step, measured.frames)
        return Measured(measured.frames, (*measured.remarks, *found), measured.earlier)


class NanCheck:
    """Tells once of each metric that is not finite, and again only after it has been finite in between.

    Args:
        warmup_steps: steps at the start of the training in which nothing is told; global steps, so a resumed run does
            not warm up again.
        rank: whose values these are.
    """

    def __init__(self, warmup_steps: int = 0, rank: int = 0) -> None:
        self._warmup_steps = warmup_steps
        self._rank = rank
        self._ill: set[str] = set()

    def look(self, step: int, micro_step: int | None, frames: Sequence[Frame]) -> list[Remark]:
        """The remarks about these frames of one position."""
        if step <= self._warmup_steps:
            return []
        return [remark for frame in frames if (remark := self._look(step, micro_step, frame)) is not None]

    def _look(self, step: int, micro_step: int | None, frame: Frame) -> Remark | None:
        values = frame.values
        # A finite sum has finite terms only, and is found faster than each of them is asked.
        wrong = [] if math.isfinite(sum(values)) else [i for i, v in enumerate(values) if not math.isfinite(v)]
        if not wrong:
            self._ill.discard(frame.metric)
            return None
        if frame.metric in self._ill:
            return None
        self._ill.add(frame.metric)
        value, name = values[wrong[0]], name_of(frame, wrong[0])
        text = f"{frame.metric} is {value} at {place(step, micro_step)}"
        if name is not None:
            text += f": {name} ({len(wrong)} of {counted(len(values), 'value')} not finite)"
        return Remark(ANOMALY, text, Anomaly(step, micro_step, self._rank, frame.metric, value, name, text))


def name_of(frame: Frame, index: int) -> str | None:
    """Whose value stands at this place of the column; None: the metric has no names."""
    if frame.table is None:
        return None
    if frame.counts is None:
        return frame.names[index]
    for name, values in zip(frame.names, frame.groups, strict=True):
        if index < len(values):
            return name
        index -= len(values)
    return None


def place(step: int, micro_step: int | None) -> str:
    """`step 7 micro_step 2`, or `step 7`."""
    return f"step {step}" if micro_step is None else f"step {step} micro_step {micro_step}"
