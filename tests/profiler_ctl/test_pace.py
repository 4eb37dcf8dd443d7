"""Where ranks are and how fast, from what is heard of them."""

from __future__ import annotations

from rankd.profiler_ctl.pace import Pace


def test_the_step_lies_beyond_what_the_fastest_rank_reaches_in_the_margin() -> None:
    """From when it was last heard; one more for the step under way."""
    pace = Pace()
    for step in range(1, 6):
        pace.at(0, step, step * 1.0)
        pace.at(1, 2 * step, step * 1.0)
    assert (pace.front(), pace.lag(0), pace.seconds_per_step(0), pace.fastest([0, 1])) == (10, 5, 1.0, 0.5)
    assert pace.reachable([0], 2.0, 6.0) == 9
    assert pace.reachable([0, 1], 2.0, 6.0) == 17
    # Heard again at the same step: it has not gone on meanwhile.
    pace.at(0, 5, 6.0)
    assert pace.reachable([0], 2.0, 6.0) == 8


def test_a_burst_after_an_absence_is_no_pace() -> None:
    """What a rank has kept for a collector that was away comes at once."""
    pace = Pace()
    pace.joined(0, 100.0)
    for step in range(1, 400):
        pace.at(0, step, 100.0 + step / 1_000)
    assert pace.fastest([0]) is None
    assert pace.reachable([0], 2.0, 101.0, known=0.5) == 406
    for step in range(400, 403):
        pace.at(0, step, 101.5 + (step - 400) * 0.5)
    assert pace.fastest([0]) == 0.5


def test_training_that_goes_back_begins_anew() -> None:
    """A resume at an earlier step."""
    pace = Pace()
    for step in (7, 8, 3):
        pace.at(0, step, float(step))
    assert (pace.step(0), pace.seconds_per_step(0)) == (3, None)
