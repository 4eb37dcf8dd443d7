"""Questions of command lines, and what ranks are told: joins the parts that steer with the run. No sockets here."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .intake import Session
from .protocol.checks import printable, shown
from .protocol.errors import ProtocolError, RankdError
from .protocol.messages import Ask, Facts, Report
from .protocol.steering import Move, Part, Rank
from .run import DONE, RankState, Run
from .status import Beats, Latest

__all__ = ["RanksNow", "Steering"]

log = logging.getLogger("rankd.collector")


class RanksNow:
    """The connected ranks, looked at when somebody asks: see `protocol.steering.Ranks`.

    Args:
        sessions: of the connected processes, by rank.
        now: seconds, as the beats have it.
    """

    def __init__(
        self, run: Run, beats: Beats, latest: Latest, sessions: Mapping[int, Session], now: float, beat_interval: float
    ) -> None:
        self.now = now
        self.beat_interval = beat_interval
        self.world_size = run.intake.attempt.world_size if run.intake.attempt else 0
        self.seconds_per_step = latest.seconds_per_step()
        self._run = run
        self._beats = beats
        self._sessions = sessions

    def connected(self) -> Sequence[Rank]:
        """All of them, in order."""
        return [self._rank(self._sessions[rank]) for rank in sorted(self._sessions)]

    def get(self, rank: int) -> Rank | None:
        """One of them."""
        session = self._sessions.get(rank)
        return None if session is None else self._rank(session)

    def left(self, rank: int) -> str | None:
        """Why nothing more is expected of a rank."""
        view = self._run.ranks.get(rank)
        if view is None:
            return None
        ended = "ended" if view.reason in ("", DONE) else f"ended early: {view.reason}"
        reasons = {RankState.FINISHED: ended, RankState.LOST: "lost", RankState.CLOSED: "no part of the job any more"}
        return reasons.get(view.state)

    def _rank(self, session: Session) -> Rank:
        beat = self._beats.of(session.rank)
        step, heard = (0, float("inf")) if beat is None else (beat[0].step, self.now - beat[1])
        hello = session.hello
        at = max(step, session.step or 0)
        return Rank(session.rank, at, heard, hello.host, hello.about, session.number, hello.total_steps)


class Steering:
    """The parts by name; a kind is its part's name, or that and a dot and more.

    Args:
        parts: see `protocol.steering.Part`.
        ranks: the ranks as they are now.
    """

    def __init__(self, parts: Mapping[str, Part], ranks: Callable[[], RanksNow]) -> None:
        self._parts = parts
        self._ranks = ranks
        self._told: set[type[Exception]] = set()

    def restore(self, decisions: Mapping[str, Mapping[str, Facts]]) -> None:
        """The collector starts."""
        for name, part in self._parts.items():
            part.restore(decisions.get(name, {}))

    def asked(self, ask: Ask) -> tuple[Sequence[Move], bytes]:
        """What to do, and the answer once it is done, as JSON.

        Raises:
            RankdError: it cannot be done; says why.
        """
        part = self._part(ask.kind)
        if part is None:
            raise RankdError(f"this collector knows no {shown(ask.kind)}; it knows {', '.join(sorted(self._parts))}")
        try:
            moves, answer = part.asked(ask.kind, ask.facts, self._ranks())
            return moves, _json(answer)
        except RankdError:
            raise
        except Exception as e:
            log.exception("%s failed; the logs go on. Please report this", shown(ask.kind))
            raise RankdError(f"the collector failed at that ({type(e).__name__}: {e}); its log says more") from None

    def reported(self, rank: int, report: Report) -> Sequence[Move]:
        """A rank reports.

        Raises:
            ProtocolError: about nothing that there is.
        """
        part = self._part(report.kind)
        if part is None:
            raise ProtocolError(f"a report about {shown(report.kind)}")
        return self._shielded(lambda: part.reported(rank, report.kind, report.facts, self._ranks()))

    def joined(self, rank: int) -> Sequence[Move]:
        """A rank was welcomed."""
        return self._all(lambda part, ranks: part.joined(rank, ranks))

    def tick(self) -> Sequence[Move]:
        """Called some times a second."""
        return self._all(lambda part, ranks: part.tick(ranks))

    def ending(self) -> Sequence[Move]:
        """The collector is about to end."""
        return self._all(lambda part, ranks: part.ending(ranks))

    def _part(self, kind: str) -> Part | None:
        return self._parts.get(kind.split(".")[0])

    def _all(self, news: Callable[[Part, RanksNow], Sequence[Move]]) -> list[Move]:
        ranks = self._ranks()
        return [move for part in self._parts.values() for move in self._shielded(functools.partial(news, part, ranks))]

    def _shielded(self, call: Callable[[], Sequence[Move]]) -> Sequence[Move]:
        """An error of a part costs what it was about to do, and not the logs."""
        try:
            return call()
        except RankdError as e:
            log.warning("%s", printable(str(e), line=True))
        except Exception as e:
            # Ticks come ten times a second.
            if type(e) not in self._told:
                self._told.add(type(e))
                log.exception("telling ranks something has failed; the logs go on. Please report this")
        return ()


def _json(answer: Mapping[str, Any]) -> bytes:
    return json.dumps(answer, allow_nan=False).encode()
