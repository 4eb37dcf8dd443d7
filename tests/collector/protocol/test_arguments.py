"""What is said of arguments that are no numbers: nothing of how the code calls them."""

from __future__ import annotations

import pytest

from rankd.collector.cli import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("tail out -n x", "-n/--lines: expected a whole number, at least 0, found x"),
        ("tail out -n -1", "-n/--lines: expected a whole number, at least 0, found -1"),
        ("tail out --attempt 1.5", "--attempt: expected a whole number, found 1.5"),
        ("check train.yaml --world-size x", "--world-size: expected a whole number, at least 1, found x"),
        ("check train.yaml --steps 0", "--steps: expected a whole number, at least 1, found 0"),
        ("check train.yaml --step-seconds x", "--step-seconds: expected a number, found x"),
        ("simulate --output out --ranks x", "--ranks: expected a whole number, at least 1, found x"),
        ("rebuild out --into again --printers x", "--printers: expected a whole number from 0 to 64, found x"),
        ("profile start out --steps x", "--steps: expected a whole number, found x"),
        ("profile summary out --top ", "--top: expected a whole number, found "),
    ],
)
def test_what_is_no_number(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Which argument, what is expected, what was found; for subcommands of subcommands too."""
    with pytest.raises(SystemExit) as end:
        main(arguments.split(" "))
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: argument {said}")
