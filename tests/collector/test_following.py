"""Which lines of a merged log are chosen, and which parts of it are read for them."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rankd.collector.history
from rankd.collector.following import Line, LineFilter, attempt_at, backwards, chunks_of, sampled_chunks, wanted_chunks
from rankd.collector.history import History
from rankd.collector.protocol.records import Comment, Record
from rankd.collector.protocol.speclog import parse
from rankd.collector.run import Released
from rankd.collector.selection import Selection
from rankd.collector.sinks import merged_index
from rankd.collector.sinks.merged_index import MERGED_INDEX
from rankd.collector.sinks.speclog import MERGED_LOG

from .releases import begin, late, steps, write_logs

RANKS = (0, 1, 2, 66)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The logs of two attempts, with late blocks and lines about the run; the index has small chunks."""
    path = tmp_path_factory.mktemp("run")
    released: list[Released] = [*begin(1, ranks=RANKS), *steps(1, 12, ranks=RANKS), late(3, 1)]
    released += [*steps(13, 16, ranks=RANKS), Comment(None, "rank_lost", "rank 1: silent"), *begin(2, ranks=RANKS)]
    released += [*steps(11, 24, attempt=2, ranks=(0, 2, 66)), late(15, 1), Comment(2, "anomaly", "of rank 2")]
    released += steps(25, 36, attempt=2, ranks=(0, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merged_index, "CHUNK_BYTES", 1_500)
        write_logs(path, released)
    return path


@pytest.fixture(scope="module")
def bare(output: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same log without an index."""
    path = tmp_path_factory.mktemp("bare")
    (path / MERGED_LOG).write_bytes((output / MERGED_LOG).read_bytes())
    return path


def lines_of(path: Path) -> list[bytes]:
    return (path / MERGED_LOG).read_bytes().splitlines(keepends=True)


@functools.lru_cache
def parsed(path: Path) -> list[Record]:
    """The records that the strict reader finds."""
    return [r for r in parse(lines_of(path)) if isinstance(r, Record)]


def expected(path: Path, selection: Selection) -> list[Record]:
    """Those of them that are wanted, chosen one by one."""
    return [r for r in parsed(path) if selection.has(r)]


def records(lines: Iterable[Line], selection: Selection) -> list[Record]:
    return [r for line in lines for r in line.found() if isinstance(r, Record) and selection.has(r)]


ranks = st.none() | st.frozensets(st.sampled_from((*RANKS, 5)), min_size=1)
metrics = st.none() | st.frozensets(st.sampled_from(["local_loss", "local_norm", "lr", "mine"]), min_size=1)
names = st.none() | st.sampled_from(["layers.0", "weight", "权重", "back\\", "nothing"])
ranges = st.none() | st.tuples(st.integers(1, 40), st.integers(0, 20)).map(lambda t: (t[0], t[0] + t[1]))
selections = st.builds(Selection, ranks, metrics, names, ranges, st.none() | st.integers(1, 3))


# -- lines ------------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(selection=selections)
def test_the_lines_chosen_are_those_with_wanted_records(output: Path, selection: Selection) -> None:
    """What the tolerant filter chooses says what the strict reader finds, whatever is asked for."""
    chosen = LineFilter(selection).choose(lines_of(output))
    assert records(chosen, selection) == expected(output, selection)


def test_without_a_wish_every_line_is_given_as_it_is(output: Path) -> None:
    """No option leaves anything out, lines that are no lines of ours included."""
    lines = [b"# somebody's own\n", *lines_of(output), b"[rank_x] ?\n", b"no prefix\n", b"\xff\n"]
    assert [line.text for line in LineFilter(Selection()).choose(lines)] == lines


def test_equal_lines_are_all_given() -> None:
    """The same line 50 times, and the same loss on two ranks, are 50 lines and two lines."""
    header, loss = b'[rank_%d] { "step": 4, "micro_step": 1 }\n', b'[rank_%d] { "micro_step": 1, "local_loss": 0.5 }\n'
    block = [header, *[loss] * 50]
    lines = [line % rank for rank in (0, 1) for line in block]
    assert [line.text for line in LineFilter(Selection(metrics=frozenset({"local_loss"}))).choose(lines)] == lines


def test_a_block_shows_its_header_before_the_first_chosen_line(output: Path) -> None:
    """A line chosen by metric can be attributed: its block's header comes first, once; other blocks show none."""
    selection = Selection(frozenset({2}), frozenset({"local_norm"}), "layers", (4, 4), 1)
    texts = [line.text for line in LineFilter(selection).choose(lines_of(output))]
    assert texts == [
        b'[rank_2] { "step": 4, "micro_step": 1 }\n',
        b'[rank_2] { "local_norm": decoder.layers.0.weight:   4.250000 }\n',
        b'[rank_2] { "local_norm": decoder.layers.1.weight:   5.250000 }\n',
        b'[rank_2] { "step": 4, "micro_step": 2 }\n',
        b'[rank_2] { "local_norm": decoder.layers.0.weight:   4.250000 }\n',
        b'[rank_2] { "local_norm": decoder.layers.1.weight:   5.250000 }\n',
    ]


def test_a_late_block_shows_the_line_that_says_so(output: Path) -> None:
    """`# late` stands before the header and belongs to it; a range of steps finds the block where it stands."""
    texts = [line.text for line in LineFilter(Selection(frozenset({1}), steps=(3, 3))).choose(lines_of(output))]
    assert texts[-3:-1] == [
        b"[rank_1] # late attempt 1 step 3 micro_step 1\n",
        b'[rank_1] { "step": 3, "micro_step": 1 }\n',
    ]


def test_lines_about_the_run_are_left_out_where_a_part_is_asked_for(output: Path) -> None:
    """The collector's own lines belong to no rank, step or metric."""
    for selection in (Selection(frozenset({1})), Selection(steps=(1, 9)), Selection(metrics=frozenset({"lr"}))):
        assert all(line.rank is not None for line in LineFilter(selection).choose(lines_of(output)))


def test_damaged_lines_do_not_end_it(output: Path) -> None:
    """Half a line, another program's line, bytes that are no text: the lines around them are still found."""
    selection = Selection(metrics=frozenset({"local_loss"}))
    damaged = [part for line in lines_of(output) for part in (line, b"[rank_1] { garbage\n", b"\xff\xfe\n")]
    assert records(LineFilter(selection).choose(damaged), selection) == expected(output, selection)


# -- chunks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indexed", [True, False])
@settings(max_examples=40)
@given(selection=selections)
def test_history_is_all_that_is_wanted(output: Path, bare: Path, indexed: bool, selection: Selection) -> None:
    """With an index and without one, the parts that are left out hold nothing that is wanted."""
    place = output if indexed else bare
    with History(place, selection, records=True) as history:
        found = records(history.all(), selection)
    assert found == expected(output, selection)


@pytest.mark.parametrize("indexed", [True, False])
@settings(max_examples=40)
@given(selection=selections, count=st.integers(0, 200))
def test_the_last_lines_are_the_end_of_all(
    output: Path, bare: Path, indexed: bool, selection: Selection, count: int
) -> None:
    """The last N lines are found from the end, and are those that reading all would end with."""
    place = output if indexed else bare
    with History(place, selection, records=True) as all_of_it, History(place, selection, records=True) as history:
        everything = list(all_of_it.all())
        assert list(history.last(count)) == everything[len(everything) - min(count, len(everything)) :]


def test_many_last_lines_are_read_again_not_kept(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same lines come out where memory is given for a few of them only."""
    raw = (output / MERGED_LOG).read_bytes().splitlines(keepends=True)
    monkeypatch.setattr(rankd.collector.history, "_MOST_KEPT", 10)
    for count in (5, 11, len(raw) - 1, len(raw), 10 * len(raw)):
        with History(output, Selection()) as history:
            assert [line.text for line in history.last(count)] == raw[-count:]


@settings(max_examples=40)
@given(selection=selections, cut=st.integers(0, 40_000), count=st.none() | st.integers(0, 20))
def test_history_and_what_follows_are_the_whole(
    output: Path, tmp_path_factory: pytest.TempPathFactory, selection: Selection, cut: int, count: int | None
) -> None:
    """Wherever the log ends when it is opened, also inside a block, following goes on without a gap."""
    place = tmp_path_factory.mktemp("cut")
    raw = (output / MERGED_LOG).read_bytes()
    (place / MERGED_LOG).write_bytes(raw[:cut])
    (place / ".rankd").mkdir()
    (place / MERGED_INDEX).write_bytes((output / MERGED_INDEX).read_bytes())
    with History(place, selection, records=True) as history:
        first = list(history.all() if count is None else history.last(count))
        rest = list(history.filter.choose(raw[history.size :].splitlines(keepends=True)))
    wanted = expected(output, selection)
    if count is None:
        assert records([*first, *rest], selection) == wanted
    else:
        assert records(rest, selection) == wanted[len(wanted) - len(records(rest, selection)) :]
        assert len(first) <= count


@pytest.mark.slow
def test_the_end_of_the_log_is_found_wherever_the_index_ends(tmp_path: Path) -> None:
    """The newest steps begin in the last chunk that has an entry, or in the part behind it, in whichever attempt."""
    released: list[Released] = [*begin(1), *steps(1, 9)]
    again: list[Released] = [*begin(2), *steps(4, 12, attempt=2)]
    whole = tmp_path / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merged_index, "CHUNK_BYTES", 900)
        write_logs(whole, [*released, *again])
    raw, index = (whole / MERGED_LOG).read_bytes(), (whole / MERGED_INDEX).read_bytes()
    ends = [m.end() for m in re.finditer(rb"\n(?=\[rank_\d+\] \{ \"step\")", raw)]
    for number, end in enumerate(ends[1:]):
        place = tmp_path / str(number)
        (place / ".rankd").mkdir(parents=True)
        (place / MERGED_LOG).write_bytes(raw[:end])
        (place / MERGED_INDEX).write_bytes(index)
        newest = parsed(place)[-1].position
        for selection in (Selection(steps=(newest.step, newest.step)), Selection(attempt=newest.attempt)):
            with History(place, selection, records=True) as history:
                assert records(history.all(), selection) == expected(place, selection)
            with History(place, selection, records=True) as history:
                assert records(history.last(5), selection)[-1] == expected(place, selection)[-1]


def test_few_chunks_are_read_for_a_step_or_a_rank(output: Path) -> None:
    """The index is of use: a step in the middle, and a rank that ended early, do not read the whole log."""
    index, size = (output / MERGED_INDEX).read_bytes(), (output / MERGED_LOG).stat().st_size
    chunks = chunks_of(index, size, lambda at, n: (output / MERGED_LOG).read_bytes()[at : at + n])
    assert chunks is not None
    for selection in (Selection(steps=(20, 20)), Selection(frozenset({1}), attempt=2)):
        assert len(wanted_chunks(chunks, selection)) < len(chunks) / 4


def test_an_index_of_another_log_is_not_used(output: Path, tmp_path: Path) -> None:
    """Where the log was replaced, its index is told by its ends, and the log is read without it."""
    (tmp_path / ".rankd").mkdir()
    (tmp_path / MERGED_INDEX).write_bytes((output / MERGED_INDEX).read_bytes())
    write_logs(tmp_path, steps(100, 160), index=False)
    with History(tmp_path, Selection(steps=(130, 130))) as history:
        assert {line.attempt for line in history.all()} == {1}


def test_chunks_from_the_end_begin_at_blocks(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without index the log is cut, from its end on, where blocks begin; together the pieces are the log."""
    monkeypatch.setattr("rankd.collector.following.CHUNK_BYTES", 700)
    raw = (output / MERGED_LOG).read_bytes()
    chunks = list(backwards(len(raw), lambda at, n: raw[at : at + n]))[::-1]
    assert len(chunks) > 10
    assert [c.start for c in chunks] == [0, *(c.end for c in chunks[:-1])]
    assert all(b'] { "step": ' in raw[c.start : c.start + 24] for c in chunks[1:])


def test_samples_tell_steps_and_attempts(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places at even distances give rising keys, and a step that goes back another attempt."""
    monkeypatch.setattr("rankd.collector.following.CHUNK_BYTES", 500)
    raw = (output / MERGED_LOG).read_bytes()
    chunks = sampled_chunks(len(raw), lambda at, n: raw[at : at + n], samples=1_000)
    keys = [chunk.key for chunk in chunks]
    assert keys == sorted(keys)
    assert {key[0] for key in keys} == {1, 2}
    assert len(set(keys)) > 30


def test_the_attempt_of_a_place_is_found_backwards(output: Path) -> None:
    """The line that began it is looked for from there towards the start."""
    raw = (output / MERGED_LOG).read_bytes()
    begins = raw.index(b"[collector] # attempt 2")
    places = [0, begins, begins + 60, len(raw)]
    assert [attempt_at(lambda at, n: raw[at : at + n], place) for place in places] == [1, 1, 2, 2]


def test_blocks_longer_than_a_look_are_found(tmp_path: Path) -> None:
    """Blocks of more lines than are looked at in one go still give their beginnings."""
    long = [b"[rank_0] # note " + b"x" * 70_000 + b"\n"] * 3
    raw = b"".join(itertools.chain([b'[rank_0] { "step": 1 }\n'], long, [b'[rank_0] { "step": 2 }\n'], long)) * 20
    chunks = sampled_chunks(len(raw), lambda at, n: raw[at : at + n])
    assert len(chunks) > 3
