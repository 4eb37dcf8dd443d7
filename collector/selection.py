"""Pure: which records somebody wants to see, and the command-line options that say so."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass

from .protocol.ranges import parse_ranks, parse_steps
from .protocol.records import KNOWN_METRICS, Position, Record
from .settings import nearest

__all__ = ["Selection", "add_arguments", "selection_of"]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which records are wanted; a part that is None leaves all in.

    Attributes:
        ranks, metrics: these only.
        name: text that the parameter's or layer's name contains.
        steps: first and last step, both included.
        attempt: this one only.
        latest: of each position only what the newest attempt has that came through it (`reading` sees to it).
    """

    ranks: frozenset[int] | None = None
    metrics: frozenset[str] | None = None
    name: str | None = None
    steps: tuple[int, int] | None = None
    attempt: int | None = None
    latest: bool = False

    @property
    def by_content(self) -> bool:
        """Whether it asks for metrics or names, not only for whole blocks."""
        return self.metrics is not None or self.name is not None

    def has_rank(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks

    def has_position(self, attempt: int, step: int) -> bool:
        if self.attempt is not None and attempt != self.attempt:
            return False
        return self.steps is None or self.steps[0] <= step <= self.steps[1]

    def has_content(self, metric: str, name: str | None) -> bool:
        if self.metrics is not None and metric not in self.metrics:
            return False
        return self.name is None or (name is not None and self.name in name)

    def has_block(self, rank: int, position: Position) -> bool:
        """Whether a block of this rank and position can have records that are wanted."""
        return self.has_rank(rank) and self.has_position(position.attempt, position.step)

    def has(self, record: Record) -> bool:
        return self.has_block(record.rank, record.position) and self.has_content(record.metric, record.name)

    def nothing(self, *, whole: bool = True) -> str:
        """That nothing is of this selection, for a person; with what may be meant where a metric is none of rankd's.

        Args:
            whole: all that was recorded was looked through; False: what is still there.
        """
        near = {
            metric: nearest(metric, KNOWN_METRICS)
            for metric in sorted((self.metrics or frozenset()) - set(KNOWN_METRICS))
        }
        hints = "".join(f"; did you mean {meant} for {metric}?" for metric, meant in near.items() if meant)
        what = "nothing that was recorded" if whole else "nothing of what is still there"
        return f"{what} is what was asked for{hints}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that all reading commands share."""
    parser.add_argument("--rank", metavar="0,2-3", help="these ranks only")
    parser.add_argument(
        "--metric", action="append", metavar="NAME[,NAME]", help="these metrics only; may be given several times"
    )
    parser.add_argument("--name", metavar="TEXT", help="only what belongs to a parameter or layer whose name has TEXT")
    parser.add_argument("--step", metavar="A:B", help="steps A to B, both included; A: from A on; :B up to B; A alone")
    parser.add_argument("--attempt", type=int, metavar="N", help="this attempt only")


def selection_of(args: argparse.Namespace) -> Selection:
    """What the options of `add_arguments` say.

    Raises:
        RecordError: a list of ranks or a range of steps that is none.
    """
    return Selection(
        None if args.rank is None else parse_ranks(args.rank),
        None if args.metric is None else frozenset(_words(args.metric)),
        args.name,
        None if args.step is None else parse_steps(args.step),
        args.attempt,
        getattr(args, "latest", False),
    )


def _words(options: Iterable[str]) -> Iterable[str]:
    return (word.strip() for option in options for word in option.split(",") if word.strip())
