"""The table of the benchmarks says of each bound whether it was met."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.bench.figures import Figure, command, skipped


@pytest.mark.parametrize(
    ("measured", "at_least", "met"), [(5.0, True, True), (4.9, True, False), (5.0, False, True), (5.1, False, False)]
)
def test_a_bound_is_the_least_or_the_most(measured: float, at_least: bool, met: bool) -> None:
    """And the row says MISSED where it is."""
    figure = Figure("rate", measured, "M", 5.0, at_least)
    assert figure.met is met
    assert ("MISSED" in figure.row()) is not met


def test_what_was_not_measured_says_why() -> None:
    """It is neither met nor missed."""
    figure = skipped("rate", "not installed here")
    assert figure.met is None
    assert "skipped" in figure.row()
    assert "not installed here" in figure.row()


def test_the_command_prints_and_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row each, and the same as JSON."""

    def measure(args: argparse.Namespace) -> Iterator[Figure]:
        yield Figure("quick" if args.quick else "full", 1.5, "s", 2.0)

    monkeypatch.setattr(sys, "argv", ["bench", "--quick", "--json", str(tmp_path / "x.json")])
    command("doc", measure)
    assert "quick" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "x.json").read_text())
    assert (row["name"], row["measured"], row["met"]) == ("quick", 1.5, True)
