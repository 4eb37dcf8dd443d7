"""The command `sample` on a rank: in time or late, as configured where nothing is said, the same answer again."""

from __future__ import annotations

import pytest

from rankd.agent.resampling import Resampling
from rankd.agent.sampling import Rates, Sampling
from rankd.collector.protocol.messages import Facts


def handled(facts: Facts, *, step: int = 3, rates: Rates | None = None) -> tuple[Sampling, Facts]:
    """What a rank in this step makes of the command: its sampling, and what it reports."""
    sampling = Sampling(rates)
    (report,) = Resampling(sampling, lambda: step)({"number": 1, "first": 5, **facts})
    assert report.kind == "sample"
    return sampling, report.facts


@pytest.mark.parametrize(("step", "late"), [(0, False), (4, False), (5, True), (9, True)])
def test_a_rank_says_whether_it_was_told_in_time(step: int, late: bool) -> None:
    """In time is: before its first step began."""
    assert handled({"interval": 1}, step=step)[1] == {"number": 1, "step": step, "late": late}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"interval": 2}, Rates(2, 2, 100)),
        ({"interval": 40}, Rates(20, 40, 100)),
        ({"interval": 30}, Rates(10, 30, 100)),
        ({"interval": 2, "step_interval": 4}, Rates(4, 2, 100)),
        ({"step_interval": 1}, Rates(1, 20, 100)),
        ({"print_interval": 1}, Rates(1, 20, 1)),
        ({}, Rates(20, 20, 100)),
        ({"interval": None, "step_interval": None, "print_interval": None}, Rates(20, 20, 100)),
    ],
)
def test_what_is_asked_for_is_computed_too(facts: Facts, expected: Rates) -> None:
    """What is not said is as configured; a step that is to be written or printed has to be computed."""
    sampling, _ = handled({**facts, "last": 8}, rates=Rates(20, 20, 100))
    assert [sampling.rates(step) for step in (4, 5, 8, 9)] == [
        Rates(20, 20, 100),
        expected,
        expected,
        Rates(20, 20, 100),
    ]


def test_a_command_that_comes_again_is_answered_as_the_first_time() -> None:
    """On a new connection the newest command comes again, when its steps have long begun."""
    step = 3
    sampling = Sampling()
    handler = Resampling(sampling, lambda: step)
    first = handler({"number": 2, "first": 5, "last": None, "interval": 7})
    step = 50
    assert handler({"number": 2, "first": 5, "last": None, "interval": 7}) == first
    assert sampling.rates(50).write == 7


@pytest.mark.parametrize("number", [1, 2])
def test_a_number_that_is_given_again_is_another_command(number: int) -> None:
    """The collector's node lost power, and with it the decisions with these numbers: what it decides now holds."""
    handler = Resampling(sampling := Sampling(), lambda: 3)
    handler({"number": 1, "first": 5, "last": None, "interval": 7})
    handler({"number": 2, "first": 6, "last": None, "interval": 8})
    (report,) = handler({"number": number, "first": 20, "last": None, "interval": 9})
    assert report.facts == {"number": number, "step": 3, "late": False}
    assert [sampling.rates(step).write for step in (5, 6, 19, 20)] == [7, 8, 8, 9]


@pytest.mark.parametrize("facts", [{"number": None}, {"first": "5"}, {"interval": 0}, {"first": 0}, {"interval": "x"}])
def test_a_command_that_makes_no_sense_changes_nothing(facts: Facts) -> None:
    """It is an error, which the collector is told."""
    sampling = Sampling()
    with pytest.raises(ValueError):
        Resampling(sampling, lambda: 3)({"number": 1, "first": 5, "interval": 2, **facts})
    assert sampling.rates(5) == Rates()
