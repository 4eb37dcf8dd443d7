"""A training without a framework: cells, parameters and a loop over monitors, for tests of what measures.

The cells stand for MindSpore's, which are the outside of this project: they have the attributes and methods that rankd
asks for, hold numpy arrays, and count how often they are asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rankd.agent.config import AgentConfig
from rankd.agent.monitor import Measured, MicroBatch, Monitor, StepEnd
from rankd.agent.monitors import build_monitors, sampling_of
from rankd.collector.protocol.records import Frame, Level

__all__ = ["Expert", "Log", "Model", "Parameter", "run", "run_step", "values"]


class Parameter:
    """A parameter by its name; hooks are counted."""

    def __init__(self, name: str, asked: Counter[str]) -> None:
        self.name = name
        self._asked = asked

    def register_hook(self, hook: object) -> None:
        self._asked["register_hook"] += 1


class Expert:
    """An MoE module: `tokens_per_expert` counts on and on, and each reading of it is counted."""

    def __init__(self, experts: int = 3) -> None:
        self._tokens: Any = np.zeros(experts, np.float32)
        self.readings = 0

    @property
    def tokens_per_expert(self) -> Any:
        self.readings += 1
        return self._tokens

    def receive(self, *tokens: float) -> None:
        """A forward pass."""
        self._tokens += np.array(tokens, np.float32)

    def zero(self) -> None:
        """The framework's reset, in place."""
        self._tokens[:] = 0

    def replace(self) -> None:
        """The framework's reset as MindFormers does it: another tensor."""
        self._tokens = np.zeros_like(self._tokens)


class Model:
    """A cell with the given cells below it; counts what it is asked.

    Attributes:
        asked: calls by method.
        logits: running maxima by parameter name.
    """

    def __init__(self, cells: Mapping[str, object] | None = None, parameters: Sequence[str] = ("a", "b")) -> None:
        self.asked: Counter[str] = Counter()
        self.logits: dict[str, Any] = {}
        self._cells = dict(cells or {})
        self._parameters = [Parameter(name, self.asked) for name in parameters]

    def cells_and_names(self) -> Iterator[tuple[str, object]]:
        self.asked["cells_and_names"] += 1
        yield "", self
        yield from self._cells.items()

    def trainable_params(self) -> list[Parameter]:
        self.asked["trainable_params"] += 1
        return self._parameters

    def get_max_attention_logit(self) -> dict[str, Any]:
        self.asked["get_max_attention_logit"] += 1
        return self.logits

    def reset_max_attention_logit(self) -> None:
        self.asked["reset_max_attention_logit"] += 1
        for largest in self.logits.values():
            largest[:] = 0


@dataclass
class Log:
    """What came out of a training: frames and remarks by (step, micro_step), and errors."""

    frames: list[tuple[int, int | None, Frame]] = field(default_factory=list)
    remarks: list[tuple[int, int | None, str]] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)

    def take(self, step: int, micro_step: int | None, measured: Measured) -> None:
        for earlier, frames in measured.earlier:
            self.take(step, earlier, Measured(frames))
        for frame in measured.frames:
            frame.check(Level.STEP if micro_step is None else Level.MICRO_STEP)
            self.frames.append((step, micro_step, frame))
        self.remarks += [(step, micro_step, f"{remark.kind} {remark.text}") for remark in measured.remarks]

    def trouble(self, where: str, error: Exception) -> None:
        self.errors.append((where, str(error)))


def run_step(
    monitor: Monitor,
    log: Log,
    step: int,
    micro_steps: int = 4,
    *,
    loss: Callable[[int, int], object] = lambda _step, _micro: None,
    grads: Callable[[int, int], Sequence[object] | None] = lambda _step, _micro: None,
    forward: Callable[[int, int], None] = lambda _step, _micro: None,
    end: Mapping[str, object] | None = None,
    fails_after: int | None = None,
) -> None:
    """One step as the agent drives it; `fails_after` abandons it after that many micro-steps."""
    monitor.begin_step(step)
    for micro in range(1, micro_steps + 1):
        forward(step, micro)
        pending = monitor.micro_step(MicroBatch(step, micro, loss(step, micro), grads(step, micro)))
        if pending is not None:
            log.take(step, micro, pending.fetch())
        if micro == fails_after:
            log.take(step, None, monitor.reset())
            return
    log.take(step, None, monitor.end_step(StepEnd(dict(end or {}))))
    # The agent's own, when the step's context is left.
    log.take(step, None, monitor.end_step(StepEnd(called=False)))


def run(config: Mapping[str, object], model: object = None, steps: Sequence[int] = (1, 2, 3), **options: Any) -> Log:
    """A training under this configuration."""
    log = Log()
    read = AgentConfig.from_mapping(config)
    monitors = build_monitors(read, model, 3, 100, None, sampling_of(read), log.trouble)
    for step in steps:
        run_step(monitors, log, step, **options)
    return log


def values(log: Log, metric: str) -> dict[tuple[int, int | None], object]:
    """The values of a metric by position: a float, a dictionary by name, or one of lists."""
    out: dict[tuple[int, int | None], object] = {}
    for step, micro, frame in log.frames:
        if frame.metric != metric:
            continue
        if frame.table is None:
            out[step, micro] = frame.values[0]
        else:
            column = frame.values if frame.counts is None else [list(group) for group in frame.groups]
            out[step, micro] = dict(zip(frame.names, column, strict=True))
    return out
