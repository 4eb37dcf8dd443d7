"""The command `rankd` itself."""

from __future__ import annotations

from importlib import metadata

import pytest

from rankd.collector.cli import main


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    """`rankd --version`, for reports of bugs."""
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"rankd {metadata.version('rankd')}\n"
