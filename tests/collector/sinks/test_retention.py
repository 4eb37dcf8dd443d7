"""When a log is rotated and what is deleted of it: pure."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankd.collector.sinks.parts import Part
from rankd.collector.sinks.retention import ClosedPart, Retention, Rotation, forgettable

DAY = 86_400.0


@pytest.mark.parametrize(
    ("rotation", "size", "written", "now", "due"),
    [
        (Rotation(size=100), 99, 0, 0, False),
        (Rotation(size=100), 100, 0, 0, True),
        (Rotation(every=DAY), 5, 3 * DAY - 1, 3 * DAY, True),
        (Rotation(every=DAY), 5, 3 * DAY, 4 * DAY - 1, False),
        (Rotation(every=DAY), 0, 0, 9 * DAY, False),
        (Rotation(size=100, every=DAY), 5, 0, 9 * DAY, True),
        (Rotation(), 10**9, 0, 9 * DAY, False),
    ],
)
def test_when_a_log_is_rotated(rotation: Rotation, size: int, written: float, now: float, due: bool) -> None:
    """For its size, or because another span of time has begun; an empty file never."""
    assert rotation.due(size, written, now) == due


def parts(*sizes: int, written: float = 0.0) -> list[ClosedPart]:
    """Parts of a hundred bytes each, `sizes` on the disk, each written a second after the one before."""
    return [ClosedPart(Part(100 * i, 100 * (i + 1), Path(str(i))), size, written + i) for i, size in enumerate(sizes)]


def gone(found: list[tuple[str, ClosedPart]]) -> list[tuple[str, int]]:
    return [(name, each.part.start // 100) for name, each in found]


ALL = {"a": 10**9, "b": 10**9}


def test_so_many_of_each_log() -> None:
    """The oldest go."""
    assert gone(forgettable({"a": parts(1, 1, 1), "b": parts(1)}, ALL, Retention(parts=2), 0)) == [("a", 0)]


def test_so_many_bytes_of_all_logs() -> None:
    """The oldest of all logs go, until the rest fits."""
    logs = {"a": parts(10, 10, 10), "b": parts(10, 10, written=0.5)}
    assert gone(forgettable(logs, ALL, Retention(size=30), 0)) == [("a", 0), ("b", 0)]
    assert gone(forgettable(logs, ALL, Retention(size=0), 0)) == [("a", 0), ("a", 1), ("b", 0)]


def test_so_old() -> None:
    """By when a part was last written to, and only from the oldest on."""
    assert gone(forgettable({"a": parts(1, 1, 1, 1)}, ALL, Retention(age=10), 12)) == [("a", 0), ("a", 1)]
    assert gone(forgettable({"a": parts(1, 1, 1, 1)}, ALL, Retention(age=1), 99)) == [("a", 0), ("a", 1), ("a", 2)]


@given(
    logs=st.dictionaries(
        st.sampled_from("abc"),
        st.lists(st.tuples(st.integers(0, 50), st.floats(0, 100)), max_size=6).map(
            lambda found: [
                ClosedPart(Part(100 * i, 100 * (i + 1), Path(str(i))), size, written)
                for i, (size, written) in enumerate(found)
            ]
        ),
    ),
    safe=st.dictionaries(st.sampled_from("abc"), st.integers(0, 600)),
    retention=st.builds(
        Retention,
        parts=st.none() | st.integers(1, 5),
        size=st.none() | st.integers(0, 200),
        age=st.none() | st.floats(0, 100),
    ),
)
def test_what_always_stays(logs: dict[str, list[ClosedPart]], safe: dict[str, int], retention: Retention) -> None:
    """The newest part of each log, and what a restart may look at; what goes is the beginning of a log, in order."""
    doomed = forgettable(logs, safe, retention, 100.0)
    for name, parts in logs.items():
        of_log = [each for which, each in doomed if which == name]
        assert of_log == parts[: len(of_log)]
        assert len(of_log) < max(1, len(parts))
        assert all(each.part.end <= safe.get(name, 0) for each in of_log)
    if not retention.deletes:
        assert doomed == []
