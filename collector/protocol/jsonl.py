"""Records as JSON Lines (SPEC.md section 3), at full precision: one strict JSON object a record.

NaN and the infinities, which JSON does not have, are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any

from .records import Comment, ExpertLayer, Frame, Position, RankBlock, Record

__all__ = ["block_lines", "comment_object", "number", "record_object"]


def number(value: float) -> float | str:
    """The value as strict JSON can hold it."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def record_object(record: Record) -> dict[str, Any]:
    """The object of one record; keys that it does not have are left out."""
    position = record.position
    out: dict[str, Any] = {"attempt": position.attempt, "step": position.step}
    if position.micro_step is not None:
        out["micro_step"] = position.micro_step
    out |= {"rank": record.rank, "metric": record.metric}
    if record.name is not None:
        out["name"] = record.name
    if record.metric == "tpe" and record.name is not None:
        out |= _expert(record.name, record.iteration)
    out["value"] = _value(record)
    if record.time is not None:
        out["time"] = record.time
    return out


def comment_object(comment: Comment) -> dict[str, Any]:
    """A line of rankd's own: its kind and text; rank left out where it is about the whole run."""
    where = {} if comment.rank is None else {"rank": comment.rank}
    return {**where, "comment": comment.kind, "text": comment.text}


def _value(record: Record) -> Any:
    if not isinstance(record.value, tuple):
        return number(record.value)
    if record.metric == "tpe":
        return [int(value) for value in record.value]
    return [number(value) for value in record.value]


def _expert(name: str, iteration: int | None) -> dict[str, Any]:
    layer = ExpertLayer.from_name(name)
    out: dict[str, Any] = {"block": layer.block, "layer": layer.layer}
    if layer.mtp_idx is not None:
        out["mtp_idx"] = layer.mtp_idx
    if iteration is not None:
        out["iter"] = iteration
    return out


# A name stands in every block again, and quoting it is most of a line's work.
@functools.lru_cache(maxsize=65_536)
def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def block_lines(block: RankBlock) -> bytes:
    """The lines of all records of a block."""
    return b"".join(_frame_lines(frame, block.position, block.rank, block.time) for frame in block.frames)


def _frame_lines(frame: Frame, position: Position, rank: int, time: float) -> bytes:
    if frame.counts is not None:
        records = frame.records(position, rank, time)
        return b"".join(json.dumps(record_object(r), ensure_ascii=False).encode() + b"\n" for r in records)
    micro = "" if position.micro_step is None else f'"micro_step": {position.micro_step}, '
    head = f'{{"attempt": {position.attempt}, "step": {position.step}, {micro}"rank": {rank}, '
    head += f'"metric": {_quoted(frame.metric)}, '
    tail = f', "time": {time!r}}}\n'
    if frame.table is None:
        return f'{head}"value": {_text(frame.values[0])}{tail}'.encode()
    head += '"name": '
    values = zip(frame.names, frame.values, strict=True)
    return "".join([f'{head}{_quoted(name)}, "value": {_text(value)}{tail}' for name, value in values]).encode()


def _text(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'"{number(value)}"'
