"""Parts that steer and fail: that costs what they were about to do, and nothing of the logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.collector.test_sampler import Now

from rankd.collector.protocol.errors import ProtocolError, RankdError
from rankd.collector.protocol.messages import Ask, Facts, Report
from rankd.collector.protocol.steering import Move, Ranks, Tell
from rankd.collector.steering import Steering


class Broken:
    """A part that fails at everything, as told."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.known: Mapping[str, Facts] = {}

    def restore(self, decisions: Mapping[str, Facts]) -> None:
        self.known = decisions

    def asked(self, kind: str, facts: Facts, ranks: Ranks, /) -> tuple[Sequence[Move], Mapping[str, Any]]:
        raise self.error

    def reported(self, rank: int, kind: str, facts: Facts, ranks: Ranks, /) -> Sequence[Move]:
        raise self.error

    def joined(self, rank: int, ranks: Ranks, /) -> Sequence[Move]:
        raise self.error

    def tick(self, ranks: Ranks, /) -> Sequence[Move]:
        raise self.error

    def ending(self, ranks: Ranks, /) -> Sequence[Move]:
        raise self.error


class Well(Broken):
    """A part that tells a rank something whenever it can."""

    def asked(self, kind: str, facts: Facts, ranks: Ranks, /) -> tuple[Sequence[Move], Mapping[str, Any]]:
        return [Tell(0, kind, facts)], {"kind": kind}

    def joined(self, rank: int, ranks: Ranks, /) -> Sequence[Move]:
        return [Tell(rank, "well", {})]

    def tick(self, ranks: Ranks, /) -> Sequence[Move]:
        return [Tell(0, "well", {})]

    def ending(self, ranks: Ranks, /) -> Sequence[Move]:
        return [Tell(0, "well", {})]


def steering(error: Exception) -> Steering:
    """A broken part before one that is well."""
    return Steering({"broken": Broken(error), "well": Well(error)}, lambda: Now({0: 1}))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), RankdError("x\x1b[2J")])
def test_a_part_that_fails_costs_the_others_nothing(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """Nor the collector: an unexpected error is told once with its place, whatever the number of ticks."""
    them = steering(error)
    for _ in range(3):
        assert them.tick() == [Tell(0, "well", {})]
        assert them.ending() == [Tell(0, "well", {})]
    assert them.joined(2) == [Tell(2, "well", {})]
    assert them.reported(0, Report("broken.x", {})) == ()
    told = [record for record in caplog.records if record.exc_info]
    assert len(told) == (0 if isinstance(error, RankdError) else 1)
    assert all("\x1b" not in record.getMessage() for record in caplog.records)


def test_a_question_that_fails_is_answered() -> None:
    """With what was wrong."""
    with pytest.raises(RankdError, match=r"failed at that \(ValueError: x"):
        steering(ValueError("x")).asked(Ask(1, "broken.start", {}, b""))
    with pytest.raises(RankdError, match="no ranks"):
        steering(RankdError("no ranks")).asked(Ask(1, "broken", {}, b""))


def test_kinds_lead_to_their_parts() -> None:
    """By the first word; what leads nowhere is refused."""
    them = steering(ValueError("x"))
    moves, answer = them.asked(Ask(1, "well.start", {"x": 1}, b""))
    assert (moves, answer) == ([Tell(0, "well.start", {"x": 1})], b'{"kind": "well.start"}')
    with pytest.raises(RankdError, match="knows no 'wellness'; it knows broken, well"):
        them.asked(Ask(1, "wellness", {}, b""))
    with pytest.raises(ProtocolError, match="a report about"):
        them.reported(0, Report("nothing", {}))
