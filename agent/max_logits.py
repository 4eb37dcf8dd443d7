"""`callbacks: - type: MaxLogitsMonitor`: each layer's largest attention logits in a step, which are then reset.

A MindFormers model offers `get_max_attention_logit()`, a dictionary of full parameter names and the running maxima of
this rank's heads (`model` chunks have it themselves), and `reset_max_attention_logit()`, which lies below wrappers.

Whether it keeps those maxima is decided when it is built, by `track_max_attention_logit` of its configuration: each
attention module makes its buffer in its constructor. An agent is given a finished model, so there it comes too late.
`track` switches the configuration on in time: call it before the model is built. The MindFormers Trainer does the same
by itself when it reads `callbacks`. What the agent does switch on is a model that asks an attribute of its own,
`track_max_attention_logit`, at each forward pass. A model that keeps no maxima is one warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from typing import Any

from ..collector.protocol.records import Frame, NameTable
from .config import AgentConfig
from .monitor import NOTHING, Measured, Monitor, StepEnd
from .tensors import Place, Snapshot

__all__ = ["MaxLogitsMonitor", "track"]

log = logging.getLogger("rankd.agent")

_SWITCH = "track_max_attention_logit"
_GET, _RESET = "get_max_attention_logit", "reset_max_attention_logit"
# Deeper than wrappers are stacked anywhere; a cycle must not be followed for ever.
_MOST_WRAPPERS = 16


def track(config: AgentConfig, model_config: object) -> bool:
    """Switch the tracking on in a model's configuration, if MaxLogitsMonitor or Muon with `qk_clip_enabled` needs it.

    Call it before the model is built. Never switches anything off.

    Args:
        model_config: the `model:` section as a mapping, or an object with attributes.

    Returns:
        Whether it is needed.
    """
    if config.track_max_attention_logit:
        if isinstance(model_config, MutableMapping):
            model_config[_SWITCH] = True
        else:
            setattr(model_config, _SWITCH, True)
    return config.track_max_attention_logit


class MaxLogitsMonitor(Monitor):
    """Records `max_attention_logit` each `step_interval` steps, and resets the maxima after each step.

    Args:
        model: a cell, or a list of them.
        step_interval: steps between two records; None: reset only (Muon's QK clip without the callback).
        place: as in NormMonitor.
    """

    def __init__(self, model: object, step_interval: int | None, *, place: Place = "auto") -> None:
        self._chunks: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
        self._step_interval = step_interval
        self._place = place
        self._step = 0
        self._open = False
        self._table: NameTable | None = None
        self._warned = False
        for cell in (cell for chunk in self._chunks for cell in _unwrapped(chunk)):
            if getattr(cell, _SWITCH, None) is False:
                setattr(cell, _SWITCH, True)

    def begin_step(self, step: int, /) -> None:
        self._step, self._open = step, True

    def end_step(self, _end: StepEnd, /) -> Measured:
        if not self._open:
            return NOTHING
        try:
            due = self._step_interval is not None and self._step % self._step_interval == 0
            return self._collect() if due else NOTHING
        finally:
            self.reset()

    def reset(self) -> Measured:
        self._open = False
        for chunk in self._chunks:
            reset = _method(chunk, _RESET)
            if reset is not None:
                reset()
        return NOTHING

    def _collect(self) -> Measured:
        found: dict[str, Any] = {}
        for chunk in self._chunks:
            get = _method(chunk, _GET)
            found.update((get() if get is not None else None) or {})
        if not found:
            self._warn_of_nothing()
            return NOTHING
        if self._table is None or self._table.names != tuple(found):
            self._table = NameTable(tuple(found))
        values = Snapshot(list(found.values()), self._place).fetch()
        return Measured([Frame.lists("max_attention_logit", self._table, [array.tolist() for array in values])])

    def _warn_of_nothing(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "MaxLogitsMonitor: the model keeps no maxima of its attention logits; build it with "
                "model.%s: True (rankd.agent.max_logits.track sets that)",
                _SWITCH,
            )


def _unwrapped(cell: Any) -> Iterator[Any]:
    """The cell and those it wraps, outermost first."""
    for _ in range(_MOST_WRAPPERS):
        yield cell
        inner = getattr(cell, "network", None)
        if inner is None:
            inner = getattr(cell, "model", None)
        if inner is None:
            return
        cell = inner


def _method(chunk: Any, name: str) -> Any:
    return next((getattr(cell, name) for cell in _unwrapped(chunk) if callable(getattr(cell, name, None))), None)
