"""Longer text inside `Hello.about`, whose values are short: cut into numbered pieces, and put together again."""

from __future__ import annotations

from collections.abc import Mapping

from .records import MAX_NAME_BYTES

__all__ = ["CONFIGURATION", "MAX_ABOUT_TEXT", "OWN_COLLECTOR", "pack_text", "unpack_text"]

# The configuration as used, as JSON.
CONFIGURATION = "configuration"
# The output directory of the collector that this job starts for itself (its real path); missing: it joins another's.
OWN_COLLECTOR = "own_collector"
_MOST_PIECES = 32
# Longer than any configuration of ours that is not made to be long; `Hello.about` also holds a few other facts.
MAX_ABOUT_TEXT = _MOST_PIECES * MAX_NAME_BYTES


def pack_text(name: str, text: str) -> dict[str, str]:
    """The entries `name.1`, `name.2`, … that hold `text`; none where it is too long (MAX_ABOUT_TEXT) or not ASCII."""
    if len(text) > MAX_ABOUT_TEXT or not text.isascii():
        return {}
    starts = range(0, len(text), MAX_NAME_BYTES)
    return {f"{name}.{number}": text[start : start + MAX_NAME_BYTES] for number, start in enumerate(starts, 1)}


def unpack_text(name: str, about: Mapping[str, str]) -> str | None:
    """The text that `pack_text` has put there; None where there is none."""
    pieces: list[str] = []
    while (piece := about.get(f"{name}.{len(pieces) + 1}")) is not None:
        pieces.append(piece)
    return "".join(pieces) if pieces else None
