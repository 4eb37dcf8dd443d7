"""Figures of the host and of this process, which ride on the beats."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

import psutil

__all__ = ["HostFigures"]

# Reading them is half a millisecond, which is most of what an agent costs that has nothing to do. In seconds.
_EVERY = 10.0


class HostFigures:
    """Samples the host, every few seconds; percentages are over the time since the last sample, the first ones are 0.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._process = psutil.Process()
        self._clock = clock
        self._figures: dict[str, float] = {}
        self._samples = 0
        self._due_at = 0.0

    def latest(self) -> dict[str, float]:
        """The last sample, or a new one where that is older than some seconds; see `sample`."""
        now = self._clock()
        # The first one has no percentages, so the second follows at the next call.
        if self._samples < 2 or now >= self._due_at:
            self._figures, self._samples, self._due_at = self.sample(), self._samples + 1, now + _EVERY
        return self._figures

    def sample(self) -> dict[str, float]:
        """Figures by name; one that cannot be read here is left out, never an error.

        `process_cpu_percent` (100 is one core), `process_rss_bytes`, `process_threads`, `host_cpu_percent`,
        `host_memory_percent`, `host_memory_available_bytes`, `host_load_1`.
        """
        figures: dict[str, float] = {}
        with contextlib.suppress(psutil.Error, OSError), self._process.oneshot():
            figures["process_cpu_percent"] = self._process.cpu_percent()
            figures["process_rss_bytes"] = float(self._process.memory_info().rss)
            figures["process_threads"] = float(self._process.num_threads())
        with contextlib.suppress(psutil.Error, OSError):
            figures["host_cpu_percent"] = psutil.cpu_percent()
        with contextlib.suppress(psutil.Error, OSError):
            memory = psutil.virtual_memory()
            figures["host_memory_percent"] = memory.percent
            figures["host_memory_available_bytes"] = float(memory.available)
        with contextlib.suppress(OSError):
            figures["host_load_1"] = os.getloadavg()[0]
        return figures
