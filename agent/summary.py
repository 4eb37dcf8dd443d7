"""The step summary: what the training loop gives at the end of a step, and how long the step took."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..collector.protocol.records import SUMMARY_FIELDS, Frame
from .losses import read_scalar
from .monitor import NOTHING, Measured, Monitor, StepEnd

__all__ = ["StepSummary"]


class StepSummary(Monitor):
    """Records `loss`, `global_loss`, `lr`, `grad_norm` and `throughput` as they are given, and `step_time_ms`.

    Args:
        global_loss: `monitor_config.global_loss`: where the loop gives no `global_loss`, its `loss` is taken, which is
            the reduced one.
        clock: seconds, monotonic.
    """

    def __init__(self, *, global_loss: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._global_loss = global_loss
        self._clock = clock
        self._started = 0.0

    def begin_step(self, _step: int, /) -> None:
        self._started = self._clock()

    def end_step(self, end: StepEnd, /) -> Measured:
        if not end.called:
            return NOTHING
        given = dict(end.given)
        if self._global_loss and "loss" in given:
            given.setdefault("global_loss", given["loss"])
        frames = [Frame.scalar(name, read_scalar(given[name], name)) for name in SUMMARY_FIELDS if name in given]
        return Measured([*frames, Frame.scalar("step_time_ms", (self._clock() - self._started) * 1_000)])
