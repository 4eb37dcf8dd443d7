"""collector/collect.py: `rankd collect`, where it collects to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def collected(folder: Path) -> subprocess.CompletedProcess[str]:
    """`rankd collect` with the configuration there, and without ranks."""
    return subprocess.run(
        [sys.executable, "-m", "rankd.collector", "collect", "--config", "train.yaml", "--patience", "0.1"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("yaml", "output"),
    [
        ("rankd: {output: a}\n", "a"),
        ("monitor_config: {monitor_on: True, dump_path: b/rank_{rank}}\n", "b"),
        ("monitor_config: {monitor_on: False, dump_path: b}\nrankd: {output: a}\n", "a"),
    ],
)
def test_the_output_of_either_form(tmp_path: Path, yaml: str, output: str) -> None:
    """`--config` takes `rankd.output`, or `monitor_config.dump_path` where that section is on, as the agents do."""
    (tmp_path / "train.yaml").write_text(yaml.replace("b/rank_{rank}", '"b/rank_{rank}"'))
    done = collected(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [output], done.stderr
    assert "did you mean" not in done.stderr


def test_a_misspelt_section_is_warned_of(tmp_path: Path) -> None:
    """Its settings are not in effect, so the log lies elsewhere than one would think."""
    (tmp_path / "train.yaml").write_text("rankdd: {output: a}\n")
    done = collected(tmp_path)
    assert "WARNING rankdd: not used by rankd; did you mean `rankd`?" in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["rankd-output"]
