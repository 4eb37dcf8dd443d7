"""Lists of ranks and ranges of steps as a person writes and reads them.

Ranks are shown as they can be typed: `0,2-3`. Steps are shown in the same form, `5-7`, and typed as `A:B`, which may
have an open end.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from .checks import MAX_RANKS, MAX_STEP
from .errors import RecordError

__all__ = ["parse_ranks", "parse_steps", "ranges", "ranks_text", "span", "steps_text"]

_RANKS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_STEPS = re.compile(r"(\d{0,19})(:?)(\d{0,19})", re.ASCII)


def parse_ranks(text: str) -> frozenset[int]:
    """The ranks of a list such as `0,2-3`.

    Raises:
        RecordError: it is no such list.
    """
    ranks: set[int] = set()
    for part in text.split(","):
        match = _RANKS.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < MAX_RANKS:
            raise RecordError(f"found {text!r}, allowed: ranks below {MAX_RANKS} and ranges of them, such as 0,2-3")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


def parse_steps(text: str) -> tuple[int, int]:
    """The first and last step of `A:B` (both included), `A:`, `:B` or `A`.

    Raises:
        RecordError: it is none of these.
    """
    match = _STEPS.fullmatch(text.strip())
    if match is None or not (match[1] or match[3]):
        raise RecordError(f"found {text!r}, allowed: steps as A:B (both included), A: (from A on), :B (up to B) or A")
    first = int(match[1] or 1)
    last = int(match[3] or MAX_STEP) if match[2] else first
    if not 1 <= first <= last:
        raise RecordError(f"found {text!r}: steps count from 1, and the first is not after the last")
    return first, last


def ranges(numbers: Iterable[int]) -> str:
    """`0,2-3`: what `parse_ranks` reads, of any numbers."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(span(first, last) for first, last in found)


def span(first: int, last: int) -> str:
    """`5-7`, or `5` where that is all."""
    return str(first) if first == last else f"{first}-{last}"


def ranks_text(ranks: Collection[int]) -> str:
    """`rank 3`, `ranks 0,2-3`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"


def steps_text(first: int, last: int) -> str:
    """`step 5`, `steps 5-7`."""
    return f"{'step' if first == last else 'steps'} {span(first, last)}"
