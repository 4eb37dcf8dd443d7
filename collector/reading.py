"""Reads a run's records from its journal, at full precision, in the order of the merged log.

What waits for a slower rank has no place in that order yet, and is not read; a collector may be at work meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from .entries import Checkpoint
from .protocol.records import RankBlock, Record
from .replay import Replay, show_nothing
from .selection import Selection

__all__ = ["Records", "chosen_blocks", "read"]

_logger = logging.getLogger("rankd.collector")

COLUMNS = ("attempt", "step", "micro_step", "rank", "metric", "name", "value", "time", "iter")


def chosen_blocks(
    output: Path, selection: Selection, progress: Callable[[int, int], None] = show_nothing
) -> Iterator[RankBlock]:
    """The blocks with records that are wanted, with those frames only; names are left to the caller.

    Raises:
        RankdError: there is no journal, or it is damaged; says where.
    """
    wanted = _blocks(output, selection, progress)
    if not selection.latest:
        yield from wanted
        return
    # Twice through the journal: which attempt has the last word on a position is known at its end only.
    spans = _spans(_blocks(output, replace(selection, attempt=None), show_nothing))
    yield from (block for block in wanted if not _is_superseded(block, spans))


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


def _blocks(output: Path, selection: Selection, progress: Callable[[int, int], None]) -> Iterator[RankBlock]:
    replay = Replay(output)
    try:
        for located in replay.read(progress):
            if isinstance(located.entry, Checkpoint):
                continue
            for each in replay.run.apply(located.entry, located.reference):
                if isinstance(each, RankBlock) and selection.has_block(each.rank, each.position):
                    yield each
    finally:
        replay.close()


def missing_from(output: Path) -> str | None:
    """What of the run its journal does not have any more; None: it is whole."""
    replay = Replay(output)
    replay.close()
    if replay.whole:
        return None
    reached = {view.position for view in replay.run.ranks.values() if view.position is not None}
    until = f", so nothing up to about {max(reached)}" if reached else ""
    return f"the segments before {replay.segments[0].name} were deleted (rankd.journal.keep){until} is here"


class Records:
    """The records of a run that were asked for: iterate over them, or take them as a table.

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
                if self._selection.metrics is None or frame.metric in self._selection.metrics:
                    yield from filter(self._selection.has, frame.records(block.position, block.rank, block.time))

    def to_pandas(self) -> Any:
        """A DataFrame with a row a record: attempt, step, micro_step, rank, metric, name, value, time, iter.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas as pd

        rows = [
            (r.position.attempt, r.position.step, r.position.micro_step, r.rank, r.metric, r.name, r.value, r.time,
             r.iteration)
            for r in self
        ]  # fmt: skip
        frame = pd.DataFrame(rows, columns=list(COLUMNS))
        return frame.astype({"micro_step": "Int64", "iter": "Int64"})


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
