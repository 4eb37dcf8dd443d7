"""The boundary between a framework's callbacks and rankd: an error of ours is logged, once a kind, and ends there.

But for AnomalyError, by which rankd stops the training where it was asked to.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec

from ...collector.protocol.errors import RankdError
from ..anomaly import AnomalyError

__all__ = ["harmless"]

log = logging.getLogger("rankd.agent")

_P = ParamSpec("_P")
# Told so far, by function and kind of error: a callback fails the same way at each step.
_told: set[tuple[str, str]] = set()


def harmless(function: Callable[_P, None]) -> Callable[_P, None]:
    """The function, whose exceptions are logged and go no further: in MindFormers they would stop the training."""

    @functools.wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except AnomalyError:  # asked for by `rankd.on_anomaly`
            raise
        except Exception as e:
            kind = (function.__qualname__, type(e).__name__)
            if kind not in _told:
                _told.add(kind)
                log.error(
                    "rankd: %s failed, training goes on (this is said once): %s",
                    function.__qualname__,
                    e,
                    # Errors of ours say all there is to know; a configuration's have a line for each thing wrong.
                    exc_info=not isinstance(e, RankdError),
                )

    return guarded
