"""Numbers on the command line, and what a person is told who gives something else."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

__all__ = ["Parser", "whole_number"]


class Parser(argparse.ArgumentParser):
    """A parser, also of subcommands, that says of `type=int` and `type=float` what is expected in words."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("type", int, whole_number())
        self.register("type", float, _number)


def whole_number(least: int | None = None, most: int | None = None) -> Callable[[str], int]:
    """The `type` of an argument that is an integer, within bounds (both included) where they are given."""
    bounds = "" if least is None else f", at least {least}" if most is None else f" from {least} to {most}"

    def convert(text: str) -> int:
        try:
            value: int | None = int(text)
        except ValueError:
            value = None
        if value is None or (least is not None and value < least) or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"expected a whole number{bounds}, found {text}")
        return value

    return convert


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, found {text}") from None
