"""Who is silent for too long, and who holds the others up; time is an argument."""

from __future__ import annotations

from rankd.collector.entries import Back, HeldOut, Lost
from rankd.collector.liveness import Liveness

BOTH = frozenset({0, 1})


def test_a_silent_rank_is_lost_once_and_back_when_heard() -> None:
    """Lost after `lost_after` seconds without a word; the next word brings it back."""
    liveness = Liveness(lost_after=60, max_hold=300)
    assert liveness.due(0, BOTH, None) == []
    assert liveness.heard(0, 50) is None
    assert liveness.due(61, BOTH, None) == [Lost(1, 61)]
    assert liveness.due(62, frozenset({0}), None) == []
    assert liveness.heard(1, 63) == Back(1)
    assert liveness.heard(1, 64) is None


def test_a_rank_that_is_expected_again_gets_its_full_time() -> None:
    """What was heard of an earlier process an hour ago does not make the new one lost at once."""
    liveness = Liveness(lost_after=60, max_hold=300)
    liveness.heard(0, 0)
    assert liveness.due(1, frozenset({0}), None) == []
    assert liveness.due(2, frozenset(), None) == []
    assert liveness.due(3600, frozenset({0}), None) == []
    assert liveness.due(3661, frozenset({0}), None) == [Lost(0, 61)]


def test_a_rank_whose_process_is_gone_comes_back_with_its_next_word() -> None:
    """Given up at once; told as such; a new process that is heard brings it back."""
    liveness = Liveness(lost_after=60, max_hold=300)
    liveness.heard(1, 10)
    assert liveness.gone(1, 13) == Lost(1, 3, gone=True)
    assert liveness.heard(1, 20) == Back(1)


def test_who_holds_a_position_up_for_too_long_is_held_out() -> None:
    """The time runs from when the position became the lowest one, and anew for each position."""
    liveness = Liveness(lost_after=1000, max_hold=300)
    waiting = frozenset({1})
    assert liveness.due(0, BOTH, ((1, 1, 1), waiting)) == []
    assert liveness.due(299, BOTH, ((1, 1, 2), waiting)) == []
    assert liveness.due(599, BOTH, ((1, 1, 2), waiting)) == []
    assert liveness.due(600, BOTH, ((1, 1, 2), waiting)) == [HeldOut(1, 301)]
    assert liveness.due(601, BOTH, None) == []


def test_a_restarted_collector_knows_who_was_lost() -> None:
    """The first word of a rank that was lost before the restart brings it back."""
    assert Liveness(lost_after=60, max_hold=300, lost=[3]).heard(3, 0) == Back(3)


def test_a_collector_that_was_stopped_blames_nobody() -> None:
    """The time for which it was stopped counts neither as silence nor as holding up; what follows does."""
    watch = Liveness(lost_after=10, max_hold=20)
    head = ((1, 1, 1), frozenset({1}))
    watch.due(0, frozenset({0, 1}), head)
    watch.heard(0, 100.0)
    watch.stalled(99, 100)
    assert watch.due(100, frozenset({0, 1}), head) == []
    assert watch.silent(0, 100) == 0
    assert watch.due(109.5, frozenset({0, 1}), head) == [Lost(1, 10.5)]
    for rank in (0, 1):
        assert watch.heard(rank, 119.0) == (Back(1) if rank else None)
    assert watch.due(119.5, frozenset({0, 1}), head) == [HeldOut(1, 20.5)]
