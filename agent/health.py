"""Pure: looks for nan and inf in what was measured (`monitor_config.nan_check` and `warmup_steps`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..collector.protocol.records import Frame
from .monitor import Remark

__all__ = ["NanCheck"]

# The kind of the note in the log: `# anomaly …`.
_ANOMALY = "anomaly"


class NanCheck:
    """Tells once of each metric that is not finite, and again only after it has been finite in between.

    Args:
        warmup_steps: steps at the start of the training in which nothing is told; global steps, so a resumed run does
            not warm up again.
    """

    def __init__(self, warmup_steps: int = 0) -> None:
        self._warmup_steps = warmup_steps
        self._ill: set[str] = set()

    def look(self, step: int, micro_step: int | None, frames: Sequence[Frame]) -> list[Remark]:
        """The remarks about these frames of one position."""
        if step <= self._warmup_steps:
            return []
        return [remark for frame in frames if (remark := self._look(step, micro_step, frame)) is not None]

    def _look(self, step: int, micro_step: int | None, frame: Frame) -> Remark | None:
        values = frame.values
        wrong = [i for i, value in enumerate(values) if not math.isfinite(value)]
        if not wrong:
            self._ill.discard(frame.metric)
            return None
        if frame.metric in self._ill:
            return None
        self._ill.add(frame.metric)
        at = f"step {step}" if micro_step is None else f"step {step} micro_step {micro_step}"
        text = f"{frame.metric} is {values[wrong[0]]} at {at}"
        if frame.table is not None and frame.counts is None:
            text += f": {frame.names[wrong[0]]} ({len(wrong)} of {len(values)} are not finite)"
        return Remark(_ANOMALY, text)
