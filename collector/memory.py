"""How memory is taken and given back in a process that takes and frees megabytes of text all the time."""

from __future__ import annotations

import ctypes
import gc

__all__ = ["collect_garbage_seldom", "keep_freed_memory"]

# mallopt(3), of the GNU C library.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Some batches of text: what a rendering frees the next one takes. At most this much stays with the process unused.
_KEPT_BYTES = 32 * 2**20
# New objects between two looks for cycles; Python's own number is 700.
_OBJECTS = 20_000


def keep_freed_memory() -> None:
    """Keep freed memory for the next allocation instead of giving it back to the system at once.

    By default what lies free above 128 KB goes back, and its pages come again as faults, zeroed: a third of all CPU
    time of a busy collector. Does nothing where the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)


def collect_garbage_seldom() -> None:
    """Look for cycles after so many more objects.

    Thousands of blocks that wait for a slow rank are hundreds of thousands of objects, which Python's collector would
    walk again and again. Cycles are rare here: nearly all is freed when it is no longer used.
    """
    gc.set_threshold(_OBJECTS, 20, 20)
