"""All profiling sessions of a run as the collector sees them. Pure: news and time in, decisions and commands out.

Whatever is decided is in `take()` before those who are told of it; the shell journals the one before it sends the
other. After a restart the coordinator is made again of what was decided: a session whose step was not decided is called
off, one whose step was goes on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..collector.protocol.checks import MAX_STEP
from ..collector.protocol.errors import RankdError, RecordError
from ..collector.protocol.ranges import parse_ranks, ranges, ranks_text
from ..collector.protocol.steering import Decide, Move, Tell
from ..collector.protocol.wording import counted
from .agreement import Agreement, Phase
from .asked import KIND, STATIC, Asked, Body, ProfilerOptions, Value, estimated_bytes, integer, text
from .choosing import Choice, RankFacts
from .config import ProfilerConfig
from .differences import differences, read
from .pace import Pace
from .plan import State, Window

__all__ = ["ARM_TIMEOUT", "Coordinator", "Limits"]

# A rank looks at its disk before it answers, and that may be a network file system.
ARM_TIMEOUT = 15.0
# Between the decision and the step: a beat may be late, and a command waits until the rank's sender thread is let run.
_MARGIN = 1.0
# Ranks that differ are told of together: nodes do not start in the same second.
_DIFFERENCES_AFTER = 5.0
# The key of their decision; sessions have names of their own.
_DIFFERENCES = "differences"
# What a journalled text may hold.
_LONGEST_RANKS = 8_000
# Facts that change with each rank that is through.
_PROGRESS = ("done", "bytes", "step_bytes")


@dataclass(frozen=True, slots=True)
class Limits:
    """What profiling on demand may cost.

    Attributes:
        sessions: sessions of one run; None: no limit.
        size: bytes of all sessions of one run; None: no limit.
    """

    sessions: int | None = None
    size: int | None = None


@dataclass(slots=True)
class _Rank:
    host: str
    about: Mapping[str, str]
    process: int


class Coordinator:
    """The sessions of one run.

    Args:
        limits: what they may cost.
        beat_interval: how old the known step of a rank may be, in seconds.
        decided: what was decided before, by key, in that order.
        now: the time, in seconds of any clock that never goes back.
    """

    def __init__(
        self, limits: Limits, beat_interval: float, decided: Iterable[tuple[str, Body]] = (), now: float = 0.0
    ) -> None:
        self._limits = limits
        self._margin = _MARGIN + beat_interval
        self._pace = Pace()
        self._ranks: dict[int, _Rank] = {}
        self._world_size = 0
        self._total_steps: int | None = None
        self._sections: dict[int, ProfilerConfig] = {}
        self._warn_at: float | None = None
        self._warned = ""
        # The process of rank 0 that the configuration's session is of.
        self._static_of: int | None = None
        self._out: list[Move] = []
        self._known_pace: float | None = None
        # Of sessions from before a restart: their bytes, and the most of a step.
        self._before: dict[str, tuple[int, int]] = {}
        # Bytes a step of earlier sessions, as they were when a session was proposed.
        self._estimates: dict[str, int | None] = {}
        self.sessions: dict[str, Agreement] = {}
        # Counts what `status` shows.
        self.changes = 0
        # What was journalled of each: what differs is to be.
        self._journalled: dict[str, dict[str, Value]] = {}
        self._recall(decided)
        for session in self.sessions.values():
            if not session.phase.final:
                session.restarted()
            self._settle(session, now)

    def take(self) -> list[Move]:
        """What has to be journalled and said since the last call, in this order."""
        out, self._out = self._out, []
        return out

    # -- news ---------------------------------------------------------------------------------------------------------

    def joined(
        self,
        rank: int,
        process: int,
        now: float,
        *,
        host: str = "",
        about: Mapping[str, str] | None = None,
        world_size: int = 1,
        total_steps: int | None = None,
    ) -> None:
        """A process of this rank has said hello: a new one (another number), or one that is back."""
        self._ranks[rank] = _Rank(host, about or {}, process)
        self._world_size, self._total_steps = world_size, total_steps
        self._pace.joined(rank, now)
        for session in self._with(rank):
            session.joined(rank)
        self._configured(rank, process, now)
        for session in self._with(rank):
            self._settle(session, now)

    def gone(self, rank: int, why: str, now: float) -> None:
        """This rank has ended, or is taken for lost."""
        self._ranks.pop(rank, None)
        for session in self._with(rank):
            session.gone(rank, why)
            self.changes += 1
            self._settle(session, now)

    def at(self, rank: int, step: int, now: float) -> None:
        """This rank is at this global step."""
        self._pace.at(rank, step, now)

    def connected(self, ranks: Iterable[int]) -> None:
        """Only these ranks can be told something now; the others may come back."""
        here = set(ranks)
        self._ranks = {rank: known for rank, known in self._ranks.items() if rank in here}

    def reported(self, rank: int, body: Body, now: float) -> None:
        """A report of this rank; one that names no session of this rank's changes nothing."""
        session = self.sessions.get(text(body, "session"))
        if session is None or rank not in session.parts:
            return
        step = integer(body, "step")
        if step is not None:
            self._pace.at(rank, max(step, self._pace.step(rank)), now)
        before = session.phase
        if session.reported(rank, body):
            self.changes += 1
            if session.phase is not before or session.ready:
                self._settle(session, now, progress=False)
            else:
                # A thousand ranks report five times each: what is about all of them waits for the next tick.
                self._tell(session, rank, now)

    def tick(self, now: float, seconds_per_step: float | None = None, *, thorough: bool = True) -> None:
        """What time has made due.

        Args:
            seconds_per_step: the pace of training, where that is known otherwise.
            thorough: also for sessions whose step is decided.
        """
        self._known_pace = seconds_per_step
        if self._warn_at is not None and (now >= self._warn_at or len(self._sections) >= self._world_size):
            self._warn_of_differences()
        for session in self.sessions.values():
            if session.phase is Phase.PROPOSED or (thorough and not session.settled):
                session.tick(now)
                self._settle(session, now)

    # -- what people ask ----------------------------------------------------------------------------------------------

    def ask(self, what: str, body: Body, now: float) -> dict[str, Value]:
        """Do what the key holder asks: `start` (a `Choice` and an `Asked`) or `stop` (`session`).

        Raises:
            RankdError: it cannot be done, and why.
        """
        asks: dict[str, Callable[[Body, float], dict[str, Value]]] = {"start": self._start, "stop": self._stop}
        if what not in asks:
            raise RecordError(f"profile: found {what!r}, allowed: {', '.join(asks)}")
        return asks[what](body, now)

    def status(self) -> list[dict[str, object]]:
        """All sessions and their ranks, as JSON holds them."""
        return [{"name": name, **self._facts(each), "parts": _parts(each)} for name, each in self.sessions.items()]

    @property
    def undecided(self) -> bool:
        """Ranks are waited for, so that a step can be chosen."""
        return any(session.phase is Phase.PROPOSED for session in self.sessions.values())

    def live(self) -> dict[int, None]:
        """The ranks that a session waits for."""
        sessions = (session for session in self.sessions.values() if not session.phase.final)
        return {rank: None for session in sessions for rank, part in session.parts.items() if not part.over}

    def _start(self, body: Body, now: float) -> dict[str, Value]:
        asked, choice = Asked.from_body(body), Choice.from_body(body)
        ranks = choice.of({rank: self._facts_of(rank) for rank in self._ranks}, self._world_size)
        numbers = (int(name[1:]) for name in self.sessions if name != STATIC)
        name = f"p{max(numbers, default=0) + 1}"
        session = Agreement(name, ranks, asked, now + ARM_TIMEOUT)
        objection = self._limit(asked, ranks) or self._obstacle(session, asked.at)
        if objection is None and asked.at is not None:
            objection = self._too_late(session, asked.at)
        if objection is not None:
            raise RecordError(objection)
        if len(ranges(ranks)) > _LONGEST_RANKS:
            raise RecordError("too many separate ranks to write down; choose ranges of ranks")
        self.sessions[name] = session
        self._estimates[name] = self.measured(asked.options)
        self._settle(session, now)
        return {"session": name, "ranks": ranges(ranks), "count": len(ranks)}

    def _stop(self, body: Body, now: float) -> dict[str, Value]:
        name = text(body, "session")
        live = [each.name for each in self.sessions.values() if not each.phase.final]
        wanted = live if name == "" else [name]
        if name and name not in self.sessions:
            raise RecordError(f"there is no session {name!r}; there are: {', '.join(self.sessions) or 'none'}")
        stopped = [each for each in wanted if each in live]
        for each in stopped:
            self.sessions[each].stop("stopped by request")
            self._settle(self.sessions[each], now)
        return {"stopped": ",".join(stopped)}

    def _facts_of(self, rank: int) -> RankFacts:
        there = self._ranks[rank]
        return RankFacts(there.host, there.about, self._pace.lag(rank), self._pace.seconds_per_step(rank))

    def _limit(self, asked: Asked, ranks: tuple[int, ...]) -> str | None:
        demanded = [session for session in self.sessions.values() if session.name != STATIC]
        if self._limits.sessions is not None and len(demanded) >= self._limits.sessions:
            return (
                f"this run had {counted(len(demanded), 'session')} already, which is the limit (rankd.profile.sessions)"
            )
        if self._limits.size is not None:
            used = sum(self.bytes_of(session) for session in self.sessions.values())
            more = estimated_bytes(asked.options, asked.steps, self.measured(asked.options)) * len(ranks)
            if used + more > self._limits.size:
                return (
                    f"the sessions of this run hold {counted(used, 'byte')}, and this one may need {more} more; "
                    f"the limit is {self._limits.size} (rankd.profile.size)"
                )
        return None

    def bytes_of(self, session: Agreement) -> int:
        """What the ranks have written, as they report."""
        reported = sum(integer(part.report, "bytes") or 0 for part in session.parts.values())
        return min(max(reported, self._before.get(session.name, (0, 0))[0]), MAX_STEP)

    def measured(self, options: ProfilerOptions) -> int | None:
        """The most bytes a step that a rank has reported with these options; None: nobody has."""
        found = [self._step_bytes(session) for session in self.sessions.values() if session.asked.options == options]
        return max(found, default=0) or None

    def _step_bytes(self, session: Agreement) -> int:
        found = [
            (integer(part.report, "bytes") or 0) // count
            for part in session.parts.values()
            if (count := integer(part.report, "count"))
        ]
        return max(found, default=self._before.get(session.name, (0, 0))[1])

    def _line(self, session: Agreement) -> str:
        """A session's line in the log."""
        ranks = ranks_text(session.parts)
        steps = "" if session.window is None else session.window.steps
        done = [rank for rank, part in session.parts.items() if part.well]
        match session.phase:
            case Phase.PROPOSED:
                what = counted(session.asked.steps, "step")
                said = f"proposed to {ranks}: {what}, level {session.asked.options.level}"
            case Phase.COMMITTED:
                said = f"{steps} on {ranks}"
            case Phase.DONE:
                said = f"done: {steps} on {ranks}, {counted(self.bytes_of(session), 'byte')}"
            case _:
                also = f"; done: {ranks_text(done)}" if done else ""
                said = f"{session.phase.value}: {session.reason}{also}"
        return f"{session.name} {said}"

    # -- one step for all ---------------------------------------------------------------------------------------------

    def _obstacle(self, session: Agreement, at: int | None) -> str | None:
        """Why these steps (None: not known yet) cannot be: another session has them on one of the ranks."""
        for other in self.sessions.values():
            shared = [rank for rank in session.parts if rank in other.parts and _busy(other, rank)]
            if other is session or other.phase.final or not shared:
                continue
            who = ranks_text(shared)
            if other.window is None:
                return f"{other.name} has been proposed to {who}; its steps are not decided yet"
            if at is not None and at <= other.window.end_step and other.window.start_step < at + session.asked.steps:
                return f"{other.name} profiles {other.window.steps} on {who}"
            # Without --at a step is chosen soon: what is recording now, or about to, is in the way.
            if at is None and self._pace.front() + 1 >= other.window.start_step:
                return f"{other.name} profiles {other.window.steps} on {who}"
        return None

    def _too_late(self, session: Agreement, at: int) -> str | None:
        front = max(map(self._pace.step, session.parts))
        if at <= front:
            return f"step {at} is past: the ranks are at step {front}"
        last = at + session.asked.steps - 1
        if self._total_steps is not None and last > self._total_steps:
            return f"training ends at step {self._total_steps}, before step {last}"
        return None

    def _decide_step(self, session: Agreement, now: float) -> None:
        """All have armed: choose the step, or find that there is none."""
        first = self._pace.reachable(session.parts, self._margin, now, self._known_pace)
        front = max(map(self._pace.step, session.parts))
        if first is None:
            if now < session.deadline:
                return
            if front == 0 and session.asked.at is None:
                session.abandon("training has not begun, so no step can be chosen; give --at, or ask again")
                return
            # In ARM_TIMEOUT no rank was seen to do a step: one more is far enough away.
            first = front + 2
        start = first if session.asked.at is None else session.asked.at
        if start < first:
            session.abandon(
                f"step {start} is too near: all ranks would hear of it in time for step {first} at the earliest"
            )
            return
        objection = self._obstacle(session, start) or self._too_late(session, start)
        if objection is not None or start + session.asked.steps > MAX_STEP:
            session.abandon(objection or "no such step")
            return
        session.commit(Window(start, start + session.asked.steps - 1))

    def _settle(self, session: Agreement, now: float, *, progress: bool = True) -> None:
        """Journal what has changed of a session, and say what is due.

        Args:
            progress: also that more ranks are through; a thousand of them are through within a second.
        """
        if session.ready:
            self._decide_step(session, now)
        facts = self._facts(session)
        before = self._journalled.get(session.name)
        changed = before is None or any(facts[name] != before.get(name) for name in facts if name not in _PROGRESS)
        if changed or (progress and facts != before):
            self._decide(session.name, facts, self._line(session) if changed else "")
        for rank in session.parts:
            self._tell(session, rank, now)

    def _tell(self, session: Agreement, rank: int, now: float) -> None:
        if rank in self._ranks and (command := session.due(rank, now)) is not None:
            self._out.append(Tell(rank, KIND, {**command, "bytes_per_step": self._estimates.get(session.name)}))

    def _facts(self, session: Agreement) -> dict[str, Value]:
        done = ranges(rank for rank, part in session.parts.items() if part.well)
        size, step = self.bytes_of(session), self._step_bytes(session)
        facts = {**session.facts(), "done": done, "bytes": size, "step_bytes": step}
        return {**facts, "process": self._static_of} if session.name == STATIC else facts

    def _decide(self, key: str, facts: Body, line: str) -> None:
        if facts == self._journalled.get(key):
            return
        self.changes += 1
        self._journalled[key] = dict(facts)
        self._out.append(Decide(KIND, key, dict(facts), line))

    def _with(self, rank: int) -> list[Agreement]:
        return [session for session in self.sessions.values() if rank in session.parts]

    # -- the configuration's session ----------------------------------------------------------------------------------

    def _configured(self, rank: int, process: int, now: float) -> None:
        """Rank 0's section counts for all; who differs is told, and told of."""
        self._sections[rank] = read(self._ranks[rank].about)
        self._sections = {r: s for r, s in self._sections.items() if r < self._world_size}
        reference = self._sections.get(0)
        if reference is None:
            return
        if rank == 0 and self._static_of != process:
            self._static_of = process
            self._begin_static(reference)
        if any(section != reference for section in self._sections.values()):
            self._warn_at = self._warn_at or now + _DIFFERENCES_AFTER
        for other in list(self._sections) if rank == 0 else [rank]:
            if self._sections[other].chooses(other) and not reference.chooses(other) and other in self._ranks:
                reason = "rank 0's configuration does not choose this rank"
                self._out.append(Tell(other, KIND, {"do": "abort", "session": STATIC, "reason": reason}))

    def _begin_static(self, section: ProfilerConfig) -> None:
        chosen = [rank for rank in range(self._world_size) if section.chooses(rank)]
        if not chosen:
            self.sessions.pop(STATIC, None)
            return
        path = None if section.output_path is None else str(section.output_path)
        options = ProfilerOptions(
            section.profiler_level, section.mstx, section.profile_memory, section.profile_cpu, section.with_stack
        )
        try:
            asked = Asked(section.step_count, section.start_step, options, path)
        except RankdError:
            # More steps than a session on demand may have, or a path with `..`: every rank uses its own.
            return
        window = Window(section.start_step, section.end_step)
        self.sessions[STATIC] = Agreement(STATIC, chosen, asked, 0.0, window)

    def _warn_of_differences(self) -> None:
        self._warn_at = None
        if 0 not in self._sections:
            return
        lines = "; ".join(differences(self._sections))[:2_000]
        if lines and lines != self._warned:
            self._warned = lines
            said = f"the ranks' profiler sections differ, and rank 0's is used: {lines}"
            self._decide(_DIFFERENCES, {"text": lines}, said)

    # -- restart ------------------------------------------------------------------------------------------------------

    def _recall(self, decided: Iterable[tuple[str, Body]]) -> None:
        for key, facts in decided:
            self._journalled[key] = dict(facts)
            if key == _DIFFERENCES:
                self._warned = text(facts, "text")
                continue
            try:
                session = self.sessions[key] = Agreement.from_facts(key, facts)
                for rank in parse_ranks(done) if (done := text(facts, "done")) else ():
                    session.recall(rank, {"state": State.DONE.value})
            except RankdError:
                # Of another version: it is not gone on with.
                continue
            if key == STATIC:
                self._static_of = integer(facts, "process")
            self._before[key] = (integer(facts, "bytes") or 0, integer(facts, "step_bytes") or 0)


def _parts(session: Agreement) -> list[dict[str, object]]:
    named = ("state", "reason", "first", "last", "count", "path", "bytes", "seconds", "covered")
    return [
        {"rank": rank, **{name: part.report[name] for name in named if name in part.report}, "outcome": part.outcome()}
        for rank, part in session.parts.items()
    ]


def _busy(session: Agreement, rank: int) -> bool:
    """Whether the profiler of this rank is this session's, or will be."""
    part = session.parts[rank]
    return not part.over and part.state != State.EXPORTING.value
