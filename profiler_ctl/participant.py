"""The rank's side of all profiling sessions of one process: what is said of them, the steps, and what is reported.

Two threads meet here. What the collector says comes on the agent's sender thread and changes plans only; the steps come
on the training thread, which alone touches the profiler. One lock lies around every change of a plan, and none around
the profiler's own work. So a window that is decided while its first step begins is either in time or too late, and the
sender thread never waits for the profiler.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from ..collector.protocol.errors import ConfigError, ProfilerError, RecordError
from ..collector.protocol.ranges import steps_text
from ..collector.protocol.wording import counted
from .agreement import UNKNOWN
from .asked import KIND, STATIC, Asked, Body, ProfilerOptions, Value, estimated_bytes, integer, text
from .config import ProfilerConfig
from .plan import State, Window
from .session import CLOSE_TIMEOUT, Profiler, ProfilerFactory, ProfilerSession, mindspore_profiler

__all__ = ["Participant", "obstacle"]

logger = logging.getLogger("rankd.profiler_ctl")

# An armed rank that hears nothing more is let go of after so many seconds: the collector decides within a fraction.
ARMED_FOR = 120.0
# Sessions that are over and remembered, so that what comes late finds them over.
_REMEMBERED = 256
# Left free on the disk in any case.
_KEPT_FREE = 64 * 2**20

Examine: TypeAlias = Callable[[Asked, Path, int | None], str | None]


def obstacle(asked: Asked, rank_dir: Path, measured: int | None) -> str | None:
    """Why this rank cannot profile: no MindSpore, a directory that cannot be written, too little disk. None: it can.

    MindSpore is looked for and not imported.

    Args:
        measured: bytes a step of an earlier session; None: there was none.
    """
    if importlib.util.find_spec("mindspore") is None:
        return "MindSpore is not installed here"
    existing = next(path for path in (rank_dir, *rank_dir.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} cannot be written to"
    free = os.statvfs(existing)
    free_bytes = free.f_bavail * free.f_frsize
    needed = estimated_bytes(asked.options, asked.steps, measured) + _KEPT_FREE
    if free_bytes < needed:
        return f"too little disk: {free_bytes} bytes are free in {existing}, and about {needed} are needed"
    return None


def _on_a_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="rankd-profile-arm", daemon=True).start()


class Participant:
    """The sessions of this process, the configuration's among them.

    Args:
        rank: who this is.
        config: the `profiler:` section.
        report: takes a report for the collector; called with a lock held, so it must not wait.
        cwd: where relative paths count from.
        profiler: makes the profiler.
        examine: see `obstacle`.
        aside: runs what may wait for a file system, not on the sender's thread.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        rank: int,
        config: ProfilerConfig,
        report: Callable[[Body], None],
        *,
        cwd: Path,
        profiler: ProfilerFactory = mindspore_profiler,
        examine: Examine = obstacle,
        aside: Callable[[Callable[[], None]], None] = _on_a_thread,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._config = config
        self._report = report
        self._cwd = cwd
        self._factory = profiler
        self._examine = examine
        self._aside = aside
        self._clock = clock
        # Around every change of a plan and of what follows here; never while the profiler works.
        self._lock = threading.RLock()
        self._sessions: dict[str, ProfilerSession] = {}
        self._armed_at: dict[str, float] = {}
        self._reported: dict[str, State] = {}
        self._noted: set[str] = set()
        # Sessions that another process was asked for: they are over here.
        self._unknown: dict[str, None] = {}
        self._serial = 0
        self._step = 0
        self._closed = False
        if config.chooses(rank):
            window = Window(config.start_step, config.end_step)
            self._add(STATIC, window, _options(config), config.directory(rank, cwd))

    def session(self, name: str) -> ProfilerSession | None:
        """A session that this process was asked for."""
        return self._sessions.get(name)

    # -- what the collector says (the sender's thread) ----------------------------------------------------------------

    def command(self, body: Body) -> tuple[()]:
        """A command of the collector; every one is answered with a report, by `report` and not by what is returned.

        Raises:
            RecordError: it is none.
        """
        handlers: Mapping[str, Callable[[str, Body], None]] = {
            "propose": self._propose,
            "commit": self._commit,
            "abort": self._abort,
            "stop": self._stop,
        }
        what, name = text(body, "do"), text(body, "session")
        if what not in handlers or not name:
            raise RecordError(f"{KIND}: no such command: {what!r} for session {name!r}")
        with self._lock:
            if self._closed:
                return ()
            handlers[what](name, body)
            if name in self._sessions:
                self._tell(self._sessions[name])
            else:
                self._unknown[name] = None
                self._send({"session": name, "state": UNKNOWN})
            self._forget()
        return ()

    def _propose(self, name: str, body: Body) -> None:
        # Proposed again, or called off before this came.
        if name in self._sessions or name in self._unknown:
            return
        asked = Asked.from_body(body)
        session = self._add(name, None, asked.options, self._directory(asked))
        busy = self._busy(asked.at, asked.steps, session)
        if busy is None and asked.at is not None and asked.at <= self._step:
            busy = f"step {asked.at} is past: this rank is at step {self._step}"
        if busy is not None:
            session.plan.refused(busy)
            return
        measured = integer(body, "bytes_per_step")
        self._aside(lambda: self._look(session, asked, measured))

    def _look(self, session: ProfilerSession, asked: Asked, measured: int | None) -> None:
        try:
            found = self._examine(asked, session.rank_dir, measured)
        except Exception as error:  # noqa: BLE001 - whatever it is, the answer is no
            found = f"{type(error).__name__}: {error}"
        with self._lock:
            if session.plan.state is not State.PROPOSED:
                return
            if found is None:
                session.plan.passed()
                self._armed_at[session.name] = self._clock()
            else:
                session.plan.refused(found)
            self._tell(session)

    def _commit(self, name: str, body: Body) -> None:
        asked = Asked.from_body(body)
        start, end = integer(body, "start"), integer(body, "end")
        try:
            window = Window(start or 0, end or 0)
        except ConfigError as error:
            raise RecordError(f"{KIND}: {name}: {error}") from None
        session = self._sessions.get(name)
        if session is None:
            if name != STATIC:
                return
            # This rank's own configuration does not choose it, and rank 0's does.
            session = self._add(name, window, asked.options, self._directory(asked))
            if self._step >= window.start_step:
                session.plan.abort(f"this rank is at step {self._step}, and its own configuration did not choose it")
            return
        plan = session.plan
        waits = plan.state is State.ARMED or (plan.state is State.PLANNED and not plan.exact)
        busy = self._busy(window.start_step, len(window), session) if plan.state is State.ARMED else None
        if busy is not None:
            plan.abort(busy)
            return
        plan.commit(window, self._step)
        if name == STATIC and waits and plan.window == window:
            session.options, session.rank_dir = asked.options, self._directory(asked)

    def _abort(self, name: str, body: Body) -> None:
        session = self._sessions.get(name)
        if session is not None:
            session.plan.abort(text(body, "reason", "called off"))

    def _stop(self, name: str, body: Body) -> None:
        session = self._sessions.get(name)
        if session is not None:
            session.plan.stop(text(body, "reason", "stopped"))

    # -- what training does (the training thread) ---------------------------------------------------------------------

    def step_begin(self, step: int) -> None:
        """The global step `step` begins. Never raises."""
        for session in self._live(step):
            session.step_begin(step)
            self._changed(session)

    def step_end(self, step: int) -> None:
        """The global step `step` ends. Never raises."""
        for session in self._live(step):
            session.step_end(step)
            self._changed(session)

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Training is over: see `ProfilerSession.close`; `timeout` is for all sessions together. Never raises."""
        deadline = self._clock() + timeout
        for session in self._live(self._step):
            session.close(max(0.0, deadline - self._clock()))
            self._changed(session)
        with self._lock:
            self._closed = True

    def notes(self) -> list[str]:
        """A line for this rank's log for each session that has come to its end here since the last call."""
        if len(self._noted) == len(self._sessions):
            return []
        with self._lock:
            over = [s for s in self._sessions.values() if s.plan.state.final and s.name not in self._noted]
            self._noted.update(session.name for session in over)
        # What never began here stands in the collector's lines.
        return [_note(s) for s in over if s.name == STATIC or s.plan.state in (State.DONE, State.FAILED, State.MISSED)]

    def _live(self, step: int) -> list[ProfilerSession]:
        with self._lock:
            # First: a window that is decided from here on is too late for this step.
            self._step = step
            if not self._sessions:
                return []
            for name, since in list(self._armed_at.items()):
                session = self._sessions[name]
                if session.plan.state is not State.ARMED:
                    del self._armed_at[name]
                elif self._clock() - since > ARMED_FOR:
                    session.plan.abort(f"nothing was decided within {ARMED_FOR:g} s")
                    self._tell(session)
            return [session for session in self._sessions.values() if not session.plan.state.final]

    def _changed(self, session: ProfilerSession) -> None:
        if self._reported.get(session.name) is not session.plan.state:
            with self._lock:
                self._tell(session)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _add(self, name: str, window: Window | None, options: ProfilerOptions, rank_dir: Path) -> ProfilerSession:
        def make(options: ProfilerOptions, rank_dir: Path, steps: int) -> Profiler:
            others = (s for s in self._sessions.values() if s.name != name and s.plan.state is State.RECORDING)
            busy = next(others, None)
            if busy is not None:
                raise ProfilerError(f"the profiler is busy with session {busy.name} ({busy.plan.planned})")
            return self._factory(options, rank_dir, steps)

        session = ProfilerSession(window, options, rank_dir, make, name=name, lock=self._lock)
        self._sessions[name] = session
        return session

    def _directory(self, asked: Asked) -> Path:
        if asked.path is None:
            return self._config.directory(self._rank, self._cwd)
        return self._cwd / asked.path / f"rank_{self._rank}"

    def _busy(self, at: int | None, steps: int, session: ProfilerSession) -> str | None:
        """The session that has this rank's profiler, or will have it in these steps."""
        for other in self._sessions.values():
            state, window = other.plan.state, other.plan.window
            if other is session or state.final or state is State.EXPORTING:
                continue
            if window is None or (at is None and state is State.RECORDING):
                return f"the profiler is busy with session {other.name} ({state.value})"
            if at is not None and at <= window.end_step and window.start_step < at + steps:
                return f"the profiler is busy with session {other.name} ({other.plan.planned})"
        return None

    def _tell(self, session: ProfilerSession) -> None:
        self._reported[session.name] = session.plan.state
        report = session.report
        body: dict[str, Value] = {"session": session.name, "state": report.state.value, "reason": report.reason}
        window = session.plan.window
        if window is not None:
            body |= {"start": window.start_step, "end": window.end_step}
        if report.steps:
            body |= {"first": report.steps[0], "last": report.steps[-1], "count": len(report.steps)}
        if report.path is not None:
            path = str(report.path)
            body |= {"path": path, "bytes": report.bytes, "seconds": report.seconds, "covered": report.covered}
        self._send(body)

    def _send(self, body: dict[str, Value]) -> None:
        self._serial += 1
        reason = body.get("reason")
        if isinstance(reason, str):
            body["reason"] = reason[:500]
        self._report({**body, "serial": self._serial, "step": self._step})

    def _forget(self) -> None:
        over = [name for name, session in self._sessions.items() if session.plan.state.final and name in self._noted]
        for name in over[: max(0, len(self._sessions) - _REMEMBERED)]:
            del self._sessions[name]
            self._noted.discard(name)
            self._unknown[name] = None
        for name in list(self._unknown)[: max(0, len(self._unknown) - _REMEMBERED)]:
            del self._unknown[name]


def _options(config: ProfilerConfig) -> ProfilerOptions:
    return ProfilerOptions(
        config.profiler_level, config.mstx, config.profile_memory, config.profile_cpu, config.with_stack
    )


def _note(session: ProfilerSession) -> str:
    report = session.report
    name = "" if session.name == STATIC else f"{session.name}, "
    steps = steps_text(report.steps[0], report.steps[-1]) if report.steps else "no steps"
    where = f", {counted(report.bytes, 'byte')} in {report.path}" if report.path else ""
    took = f", export {report.seconds:.1f} s" if report.seconds is not None else ""
    covered = ", each step has events in the trace" if report.covered else ""
    why = f" ({report.reason})" if report.reason else ""
    return f"{report.state.value}: {name}{steps}{where}{took}{covered}{why}"
