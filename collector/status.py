"""Pure: the state of a run as one JSON object, which the collector leaves in OUTPUT/.rankd/status.json each second.

`Latest` is a sink that remembers of each rank what a screen shows; `status_of` joins it with the run and the beats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .protocol.jsonl import number
from .protocol.records import Comment, Frame, RankBlock
from .protocol.wire import Beat
from .run import RankState, Run
from .sinks.sink import Off

__all__ = ["STATUS", "Beats", "Latest", "status_of"]

# Relative to the output directory.
STATUS = ".rankd/status.json"

# The pace is that of these last steps of the front.
_PACE_STEPS = 20
# What can be a pace, in seconds a step.
_LEAST_PACE, _MOST_PACE = 1e-6, 1e9
# An end that no calendar has is not told; some centuries.
_MOST_LEFT = 1e10
# Which metric a screen's column shows: the first of these that a rank has in this attempt, so that ranks in the middle
# of a step are not compared with others at its end.
_LOSSES = ("local_loss", "device_loss", "loss")
_GRAD_NORMS = ("grad_norm",)


class Latest(Off):
    """A sink that keeps the latest loss and gradient norm of each rank, and when the front began its last steps."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.grad_norms: dict[int, float] = {}
        self.total_steps: int | None = None
        # Of each rank: the attempt, and which of the losses is shown.
        self._chosen: dict[int, tuple[int, int]] = {}
        # (attempt, step, the rank's clock then), of the last steps.
        self._steps: list[tuple[int, int, float]] = []

    def write(self, released: Sequence[RankBlock | Comment]) -> None:
        """Look at these."""
        for each in released:
            if isinstance(each, RankBlock) and not each.late:
                self._take(each)

    def _take(self, block: RankBlock) -> None:
        at = block.position
        self.total_steps = block.total_steps or self.total_steps
        if not self._steps or self._steps[-1][:2] != (at.attempt, at.step):
            if self._steps and self._steps[-1][0] != at.attempt:
                self._steps.clear()
            self._steps.append((at.attempt, at.step, block.time))
            del self._steps[: -_PACE_STEPS - 1]
        for frame in block.frames:
            if frame.metric in _LOSSES:
                self._take_loss(block.rank, at.attempt, frame)
            elif frame.metric in _GRAD_NORMS:
                self.grad_norms[block.rank] = frame.values[0]

    def _take_loss(self, rank: int, attempt: int, frame: Frame) -> None:
        choice = _LOSSES.index(frame.metric)
        of_attempt, chosen = self._chosen.get(rank, (0, 0))
        if of_attempt != attempt or choice <= chosen:
            self._chosen[rank] = (attempt, choice)
            self.losses[rank] = frame.values[0]

    def seconds_per_step(self) -> float | None:
        """Over the last steps; None: too few have been seen."""
        if len(self._steps) < 2:
            return None
        (_, first, began), (_, last, ends) = self._steps[0], self._steps[-1]
        # The clocks are the ranks', and may say anything.
        pace = (ends - began) / (last - first) if last > first and ends > began else 0.0
        return pace if _LEAST_PACE < pace < _MOST_PACE else None


@dataclass(slots=True)
class Beats:
    """The last beat of each rank, and when it came."""

    _beats: dict[int, tuple[Beat, float]] = field(default_factory=dict)

    def heard(self, rank: int, beat: Beat, now: float) -> None:
        """A beat of this rank came at this time (monotonic)."""
        self._beats[rank] = (beat, now)

    def of(self, rank: int) -> tuple[Beat, float] | None:
        return self._beats.get(rank)

    def forget(self, rank: int) -> None:
        """Another process of this rank begins: where the former one was says nothing of it."""
        self._beats.pop(rank, None)


def status_of(
    run: Run, latest: Latest, beats: Beats, *, now: float, clock: float, collector: Mapping[str, Any]
) -> dict[str, Any]:
    """The object: strict JSON, absent figures None.

    Args:
        now: as the beats have it.
        clock: seconds since the epoch.
        collector: what the collector tells of itself.
    """
    attempt = run.intake.attempt
    accounts = _accounts(run)
    ranks = [
        {**_rank_status(run, latest, beats, rank, now), **accounts.get(rank, _NO_ACCOUNT)} for rank in sorted(run.ranks)
    ]
    counted = [each["step"] for each in ranks if each["attempt"] == (attempt.number if attempt else 0)]
    front = max(counted, default=0)
    for each in ranks:
        each["lag"] = front - each["step"] if attempt and each["attempt"] == attempt.number else None
    pace = latest.seconds_per_step()
    total = latest.total_steps
    left = max(0, total - front) * pace if total is not None and pace is not None else None
    if left is not None and left > _MOST_LEFT:
        left = None
    return {
        "version": 1,
        "time": clock,
        "attempt": attempt.number if attempt else 0,
        "world_size": attempt.world_size if attempt else 0,
        "step": front,
        "total_steps": total,
        "seconds_per_step": pace,
        "expected_end": None if left is None else clock + left,
        "ended": run.ended,
        "collector": dict(collector),
        "ranks": ranks,
    }


_NO_ACCOUNT = {"received": 0, "written": 0, "dropped": 0, "lost": 0}


def _accounts(run: Run) -> dict[int, dict[str, int]]:
    """Records of each rank, of all its processes and attempts."""
    out: dict[int, dict[str, int]] = {}
    for process in run.accounts.processes:
        own = out.setdefault(process.rank, dict(_NO_ACCOUNT))
        for account in process.attempts.values():
            own["received"] += account.received
            own["written"] += account.written
            own["dropped"] += account.dropped.total()
            own["lost"] += account.lost
    return out


def _rank_status(run: Run, latest: Latest, beats: Beats, rank: int, now: float) -> dict[str, Any]:
    view = run.ranks[rank]
    at = view.position
    session = run.intake.current(rank)
    out: dict[str, Any] = {
        "rank": rank,
        "state": view.state.value,
        "host": "" if session is None else session.hello.host,
        "pid": None if session is None else session.hello.pid,
        "attempt": at.attempt if at else 0,
        "step": at.step if at else 0,
        "micro_step": at.micro_step if at else None,
        "loss": _shown(latest.losses.get(rank)),
        "grad_norm": _shown(latest.grad_norms.get(rank)),
        "reason": view.reason,
        "beat_age": None,
        "held": None,
        "host_figures": {},
    }
    heard = beats.of(rank)
    if heard is not None and view.state is not RankState.FINISHED:
        beat, when = heard
        out["beat_age"] = round(now - when, 3)
        out["held"] = beat.held
        out["host_figures"] = {name: number(value) for name, value in beat.host.items()}
    return out


def _shown(value: float | None) -> float | str | None:
    return None if value is None else number(value)
