"""One profiling session as the collector sees it: a table of transitions, and what each rank is to hear. Pure.

propose → all have armed → commit at one step | abort → the ranks' reports → done, failed or stopped

The step is decided once, and it (or the abort) is in the journal before any rank hears of it. So whatever is lost,
delayed or said again, two ranks of one session cannot start at different steps; a rank that hears of it too late does
not start at all, and then the others are stopped. What a rank has to hear is derived from the session's phase and from
the rank's latest report alone, and said until the report shows that it was heard.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..collector.protocol.checks import MAX_STEP
from ..collector.protocol.errors import ProfilerError, RecordError
from ..collector.protocol.ranges import parse_ranks, ranges, ranks_text
from .asked import Asked, Body, Value, integer, text
from .plan import State, Window

__all__ = ["UNKNOWN", "Agreement", "Happening", "Part", "Phase"]

# What a process answers that was never proposed the session: it has come after the one that was.
UNKNOWN = "unknown"
# What was said and not answered is said again after so many seconds; only broken connections lose anything.
RESEND = 2.0


class Phase(enum.Enum):
    """How far a session is. `final` ones are never left."""

    PROPOSED = "proposed"  # not all have armed
    COMMITTED = "committed"  # the step is decided
    FAILING = "failing"  # a rank has missed the step: the others are being stopped
    STOPPING = "stopping"  # somebody has asked for its end
    DONE = "done"  # every rank has recorded all steps, and its output was checked
    FAILED = "failed"
    STOPPED = "stopped"
    ABORTED = "aborted"  # nobody started

    @property
    def final(self) -> bool:
        return self in (Phase.DONE, Phase.FAILED, Phase.STOPPED, Phase.ABORTED)


class Happening(enum.Enum):
    """What can happen to a session."""

    COMMIT = "all have armed, and the step is chosen"
    REFUSED = "a rank cannot take part"
    SILENT = "a rank has not answered in time"
    IMPOSSIBLE = "there is no step that suits"
    GONE = "a rank is gone"
    STOP = "somebody asks for its end"
    RESTARTED = "the collector has started again"
    MISSED = "a rank will not start at the step"
    ALL_WELL = "all ranks are through, and all did what was asked"
    ALL_OVER = "all ranks are through, and some did not do what was asked"


_ALL = tuple(Happening)
_OVER = (Happening.ALL_WELL, Happening.ALL_OVER)


def _to(phase: Phase, *happenings: Happening) -> dict[Happening, Phase]:
    return dict.fromkeys(happenings, phase)


# A missing entry is the error: it cannot happen in that phase.
TRANSITIONS: dict[Phase, dict[Happening, Phase]] = {
    Phase.PROPOSED: {
        **_to(
            Phase.ABORTED,
            *(Happening.REFUSED, Happening.SILENT, Happening.IMPOSSIBLE),
            *(Happening.GONE, Happening.STOP, Happening.RESTARTED),
        ),
        Happening.COMMIT: Phase.COMMITTED,
    },
    Phase.COMMITTED: {
        **_to(Phase.COMMITTED, Happening.GONE, Happening.RESTARTED),
        Happening.MISSED: Phase.FAILING,
        Happening.STOP: Phase.STOPPING,
        Happening.ALL_WELL: Phase.DONE,
        Happening.ALL_OVER: Phase.FAILED,
    },
    Phase.FAILING: {
        **_to(Phase.FAILING, Happening.GONE, Happening.RESTARTED, Happening.MISSED, Happening.STOP),
        **_to(Phase.FAILED, *_OVER),
    },
    Phase.STOPPING: {
        **_to(Phase.STOPPING, Happening.GONE, Happening.RESTARTED, Happening.MISSED, Happening.STOP),
        **_to(Phase.STOPPED, *_OVER),
    },
    **{phase: _to(phase, *_ALL) for phase in Phase if phase.final},
}

_UNANSWERED = ("", State.PROPOSED.value)
_NOT_COMMITTED = (*_UNANSWERED, State.ARMED.value)
_FINISHED = (*(state.value for state in State if state.final), UNKNOWN)
# After the commit, these mean that the rank will not start at the step, though its process lives.
_MISSING = (State.MISSED.value, State.REFUSED.value, State.ABORTED.value)


# Of a report's texts, in characters; a rank's own ends are well below.
_LONGEST = {"state": 32, "reason": 500, "path": 4_096}
_COUNTS = ("first", "last", "count", "bytes")


def _kept(report: Body) -> dict[str, Value]:
    """What counts of a report, each of its own type and bounded: it is kept, and shown, for each rank."""
    kept: dict[str, Value] = {name: text(report, name)[:most] for name, most in _LONGEST.items() if text(report, name)}
    kept |= {name: number for name in _COUNTS if (number := integer(report, name)) is not None}
    seconds, covered = report.get("seconds"), report.get("covered")
    if isinstance(seconds, (int, float)) and not isinstance(seconds, bool):
        kept["seconds"] = float(seconds)
    return {**kept, "covered": covered} if isinstance(covered, bool) else kept


@dataclass(slots=True)
class Part:
    """What is known of one rank in a session.

    Attributes:
        state: of its latest report; "": none since its process was (re-)joined.
        serial: of that report; older ones that come later do not count.
        report: that report.
        gone: why the rank is taken for gone; None: it is not.
        told, told_at: what was said to it last, and when.
    """

    state: str = ""
    serial: int = 0
    report: dict[str, Value] = field(default_factory=dict)
    gone: str | None = None
    told: str = ""
    told_at: float = 0.0

    @property
    def finished(self) -> bool:
        """Its process has nothing more to do."""
        return self.state in _FINISHED

    @property
    def over(self) -> bool:
        """Nothing more is to be waited for."""
        return self.finished or self.gone is not None

    @property
    def well(self) -> bool:
        """It has recorded all steps, and its output was checked."""
        return self.state == State.DONE.value and not self.report.get("reason")

    def outcome(self) -> str:
        """How it stands, for a person."""
        if self.gone is not None and not self.finished:
            return self.gone
        why = text(self.report, "reason")
        name = "its process was replaced" if self.state == UNKNOWN else self.state or "not answered"
        return f"{name}: {why}" if why else name


class Agreement:
    """One session.

    Args:
        name: a short word.
        ranks: who is to profile.
        asked: what.
        deadline: until when all have to have armed (the caller's clock).
        window: the steps, where they are decided already (the configuration's session).
    """

    def __init__(
        self, name: str, ranks: Iterable[int], asked: Asked, deadline: float, window: Window | None = None
    ) -> None:
        self.name = name
        self.asked = asked
        self.deadline = deadline
        self.window = window
        self.phase = Phase.PROPOSED if window is None else Phase.COMMITTED
        self.reason = ""
        self.parts = {rank: Part() for rank in sorted(set(ranks))}
        # As text, which is wanted often and never changes.
        self.ranks = ranges(self.parts)
        self._settled = False

    @property
    def settled(self) -> bool:
        """It is over, and nobody has to hear of that any more."""
        self._settled = self._settled or (self.phase.final and all(part.over for part in self.parts.values()))
        return self._settled

    @property
    def ready(self) -> bool:
        """All have armed: `commit` or `abandon` comes next."""
        return self.phase is Phase.PROPOSED and all(p.state == State.ARMED.value for p in self.parts.values())

    # -- what happens -------------------------------------------------------------------------------------------------

    def commit(self, window: Window) -> None:
        """The steps are chosen; only where `ready`."""
        if not self.ready:
            raise ProfilerError(f"{self.name} cannot be committed: not all ranks have armed")
        self._on(Happening.COMMIT)
        self.window = window

    def abandon(self, reason: str) -> None:
        """There are no steps that suit."""
        self._on(Happening.IMPOSSIBLE, reason)

    def stop(self, reason: str) -> None:
        """Somebody asks for its end."""
        self._on(Happening.STOP, reason)

    def restarted(self) -> None:
        """The collector has started again, with what its journal says."""
        self._on(Happening.RESTARTED, "the collector was started again before the step was decided")

    def joined(self, rank: int) -> None:
        """A process of this rank has said hello, perhaps another one: what it knows is asked again."""
        part = self.parts[rank]
        if part.finished and self.phase.final:
            return
        part.gone, part.state, part.serial, part.told = None, "", 0, ""
        self._settled = False

    def gone(self, rank: int, why: str) -> None:
        """This rank has ended or is silent for too long."""
        part = self.parts[rank]
        if part.finished or self.phase.final:
            part.gone = part.gone or why
            return
        part.gone = why
        self._on(Happening.GONE, f"rank {rank}: {why}")
        self._see_whether_all_are_through()

    def reported(self, rank: int, report: Body) -> bool:
        """A report of this rank. False: it is an old one, which changes nothing."""
        part = self.parts[rank]
        serial = integer(report, "serial") or 0
        if serial <= part.serial:
            return False
        kept = _kept(report)
        part.serial, part.state, part.report, part.gone = serial, text(kept, "state"), kept, None
        if part.state == UNKNOWN and self.phase is not Phase.ABORTED:
            part.gone = "its process was replaced"
            self._on(Happening.GONE, f"rank {rank}: {part.gone}")
        elif self.phase is Phase.PROPOSED and part.finished:
            self._on(Happening.REFUSED, f"rank {rank}: {text(kept, 'reason') or part.state}")
        elif part.state in _MISSING and not self.phase.final:
            self._on(Happening.MISSED, f"rank {rank}: {text(kept, 'reason') or part.state}")
        self._see_whether_all_are_through()
        return True

    def tick(self, now: float) -> None:
        """What time has made due."""
        if self.phase is Phase.PROPOSED and not self.ready and now >= self.deadline:
            silent = [rank for rank, part in self.parts.items() if part.state != State.ARMED.value]
            self._on(Happening.SILENT, f"no answer in time from {ranks_text(silent)}")

    # -- what is to be said -------------------------------------------------------------------------------------------

    def due(self, rank: int, now: float) -> dict[str, Value] | None:
        """What this rank is to hear now; it counts as said then."""
        part = self.parts[rank]
        command = self._command(part)
        if command is None or part.gone is not None:
            return None
        what = str(command["do"])
        if part.told == what and now - part.told_at < RESEND:
            return None
        part.told, part.told_at = what, now
        return command

    def _command(self, part: Part) -> dict[str, Value] | None:
        name = {"session": self.name}
        match self.phase:
            case Phase.PROPOSED if part.state in _UNANSWERED:
                return {"do": "propose", **name, **self.asked.body()}
            case Phase.COMMITTED if part.state in _NOT_COMMITTED and self.window is not None:
                steps = {"start": self.window.start_step, "end": self.window.end_step}
                return {"do": "commit", **name, **steps, **self.asked.body()}
            case Phase.FAILING | Phase.STOPPING if not part.finished:
                return {"do": "stop", **name, "reason": self.reason}
            case Phase.ABORTED if not part.finished:
                return {"do": "abort", **name, "reason": self.reason}
        return None

    # -- what must survive --------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Value]:
        """The session without its parts, flat."""
        steps = (None, None) if self.window is None else (self.window.start_step, self.window.end_step)
        return {
            "phase": self.phase.value,
            "ranks": self.ranks,
            "start": steps[0],
            "end": steps[1],
            "reason": self.reason,
            **self.asked.body(),
        }

    @classmethod
    def from_facts(cls, name: str, facts: Body) -> Agreement:
        """The session that `facts` was taken of.

        Raises:
            RecordError: these are no such facts.
        """
        start, end = integer(facts, "start"), integer(facts, "end")
        window = Window(start, end) if start and end and start <= end <= MAX_STEP else None
        self = cls(name, parse_ranks(text(facts, "ranks")), Asked.from_body(facts), 0.0, window)
        try:
            self.phase = Phase(facts.get("phase"))
        except ValueError:
            raise RecordError(f"{name}: no phase of a session: {facts.get('phase')!r}") from None
        self.reason = text(facts, "reason")
        return self

    def recall(self, rank: int, report: Body) -> None:
        """The last word of a rank, as the journal has it."""
        part = self.parts.get(rank)
        if part is not None:
            part.state, part.report = text(report, "state"), dict(report)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _see_whether_all_are_through(self) -> None:
        if self.phase in (Phase.PROPOSED, Phase.ABORTED) or not all(part.over for part in self.parts.values()):
            return
        bad = [f"rank {rank}: {part.outcome()}" for rank, part in self.parts.items() if not part.well]
        self._on(Happening.ALL_OVER if bad else Happening.ALL_WELL, "; ".join(bad[:4]) + ("; …" if bad[4:] else ""))

    def _on(self, happening: Happening, reason: str = "") -> None:
        before = self.phase
        try:
            self.phase = TRANSITIONS[before][happening]
        except KeyError:
            raise ProfilerError(f"a session that is {before.value} cannot see this: {happening.value}") from None
        # The first reason is the cause, and the rest comes of it.
        if self.phase is not before and before in (Phase.PROPOSED, Phase.COMMITTED):
            self.reason = reason[:500]
