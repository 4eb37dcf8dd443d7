"""Pure: what `rankd.logs` and `rankd.journal` leave of a run's files on the disk, as far as the estimate goes.

A closed part of a log is compressed or deleted only when a checkpoint of the journal is behind it
(`collector/sinks/keeper.py`), and one comes with each new segment of the journal. So what is written between two
checkpoints is there whatever `rankd.logs` asks for. All figures are of text that is not compressed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..collector.config import LogsConfig, RankdConfig
from ..collector.protocol.wording import counted
from .estimate import Amount, Estimate, Shape, human_bytes, human_size, human_time

__all__ = ["Retained", "retained", "retention_warnings"]


@dataclass(frozen=True, slots=True)
class Retained:
    """What stays of a run's text logs and journal.

    Attributes:
        logs: what the configuration says of the text logs.
        segment: bytes of the journal between two checkpoints.
        merged, text: bytes of merged.log, and of all text logs, that are written between two checkpoints.
        seconds: how long that takes; None: not known.
        whole: nothing was left out of the estimate; otherwise `merged` and `text` are the least that it may be.
        part: bytes of a closed part of merged.log; None: not known.
        text_at_most: bytes of all text logs; None: they are not limited, or it is not known.
        journal_at_most: bytes of the journal; None: it is not limited.
    """

    logs: LogsConfig
    segment: int
    merged: float
    text: float
    seconds: float | None
    whole: bool
    part: float | None
    text_at_most: float | None
    journal_at_most: float | None


@dataclass(frozen=True, slots=True)
class _Log:
    """One log: bytes of a closed part, and what is written of it between two checkpoints and in a second."""

    part: float
    between: float
    rate: float


def retained(config: RankdConfig, shape: Shape, amount: Estimate) -> Retained:
    """What stays of a training of this shape that records `amount`."""
    logs, segment, keep = config.logs, config.journal.segment_size, config.journal.keep
    merged, own = _for_each_journal_byte(amount)
    journal = amount.step.journal if amount.complete else 0.0
    per_second = journal / shape.step_seconds
    of_merged = _log(logs, segment * merged, per_second * merged)
    of_rank = _log(logs, segment * own / shape.world_size, per_second * own / shape.world_size)
    return Retained(
        logs,
        segment,
        segment * merged,
        segment * (merged + own),
        segment / per_second if per_second else None,
        amount.complete,
        None if of_merged is None else of_merged.part,
        None if of_merged is None or of_rank is None else _at_most(logs, [of_merged, *[of_rank] * shape.world_size]),
        None if keep is None else float(keep + segment),
    )


def _for_each_journal_byte(amount: Estimate) -> tuple[float, float]:
    """Bytes of merged.log, and of the ranks' logs together. Of what nobody has said the number of, one is counted: of
    more of them, each takes less of the journal.
    """
    rank = Amount()
    for row in amount.rows:
        rank += row.amount
    text, journal = rank.text, rank.journal
    return ((text + amount.prefix * rank.lines) / journal, text / journal) if journal else (0.0, 0.0)


def _log(logs: LogsConfig, between: float, rate: float) -> _Log | None:
    """None: it is not known how large its parts are. `rate` 0: not known."""
    by_time = None if logs.rotate_every is None or not rate else logs.rotate_every * rate
    sizes = [float(size) for size in (logs.rotate_size, by_time) if size is not None]
    return _Log(min(sizes), between, rate) if sizes else None


def _at_most(logs: LogsConfig, every: list[_Log]) -> float | None:
    """Bytes of all logs together: the narrowest bound that one of the keys sets."""
    between, rate = sum(log.between for log in every), sum(log.rate for log in every)
    if not rate:
        return None
    # Of each log the file that grows, and its newest closed part.
    ends = sum(2 * log.part for log in every)
    bounds = []
    if logs.keep_parts is not None:
        closed = (max(logs.keep_parts * log.part, log.between + log.part) for log in every)
        bounds.append(sum(closed) + ends / 2)
    if logs.keep_size is not None:
        bounds.append(max(logs.keep_size, between) + ends)
    if logs.keep_for is not None:
        bounds.append(max(logs.keep_for * rate, between) + ends)
    return min(bounds, default=None)


def retention_warnings(found: Retained, shape: Shape, amount: Estimate) -> Iterator[str]:
    """What `rankd.logs` asks for and cannot have, because of what lies between two checkpoints."""
    logs = found.logs
    # A training that is too short for the limit never comes to it.
    steps = math.inf if shape.steps is None or not found.whole else shape.steps
    merged, text = min(found.merged, amount.merged * steps), min(found.text, (amount.merged + amount.step.text) * steps)
    seconds = None if found.seconds is None else min(found.seconds, shape.step_seconds * steps)
    about = "about" if found.whole else "at least"
    if logs.keep_parts is not None and found.part is not None and merged > logs.keep_parts * found.part:
        asked = f"{counted(logs.keep_parts, 'part')} of {human_size(found.part)}"
        yield _cannot("keep_parts", asked, f"{about} {human_bytes(merged)} of merged.log", found)
    if logs.keep_size is not None and text > logs.keep_size:
        yield _cannot("keep_size", human_size(logs.keep_size), f"{about} {human_bytes(text)} of text", found)
    if logs.keep_for is not None and seconds is not None and seconds > logs.keep_for:
        yield _cannot("keep_for", human_time(logs.keep_for), f"the text of about {human_time(seconds)}", found)


def _cannot(key: str, asked: str, between: str, found: Retained) -> str:
    return (
        f"rankd.logs.{key}: {asked} cannot be kept to, because a part is deleted (and compressed) only behind a "
        f"checkpoint of the journal, and {between} comes before one; keep more, or make rankd.journal.segment_size "
        f"({human_size(found.segment)}) smaller"
    )
