"""The command `rankd check`: files, the machine and the exit status."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from rankd.collector.cli import main

YAML = """
monitor: {train_state: {local_norm: ["weight"], local_loss: True}}
rankd: {output: out}
"""
MODEL = """
from layers import Parameter  # beside this file

class Model:
    def trainable_params(self):
        return [Parameter("decoder.layers.0.weight"), Parameter("decoder.layers.0.bias")]

def build():
    return Model()

def fails():
    raise ValueError("no device")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a YAML and a model, which is the current one."""
    (tmp_path / "train.yaml").write_text(YAML)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "layers.py").write_text("class Parameter:\n    def __init__(self, name):\n        self.name = name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GLOG_v", raising=False)
    return tmp_path


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit status of `rankd check train.yaml …`, and what it printed."""
    status = main(["check", "train.yaml", *arguments])
    return status, capsys.readouterr().out


def test_a_good_configuration_is_usable(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 0; versions, free disk and the sums are there."""
    status, said = check(capsys, "--world-size", "8", "--micro-steps", "4", "--steps", "100", "--step-seconds", "0.5")
    assert status == 0
    assert "by ranks 0-7; 4 micro-steps a step, 100 steps" in said
    assert "an hour at 0.5 s a step" in said
    assert "assumed" not in said
    assert said.splitlines()[-1].startswith("train.yaml: usable (0 errors, ")


def test_the_model_is_built_and_matched(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--model FILE.py:FUNCTION` imports the file as if it were run in its folder, and lists what filters match."""
    status, said = check(capsys, "--model", "model.py:build")
    assert status == 0
    assert 'monitor.train_state.local_norm "weight": 1 of 2\n    decoder.layers.0.weight' in said


def test_a_filter_without_a_match_is_status_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt filter is an error that the exit status tells."""
    (folder / "train.yaml").write_text(YAML.replace("weight", "wieght"))
    status, said = check(capsys, "--model", "model.py:build")
    assert status == 1
    assert '"wieght" matches none of the 2 trainable parameters; the nearest: weight' in said
    assert said.splitlines()[-1].startswith("train.yaml: not usable (1 error, ")


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("model.py", "allowed: FILE.py:FUNCTION"),
        ("nowhere.py:build", "nowhere.py is not a Python file"),
        ("model.py:bild", "AttributeError"),
        ("model.py:fails", "ValueError: no device"),
        ("layers.py:print", "AttributeError"),
    ],
)
def test_a_model_that_cannot_be_built_is_an_error(
    folder: Path, capsys: pytest.CaptureFixture[str], model: str, complaint: str
) -> None:
    """Whatever is wrong with `--model` is said, and the rest of the report is there."""
    status, said = check(capsys, "--model", model)
    assert status == 1
    assert f"- --model: {model}" in said or "- --model: " in said
    assert complaint in said
    assert "What is recorded" in said


def test_all_errors_of_the_file_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong keys and values are listed with their dotted paths, with and without --json."""
    (folder / "train.yaml").write_text("monitor: {train_state: {local_los: True}}\nprofiler: {end_step: 0}\n")
    status, said = check(capsys)
    assert status == 1
    assert "- monitor.train_state.local_los: unknown key; did you mean `local_loss`?" in said
    assert "- profiler.end_step: found 0" in said
    status, said = check(capsys, "--json")
    assert status == 1
    assert len(json.loads(said)["errors"]) == 2


def test_a_file_that_is_not_there_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A YAML that cannot be read is not one that is wrong: no report, and the status of what could not be done."""
    for file in ("nowhere.yaml", "."):
        for form in ([], ["--json"]):
            assert main(["check", file, *form]) == 2
            told = capsys.readouterr()
            assert told.out == ""
            assert told.err.startswith(f"rankd check: {file}: cannot be read: ")


def test_the_report_for_machines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` gives the same as data."""
    status, said = check(capsys, "--json", "--model", "model.py:build", "--steps", "10")
    report = json.loads(said)
    assert (status, report["status"]) == (0, 0)
    assert report["shape"]["steps"] == 10
    assert report["estimate"]["complete"] is True
    assert report["filters"][0]["names"] == ["decoder.layers.0.weight"]
    assert report["places"][0]["free"] > 0


def test_output_in_a_temporary_directory_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed's story: what lies in a temporary directory is gone after a reboot."""
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    _, said = check(capsys)
    assert f"- rankd.output: out lies in {folder}, which is cleared; choose a lasting directory" in said


def test_levels_that_hide_messages_are_told(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A level above WARNING, set by the model's file say, and GLOG_v=3."""
    monkeypatch.setenv("GLOG_v", "3")
    monkeypatch.setattr(logging.getLogger("rankd.agent"), "level", logging.ERROR)
    logging.getLogger("rankd.agent").manager._clear_cache()  # type: ignore[attr-defined]
    _, said = check(capsys)
    monkeypatch.undo()
    logging.getLogger("rankd.agent").manager._clear_cache()  # type: ignore[attr-defined]
    assert "- logging: the level of the logger rankd.agent is ERROR here" in said
    assert "- logging: GLOG_v=3 hides MindSpore's own warnings" in said


@pytest.mark.parametrize("arguments", [("--steps", "0"), ("--world-size", "x"), ("--step-seconds", "0")])
def test_arguments_that_cannot_be_are_status_2(folder: Path, arguments: tuple[str, ...]) -> None:
    """A wrong call is told from a wrong configuration by its exit status."""
    done = subprocess.run(
        [sys.executable, "-m", "rankd.collector", "check", "train.yaml", *arguments], capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


@pytest.mark.mindspore
def test_a_real_model_is_matched(folder: Path) -> None:
    """The example's model, with real MindSpore: its parameters, and no error for the example's own YAML."""
    example = Path(__file__).parents[2] / "deploy" / "example"
    command = [sys.executable, "-m", "rankd.collector", "check", str(example / "train.yaml"), "--json"]
    done = subprocess.run([*command, "--model", f"{example / 'model.py'}:Model"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {match["filter"]: len(match["names"]) for match in report["filters"]}["word_embeddings"] == 1
