"""Hypothesis strategies for everything that travels: use these, so that all tests mean the same by "any frame".

They give what may exist, at small sizes, with the odd values (NaN, infinities, largest numbers, any Unicode) included.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from hypothesis import strategies as st

from rankd.collector.protocol.messages import Fact
from rankd.collector.protocol.records import (
    MAX_STEP,
    SUMMARY_FIELDS,
    ExpertLayer,
    Frame,
    Level,
    NameTable,
    Position,
)
from rankd.collector.protocol.wire import (
    MAX_RANKS,
    Ack,
    Answer,
    Ask,
    Beat,
    Block,
    Command,
    Data,
    Gap,
    Goodbye,
    Hello,
    Hole,
    Item,
    Message,
    Note,
    Refused,
    Report,
    Table,
    Welcome,
    Who,
    encode_item,
)

__all__ = [
    "any_float",
    "blocks",
    "expert_layers",
    "frames",
    "gaps",
    "goodbyes",
    "hellos",
    "holes",
    "items",
    "messages",
    "name_tables",
    "names",
    "notes",
    "numbered",
    "positions",
    "seconds",
    "seqs",
    "steps",
    "table_ids",
    "user_metrics",
]

# Any Unicode text without halves of surrogate pairs, which UTF-8 does not have.
_text = st.text(st.characters(codec="utf-8"))
steps = st.integers(1, MAX_STEP) | st.integers(1, 20)
micro_steps = st.none() | steps
counts = st.integers(0, MAX_STEP)
seqs = steps
seconds = st.floats(allow_nan=False, allow_infinity=False)
# Every bit pattern, all kinds of NaN included: struct keeps them where arithmetic might not.
any_float = st.floats() | st.binary(min_size=8, max_size=8).map(lambda raw: float(struct.unpack("<d", raw)[0]))
words = st.text(st.characters(codec="utf-8"), min_size=1, max_size=16)
names = words | st.builds("decoder.layers.{}.{}.weight".format, st.integers(0, 99), st.sampled_from(["q", "层", "%s"]))
name_tables = st.builds(NameTable, st.lists(names, min_size=1, max_size=8, unique=True).map(tuple))
positions = st.builds(Position, steps, steps, micro_steps)
expert_layers = st.builds(ExpertLayer, st.just("decoder"), st.integers(0, 200)) | st.builds(
    ExpertLayer, st.just("mtp"), st.integers(0, 200), st.integers(0, 9)
)
_taken = {"local_loss", "local_norm", "tpe", "device_loss", "device_norm", "max_attention_logit", "step", "micro_step"}
user_metrics = words.filter(lambda name: name not in _taken)

_scalars = {
    Level.MICRO_STEP: st.just("local_loss") | user_metrics,
    Level.STEP: st.sampled_from(("device_loss", *SUMMARY_FIELDS)) | user_metrics,
}


@st.composite
def _named(draw: st.DrawFn, metric: str) -> Frame:
    table = draw(name_tables)
    present = draw(st.none() | st.sets(st.integers(0, len(table) - 1)).map(sorted))
    size = len(table) if present is None else len(present)
    return Frame.named(metric, table, draw(st.lists(any_float, min_size=size, max_size=size)), present)


@st.composite
def _max_logits(draw: st.DrawFn) -> Frame:
    table = draw(name_tables)
    lists = st.lists(st.lists(any_float, max_size=4), min_size=len(table), max_size=len(table))
    return Frame.lists("max_attention_logit", table, draw(lists))


@st.composite
def _tpe(draw: st.DrawFn) -> Frame:
    layers = draw(st.lists(expert_layers, min_size=1, max_size=4, unique=True))
    tokens = st.lists(st.lists(st.integers(0, 2**20), max_size=4), min_size=len(layers), max_size=len(layers))
    return Frame.lists("tpe", NameTable(tuple(layer.name for layer in layers)), draw(tokens), draw(steps))


def frames(level: Level) -> st.SearchStrategy[Frame]:
    """Any frame that is possible at `level`."""
    scalars = st.builds(Frame.scalar, _scalars[level], any_float)
    if level is Level.MICRO_STEP:
        return scalars | _named("local_norm") | _tpe()
    return scalars | _named("device_norm") | _max_logits()


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """Any block, with a few frames of its level."""
    micro_step = draw(micro_steps)
    level = Level.STEP if micro_step is None else Level.MICRO_STEP
    content = draw(st.lists(frames(level), max_size=4).map(tuple))
    return Block(draw(seqs), draw(steps), micro_step, draw(st.booleans()), draw(seconds), content, draw(st.booleans()))


def table_ids(block: Block) -> Mapping[NameTable, int]:
    """Ids for the name tables of a block, as an encoder and a decoder need them."""
    tables = dict.fromkeys(frame.table for frame in block.frames if frame.table is not None)
    return {table: number for number, table in enumerate(tables)}


_maps = st.dictionaries(words, counts, max_size=4)
notes = st.builds(Note, seqs, steps, micro_steps, words, _text, seconds) | st.builds(
    Note, seqs, st.none(), st.none(), words, _text, seconds
)
_ends = st.tuples(steps, micro_steps)
gaps = st.builds(Gap, seqs, words, counts, _ends, _ends)
goodbyes = st.builds(Goodbye, seqs, _text, counts, _maps, seconds)
holes = st.tuples(seqs, seqs).flatmap(
    lambda ends: st.builds(Hole, st.just(max(ends)), st.just(min(ends)), st.none() | counts, st.none() | _ends)
)
items: st.SearchStrategy[Item] = st.one_of(
    st.builds(Table, seqs, counts, name_tables), blocks(), notes, gaps, holes, goodbyes
)


def numbered(item: Item) -> bytes:
    """The bytes of an item, its tables numbered by `table_ids`."""
    return encode_item(item, table_ids(item) if isinstance(item, Block) else None)


@st.composite
def hellos(draw: st.DrawFn) -> Hello:
    """Any hello, of a rank that its world has."""
    world_size = draw(st.integers(1, MAX_RANKS))
    return Hello(
        session=draw(st.binary(min_size=16, max_size=16)),
        run=draw(st.just("") | words),
        rank=draw(st.integers(0, world_size - 1)),
        world_size=world_size,
        next_seq=draw(seqs),
        host=draw(_text.filter(lambda text: len(text) < 200)),
        pid=draw(counts),
        started=draw(seconds),
        total_steps=draw(micro_steps),
        about=draw(st.dictionaries(words, words, max_size=4)),
    )


facts: st.SearchStrategy[dict[str, Fact]] = st.dictionaries(
    words, st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | seconds | _text, max_size=4
)
messages: st.SearchStrategy[Message] = st.one_of(
    hellos(),
    st.builds(Welcome, st.just("") | words, counts, st.floats(1e-3, 1e6)),
    st.builds(Refused, _text, st.booleans()),
    st.builds(Data, st.lists(items.map(numbered) | st.binary(max_size=8), max_size=4).map(tuple)),
    st.builds(Ack, counts),
    st.builds(Beat, counts, counts, counts, st.dictionaries(words, any_float, max_size=4)),
    st.builds(Who),
    st.builds(Command, words, facts, st.binary(max_size=64)),
    st.builds(Report, words, facts),
    st.builds(Ask, counts, words, facts, st.binary(max_size=64)),
    st.builds(Answer, counts, st.booleans(), st.binary(max_size=40)),
)
