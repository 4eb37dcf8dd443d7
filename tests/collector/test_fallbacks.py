"""How far back the journal must reach."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankd.collector.fallbacks import TORN_BYTES, Fallbacks


def test_the_checkpoint_before_the_newest_is_kept() -> None:
    """As long as the log grows by more than it may lose."""
    fallbacks = Fallbacks()
    assert [fallbacks.passed(n * TORN_BYTES, n) for n in (1, 2, 3)] == [0, 1, 2]


def test_while_the_log_stands_still_an_older_one_is_kept() -> None:
    """Three checkpoints say the same size: the one before them, until the log has grown above it."""
    fallbacks = Fallbacks(TORN_BYTES, 1)
    assert [fallbacks.passed(5 * TORN_BYTES, n) for n in (2, 3, 4)] == [1, 1, 1]
    assert fallbacks.passed(6 * TORN_BYTES, 5) == 4


def test_after_a_restart_nothing_is_known_of_older_ones() -> None:
    """So nothing goes until the log has grown."""
    fallbacks = Fallbacks(5 * TORN_BYTES, 7)
    assert fallbacks.passed(5 * TORN_BYTES, 8) is None
    assert fallbacks.passed(7 * TORN_BYTES, 9) == 8


@given(st.lists(st.tuples(st.integers(0, 2 * TORN_BYTES), st.integers(0, 3)), max_size=20))
def test_what_a_log_may_lose_can_be_made_again(steps: list[tuple[int, int]]) -> None:
    """After each checkpoint there is one that the torn log reaches, with all that it needs; for any growth."""
    fallbacks = Fallbacks()
    checkpoints = [(0, 0)]
    size = needed = kept = 0
    for number, (growth, more) in enumerate(steps, 1):
        size, needed = size + growth, min(number, needed + more)
        checkpoints.append((size, needed))
        kept = fallbacks.passed(size, needed) or kept
        torn = max(0, size - TORN_BYTES)
        assert any(at <= torn and kept <= of for at, of in checkpoints)
