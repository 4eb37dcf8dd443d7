"""A frame of norms as its lines, with the digits of all values made at once.

Norms are most of what a run records, and `%` printing them one by one was the largest part of the collector's time.
A norm stands in ten columns, `%10.6f`, so the place of each is known: a copy of the lines with blanks in these places
gets the digits from tables, a few calls of numpy for a whole frame, in a third of the time, or for several frames, in a
sixth. That is what numpy is used for, where it is installed; it always is beside MindSpore. The text is the same to the
byte: where the digits are not certain, or ten columns do not do, the whole frame is printed by `%`, as it is without
numpy.
"""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

__all__ = ["NORM_FORMAT", "NormLines", "load_numpy"]

NORM_FORMAT = "%10.6f"
_WIDTH = 10
_TAIL = b" }\n"

# Calling numpy some twenty times costs as much as printing so many values one by one (measured: 15 µs).
_FEW = 150

_Write = Callable[[bytes, bytes, Sequence[bytes], "bytearray | memoryview"], bool]


def _groups() -> tuple[list[int], list[int], list[int]]:
    """A value is three groups of digits, 999.999999: the first, padded, with its sign and the point, is four bytes; the
    other two, with the beginning of the tail, are eight. Each is a number, found in a table: 1,100 of the first, the
    negative ones last, and 1,000 of each other.
    """
    firsts = [b"%3d." % i for i in range(1_000)] + [b"%3d." % -i if i else b" -0." for i in range(100)]
    groups = [b"%03d" % i for i in range(1_000)]
    thirds = [b"\0\0\0" + text + _TAIL[:2] for text in groups]
    first, second, third = ([int.from_bytes(text, "little") for text in texts] for texts in (firsts, groups, thirds))
    return first, second, third


@functools.cache
def _numpy_write() -> _Write | None:
    """A function of the blank lines, the places of the values in them (int64), columns of float64, and where the lines
    of all columns go; False: one of the values has to be printed by itself. None: there is no numpy.
    """
    try:
        import numpy as np
    except Exception:  # noqa: BLE001  # whatever is wrong with somebody's numpy, the logs have to be written
        return None
    numbers, kinds = _groups(), ("<u4", "<u8", "<u8")
    first, second, third = (np.array(each, kind) for each, kind in zip(numbers, kinds, strict=True))
    text_of_value = np.dtype([("first", "<u4"), ("rest", "<u8")])
    lowest, highest = np.minimum.reduce, np.maximum.reduce

    def write(blank: bytes, places: bytes, columns: Sequence[bytes], lines: bytearray | memoryview) -> bool:
        count = len(columns)
        values = np.frombuffer(columns[0] if count == 1 else b"".join(columns), "<f8")
        low = lowest(values)
        if not (low > -99.9 and highest(values) < 999.9):  # it takes more than ten columns, or is no number
            return False
        distance = values * 1e6
        rounded = np.rint(distance)
        distance -= rounded
        # The product is off by up to half its last place, 2**-24. Nearer to the middle than that, more digits than a
        # float64 has decide which way `%` rounds.
        if not (lowest(distance) > -0.4999998 and highest(distance) < 0.4999998):
            return False
        number = rounded.astype("i8")
        if low <= 0:
            np.abs(number, number)
        above = number // 1_000
        number -= above * 1_000
        texts = np.empty(len(values), text_of_value)
        texts["rest"] = third[number]
        number = above // 1_000
        above -= number * 1_000
        texts["rest"] += second[above]
        if low <= 0:  # -0.0 has a sign too
            number += np.signbit(values) * 1_000
        texts["first"] = first[number]
        size = len(blank)
        for start in range(0, count * size, size):
            lines[start : start + size] = blank
        # Every place at which twelve bytes can begin, as an array over the text; a row for each column.
        windows: np.ndarray[Any, Any] = np.ndarray((count, size - 11), "V12", lines, 0, (size, 1))
        windows[:, np.frombuffer(places, "i8")] = texts.view("V12").reshape(count, -1)
        return True

    return write


def load_numpy() -> bool:
    """Import numpy now, not at the first large frame; whether it is there."""
    return _numpy_write() is not None


class NormLines:
    """The lines of a frame of norms, but for the values.

    Args:
        heads: each line up to its value.
    """

    def __init__(self, heads: Sequence[bytes]) -> None:
        gap = b" " * _WIDTH + _TAIL
        self._blank = gap.join([*heads, b""])
        ends = accumulate(len(head) + len(gap) for head in heads)
        self._places = array("q", [end - len(gap) for end in ends]).tobytes()
        self._values = struct.Struct(f"<{len(heads)}d")
        self._template: bytes | None = None

    @property
    def size(self) -> int:
        """What it may come to keep, in bytes."""
        return 2 * len(self._blank) + len(self._places)

    @property
    def text_size(self) -> int:
        """Bytes of the lines, unless a value takes more than its ten columns."""
        return len(self._blank)

    def fill(self, column: bytes) -> bytes | bytearray:
        """The lines with these values, little-endian float64, one for each head."""
        lines = bytearray(self.text_size)
        return lines if self._written([column], lines) else self._printed(column)

    def fill_all(self, columns: Sequence[bytes], room: memoryview) -> Sequence[bytes | bytearray | memoryview]:
        """`fill` of each; several at once take half the time.

        Args:
            room: `text_size` for each column. What is returned may lie there: memory that is used again and again stays
                in the processor's cache.
        """
        if not self._written(columns, room):
            return [self.fill(column) for column in columns]
        return [room[start : start + self.text_size] for start in range(0, len(room), self.text_size)]

    def _written(self, columns: Sequence[bytes], lines: bytearray | memoryview) -> bool:
        write = _numpy_write() if len(columns) * self._values.size > 8 * _FEW else None
        return write is not None and write(self._blank, self._places, columns, lines)

    def _printed(self, column: bytes) -> bytes:
        if self._template is None:
            places = [0, *(place + _WIDTH for place in array("q", self._places))]
            heads = [self._blank[start : end - _WIDTH] for start, end in pairwise(places)]
            tail = self._blank[places[-1] :]
            self._template = b"".join([head.replace(b"%", b"%%") + NORM_FORMAT.encode() for head in heads]) + tail
        return self._template % self._values.unpack(column)
