"""What agent and collector say to each other. `wire` turns them into bytes; `Data` carries encoded items.

Checked when they are built, so that this side cannot send what the other refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from .checks import (
    MAX_RANKS,
    MAX_WORD_BYTES,
    check_any_number,
    check_bytes,
    check_fact,
    check_int,
    check_map,
    check_number,
    check_short,
    check_text,
    clipped,
)
from .errors import LimitError, RecordError
from .keys import RunKey
from .records import MAX_NAME_BYTES

__all__ = [
    "MAX_ANSWER_BYTES",
    "MAX_ITEMS_PER_MESSAGE",
    "Ack",
    "Answer",
    "Ask",
    "Beat",
    "Command",
    "Data",
    "Fact",
    "Facts",
    "Hello",
    "Message",
    "Refused",
    "Report",
    "Welcome",
    "Who",
]

MAX_ITEMS_PER_MESSAGE = 65_536
SESSION_BYTES = 16
# What an answer brings: JSON about 65,536 ranks, or a piece of a log.
MAX_ANSWER_BYTES = 8 * 2**20

# What commands, reports and questions say: a flat map of a few short names.
Fact: TypeAlias = str | int | float | bool | None
Facts: TypeAlias = Mapping[str, Fact]


@dataclass(frozen=True, slots=True)
class Hello:
    """Agent → collector, first on every connection.

    Attributes:
        session: 16 random bytes, the identity of this process; a restart is told from a duplicate by it.
        run: the run the agent believes to belong to; empty: whichever this collector serves.
        next_seq: the number that the agent's next new item will get.
        total_steps: the length of the training, for the text logs; None: not known.
        about: versions and choices a reader needs to know (`local_norm_kind`, `mindspore`, …).
        recovered: the process itself is gone; somebody delivers what its spool file still holds.
    """

    session: bytes
    run: str
    rank: int
    world_size: int
    next_seq: int
    host: str
    pid: int
    started: float
    total_steps: int | None = None
    about: Mapping[str, str] = field(default_factory=dict)
    recovered: bool = False

    def __post_init__(self) -> None:
        check_bytes("session", self.session)
        if len(self.session) != SESSION_BYTES:
            raise RecordError(f"a session is {SESSION_BYTES} bytes, got {len(self.session)}")
        check_text("run", self.run, MAX_WORD_BYTES, empty=True)
        check_int("world_size", self.world_size, 1, MAX_RANKS)
        check_int("rank", self.rank, 0, self.world_size - 1)
        check_int("next_seq", self.next_seq, 1)
        check_text("host", self.host, MAX_NAME_BYTES, empty=True)
        check_int("pid", self.pid, 0)
        check_number("started", self.started)
        if self.total_steps is not None:
            check_int("total_steps", self.total_steps, 1)
        check_map("about", self.about, check_short)


@dataclass(frozen=True, slots=True)
class Welcome:
    """Collector → agent: the journal has this session's items up to `acked`; resend from there."""

    run: str
    acked: int
    beat_interval: float

    def __post_init__(self) -> None:
        check_text("run", self.run, MAX_WORD_BYTES, empty=True)
        check_int("acked", self.acked, 0)
        check_number("beat_interval", self.beat_interval)
        if self.beat_interval <= 0:
            raise RecordError(f"beat_interval must be above 0, got {self.beat_interval!r}")


@dataclass(frozen=True, slots=True)
class Refused:
    """Collector → agent: no, and why. `retry`: the reason may pass (an older process of the same rank still lives)."""

    reason: str
    retry: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", clipped(self.reason))


@dataclass(frozen=True, slots=True)
class Data:
    """Agent → collector: encoded items, in the order of their numbers."""

    items: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if len(self.items) > MAX_ITEMS_PER_MESSAGE:
            raise LimitError(f"{len(self.items)} items in a message, at most {MAX_ITEMS_PER_MESSAGE} are allowed")
        for item in self.items:
            check_bytes("an item", item)


