"""One profiling session on one rank: drives the profiler along its plan, and checks what it wrote.

Nothing that the profiler does wrong reaches the training loop: it costs the session, with one warning.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from ..collector.protocol.errors import ProfilerError
from .asked import STATIC, ProfilerOptions
from .checks import Checked, StepTime, check_output, directories, new_directory
from .plan import Action, Plan, State, Window

__all__ = ["CLOSE_TIMEOUT", "RECEIPT", "Profiler", "ProfilerOptions", "ProfilerSession", "SessionReport"]

logger = logging.getLogger("rankd.profiler_ctl")

# MindSpore's analysis takes 1 s on a CPU and minutes for a large Level2 capture; the job's exit must not hang on it.
CLOSE_TIMEOUT = 120.0
# While training goes on: an analysis that takes longer than this has gone wrong.
_EXPORT_TIMEOUT = 3_600.0
# What rankd adds to a profiler's output: the steps that are in it.
RECEIPT = "rankd.json"


class Profiler(Protocol):
    """What a session needs of a profiler. It records from its construction on."""

    def step(self) -> None:
        """A recorded step has ended."""

    def stop(self) -> None:
        """End the recording and start to write what there is."""

    def wait(self, seconds: float) -> bool:
        """Whether all is written, after waiting at most `seconds` for it."""

    def abandon(self) -> None:
        """Let go, whatever state it is in."""


# Called with the options, the directory of this rank and the number of steps to come.
ProfilerFactory: TypeAlias = Callable[[ProfilerOptions, Path, int], Profiler]


@dataclass(frozen=True, slots=True)
class SessionReport:
    """What became of a session.

    Attributes:
        state: how far it is.
        steps: the global steps that were recorded in full.
        path: the directory the profiler wrote, once checked.
        bytes: the size of the files in it.
        reason: why it failed, was skipped, or holds fewer steps than asked for.
        seconds: how long the export took after the last step; None: there was none.
        covered: see `checks.Checked`.
    """

    state: State
    steps: tuple[int, ...]
    path: Path | None
    bytes: int
    reason: str | None
    seconds: float | None = None
    covered: bool | None = None


def mindspore_profiler(options: ProfilerOptions, rank_dir: Path, steps: int) -> Profiler:
    """MindSpore's profiler, imported now."""
    from .mindspore_profiler import MindSporeProfiler

    return MindSporeProfiler(options, rank_dir, steps)


