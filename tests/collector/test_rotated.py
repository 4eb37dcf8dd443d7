"""Readers of rotated logs see one log, and say what is missing of it."""

from __future__ import annotations

import gzip
import json
import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankd.collector import cli
from rankd.collector.cli import main
from rankd.collector.history import History
from rankd.collector.parsing import records_of_log
from rankd.collector.protocol.records import Comment
from rankd.collector.run import Released
from rankd.collector.selection import Selection
from rankd.collector.sinks import gzipped, keeper, merged_index
from rankd.collector.sinks.keeper import DELETED
from rankd.collector.sinks.merged_index import MERGED_INDEX
from rankd.collector.sinks.parts import layout_of, part_path, parts_of
from rankd.collector.sinks.retention import Retention, Rotation
from rankd.collector.sinks.speclog import MERGED_LOG, rank_log
from rankd.collector.verify import Verification

from ..support import whole_log
from .releases import begin, late, steps, write_logs
from .streams import training
from .test_following import RANKS, expected, records, selections
from .test_tail import tail
from .written import entries_of, write_run

SMALL = Rotation(size=4_000)
TRAININGS = [training(rank, 3, steps=range(1, 30)) for rank in range(3)]


def pack(log: Path, *numbers: int) -> None:
    """Compress these of its parts, as everybody's gzip does."""
    parts = parts_of(log)
    for number in numbers:
        path = parts[number].path
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


def forget(output: Path, name: str, count: int) -> None:
    """Delete its oldest parts, as `rankd.logs` does."""
    for part in parts_of(output / name)[:count]:
        part.path.unlink()
    path = output / DELETED
    path.parent.mkdir(exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, name: layout_of(output / name).start}))


def findings(output: Path) -> list[str]:
    check = Verification(output)
    check.run()
    return [str(finding) for finding in check.findings]


# -- history ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two attempts, with late blocks and lines about the run, in one file; the index has small chunks."""
    return made(tmp_path_factory.mktemp("whole"), None)


@pytest.fixture(scope="module")
def rotated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in parts, most of which are compressed."""
    path = made(tmp_path_factory.mktemp("rotated"), SMALL)
    pack(path / MERGED_LOG, *range(len(parts_of(path / MERGED_LOG)) - 2))
    return path


@pytest.fixture(scope="module")
def bare(rotated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without an index."""
    path = tmp_path_factory.mktemp("bare") / "out"
    shutil.copytree(rotated, path, ignore=shutil.ignore_patterns(".rankd"))
    return path


def made(path: Path, rotation: Rotation | None) -> Path:
    released: list[Released] = [*begin(1, ranks=RANKS), *steps(1, 12, ranks=RANKS), late(3, 1)]
    released += [*steps(13, 16, ranks=RANKS), Comment(None, "rank_lost", "rank 1: silent"), *begin(2, ranks=RANKS)]
    released += [*steps(11, 24, attempt=2, ranks=(0, 2, 66)), late(15, 1), Comment(2, "anomaly", "of rank 2")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merged_index, "CHUNK_BYTES", 1_500)
        write_logs(path, released, rotation=rotation)
    return path


def test_the_parts_are_the_log(whole: Path, rotated: Path) -> None:
    """Byte for byte, for each log; the index is the same."""
    assert len(parts_of(rotated / MERGED_LOG)) > 5
    for name in (MERGED_LOG, *map(rank_log, RANKS)):
        assert whole_log(rotated / name) == (whole / name).read_bytes()
    assert (rotated / MERGED_INDEX).read_bytes() == (whole / MERGED_INDEX).read_bytes()


@pytest.mark.parametrize("indexed", [True, False])
@settings(max_examples=30)
@given(selection=selections, count=st.none() | st.integers(0, 100))
def test_history_is_that_of_one_file(
    whole: Path, rotated: Path, bare: Path, indexed: bool, selection: Selection, count: int | None
) -> None:
    """All that is wanted, or its last lines, with an index and without one."""
    with History(rotated if indexed else bare, selection, records=True) as history:
        found = records(history.all() if count is None else history.last(count), selection)
        assert history.notes() == []
    wanted = expected(whole, selection)
    assert found == wanted[len(wanted) - len(found) :]
    if count is None:
        assert found == wanted


