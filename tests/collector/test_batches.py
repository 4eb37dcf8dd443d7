"""Batches as bytes, and the places of their text."""

from __future__ import annotations

import io
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import frames, name_tables, positions, words

from rankd.collector import batches
from rankd.collector.batches import Batch, BatchReader, BatchWriter, Kind, Places, next_message, pack, take_messages
from rankd.collector.protocol.records import Comment, Frame, NameTable, Position, RankBlock
from rankd.collector.run import Released

ranks = st.integers(0, 9)
# A rank's line may hold what no peer could send.
comments = st.builds(Comment, ranks | st.none(), words, st.text())


@st.composite
def rank_blocks(draw: st.DrawFn) -> RankBlock:
    """Whatever the ordering may release."""
    position = draw(positions)
    some = tuple(draw(st.lists(frames(position.level), max_size=3)))
    notes = tuple(draw(st.lists(comments, max_size=2)))
    total, time = draw(st.none() | st.integers(1, 99)), draw(st.floats(allow_nan=False))
    return RankBlock(draw(ranks), position, some, notes, draw(st.booleans()), total, time)


def through(writer: BatchWriter, reader: BatchReader, batch: list[Released]) -> list[Released]:
    """The batch at the other end."""
    message = next_message(io.BytesIO(writer.message(batch)))
    assert message is not None
    kind, *fields = message
    assert kind == Kind.PRINT
    return reader.released(*fields)


@given(st.lists(st.lists(rank_blocks() | comments, max_size=4), max_size=4))
def test_what_goes_in_comes_out(sent: list[list[Released]]) -> None:
    """Every block and comment of every batch, whatever is in it."""
    writer, reader = BatchWriter(), BatchReader()
    for batch in sent:
        assert through(writer, reader, batch) == batch


def norms(table: NameTable) -> RankBlock:
    return RankBlock(0, Position(1, 1, 1), (Frame.named("local_norm", table, [0.5] * len(table)),))


def test_a_table_travels_once() -> None:
    """The first batch of a process has its names; the later ones do not, nor blocks of other ranks in the first."""
    table = NameTable(tuple(f"decoder.layers.{i}.a_rather_long_name.weight" for i in range(100)))
    writer = BatchWriter()
    first, second = writer.message([norms(table), norms(table)]), writer.message([norms(table)])
    assert first.count(b"a_rather_long_name") == 100
    assert second.count(b"a_rather_long_name") == 0


@given(st.lists(st.lists(st.builds(norms, name_tables), min_size=1, max_size=3), max_size=8))
def test_tables_are_forgotten_at_both_ends(sent: list[list[Released]]) -> None:
    """However many tables there are, no process keeps more than a batch adds to the limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "_REMEMBERED_BYTES", 20)
        writer, reader = BatchWriter(), BatchReader()
        for batch in sent:
            assert through(writer, reader, batch) == batch
            new = {frame.table for block in batch if isinstance(block, RankBlock) for frame in block.frames}
            assert len(reader._tables) <= 20 + len(new)


@given(st.lists(st.binary(max_size=40), max_size=5), st.data())
def test_messages_are_whole_wherever_they_are_cut(sent: list[bytes], data: st.DataObject) -> None:
    """Answers arrive in pieces of any size; an unfinished one waits for the rest."""
    stream = b"".join(pack(Kind.FAILED, text) for text in sent)
    received, got, at = bytearray(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        received += stream[at : at + size]
        got += take_messages(received)
        at += size
    assert got == [[Kind.FAILED, text] for text in sent]
    assert not received


def test_an_input_that_ends_within_a_message_has_ended() -> None:
    """What is left of it is no message."""
    whole = pack(Kind.WRITTEN)
    for size in range(len(whole)):
        assert next_message(io.BytesIO(whole[:size])) is None
    assert next_message(io.BytesIO(whole)) == [Kind.WRITTEN]


# -- places -----------------------------------------------------------------------------------------------------------

SIZES = st.dictionaries(st.sampled_from("abc"), st.integers(1, 9))


@given(st.lists(SIZES, max_size=8), st.randoms(use_true_random=False))
def test_places_are_those_of_one_process(sizes: list[dict[str, int]], order: random.Random) -> None:
    """In whatever order batches are printed and written, each stands where it would stand if they came one by one; and
    up to `whole`, a log has all that belongs there at any time."""
    places = Places()
    added = [places.add(0) for _ in sizes]
    expected, ends = [], dict.fromkeys("abc", 0)
    for each in sizes:
        expected.append({name: ends[name] for name in each})
        ends = {name: end + each.get(name, 0) for name, end in ends.items()}
    written: list[Batch] = []
    placed: list[Batch] = []
    todo = list(added)
    order.shuffle(todo)
    while todo or len(written) < len(added):
        ready = [batch for batch in placed if batch not in written]
        if todo and (not ready or order.random() < 0.5):
            batch = todo.pop()
            placed += places.printed(batch, sizes[added.index(batch)])
        else:
            written.append(batch := order.choice(ready))
            places.written(batch)
        first = next((i for i, batch in enumerate(added) if batch not in written), len(added))
        assert places.unwritten == len(added) - first
        for name, size in places.whole().items():
            assert size == sum(each.get(name, 0) for each in sizes[:first])
        beyond = {name for batch in placed[first:] for name in batch.places or ()}
        assert beyond == set(places.whole())
    assert [batch.places for batch in added] == expected
    assert placed == added
    assert places.whole() == {}
