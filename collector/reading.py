"""Reads a run's records from its journal, at full precision.

Blocks come in the order of the merged log; within a block records stand as the rank produced them, where the text has
an order of its own. What waits for a slower rank has no place in that order yet, and is not read; a collector may be at
work meanwhile.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from .entries import Checkpoint
from .protocol.csvtext import CSV_COLUMNS
from .protocol.records import Frame, RankBlock, Record
from .replay import Replay, show_nothing
from .selection import Selection

__all__ = ["Records", "chosen_blocks", "read"]

_logger = logging.getLogger("rankd.collector")


def chosen_blocks(
    output: Path,
    selection: Selection,
    progress: Callable[[int, int], None] = show_nothing,
    told: Callable[[str], None] = _logger.warning,
) -> Iterator[RankBlock]:
    """The blocks with records that are wanted, with those records only.

    Args:
        told: called at the end with what the journal's last segment has that cannot be read, if there is such.

    Raises:
        RankdError: there is no journal, or it is damaged; says where.
    """
    wanted: Iterator[RankBlock] = _blocks(output, selection, progress, told)
    if selection.latest:
        # Twice through the journal: which attempt has the last word on a position is known at its end only.
        spans = _spans(_blocks(output, replace(selection, attempt=None), show_nothing, lambda _: None))
        wanted = (block for block in wanted if not _is_superseded(block, spans))
    for block in wanted:
        if (chosen := _chosen_records(block, selection)) is not None:
            yield chosen


# By rank, then by attempt: the first and the last (step, micro_step) that it has.
_Spans: TypeAlias = dict[int, dict[int, tuple[tuple[int, int], tuple[int, int]]]]


def _spans(blocks: Iterator[RankBlock]) -> _Spans:
    spans: _Spans = {}
    for block in blocks:
        attempt, *place = block.position.key
        at = (place[0], place[1])
        attempts = spans.setdefault(block.rank, {})
        first, last = attempts.get(attempt, (at, at))
        attempts[attempt] = (min(first, at), max(last, at))
    return spans


def _is_superseded(block: RankBlock, spans: _Spans) -> bool:
    """Whether a later attempt of this rank has been through this position again."""
    attempt, *place = block.position.key
    at = (place[0], place[1])
    return any(later > attempt and first <= at <= last for later, (first, last) in spans[block.rank].items())


def _blocks(
    output: Path, selection: Selection, progress: Callable[[int, int], None], told: Callable[[str], None]
) -> Iterator[RankBlock]:
    replay = Replay(output)
    try:
        for located in replay.read(progress):
            if isinstance(located.entry, Checkpoint):
                continue
            for each in replay.run.apply(located.entry, located.reference):
                if isinstance(each, RankBlock) and selection.has_block(each.rank, each.position):
                    yield each
        if (damage := replay.damage()) is not None:
            told(damage)
    finally:
        replay.close()


def _chosen_records(block: RankBlock, selection: Selection) -> RankBlock | None:
    """With the wanted records only; None: there are none."""
    if not selection.by_content:
        return block
    frames = [f for f in block.frames if selection.metrics is None or f.metric in selection.metrics]
    if selection.name is not None:
        frames = [part for frame in frames if (part := _named(frame, selection.name)) is not None]
    if not frames:
        return None
    return RankBlock(block.rank, block.position, tuple(frames), (), block.late, block.total_steps, block.time)


def _named(frame: Frame, text: str) -> Frame | None:
    """The part of a frame whose names contain this text."""
    chosen = [i for i, name in enumerate(frame.names) if text in name]
    if not chosen or frame.table is None:
        return None
    if len(chosen) == len(frame.names):
        return frame
    names = type(frame.table)(tuple(frame.names[i] for i in chosen))
    if frame.counts is not None:
        groups = frame.groups
        return Frame.lists(frame.metric, names, [groups[i] for i in chosen], frame.iteration)
    values = frame.values
    return Frame.named(frame.metric, names, [values[i] for i in chosen])


def missing_from(output: Path) -> str | None:
    """What of the run its journal does not have any more; None: it is whole."""
    replay = Replay(output)
    replay.close()
    if replay.whole:
        return None
    reached = {view.position for view in replay.run.ranks.values() if view.position is not None}
    until = f", so nothing up to about {max(reached)}" if reached else ""
    return f"the segments before {replay.segments[0].name} were deleted (rankd.journal.keep){until} is here"


# In a column of integers: there is none.
_NONE = -1
_OPTIONAL = ("micro_step", "iter")


@dataclass(frozen=True, slots=True)
class _Columns:
    """Records column by column: some 100 bytes each, where a `Record` takes 500."""

    numbers: dict[str, array[Any]]
    objects: dict[str, list[Any]]


def _columns(blocks: Iterable[RankBlock]) -> _Columns:
    integers = {name: array("q") for name in ("attempt", "step", "micro_step", "rank", "iter")}
    floats = {name: array("d") for name in ("value", "time")}
    objects: dict[str, list[Any]] = {"metric": [], "name": [], "values": []}
    for block in blocks:
        at = block.position
        for frame in block.frames:
            count = frame.record_count
            for column, integer in (
                ("attempt", at.attempt), ("step", at.step), ("micro_step", at.micro_step), ("rank", block.rank),
                ("iter", frame.iteration),
            ):  # fmt: skip
                integers[column].extend([_NONE if integer is None else integer] * count)
            floats["time"].extend([block.time] * count)
            objects["metric"] += [frame.metric] * count
            objects["name"] += frame.names or [None]
            single = frame.counts is None
            floats["value"].extend(frame.values if single else [math.nan] * count)
            objects["values"] += [None] * count if single else frame.groups
    return _Columns({**integers, **floats}, objects)


class Records:
    """The records of a run that were asked for: iterate over them, or take them as a table.

    Where the journal's last segment is damaged, both give what comes before and log a warning.

    Attributes:
        missing: what the journal does not have any more, for a person; None: all is there.
    """

    def __init__(self, output: Path, selection: Selection) -> None:
        self._output = output
        self._selection = selection
        self.missing = missing_from(output)

    def __iter__(self) -> Iterator[Record]:
        for block in chosen_blocks(self._output, self._selection):
            for frame in block.frames:
                yield from frame.records(block.position, block.rank, block.time)

    def to_pandas(self) -> Any:
        """A DataFrame with a row a record: attempt, step, micro_step, rank, metric, name, value, values, time, iter.

        `value` is NaN where a record is a list, which then stands in `values`. It takes some 150 bytes a record.

        Raises:
            ImportError: pandas is not installed.
        """
        import numpy as np
        import pandas as pd

        columns = _columns(chosen_blocks(self._output, self._selection))
        data: dict[str, Any] = {name: np.asarray(numbers) for name, numbers in columns.numbers.items()}
        for name in _OPTIONAL:
            data[name] = pd.arrays.IntegerArray(data[name], data[name] == _NONE)
        data |= {name: pd.Series(column, dtype=object) for name, column in columns.objects.items()}
        return pd.DataFrame(data, columns=list(CSV_COLUMNS))


def read(
    output: str | Path,
    *,
    ranks: frozenset[int] | set[int] | None = None,
    metrics: frozenset[str] | set[str] | None = None,
    name: str | None = None,
    steps: tuple[int, int] | None = None,
    attempt: int | None = None,
    latest: bool = False,
) -> Records:
    """The records of the run in `output`, at full precision.

    Args:
        output: the run's output directory.
        ranks, metrics: these only.
        name: text that the parameter's or layer's name contains.
        steps: first and last step, both included.
        attempt: this one only.
        latest: of each position only what the newest attempt has that came through it.

    Raises:
        RankdError: there is no journal there.
    """
    records = Records(
        Path(output),
        Selection(
            None if ranks is None else frozenset(ranks),
            None if metrics is None else frozenset(metrics),
            name,
            steps,
            attempt,
            latest,
        ),
    )
    if records.missing is not None:
        _logger.warning("%s: %s", output, records.missing)
    return records
