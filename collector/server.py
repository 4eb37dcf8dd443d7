"""The collector's shell: sockets, clock and signals around the pure parts. Startup, loop, shutdown.

One thread does everything. A turn of the loop takes what has arrived, stores it in the journal with one write,
acknowledges it, applies it to the run, and hands what that releases to the sink. When the journal or the sink cannot
write (disk full), the turn is repeated until it can; meanwhile nothing is received, so the agents' windows close and
their spools fill: nothing is lost that they can hold.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ..profiler_ctl.asked import KIND
from ..profiler_ctl.coordinator import Limits
from ..profiler_ctl.part import ProfilingPart
from .accounts import account_table
from .config import RankdConfig
from .description import describe, readable
from .desk import Desk
from .door import Door
from .entries import Decided, Ended, Entry, Opened, Stored
from .intake import Session
from .ledger import Ledger
from .liveness import Liveness
from .losses import Losses
from .patience import PatientWriting, StopRequestedError
from .place import Place
from .profilefile import ProfileFile
from .protocol.checks import printable
from .protocol.connection import key_of
from .protocol.errors import LimitError, ProtocolError, VersionError
from .protocol.keys import RunKey
from .protocol.ranges import ranks_text
from .protocol.steering import SAMPLE, STACKS, Decide, Move, Part, Tell
from .protocol.wire import (
    Ack,
    Ask,
    Beat,
    Command,
    Data,
    Hello,
    Hole,
    Message,
    Refused,
    Report,
    Welcome,
    Who,
    decode_message,
    encode_message,
)
from .rescue import Rescue
from .run import RankState
from .sampler import Sampler
from .stacks import StackRequests
from .statusfile import StatusFile
from .steering import RanksNow, Steering

__all__ = ["Collector", "Outcome"]

log = logging.getLogger("rankd.collector")

# How long one turn waits for something to arrive; bounds how late a lost rank or a signal is noticed.
_TICK = 0.1
# What one turn takes at most, so that acknowledgements are never far behind.
_TURN_MESSAGES = 512
_TURN_BYTES = 4 * 2**20
# Files and sockets: four a rank at 16,384 ranks.
_MOST_FILES = 65_536
# What the summary calls a refusal, by its error; the first that fits.
_REFUSALS = ((VersionError, "version"), (LimitError, "limit"), (ProtocolError, "protocol"))
# How long the last acknowledgements may take to leave at the end.
_LINGER_MS = 2_000


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a collector ended: its exit status, and the summary for a person."""

    status: int
    summary: str


