"""Segments of the journal go only when what was made of them is on the disk: what a power failure leaves is whole."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import verified, wait_for, whole_log

from rankd.collector.config import RankdConfig
from rankd.collector.entries import Entry
from rankd.collector.journal import segments
from rankd.collector.ledger import Ledger
from rankd.collector.patience import PatientWriting
from rankd.collector.place import JOURNAL
from rankd.collector.protocol.records import NameTable
from rankd.collector.sinks.parts import parts_of
from rankd.collector.sinks.sink import Off
from rankd.collector.syncing import Syncing

from .streams import training
from .written import entries_of

NAMES = NameTable(tuple(f"decoder.layers.{i}.self_attention.linear_qkv.weight" for i in range(12)))


class Disk:
    """What of `output` is on the disk: bytes and names that were synced; and what would be there, as images.

    Args:
        images: a directory; each time a segment has been removed, what a power failure would leave goes there.
    """

    def __init__(self, output: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.output = output
        self.images = images
        self.calls: list[tuple[str, Path]] = []
        self.threads: set[str] = set()
        self._bytes: dict[int, int] = {}
        self._names: dict[int, dict[str, int]] = {}
        # Which call has seen what is noted of an inode.
        self._turn = 0
        self._seen: dict[int, int] = {}
        self._pins = images.parent / "pins"
        self._pins.mkdir()
        self._lock = threading.Lock()
        self._fsync, self._unlink = os.fsync, Path.unlink
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "fdatasync", self.fsync)
        monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: self.unlink(path, missing_ok=missing_ok))

    def fsync(self, fd: int) -> None:
        """The real one, noted. Of two at once, of the same file, the one that saw more counts."""
        path = Path(f"/proc/self/fd/{fd}").readlink()
        with self._lock:
            self._turn = turn = self._turn + 1
            found = os.fstat(fd)
            names = {entry.name: self._pinned(entry) for entry in os.scandir(path)} if path.is_dir() else None
        self._fsync(fd)
        with self._lock:
            self.calls.append(("fsync", path))
            self.threads.add(threading.current_thread().name)
            if self._seen.get(found.st_ino, 0) > turn:
                return
            self._seen[found.st_ino] = turn
            if names is None:
                self._bytes[found.st_ino] = found.st_size
            else:
                self._names[found.st_ino] = names

    def _pinned(self, entry: os.DirEntry[str]) -> int:
        """The inode of a file, which from now on is no other file's, even when this one has been removed."""
        inode = entry.inode()
        if self.output in Path(entry.path).parents:
            try:
                os.link(entry.path, self._pins / str(inode))
            except (FileExistsError, PermissionError):  # the last: of a directory
                pass
            except FileNotFoundError:  # removed meanwhile
                return 0
        return inode

    def unlink(self, path: Path, *, missing_ok: bool) -> None:
        """The real one, noted."""
        self._unlink(path, missing_ok=missing_ok)
        with self._lock:
            self.calls.append(("unlink", path))
        if path.suffix == ".journal":
            with self._lock:
                self._copy(self.output, self.images / str(len(list(self.images.iterdir()))), path)

    def _copy(self, directory: Path, to: Path, gone: Path) -> None:
        """What is on the disk of it, but for the segments up to this one: a removal may be there at once."""
        to.mkdir()
        now = {entry.inode(): entry.path for entry in os.scandir(directory)}
        for name, inode in self._names.get(directory.stat().st_ino, {}).items():
            there = now.get(inode)
            if there is None or (name.endswith(".journal") and name <= gone.name):
                continue
            if os.path.isdir(there):  # noqa: PTH112 - a path of scandir
                self._copy(Path(there), to / name, gone)
            else:
                (to / name).write_bytes(Path(there).read_bytes()[: self._bytes.get(inode, 0)])


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Watches tmp_path/out."""
    (tmp_path / "images").mkdir()
    return Disk(tmp_path / "out", tmp_path / "images", monkeypatch)


def ledger_of(output: Path, *, keep: int | None = 0, **section: object) -> Ledger:
    """A ledger with small segments and, as a rule, rotated logs."""
    more = {"logs": {"rotate_size": "64KiB"}, "outputs": [{"type": "jsonl"}], **section}
    mapping = {"output": str(output), "journal": {"segment_size": "4KiB", "keep": keep}, **more}
    output.mkdir(exist_ok=True)
    return Ledger(RankdConfig.from_mapping(mapping), output / JOURNAL, Off(), PatientWriting(output, lambda: None))


def entries(ranks: int = 3, steps: int = 60) -> list[Entry]:
    """Of a whole run."""
    return entries_of([training(rank, ranks, steps=range(1, steps + 1), names=NAMES) for rank in range(ranks)])


def fed(ledger: Ledger, some: list[Entry], output: Path) -> None:
    """Each entry; as often as a checkpoint is written, what it lets go of is waited for."""
    journal = output / JOURNAL

    def is_tidy() -> bool:
        ledger.commit([])
        return len(segments(journal)) <= 3

    before = len(segments(journal))
    for entry in some:
        ledger.commit([entry])
        if len(segments(journal)) > before:
            wait_for(is_tidy)
            before = len(segments(journal))


@pytest.mark.slow
def test_what_a_power_failure_leaves_is_whole_whenever_a_segment_goes(disk: Disk) -> None:
    """Logs, closed parts, and what the rest of the journal needs are on the disk before: a restart on no more than that
    makes logs that `rankd verify` finds nothing in, and goes on.
    """
    everything = entries()
    ledger = ledger_of(disk.output)
    fed(ledger, everything, disk.output)
    ledger.close()
    whole = verified(disk.output)
    assert not any("journal has lost" in note for note in whole.notes)
    images = sorted(disk.images.iterdir(), key=lambda path: int(path.name))
    assert len(images) > 3
    assert any(parts_of(image / "merged.log") for image in images)
    for image in images:
        again = ledger_of(image)
        again.close()
        verified(image)
        text = whole_log(image / "merged.log")
        assert text
        assert whole_log(disk.output / "merged.log").startswith(text)
        lines = (image / "records.jsonl").read_bytes()
        assert (disk.output / "records.jsonl").read_bytes().startswith(lines)


def test_each_log_is_synced_between_a_checkpoint_and_the_removal_behind_it(disk: Disk) -> None:
    """In this order, on another thread than the collector's; so are the segments that stay, and the directories."""
    ledger = ledger_of(disk.output, logs={}, outputs=[])
    fed(ledger, entries(ranks=2, steps=40), disk.output)
    ledger.close()
    first = next(i for i, (call, path) in enumerate(disk.calls) if call == "unlink" and path.suffix == ".journal")
    synced = {path.relative_to(disk.output) for call, path in disk.calls[:first] if disk.output in path.parents}
    assert {Path("merged.log"), Path("rank_0/monitor.log"), Path("rank_1/monitor.log")} < synced
    assert {Path("rank_0"), Path("rank_1"), JOURNAL, JOURNAL.parent} < synced
    assert any(path.suffix == ".journal" for path in synced)
    assert ("fsync", disk.output) in disk.calls[:first]
    assert disk.threads == {"rankd-sync"}


