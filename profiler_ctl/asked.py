"""What a profiling session is asked to do, and how that travels. Pure.

Everything here goes through `Asked.body` and `Asked.from_body`: flat maps of short words to numbers, text and flags, as
commands, reports and the collector's journal hold them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeAlias

from ..collector.protocol.checks import MAX_STEP, check_int, check_text
from ..collector.protocol.errors import RecordError
from ..collector.protocol.messages import Fact, Facts

__all__ = ["KIND", "STATIC", "Asked", "Body", "ProfilerOptions", "Value", "estimated_bytes", "integer", "text"]

Value: TypeAlias = Fact
Body: TypeAlias = Facts

# The kind of our commands, reports and decisions.
KIND = "profile"
# The name of the session that the configuration proposes.
STATIC = "static"
# Of one session: a profile of more steps is no profile but an outage.
MOST_STEPS = 10_000
_LONGEST_PATH = 1_000
_LEVELS = (-(2**31), 2**31)

# What a step may leave by level as long as no session of the run was measured: a guess on the high side, for an NPU and
# a large model.
_MIB = 2**20
_STEP_BYTES = {0: 64 * _MIB, 1: 128 * _MIB, 2: 256 * _MIB}
_STEP_BYTES_NONE = 32 * _MIB
# Of what was measured: a step may be larger than the last one was, and the raw data lies beside the analysed.
_SAFETY = 2


@dataclass(frozen=True, slots=True)
class ProfilerOptions:
    """What is collected: the keys of SPEC.md section 5 that are handed to MindSpore.

    Attributes:
        level: 0, 1, 2; any other is `LevelNone`.
        mstx: light-weight marks.
        memory: memory of tensors.
        cpu: the CPU activity.
        stack: Python call stacks.
    """

    level: int = 0
    mstx: bool = False
    memory: bool = False
    cpu: bool = True
    stack: bool = True

    def __post_init__(self) -> None:
        check_int("level", self.level, *_LEVELS)
        for name in ("mstx", "memory", "cpu", "stack"):
            if not isinstance(getattr(self, name), bool):
                raise RecordError(f"{name} must be true or false")


@dataclass(frozen=True, slots=True)
class Asked:
    """A session as a person asks for it, without its ranks.

    Attributes:
        steps: how many global steps.
        at: the first one; None: the collector chooses.
        options: what is collected.
        path: rank x writes to `path/rank_x`, a relative one counting from where the rank was started; None: `profile`.

    Raises:
        RecordError: a value that cannot be.
    """

    steps: int
    at: int | None = None
    options: ProfilerOptions = ProfilerOptions()
    path: str | None = None

    def __post_init__(self) -> None:
        check_int("steps", self.steps, 1, MOST_STEPS)
        if self.at is not None:
            check_int("at", self.at, 1, MAX_STEP - MOST_STEPS)
        if self.path is not None:
            check_text("path", self.path, _LONGEST_PATH)
            if "\0" in self.path or ".." in self.path.split("/"):
                raise RecordError(f"path must name a directory without `..`, got {self.path[:80]!r}")

    def body(self) -> dict[str, Value]:
        """All of it, flat."""
        options = {each.name: getattr(self.options, each.name) for each in fields(self.options)}
        return {"steps": self.steps, "at": self.at, "path": self.path, **options}

    @classmethod
    def from_body(cls, body: Body) -> Asked:
        """What `body` gave; other entries are let be.

        Raises:
            RecordError: something is missing or cannot be.
        """
        try:
            options = {each.name: body[each.name] for each in fields(ProfilerOptions)}
            return cls(
                steps=body["steps"],  # type: ignore[arg-type] # checked when it is built
                at=body["at"],  # type: ignore[arg-type]
                path=body["path"],  # type: ignore[arg-type]
                options=ProfilerOptions(**options),  # type: ignore[arg-type]
            )
        except KeyError as e:
            raise RecordError(f"a profiling session without {e.args[0]}") from None


def estimated_bytes(options: ProfilerOptions, steps: int, measured: int | None) -> int:
    """What a session may need of a rank's disk.

    Args:
        measured: bytes a step of an earlier session with these options; None: there was none.
    """
    if measured is not None:
        return _SAFETY * measured * steps
    step = _STEP_BYTES.get(options.level, _STEP_BYTES_NONE)
    return step * steps * (1 + options.stack) * (1 + options.memory)


def text(body: Body, name: str, default: str = "") -> str:
    """A text of a body; whatever else stands there is the default."""
    value = body.get(name)
    return value if isinstance(value, str) else default


def integer(body: Body, name: str) -> int | None:
    """An integer of a body from 0 to MAX_STEP; whatever else stands there is None."""
    value = body.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_STEP else None
