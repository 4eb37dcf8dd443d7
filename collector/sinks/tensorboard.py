"""Records for TensorBoard: OUTPUT/tensorboard/attempt_N, opened with `tensorboard --logdir OUTPUT/tensorboard`.

One point a step. Tags:

- `METRIC/rank_N`: a scalar of one rank, averaged over the micro-steps; of max_attention_logit the maximum.
- `METRIC/mean`, `/min`, `/max`: over the ranks, where there is more than one.
- `METRIC/decoder.layers.3`: norms (and tokens per expert) of a layer's parameters on all ranks, as a histogram.
"""

from __future__ import annotations

import functools
import math
import re
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..protocol.records import Comment, Frame, NameTable, RankBlock
from .sink import Off

__all__ = ["TensorBoardSink", "layer_group"]

_LAYER = re.compile(r"(.*?\blayers\.\d+)\.")


def layer_group(name: str) -> str:
    """The layer that a parameter belongs to: up to `layers.N`, or else its first component."""
    match = _LAYER.match(name)
    return match[1] if match else name.split(".", 1)[0]


@functools.lru_cache(maxsize=1_024)
def _groups(names: NameTable | tuple[str, ...], whole: bool) -> Mapping[str, list[int]]:
    """The indices of the names of each group; `whole`: each name is a group of its own."""
    out: dict[str, list[int]] = {}
    for index, name in enumerate(names.names if isinstance(names, NameTable) else names):
        out.setdefault(name if whole else layer_group(name), []).append(index)
    return out


class TensorBoardSink(Off):
    """Writes event files with tensorboardX (the extra `tensorboard`); a `Sink` that cannot resume exactly.

    After a restart a new event file begins, which tells TensorBoard to drop the points from its first step on
    (`purge_step`), so that none is shown twice. The step that was being written when the collector ended may lack the
    values of some ranks, in its mean too. Late blocks give points of their rank, but no new mean.

    Raises:
        ImportError: tensorboardX is not installed.
    """

    def __init__(self, output: Path) -> None:
        from tensorboardX import SummaryWriter

        self._make_writer = SummaryWriter
        self._folder = output / "tensorboard"
        self._writer: Any = None
        self._attempt = 0
        self._resumed = False
        self._step: tuple[int, int] | None = None
        self._time = 0.0
        self._scalars: dict[str, dict[int, array[float]]] = {}
        self._histograms: dict[tuple[str, str], array[float]] = {}

    def write(self, released: Sequence[RankBlock | Comment]) -> None:
        """Take these; a step is written when the next one begins, or the run ends."""
        for each in released:
            if isinstance(each, Comment):
                if each.kind == "end":
                    self._finish()
            elif each.late:
                self._late(each)
            else:
                self._take(each)

    def resume(self, sizes: Mapping[str, int]) -> None:
        self._resumed = bool(sizes) or any(self._folder.glob("attempt_*"))

    def close(self) -> None:
        self._finish()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _take(self, block: RankBlock) -> None:
        step = (block.position.attempt, block.position.step)
        if step != self._step:
            self._finish()
            self._step = step
        self._time = max(self._time, block.time)
        for frame in block.frames:
            self._collect(frame, block.rank)

    def _collect(self, frame: Frame, rank: int) -> None:
        values = frame.values
        if frame.metric == "max_attention_logit":
            self._scalar(frame.metric, rank, [max(values)] if values else [])
        elif frame.table is None:
            self._scalar(frame.metric, rank, values)
        elif frame.counts is not None:
            for name, group in zip(frame.names, frame.groups, strict=True):
                self._histogram(frame.metric, name, group)
        else:
            names = frame.table if frame.present is None else frame.names
            for name, indices in _groups(names, whole=False).items():
                self._histogram(frame.metric, name, [values[i] for i in indices])

    def _scalar(self, metric: str, rank: int, values: Sequence[float]) -> None:
        self._scalars.setdefault(metric, {}).setdefault(rank, array("d")).extend(values)

    def _histogram(self, metric: str, group: str, values: Sequence[float]) -> None:
        # A histogram has no place for NaN; that there was one shows in the text logs and the other sinks.
        finite = [value for value in values if math.isfinite(value)]
        self._histograms.setdefault((metric, group), array("d")).extend(finite)

    def _finish(self) -> None:
        if self._step is None:
            return
        (attempt, step), self._step = self._step, None
        scalars, self._scalars = self._scalars, {}
        histograms, self._histograms = self._histograms, {}
        writer = self._writer_of(attempt, step)
        for metric, by_rank in scalars.items():
            means = {rank: sum(values) / len(values) for rank, values in by_rank.items() if values}
            for rank, value in means.items():
                writer.add_scalar(f"{metric}/rank_{rank}", value, step, self._time)
            if len(means) > 1:
                every = list(means.values())
                for tag, value in (("mean", sum(every) / len(every)), ("min", min(every)), ("max", max(every))):
                    writer.add_scalar(f"{metric}/{tag}", value, step, self._time)
        for (metric, group), values in histograms.items():
            if values:
                writer.add_histogram(f"{metric}/{group}", values.tolist(), step, walltime=self._time)

    def _late(self, block: RankBlock) -> None:
        for frame in block.frames:
            if frame.table is None and block.position.attempt == self._attempt and self._writer is not None:
                tag = f"{frame.metric}/rank_{block.rank}"
                self._writer.add_scalar(tag, frame.values[0], block.position.step, block.time)

    def _writer_of(self, attempt: int, step: int) -> Any:
        """An attempt goes back to earlier steps, so each has a folder of its own."""
        if self._writer is None or attempt != self._attempt:
            if self._writer is not None:
                self._writer.close()
            folder = self._folder / f"attempt_{attempt}"
            purge = step if self._resumed and folder.exists() else None
            # Files are named by the second; without a number, a quick restart would write over the last one.
            number = len(list(folder.glob("events.*")))
            self._writer = self._make_writer(str(folder), purge_step=purge, filename_suffix=f".{number:04}")
            self._attempt = attempt
        return self._writer
