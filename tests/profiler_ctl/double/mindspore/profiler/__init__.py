"""mindspore.profiler: `profile` records from its construction on; `step` counts; `stop` writes."""

from __future__ import annotations

import enum
import json
import os
import time
from pathlib import Path
from typing import Any


class ProfilerActivity(enum.Enum):
    """What is recorded."""

    CPU = 0
    NPU = 1


class ProfilerLevel(enum.Enum):
    """How much."""

    LevelNone = "none"
    Level0 = "0"
    Level1 = "1"
    Level2 = "2"


class _ExperimentalConfig:
    def __init__(self, **options: Any) -> None:
        self.options = options


def schedule(**counts: int) -> dict[str, int]:
    """The counts."""
    return counts


def tensorboard_trace_handler(folder: str, *, async_mode: bool) -> str:
    """The folder."""
    return folder


class profile:  # noqa: N801 - MindSpore's name
    """A session."""

    def __init__(self, *, on_trace_ready: str, **options: Any) -> None:
        self._folder = Path(on_trace_ready)
        self._starts: list[float] = [time.time()]
        self._ends: list[float] = []

    def step(self) -> None:
        """A step has ended."""
        self._ends.append(time.time())
        self._starts.append(time.time())

    def stop(self) -> None:
        """Write an event in the middle of each step."""
        results = self._folder / f"host_{os.getpid()}_{time.time_ns()}_ascend_ms" / "ASCEND_PROFILER_OUTPUT"
        results.mkdir(parents=True)
        middles = [(start + end) / 2 for start, end in zip(self._starts, self._ends, strict=False)]
        events = [{"ph": "X", "name": "Step", "ts": str(middle * 1e6), "dur": "1"} for middle in middles]
        (results / "trace_view.json").write_text(json.dumps(events))
