"""Where the ranks are, and how fast: from beats and blocks, as they come in. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

__all__ = ["Pace"]

# The pace is that of these last changes of a rank's step.
_SEEN = 8
# A rank that was away sends what it has kept, in a burst that says nothing of its pace; in seconds.
_BURST = 1.0
# Over a shorter time a change of the step says more of the network than of training.
_SHORTEST = 0.3


class Pace:
    """The steps of all ranks over time."""

    def __init__(self) -> None:
        # When each rank came to its last steps, and when it was last heard to be at the latest of them.
        self._seen: dict[int, deque[tuple[int, float]]] = {}
        self._heard: dict[int, float] = {}
        self._joined: dict[int, float] = {}

    def at(self, rank: int, step: int, now: float) -> None:
        """This rank is at `step` (0: before the first)."""
        self._heard[rank] = now
        seen = self._seen.setdefault(rank, deque(maxlen=_SEEN))
        # Training went back: a resume.
        back = bool(seen) and step < seen[-1][0]
        if back or now - self._joined.get(rank, -math.inf) < _BURST:
            seen.clear()
        if not seen or step > seen[-1][0]:
            seen.append((step, now))

    def joined(self, rank: int, now: float) -> None:
        """This rank is there, again or for the first time."""
        self._seen.pop(rank, None)
        self._joined[rank] = now

    def step(self, rank: int) -> int:
        """The latest step that is known."""
        seen = self._seen.get(rank)
        return seen[-1][0] if seen else 0

    def front(self) -> int:
        """The latest step of any rank."""
        return max((seen[-1][0] for seen in self._seen.values() if seen), default=0)

    def seconds_per_step(self, rank: int) -> float | None:
        """Of this rank, lately; None: too little was seen."""
        return self._slope(rank, _SEEN)

    def fastest(self, ranks: Iterable[int]) -> float | None:
        """Seconds a step of the fastest of these, over what was seen and over its last change; None: not known."""
        found = [each for rank in ranks for each in (self._slope(rank, _SEEN), self._slope(rank, 2)) if each]
        return min(found, default=None)

    def reachable(self, ranks: Iterable[int], margin: float, now: float, known: float | None = None) -> int | None:
        """The first step that none of these will have begun `margin` seconds from now; None: the pace is not known.

        Args:
            known: seconds a step, from elsewhere.
        """
        chosen = list(ranks)
        pace = min((each for each in (self.fastest(chosen), known) if each), default=None)
        if pace is None:
            return None
        steps = (self.step(rank) + (now - self._heard[rank]) / pace for rank in chosen if rank in self._heard)
        # One more for the step that is under way. Clocks that ranks go by may say anything, and so may their steps.
        found = max(steps, default=0.0) + margin / pace
        return math.ceil(found) + 1 if math.isfinite(found) else None

    def lag(self, rank: int) -> int:
        """Steps behind the front."""
        return self.front() - self.step(rank)

    def _slope(self, rank: int, changes: int) -> float | None:
        seen = list(self._seen.get(rank, ()))[-changes:]
        # Step 0 is the start of the process, and compiles.
        seen = [each for each in seen if each[0] > 0]
        if len(seen) < 2:
            return None
        (first, began), (last, ended) = seen[0], seen[-1]
        return (ended - began) / (last - first) if ended - began >= _SHORTEST else None
