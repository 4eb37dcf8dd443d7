"""Keeps OUTPUT/.rankd/status.json up to date: the shell around `status`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from typing import Any

import psutil

from .place import Place
from .run import Run
from .status import Beats, Latest, status_of

__all__ = ["StatusFile"]

# How often, at least; and of the time that making it takes, so many times more passes until the next: with many ranks
# it stays below some percent of the collector's work.
_EVERY = 1.0
_SHARE = 30


class StatusFile:
    """Writes the status now and then; where it cannot be written, the former one stays, and nothing else happens.

    Attributes:
        latest: the sink that must see what is released.
        beats: where beats are told.
    """

    def __init__(self, place: Place, beat_interval: float) -> None:
        self.latest = Latest()
        self.beats = Beats()
        self._place = place
        self._process = psutil.Process()
        self._due = 0.0
        self._about: dict[str, Any] = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "beat_interval": beat_interval,
            "started": time.time(),
        }
        self._written = 0
        self._looked = time.monotonic()

    def update(self, run: Run, refusals: Mapping[str, int], now: float, *, last: bool = False) -> None:
        """Write it if it is time for that, or the `last` time."""
        if now < self._due and not last:
            return
        began = time.perf_counter()
        about = {**self._about, **self._figures(run, now), "refused": dict(refusals), "alive": not last}
        status = status_of(run, self.latest, self.beats, now=now, clock=time.time(), collector=about)
        with contextlib.suppress(OSError):
            self._place.tell(json.dumps(status, allow_nan=False) + "\n")
        self._due = now + max(_EVERY, _SHARE * (time.perf_counter() - began))

    def _figures(self, run: Run, now: float) -> dict[str, Any]:
        written = sum(a.written for process in run.accounts.processes for a in process.attempts.values())
        received = sum(a.received for process in run.accounts.processes for a in process.attempts.values())
        rate = (written - self._written) / max(now - self._looked, 1e-3)
        self._written, self._looked = written, now
        figures: dict[str, Any] = {"records_per_second": round(max(0.0, rate), 1), "backlog": received - written}
        with contextlib.suppress(psutil.Error, OSError):
            figures["rss_bytes"] = self._process.memory_info().rss
        with contextlib.suppress(OSError):
            figures["disk_free_bytes"] = shutil.disk_usage(self._place.output).free
        return figures
