"""What becomes of closed parts: compressed and deleted beside the collector, never what a restart may need."""

from __future__ import annotations

import json
import logging
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankd.collector.sinks import gzipped, keeper
from rankd.collector.sinks.keeper import DELETED, Keeper, deleted_of
from rankd.collector.sinks.parts import parts_of, unfinished_path
from rankd.collector.sinks.retention import Retention, Rotation
from rankd.collector.sinks.speclog import MERGED_LOG, SpecLogSink

from ...support import limit, wait_for, whole_log
from ..releases import begin, steps
from .test_parts import TEXT, lay
from .test_speclog_sink import texts

LOG = "merged.log"
END = {LOG: len(TEXT)}
ENDS = [16, 48, 100, 130]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of four closed parts."""
    return lay(tmp_path / LOG, ENDS)


def kept(log: Path, retention: Retention, safe: dict[str, int]) -> None:
    """One round of the keeper, from its start to its end."""
    keeper._Round(log.parent, retention, threading.Event()).run({LOG, "rank_0/monitor.log"}, safe)


@pytest.fixture
def ended() -> Iterator[list[Keeper]]:
    made: list[Keeper] = []
    yield made
    for each in made:
        each.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rankd-parts"]


def names(log: Path) -> list[str]:
    return sorted(path.name for path in log.parent.iterdir() if path.is_file())


def test_what_a_checkpoint_is_behind_is_compressed(log: Path) -> None:
    """With the time of its last line; what is beyond the checkpoint stays plain."""
    os.utime(parts_of(log)[0].path, (5, 5))
    kept(log, Retention(compress=True), {LOG: 100})
    assert [part.compressed for part in parts_of(log)] == [True, True, True, False]
    assert parts_of(log)[0].path.stat().st_mtime == 5
    assert whole_log(log) == TEXT
    assert len(names(log)) == 5


def test_what_a_kill_left_is_made_good(log: Path) -> None:
    """An unfinished file goes; where both forms are there the plain one counts, and is compressed again."""
    plain = parts_of(log)[0].path
    plain.with_name(plain.name + ".gz").write_bytes(b"half")
    unfinished_path(plain.with_name(plain.name + ".gz")).write_bytes(b"h")
    kept(log, Retention(compress=True), END)
    assert [part.compressed for part in parts_of(log)] == [True] * 4
    assert whole_log(log) == TEXT
    assert len(names(log)) == 5


def test_the_oldest_are_deleted_and_that_is_written_down(log: Path) -> None:
    """So that it can be told from a loss."""
    kept(log, Retention(parts=2), END)
    assert [part.start for part in parts_of(log)] == [48, 100]
    assert deleted_of(log.parent) == {LOG: 48}
    kept(log, Retention(parts=1), END)
    assert deleted_of(log.parent) == {LOG: 100}


def test_nothing_beyond_the_checkpoint_is_deleted_and_the_newest_part_stays(log: Path) -> None:
    """A restart finds what it compares, and where the file that grows begins."""
    kept(log, Retention(size=0), {LOG: 48})
    assert [part.start for part in parts_of(log)] == [48, 100]
    kept(log, Retention(size=0), END)
    assert [part.start for part in parts_of(log)] == [100]


def test_a_part_that_is_too_short_stays_as_it_is(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is missing is for `rankd verify` to tell."""
    os.truncate(parts_of(log)[1].path, 3)
    kept(log, Retention(compress=True), END)
    assert [part.compressed for part in parts_of(log)] == [True, False, True, True]
    assert "has 3 bytes; it stays as it is" in caplog.text


