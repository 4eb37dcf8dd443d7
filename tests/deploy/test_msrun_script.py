"""The start script's command line; that it starts training is part of the tests with real MindSpore."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "msrun.sh"


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, timeout=30
    )


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter that says how it was called, in place of the one that would start MindSpore."""
    path = tmp_path / "python"
    path.write_text(
        "#!/bin/sh\n"
        '[ "$1" = -c ] && { echo 41234; exit; }\n'
        'echo "$@"; echo "blocking=${MS_DEV_LAUNCH_BLOCKING-} omp=${OMP_NUM_THREADS-}"\n'
    )
    path.chmod(0o755)
    return str(path)


def test_help_names_every_option() -> None:
    """And exits with success."""
    done = start("--help")
    assert done.returncode == 0
    for option in ("--workers", "--port", "--log-dir", "--config", "--script", "--timeout", "--cpu"):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "0"], "--workers must be a positive integer, got '0'"),
        (["--workers"], "--workers needs a value"),
        (["--port", "x"], "--port must be a port number, got 'x'"),
        (["--config", "nowhere.yaml"], "no configuration 'nowhere.yaml'"),
        (["--script", "nowhere.py"], "no training script 'nowhere.py'"),
        (["--steps", "3"], "unknown option '--steps'; arguments of the training script go after --"),
    ],
)
def test_a_wrong_argument_is_an_error_that_says_what_is_wrong(arguments: list[str], said: str) -> None:
    """Before anything is started."""
    done = start(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_options_and_the_scripts_own_arguments_reach_msrun(tmp_path: Path, python: str) -> None:
    """A free port is picked where none is given; the settings for the CPU only come with --cpu."""
    logs = tmp_path / "logs"
    done = start("-n", "2", "-l", str(logs), "--", "--steps", "3", PYTHON=python, OMP_NUM_THREADS="")
    assert done.returncode == 0, done.stderr
    assert "--worker_num=2 --local_worker_num=2 --master_addr=127.0.0.1 --master_port=41234" in done.stdout
    assert f"train.py --config {ROOT / 'deploy' / 'example' / 'train.yaml'} --steps 3\n" in done.stdout
    assert logs.is_dir()


def test_the_environment_stands_in_for_options_and_the_cpu_settings_can_be_overridden(
    tmp_path: Path, python: str
) -> None:
    """An option wins over its variable; what the caller has set of the CPU settings stays."""
    environment = {"PYTHON": python, "WORKERS": "3", "MASTER_PORT": "8119", "LOG_DIR": str(tmp_path / "logs")}
    done = start("--cpu", "--port", "8120", **environment, MS_DEV_LAUNCH_BLOCKING="", OMP_NUM_THREADS="4")
    assert done.returncode == 0, done.stderr
    assert "--worker_num=3" in done.stdout
    assert "--master_port=8120" in done.stdout
    assert "blocking=1 omp=4" in done.stdout
