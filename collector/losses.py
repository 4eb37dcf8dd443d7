"""Pure: what the journal turns out to have lost, once ranks come back that were told more: one warning for all of them.

They come one after the other, so it is said when no more has come to light for a while. Time is an argument.
"""

from __future__ import annotations

from .accounts import Accounts
from .protocol.ranges import ranks_text
from .protocol.wording import counted

__all__ = ["Losses"]

# Within so many seconds the ranks of a job find their collector again.
_TOGETHER = 5.0
# What comes to light after the first warning (of a process that is gone, say) is told as seldom.
_LATER = 60.0


class Losses:
    """What has been found missing since the last warning."""

    def __init__(self) -> None:
        # Of each session: the records that were known as lost before.
        self._before: dict[int, int] = {}
        self._due = 0.0
        self._wait = _TOGETHER

    def found(self, session: int, accounts: Accounts, now: float) -> None:
        """A hole of this session has arrived, and is not counted yet."""
        if not self._before:
            self._due = now + self._wait
        self._before.setdefault(session, accounts.processes[session].lost)

    def due(self, accounts: Accounts, now: float, *, last: bool = False) -> str | None:
        """The warning, where it is time for one; `last`: there is no later."""
        if not self._before or (now < self._due and not last):
            return None
        lost, unknown, ranks = 0, False, set()
        for session, before in self._before.items():
            process = accounts.processes[session]
            lost += process.lost - before
            unknown |= process.uncounted
            if process.uncounted or process.lost > before:
                ranks.add(process.rank)
        self._before.clear()
        self._wait = _LATER
        if not ranks:
            return None
        records = counted(lost, "record") + " or more" * unknown if lost else "an unknown number of records"
        return (
            f"the journal has lost {records} of {ranks_text(ranks)} that had been acknowledged (has this node lost "
            "power, or was the journal changed?): they are missing in the logs, where lines `# gap` say so; all later "
            "ones are recorded"
        )
