"""A block made of parts is the block that is encoded whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankd.collector.protocol.assembly import block_head, join_block, scalar_part
from rankd.collector.protocol.errors import LimitError, RecordError
from rankd.collector.protocol.items import MAX_FRAMES_PER_BLOCK
from rankd.collector.protocol.records import Frame, Level
from rankd.collector.protocol.wire import Block, encode_item


@given(
    names=st.lists(st.text("aä.", min_size=1, max_size=80), min_size=1, max_size=20),
    value=st.floats(),
    micro_step=st.none() | st.integers(1, 2**40),
)
def test_parts_make_the_very_bytes_of_the_whole(names: list[str], value: float, micro_step: int | None) -> None:
    """Whatever the names, values and position are."""
    frames = tuple(Frame.scalar(name, value) for name in names)
    block = Block(0, 7, micro_step, complete=False, time=1.5, frames=frames)
    parts = [scalar_part(name, block.level, value) for name in names]
    assert join_block(block_head(7, micro_step, 1.5), parts) == encode_item(block)


@pytest.mark.parametrize("count", [15, 16, MAX_FRAMES_PER_BLOCK])
def test_any_number_of_parts(count: int) -> None:
    """The header of an array grows with its length."""
    block = Block(0, 1, None, complete=False, time=0.0, frames=(Frame.scalar("x", 1.0),) * count)
    assert join_block(block_head(1, None, 0.0), [scalar_part("x", Level.STEP, 1.0)] * count) == encode_item(block)


@pytest.mark.parametrize("name", ["step", "local_norm", "local_loss", "", "x" * 300])
def test_what_names_no_scalar_of_that_level_is_refused(name: str) -> None:
    """Before anything is accepted."""
    with pytest.raises((RecordError, LimitError)):
        scalar_part(name, Level.STEP, 1.0)
