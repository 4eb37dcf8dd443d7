"""Where command lines are answered: who has the run's key asks about the run, and has ranks told something."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .door import Door
from .logservice import LOG, LogService
from .protocol.checks import shown
from .protocol.errors import ProtocolError, RankdError
from .protocol.keys import RunKey
from .protocol.messages import MAX_ANSWER_BYTES
from .protocol.steering import Move
from .protocol.wire import Answer, Ask, decode_message, encode_message
from .steering import Steering

__all__ = ["Desk"]

# How long readers may take to fetch the log's end.
_SEE_OFF = 3.0
_TICK = 0.1


class Desk:
    """Answers through this door.

    Args:
        key: the run's key, which every question has to prove, also where connections need none.
        output: the run's output directory.
        steering: what can be asked and said.
        steer: makes moves.
    """

    def __init__(
        self, door: Door, key: RunKey, output: Path, steering: Steering, steer: Callable[[Sequence[Move]], None]
    ) -> None:
        self._door = door
        self._key = key
        self._steering = steering
        self._steer = steer
        self._logs = LogService(output)

    @property
    def waiting(self) -> bool:
        """Somebody waits for a piece of the log."""
        return self._logs.waiting

    def asked(self, peer: bytes, ask: Ask) -> None:
        """Answer; a question about the log waits for `serve`."""
        if not ask.is_proved(self._key):
            self._answer(peer, Answer(ask.number, False, b"this needs the run's key, and that was another one"))
            self._door.refuse(peer, "without the key", self._door.address(peer), f"asked for {shown(ask.kind)}")
            return
        self._door.greet(peer)
        try:
            if _is_about_log(ask):
                self._logs.take(peer, ask, time.monotonic())
                return
            moves, content = self._steering.asked(ask)
            self._steer(moves)
        except RankdError as e:
            self._answer(peer, Answer(ask.number, False, str(e).encode()))
        else:
            self._answer(peer, _fitting(ask.number, content))

    def serve(self) -> None:
        """Give one piece of the log, if somebody waits for one."""
        if self._logs.waiting:
            self._answer(*self._logs.next())

    def see_off(self) -> None:
        """The run is over: who follows the log is given its end; nothing else is taken any more."""
        deadline = time.monotonic() + _SEE_OFF
        while time.monotonic() < deadline and self._logs.followed(time.monotonic()):
            self.serve()
            if not self._logs.waiting and self._door.wait(_TICK) and (arrived := self._door.receive()) is not None:
                peer, parts = arrived
                with contextlib.suppress(ProtocolError):
                    if isinstance(message := decode_message(parts[0]), Ask):
                        self._asked_late(peer, message)

    def close(self) -> None:
        """Let go of the log."""
        self._logs.close()

    def _asked_late(self, peer: bytes, ask: Ask) -> None:
        """The end is journalled: only the log is still given."""
        if _is_about_log(ask):
            self.asked(peer, ask)
        else:
            self._answer(peer, Answer(ask.number, False, b"the run is over, and its collector ends"))

    def _answer(self, peer: bytes, answer: Answer) -> None:
        self._door.send(peer, encode_message(answer))


def _is_about_log(ask: Ask) -> bool:
    return ask.kind.split(".")[0] == LOG


def _fitting(number: int, content: bytes) -> Answer:
    """The asker is told where there is too much to say; it is not the asker's fault."""
    if len(content) <= MAX_ANSWER_BYTES:
        return Answer(number, True, content)
    return Answer(
        number, False, f"the answer has {len(content)} bytes, at most {MAX_ANSWER_BYTES} can be sent".encode()
    )
