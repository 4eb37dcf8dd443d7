"""How messages say a number of things."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, one: str, several: str = "") -> str:
    """`1 step`, `0 steps`, `3 steps`.

    Args:
        one: what one of them is called, with the words that go with it.
        several: what more of them, or none, are called, where that is not `one` and an s.
    """
    return f"{number} {one if number == 1 else several or f'{one}s'}"
