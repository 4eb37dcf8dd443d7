"""`rankd simulate` as a command, with outputs and rotation as a training YAML asks for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..support import PATIENCE, wait_for

CONFIG = """
rankd:
  output: elsewhere
  outputs: [{type: jsonl, metrics: [local_loss]}]
  logs: {rotate_size: 64KiB}
  spool: {directory: spools}
  linger: 0.5
monitor:
  train_state: {local_norm: true}
"""


def simulate(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankd.collector", "simulate", "--output", "out", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.slow
def test_the_section_of_a_training_yaml_holds(tmp_path: Path) -> None:
    """Outputs are written and logs rotated, and each block is seen all the same; the output is the option's."""
    (tmp_path / "train.yaml").write_text(CONFIG)
    options = ("--ranks", "2", "--steps", "8", "--params", "300", "--rate", "0")
    done = simulate(tmp_path, "--config", "train.yaml", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"complete: {2 * 8 * 4} blocks of 2 ranks" in done.stdout
    wait_for(lambda: "(status 0)" in (tmp_path / "out" / ".rankd" / "collector.log").read_text())
    assert list((tmp_path / "out").glob("merged.log.*"))
    assert len((tmp_path / "out" / "records.jsonl").read_text().splitlines()) == 2 * 8 * 4
    assert not (tmp_path / "elsewhere").exists()


def test_a_wrong_yaml_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    """It names the key; no directory is made."""
    (tmp_path / "train.yaml").write_text("rankd: {outputs: [{type: json}]}")
    done = simulate(tmp_path, "--config", "train.yaml")
    assert done.returncode == 2
    assert "rankd.outputs[0].type" in done.stderr
    assert not (tmp_path / "out").exists()
