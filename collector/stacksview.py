"""`rankd stacks OUTPUT`: where each rank is at this moment, for training that stands still."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from .asking import add_arguments as add_place
from .asking import asker_of
from .protocol.ranges import ranks_text
from .protocol.steering import STACKS
from .stacks import STACKS_FOUND

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_place(parser)
    parser.add_argument("--rank", metavar="LIST", help="these ranks, such as 0,2-3; default: all that are connected")
    parser.add_argument("--threads", action="store_true", help="all threads of the process, not only the main one")
    parser.add_argument("--wait", type=float, default=5.0, metavar="SECONDS", help="for answers, at most (default 5)")


def run(args: argparse.Namespace) -> int:
    """0: all have answered; 1: some have not."""
    with asker_of(args) as asker:
        answer = asker.ask(STACKS, {"ranks": args.rank, "threads": args.threads})
        answer = asker.while_waiting(answer, STACKS_FOUND, args.wait)
    for group in answer["groups"]:
        print(_heading(group))
        print(group["text"])
    if answer["waiting"]:
        print(
            f"no answer from {ranks_text(answer['waiting'])} within {args.wait:g} s: stopped, or something holds the "
            "interpreter lock there (py-spy, run on that machine, looks from outside)"
        )
    if answer["gone"]:
        print(f"gone since: {ranks_text(answer['gone'])}")
    return 1 if answer["waiting"] or answer["gone"] else 0


def _heading(group: Mapping[str, Any]) -> str:
    (first, micro_first), (last, micro_last) = group["from"], group["to"]
    at = f"step {first} micro_step {micro_first}"
    until = "" if group["from"] == group["to"] else f" to step {last} micro_step {micro_last}"
    return f"== {'rank' if group['count'] == 1 else 'ranks'} {group['ranks']}, {at}{until}"
