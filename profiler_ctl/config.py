"""The `profiler:` section of the training YAML (SPEC.md section 5)."""

# ruff: noqa: RUF009 - `setting` declares a dataclass field, as dataclasses.field does

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..collector.protocol.ranges import span
from ..collector.protocol.wording import counted
from ..collector.settings import (
    Misfit,
    Settings,
    any_integer,
    file_path,
    flag,
    integer,
    list_of,
    optional,
    setting,
)

__all__ = ["Level", "ProfilerConfig"]

_DEFAULT_STEP = 1


class Level(enum.Enum):
    """How much is collected; a value is the name of its `mindspore.profiler.ProfilerLevel`."""

    NONE = "LevelNone"
    LEVEL0 = "Level0"
    LEVEL1 = "Level1"
    LEVEL2 = "Level2"


_LEVELS = {0: Level.LEVEL0, 1: Level.LEVEL1, 2: Level.LEVEL2}


@dataclass(frozen=True, slots=True)
class ProfilerConfig(Settings):
    """The `profiler:` section: whether, when, on which ranks and how to profile.

    Attributes:
        enable_profiling: the master switch.
        start_step: the first global step that is collected, 1-based.
        end_step: the last one, included.
        output_path: rank x writes to `output_path/rank_x`; None: `<cwd>/profile/rank_x`.
        profiler_rank: the ranks to profile; None: all.
        profiler_level: 0, 1 or 2, the higher the more detailed; any other integer is `Level.NONE`, with a warning.
        mstx: light-weight marks, passed to `_ExperimentalConfig`.
        profile_memory: collect the memory of tensors.
        profile_cpu: add the CPU activity.
        with_stack: collect Python call stacks.
    """

    dotted: ClassVar[str] = "profiler"

    enable_profiling: bool = setting(flag(), False)
    start_step: int = setting(integer(1), _DEFAULT_STEP)
    end_step: int = setting(integer(1), _DEFAULT_STEP)
    output_path: Path | None = setting(optional(file_path()), None)
    # Negative ids and ids past the world size get a warning and not an error: the same YAML serves smaller jobs too.
    profiler_rank: tuple[int, ...] | None = setting(optional(list_of(any_integer())), None)
    profiler_level: int = setting(any_integer(), 0)
    mstx: bool = setting(flag(), False)
    profile_memory: bool = setting(flag(), False)
    profile_cpu: bool = setting(flag(), True)
    with_stack: bool = setting(flag(), True)

    def conflicts(self) -> Iterator[Misfit]:
        """The window must not end before it starts."""
        if self.start_step <= self.end_step:
            return
        if self.end_step == _DEFAULT_STEP:
            hint = f"end_step is {self.end_step}, its default: set end_step too"
        else:
            hint = f"end_step is {self.end_step}"
        yield Misfit("start_step", f"found {self.start_step}, allowed: at most end_step; {hint}")

    @property
    def level(self) -> Level:
        """The level as MindSpore knows it."""
        return _LEVELS.get(self.profiler_level, Level.NONE)

    @property
    def step_count(self) -> int:
        """How many steps are collected."""
        return self.end_step - self.start_step + 1

    def chooses(self, rank: int) -> bool:
        """Whether this rank profiles; one that does not must never construct the profiler."""
        return self.enable_profiling and (self.profiler_rank is None or rank in self.profiler_rank)

    def directory(self, rank: int, cwd: Path) -> Path:
        """Where this rank's profile goes: `output_path/rank_x`, or `<cwd>/profile/rank_x`."""
        return cwd / ("profile" if self.output_path is None else self.output_path) / f"rank_{rank}"

    def warnings(self, world_size: int) -> list[str]:
        """What is allowed but will probably surprise, in a job of this many ranks; nothing while profiling is off."""
        if not self.enable_profiling:
            return []
        found = []
        if self.profiler_rank is not None:
            outside = [rank for rank in self.profiler_rank if not 0 <= rank < world_size]
            if not self.profiler_rank:
                found.append(f"{self.dotted}.profiler_rank: found [], so no rank profiles; leave it out for all ranks")
            if outside:
                found.append(
                    f"{self.dotted}.profiler_rank: {_listed(outside)} not in this job of {counted(world_size, 'rank')} "
                    f"({span(0, world_size - 1)}); ignored"
                )
        if self.profiler_level not in _LEVELS:
            found.append(
                f"{self.dotted}.profiler_level: found {self.profiler_level}, allowed: 0, 1 or 2; "
                f"{Level.NONE.value} is used"
            )
        return found


def _listed(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names} is" if len(ranks) == 1 else f"ranks {names} are"
