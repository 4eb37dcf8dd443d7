"""The floors of the ranks decide what is released, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankd.collector.ordering import Ordering, above, at


def key(step: int, micro: int = 1, attempt: int = 1) -> tuple[int, int, int]:
    return (attempt, step, micro)


def released(ordering: Ordering[str]) -> list[tuple[tuple[int, int, int], list[tuple[int, list[str]]]]]:
    return list(ordering.release())


def test_nothing_is_released_before_all_counting_ranks_passed() -> None:
    """A position waits for the slowest rank that counts, and for no other."""
    ordering: Ordering[str] = Ordering()
    ordering.expect(0)
    ordering.expect(1)
    ordering.hold(0, key(1), "a")
    ordering.raise_floor(0, above(key(1)))
    assert released(ordering) == []
    assert ordering.waiting() == (key(1), frozenset({1}))
    ordering.raise_floor(1, at(key(1)))
    assert released(ordering) == []
    ordering.raise_floor(1, above(key(1)))
    assert released(ordering) == [(key(1), [(0, ["a"])])]
    assert ordering.waiting() is None


def test_items_of_one_position_come_in_rank_order() -> None:
    """Whatever order they arrive in, a position's items come by rank, and a rank's own in order of production."""
    ordering: Ordering[str] = Ordering()
    for rank, item in ((2, "c1"), (0, "a"), (2, "c2"), (1, "b")):
        ordering.hold(rank, key(1), item)
    assert released(ordering) == [(key(1), [(0, ["a"]), (1, ["b"]), (2, ["c1", "c2"])])]


def test_a_dropped_rank_holds_nobody_up() -> None:
    """Dropping the last rank that is waited for releases what it held up."""
    ordering: Ordering[str] = Ordering()
    ordering.expect(0)
    ordering.expect(1)
    ordering.hold(0, key(1), "a")
    ordering.raise_floor(0, above(key(1)))
    assert ordering.waiting() == (key(1), frozenset({1}))
    ordering.drop(1)
    assert released(ordering) == [(key(1), [(0, ["a"])])]


def test_what_comes_at_or_below_the_released_position_is_late() -> None:
    """Late is told from the highest released position."""
    ordering: Ordering[str] = Ordering()
    ordering.hold(0, key(2), "a")
    assert not ordering.is_late(key(2))
    released(ordering)
    assert ordering.is_late(key(2))
    assert ordering.is_late(key(1, 9))
    assert not ordering.is_late(key(2, 2))


def test_a_floor_never_sinks() -> None:
    """A lower floor than the known one changes nothing."""
    ordering: Ordering[str] = Ordering()
    ordering.raise_floor(0, above(key(3)))
    ordering.raise_floor(0, above(key(2)))
    assert ordering.floor(0) == above(key(3))


@given(st.permutations([(rank, step) for rank in range(3) for step in range(1, 5)]), st.data())
def test_watching_only_the_head_gives_what_looking_at_all_ranks_gives(
    order: list[tuple[int, int]], data: st.DataObject
) -> None:
    """After every event, exactly the positions below every counting rank's floor have been released."""
    ordering: Ordering[str] = Ordering()
    counting = {0, 1, 2}
    for rank in counting:
        ordering.expect(rank)
    held: set[tuple[int, int, int]] = set()
    floors = dict.fromkeys(counting, (0, 0, 0, 0))
    for rank, step in order:
        event = data.draw(st.sampled_from(["hold", "floor", "drop", "expect"]))
        if event == "hold" and not ordering.is_late(key(step)):
            ordering.hold(rank, key(step), "x")
            held.add(key(step))
        elif event == "floor":
            ordering.raise_floor(rank, above(key(step)))
            floors[rank] = max(floors[rank], above(key(step)))
        elif event == "drop":
            ordering.drop(rank)
            counting.discard(rank)
        elif event == "expect":
            ordering.expect(rank)
            counting.add(rank)
        got = [k for k, _ in released(ordering)]
        want = sorted(k for k in held if all(floors[r] >= above(k) for r in counting))
        # Releasing stops at the first position that is held up.
        blocked = [k for k in held if k not in want]
        assert got == [k for k in want if not blocked or k < min(blocked)]
        held -= set(got)
