"""Records as CSV (RFC 4180, UTF-8, with a newline alone): one row a record, at full precision.

A list of values stands as a JSON list in a column of its own, `values`, so that `value` holds numbers only. NaN and the
infinities are `nan`, `inf` and `-inf`, which readers of CSV take for numbers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator

from .records import Frame, Position, RankBlock

__all__ = ["CSV_COLUMNS", "CSV_HEAD", "block_rows"]

CSV_COLUMNS = ("attempt", "step", "micro_step", "rank", "metric", "name", "value", "values", "time", "iter")
CSV_HEAD = (",".join(CSV_COLUMNS) + "\n").encode()


@functools.lru_cache(maxsize=65_536)
def _cell(text: str) -> str:
    if any(c in text for c in ',"\n\r'):
        return '"' + text.replace('"', '""') + '"'
    return text


def block_rows(block: RankBlock) -> bytes:
    """The rows of all records of a block."""
    rows = [row for frame in block.frames for row in _rows(frame, block.position, block.rank, block.time)]
    return "".join(rows).encode()


def _rows(frame: Frame, position: Position, rank: int, time: float) -> Iterator[str]:
    micro = "" if position.micro_step is None else position.micro_step
    head = f"{position.attempt},{position.step},{micro},{rank},{_cell(frame.metric)},"
    tail = f"{time!r},{'' if frame.iteration is None else frame.iteration}\n"
    if frame.table is None:
        yield f"{head},{frame.values[0]!r},,{tail}"
    elif frame.counts is None:
        for name, value in zip(frame.names, frame.values, strict=True):
            yield f"{head}{_cell(name)},{value!r},,{tail}"
    else:
        whole = frame.metric == "tpe"
        for name, values in zip(frame.names, frame.groups, strict=True):
            cell = json.dumps([int(v) if whole else v for v in values])
            yield f"{head}{_cell(name)},,{_cell(cell)},{tail}"
