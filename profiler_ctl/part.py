"""Profiling as one of the collector's parts (`collector.protocol.steering`): news of ranks in, moves out. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..collector.protocol.messages import Facts
from ..collector.protocol.steering import Move, Rank, Ranks
from .asked import text
from .coordinator import Coordinator, Limits

__all__ = ["ProfilingPart"]

# While nothing is proposed, the ranks' steps are looked at this often, in seconds: it costs with their number.
_LOOK = 1.0


class ProfilingPart:
    """See `protocol.steering.Part`. Questions: `profile.start`, `profile.stop`, `profile.status`.

    Args:
        limits: what profiling on demand may cost.
        beat_interval: seconds after which a rank has said where it is, at the latest.
    """

    def __init__(self, limits: Limits, beat_interval: float) -> None:
        self._limits = limits
        self._beat_interval = beat_interval
        self._coordinator = Coordinator(limits, beat_interval)
        self._looked = -math.inf

    @property
    def changes(self) -> int:
        """Counts what changes the status."""
        return self._coordinator.changes

    def status(self) -> list[dict[str, object]]:
        """All sessions, as JSON holds them."""
        return self._coordinator.status()

    def restore(self, decisions: Mapping[str, Facts]) -> None:
        """Take up what was decided: what was not is called off, as soon as there is somebody to tell."""
        self._coordinator = Coordinator(self._limits, self._beat_interval, decisions.items())

    def asked(self, kind: str, facts: Facts, ranks: Ranks, /) -> tuple[Sequence[Move], Mapping[str, Any]]:
        """A command line asks."""
        _, _, what = kind.partition(".")
        if what == "status":
            return (), {"sessions": self.status()}
        self._look(ranks)
        answer = self._coordinator.ask(what, facts, ranks.now)
        return self._coordinator.take(), answer

    def reported(self, rank: int, _: str, facts: Facts, ranks: Ranks, /) -> Sequence[Move]:
        """A rank reports; a command that it could not obey comes back with the reason."""
        refused = facts.get("refused")
        if isinstance(refused, str):
            facts = self._refusal(rank, text(facts, "session"), refused)
        self._coordinator.reported(rank, facts, ranks.now)
        return self._coordinator.take()

    def joined(self, rank: int, ranks: Ranks, /) -> Sequence[Move]:
        """A rank is connected."""
        there = ranks.get(rank)
        if there is not None:
            self._coordinator.joined(
                rank,
                there.process,
                ranks.now,
                host=there.host,
                about=there.about,
                world_size=ranks.world_size,
                total_steps=there.total_steps,
            )
            self._at(there, ranks)
        return self._coordinator.take()

    def tick(self, ranks: Ranks, /) -> Sequence[Move]:
        """See who has left, where the ranks are, and what is due."""
        thorough = ranks.now - self._looked >= _LOOK
        if self._coordinator.undecided or thorough:
            self._look(ranks)
            for rank in self._coordinator.live():
                why = ranks.left(rank)
                if why is not None:
                    self._coordinator.gone(rank, why, ranks.now)
        self._coordinator.tick(ranks.now, ranks.seconds_per_step, thorough=thorough)
        return self._coordinator.take()

    def ending(self, ranks: Ranks, /) -> Sequence[Move]:
        """The collector ends: so do the sessions of the ranks that have."""
        self._looked = -math.inf
        return self.tick(ranks)

    def _look(self, ranks: Ranks) -> None:
        self._looked = ranks.now
        there = ranks.connected()
        self._coordinator.connected(rank.rank for rank in there)
        for rank in there:
            self._at(rank, ranks)

    def _at(self, rank: Rank, ranks: Ranks) -> None:
        # It is at that step since then, or later.
        self._coordinator.at(rank.rank, rank.step, ranks.now - min(rank.heard, ranks.beat_interval))

    def _refusal(self, rank: int, name: str, reason: str) -> Facts:
        session = self._coordinator.sessions.get(name)
        part = None if session is None else session.parts.get(rank)
        serial = 1 if part is None else part.serial + 1
        return {"session": name, "state": "refused", "reason": reason, "serial": serial}
