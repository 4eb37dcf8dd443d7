"""What a rank does when the collector asks it to: handlers by kind of command.

A command is obeyed only with a proof of the run's key. Handlers run on the sender's thread: they note what is to be
done, quickly, and training does it at its next step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ..collector.protocol.checks import MAX_ENTRIES, clipped, printable, shown
from ..collector.protocol.keys import RunKey
from ..collector.protocol.messages import Facts, Report
from ..collector.protocol.wire import Command

__all__ = ["Commands", "Handler"]

log = logging.getLogger("rankd.agent")

# Takes a command's facts; what it returns is told to the collector.
Handler: TypeAlias = Callable[[Facts], Sequence[Report]]


class Commands:
    """The handlers of one process.

    Args:
        session: of this process (`Hello.session`).
        key: the run's key as this process knows it at the moment; None: it does not.
    """

    def __init__(self, session: bytes, key: Callable[[], RunKey | None]) -> None:
        self._session = session
        self._key = key
        self._handlers: dict[str, Handler] = {}
        self._warned = False

    def on(self, kind: str, handler: Handler) -> None:
        """Have commands of this kind handled; whatever the handler raises is told as a refusal."""
        self._handlers[kind] = handler

    def obey(self, command: Command) -> Sequence[Report]:
        """Do what the command says; what to tell the collector. Never raises."""
        kind = command.kind
        try:
            key = self._key()
            if key is None:
                return [_refusal(command, "the process does not know the run's key, so it takes no commands")]
            if not command.is_proved(key, self._session):
                self._warn_once()
                return [_refusal(command, "the command has no proof of the run's key")]
            handler = self._handlers.get(kind)
            if handler is None:
                return [_refusal(command, f"this process knows no {shown(kind)}")]
            return handler(command.facts)
        except Exception as e:  # noqa: BLE001 - whatever it is, the collector hears of it and training does not
            why = f"{type(e).__name__}: {e}"
            log.warning("a command (%s) failed, training goes on: %s", shown(kind), printable(why))
            return [_refusal(command, why)]

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning("a command came without a proof of the run's key, and was not obeyed (this is said once)")


def _refusal(command: Command, reason: str) -> Report:
    """Under the command's own kind, so that it gets to who gave the command."""
    # A report has as many facts as a command, and what an exception says may be no text that travels.
    facts = dict(list(command.facts.items())[: MAX_ENTRIES - 1])
    return Report(command.kind, {**facts, "refused": clipped(reason[:1_000])})
