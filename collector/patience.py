"""Writes that a full disk holds up are tried again until they are possible: what was taken is not lost."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["PatientWriting", "StopRequestedError"]

log = logging.getLogger("rankd.collector")

# How often a write that failed is tried again.
_RETRY = 0.5


class StopRequestedError(Exception):
    """A signal asked the collector to end."""


class PatientWriting:
    """Tries again, with one warning of each trouble.

    Args:
        output: where is written, for messages.
        meanwhile: called before each new try; ends the waiting by raising.
    """

    def __init__(self, output: Path, meanwhile: Callable[[], None]) -> None:
        self._output = output
        self._meanwhile = meanwhile

    def until_possible(self, what: str, write: Callable[[], None]) -> None:
        """Call `write` until it raises no OSError."""
        reported = False
        while True:
            try:
                write()
            except OSError as e:
                if not reported:
                    self.report(what, e)
                    reported = True
                self._meanwhile()
                time.sleep(_RETRY)
            else:
                if reported:
                    log.warning("%s can be written again; going on", what)
                return

    def report(self, what: str, error: OSError) -> None:
        """Warn, with how much room there is."""
        free = os.statvfs(self._output)
        log.warning(
            "%s in %s cannot be written (%s; %d bytes free there): nothing is lost while the ranks can hold it; "
            "make room and it goes on",
            what,
            self._output,
            error.strerror,
            free.f_bavail * free.f_frsize,
        )