@dataclass(frozen=True, slots=True)
class Ack:
    """Collector → agent: the journal has everything up to `seq`."""

    seq: int

    def __post_init__(self) -> None:
        check_int("seq", self.seq, 0)


@dataclass(frozen=True, slots=True)
class Beat:
    """Agent → collector, at least each `beat_interval`: alive, and where; `host` are host figures by name."""

    step: int
    micro_step: int
    held: int
    host: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_int("step", self.step, 0)
        check_int("micro_step", self.micro_step, 0)
        check_int("held", self.held, 0)
        check_map("host", self.host, check_any_number)


@dataclass(frozen=True, slots=True)
class Who:
    """Collector → a peer it does not know (it has restarted, or the connection is new): say hello."""


def _check_said(message: Command | Report | Ask) -> None:
    check_text("kind", message.kind, MAX_WORD_BYTES)
    check_map("facts", message.facts, check_fact)


def _check_proof(message: Command | Ask) -> None:
    check_bytes("a proof", message.proof)
    if len(message.proof) > _MOST_PROOF_BYTES:
        raise LimitError(f"a proof of {len(message.proof)} bytes, at most {_MOST_PROOF_BYTES} are allowed")


_MOST_PROOF_BYTES = 64


def _said(kind: str, facts: Facts) -> list[object]:
    """In an order that does not depend on who made the map."""
    return [kind, [[name, facts[name]] for name in sorted(facts)]]


@dataclass(frozen=True, slots=True)
class Command:
    """Collector → agent: do this. May come again; doing it twice is doing it once.

    Attributes:
        kind: which handler of the agent it is for.
        proof: of the run's key, for this session and what is said (`RunKey.proof`). On loopback connections are not
            encrypted, and whoever has the port could say things.
    """

    kind: str
    facts: Facts
    proof: bytes

    def __post_init__(self) -> None:
        _check_said(self)
        _check_proof(self)

    @classmethod
    def proved(cls, key: RunKey, session: bytes, kind: str, facts: Facts) -> Command:
        """The command, with its proof."""
        return cls(kind, facts, key.proof("command", session, *_said(kind, facts)))

    def is_proved(self, key: RunKey, session: bytes) -> bool:
        """Whether it comes from somebody who has the key, and is for this process."""
        return key.proves(self.proof, "command", session, *_said(self.kind, self.facts))


@dataclass(frozen=True, slots=True)
class Report:
    """Agent → collector: what became of a command. Lost with its connection; a command that comes again renews it."""

    kind: str
    facts: Facts

    def __post_init__(self) -> None:
        _check_said(self)


@dataclass(frozen=True, slots=True)
class Ask:
    """A command line → collector: tell me, or see to it. Needs no hello.

    Attributes:
        number: comes back with the answer.
        kind: what is asked for.
        proof: of the run's key, for what is said.
    """

    number: int
    kind: str
    facts: Facts
    proof: bytes

    def __post_init__(self) -> None:
        check_int("number", self.number, 0)
        _check_said(self)
        _check_proof(self)

    @classmethod
    def proved(cls, key: RunKey, number: int, kind: str, facts: Facts) -> Ask:
        """The question, with its proof."""
        return cls(number, kind, facts, key.proof("ask", *_said(kind, facts)))

    def is_proved(self, key: RunKey) -> bool:
        """Whether it comes from somebody who has the key."""
        return key.proves(self.proof, "ask", *_said(self.kind, self.facts))


@dataclass(frozen=True, slots=True)
class Answer:
    """Collector → a command line.

    Attributes:
        fine: False: it could not be done, and `content` says why, as text.
        content: JSON text, or what else the kind of question has as its answer.
    """

    number: int
    fine: bool
    content: bytes

    def __post_init__(self) -> None:
        check_int("number", self.number, 0)
        check_bytes("content", self.content)
        if len(self.content) > MAX_ANSWER_BYTES:
            raise LimitError(f"an answer of {len(self.content)} bytes, at most {MAX_ANSWER_BYTES} are allowed")


Message: TypeAlias = Hello | Welcome | Refused | Data | Ack | Beat | Who | Command | Report | Ask | Answer
