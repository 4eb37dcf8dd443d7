"""`rankd rebuild`: the journal alone gives all logs again."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

import pytest

from rankd.collector.cli import main
from rankd.collector.rebuild import printers_for, progress_line

from .streams import training
from .written import entries_of, write_run

RANKS = [training(rank, 3, steps=range(1, 4)) for rank in range(3)]


def logs(output: Path) -> dict[str, bytes]:
    """All files but those of the collector itself."""
    files = [path for path in output.rglob("*") if path.is_file() and ".rankd" not in path.parts]
    return {str(path.relative_to(output)): path.read_bytes() for path in files}


@pytest.mark.parametrize("segment_size", [600, 2**20])
def test_byte_for_byte_and_the_run_is_only_read(tmp_path: Path, segment_size: int) -> None:
    """In one segment or in many; nothing of the run is touched, not even its lock."""
    output, into = tmp_path / "out", tmp_path / "deep" / "again"
    write_run(output, entries_of(RANKS), segment_size=segment_size)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    assert main(["rebuild", str(output), "--into", str(into)]) == 0
    assert logs(into) == logs(output)
    assert set(logs(into)) == {"merged.log", *(f"rank_{rank}/monitor.log" for rank in range(3))}
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


def test_logs_that_are_gone_come_back(tmp_path: Path) -> None:
    """The journal alone is enough; a torn tail is left out, and told."""
    write_run(tmp_path / "whole", entries_of(RANKS))
    write_run(tmp_path / "out", entries_of(RANKS), logs=False)
    with (tmp_path / "out" / ".rankd" / "journal" / "00000001.journal").open("ab") as file:
        file.write(b"\x20\0\0\0")
    assert main(["rebuild", str(tmp_path / "out"), "--into", str(tmp_path / "again")]) == 0
    assert logs(tmp_path / "again") == logs(tmp_path / "whole")


def test_damage_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What comes before it is made; the status says that it is not all."""
    write_run(tmp_path / "out", entries_of(RANKS))
    journal = tmp_path / "out" / ".rankd" / "journal" / "00000001.journal"
    raw = bytearray(journal.read_bytes())
    raw[len(raw) // 2] ^= 1
    journal.write_bytes(raw)
    assert main(["rebuild", str(tmp_path / "out"), "--into", str(tmp_path / "again")]) == 1
    told = capsys.readouterr()
    assert f"{journal} is damaged at byte " in told.err
    assert "unfinished" not in told.out
    whole, made = ((tmp_path / name / "merged.log").read_bytes() for name in ("out", "again"))
    assert whole.startswith(made)
    assert 0 < len(made) < len(whole)


@pytest.mark.parametrize(
    ("into", "said"),
    [("out", "lies in the run's own directory"), ("out/x", "lies in the run's own"), ("full", "is not an empty")],
)
def test_nothing_is_written_over(tmp_path: Path, into: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Not into the run, not below it, not beside other files."""
    write_run(tmp_path / "out", entries_of(RANKS))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    assert main(["rebuild", str(tmp_path / "out"), "--into", str(tmp_path / into)]) == 2
    assert said in capsys.readouterr().err


def test_what_was_deleted_cannot_be_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rankd.journal.keep` has its price, and it is told before anything is written."""
    write_run(tmp_path / "out", entries_of(RANKS), segment_size=600, keep=0)
    assert main(["rebuild", str(tmp_path / "out"), "--into", str(tmp_path / "again")]) == 2
    assert "were deleted (rankd.journal.keep)" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is renewed, and gone at the end."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setattr("rankd.collector.rebuild._SHOW_EVERY", 0.0)
        with progress_line("rebuilding") as show:
            show(2**20, 4 * 2**20)
        said = os.read(ours, 1_000)
    os.close(ours)
    assert said == b"\rrebuilding:  25 % of 4 MiB\r\x1b[K"


def test_a_small_journal_takes_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To start others takes longer than it would save; a large one takes one for each processor."""
    write_run(tmp_path / "out", entries_of(RANKS))
    monkeypatch.setattr(sys, "executable", "not to be started")
    main(["rebuild", str(tmp_path / "out"), "--into", str(tmp_path / "again")])
    assert logs(tmp_path / "again") == logs(tmp_path / "out")
    assert printers_for(2**20) == 0
    usable = len(os.sched_getaffinity(0))
    assert printers_for(2**30) == (0 if usable == 1 else min(8, usable))


def test_one_processor_takes_one_process() -> None:
    """However large the journal is: there is nothing to share."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    try:
        assert printers_for(2**40) == 0
    finally:
        os.sched_setaffinity(0, usable)


@pytest.mark.parametrize("asked", ["-1", "65", "two", "1.5"])
def test_a_number_of_processes_that_is_none(tmp_path: Path, asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is allowed is said."""
    with pytest.raises(SystemExit):
        main(["rebuild", str(tmp_path), "--into", str(tmp_path / "again"), f"--printers={asked}"])
    assert f"expected a whole number from 0 to 64, found {asked}" in capsys.readouterr().err