def test_without_keep_nothing_is_synced_and_no_thread_runs(disk: Disk) -> None:
    """It costs nothing where no segment is deleted."""
    ledger = ledger_of(disk.output, keep=None, logs={})
    for entry in entries():
        ledger.commit([entry])
    assert len(segments(disk.output / JOURNAL)) > 4
    assert [call for call in disk.calls if call[0] == "fsync"] == []
    assert not [thread for thread in threading.enumerate() if thread.name == "rankd-sync"]
    ledger.close()


def test_a_disk_that_fails_keeps_the_journal(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows what was lost then, and a later call may say that all is well: so no segment goes any more."""
    failed: list[str] = []

    def failing(fd: int) -> None:
        path = str(Path(f"/proc/self/fd/{fd}").readlink())
        if path.endswith("rank_1/monitor.log") and not failed:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        disk.fsync(fd)

    monkeypatch.setattr(os, "fsync", failing)
    ledger = ledger_of(disk.output, logs={})
    everything = entries()
    for number, entry in enumerate(everything):
        ledger.commit([entry])
        if number == len(everything) // 2:
            wait_for(lambda: "no more segments" in caplog.text)
    count = len(segments(disk.output / JOURNAL))
    ledger.close()
    assert failed == [str(disk.output / "rank_1" / "monitor.log")]
    assert f"{failed[0]} cannot be put on the disk (Input/output error)" in caplog.text
    assert int(segments(disk.output / JOURNAL)[0].stem) == 1
    assert count > 4


def test_a_segment_that_cannot_be_deleted_is_tried_again(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs space, and not the run."""
    everything = entries()
    ledger = ledger_of(disk.output, logs={})

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    def is_told() -> bool:
        ledger.commit([])
        return "a segment of the journal cannot be deleted now" in caplog.text

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        for entry in everything[: len(everything) // 2]:
            ledger.commit([entry])
        wait_for(is_told)
    first = segments(disk.output / JOURNAL)[0]
    assert int(first.stem) == 1
    fed(ledger, everything[len(everything) // 2 :], disk.output)
    ledger.close()
    assert not first.exists()
    verified(disk.output)


def test_too_many_files_are_no_failure_of_the_disk(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    """A thousand ranks come back at once, and the process may open no more files for a while: the next time all of it
    is put on the disk, the directories as well.
    """
    journal = disk.output / JOURNAL
    journal.mkdir(parents=True)
    (one := disk.output / "rank_0" / "monitor.log").parent.mkdir()
    one.write_bytes(b"1")
    syncing = Syncing(disk.output, journal)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(tmp_path, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limit[1]))
    try:
        syncing.ask(1, {one: 1})
        wait_for(lambda: "cannot be put on the disk now (Too many open files)" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert syncing.reached() is None
    assert disk.calls == []
    syncing.ask(2, {one: 1})
    wait_for(lambda: syncing.reached() == 2)
    syncing.close()
    assert {one, one.parent, disk.output, journal, tmp_path} <= {path for _, path in disk.calls}


def test_a_log_that_somebody_has_removed_stops_nothing(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """With its directory or without: what is there is put on the disk."""
    journal = disk.output / JOURNAL
    journal.mkdir(parents=True)
    logs = [disk.output / f"rank_{rank}" / "monitor.log" for rank in range(3)]
    for log in logs:
        log.parent.mkdir()
        log.write_bytes(b"1")
    syncing = Syncing(disk.output, journal)
    syncing.ask(1, dict.fromkeys(logs, 1))
    wait_for(lambda: syncing.reached() == 1)
    shutil.rmtree(logs[0].parent)
    logs[1].unlink()
    syncing.ask(2, dict.fromkeys(logs, 2))
    wait_for(lambda: syncing.reached() == 2)
    syncing.close()
    assert disk.calls.count(("fsync", logs[2])) == 2
    assert caplog.text == ""


def test_after_a_failure_nothing_piles_up(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """What is asked for then is not kept: a run may go on for months."""
    (disk.output / JOURNAL).mkdir(parents=True)
    loop = disk.output / "loop.log"
    loop.symlink_to(loop)
    syncing = Syncing(disk.output, disk.output / JOURNAL)
    syncing.ask(1, {loop: 1})
    wait_for(lambda: "until the collector starts again" in caplog.text)
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name == "rankd-sync"])
    for _ in range(10):
        syncing.ask(1, {loop: 1})
    assert syncing._asked.empty()
    assert not [thread for thread in threading.enumerate() if thread.name == "rankd-sync"]
    syncing.close()


def test_a_log_that_did_not_grow_is_not_synced_again(tmp_path: Path, disk: Disk) -> None:
    """Of a thousand ranks few may be at work."""
    journal = disk.output / JOURNAL
    journal.mkdir(parents=True)
    one, two = disk.output / "one.log", disk.output / "two.log"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    syncing = Syncing(disk.output, journal)
    for sizes in ({one: 1, two: 1}, {one: 1, two: 2}):
        syncing.ask(0, sizes)
        wait_for(lambda: syncing.reached() is not None)
    syncing.close()
    assert disk.calls.count(("fsync", one)) == 1
    assert disk.calls.count(("fsync", two)) == 2
    assert disk.calls.count(("fsync", disk.output)) == 1
    assert disk.calls.count(("fsync", tmp_path)) == 1


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Each ledger has ended its own."""
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "rankd-sync"]