def test_compressed_parts_that_are_not_needed_are_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a log that is all but compressed, a few members are decompressed for the last lines of a rank, or a step."""
    monkeypatch.setattr(gzipped, "MEMBER_BYTES", 4_000)
    monkeypatch.setattr(merged_index, "CHUNK_BYTES", 4_000)
    write_logs(tmp_path, [*begin(1), *steps(1, 200)], rotation=Rotation(size=50_000))
    log = tmp_path / MERGED_LOG
    keeper._Round(tmp_path, Retention(compress=True), threading.Event()).run({MERGED_LOG}, {MERGED_LOG: 2**40})
    log.rename(part_path(log, layout_of(log).base, layout_of(log).end))
    keeper._Round(tmp_path, Retention(compress=True), threading.Event()).run({MERGED_LOG}, {MERGED_LOG: 2**40})
    members = len(whole_log(log)) // 4_000
    taken: set[tuple[Path, int]] = set()
    text_of = gzipped.GzipReader._text

    def counted(self: gzipped.GzipReader, number: int) -> bytes:
        taken.add((self._path, number))
        return text_of(self, number)

    monkeypatch.setattr(gzipped.GzipReader, "_text", counted)
    monkeypatch.setattr("rankd.collector.history._LINE_LOOK", 200)
    for selection, count in ((Selection(frozenset({2})), 20), (Selection(steps=(77, 77)), None)):
        taken.clear()
        with History(tmp_path, selection) as history:
            assert list(history.all() if count is None else history.last(count))
        # The check that the index fits looks at three places.
        assert len(taken) <= 12 < members / 5


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("deleted", [1, 3, 9])
def test_what_is_left_after_the_oldest_parts_were_deleted(
    whole: Path, rotated: Path, tmp_path: Path, indexed: bool, deleted: int
) -> None:
    """The rest is there, with its attempts where the index tells them; and what is missing is told."""
    place = tmp_path / "out"
    shutil.copytree(rotated, place, ignore=None if indexed else shutil.ignore_patterns(".rankd"))
    forget(place, MERGED_LOG, deleted)
    gone = layout_of(place / MERGED_LOG).start
    raw = (whole / MERGED_LOG).read_bytes()
    with History(place, Selection()) as history:
        assert b"".join(line.text for line in history.all()) == raw[gone:]
        assert history.notes() == [f"the first {gone} bytes of {place / MERGED_LOG} are gone: older parts were deleted"]
    selection = Selection(steps=(16, 24), metrics=frozenset({"lr"}))
    with History(place, selection, records=True) as history:
        found = records(history.all(), selection)
    wanted = expected(whole, selection)[-len(found) :]
    assert len(found) >= 27
    if indexed:
        assert found == wanted
    assert [(r.position.step, r.rank, r.value) for r in found] == [(r.position.step, r.rank, r.value) for r in wanted]
    with History(place, Selection()) as history:
        assert b"".join(line.text for line in history.last(5)) == b"".join(raw.splitlines(keepends=True)[-5:])
        assert history.notes() == []


@pytest.mark.parametrize(
    ("choice", "further"),
    [
        (["--rank", "2"], "; rank_2/monitor.log may reach further back"),
        (["--rank", "0,2"], "; the ranks' own logs may reach further back"),
        ([], "; the ranks' own logs may reach further back"),
    ],
)
def test_steps_that_are_gone_are_not_said_to_be_none(
    rotated: Path, tmp_path: Path, choice: list[str], further: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log no longer begins at its first byte: what was asked for was recorded, and may be found elsewhere."""
    place = tmp_path / "out"
    shutil.copytree(rotated, place)
    forget(place, MERGED_LOG, len(parts_of(place / MERGED_LOG)) - 1)
    assert cli.main(["tail", str(place), "--step", "1", "--attempt", "1", *choice]) == 0
    gone = layout_of(place / MERGED_LOG).start
    assert capsys.readouterr().err.splitlines() == [
        "note: nothing of what is still there is what was asked for",
        f"note: the first {gone} bytes of {place / MERGED_LOG} are gone: older parts were deleted{further}",
    ]


def test_a_hole_is_told_and_stepped_over(whole: Path, rotated: Path, tmp_path: Path) -> None:
    """A part in the middle is lost: the lines on both sides are shown."""
    place = tmp_path / "out"
    shutil.copytree(rotated, place)
    lost = parts_of(place / MERGED_LOG)[2]
    lost.path.unlink()
    raw = (whole / MERGED_LOG).read_bytes()
    with History(place, Selection()) as history:
        assert b"".join(line.text for line in history.all()) == raw[: lost.start] + raw[lost.end :]
        (note,) = history.notes()
    assert f"bytes {lost.start} to {lost.end} are missing" in note


def test_the_command_shows_it_as_one(rotated: Path, whole: Path) -> None:
    """`rankd tail` itself: across all parts, and a step in a compressed one."""
    assert tail(rotated, "-n", "1000000") == (whole / MERGED_LOG).read_text()
    assert tail(rotated, "--step", "2", "--rank", "66") == tail(whole, "--step", "2", "--rank", "66")


