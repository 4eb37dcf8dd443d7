"""The rank's side of a profiling session: drives the profiler along its plan, and checks what it wrote.

Nothing that the profiler does wrong reaches the training loop: it costs the session, with one warning.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from ..collector.protocol.errors import ProfilerError
from .plan import Action, Plan, State, Window

__all__ = ["CLOSE_TIMEOUT", "Profiler", "ProfilerOptions", "ProfilerSession", "SessionReport"]

logger = logging.getLogger("rankd.profiler_ctl")

# MindSpore's analysis takes 1 s on a CPU and minutes for a large Level2 capture; the job's exit must not hang on it.
CLOSE_TIMEOUT = 120.0
# Parsing JSON holds the GIL, some 10 ms a MiB, in the training process. Of a larger trace only the ends are looked at.
_PARSED_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class ProfilerOptions:
    """What is collected: the keys of SPEC.md section 5 that are handed to MindSpore.

    Attributes:
        level: 0, 1, 2; any other is `LevelNone`.
        mstx: light-weight marks.
        memory: memory of tensors.
        cpu: the CPU activity.
        stack: Python call stacks.
    """

    level: int = 0
    mstx: bool = False
    memory: bool = False
    cpu: bool = True
    stack: bool = True


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
    """

    state: State
    steps: tuple[int, ...]
    path: Path | None
    bytes: int
    reason: str | None


def mindspore_profiler(options: ProfilerOptions, rank_dir: Path, steps: int) -> Profiler:
    """MindSpore's profiler, imported now."""
    from .mindspore_profiler import MindSporeProfiler

    return MindSporeProfiler(options, rank_dir, steps)


class ProfilerSession:
    """One session. The profiler is constructed where the window's first step begins, and on no other rank.

    MindSpore's profiler is one per process: finish a session before the next one begins.

    Args:
        window: the global steps to record.
        options: what to collect.
        rank_dir: `output_path/rank_x`; created when the recording starts.
        profiler: makes the profiler.
        skip: why this rank does not take part; None: it does.
    """

    def __init__(
        self,
        window: Window,
        options: ProfilerOptions,
        rank_dir: Path,
        profiler: ProfilerFactory = mindspore_profiler,
        *,
        skip: str | None = None,
    ) -> None:
        self._plan = Plan(window, skip)
        self._options = options
        self._rank_dir = rank_dir
        self._factory = profiler
        self._profiler: Profiler | None = None
        self._found_before: frozenset[Path] = frozenset()
        self._output: tuple[Path, int] | None = None

    @property
    def report(self) -> SessionReport:
        """What became of it so far."""
        path, size = self._output or (None, 0)
        return SessionReport(self._plan.state, tuple(self._plan.steps), path, size, self._plan.reason)

    def step_begin(self, step: int) -> None:
        """The global step `step` begins. Never raises."""
        self._drive(lambda: self._plan.step_begin(step), step)

    def step_end(self, step: int) -> None:
        """The global step `step` ends. Never raises."""
        self._drive(lambda: self._plan.step_end(step), step)

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Training is over: end a recording early, wait at most `timeout` seconds for the output. Never raises."""
        # Twice: a recording is stopped first, and then awaited.
        for _ in range(2):
            self._drive(self._plan.closed, 0, timeout)

    def _drive(self, event: Callable[[], Action], step: int, timeout: float = 0.0) -> None:
        try:
            self._perform(event(), step, timeout)
        except Exception as error:  # noqa: BLE001 a profiler may raise anything, and none of it is worth the training
            self._fail(error)

    def _perform(self, action: Action, step: int, timeout: float) -> None:
        if action is Action.START:
            self._start(self._plan.window.end_step - step + 1)
            return
        profiler = self._profiler
        if action is Action.NOTHING or profiler is None:
            return
        if action in (Action.STEP, Action.LAST_STEP):
            profiler.step()
        if action in (Action.LAST_STEP, Action.STOP):
            profiler.stop()
        if action in (Action.POLL, Action.AWAIT):
            if profiler.wait(timeout):
                self._output = _check_output(self._rank_dir, self._found_before)
                self._plan.written()
                self._profiler = None
            elif action is Action.AWAIT:
                raise ProfilerError(f"the profiler had not written its output after {timeout:.0f} s")

    def _start(self, steps: int) -> None:
        # MindSpore only logs a path that it cannot write; here it is an error with a reason.
        self._rank_dir.mkdir(parents=True, exist_ok=True)
        self._found_before = _directories(self._rank_dir)
        self._profiler = self._factory(self._options, self._rank_dir, steps)

    def _fail(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        profiler, self._profiler = self._profiler, None
        if not self._plan.state.final:
            self._plan.failed(reason)
        logger.warning("profiling of steps %s stopped, training goes on: %s", self._plan.window, reason)
        if profiler is not None:
            try:
                profiler.abandon()
            except Exception:
                # It has failed already, and that has been said.
                logger.debug("the failed profiler could not be stopped", exc_info=True)


def _directories(rank_dir: Path) -> frozenset[Path]:
    return frozenset(path for path in rank_dir.iterdir() if path.is_dir())


def _check_output(rank_dir: Path, before: frozenset[Path]) -> tuple[Path, int]:
    """The directory that was written since, and its size.

    Raises:
        ProfilerError: there is none, it is empty, or its trace_view.json is missing or cannot be read.
    """
    new = _directories(rank_dir) - before
    if not new:
        raise ProfilerError(f"the profiler wrote nothing to {rank_dir}; its own log lines above may say why")
    # MindSpore names it HOST_PID_TIME_ascend_ms: the last one is this session's.
    output = max(new, key=lambda path: path.name)
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    if not size:
        raise ProfilerError(f"{output} holds no data")
    traces = sorted(output.rglob("trace_view.json"))
    if not traces:
        raise ProfilerError(f"{output} holds no trace_view.json (on a CPU, profile_cpu must be on for that)")
    for trace in traces:
        _check_trace(trace)
    return output, size


def _check_trace(trace: Path) -> None:
    with trace.open("rb") as file:
        size = trace.stat().st_size
        if size > _PARSED_BYTES:
            first = file.read(16).lstrip()[:1]
            file.seek(-16, 2)
            if first + file.read().rstrip()[-1:] not in (b"[]", b"{}"):
                raise ProfilerError(f"{trace} ({size} bytes) is cut off")
            return
        try:
            events = json.loads(file.read())
        except ValueError as error:
            raise ProfilerError(f"{trace} is not JSON: {error}") from None
        if not events:
            raise ProfilerError(f"{trace} holds no events")
