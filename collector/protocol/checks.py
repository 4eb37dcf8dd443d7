"""What the constructors of records, items and messages check their arguments with."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from .errors import LimitError, RecordError

__all__ = [
    "MAX_ENTRIES",
    "MAX_RANKS",
    "MAX_STEP",
    "MAX_TEXT_BYTES",
    "MAX_WORD_BYTES",
    "check_any_number",
    "check_bytes",
    "check_count",
    "check_fact",
    "check_int",
    "check_map",
    "check_number",
    "check_short",
    "check_text",
    "clipped",
    "printable",
    "shown",
]

# Steps and micro-steps fit a signed 64-bit column of any reader (Parquet, TensorBoard, SQL).
MAX_STEP = 2**63 - 1
MAX_RANKS = 65_536
# Of a map that rides on a message: versions, causes, host figures.
MAX_ENTRIES = 64
_MAX_KEY_BYTES = 128
# A C++ traceback of MindSpore is some 5 kB.
MAX_TEXT_BYTES = 16_384
# Identifiers: of a run, a cause, the kind of a note.
MAX_WORD_BYTES = 64
_MAX_SHORT_BYTES = 1_024
# C0 (but not the newline), DEL and C1, bidi controls, line and paragraph separators, halves of surrogate pairs.
_CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, *, line: bool = False) -> str:
    """Text for a terminal or a log: what could steer a terminal, or hide, is written as an escape.

    Args:
        line: newlines too, so that nobody can make a line of his own.
    """
    if text.isprintable():
        return text
    plain = text.replace("\n", "\\n") if line else text
    return _CONTROLS.sub(lambda m: f"\\u{ord(m[0]):04x}", plain)


def shown(value: object) -> str:
    """A value in an error's text, cut short. What a peer sent may be large or deep: no container is looked into."""
    if isinstance(value, (str, bytes)):
        return repr(value[:80]) + ("…" if len(value) > 80 else "")
    return repr(value) if value is None or isinstance(value, (bool, int, float)) else type(value).__name__


def check_int(what: str, value: object, low: int, high: int = MAX_STEP) -> None:
    """Raise RecordError unless `value` is an integer (no bool) from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RecordError(f"{what} must be an integer from {low} to {high}, got {shown(value)}")


def check_number(what: str, value: object, *, finite: bool = True) -> None:
    """Raise RecordError unless `value` is a number (no bool), and a finite one unless told otherwise."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or (finite and not math.isfinite(value)):
        raise RecordError(f"{what} must be a {'finite ' * finite}number, got {shown(value)}")


def check_bytes(what: str, value: object) -> None:
    """Raise RecordError unless `value` is bytes."""
    if type(value) is not bytes:
        raise RecordError(f"{what} must be bytes, got {shown(value)}")


def check_text(what: str, text: object, most: int, *, empty: bool = False) -> None:
    """Raise RecordError unless `text` is Unicode text, LimitError where it has more than `most` bytes in UTF-8."""
    if not isinstance(text, str) or not (text or empty):
        raise RecordError(f"{what} must be a {'' if empty else 'non-empty '}string, got {shown(text)}")
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        raise RecordError(f"{what} {shown(text)} is not valid Unicode (a lone surrogate)") from None
    if size > most:
        raise LimitError(f"{what} of {size} bytes, at most {most} are allowed: {shown(text)}")


def check_map(what: str, value: object, check_value: Callable[[str, object], None]) -> None:
    """Raise RecordError unless `value` maps a few short names to what `check_value` lets through."""
    if not isinstance(value, Mapping):
        raise RecordError(f"{what} must be a map, got {shown(value)}")
    if len(value) > MAX_ENTRIES:
        raise LimitError(f"{what} of {len(value)} entries, at most {MAX_ENTRIES} are allowed")
    for key, entry in value.items():
        check_text(f"{what}: a name", key, _MAX_KEY_BYTES)
        check_value(f"{what}: {shown(key)}", entry)


def check_count(what: str, value: object) -> None:
    """A number of records or items. Raises as `check_int` and its like do."""
    check_int(what, value, 0)


def check_short(what: str, value: object) -> None:
    """A fact about a process: text, possibly empty. Raises as `check_int` and its like do."""
    check_text(what, value, _MAX_SHORT_BYTES, empty=True)


def check_any_number(what: str, value: object) -> None:
    """A figure, which may be NaN or infinite. Raises as `check_int` and its like do."""
    check_number(what, value, finite=False)


def check_fact(what: str, value: object) -> None:
    """Text, possibly empty, a finite number, true or false, or None. Raises as `check_int` and its like do."""
    if isinstance(value, str):
        check_text(what, value, MAX_TEXT_BYTES, empty=True)
    elif type(value) is int:
        check_int(what, value, -MAX_STEP, MAX_STEP)
    elif value is not None and type(value) is not bool:
        check_number(what, value)


def clipped(text: str) -> str:
    """Free text as it can travel: valid Unicode, cut to the limit. What an exception says is not ours to choose."""
    raw = text.encode("utf-8", "backslashreplace")
    if len(raw) > MAX_TEXT_BYTES:
        raw = raw[: MAX_TEXT_BYTES - len("…".encode())] + "…".encode()
    return raw.decode("utf-8", "ignore")
