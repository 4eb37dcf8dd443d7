"""Pure: how far back the journal must reach, so that a restart can make again what a log has lost at its end.

A log that is shorter than the newest checkpoint says (a torn write, a power failure) is made again from an older
checkpoint. While a rank is away, merged.log stands still and one checkpoint after the other says the same size: none of
them is of use then, but only one from before.
"""

from __future__ import annotations

from collections import deque

__all__ = ["TORN_BYTES", "Fallbacks"]

# So much of a log's end may be gone and is made again.
TORN_BYTES = 4_096


class Fallbacks:
    """The checkpoints from the newest one on that is older than what a log may have lost.

    Args:
        size: of merged.log at the checkpoint that this process has started from; 0: at the beginning of the journal.
        needed: the oldest entry that a restart from there reads.
    """

    def __init__(self, size: int = 0, needed: int = 0) -> None:
        self._checkpoints = deque([(size, needed)])

    def passed(self, size: int, needed: int) -> int | None:
        """The next checkpoint was written; from which entry on the journal is still needed. None: all of it is."""
        checkpoints = self._checkpoints
        checkpoints.append((size, needed))
        while checkpoints[1][0] + TORN_BYTES <= size:
            checkpoints.popleft()
        if checkpoints[0][0] + TORN_BYTES > size:
            return None
        return min(needed for _, needed in checkpoints)
