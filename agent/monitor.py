"""`Monitor`: what measures something, as the agent sees it. Several are one: `Monitors`; none is an empty one.

A monitor that nothing asks for is not built (`monitors.py`), so nothing here or in the training loop asks whether
something is on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from ..collector.protocol.records import Frame
from .anomaly import Anomaly

__all__ = ["NOTHING", "Measured", "MicroBatch", "Monitor", "Monitors", "Pending", "Remark", "StepEnd"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Remark:
    """A line of rankd's own for the rank's log, at the place of what was measured: `# KIND TEXT`.

    Attributes:
        kind, text: the line.
        anomaly: what the line tells of, where it is one.
    """

    kind: str
    text: str
    anomaly: Anomaly | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What one micro-step, or the end of a step, has to record.

    Attributes:
        frames: the values.
        remarks: what there is to say about them.
        earlier: frames of earlier micro-steps of this step that were kept back until now, by micro_step.
    """

    frames: Sequence[Frame] = ()
    remarks: Sequence[Remark] = ()
    earlier: Sequence[tuple[int, Sequence[Frame]]] = ()


NOTHING = Measured()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch whose forward and backward pass are through, as the training loop gave it.

    Attributes:
        step, micro_step: where it stands, both 1-based.
        loss: a number or a tensor of one element; None: not given.
        grads: one for each trainable parameter; None: not given.
    """

    step: int
    micro_step: int
    loss: object = None
    grads: Sequence[object | None] | None = None


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The end of a step, after the update of the parameters.

    Attributes:
        given: what the training loop passed to `Agent.end_step`, by name, without what is None.
        called: False where the step ended without that call.
    """

    given: Mapping[str, object] = field(default_factory=dict)
    called: bool = True


class Pending:
    """What a micro-step measured, perhaps still on a device.

    Args:
        collect: gives it; called once, and waits for the device if it has to.
        ready: it does not have to.
    """

    __slots__ = ("_collect", "ready")

    def __init__(self, collect: Callable[[], Measured], ready: bool = True) -> None:
        self._collect = collect
        self.ready = ready

    def fetch(self) -> Measured:
        """What was measured."""
        return self._collect()


class Monitor:
    """Measures on the training thread, one step at a time. What it raises costs its own values only.

    This one measures nothing; override what is needed.
    """

    def begin_step(self, _step: int, /) -> None:
        """A step begins; the one before it has ended, or was abandoned."""

    def micro_step(self, _batch: MicroBatch, /) -> Pending | None:
        """A micro-batch is through; None: nothing to record. What the last call gave has been fetched by now."""
        return None

    def end_step(self, _end: StepEnd, /) -> Measured:
        """The step ends; it may do so more than once, and then has nothing new to tell."""
        return NOTHING

    def reset(self) -> Measured:
        """The step is abandoned (an exception): forget it. What is to be recorded of it all the same."""
        return NOTHING


class Monitors(Monitor):
    """Several monitors as one. An error of one goes to `trouble` and costs the others nothing.

    Args:
        trouble: takes where it happened, and the error.
    """

    def __init__(self, monitors: Sequence[Monitor], trouble: Callable[[str, Exception], None]) -> None:
        self._monitors = tuple(monitors)
        self._trouble = trouble

    def begin_step(self, step: int, /) -> None:
        for monitor in self._monitors:
            self._shielded(monitor, "begin_step", monitor.begin_step, step)

    def micro_step(self, batch: MicroBatch, /) -> Pending:
        pending = []
        for monitor in self._monitors:
            part = self._shielded(monitor, "micro_step", monitor.micro_step, batch)
            if part is not None:
                pending.append((monitor, part))

        def collect() -> Measured:
            return _together([self._shielded(monitor, "micro_step", part.fetch) for monitor, part in pending])

        return Pending(collect, all(part.ready for _, part in pending))

    def end_step(self, end: StepEnd, /) -> Measured:
        return _together([self._shielded(m, "end_step", m.end_step, end) for m in self._monitors])

    def reset(self) -> Measured:
        return _together([self._shielded(m, "reset", m.reset) for m in self._monitors])

    def _shielded(
        self, monitor: Monitor, where: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        try:
            return call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not stop the training or the others
            self._trouble(f"{type(monitor).__name__}.{where}", error)
            return None


def _together(parts: Sequence[Measured | None]) -> Measured:
    whole = [part for part in parts if part is not None]
    return Measured(
        [frame for part in whole for frame in part.frames],
        [remark for part in whole for remark in part.remarks],
        [kept for part in whole for kept in part.earlier],
    )
