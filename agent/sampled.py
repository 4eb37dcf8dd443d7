"""`Sampled`: monitors that measure the steps that `Sampling` says, and what becomes of the values of those steps.

A step that is not computed costs a comparison a call: the monitors inside are not asked.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from ..collector.protocol.records import SUMMARY_FIELDS, Frame
from .health import Check, look
from .monitor import NOTHING, Measured, MicroBatch, Monitor, Pending, StepEnd
from .sampling import Due, Sampling

__all__ = ["Console", "Expectations", "Sampled"]

log = logging.getLogger("rankd.agent")

_ON_CONSOLE = frozenset((*SUMMARY_FIELDS, "device_loss"))


class Console:
    """`monitor_config.print_interval`: one line a step on this rank's standard output.

    Args:
        rank: stands before the line, as in merged.log.
        total_steps: None: not known.
        stream: None: standard output, whatever that is when a line is printed.
    """

    def __init__(self, rank: int, total_steps: int | None = None, stream: TextIO | None = None) -> None:
        self._rank = rank
        self._total = "?" if total_steps is None else total_steps
        self._stream = stream

    def show(self, step: int, frames: Sequence[Frame]) -> None:
        """Print the step summary that these frames hold."""
        values = "".join(f" {frame.metric} {frame.values[0]:.6g}" for frame in frames if frame.metric in _ON_CONSOLE)
        stream = self._stream or sys.stdout
        stream.write(f"[rank_{self._rank}] step {step}/{self._total}{values}\n")
        stream.flush()


class Expectations:
    """Warns, after the first step that is written, of the metrics that were asked for and did not come.

    Args:
        keys: the configuration's key of each metric.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._missing = dict(keys)

    def saw(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            self._missing.pop(frame.metric, None)

    def step_ends(self, step: int) -> None:
        """Warn of what has not been seen, and be silent from then on."""
        missing, self._missing = self._missing, {}
        if missing:
            log.warning(
                "asked for, and not given by the training loop in step %d (see Agent.micro_step and end_step): %s",
                step,
                ", ".join(missing.values()),
            )


class Sampled(Monitor):
    """The monitors `inner`, asked in the steps that are due.

    Args:
        inner: what measures.
        sampling: which steps.
        checks: look at all that is computed.
        console: where the steps that are due there are printed.
        keep: `monitor_config.exception_dump`: of a step that is computed and not written, keep what was measured, and
            record it all the same when a check finds something or the training raises in it.
        expected: what must come in the first step that is written.
    """

    def __init__(
        self,
        inner: Monitor,
        sampling: Sampling,
        *,
        checks: Sequence[Check] = (),
        console: Console | None = None,
        keep: bool = False,
        expected: Expectations | None = None,
    ) -> None:
        self._inner = inner
        self._sampling = sampling
        self._checks = checks
        self._console = console
        self._keep = keep
        self._expected = expected or Expectations({})
        self._step = 0
        self._due = Due(compute=False, write=False, console=False)
        # Of a step that is not to be written: what is kept, and whether it is to be written after all.
        self._kept: list[tuple[int, Sequence[Frame]]] = []
        self._exposed = False

    def begin_step(self, step: int, /) -> None:
        self._step, self._due, self._exposed = step, self._sampling.due(step), False
        self._kept.clear()
        if self._due.compute:
            self._inner.begin_step(step)

    def micro_step(self, batch: MicroBatch, /) -> Pending | None:
        if not self._due.compute:
            return None
        pending = self._inner.micro_step(batch)
        if pending is None:
            return None
        return Pending(lambda: self._pass_on(batch.micro_step, pending.fetch()), pending.ready)

    def end_step(self, end: StepEnd, /) -> Measured:
        if not self._due.compute:
            return NOTHING
        measured = self._inner.end_step(end)
        if self._console is not None and self._due.console and end.called:
            self._console.show(self._step, measured.frames)
        passed = self._pass_on(None, measured)
        if self._due.write and end.called:
            self._expected.step_ends(self._step)
        return passed

    def reset(self) -> Measured:
        if not self._due.compute:
            return NOTHING
        measured = self._inner.reset()
        return Measured(measured.frames, measured.remarks, (*self._taken(), *measured.earlier))

    def _pass_on(self, micro_step: int | None, measured: Measured) -> Measured:
        frames = measured.frames
        found = look(self._checks, self._step, micro_step, frames)
        remarks = (*measured.remarks, *found)
        self._exposed = self._exposed or bool(found and self._keep)
        if self._due.write:
            self._expected.saw(frames)
        if self._due.write or self._exposed:
            return Measured(frames, remarks, self._taken())
        if self._keep and micro_step is not None:
            self._kept.append((micro_step, frames))
        return Measured((), remarks)

    def _taken(self) -> tuple[tuple[int, Sequence[Frame]], ...]:
        kept = tuple(self._kept)
        self._kept.clear()
        return kept
