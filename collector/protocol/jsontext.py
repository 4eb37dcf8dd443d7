"""JSON that somebody else may have written: of a peer, of a file that was damaged."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["parsed"]


def parsed(text: str | bytes) -> Any:
    """What the text holds.

    Raises:
        ValueError: it is no JSON, or nested so deep that Python gives up.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
