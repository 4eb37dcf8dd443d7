"""Figures that benchmarks measure, their bounds, and the table of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Figure", "command", "machine", "median", "ratio", "show", "skipped"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number.

    Attributes:
        name: what it is.
        measured: None: not measured, and `note` says why.
        unit: of `measured` and of `bound`.
        bound: None: there is none; the figure is there to be compared with.
        at_least: the bound is the least that is allowed; otherwise the most.
        note: what limits it, or how it was measured.
    """

    name: str
    measured: float | None
    unit: str = ""
    bound: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def met(self) -> bool | None:
        """None: no bound, or not measured."""
        if self.bound is None or self.measured is None:
            return None
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def row(self) -> str:
        """A line of the table."""
        sign = "" if self.bound is None else f"{'>=' if self.at_least else '<='} {self.bound:g}"
        measured = "-" if self.measured is None else f"{self.measured:.4g}"
        word = {True: "met", False: "MISSED", None: ""}[self.met] if self.measured is not None else "skipped"
        return f"{self.name:58} {measured:>9} {self.unit:14} {sign:10} {word:8} {self.note}".rstrip()


def skipped(name: str, why: str) -> Figure:
    """A figure that cannot be measured here."""
    return Figure(name, None, note=why)


def median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def ratio(values: Sequence[float], baseline: Sequence[float]) -> float:
    """The median of the ratios of two series that were measured by turns."""
    return median(value / base for value, base in zip(values, baseline, strict=True))


def machine() -> dict[str, object]:
    """What the figures depend on."""
    return {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "machine": os.uname().machine}


def show(figures: Iterable[Figure]) -> None:
    """Print the rows as they come."""
    for figure in figures:
        print(figure.row(), flush=True)


def command(
    doc: str | None,
    measure: Callable[[argparse.Namespace], Iterable[Figure]],
    declare: Callable[[argparse.ArgumentParser], None] = lambda _: None,
) -> None:
    """The command line of one benchmark.

    Args:
        doc: its docstring.
        measure: gives the figures; its argument has `quick`: a smaller load, to see that it works.
        declare: adds its own options.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small load and few repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    declare(parser)
    args = parser.parse_args()
    print("{cores} cores, load {load}".format(**machine()), flush=True)
    figures = []
    for figure in measure(args):
        show([figure])
        figures.append(figure)
    if args.json:
        rows = [{**dataclasses.asdict(figure), "met": figure.met} for figure in figures]
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
