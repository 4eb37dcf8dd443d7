"""The only file that imports `mindspore.profiler`, and only once a session starts to record."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from .session import ProfilerOptions

__all__ = ["MindSporeProfiler"]


class MindSporeProfiler:
    """`mindspore.profiler.profile` over the next `steps` steps, output under `rank_dir`; it starts at once.

    Its schedule counts `step()` calls since construction, not training steps. So it is built where the window's first
    step begins, skips nothing, and stays right in a run that was resumed.

    The analysis runs in another process (`async_mode`): in this one it would hold the rank, and through the next
    collective all others, for a second and more.
    """

    def __init__(self, options: ProfilerOptions, rank_dir: Path, steps: int) -> None:
        from mindspore import profiler as ms

        activities = [ms.ProfilerActivity.NPU]
        if options.cpu:
            activities.insert(0, ms.ProfilerActivity.CPU)
        levels = {0: ms.ProfilerLevel.Level0, 1: ms.ProfilerLevel.Level1, 2: ms.ProfilerLevel.Level2}
        level = levels.get(options.level, ms.ProfilerLevel.LevelNone)
        self._analyses: list[BaseProcess] = []
        self._stopped = False
        self._profile = ms.profile(
            activities=activities,
            with_stack=options.stack,
            profile_memory=options.memory,
            schedule=ms.schedule(wait=0, warmup=0, active=steps, repeat=1, skip_first=0),
            on_trace_ready=ms.tensorboard_trace_handler(str(rank_dir), async_mode=True),
            experimental_config=ms._ExperimentalConfig(profiler_level=level, mstx=options.mstx),
        )

    def step(self) -> None:
        """A recorded step has ended; the last one starts the analysis."""
        self._watching(self._profile.step)

    def stop(self) -> None:
        """End the recording; before the last step this starts the analysis of what there is."""
        self._stopped = True
        self._watching(self._profile.stop)

    def wait(self, seconds: float) -> bool:
        """Whether the analysis is over, after waiting at most `seconds`."""
        deadline = time.monotonic() + seconds
        for process in self._analyses:
            process.join(max(0.0, deadline - time.monotonic()))
        return not any(process.is_alive() for process in self._analyses)

    def abandon(self) -> None:
        """Stop recording, and end the analysis: MindSpore waits for it at exit without a limit."""
        if not self._stopped:
            self.stop()
        for process in self._analyses:
            process.terminate()

    def _watching(self, call: Callable[[], object]) -> None:
        """Make a call that may start the analysis; MindSpore keeps the process to itself, but it is a child."""
        before = set(multiprocessing.active_children())
        call()
        self._analyses.extend(p for p in multiprocessing.active_children() if p not in before)
