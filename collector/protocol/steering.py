"""What the parts of the collector that steer ranks (sampling, profiling) see and give.

A *part* is pure: questions, reports and news of ranks go in, moves come out. The collector makes the moves in their
order: what is decided is in the journal before anybody is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from .checks import MAX_STEP, MAX_WORD_BYTES, check_fact, check_int, check_map, check_text
from .messages import Facts
from .ranges import steps_text

__all__ = ["RATES", "SAMPLE", "STACKS", "Decide", "Move", "Part", "Rank", "Ranks", "Tell", "sampled_text"]

# The kinds of commands and reports that both sides know by name.
SAMPLE, STACKS = "sample", "stacks"
# What `sample` says of rates, by their names in the configuration (`monitor_config`).
RATES = ("step_interval", "interval", "print_interval")


def sampled_text(facts: Facts) -> str:
    """`steps 9-11: interval 1`: what was decided, for the log and for who asked.

    Args:
        facts: `first`, `last` (None: for good), and the rates; those that are None are as configured.
    """
    given = ", ".join(f"{name} {facts[name]}" for name in RATES if facts.get(name) is not None)
    first, last = facts["first"], facts["last"]
    steps = steps_text(first, last) if isinstance(first, int) and isinstance(last, int) else f"from step {first} on"
    return f"{steps}: {given or 'as configured'}"


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a command to a rank; nothing happens if it is not connected at the moment (`Part.joined` comes later).

    Raises:
        RecordError: it could not travel.
    """

    rank: int
    kind: str
    facts: Facts

    def __post_init__(self) -> None:
        check_text("kind", self.kind, MAX_WORD_BYTES)
        check_map("facts", self.facts, check_fact)


@dataclass(frozen=True, slots=True)
class Decide:
    """Keep these facts as the newest decision of this kind and key, through restarts, with a line in merged.log.

    Attributes:
        kind: the part's name.
        text: of the line `[collector] # KIND TEXT`; empty: no line.

    Raises:
        RecordError: it could not be read back from the journal.
    """

    kind: str
    key: str
    facts: Facts
    text: str

    def __post_init__(self) -> None:
        check_text("kind", self.kind, MAX_WORD_BYTES)
        check_map("facts", self.facts, _check_kept)


def _check_kept(what: str, value: object) -> None:
    """As a fact that travels, but texts may be longer: lists of ranks."""
    if type(value) is int:
        check_int(what, value, -MAX_STEP, MAX_STEP)
    elif not isinstance(value, str):
        check_fact(what, value)


Move: TypeAlias = Tell | Decide


@dataclass(frozen=True, slots=True)
class Rank:
    """One connected rank.

    Attributes:
        step: the step that it is at, as far as the collector has heard; 0: none yet.
        heard: seconds since it last said where it is.
        host: the name of its machine.
        about: facts about the process (`Hello.about`).
        process: a number of its process in this run; another one of the same rank has another.
        total_steps: the length of the training; None: not known.
    """

    rank: int
    step: int
    heard: float
    host: str
    about: Mapping[str, str]
    process: int = 0
    total_steps: int | None = None


class Ranks(Protocol):
    """The ranks as they are now."""

    now: float
    """Seconds, of a clock that never goes back."""
    world_size: int
    beat_interval: float
    """Seconds after which a rank has said where it is, at the latest."""
    seconds_per_step: float | None
    """None: too few steps were seen."""

    def connected(self) -> Sequence[Rank]:
        """All ranks that can be told something, in order."""

    def get(self, rank: int) -> Rank | None:
        """One of them; None: it is not connected."""

    def left(self, rank: int) -> str | None:
        """Why nothing more is expected of a rank (it has ended, it was given up); None: it is there, or will be."""


class Part(Protocol):
    """One thing that ranks can be told. The kinds of its questions, commands and reports begin with its name."""

    def restore(self, decisions: Mapping[str, Facts]) -> None:
        """The collector starts: these are the newest decisions, by key, oldest first."""

    def asked(self, kind: str, facts: Facts, ranks: Ranks, /) -> tuple[Sequence[Move], Mapping[str, Any]]:
        """A command line asks; the answer is a JSON object. Raises RankdError with the reason why not."""

    def reported(self, rank: int, kind: str, facts: Facts, ranks: Ranks, /) -> Sequence[Move]:
        """A rank reports. Whatever it says, this raises nothing but RankdError."""

    def joined(self, rank: int, ranks: Ranks, /) -> Sequence[Move]:
        """A rank is connected, perhaps again, perhaps as another process."""

    def tick(self, ranks: Ranks, /) -> Sequence[Move]:
        """Called some times a second."""

    def ending(self, ranks: Ranks, /) -> Sequence[Move]:
        """The collector is about to end: all ranks have, or are given up."""