class ProfilerSession:
    """One session. The profiler is constructed where the window's first step begins, and on no other rank.

    MindSpore records one session at a time in a process; the analysis of one may still run while the next one records.

    Args:
        window: the global steps to record; None: the session is proposed, and its window is agreed on.
        options: what to collect.
        rank_dir: `output_path/rank_x`; created when the recording starts.
        profiler: makes the profiler.
        skip: why this rank does not take part; None: it does.
        name: of the session.
        lock: is held while the plan changes, and not while the profiler works. The steps come from the training
            thread, what is said of the session from the sender's.
    """

    def __init__(
        self,
        window: Window | None,
        options: ProfilerOptions,
        rank_dir: Path,
        profiler: ProfilerFactory = mindspore_profiler,
        *,
        skip: str | None = None,
        name: str = STATIC,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self.name = name
        self.plan = Plan(window, skip)
        self.options = options
        self.rank_dir = rank_dir
        self._factory = profiler
        self._lock = lock or threading.RLock()
        self._profiler: Profiler | None = None
        self._found_before: frozenset[Path] = frozenset()
        self._began = 0.0
        self._times: list[StepTime] = []
        self._stopped_at = 0.0
        self._checked: Checked | None = None

    @property
    def report(self) -> SessionReport:
        """What became of it so far."""
        plan, found = self.plan, self._checked
        with self._lock:
            if found is None:
                return SessionReport(plan.state, tuple(plan.steps), None, 0, plan.reason)
            seconds = round(max(0.0, found.written - self._stopped_at), 3)
            done = (plan.state, tuple(plan.steps), found.path, found.bytes, plan.reason)
            return SessionReport(*done, seconds, found.covered)

    def step_begin(self, step: int) -> None:
        """The global step `step` begins. Never raises."""
        self._drive(lambda: self.plan.step_begin(step), step)
        self._began = time.time()

    def step_end(self, step: int) -> None:
        """The global step `step` ends. Never raises."""
        ended = time.time()
        self._drive(lambda: self._recorded(step, ended), step)

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Training is over: end a recording early, wait at most `timeout` seconds for the output. Never raises."""
        # Twice: a recording is stopped first, and then awaited.
        for _ in range(2):
            self._drive(self.plan.closed, 0, timeout)

    def _recorded(self, step: int, ended: float) -> Action:
        before = len(self.plan.steps)
        action = self.plan.step_end(step)
        if len(self.plan.steps) > before:
            self._times.append(StepTime(step, self._began, ended))
        return action

    def _drive(self, event: Callable[[], Action], step: int, timeout: float = 0.0) -> None:
        try:
            with self._lock:
                action = event()
            self._perform(action, step, timeout)
        except Exception as error:  # noqa: BLE001 a profiler may raise anything, and none of it is worth the training
            self._fail(error)

    def _perform(self, action: Action, step: int, timeout: float) -> None:
        if action is Action.START:
            self._start(step)
            return
        profiler = self._profiler
        if action is Action.NOTHING or profiler is None:
            return
        if action in (Action.STEP, Action.LAST_STEP):
            profiler.step()
        if action in (Action.LAST_STEP, Action.STOP):
            self._stopped_at = time.time()
            profiler.stop()
        if action in (Action.POLL, Action.AWAIT):
            self._look(profiler, action, timeout)

    def _look(self, profiler: Profiler, action: Action, timeout: float) -> None:
        if profiler.wait(timeout):
            self._checked = check_output(new_directory(self.rank_dir, self._found_before), self._times)
            with self._lock:
                self.plan.written()
            self._profiler = None
            self._leave_receipt()
        elif action is Action.AWAIT:
            raise ProfilerError(f"the profiler had not written its output after {timeout:g} s")
        elif time.time() - self._stopped_at > _EXPORT_TIMEOUT:
            raise ProfilerError(f"the profiler had not written its output after {_EXPORT_TIMEOUT:g} s")

    def _start(self, step: int) -> None:
        assert self.plan.window is not None
        # MindSpore only logs a path that it cannot write; here it is an error with a reason.
        self.rank_dir.mkdir(parents=True, exist_ok=True)
        self._found_before = directories(self.rank_dir)
        self._profiler = self._factory(self.options, self.rank_dir, self.plan.window.end_step - step + 1)

    def _leave_receipt(self) -> None:
        """The steps and their times beside what the profiler wrote, which does not say them on a CPU."""
        report = self.report
        if report.path is None:
            return
        receipt = {
            "version": 1,
            "session": self.name,
            "window": str(self.plan.window),
            "options": asdict(self.options),
            "bytes": report.bytes,
            "export_seconds": report.seconds,
            "steps": [asdict(each) for each in self._times],
        }
        try:
            (report.path / RECEIPT).write_text(json.dumps(receipt, indent=1) + "\n")
        except OSError as error:
            logger.warning("%s cannot be written: %s", report.path / RECEIPT, error.strerror)

    def _fail(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        profiler, self._profiler = self._profiler, None
        with self._lock:
            if not self.plan.state.final:
                self.plan.failed(reason)
        logger.warning("profiling of %s stopped, training goes on: %s", self.plan.planned, reason)
        if profiler is not None:
            try:
                profiler.abandon()
            except Exception:
                # It has failed already, and that has been said.
                logger.debug("the failed profiler could not be stopped", exc_info=True)
