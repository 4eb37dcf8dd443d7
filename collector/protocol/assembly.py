"""A block whose scalars come one by one: its parts are encoded as they come, and put together at the end.

What comes out is what `wire.encode_item` makes of the whole block; a value logged in a loop of 700 is then encoded
once, and the block costs one join.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import msgpack

from .records import Frame, Level
from .wire import Block, encode_item

__all__ = ["block_head", "join_block", "scalar_part"]

_DOUBLE = struct.Struct("<d")


def block_head(step: int, micro_step: int | None, time: float) -> bytes:
    """The beginning of a block (number 0) that does not complete its position: everything before its frames."""
    # The frames come last; an empty array is one byte.
    return encode_item(Block(0, step, micro_step, complete=False, time=time))[:-1]


def scalar_part(metric: str, level: Level, value: float) -> bytes:
    """One scalar of such a block.

    Raises:
        RecordError: `metric` names no scalar of this level.
    """
    before, after = _around(metric, level)
    return before + _DOUBLE.pack(value) + after


@functools.lru_cache(maxsize=4096)
def _around(metric: str, level: Level) -> tuple[bytes, bytes]:
    """What stands before and after a scalar's value. Names come again and again, so they are checked once."""
    frame = Frame.scalar(metric, 0.0)
    frame.check(level)
    raw: bytes = msgpack.packb([metric, None, frame.column, None, None, None], use_bin_type=True)
    place = len(raw) - 3 - _DOUBLE.size
    return raw[:place], raw[place + _DOUBLE.size :]


def join_block(head: bytes, parts: Sequence[bytes]) -> bytes:
    """The item."""
    count = len(parts)
    # msgpack's header of an array of up to 15, and of up to 65,535 elements.
    array = bytes([0x90 | count]) if count < 16 else struct.pack(">BH", 0xDC, count)
    return b"".join((head, array, *parts))
