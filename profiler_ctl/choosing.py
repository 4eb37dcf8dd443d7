"""Which ranks a session is for: by number, by what they are, by what they do. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..collector.protocol.checks import MAX_RANKS, check_int, shown
from ..collector.protocol.errors import RecordError
from ..collector.protocol.ranges import parse_ranks, ranks_text
from .asked import Body, Value

__all__ = ["Choice", "RankFacts"]


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What is known of a rank that is there.

    Attributes:
        host: where it runs.
        place: its coordinates in the parallel layout, such as `{"pp": "1"}`.
        lag: steps behind the front.
        seconds: of its last steps, each; None: not known.
    """

    host: str
    place: Mapping[str, str]
    lag: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Choice:
    """Ranks as a person asks for them; each condition narrows what the one before has left.

    Attributes:
        ranks: `0,8-10`, or `all`.
        pp_stage: of this stage of the pipeline only (the agents were given `about={"pp": …}`).
        one_per_node: the lowest of each host.
        slowest: so many, the furthest behind first, then by seconds a step.

    Raises:
        RecordError: no ranks are asked for, or a value cannot be.
    """

    ranks: str | None = None
    pp_stage: int | None = None
    one_per_node: bool = False
    slowest: int | None = None

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks != "all":
            if not isinstance(self.ranks, str):
                raise RecordError(f"ranks must be text such as 0,8-10, got {shown(self.ranks)}")
            parse_ranks(self.ranks)
        if not isinstance(self.one_per_node, bool):
            raise RecordError("one_per_node must be true or false")
        if self.pp_stage is not None:
            check_int("pp_stage", self.pp_stage, 0, MAX_RANKS)
        if self.slowest is not None:
            check_int("slowest", self.slowest, 1, MAX_RANKS)
        if self.ranks is None and self.pp_stage is None and self.slowest is None and not self.one_per_node:
            raise RecordError("no ranks are asked for: --ranks (`all` for all), --slowest, --pp-stage, --one-per-node")

    def body(self) -> dict[str, Value]:
        """All of it, flat."""
        return {
            "ranks": self.ranks,
            "pp_stage": self.pp_stage,
            "one_per_node": self.one_per_node,
            "slowest": self.slowest,
        }

    @classmethod
    def from_body(cls, body: Body) -> Choice:
        """What `body` gave; other entries are let be.

        Raises:
            RecordError: it cannot be.
        """
        given = {name: body[name] for name in ("ranks", "pp_stage", "one_per_node", "slowest") if name in body}
        return cls(**given)  # type: ignore[arg-type] # checked when it is built

    def of(self, present: Mapping[int, RankFacts], world_size: int) -> tuple[int, ...]:
        """The ranks.

        Args:
            present: the ranks whose processes are there.
            world_size: how many there should be.

        Raises:
            RecordError: there are none, or some are not there.
        """
        chosen = self._by_number(present, world_size)
        if self.pp_stage is not None:
            stage = str(self.pp_stage)
            known = {facts.place["pp"] for facts in present.values() if "pp" in facts.place}
            if not known:
                raise RecordError('no rank has said its pipeline stage: Agent(…, about={"pp": stage}) tells it')
            chosen = [rank for rank in chosen if present[rank].place.get("pp") == stage]
            if not chosen:
                raise RecordError(f"no such rank is of pipeline stage {stage}; there are: {', '.join(sorted(known))}")
        if self.one_per_node:
            first: dict[str, int] = {}
            for rank in chosen:
                first.setdefault(present[rank].host, rank)
            chosen = sorted(first.values())
        if self.slowest is not None:
            chosen = sorted(sorted(chosen, key=lambda rank: _speed(present[rank]))[: self.slowest])
        return tuple(chosen)

    def _by_number(self, present: Mapping[int, RankFacts], world_size: int) -> list[int]:
        if self.ranks is None or self.ranks == "all":
            if not present:
                raise RecordError("no rank is connected")
            return sorted(present)
        wanted = sorted(parse_ranks(self.ranks))
        _refuse("is not in this job", "are not in this job", [r for r in wanted if r >= world_size], world_size)
        _refuse("is not connected", "are not connected", [r for r in wanted if r not in present], world_size)
        return wanted


def _speed(facts: RankFacts) -> tuple[int, float]:
    return -facts.lag, -(facts.seconds or 0.0)


def _refuse(one: str, several: str, ranks: Sequence[int], world_size: int) -> None:
    if ranks:
        what = one if len(ranks) == 1 else several
        raise RecordError(f"{ranks_text(ranks)} {what} (this job has {ranks_text(range(world_size))})")
