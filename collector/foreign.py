"""Pure: the training logs that MindFormers itself writes, as records, so that runs without rankd can be compared.

Both of its line prefixes are known: that of standard output (`DATE TIME,ms - mindformers…[FILE:LINE] - INFO - `) and
that of its files (`[INFO] DATE TIME,ms [FILE:LINE] FUNCTION: `), and both forms of its step line: that of 2.1's trainer
(`{ step:[    4/  100], …, loss:   4.864965, per_step_time:    843ms, … }`) and that of 2.0's callback, which goes on in
the next line (`{ Epoch:[  1/  2], step:[    4/  100], loss: 4.864965, per_step_time: 843ms, …`). Losses are JSON, norms
are as in the spec format. No line carries a rank: that is the file's (`rank_of_path`).

Two things differ from rankd's own records. MindFormers' local_norm is the norm of the micro-batch's own gradient
(`local_norm_kind: micro_batch`), and it drops a line that repeats more than ten times in a row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path

from .protocol.errors import RecordError
from .protocol.records import Level, Position, Record, Shape, metric_of

__all__ = ["MindFormersLog", "is_prefixed", "rank_of_path"]

_STDOUT = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[,.](\d{3}) - mindformers\S* - [A-Z]+ - ")
_FILE = re.compile(r"\[[A-Z]+\] (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[,.](\d{3}) \[[^\]]*\] [^:\s]+: ")
_RANK = re.compile(r"(?:rank|worker)_?(\d{1,6})(?=\D|$)")

_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"
_HEADER = re.compile(r'\{ "step": (\d+)(?:, "micro_step": (\d+))? \}')
_NORM = re.compile(rf'\{{ "(local_norm|device_norm)": (\S+): +({_NUMBER}) \}}', re.IGNORECASE)
_STEP_LINE = re.compile(r"\{ (?:Epoch:\[ *(\d+)/ *\d+\], )?step:\[ *(\d+)/ *(\d+)\], (.*?)(?: \})?")
_FIELD = re.compile(rf"([A-Za-z_]\w*):[ \[]*({_NUMBER})", re.IGNORECASE)
_LOGIT = re.compile(r"step:\[ *(\d+)/ *\d+\] max_attention_logit/(\S+): \[([-+.\deEnaif, ]*)\]")

# How the fields of the step line are called here; others keep their names.
_NAMES = {"per_step_time": "step_time_ms", "global_norm": "grad_norm"}


def rank_of_path(path: Path) -> int | None:
    """The rank whose log this is, by its name or its folder's: rank_3/info.log, worker_3.log."""
    for part in reversed(path.parts[-3:]):
        match = _RANK.search(part)
        if match is not None:
            return int(match[1])
    return None


def is_prefixed(line: str) -> bool:
    """Whether a line begins as MindFormers' logger writes it."""
    return _STDOUT.match(line) is not None or _FILE.match(line) is not None


class MindFormersLog:
    """Reads the lines of one rank's log, in order. What is no metric is passed over: such a log holds much else.

    A step that goes back begins another attempt.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._attempt = 1
        self._step = 0
        self._reported = 0  # the last step whose summary was read
        self._micro_step: int | None = None
        self._time: float | None = None

    def read(self, lines: Iterable[str]) -> Iterator[Record]:
        """The records of these lines."""
        for line in lines:
            text = self._without_prefix(line.rstrip("\r\n"))
            for start, reader in _READERS:
                if text.startswith(start):
                    yield from reader(self, text)
                    break

    def _without_prefix(self, line: str) -> str:
        match = _STDOUT.match(line) or _FILE.match(line)
        if match is None:
            return line
        when = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").astimezone()
        self._time = when.timestamp() + int(match[2]) / 1_000
        return line[match.end() :]

    def _at(self, step: int, micro_step: int | None) -> Position:
        self._step, self._micro_step = step, micro_step
        return Position(self._attempt, step, micro_step)

    def _record(self, metric: str, name: str | None, value: float | tuple[float, ...], at: Position) -> Record:
        return Record(at, self._rank, metric, name, value, self._time)

    def _summary(self, text: str) -> Iterator[Record]:
        match = _STEP_LINE.fullmatch(text)
        if match is None:
            return
        epoch, step, steps = int(match[1] or 1), int(match[2]), int(match[3])
        if epoch < 1 or step < 1:
            return
        step += (epoch - 1) * steps  # 2.0 counts them within the epoch
        # The summary is the first line of a step: it tells that training has gone back.
        if step <= self._reported:
            self._attempt += 1
        self._reported = step
        at = self._at(step, None)
        for label, value in _FIELD.findall(match[4]):
            name = _NAMES.get(label, label)
            if _is_scalar(name, Level.STEP):
                yield self._record(name, None, float(value), at)

    def _header(self, text: str) -> Iterator[Record]:
        match = _HEADER.fullmatch(text)
        if match is not None:
            self._at(int(match[1]), None if match[2] is None else int(match[2]))
            return
        yield from self._object(text)

    def _object(self, text: str) -> Iterator[Record]:
        """A loss as JSON: its step and micro-step stand in it, or in the header before it."""
        try:
            found = json.loads(text)
        except ValueError:
            return
        step, micro_step = found.pop("step", self._step), found.pop("micro_step", self._micro_step)
        if not isinstance(step, int) or step < 1:
            return
        for metric, value in found.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                # device_loss stands under a micro_step that has nothing to do with it.
                micro = None if metric == "device_loss" else micro_step
                level = Level.STEP if micro is None else Level.MICRO_STEP
                if _is_scalar(metric, level):
                    yield self._record(metric, None, float(value), self._at(step, micro))

    def _norm(self, text: str) -> Iterator[Record]:
        match = _NORM.fullmatch(text)
        if match is None or self._step < 1:
            return
        micro_step = self._micro_step if match[1] == "local_norm" else None
        yield self._record(match[1], match[2], float(match[3]), Position(self._attempt, self._step, micro_step))

    def _logit(self, text: str) -> Iterator[Record]:
        match = _LOGIT.fullmatch(text)
        if match is None or int(match[1]) < 1:
            return
        values = tuple(float(value) for value in match[3].replace(",", " ").split())
        step = int(match[1])
        yield self._record("max_attention_logit", match[2], values, Position(self._attempt, step, None))


def _is_scalar(metric: str, level: Level) -> bool:
    try:
        return metric_of(metric, level).shape is Shape.SCALAR
    except RecordError:
        return False


_READERS: tuple[tuple[str, Callable[[MindFormersLog, str], Iterator[Record]]], ...] = (
    ('{ "local_norm"', MindFormersLog._norm),
    ('{ "device_norm"', MindFormersLog._norm),
    ('{ "step"', MindFormersLog._header),
    ('{"', MindFormersLog._object),
    ('{ "', MindFormersLog._object),
    ("{ step:[", MindFormersLog._summary),
    ("{ Epoch:[", MindFormersLog._summary),
    ("step:[", MindFormersLog._logit),
)