def test_a_full_disk_leaves_the_plain_part(log: Path) -> None:
    """Nothing half-made stays; the other parts are tried too; deleting goes on all the same."""
    it = keeper._Round(log.parent, Retention(parts=3, compress=True), threading.Event())
    with limit(resource.RLIMIT_FSIZE, 8), pytest.raises(OSError, match="File too large") as error:
        it.run({LOG}, END)
    assert error.value.filename == str(log.parent / DELETED)
    assert [(part.start, part.compressed) for part in parts_of(log)] == [(16, False), (48, False), (100, False)]
    assert whole_log(log) == TEXT[16:]
    assert not [name for name in names(log) if "unfinished" in name]
    it.run({LOG}, END)
    assert [part.compressed for part in parts_of(log)] == [True] * 3
    assert deleted_of(log.parent) == {LOG: 16}
    assert whole_log(log) == TEXT[16:]


def test_the_thread_does_it_and_tries_again(log: Path, ended: list[Keeper], caplog: pytest.LogCaptureFixture) -> None:
    """Told once while it fails; a later checkpoint is a later try."""
    it = Keeper(log.parent, Retention(compress=True))
    ended.append(it)
    with limit(resource.RLIMIT_FSIZE, 8):
        it.start([LOG], END)
        wait_for(lambda: caplog.records)
        it.look((), END)
        it.look((LOG,))
        time.sleep(0)
    it.look((), END)
    wait_for(lambda: all(part.compressed for part in parts_of(log)))
    assert len(caplog.records) == 1
    assert whole_log(log) == TEXT


def test_closing_does_not_wait_for_a_large_part(
    tmp_path: Path, ended: list[Keeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun is dropped, and done at the next start."""
    begun = threading.Event()
    member = gzipped._member

    def slowly(text: bytes) -> bytes:
        begun.set()
        return member(text)

    monkeypatch.setattr(gzipped, "_member", slowly)
    text = os.urandom(2**20) * 64
    log = lay(tmp_path / LOG, [len(text)], text=text)
    it = Keeper(tmp_path, Retention(compress=True))
    ended.append(it)
    it.start([LOG], {LOG: len(text)})
    assert begun.wait(60)
    it.close()
    assert names(log) == [LOG, parts_of(log)[0].path.name]
    assert not parts_of(log)[0].compressed


def test_a_fault_of_ours_ends_the_keeper_not_the_logs(
    log: Path, ended: list[Keeper], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it is, it is told with its traceback, and the parts stay."""
    monkeypatch.setattr(keeper, "forgettable", lambda *_: 1 / 0)
    it = Keeper(log.parent, Retention(parts=1))
    ended.append(it)
    it.start([LOG], END)
    wait_for(lambda: caplog.records)
    it.look((LOG,))
    assert caplog.records[0].levelno == logging.ERROR
    assert len(parts_of(log)) == 4


def test_a_sink_with_all_of_it(tmp_path: Path, ended: list[Keeper]) -> None:
    """Rotated, compressed and deleted behind its checkpoints while it is written; what is left is the log's end."""
    del ended
    everything = [*begin(1), *steps(1, 60)]
    sink = SpecLogSink(tmp_path, index=True, rotation=Rotation(size=3_000), retention=Retention(parts=3, compress=True))
    sink.resume({})
    sink.settle()
    for at in range(0, len(everything), 9):
        sink.write(everything[at : at + 9])
        sink.checkpointed(sink.sizes())
    wait_for(lambda: len(parts_of(tmp_path / MERGED_LOG)) == 3)
    wait_for(lambda: all(part.compressed for part in parts_of(tmp_path / MERGED_LOG)))
    sink.close()
    for name, text in texts(everything).items():
        left = whole_log(tmp_path / name)
        assert text.endswith(left)
        assert len(text) - len(left) == deleted_of(tmp_path).get(name, 0)
    assert deleted_of(tmp_path)[MERGED_LOG] > 0


@pytest.mark.parametrize("text", ["", "[]", "{", '{"merged.log": "x"}'])
def test_a_damaged_note_says_nothing(tmp_path: Path, text: str) -> None:
    """Then what is gone counts as lost."""
    (tmp_path / DELETED).parent.mkdir()
    (tmp_path / DELETED).write_text(text)
    assert deleted_of(tmp_path) == {}
    (tmp_path / DELETED).write_text(json.dumps({LOG: 5}))
    assert deleted_of(tmp_path) == {LOG: 5}
