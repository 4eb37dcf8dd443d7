"""Pure: which steps are computed, written and printed (SPEC.md section 4, `monitor_config`).

Two stages: `step_interval` says which steps are computed at all, `interval` which of those are written. What is
computed and not written feeds the health checks; where nothing looks at it, it is not computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..collector.protocol.checks import check_int

__all__ = ["Due", "Rates", "Sampling"]

# Each is told at most some steps before it begins.
_KEPT_OVERRIDES = 4


@dataclass(frozen=True, slots=True)
class Rates:
    """Every how many steps.

    Attributes:
        compute: `step_interval`.
        write: `interval`.
        console: `print_interval`; None: nothing goes to the console.

    Raises:
        RecordError: one is no positive integer.
    """

    compute: int = 1
    write: int = 1
    console: int | None = None

    def __post_init__(self) -> None:
        check_int("compute", self.compute, 1)
        check_int("write", self.write, 1)
        if self.console is not None:
            check_int("console", self.console, 1)

    @property
    def written_every(self) -> int:
        """Only what is computed can be written: the steps that are multiples of both."""
        return math.lcm(self.compute, self.write)

    @property
    def printed_every(self) -> int | None:
        """The same for the console."""
        return None if self.console is None else math.lcm(self.compute, self.console)


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be done with one step; written and printed steps are computed ones."""

    compute: bool
    write: bool
    console: bool


class Sampling:
    """Decides for each step; a decision depends on the step's number alone, so all ranks decide alike.

    Args:
        rates: what the configuration says.
        watched: health checks look at what is computed, so it is computed where it is not written, too.
    """

    def __init__(self, rates: Rates | None = None, *, watched: bool = False) -> None:
        self._rates = rates or Rates()
        self._watched = watched
        # Rates with their first and last step, by their first step.
        self._overrides: tuple[tuple[Rates, int, int | None], ...] = ()

    @property
    def configured(self) -> Rates:
        """What the configuration says."""
        return self._rates

    def override(self, rates: Rates, first: int, last: int | None = None) -> None:
        """Other rates for the steps `first` to `last`, both included (None: from `first` on); the newest call holds.

        What was said before goes on holding for the steps before `first`. Ranks that are told before their step `first`
        change at the same step, and back. May be called by another thread than asks.
        """
        check_int("first", first, 1)
        if last is not None:
            check_int("last", last, first)
        # Those that begin earlier still hold until then; the others are replaced.
        earlier = [each for each in self._overrides if each[1] < first]
        self._overrides = (*earlier[-_KEPT_OVERRIDES:], (rates, first, last))

    def rates(self, step: int) -> Rates:
        """The rates that hold for this step."""
        newest = next((each for each in reversed(self._overrides) if step >= each[1]), None)
        if newest is not None and (newest[2] is None or step <= newest[2]):
            return newest[0]
        return self._rates

    def due(self, step: int) -> Due:
        """What is to be done with this step."""
        rates = self.rates(step)
        console_every = rates.printed_every
        write = step % rates.written_every == 0
        console = console_every is not None and step % console_every == 0
        compute = step % rates.compute == 0 and (write or console or self._watched)
        return Due(compute, write, console)
