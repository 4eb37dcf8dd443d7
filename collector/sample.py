"""`rankd sample OUTPUT --interval 1 --for-steps 500`: record other steps than configured, on all ranks alike."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from .asking import add_arguments as add_place
from .asking import asker_of
from .protocol.errors import RankdError
from .protocol.ranges import ranks_text
from .protocol.steering import SAMPLE, sampled_text
from .sampler import STATUS

__all__ = ["add_arguments", "run"]

# How long ranks may take to confirm; one that sits in a long step still answers, its sender is a thread of its own.
_CONFIRM_WITHIN = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_place(parser)
    parser.add_argument("--interval", type=int, metavar="N", help="write each Nth step (and compute it)")
    parser.add_argument("--step-interval", type=int, metavar="N", help="compute, and check, each Nth step")
    parser.add_argument("--print-interval", type=int, metavar="N", help="print each Nth step to the ranks' output")
    parser.add_argument("--for-steps", type=int, metavar="N", help="and go back after N steps; without: for good")
    parser.add_argument("--reset", action="store_true", help="as configured again, from the next possible step on")


def run(args: argparse.Namespace) -> int:
    """0: all ranks that are connected change at the same step; 1: some have not said so."""
    rates = {"interval": args.interval, "step_interval": args.step_interval, "print_interval": args.print_interval}
    given = {name: value for name, value in rates.items() if value is not None}
    if args.reset == bool(given) or (args.reset and args.for_steps is not None):
        raise RankdError("give --interval, --step-interval or --print-interval, or else --reset alone")
    if args.for_steps is not None:
        given["for_steps"] = args.for_steps
    with asker_of(args) as asker:
        answer = asker.ask(SAMPLE, given)
        answer = asker.while_waiting(answer, STATUS, _CONFIRM_WITHIN)
    print(_text(answer))
    return 1 if answer["waiting"] else 0


def _text(answer: Mapping[str, Any]) -> str:
    confirmed, waiting = answer["confirmed"], answer["waiting"]
    ranks = ranks_text(confirmed) if confirmed else "no rank"
    silent = f"; not confirmed by {ranks_text(waiting)}" if waiting else ""
    return f"{sampled_text(answer['facts'])}; confirmed by {ranks}{silent}"
