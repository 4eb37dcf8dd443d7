"""The command `stacks` on the rank: where each of its threads is, for training that stands still.

Read by the sender's thread while training goes on or waits. It works while a collective waits or an operator runs,
which release the interpreter lock; a rank that holds the lock cannot answer, and that is an answer too.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import FrameType

from ..collector.protocol.checks import MAX_TEXT_BYTES, clipped
from ..collector.protocol.messages import Facts, Report
from ..collector.protocol.steering import STACKS

__all__ = ["StackDump", "stacks_text"]

_OURS = "rankd-"
# A recursion a thousand deep says no more than its ends.
_MOST_FRAMES = 60


class StackDump:
    """Handles the command (`commands.Handler`).

    Args:
        position: the (step, micro_step) that training is at.
    """

    def __init__(self, position: Callable[[], tuple[int, int]]) -> None:
        self._position = position

    def __call__(self, facts: Facts) -> Sequence[Report]:
        step, micro_step = self._position()
        threads = facts.get("threads") is True
        text = clipped(stacks_text(others=threads))
        return [Report(STACKS, {"number": facts.get("number"), "step": step, "micro_step": micro_step, "text": text})]


def stacks_text(*, others: bool) -> str:
    """The stack of the main thread, innermost frame last, and of the `others` too, except rankd's own.

    Nothing in it depends on the process, so that ranks which are at one place say the same.
    """
    frames = sys._current_frames()
    main = threading.main_thread()
    named = [each for each in threading.enumerate() if others and each is not main and not each.name.startswith(_OURS)]
    parts = []
    for thread in (main, *sorted(named, key=lambda each: each.name)):
        frame = frames.get(thread.ident or 0)
        if frame is not None:
            parts.append(f"{'main thread' if thread is main else thread.name}:\n{_text(frame)}")
    # The innermost frames are what one looks for; what is cut is cut from the end.
    return "\n".join(parts)[:MAX_TEXT_BYTES]


def _text(frame: FrameType) -> str:
    found = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=_MOST_FRAMES)
    found.reverse()
    return "".join(found.format())
