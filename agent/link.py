"""How an agent comes to speak with its collector and notices that it no longer does. Pure: time is an argument.

Messages and news of the socket go in; what to do comes out as a list of actions; `sender` carries them out.

::

             Seek, found                Welcome
    SEEKING ────────────▶ GREETING ───────────────▶ JOINED
       ▲                    │ ▲ ▲ └─ Refused(retry) ─▶ WAITING
       │  silence, broken   │ │ └───── after a delay ────┘
       ├────────────────────┘ └───────── Who ────────┐
       └──────── silence, broken ──────────────── JOINED

    Refused for good: any of them ─▶ OFF, which nothing leaves.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ..collector.protocol.wire import Ack, Command, Hello, Message, Refused, Welcome, Who

__all__ = [
    "Acknowledged",
    "Action",
    "Link",
    "LinkState",
    "Obey",
    "Open",
    "Rewind",
    "SayBeat",
    "SayHello",
    "Seek",
    "Shut",
    "Tell",
    "Timing",
    "Warn",
]

# Whatever a collector asks for: more often than this costs the training, less often and it would take us for lost.
_MOST_BEATS, _FEWEST_BEATS = 0.05, 60.0
# A beat is due this much before the interval is over, so that a late wake-up does not make it late.
_BEAT_EARLY = 0.9


class LinkState(enum.Enum):
    """Where the agent stands with its collector."""

    SEEKING = "seeking"  # no socket; looks for the endpoint now and then
    GREETING = "greeting"  # hello said, no answer yet
    JOINED = "joined"  # welcomed: data may be sent
    WAITING = "waiting"  # refused for a reason that may pass
    OFF = "off"  # refused for good


@dataclass(frozen=True, slots=True)
class Timing:
    """How long is long, in seconds.

    Attributes:
        warn_after: without a collector for this long: one warning.
        hello_timeout: no answer to a hello: try again on a fresh socket.
        silence: data sent and not acknowledged: the same. A collector whose disk is full is silent too, so not too
            short.
        seek_first, seek_most: between two looks for the endpoint; doubles from the first to the most.
        refused_delay: after a refusal that may pass.
    """

    warn_after: float = 30.0
    hello_timeout: float = 5.0
    silence: float = 15.0
    seek_first: float = 0.1
    seek_most: float = 2.0
    refused_delay: float = 2.0


@dataclass(frozen=True, slots=True)
class Seek:
    """Find the endpoint, and call `Link.found`."""


@dataclass(frozen=True, slots=True)
class Open:
    """Connect a fresh socket to `endpoint`."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class Shut:
    """Close the socket, and forget what it has not sent."""


@dataclass(frozen=True, slots=True)
class SayHello:
    """Send a hello; `run`: the run that was joined before, if any."""

    run: str | None


@dataclass(frozen=True, slots=True)
class SayBeat:
    """Send a beat."""


@dataclass(frozen=True, slots=True)
class Rewind:
    """The journal of this run has everything up to `acked`; send again from there."""

    acked: int
    run: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The journal has everything up to `seq`."""

    seq: int


@dataclass(frozen=True, slots=True)
class Obey:
    """Do what the collector says, and report."""

    command: Command


@dataclass(frozen=True, slots=True)
class Warn:
    """Log a warning."""

    text: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Log an information."""

    text: str


Action: TypeAlias = Seek | Open | Shut | SayHello | SayBeat | Rewind | Acknowledged | Obey | Warn | Tell