def test_a_damaged_part_is_an_error_that_names_it(
    rotated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not an empty answer, and not a traceback."""
    place = tmp_path / "out"
    shutil.copytree(rotated, place)
    part = parts_of(place / MERGED_LOG)[0]
    part.path.write_bytes(b"no gzip file")
    assert cli.main(["tail", str(place), "--step", "1:3"]) == 2
    assert f"{part.path} is damaged" in capsys.readouterr().err


# -- parse ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [MERGED_LOG, rank_log(2)])
def test_parse_reads_all_parts(whole: Path, rotated: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the log's name; parts that are named beside it are not read twice, and one part alone can be read."""
    everything = list(records_of_log(whole / name))
    assert list(records_of_log(rotated / name)) == everything
    parts = [str(part.path) for part in parts_of(rotated / name)]
    assert main(["parse", *parts, str(rotated / name), "-o", "/dev/null"]) == 0
    assert f"{len(everything)} records of 1 log" in capsys.readouterr().err
    first = list(records_of_log(Path(parts[0])))
    assert first == everything[: len(first)] != []


def test_parse_says_what_is_gone(
    whole: Path, rotated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest is read."""
    place = tmp_path / "out"
    shutil.copytree(rotated, place)
    forget(place, MERGED_LOG, 2)
    left = list(records_of_log(place / MERGED_LOG))
    everything = list(records_of_log(whole / MERGED_LOG))
    assert [r.value for r in left] == [r.value for r in everything[-len(left) :]]
    assert "bytes of" in capsys.readouterr().err


# -- verify and rebuild -----------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three ranks, several segments, all logs rotated."""
    write_run(tmp_path / "out", entries_of(TRAININGS), segment_size=2_000, rotation=Rotation(size=1_000))
    assert len(parts_of(tmp_path / "out" / MERGED_LOG)) > 5
    assert len(parts_of(tmp_path / "out" / rank_log(1))) > 2
    return tmp_path / "out"


def test_rotated_logs_are_verified_and_rebuilt(run: Path, tmp_path: Path) -> None:
    """Compressed or not; what is rebuilt is one file that has the same bytes."""
    pack(run / MERGED_LOG, 0, 1, 2)
    pack(run / rank_log(1), 0)
    assert findings(run) == []
    assert main(["rebuild", str(run), "--into", str(tmp_path / "again")]) == 0
    for name in (MERGED_LOG, *map(rank_log, range(3))):
        assert (tmp_path / "again" / name).read_bytes() == whole_log(run / name)


def test_what_was_deleted_is_no_fault_and_the_rest_is_checked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says which bytes were not checked; an edit in what is left is found in either log."""
    forget(run, MERGED_LOG, 3)
    assert main(["verify", str(run)]) == 0
    start = layout_of(run / MERGED_LOG).start
    assert f"deleted as rankd.logs says, so not checked: merged.log up to byte {start}" in capsys.readouterr().out
    forget(run, rank_log(0), 2)
    assert findings(run) == []
    path = run / rank_log(2)
    path.write_bytes(path.read_bytes().replace(b"loss", b"lost", 1))
    assert any(str(path) in one for one in findings(run))


def test_rank_logs_that_begin_later_than_the_merged_log(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are compared with the journal only, and that is told."""
    forget(run, rank_log(1), 1)
    assert main(["verify", str(run)]) == 0
    assert "the lines of 1 rank in merged.log are not compared" in capsys.readouterr().out


def test_what_nobody_meant_to_delete_is_found(run: Path) -> None:
    """A part that is gone, at the beginning, in the middle or as the newest; one that is damaged or too short."""
    log = run / MERGED_LOG
    parts = parts_of(log)
    kept = {part.path: part.path.read_bytes() for part in parts}
    for number in (0, 2, len(parts) - 1):
        parts[number].path.unlink()
        found = findings(run)
        assert found != [], number
        assert all("merged.log" in one for one in found)
        parts[number].path.write_bytes(kept[parts[number].path])
    assert findings(run) == []
    parts[3].path.write_bytes(kept[parts[3].path][:-10])
    assert findings(run) != []
    parts[3].path.write_bytes(kept[parts[3].path])
    pack(log, 1)
    packed = parts_of(log)[1].path
    packed.write_bytes(packed.read_bytes()[:-20] + bytes(20))
    assert any(f"{packed}: expected a whole part of the log, found is damaged" in one for one in findings(run))


def test_verify_of_a_journal_whose_beginning_is_deleted_too(tmp_path: Path) -> None:
    """Both were kept for a while only: what is left of both agrees."""
    write_run(tmp_path, entries_of(TRAININGS), segment_size=2_000, keep=8_000, rotation=Rotation(size=1_000))
    forget(tmp_path, MERGED_LOG, 1)
    assert findings(tmp_path) == []
    forget(tmp_path, MERGED_LOG, len(parts_of(tmp_path / MERGED_LOG)) - 1)
    assert findings(tmp_path) == []
