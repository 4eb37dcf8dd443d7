"""Profiling on demand from Python: what `rankd profile` does, as functions.

::

    from rankd.profiler_ctl.requests import start, wait
    name = start("rankd-output", ranks="0,8-10", steps=3)
    wait("rankd-output", name)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..collector.asking import ask
from ..collector.protocol.errors import RankdError
from ..collector.protocol.jsontext import parsed
from .agreement import Phase
from .asked import KIND, STATIC, Asked, ProfilerOptions
from .choosing import Choice

__all__ = ["PROFILES", "sessions", "start", "stop", "wait"]

# Relative to the output directory; the collector keeps it up to date.
PROFILES = ".rankd/profile.json"
_LOOK = 0.2


def start(
    output: str | Path,
    *,
    ranks: str | None = None,
    steps: int = 1,
    at: int | None = None,
    options: ProfilerOptions | None = None,
    path: str | Path | None = None,
    pp_stage: int | None = None,
    one_per_node: bool = False,
    slowest: int | None = None,
) -> str:
    """Propose a session to ranks of the run in `output`; whether they all take part is decided in the next seconds.

    Args:
        ranks: `0,8-10`, or `all`; see also `pp_stage`, `one_per_node` and `slowest` (`Choice`).
        steps: how many steps.
        at: the first global step; None: the first one that all ranks can be told of in time.
        options: what is collected; None: level 0 without stacks.
        path: rank x writes to `path/rank_x`; relative: from where the rank was started; None: as configured.

    Returns:
        The session's name.

    Raises:
        RankdError: it cannot be done, and why.
    """
    asked = Asked(steps, at, options or ProfilerOptions(stack=False), None if path is None else str(path))
    choice = Choice(ranks, pp_stage, one_per_node, slowest)
    return str(ask(Path(output), f"{KIND}.start", {**choice.body(), **asked.body()})["session"])


def stop(output: str | Path, session: str | None = None) -> list[str]:
    """End a session, or all (None), at the ranks' next step; what is recorded by then is written.

    Returns:
        The names of those that were still going on.

    Raises:
        RankdError: there is no such session, or nobody collects there.
    """
    answer = ask(Path(output), f"{KIND}.stop", {"session": session or ""})
    return [name for name in str(answer["stopped"]).split(",") if name]


def sessions(output: str | Path) -> list[dict[str, Any]]:
    """All sessions of a run and their ranks, also of one that is over.

    Raises:
        RankdError: there is no run in `output`, or its file cannot be read.
    """
    path = Path(output) / PROFILES
    try:
        told = parsed(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not (Path(output) / ".rankd").is_dir():
            raise RankdError(f"{output} is not the output directory of a run (rankd.output)") from None
        return []
    except (OSError, ValueError) as error:
        raise RankdError(f"{path} cannot be read: {error}") from error
    if not isinstance(told, dict) or told.get("version") != 1:
        raise RankdError(f"{path} is not of this version")
    found: list[dict[str, Any]] = told["sessions"] if isinstance(told.get("sessions"), list) else [{}]
    if not all(map(_is_session, found)):
        raise RankdError(f"{path} is not what a collector writes")
    return sorted(found, key=lambda each: (each["name"] != STATIC, len(each["name"]), each["name"]))


def _is_session(found: object) -> bool:
    match found:
        case {
            "name": str(), "phase": str(phase), "ranks": str(), "reason": str(), "steps": int(), "level": int(),
            "start": None | int(), "end": None | int(), "bytes": int(), "path": None | str(), "parts": list(parts),
        }:  # fmt: skip
            return phase in {each.value for each in Phase} and all(map(_is_part, parts))
    return False


def _is_part(found: Any) -> bool:
    match found:
        case {"rank": int(), "outcome": str()}:
            kinds = {"path": str, "bytes": int, "seconds": float, "count": int, "first": int, "last": int}
            return all(isinstance(found[name], kind) for name, kind in kinds.items() if name in found)
    return False


def wait(
    output: str | Path,
    session: str,
    *,
    decided: bool = False,
    timeout: float | None = None,
    told: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Wait until a session is over.

    Args:
        decided: only until its step is decided, or it is called off.
        timeout: seconds; None: for as long as it takes.
        told: called with the session whenever its phase has changed.

    Returns:
        The session, as `sessions` has it.

    Raises:
        RankdError: not within `timeout`.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    before = None
    while True:
        found = next((each for each in sessions(output) if each["name"] == session), None)
        if found is not None:
            phase = Phase(found["phase"])
            if phase is not before:
                before = phase
                told(found)
            if phase.final or (decided and phase is not Phase.PROPOSED):
                return found
        if deadline is not None and time.monotonic() > deadline:
            raise RankdError(f"{session}: not over within {timeout:g} s")
        time.sleep(_LOOK)