class Collector:
    """One collector for one output directory.

    Args:
        config: the `rankd:` section.
        patience: seconds to wait for the very first rank; None: for ever (a collector that runs as a service).
        near: how the other nodes know this one, where nothing is configured (`binding.spots`).

    Raises:
        RankdError: the output directory, the journal or the endpoint cannot be used.
    """

    def __init__(self, config: RankdConfig, *, patience: float | None = None, near: str | None = None) -> None:
        _allow_files()
        self._config = config
        self._patience = patience
        self._place = Place(Path(config.output))
        self._run_id = self._place.run_id()
        former = self._place.former(self._run_id)
        self._run_key = self._place.key(os.environ, former)
        # Before the recovery, which may take long and need the door tended: a port that is taken is said at once.
        was = None if former is None else former.endpoint
        always = RunKey.from_environment(os.environ) is not None or key_of(former) is not None
        self._door = Door(config, self._run_key, near=near, former=was, always=always)
        try:
            self._begin(config)
        except BaseException:
            self._door.close(0)
            raise

    # -- startup ------------------------------------------------------------------------------------------------------

    def _begin(self, config: RankdConfig) -> None:
        self._status = StatusFile(self._place, config.beat_interval)
        self._peers: dict[bytes, Session] = {}
        # Who delivers for a process that is gone: what comes from there does not make the rank look alive.
        self._deliverers: dict[bytes, Session] = {}
        self._signal = 0
        self._writing = PatientWriting(self._place.output, self._meanwhile)
        self._writer = self._place.writer(self._run_id)
        self._described: object = None
        # What could not be made beside the logs, and was told.
        self._failed: set[str] = set()
        # Spool files on this host that were not delivered when the run ended.
        self._left: list[Path] = []
        self._ledger = Ledger(config, self._place.journal, self._status.latest, self._writing)
        self._run = self._ledger.run
        self._losses = Losses()
        lost = [rank for rank, view in self._run.ranks.items() if view.state is RankState.LOST]
        self._liveness = Liveness(lost_after=config.lost_after, max_hold=config.max_hold, lost=lost)
        self._rescue = Rescue(
            self._run,
            self._liveness,
            output=self._place.output,
            spools=config.spool.place(config.output),
            beat_interval=config.beat_interval,
        )
        profiling = ProfilingPart(Limits(config.profile.sessions, config.profile.size), config.beat_interval)
        self._profiles = ProfileFile(self._place, profiling)
        parts: dict[str, Part] = {SAMPLE: Sampler(), STACKS: StackRequests(), KIND: profiling}
        self._steering = Steering(parts, self._ranks_now)
        self._steering.restore(self._run.decisions)
        self._steer_at = 0.0
        self._desk = Desk(self._door, self._run_key, self._place.output, self._steering, self._steer)

    @property
    def endpoint(self) -> str:
        """Where the agents connect to."""
        return self._door.endpoint

    # -- loop ---------------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Serve until all ranks have said goodbye, or are missing for too long, or a signal comes."""
        with self._signals():
            try:
                self._publish()
                status = self._serve()
            except StopRequestedError:
                status = 128 + self._signal
            finally:
                self._beside("run.json", self._describe)
                self._tell_status(last=True)
                self._tell_losses(last=True)
                self._shut()
        return Outcome(status, self._summary(status))

    def _publish(self) -> None:
        key = self._run_key if self._door.keyed else None
        publish = functools.partial(self._place.publish, self.endpoint, self._run_id, key)
        self._writing.until_possible("the connection file", publish)
        wanted = "" if key is None else ", for peers with the run's key"
        log.info("collecting for %s on %s%s", self._place.output, self.endpoint, wanted)
        if self._run.ended:
            how_long = "--patience SECONDS bounds that" if self._patience is None else f"for {self._patience:g} s"
            log.info("this run has ended; waiting for the job to be started again (%s)", how_long)

    def _serve(self) -> int:
        started = before = time.monotonic()
        quiet_since: float | None = None
        while True:
            drained = self._turn()
            now = time.monotonic()
            if (turn := now - before) > self._config.beat_interval:
                # Stopped, or out of disk: what the ranks have said meanwhile is still to be read.
                self._liveness.stalled(turn, now)
                quiet_since = quiet_since and min(quiet_since + turn, now)
            before = now
            quiet_since = (quiet_since or now) if self._nobody_left() else None
            if quiet_since is not None and self._may_end(now, quiet_since):
                self._steer(self._steering.ending())
                self._beside("profile.json", lambda: self._profiles.update(last=True))
                self._ledger.commit([Ended()])
                self._left = self._rescue.left()
                self._desk.see_off()
                return 1 if self._run.missing() or self._left else 0
            never_heard = not self._peers and not self._run.counting()
            if never_heard and self._patience is not None and now - started > self._patience:
                log.error("no rank has said hello for %.0f s; giving up", self._patience)
                return 1
            self._tell_status()
            self._tell_losses()
            if drained:
                self._beside("run.json", self._describe)
                self._ledger.commit(list(self._liveness.due(now, self._run.watched(), self._run.waiting())))
                self._ledger.commit(self._rescue.due(now))
                if now >= self._steer_at:
                    self._steer_at = now + _TICK
                    self._steer(self._steering.tick())
                    self._beside("profile.json", self._profiles.update)

    def _may_end(self, now: float, quiet_since: float) -> bool:
        """All have said goodbye, or who has not stays away; and nothing lies on this host that could be fetched."""
        waited = self._run.finished or now - quiet_since >= self._config.linger
        return waited and self._rescue.settled(now, quiet_since)

    def _nobody_left(self) -> bool:
        """All have said goodbye, or at least no rank is alive or expected; and the end is still to be written."""
        if self._run.ended or self._run.finished:
            return not self._run.ended
        waiting_states = (RankState.LIVE, RankState.EXPECTED, RankState.HELD_OUT)
        states = [view.state for view in self._run.ranks.values()]
        return bool(states) and not any(state in waiting_states for state in states)

    def _turn(self) -> bool:
        """Take what has arrived; True: there was no more."""
        if self._signal:
            raise StopRequestedError
        self._desk.serve()
        if not self._door.wait(0.0 if self._desk.waiting else _TICK):
            return True
        entries: list[Entry] = []
        touched: dict[bytes, Session] = {}
        taken = 0
        for _ in range(_TURN_MESSAGES):
            arrived = self._door.receive()
            if arrived is None:
                self._store(entries, touched)
                self._forget(self._door.gone())
                return True
            peer, parts = arrived
            taken += sum(map(len, parts))
            self._take(peer, parts, entries, touched)
            if taken > _TURN_BYTES:
                break
        self._store(entries, touched)
        return False

    def _forget(self, peers: list[bytes]) -> None:
        """Connections that have ended; who comes back says hello again."""
        for peer in peers:
            self._peers.pop(peer, None)
            self._deliverers.pop(peer, None)

    def _take(self, peer: bytes, parts: list[bytes], entries: list[Entry], touched: dict[bytes, Session]) -> None:
        """One message of one peer; its entries are added to `entries`, for `_store`."""
        try:
            if len(parts) != 1:
                raise ProtocolError(f"a message has one part, got {len(parts)}")
            message = decode_message(parts[0])
            deliverer = self._deliverers.get(peer)
            session = deliverer or self._peers.get(peer)
            match message:
                case Hello() | Ask():
                    # Who is who may change, and what is answered is about all that has come: that is stored first.
                    self._store(entries, touched)
                    self._hello(peer, message) if isinstance(message, Hello) else self._desk.asked(peer, message)
                case Data() | Beat() if session is not None:
                    if deliverer is None:
                        self._heard(session, entries)
                    else:
                        self._rescue.delivered(session, time.monotonic())
                    if isinstance(message, Data) and self._has_room(peer, session):
                        self._data(session, message, entries)
                        touched[peer] = session
                    elif deliverer is None and isinstance(message, Beat):
                        self._status.beats.heard(session.rank, message, time.monotonic())
                case Report() if peer in self._peers:
                    self._store(entries, touched)
                    self._steer(self._steering.reported(self._peers[peer].rank, message))
                case Data() | Beat() | Report():
                    self._send(peer, Who())
                case _:
                    raise ProtocolError(f"an agent does not send {type(message).__name__}")
        except ProtocolError as e:
            self._refuse(peer, e)

    def _hello(self, peer: bytes, hello: Hello) -> None:
        self._door.greet(peer)
        if hello.run not in ("", self._run_id):
            reason = f"this is the collector of run {self._run_id} ({self._place.output}), not of run {hello.run}"
            # What a dead process has left never comes to belong to another run.
            self._send(peer, Refused(reason, retry=not hello.recovered))
            return
        # Who names the run has read it in the output directory. Paths mean the same on both sides on one machine only.
        doubtful = not hello.run and self._door.is_local(peer)
        elsewhere = self._place.objection(hello, self.endpoint) if doubtful else None
        objection = elsewhere or self._run.intake.objection(hello, self._is_alive)
        if objection is not None:
            kind = "another claim on a rank" if elsewhere is None else "another job"
            self._door.count(kind, f"rank {hello.rank}: {objection.reason}")
            self._send(peer, objection)
            return
        session = self._run.intake.session(hello.session)
        if session is None:
            if not self._door.may_open(peer):
                raise LimitError("too many processes on one connection")
            self._ledger.commit([Opened(hello)])
            if not hello.recovered:
                self._liveness.rejoined(hello.rank, time.monotonic())
                self._status.beats.forget(hello.rank)
            session = self._run.intake.session(hello.session)
            assert session is not None
        if hello.recovered:
            self._deliverers = {p: s for p, s in self._deliverers.items() if s is not session}
            self._deliverers[peer] = session
            self._rescue.delivered(session, time.monotonic())
        else:
            self._peers = {p: s for p, s in self._peers.items() if s.rank != hello.rank}
            self._peers[peer] = session
        self._send(peer, Welcome(self._run_id, session.stored, self._config.beat_interval))
        if not hello.recovered:
            self._steer(self._steering.joined(hello.rank))

    # -- steering -----------------------------------------------------------------------------------------------------

    def _ranks_now(self) -> RanksNow:
        sessions = {session.rank: session for session in self._peers.values()}
        beats, latest = self._status.beats, self._status.latest
        return RanksNow(self._run, beats, latest, sessions, time.monotonic(), self._config.beat_interval)

    def _steer(self, moves: Sequence[Move]) -> None:
        """Make these moves, in their order: what is decided is in the journal before a rank is told."""
        peers = {session.rank: peer for peer, session in self._peers.items()} if moves else {}
        for move in moves:
            match move:
                case Decide():
                    self._ledger.commit([Decided(move.kind, move.key, move.facts, move.text)])
                case Tell() if (peer := peers.get(move.rank)) is not None:
                    session = self._peers[peer].hello.session
                    self._send(peer, Command.proved(self._run_key, session, move.kind, move.facts))

    # -- taking -------------------------------------------------------------------------------------------------------

    def _is_alive(self, session: Session) -> bool:
        view = self._run.ranks[session.rank]
        # Three beats: a process that was killed is taken for dead long before it counts as lost.
        silent = self._liveness.silent(session.rank, time.monotonic())
        heard = view.state in (RankState.LIVE, RankState.HELD_OUT) and silent < 3 * self._config.beat_interval
        return heard and not self._rescue.is_gone(session)

    def _has_room(self, peer: bytes, session: Session) -> bool:
        """Whether more of this rank can be taken; if not, it says hello again in a while, and sends again."""
        if not self._run.holds_too_much(session.rank):
            return True
        self._forget([peer])
        reason = f"rank {session.rank} is too far ahead of others; it waits for them"
        self._door.count("too far ahead", reason)
        self._send(peer, Refused(reason, retry=True))
        return False

    def _data(self, session: Session, data: Data, entries: list[Entry]) -> None:
        admitted = self._run.intake.admit(session, data.items)
        if admitted.raws:
            if session.holed and any(isinstance(item, Hole) for item in admitted.items):
                self._losses.found(session.number, self._run.accounts, time.monotonic())
            entries.append(Stored(session.number, admitted.raws, admitted.items))

    def _tell_losses(self, *, last: bool = False) -> None:
        if (text := self._losses.due(self._run.accounts, time.monotonic(), last=last)) is not None:
            log.warning("%s", text)

    def _heard(self, session: Session, entries: list[Entry]) -> None:
        self._rescue.heard(session)
        back = self._liveness.heard(session.rank, time.monotonic())
        if back is not None:
            entries.append(back)

    def _refuse(self, peer: bytes, error: ProtocolError) -> None:
        """A peer's fault: say so, count it, and forget the peer; the others are not disturbed."""
        kind = next(kind for kind_of, kind in _REFUSALS if isinstance(error, kind_of))
        session = self._peers.pop(peer, None) or self._deliverers.pop(peer, None)
        who = self._door.address(peer) if session is None else f"rank {session.rank} ({session.hello.host})"
        self._send(peer, Refused(str(error)[:1_000], retry=False))
        self._door.refuse(peer, kind, who, str(error))

    def _send(self, peer: bytes, message: Message) -> None:
        self._door.send(peer, encode_message(message))

    # -- storing ------------------------------------------------------------------------------------------------------

    def _store(self, entries: list[Entry], touched: dict[bytes, Session]) -> None:
        """Journal, acknowledge, apply and write; empties both arguments."""
        references = self._ledger.append(entries)
        for peer, session in touched.items():
            self._send(peer, Ack(session.admitted))
        self._ledger.apply(entries, references)
        entries.clear()
        touched.clear()

    def _describe(self) -> None:
        """Keep `run.json` and `RUN.md` up to date; where they cannot be written, the logs go on all the same."""
        intake = self._run.intake
        now = (len(intake.sessions), len(intake.attempts), self._run.ended)
        if now == self._described or not intake.sessions:
            return
        self._described = now
        description = describe(self._run, self._writer)
        try:
            self._place.describe(json.dumps(description, indent=1) + "\n", readable(description))
        except OSError as e:
            log.warning("run.json and RUN.md cannot be written now: %s", e.strerror)

    def _tell_status(self, *, last: bool = False) -> None:
        update = self._status.update
        self._beside("status.json", lambda: update(self._run, self._door.refusals, time.monotonic(), last=last))

    def _beside(self, what: str, make: Callable[[], None]) -> None:
        """What is told beside the logs is made of what peers say, and never costs the logs."""
        try:
            make()
        except Exception:
            if what not in self._failed:
                self._failed.add(what)
                log.exception("%s cannot be made; the logs go on. Please report this", what)

    def _meanwhile(self) -> None:
        """While something cannot be written."""
        if self._signal:
            raise StopRequestedError
        self._door.tend()

    # -- shutdown -----------------------------------------------------------------------------------------------------

    def _shut(self) -> None:
        self._rescue.close()
        self._place.withdraw()
        self._door.close(_LINGER_MS)
        self._desk.close()
        self._ledger.close()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the loop between two turns; the handlers are borrowed and given back."""

        def note(number: int, _: FrameType | None) -> None:
            self._signal = number

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _summary(self, status: int) -> str:
        lines = account_table(self._run.rows())
        if missing := self._run.missing():
            lines.append(f"no goodbye from {ranks_text(missing)}")
        if self._left:
            paths = ", ".join(map(str, self._left))
            lines.append(f"not delivered: {paths}; the next start delivers them, or `rankd recover`")
        if refusals := self._door.refusals:
            lines.append("refused: " + ", ".join(f"{n} × {kind}" for kind, n in sorted(refusals.items())))
        lines.append(f"logs: {self._place.output / 'merged.log'} (status {status})")
        return "\n".join(printable(line, line=True) for line in lines)


def _allow_files() -> None:
    """A socket and a log for each rank are more than the usual soft limit of 1,024 files allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
