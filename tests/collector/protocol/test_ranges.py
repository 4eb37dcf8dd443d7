"""Ranges of ranks and steps, as they are typed and as they are shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankd.collector.protocol.checks import MAX_RANKS
from rankd.collector.protocol.ranges import parse_ranks, ranges, ranks_text, span, steps_text

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 7, 9, 10], "0-2,7,9-10"), ([2, 1, 1, 0], "0-2"), (range(1024), "0-1023")],
)
def test_ranks_are_shown_as_ranges(numbers: list[int], text: str) -> None:
    """Whatever their order, each once."""
    assert ranges(numbers) == text


@given(st.sets(st.integers(0, MAX_RANKS - 1), min_size=1))
def test_what_is_shown_can_be_typed(ranks: set[int]) -> None:
    """A list that was copied from a message chooses the same ranks."""
    assert parse_ranks(ranges(ranks)) == ranks


def test_one_is_not_called_several() -> None:
    """`rank 3`, not `ranks 3`; `step 5`, not `steps 5-5`."""
    assert (ranks_text([3]), ranks_text([0, 2, 3])) == ("rank 3", "ranks 0,2-3")
    assert (span(5, 5), span(5, 7)) == ("5", "5-7")
    assert (steps_text(5, 5), steps_text(5, 7)) == ("step 5", "steps 5-7")


def test_no_other_form_is_in_the_code_and_the_documents() -> None:
    """`0..3` and `steps 5 to 7` are gone from what people read."""
    other = re.compile(r"[0-9}]\.\.[0-9{]|\b(steps|ranks) [0-9{][^ ]* to [0-9{]")
    sources = [path for room in ("agent", "collector", "profiler_ctl", "docs") for path in (ROOT / room).rglob("*.*")]
    read = [path for path in (*sources, ROOT / "README.md") if path.suffix in (".py", ".md")]
    assert len(read) > 100
    found = [f"{path}: {match[0]}" for path in read if (match := other.search(path.read_text(encoding="utf-8")))]
    assert found == []
