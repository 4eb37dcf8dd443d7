"""What processes of this host have left in their spool files when they died: fetched while the collector runs.

A rank that falls silent has died, or is stopped, or is cut off. Where it ran on this host, its spool file tells: as
long as its process lives, that is locked. So `rankd recover` is started for it, beside the loop; once it has delivered
all, the rank is given up at once, instead of after `lost_after` seconds. The same is done for spool files of this run
that nobody claims: of processes that died before this collector heard of them.

The subprocess, and not this process, opens the files: the collector does not depend on the agent's package.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .entries import Entry
from .intake import Session
from .liveness import Liveness
from .run import RankState, Run

__all__ = ["Rescue"]

log = logging.getLogger("rankd.collector")

# As many beats a process may be late before its spool is looked at.
_SILENT_BEATS = 3
# Looking at one costs a start of Python on this host. Not delivered, or alive: again after this many seconds, and then
# each time after twice as many.
_AGAIN_FIRST, _AGAIN_MOST = 5.0, 300.0
# Once nothing else is waited for: who else may be delivering a spool (an agent, a person) has so long to do it, and it
# is looked at so often. Longer than an agent takes to find a collector that was restarted.
_END_PATIENCE, _AGAIN_AT_END = 10.0, 1.0
# All ranks of a host may die at once; the rest wait.
_AT_ONCE = 4
# How long one delivery may take.
_TIMEOUT = 30
# Directories for temporary files that the processes of one run may have on one host.
_MOST_DIRECTORIES = 16
# The exit status of `rankd recover` when everything was delivered, when the process is alive, and when it was one of
# another run.
_DELIVERED, _ALIVE, _FOREIGN = 0, 3, 4
# A hello's fact: where its process has its spool.
_ABOUT_SPOOL = "spool"


@dataclass(slots=True)
class _Case:
    """A spool file whose process is not heard, and what is done about it."""

    again_at: float
    delay: float = _AGAIN_FIRST
    tried_at: float = -math.inf
    status: int | None = None
    recover: subprocess.Popen[str] | None = None


class Rescue:
    """Starts deliveries, and says which ranks need not be waited for.

    Args:
        run, liveness: those of the collector.
        output: its output directory, by which the deliveries find it.
        spools: where the spool files of this run lie on this host.
        beat_interval: seconds between two beats of an agent.
    """

    def __init__(self, run: Run, liveness: Liveness, *, output: Path, spools: Path, beat_interval: float) -> None:
        self._run = run
        self._liveness = liveness
        self._output = output.absolute()
        # Where spools of this run lie on this host: where the collector would put one, and where processes said so.
        self._directories = {spools}
        self._run_name = spools.name
        self._looked_at = 0
        self._beat_interval = beat_interval
        self._patience = _SILENT_BEATS * beat_interval
        self._host = socket.gethostname()
        self._cases: dict[Path, _Case] = {}
        # Spools of a run that was in this output directory before; they are none of ours.
        self._foreign: set[Path] = set()
        # Sessions that somebody has delivered for, so that their processes are gone: when that was last heard.
        self._gone: dict[bytes, float] = {}
        self._look_at = 0.0

    def delivered(self, session: Session, now: float) -> None:
        """Somebody delivers for this session: only who holds its spool's lock can, so its process is gone."""
        self._gone[session.hello.session] = now

    def heard(self, session: Session) -> None:
        """The process itself says something, so it lives after all (somebody closed all its files, and its lock)."""
        if self._gone:
            self._gone.pop(session.hello.session, None)

    def is_gone(self, session: Session) -> bool:
        """Whether this session's process is known to be gone."""
        return session.hello.recovered or session.hello.session in self._gone

    def due(self, now: float) -> list[Entry]:
        """Look after the deliveries; what follows from those that are through. Never waits."""
        ended = {path: self._ended(case, now) for path, case in self._cases.items()}
        delivered = {path for path, status in ended.items() if status == _DELIVERED}
        foreign = {path for path, status in ended.items() if status == _FOREIGN}
        self._foreign |= foreign
        for path in delivered | foreign:
            del self._cases[path]
        look = now >= self._look_at
        out = self._lost(delivered, now) if delivered or look else []
        if look:
            self._look_at = now + self._beat_interval
            self._look(now)
        return out

    def settled(self, now: float, since: float) -> bool:
        """Whether the run may end: every spool on this host is delivered, or cannot be.

        Args:
            since: when the collector had nothing else to wait for. What was tried before is tried again: what stood in
                the way then (another deliverer, a collector that was away) may be gone.
        """
        for case in self._cases.values():
            if case.status == _ALIVE and case.tried_at >= since and now - since < _END_PATIENCE:
                case.again_at = min(case.again_at, case.tried_at + _AGAIN_AT_END)
            elif case.status is not None and case.tried_at < since:
                case.again_at = min(case.again_at, since)
        self._look(now)
        return all(self._is_settled(case, now, since) for case in self._cases.values())

    def left(self) -> list[Path]:
        """Spool files on this host of processes that are not heard, and of which not everything is delivered."""
        return sorted(filter(_exists, self._cases))

    def close(self) -> None:
        """End what is under way; what it has not delivered stays in its file."""
        for case in self._cases.values():
            if case.recover is not None:
                case.recover.kill()
                case.recover.communicate()
        self._cases.clear()

    # -- inside -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _is_settled(case: _Case, now: float, since: float) -> bool:
        if case.recover is not None or case.tried_at < since:
            return False
        # Held by somebody: its own process, which has to end first, or another deliverer, which may fail.
        return case.status != _ALIVE or now - since >= _END_PATIENCE

    def _lost(self, delivered: set[Path], now: float) -> list[Entry]:
        """The ranks whose process is gone and whose items are all stored, or whose deliverer says no more."""
        out: list[Entry] = []
        for session in self._waited_for():
            quiet = now - self._gone.get(session.hello.session, now) > self._patience
            if quiet or _spool(session) in delivered:
                out.append(self._liveness.gone(session.rank, now))
        return out

    def _waited_for(self) -> Iterator[Session]:
        for rank, view in self._run.ranks.items():
            session = self._run.intake.current(rank)
            if session is not None and view.state in (RankState.LIVE, RankState.HELD_OUT):
                yield session

    def _look(self, now: float) -> None:
        """Open and close cases, and start what is due."""
        silent: set[Path] = set()
        heard: set[Path] = set()
        for session, path in self._claims():
            is_silent = self._liveness.silent(session.rank, now) >= self._patience or self.is_gone(session)
            (silent if is_silent else heard).add(path)
        # A spool may also lie elsewhere: its process had another directory for temporary files.
        there = (self._files() | set(filter(_exists, silent))) - heard - self._foreign
        for path in there - self._cases.keys():
            self._cases[path] = _Case(now if path in silent else now + self._patience)
        self._cases = {path: case for path, case in self._cases.items() if path in there or case.recover is not None}
        under_way = sum(case.recover is not None for case in self._cases.values())
        due = [path for path, case in self._cases.items() if case.recover is None and case.again_at <= now]
        for path in due[: max(0, _AT_ONCE - under_way)]:
            self._start(path, self._cases[path], now)

    def _claims(self) -> Iterator[tuple[Session, Path]]:
        """The current sessions of this host that have not ended, with their spools."""
        for rank in self._run.ranks:
            session = self._run.intake.current(rank)
            if session is None or session.over or session.hello.host != self._host:
                continue
            path = _spool(session)
            if path is not None:
                yield session, path

    def _files(self) -> set[Path]:
        sessions = self._run.intake.sessions
        for session in sessions[self._looked_at :]:
            path = _spool(session) if session.hello.host == self._host else None
            if path is not None and path.parent.name == self._run_name and len(self._directories) < _MOST_DIRECTORIES:
                self._directories.add(path.parent)
        self._looked_at = len(sessions)
        found: set[Path] = set()
        for directory in self._directories:
            with contextlib.suppress(OSError):
                found.update(directory.glob("*.spool"))
        return found

    def _start(self, path: Path, case: _Case, now: float) -> None:
        case.tried_at = now
        if _is_held(path):
            # Said without a start of Python: a busy machine, on which all ranks fall silent, has none to spare.
            self._put_off(case, _ALIVE, now)
            return
        command = [sys.executable, "-m", "rankd.collector", "recover", str(path), "--output", str(self._output)]
        try:
            case.recover = subprocess.Popen(  # noqa: S603 - our own command, no shell
                [*command, "--timeout", str(_TIMEOUT), "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as e:
            log.warning("cannot start `rankd recover %s`: %s", path, e)
            case.again_at = now + case.delay

    @staticmethod
    def _put_off(case: _Case, status: int, now: float) -> None:
        case.status = status
        case.again_at, case.delay = now + case.delay, min(2 * case.delay, _AGAIN_MOST)

    def _ended(self, case: _Case, now: float) -> int | None:
        """The exit status of a delivery that has ended since the last time."""
        recover = case.recover
        if recover is None or recover.poll() is None:
            return None
        # A few lines, which fit the pipe: this does not wait.
        said, _ = recover.communicate()
        status = recover.returncode
        case.recover = None
        self._put_off(case, status, now)
        level = {_ALIVE: logging.DEBUG, _FOREIGN: logging.WARNING}.get(status, logging.INFO)
        log.log(level, "recover (status %d): %s", status, said.strip())
        return status


def _is_held(path: Path) -> bool:
    """Whether somebody holds the lock of a spool file: its own process, or another deliverer."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False  # what is wrong with it, `rankd recover` finds out and says
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _spool(session: Session) -> Path | None:
    """Where this session's process says that its spool lies, if that is a place where spools lie.

    Peers choose what they say; no other file is to be touched, and nothing else to reach a command line.
    """
    path = Path(session.hello.about.get(_ABOUT_SPOOL, ""))
    fits = path.is_absolute() and ".." not in path.parts and path.match(f"rankd-{os.geteuid()}/*/*.spool")
    return path if fits else None
