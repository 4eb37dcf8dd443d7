"""Keeps OUTPUT/.rankd/profile.json up to date, for `rankd profile status` and its like, also when the run is over."""

from __future__ import annotations

import json
import time
from contextlib import suppress

from ..profiler_ctl.part import ProfilingPart
from .place import Place

__all__ = ["ProfileFile"]


# Of the time that making it takes, so many times more passes until the next: a thousand ranks change often.
_SHARE = 30


class ProfileFile:
    """Written where something has changed; where it cannot be written, the former one stays until the next change."""

    def __init__(self, place: Place, part: ProfilingPart) -> None:
        self._place = place
        self._part = part
        self._told = 0
        self._due = 0.0

    def update(self, *, last: bool = False) -> None:
        """Write it if something has changed, but not too often; the `last` time in any case."""
        began = time.monotonic()
        if self._told == self._part.changes or (began < self._due and not last):
            return
        self._told = self._part.changes
        told = {"version": 1, "sessions": self._part.status()}
        with suppress(OSError):
            self._place.tell_profiles(json.dumps(told, allow_nan=False) + "\n")
        self._due = began + (1 + _SHARE) * (time.monotonic() - began)
