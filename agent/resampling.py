"""The command `sample` on the rank: other rates from a step on that this rank has not begun yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..collector.protocol.checks import check_int
from ..collector.protocol.messages import Facts, Report
from ..collector.protocol.steering import RATES, SAMPLE
from .sampling import Rates, Sampling

__all__ = ["Resampling"]


class Resampling:
    """Handles the command (`commands.Handler`).

    Args:
        sampling: what it changes.
        step: the step that training is in, as the training thread has it.
    """

    def __init__(self, sampling: Sampling, step: Callable[[], int]) -> None:
        self._sampling = sampling
        self._step = step
        # The newest command, and the answer to it: it comes again on each new connection.
        self._answered: tuple[Facts, Report] | None = None

    def __call__(self, facts: Facts) -> Sequence[Report]:
        number, first, last = facts.get("number"), facts.get("first"), facts.get("last")
        if not isinstance(number, int) or not isinstance(first, int):
            raise ValueError("a command without a number and a first step")
        # Not by its number: a collector that has lost its latest decisions in a power failure gives the number again,
        # to another one; and what it says last is what it knows.
        if self._answered is not None and self._answered[0] == facts:
            return [self._answered[1]]
        self._sampling.override(self._rates(facts), first, last if isinstance(last, int) else None)
        # In this order: a step that training begins between the two is counted as late, and need not be.
        step = self._step()
        report = Report(SAMPLE, {"number": number, "step": step, "late": step >= first})
        self._answered = (dict(facts), report)
        return [report]

    def _rates(self, facts: Facts) -> Rates:
        """What is not given is as configured."""
        configured = self._sampling.configured
        given = {name: value for name in RATES if (value := facts.get(name)) is not None}
        for name, value in given.items():
            check_int(name, value, 1)
        write, console = given.get("interval", configured.write), given.get("print_interval", configured.console)
        compute = given.get("step_interval", configured.compute)
        # Steps that are asked for are computed too, unless something else was said of that.
        wanted = [int(given[name]) for name in ("interval", "print_interval") if name in given]
        if "step_interval" not in given and any(each % configured.compute for each in wanted):
            compute = math.gcd(configured.compute, *wanted)
        return Rates(int(compute), int(write), None if console is None else int(console))
