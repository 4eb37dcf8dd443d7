"""Pure: `rankd sample`, the collector's side. All ranks change at one step that none of them has reached.

The step is chosen from where the ranks are and how fast they go. A rank that was told too late says so; then a later
step is chosen for all. Until then the ranks' steps differ in how much of them is recorded, and in nothing else.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .protocol.checks import MAX_STEP, check_int, shown
from .protocol.errors import RankdError, RecordError
from .protocol.messages import Facts
from .protocol.steering import RATES, SAMPLE, Decide, Move, Ranks, Tell, sampled_text
from .protocol.wording import counted

__all__ = ["STATUS", "Sampler"]

STATUS = "sample.status"
# A command needs milliseconds; a rank in a garbage collection, or behind a slow link, some more.
_LEAD_SECONDS = 1.0
# Where the pace is not known yet.
_FEW_STEPS = 5
# The pace comes of the ranks' clocks, which may say anything.
_MOST_STEPS = 1_000_000
_MOST_TRIES = 8


class Sampler:
    """The part `sample`; see `protocol.steering.Part`."""

    def __init__(self) -> None:
        self._number = 0
        self._facts: Facts | None = None
        self._confirmed: set[int] = set()
        # Who was told when it was decided: only of these it is said that they change at the same step.
        self._told: set[int] = set()
        self._tries = 0

    def restore(self, decisions: Mapping[str, Facts]) -> None:
        """Take up what was decided before; ranks are told again as they come back."""
        for facts in decisions.values():
            number = facts.get("number")
            if isinstance(number, int):
                self._number = number
                # What cannot be told is not taken up: it would fail with each rank that comes back.
                with contextlib.suppress(RecordError):
                    self._facts = Tell(0, SAMPLE, facts).facts

    def asked(self, kind: str, facts: Facts, ranks: Ranks, /) -> tuple[Sequence[Move], Mapping[str, Any]]:
        """Choose the first step, decide and tell; or how far that is."""
        if kind == STATUS:
            return (), self._status(ranks)
        if kind != SAMPLE:
            raise RankdError(f"sampling knows no {shown(kind)}")
        rates, steps = _checked(facts)
        self._tries = 0
        moves = self._decide(rates, steps, ranks)
        return moves, self._status(ranks)

    def reported(self, rank: int, _: str, facts: Facts, ranks: Ranks, /) -> Sequence[Move]:
        """A rank has it, in time or too late."""
        if self._facts is None or facts.get("number") != self._number or rank not in self._told - self._confirmed:
            return ()
        if facts.get("late") is True and self._tries < _MOST_TRIES:
            first, last = self._facts["first"], self._facts["last"]
            steps = last - first + 1 if isinstance(first, int) and isinstance(last, int) else None
            # Where there is no later step, it stays as it is.
            with contextlib.suppress(RankdError):
                return self._decide({name: self._facts.get(name) for name in RATES}, steps, ranks)
        self._confirmed.add(rank)
        return ()

    def joined(self, rank: int, _: Ranks, /) -> Sequence[Move]:
        """It may be a new process, or may have missed it: the same steps hold for all."""
        return () if self._facts is None else (Tell(rank, SAMPLE, self._facts),)

    def tick(self, _: Ranks, /) -> Sequence[Move]:
        """Nothing is ever due."""
        return ()

    def ending(self, _: Ranks, /) -> Sequence[Move]:
        """What was chosen holds when training goes on."""
        return ()

    def _decide(self, rates: Facts, steps: int | None, ranks: Ranks) -> Sequence[Move]:
        connected = ranks.connected()
        if not connected:
            raise RankdError("no rank is connected at the moment, so there is nobody to tell")
        first = max(rank.step for rank in connected) + self._lead(ranks)
        last = None if steps is None else first + steps - 1
        if max(first, last or 0) > MAX_STEP:
            what = "all steps" if steps is None else counted(steps, "step")
            raise RankdError(f"{what} from step {first} on: that is beyond {MAX_STEP}, the last there is")
        self._number += 1
        self._tries += 1
        self._facts = {"number": self._number, "first": first, "last": last, **rates}
        self._told, self._confirmed = {rank.rank for rank in connected}, set()
        tell = [Tell(rank.rank, SAMPLE, self._facts) for rank in connected]
        return [Decide(SAMPLE, "newest", self._facts, sampled_text(self._facts)), *tell]

    def _lead(self, ranks: Ranks) -> int:
        """How many steps ahead no rank is when the command comes: more each time that it was not enough."""
        pace = ranks.seconds_per_step
        # A rank may be ahead of where it has said that it is.
        wanted = (_LEAD_SECONDS + ranks.beat_interval) / pace if pace and pace > 0 else _FEW_STEPS
        steps = math.ceil(wanted) if wanted < _MOST_STEPS else _MOST_STEPS
        return 1 + (steps << self._tries)

    def _status(self, ranks: Ranks) -> Mapping[str, Any]:
        facts = self._facts or {}
        waiting = sorted(rank for rank in self._told - self._confirmed if ranks.get(rank) is not None)
        return {"facts": dict(facts), "confirmed": sorted(self._confirmed), "waiting": waiting}


def _checked(facts: Facts) -> tuple[Facts, int | None]:
    """The rates that are asked for (all None: those of the configuration), and for how many steps."""
    unknown = set(facts) - {*RATES, "for_steps"}
    if unknown:
        raise RankdError(f"sampling has no {', '.join(sorted(map(shown, unknown)))}; it has {', '.join(RATES)}")
    try:
        for name, value in facts.items():
            if value is not None:
                check_int(name, value, 1)
    except RecordError as e:
        raise RankdError(str(e)) from None
    steps = facts.get("for_steps")
    return {name: facts.get(name) for name in RATES}, steps if isinstance(steps, int) else None
