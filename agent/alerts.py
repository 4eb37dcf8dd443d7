"""Pure: finds values that have crossed a line of `rankd.alerts`.

A crossing is told once, and again only after the metric was back within its line. The same alert is told at most every
QUIET_STEPS steps, because each time may mean a step written and a checkpoint saved; what was left out is counted in the
next line. A crossing that lasts longer than that is told, however soon after another it began.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..collector.config import AlertConfig
from ..collector.protocol.records import Frame
from ..collector.protocol.wording import counted
from .anomaly import Anomaly
from .health import ANOMALY, name_of, place
from .monitor import Remark

__all__ = ["QUIET_STEPS", "Alerts", "Window", "described"]

# A spike that comes back with each learning rate cycle or data shard is then a line each time, one that comes every
# few steps is not.
QUIET_STEPS = 100


def described(alert: AlertConfig) -> str:
    """The line, for a person: `above 10`."""
    if alert.times is not None:
        return f"above {alert.times:g} times the median of the last {counted(alert.window, 'value')}"
    return f"above {alert.above:g}" if alert.above is not None else f"below {alert.below:g}"


class Window:
    """The median of the last `size` values, which must be finite."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._in_order: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        """Take the newest value in; the oldest one falls out."""
        if len(self._in_order) == self._size:
            del self._sorted[bisect_left(self._sorted, self._in_order.popleft())]
        self._in_order.append(value)
        insort(self._sorted, value)

    @property
    def median(self) -> float | None:
        """None until there are `size` values."""
        if len(self._in_order) < self._size:
            return None
        middle = self._size // 2
        upper = self._sorted[middle]
        return upper if self._size % 2 else (self._sorted[middle - 1] + upper) / 2


class Alerts:
    """Looks at what was measured; see the module's text.

    Args:
        alerts: the lines.
        rank: whose values these are.
        warmup_steps: global steps at the start of the training in which nothing is told; their values count for what
            is usual.
    """

    def __init__(self, alerts: Iterable[AlertConfig], rank: int, warmup_steps: int = 0) -> None:
        self._rank = rank
        self._warmup_steps = warmup_steps
        self._by_metric: dict[str, list[_Alert]] = {}
        for alert in alerts:
            self._by_metric.setdefault(alert.metric, []).append(_Alert(alert))

    def look(self, step: int, micro_step: int | None, frames: Sequence[Frame]) -> list[Remark]:
        """The remarks about these frames of one position."""
        return [
            remark
            for frame in frames
            if (alerts := self._by_metric.get(frame.metric)) is not None
            for remark in self._look(step, micro_step, frame, alerts)
        ]

    def _look(self, step: int, micro_step: int | None, frame: Frame, alerts: Iterable[_Alert]) -> list[Remark]:
        values: Sequence[float] = frame.values
        # As in NanCheck: the usual case without asking each value.
        if not math.isfinite(sum(values)):
            values = [value for value in values if math.isfinite(value)]
        if not values:
            return []
        tells = step > self._warmup_steps
        found = [alert.take(step, values, tells) for alert in alerts]
        return [self._remark(step, micro_step, frame, crossing) for crossing in found if crossing is not None]

    def _remark(self, step: int, micro_step: int | None, frame: Frame, crossing: _Crossing) -> Remark:
        name = name_of(frame, frame.values.index(crossing.value))
        text = f"{frame.metric} is {crossing.value:.6g}, {crossing.line}, at {place(step, micro_step)}"
        if name is not None:
            text += f": {name} ({crossing.count} of {counted(len(frame.values), 'value')})"
        if crossing.untold:
            text += f"; {counted(crossing.untold, 'more time')} since step {crossing.told_at}, not told"
        return Remark(ANOMALY, text, Anomaly(step, micro_step, self._rank, frame.metric, crossing.value, name, text))


@dataclass(frozen=True, slots=True)
class _Crossing:
    """What there is to tell: the worst value, how many there are, the line, and what was left out since `told_at`."""

    value: float
    count: int
    line: str
    untold: int
    told_at: int | None


class _Alert:
    """One alert: its line, and what it has told."""

    def __init__(self, alert: AlertConfig) -> None:
        self._alert = alert
        self._window = None if alert.times is None else Window(alert.window)
        self._outside = False
        self._told = False
        self._told_at: int | None = None
        self._untold = 0

    def take(self, step: int, values: Sequence[float], tells: bool) -> _Crossing | None:
        """Look at the finite values of one frame, at least one; None: nothing to tell."""
        if self._alert.below is not None:
            worst, line = min(values), self._alert.below
            outside = worst < line
        else:
            worst = max(values)
            line = self._above(worst)
            outside = worst > line
        if not tells:
            return None
        if not outside:
            self._outside = self._told = False
            return None
        if self._told:
            return None
        began, self._outside = not self._outside, True
        if self._told_at is not None and 0 <= step - self._told_at < QUIET_STEPS:
            self._untold += began
            return None
        crossing = _Crossing(
            worst, self._count(values, line), self._said(line), self._untold - (not began), self._told_at
        )
        self._told, self._told_at, self._untold = True, step, 0
        return crossing

    def _above(self, newest: float) -> float:
        """What must not be exceeded; the newest value counts for the next line."""
        alert, window = self._alert, self._window
        if window is None:
            return math.inf if alert.above is None else alert.above
        median = window.median
        window.add(newest)
        # Four times nothing is nothing: there is no telling what is usual.
        return math.inf if median is None or median <= 0 or alert.times is None else alert.times * median

    def _count(self, values: Sequence[float], line: float) -> int:
        if self._alert.below is not None:
            return sum([value < line for value in values])
        return sum([value > line for value in values])

    def _said(self, line: float) -> str:
        said = described(self._alert)
        return said if self._alert.times is None else f"above {line:.6g} ({said.removeprefix('above ')})"
