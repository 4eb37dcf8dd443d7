"""Pure: which ranks have been silent for too long, and which hold the others up. Time is an argument."""

from __future__ import annotations

from collections.abc import Iterable

from .entries import Back, HeldOut, Lost
from .ordering import Key

__all__ = ["Liveness"]


class Liveness:
    """Watches the ranks that count.

    Args:
        lost_after: seconds of silence after which a rank is lost.
        max_hold: seconds for which one position may be held up by a rank that is alive.
        lost: the ranks that are lost already (the collector has restarted).
    """

    def __init__(self, *, lost_after: float, max_hold: float, lost: Iterable[int] = ()) -> None:
        self._lost_after = lost_after
        self._max_hold = max_hold
        self._heard: dict[int, float] = {}
        self._watched: frozenset[int] = frozenset()
        self._lost = set(lost)
        self._head: tuple[Key, float] | None = None

    def heard(self, rank: int, now: float) -> Back | None:
        """Something came from this rank's process; Back where it had been lost."""
        self._heard[rank] = now
        if rank in self._lost:
            self._lost.discard(rank)
            return Back(rank)
        return None

    def rejoined(self, rank: int, now: float) -> None:
        """A new process of this rank was let in."""
        self._heard[rank] = now
        self._lost.discard(rank)

    def gone(self, rank: int, now: float) -> Lost:
        """This rank's process is known to be gone."""
        self._lost.add(rank)
        return Lost(rank, self.silent(rank, now), gone=True)

    def silent(self, rank: int, now: float) -> float:
        """Seconds since this rank was last heard."""
        return now - self._heard.get(rank, now)

    def stalled(self, seconds: float, now: float) -> None:
        """The collector itself was stopped, or could not write, for this long: no rank was silent in that time."""
        self._heard = {rank: min(when + seconds, now) for rank, when in self._heard.items()}
        if self._head is not None:
            self._head = (self._head[0], min(self._head[1] + seconds, now))

    def due(
        self, now: float, counting: frozenset[int], waiting: tuple[Key, frozenset[int]] | None
    ) -> list[Lost | HeldOut]:
        """What has to be given up at this moment.

        Args:
            counting: the ranks that the release waits for.
            waiting: the lowest position that is held up, and by whom.
        """
        out: list[Lost | HeldOut] = []
        for rank in counting - self._watched:
            # A rank that is expected (again) but not heard yet is given lost_after from now on.
            self._heard[rank] = now
        self._watched = counting
        for rank in sorted(counting):
            silent = now - self._heard[rank]
            if silent > self._lost_after:
                self._lost.add(rank)
                out.append(Lost(rank, silent))
        return out + self._held_out(now, waiting)

    def _held_out(self, now: float, waiting: tuple[Key, frozenset[int]] | None) -> list[HeldOut]:
        if waiting is None:
            self._head = None
            return []
        key, ranks = waiting
        if self._head is None or self._head[0] != key:
            self._head = (key, now)
        held = now - self._head[1]
        if held <= self._max_hold:
            return []
        return [HeldOut(rank, held) for rank in sorted(ranks - self._lost)]
