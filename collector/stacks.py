"""Pure: `rankd stacks`, the collector's side: asks ranks where they are, and puts together those that say the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .protocol.checks import check_text, printable, shown
from .protocol.errors import RankdError, RecordError
from .protocol.messages import Facts
from .protocol.ranges import parse_ranks, ranges, ranks_text
from .protocol.steering import STACKS, Move, Ranks, Tell

__all__ = ["STACKS_FOUND", "StackRequests"]

STACKS_FOUND = "stacks.found"
# The texts of all groups, in characters; ranks that are at one place are one group.
_MOST_TEXT = 2**20
# What ranks said is let go after this.
_KEPT_SECONDS = 120.0


class StackRequests:
    """The part `stacks`; see `protocol.steering.Part`. The newest question is the one that counts."""

    def __init__(self) -> None:
        self._number = 0
        self._asked: list[int] = []
        self._found: dict[int, tuple[int, int, str]] = {}
        self._until = 0.0

    def restore(self, _: Mapping[str, Facts], /) -> None:
        """Nothing outlives a collector: who waits asks again."""

    def asked(self, kind: str, facts: Facts, ranks: Ranks, /) -> tuple[Sequence[Move], Mapping[str, Any]]:
        """Ask the ranks; or what they have said so far."""
        if kind == STACKS_FOUND:
            return (), self._answer(ranks)
        if kind != STACKS:
            raise RankdError(f"stacks know no {shown(kind)}")
        wanted = _wanted(facts.get("ranks"), ranks)
        self._number += 1
        self._asked, self._found = wanted, {}
        self._until = ranks.now + _KEPT_SECONDS
        told = {"number": self._number, "threads": facts.get("threads") is True}
        return [Tell(rank, STACKS, told) for rank in wanted], self._answer(ranks)

    def reported(self, rank: int, _: str, facts: Facts, ranks: Ranks, /) -> Sequence[Move]:
        """A rank says where it is, or why it does not."""
        if facts.get("number") != self._number or rank not in self._asked:
            return ()
        refused, text = facts.get("refused"), facts.get("text")
        said = f"refused: {refused}" if refused is not None else text
        step, micro_step = facts.get("step"), facts.get("micro_step")
        found = (step if isinstance(step, int) else 0, micro_step if isinstance(micro_step, int) else 0)
        self._found[rank] = (*found, printable(str(said)))
        self._until = ranks.now + _KEPT_SECONDS
        return ()

    def joined(self, _: int, ranks: Ranks, /) -> Sequence[Move]:
        """Another process is not what was asked."""
        return self.tick(ranks)

    def tick(self, ranks: Ranks, /) -> Sequence[Move]:
        """Let go of what nobody has fetched."""
        if self._found and ranks.now > self._until:
            self._asked, self._found = [], {}
        return ()

    def ending(self, _: Ranks, /) -> Sequence[Move]:
        """What was found goes with the collector."""
        return ()

    def _answer(self, ranks: Ranks) -> Mapping[str, Any]:
        groups: dict[str, list[int]] = {}
        for rank in sorted(self._found):
            groups.setdefault(self._found[rank][2], []).append(rank)
        room, out = _MOST_TEXT, []
        for text, those in sorted(groups.items(), key=lambda group: len(group[1])):
            steps = [self._found[rank][:2] for rank in those]
            kept = text[: max(0, room)] or "(left out: too much text)"
            room -= len(kept)
            out.append(
                {"ranks": ranges(those), "count": len(those), "from": min(steps), "to": max(steps), "text": kept}
            )
        silent = [rank for rank in self._asked if rank not in self._found]
        waiting = [rank for rank in silent if ranks.get(rank) is not None]
        return {"number": self._number, "groups": out, "waiting": waiting, "gone": sorted(set(silent) - set(waiting))}


def _wanted(given: object, ranks: Ranks) -> list[int]:
    connected = [rank.rank for rank in ranks.connected()]
    if not connected:
        raise RankdError("no rank is connected at the moment, so there is nobody to ask")
    if given is None:
        return connected
    try:
        check_text("ranks", given, 1_024)
        chosen = parse_ranks(str(given))
    except RecordError as e:
        raise RankdError(f"ranks: {e}") from None
    missing = sorted(chosen.difference(connected))
    if missing:
        raise RankdError(f"not connected: {ranks_text(missing)}; connected are {ranges(connected)}")
    return sorted(chosen)
