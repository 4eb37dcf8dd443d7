"""Keeps OUTPUT/.rankd/profile.json up to date, for `rankd profile status` and its like, also when the run is over."""

from __future__ import annotations

import json
from contextlib import suppress

from ..profiler_ctl.part import ProfilingPart
from .place import Place

__all__ = ["ProfileFile"]


class ProfileFile:
    """Written where something has changed; where it cannot be written, the former one stays until the next change."""

    def __init__(self, place: Place, part: ProfilingPart) -> None:
        self._place = place
        self._part = part
        self._told = 0

    def update(self) -> None:
        """Write it if something has changed."""
        if self._told == self._part.changes:
            return
        self._told = self._part.changes
        told = {"version": 1, "sessions": self._part.status()}
        with suppress(OSError):
            self._place.tell_profiles(json.dumps(told, allow_nan=False) + "\n")
