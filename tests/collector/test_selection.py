"""Which records are wanted, and how the options say it."""

from __future__ import annotations

import argparse

import pytest

from rankd.collector.protocol.errors import RecordError
from rankd.collector.protocol.ranges import parse_ranks, parse_steps
from rankd.collector.protocol.records import MAX_STEP, Position, Record
from rankd.collector.selection import Selection, add_arguments, selection_of


@pytest.mark.parametrize(("text", "ranks"), [("0", {0}), ("0,2-3", {0, 2, 3}), (" 1 , 1-2", {1, 2})])
def test_ranks_are_numbers_and_ranges(text: str, ranks: set[int]) -> None:
    """A list of ranks and ranges of them, both ends included."""
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "x", "3-1", "-1", "1,,2", "0-99999999", "٣"])
def test_what_is_no_list_of_ranks_is_refused(text: str) -> None:
    """The error says what was found and what is allowed; a range that would fill the memory is none."""
    with pytest.raises(RecordError, match="allowed"):
        parse_ranks(text)


@pytest.mark.parametrize(
    ("text", "steps"), [("5:7", (5, 7)), ("5:", (5, MAX_STEP)), (":7", (1, 7)), ("5", (5, 5)), ("5:5", (5, 5))]
)
def test_steps_are_a_range_with_both_ends(text: str, steps: tuple[int, int]) -> None:
    """A:B includes both; an end that is left out is open; one step is a range of one."""
    assert parse_steps(text) == steps


@pytest.mark.parametrize("text", ["", ":", "7:5", "0", "a:b", "1:2:3", "-1"])
def test_what_is_no_range_of_steps_is_refused(text: str) -> None:
    """Steps count from 1 and rise."""
    with pytest.raises(RecordError, match="step"):
        parse_steps(text)


def test_the_options_make_a_selection() -> None:
    """All options together; metrics may be given in one option or in several."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = ["--rank=0,2", "--metric=a,b", "--metric=c", "--name=wei", "--step=3:", "--attempt=2"]
    selection = selection_of(parser.parse_args(options))
    assert selection == Selection(frozenset({0, 2}), frozenset("abc"), "wei", (3, MAX_STEP), 2)
    assert selection_of(parser.parse_args([])) == Selection()


def test_a_record_is_wanted_if_each_part_fits() -> None:
    """Rank, metric, name, step and attempt must all fit; a record without a name has no part of one."""
    record = Record(Position(2, 5, 1), 3, "local_norm", "a.weight", 1.0)
    wanted = [Selection(), Selection(frozenset({3}), frozenset({"local_norm"}), "weight", (5, 5), 2)]
    not_wanted = [
        Selection(ranks=frozenset({2})),
        Selection(metrics=frozenset({"lr"})),
        Selection(name="bias"),
        Selection(steps=(6, 9)),
        Selection(attempt=1),
    ]
    assert all(each.has(record) for each in wanted)
    assert not any(each.has(record) for each in not_wanted)
    assert not Selection(name="a").has(Record(Position(1, 1), 0, "lr", None, 1.0))
