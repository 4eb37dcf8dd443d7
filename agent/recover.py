"""Delivering what processes that are gone have left in their spool files.

`rankd recover` does it by hand, and for the collector of a node; `Leftovers` does it for an agent that starts where one
of its run has died. A spool is locked by its process as long as that lives, and by whoever delivers it: so nothing is
ever delivered by two, and no living process is disturbed.
"""

from __future__ import annotations

import argparse
import enum
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ..collector.config import SpoolConfig
from ..collector.protocol.about import OWN_COLLECTOR
from ..collector.protocol.errors import ConfigError, ProtocolError
from ..collector.protocol.wire import Hello
from ..collector.protocol.wording import counted
from .discovery import Endpoint, EndpointFinder
from .link import LinkState, Timing
from .outbox import Outbox
from .sender import Sender
from .spool import Spool, find_spools, owner, remove_unfinished
from .spools import ABOUT_OUTPUT

__all__ = ["Fate", "Leftovers", "Recovered", "add_arguments", "deliver", "run"]

log = logging.getLogger("rankd.agent")

# Exit statuses; the collector's rescue reads them.
_ALL_DELIVERED, _SOMETHING_LEFT, _STILL_ALIVE, _OF_ANOTHER_RUN = 0, 1, 3, 4
# How often a delivery is looked at.
_LOOK = 0.05
# For the command: how long one spool may take.
_TIMEOUT = 30.0
# How long an agent's own hello waits, once the collector can be found, until an older process of its rank is delivered:
# then attempts come in the order in which they were. Short enough for the exit of a short training.
_HOLD_BACK = 3.0
# The other ranks of a node that starts again deliver what is theirs; what nobody has taken by then is anybody's.
_GRACE = 20.0
# How often it is looked whether what somebody else was delivering has been left behind after all.
_AGAIN = 0.5
# A delivery of somebody else is said by whoever started it; nothing is said about a collector that is away.
_QUIET = Timing(warn_after=math.inf)


class Fate(enum.Enum):
    """What has become of a spool."""

    DELIVERED = "delivered"  # all of it; the file is removed
    ALIVE = "alive"  # its process lives
    FOREIGN = "foreign"  # it belongs to another run than the one in the output directory, which was deleted perhaps
    LEFT = "left"  # the collector did not take all of it, or the file is gone or damaged


@dataclass(frozen=True, slots=True)
class Recovered:
    """What `deliver` has done: its text is for a person."""

    path: Path
    fate: Fate
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


def deliver(
    path: Path,
    finder: Callable[[Hello], Callable[[], str | None]],
    *,
    timeout: float,
    stop: threading.Event | None = None,
    chosen: bool = False,
) -> Recovered:
    """Deliver what a spool still holds, and remove it when its collector has stored all of it.

    Args:
        path: the spool file.
        finder: gives, for the process that has left it, what tells its collector's endpoint.
        timeout: seconds it may take.
        stop: set by somebody else to end it early; what was not delivered stays in the file.
        chosen: somebody has chosen the collector, so that it need not be the one for the process's output directory.
    """
    try:
        spool = Spool.open(path)
    except BlockingIOError:
        return Recovered(path, Fate.ALIVE, "its process is alive, or somebody else is delivering it")
    except FileNotFoundError:
        return Recovered(path, Fate.LEFT, "there is no such file; it may have been delivered already")
    except (OSError, ProtocolError) as e:
        return Recovered(path, Fate.LEFT, f"cannot be read: {e}")
    outbox = Outbox.recovered(spool, spool.entries, spool.next_seq)
    who = spool.hello
    if chosen:
        who = replace(who, about={name: told for name, told in who.about.items() if name != OWN_COLLECTOR})
    text = f"rank {who.rank} of {who.world_size} (process {who.pid} on {who.host})"
    find = _OfRun(finder(who), spool.run)
    try:
        held = outbox.held_items
        left = _send(outbox, replace(who, recovered=True, run=spool.run), find, timeout, stop) if held else 0
    finally:
        outbox.close()
    if left and find.other:
        where = f"belongs to run {spool.run}, and its output directory to run {find.other} now"
        advice = "it is left alone; if the first was deleted, delete this file too"
        return Recovered(path, Fate.FOREIGN, f"{text}: {where}; {advice}")
    if left:
        return Recovered(path, Fate.LEFT, f"{text}: {left} of {counted(held, 'item')} not taken, and left in the file")
    return Recovered(path, Fate.DELIVERED, f"{text}: {counted(held, 'item')} delivered")


class _OfRun:
    """Finds the collector of one run; `other`: the run of the collector that was found instead."""

    def __init__(self, find: Callable[[], str | None], run: str) -> None:
        self._find = find
        self._run = run
        self.other = ""

    def __call__(self) -> str | None:
        endpoint = self._find()
        found = endpoint.run if isinstance(endpoint, Endpoint) else ""
        if self._run and found and found != self._run:
            self.other = found
            return None
        return endpoint


def _send(outbox: Outbox, hello: Hello, find: _OfRun, timeout: float, stop: threading.Event | None) -> int:
    sender = Sender(outbox, hello, find, where="the place of its collector", timing=_QUIET)
    sender.start()
    deadline, pause = time.monotonic() + timeout, stop or threading.Event()
    while outbox.held_items and sender.alive and sender.state is not LinkState.OFF and time.monotonic() < deadline:
        if find.other or pause.wait(_LOOK):
            break
    return sender.close(0.0)


# -- the agent's start ------------------------------------------------------------------------------------------------


# Directories that an agent of this process is sweeping; the lock protects the set.
_swept_now: set[Path] = set()
_lock = threading.Lock()