class Link:
    """One agent's side of the connection.

    Args:
        now: the time, in seconds of any clock that never goes back.
        where: where the endpoint is looked for, for messages.
        timing: how long is long.
    """

    def __init__(self, now: float, where: str, timing: Timing | None = None) -> None:
        self.state = LinkState.SEEKING
        self._where = where
        self._timing = timing or Timing()
        self._endpoint = ""
        self._run: str | None = None
        self._why = "nobody was found there"
        # What is due when; only those of the present state count.
        self._seek_at = now
        self._seek_delay = self._timing.seek_first
        self._greeted_at = now
        self._retry_at = now
        self._beat_at = now
        self._beat_interval = _FEWEST_BEATS
        # Since when sent data has had no acknowledgement; None: there is none that waits for one.
        self._unanswered_since: float | None = None
        # Since when there has been no collector; None: there is one.
        self._alone_since: float | None = now
        self._warned = False
        self._refusal_told = False

    @property
    def may_send(self) -> bool:
        """Data may be sent."""
        return self.state is LinkState.JOINED

    # -- what happens -------------------------------------------------------------------------------------------------

    def tick(self, now: float, in_flight: bool) -> list[Action]:
        """What time has made due; `in_flight`: something was sent and is not acknowledged."""
        if not in_flight:
            self._unanswered_since = None
        elif self._unanswered_since is None:
            self._unanswered_since = now
        actions: list[Action] = []
        if self._warn_at() <= now:
            actions.append(self._alone(now))
        if now < self._due_at():
            return actions
        match self.state:
            case LinkState.SEEKING:
                # Pushed on by `found`; until then, do not ask twice.
                self._seek_at = now + self._seek_delay
                return [*actions, Seek()]
            case LinkState.GREETING:
                seconds = self._timing.hello_timeout
                return [*actions, *self.lost(f"{self._endpoint} did not answer for {seconds:g} s", now)]
            case LinkState.WAITING:
                return [*actions, self._greet(now)]
            case LinkState.JOINED:
                return [*actions, *self._keep_up(now)]
        return actions

    def found(self, endpoint: str | None, now: float) -> list[Action]:
        """The answer to Seek; None: no endpoint at the moment."""
        if self.state is not LinkState.SEEKING:
            return []
        if endpoint is None:
            self._back_off(now)
            return []
        self._endpoint = endpoint
        return [Open(endpoint), self._greet(now)]

    def lost(self, why: str, now: float) -> list[Action]:
        """The connection is broken or of no use, as `why` says: start again."""
        if self.state in (LinkState.SEEKING, LinkState.OFF):
            return []
        self._leave(LinkState.SEEKING, now)
        self._why = why
        self._back_off(now)
        return [Shut()]

    def received(self, message: Message, now: float) -> list[Action]:
        """A message of the collector; one that has no place in the present state changes nothing."""
        handle = _ON_MESSAGE.get((self.state, type(message)))
        return [] if handle is None else handle(self, message, now)

    def next_at(self) -> float:
        """When `tick` has something to do, unless something happens before."""
        return min(self._due_at(), self._warn_at())

    # -- inside -------------------------------------------------------------------------------------------------------

    def _due_at(self) -> float:
        match self.state:
            case LinkState.SEEKING:
                return self._seek_at
            case LinkState.GREETING:
                return self._greeted_at + self._timing.hello_timeout
            case LinkState.WAITING:
                return self._retry_at
            case LinkState.JOINED:
                return min(self._beat_at, self._silent_at())
            case LinkState.OFF:
                return float("inf")

    def _silent_at(self) -> float:
        return float("inf") if self._unanswered_since is None else self._unanswered_since + self._timing.silence

    def _warn_at(self) -> float:
        if self._warned or self._alone_since is None or self.state is LinkState.OFF:
            return float("inf")
        return self._alone_since + self._timing.warn_after

    def _alone(self, now: float) -> Warn:
        self._warned = True
        return Warn(
            f"no collector for {now - (self._alone_since or now):.0f} s; looked at {self._where} ({self._why}). "
            "Training goes on; what is recorded is kept, as far as its bounds allow, until a collector answers there"
        )

    def _keep_up(self, now: float) -> list[Action]:
        if self._silent_at() <= now:
            return self.lost(f"{self._endpoint} acknowledged nothing for {self._timing.silence:g} s", now)
        self._beat_at = now + self._beat_interval
        return [SayBeat()]

    def _greet(self, now: float) -> Action:
        self._leave(LinkState.GREETING, now)
        self._greeted_at = now
        return SayHello(self._run)

    def _leave(self, state: LinkState, now: float) -> None:
        if self.state is LinkState.JOINED:
            self._alone_since = now
        self.state = state

    def _back_off(self, now: float) -> None:
        self._seek_at = now + self._seek_delay
        self._seek_delay = min(2 * self._seek_delay, self._timing.seek_most)

    def _on_welcome(self, message: Message, now: float) -> list[Action]:
        assert isinstance(message, Welcome)
        self.state = LinkState.JOINED
        self._run = message.run
        asked = _FEWEST_BEATS if math.isnan(message.beat_interval) else message.beat_interval
        usable = min(max(asked, _MOST_BEATS), _FEWEST_BEATS)
        self._beat_interval = usable * _BEAT_EARLY
        self._beat_at = now
        self._seek_delay = self._timing.seek_first
        self._unanswered_since = None
        self._alone_since = None
        self._refusal_told = False
        told: list[Action] = [Tell(f"the collector at {self._endpoint} answers")] if self._warned else []
        self._warned = False
        return [Rewind(message.acked, message.run), *told]

    def _on_ack(self, message: Message, now: float) -> list[Action]:
        assert isinstance(message, Ack)
        self._unanswered_since = now
        return [Acknowledged(message.seq)]

    def _on_command(self, message: Message, _: float) -> list[Action]:
        assert isinstance(message, Command)
        return [Obey(message)]

    def _on_hello(self, message: Message, now: float) -> list[Action]:
        assert isinstance(message, Hello)
        # Where nobody listens, a connection within one machine can be given the very port that it looks for as its own,
        # and then speaks with itself. It has to let go at once: a collector that wants the port could not have it.
        return self.lost(f"nobody listens at {self._endpoint}", now)

    def _on_who(self, message: Message, now: float) -> list[Action]:
        assert isinstance(message, Who)
        return [self._greet(now)]

    def _on_refused(self, message: Message, now: float) -> list[Action]:
        assert isinstance(message, Refused)
        if not message.retry:
            self._leave(LinkState.OFF, now)
            return [
                Shut(),
                Warn(f"the collector at {self._endpoint} refuses this rank: {message.reason}. Nothing more is sent"),
            ]
        self._leave(LinkState.WAITING, now)
        self._why = message.reason
        self._retry_at = now + self._timing.refused_delay
        if self._refusal_told:
            return []
        # It is there, and this is the outage's warning.
        self._refusal_told = self._warned = True
        return [Warn(f"the collector at {self._endpoint} refuses this rank for now: {message.reason}. Trying again")]


# What is not here changes nothing. A Who while GREETING answers what was sent before that hello, and the hello's own
# answer follows it; if it does not, the hello times out.
_ON_MESSAGE: dict[tuple[LinkState, type], Callable[[Link, Message, float], list[Action]]] = {
    (LinkState.GREETING, Hello): Link._on_hello,
    (LinkState.GREETING, Welcome): Link._on_welcome,
    (LinkState.GREETING, Ack): Link._on_ack,
    (LinkState.GREETING, Refused): Link._on_refused,
    (LinkState.WAITING, Welcome): Link._on_welcome,
    (LinkState.WAITING, Ack): Link._on_ack,
    (LinkState.WAITING, Refused): Link._on_refused,
    (LinkState.JOINED, Ack): Link._on_ack,
    (LinkState.JOINED, Command): Link._on_command,
    (LinkState.JOINED, Who): Link._on_who,
    (LinkState.JOINED, Welcome): Link._on_welcome,
    (LinkState.JOINED, Refused): Link._on_refused,
}
