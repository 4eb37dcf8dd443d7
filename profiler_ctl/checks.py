"""Whether what a profiler wrote can be used: it is there, parses as what it claims, and covers the steps.

MindSpore's profiler swallows its own errors: what it wrote is the only proof that it worked. This runs in the training
process, at a step's boundary, so what is read is bounded.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..collector.protocol.errors import ProfilerError

__all__ = ["Checked", "StepTime", "check_output", "directories", "new_directory"]

# Parsing JSON holds the GIL, some 10 ms a MiB, in the training process. Of more than that only the ends are looked at.
_PARSED_BYTES = 4 * 2**20
_END_BYTES = 2**16
_SQLITE = b"SQLite format 3\0"


@dataclass(frozen=True, slots=True)
class StepTime:
    """When a step was trained: the rank's clock, seconds since the epoch."""

    step: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found.

    Attributes:
        path: the directory.
        bytes: of all files.
        written: when the last file was written, seconds since the epoch.
        covered: whether each step has events between its begin and end in the trace; None: this could not be seen (the
            trace is too large to be parsed here, or has a clock of its own).
    """

    path: Path
    bytes: int
    written: float
    covered: bool | None


def directories(rank_dir: Path) -> frozenset[Path]:
    """What lies in a rank's directory now; a session's own output is what is new afterwards."""
    return frozenset(path for path in rank_dir.iterdir() if path.is_dir())


def new_directory(rank_dir: Path, before: frozenset[Path]) -> Path:
    """The directory that was written since.

    Raises:
        ProfilerError: there is none.
    """
    new = directories(rank_dir) - before
    if not new:
        raise ProfilerError(f"the profiler wrote nothing to {rank_dir}; its own log lines above may say why")
    # MindSpore names it HOST_PID_TIME_ascend_ms: the last one is this session's.
    return max(new, key=lambda path: path.name)


def check_output(output: Path, steps: Sequence[StepTime]) -> Checked:
    """Look at what a profiler has written.

    Raises:
        ProfilerError: it is empty, its trace_view.json is missing, a file cannot be read or is cut off, or nothing in
            the trace began since a step did.
    """
    found = {path: path.stat() for path in sorted(output.rglob("*")) if path.is_file()}
    size = sum(stat.st_size for stat in found.values())
    if not size:
        raise ProfilerError(f"{output} holds no data")
    if not any(path.name == "trace_view.json" for path in found):
        raise ProfilerError(f"{output} holds no trace_view.json (on a CPU, profile_cpu must be on for that)")
    covered: bool | None = None
    budget = _PARSED_BYTES
    for path, stat in found.items():
        if path.suffix == ".json":
            parsed = _json(path, stat.st_size, budget)
            budget -= stat.st_size if parsed is not None else 0
            if path.name == "trace_view.json" and parsed is not None:
                covered = _coverage(path, parsed, steps)
        elif path.suffix == ".csv" and stat.st_size:
            _check_csv(path, stat.st_size)
        elif path.suffix == ".db" and not _begins_with(path, _SQLITE):
            raise ProfilerError(f"{path} is no SQLite database")
    written = max((stat.st_mtime for stat in found.values()), default=time.time())
    return Checked(output, size, written, covered)


def _json(path: Path, size: int, budget: int) -> Any:
    """What a JSON file holds; None: it is too large for `budget`, and its ends fit each other."""
    with path.open("rb") as file:
        if size > budget:
            first = file.read(16).lstrip()[:1]
            file.seek(-16, 2)
            if first + file.read().rstrip()[-1:] not in (b"[]", b"{}"):
                raise ProfilerError(f"{path} ({size} bytes) is cut off")
            return None
        try:
            parsed = json.loads(file.read())
        except ValueError as error:
            raise ProfilerError(f"{path} is not JSON: {error}") from None
    if path.name == "trace_view.json" and not parsed:
        raise ProfilerError(f"{path} holds no events")
    return parsed


def _check_csv(path: Path, size: int) -> None:
    """The last line has as many columns as the first, and is whole."""
    with path.open("rb") as file:
        head = file.read(_END_BYTES)
        file.seek(max(0, size - _END_BYTES))
        tail = file.read()
    lines = [head.partition(b"\n")[0], tail.rstrip(b"\r\n").rpartition(b"\n")[2]]
    try:
        widths = [len(row) for row in csv.reader(line.decode() for line in lines)]
    except (ValueError, csv.Error) as error:
        raise ProfilerError(f"{path} is not CSV: {error}") from None
    if not tail.endswith(b"\n") and widths[0] != widths[-1]:
        raise ProfilerError(f"{path} ({size} bytes) is cut off")


def _coverage(path: Path, trace: Any, steps: Sequence[StepTime]) -> bool | None:
    starts = event_starts(trace)
    if not steps or not any(steps[0].begin <= start <= steps[-1].end for start in starts):
        # Another clock: nothing can be said.
        return None
    for each in steps:
        # Operators run behind their launch: of a step that nothing waits for, all may begin after its end.
        if not any(each.begin <= start for start in starts):
            raise ProfilerError(f"{path} holds no event of step {each.step}")
    return all(any(each.begin <= start <= each.end for start in starts) for each in steps)


def event_starts(trace: Any) -> list[float]:
    """When the events of a Chrome trace began, in seconds; MindSpore's are of the epoch, as text or numbers."""
    events = trace.get("traceEvents", ()) if isinstance(trace, Mapping) else trace
    found = []
    for event in events if isinstance(events, list) else ():
        if isinstance(event, Mapping) and event.get("ph") == "X":
            try:
                found.append(float(event["ts"]) / 1e6)
            except (KeyError, TypeError, ValueError):
                continue
    return found


def _begins_with(path: Path, start: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(start)) == start