class Leftovers:
    """What dead processes of this run have left on this node, delivered in the background while training runs.

    Make it before the process's own spool. First those of the same rank; after a while also those of other ranks,
    which their own agents would have taken if they were here.

    Args:
        directory: where the spools of this run lie on this node.
        rank: of this process.
        find_endpoint: where the collector is.
    """

    def __init__(self, directory: Path, rank: int, find_endpoint: Callable[[], str | None]) -> None:
        self._directory = directory
        self._find_endpoint = find_endpoint
        self._stop = threading.Event()
        self._known_since: float | None = None
        self._foreign: set[Path] = set()
        # By name first: a thousand ranks that start on one node must not each open the files of all.
        older = [(hello, path) for path in find_spools(directory, rank) if (hello := owner(path)) is not None]
        self._own = [path for hello, path in sorted(older, key=lambda o: o[0].started) if hello.rank == rank]
        self._thread = threading.Thread(target=self._guarded, name="rankd-recover", daemon=True)

    def start(self) -> None:
        """Begin, in a daemon thread."""
        self._thread.start()

    def find_endpoint(self) -> str | None:
        """The collector's endpoint for this process itself; None for a little while longer than it is known, if an
        older process of this rank is still to be delivered.
        """
        endpoint = self._find_endpoint()
        if endpoint is None or not any(path.exists() for path in self._own if path not in self._foreign):
            return endpoint
        self._known_since = self._known_since or time.monotonic()
        return endpoint if time.monotonic() - self._known_since >= _HOLD_BACK else None

    def stop(self) -> None:
        """Do not go on; what was not delivered stays. Does not wait."""
        self._stop.set()

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended after `stop`."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _guarded(self) -> None:
        try:
            grace_over = time.monotonic() + _GRACE
            held = self._deliver(self._own)
            # Who delivers one may be killed over it, or give up.
            while held and time.monotonic() < grace_over and not self._stop.wait(_AGAIN):
                held = self._deliver(held)
            if not self._stop.wait(max(0.0, grace_over - time.monotonic())):
                self._sweep()
        except Exception:
            log.exception("what earlier processes left in %s was not delivered; training goes on", self._directory)

    def _sweep(self) -> None:
        """Also what other ranks have left; unless another agent of this process is at it: a thousand of them, each
        opening the files of all, would leave the interpreter no time for anything else.
        """
        with _lock:
            if self._directory in _swept_now:
                return
            _swept_now.add(self._directory)
        try:
            remove_unfinished(self._directory)
            self._deliver(find_spools(self._directory))
        finally:
            with _lock:
                _swept_now.discard(self._directory)

    def _deliver(self, paths: Iterable[Path]) -> list[Path]:
        """Those that somebody else holds."""
        held = []
        for path in paths:
            if self._stop.is_set():
                break
            done = deliver(path, lambda _: self._find_endpoint, timeout=math.inf, stop=self._stop)
            if done.fate is Fate.DELIVERED:
                log.info("left by an earlier process of this run: %s", done)
            elif done.fate is Fate.ALIVE:
                held.append(path)
            elif done.fate is Fate.FOREIGN and path not in self._foreign:
                self._foreign.add(path)
                log.warning("a spool file that is not of this run: %s", done)
        return held


# -- the command ------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="SPOOL|DIRECTORY",
        help="spool files, or directories of them; default: where --output's run has them on this host",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--output", type=Path, help="output directory of the collector; default: as the spool says")
    where.add_argument("--endpoint", metavar="tcp://HOST:PORT", help="the collector itself")
    parser.add_argument(
        "--timeout", type=float, default=_TIMEOUT, metavar="S", help=f"seconds for each spool (default {_TIMEOUT:g})"
    )
    # For the collector of this host: what it has started must not go on, and hold the spool, when it is killed.
    parser.add_argument("--parent", type=int, metavar="PID", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Deliver; 0: all of it, 1: something was left, 3: only what living processes hold, 4: only another run's."""
    if not args.paths and args.output is None:
        raise ConfigError("say which spool files, or with --output of which run")
    finder = functools.partial(_finder, args.output, args.endpoint)
    stop = None if args.parent is None else _end_of(args.parent)
    chosen = args.output is not None or args.endpoint is not None
    fates = set()
    if args.paths:
        paths = [path for each in args.paths for path in (find_spools(each) if each.is_dir() else [each])]
    else:
        paths = find_spools(SpoolConfig().place(args.output))
    for path in _oldest_first(paths):
        done = deliver(path, finder, timeout=args.timeout, stop=stop, chosen=chosen)
        print(done, flush=True)
        fates.add(done.fate)
    if not fates:
        print("no spool files there", flush=True)
    if Fate.LEFT in fates:
        return _SOMETHING_LEFT
    if Fate.FOREIGN in fates:
        return _OF_ANOTHER_RUN
    return _STILL_ALIVE if Fate.ALIVE in fates else _ALL_DELIVERED


def _end_of(parent: int) -> threading.Event:
    """Set once this process is no longer a child of `parent`."""
    ended = threading.Event()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK)
        ended.set()

    threading.Thread(target=watch, name="rankd-parent", daemon=True).start()
    return ended


def _oldest_first(paths: Iterable[Path]) -> list[Path]:
    """In the order in which the processes were started, so that the collector hears of them in that order."""
    started = {path: math.inf if (hello := owner(path)) is None else hello.started for path in paths}
    return sorted(started, key=lambda path: started[path])


def _finder(output: Path | None, endpoint: str | None, who: Hello) -> Callable[[], str | None]:
    if output is not None:
        # What this shell's environment says need not be that run's collector.
        return EndpointFinder(None, {}, output)
    said = who.about.get(ABOUT_OUTPUT)
    return EndpointFinder(endpoint, os.environ, None if said is None else Path(said))
