"""What is said to be on the disk is: bytes first, then the names by which they are found."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rankd.collector.disk import sync_directory, sync_file, sync_tree
from rankd.collector.journal import Journal
from rankd.collector.place import Place
from rankd.collector.sinks import parts
from rankd.collector.sinks.parts import cut_log, parts_of

from .sinks.test_parts import TEXT, lay


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, list[str]]]:
    """What is synced, in order; of directories with the names that are there then."""
    calls: list[tuple[Path, list[str]]] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        calls.append((path, sorted(os.listdir(path)) if path.is_dir() else []))  # noqa: PTH208 - names
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    return calls


def test_a_tree_is_synced_from_below(tmp_path: Path, synced: list[tuple[Path, list[str]]]) -> None:
    """A directory that was made with those above it is there only when all their names are."""
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    sync_tree(below)
    assert [path for path, _ in synced][:3] == [below, below.parent, tmp_path]


def test_a_file_system_that_cannot_sync_directories_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure of the disk is one, though."""

    def failing(number: int) -> None:
        def fail(_: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fail)

    failing(errno.EINVAL)
    sync_directory(tmp_path)
    failing(errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        sync_directory(tmp_path)
    with pytest.raises(OSError, match="Input/output"):
        sync_file(Path(__file__))


def test_with_durability_disk_a_segment_can_be_found(tmp_path: Path, synced: list[tuple[Path, list[str]]]) -> None:
    """An acknowledgement is worth nothing where the segment's name is not on the disk."""
    journal = Journal(tmp_path / "new" / "journal", durability="disk")
    list(journal.replay())
    assert (tmp_path / "new" / "journal", ["00000001.journal"]) in synced
    assert (tmp_path / "new", ["journal"]) in synced
    assert (tmp_path, ["new"]) in synced
    journal.append([b"one"])
    journal.rotate(b"checkpoint")
    assert [path.name for path, _ in synced][-2:] == ["00000002.unfinished", "journal"]
    assert synced[-1][1] == ["00000001.journal", "00000002.journal"]
    journal.close()


def test_with_durability_process_nothing_is_synced(tmp_path: Path, synced: list[tuple[Path, list[str]]]) -> None:
    """It costs no wait for the disk."""
    journal = Journal(tmp_path / "journal")
    list(journal.replay())
    journal.append([b"one"])
    journal.rotate(b"checkpoint")
    journal.close()
    assert synced == []


def test_who_a_run_is_survives(tmp_path: Path, synced: list[tuple[Path, list[str]]]) -> None:
    """Ranks that live on after a power failure name the run and have its key; the collector must know both again."""
    place = Place(tmp_path / "out")
    place.run_id()
    place.key({})
    inner = tmp_path / "out" / ".rankd"
    for name in ("run", "key"):
        index = next(i for i, (path, _) in enumerate(synced) if path.name.startswith(name))
        assert synced[index + 1][0] == inner
        assert name in synced[index + 1][1]
    before = len(synced)
    place.publish("tcp://127.0.0.1:1", place.run_id(), place.key({}))
    place.withdraw()
    assert len(synced) == before


def test_a_part_is_decompressed_onto_the_disk_before_its_other_form_goes(
    tmp_path: Path, synced: list[tuple[Path, list[str]]]
) -> None:
    """Its segments of the journal may be deleted, so nothing could make it again."""
    log = lay(tmp_path / "merged.log", [16, 48, 100], compressed=[1])
    assert parts_of(log)[1].compressed
    synced.clear()
    cut_log(log, 40)
    names = [(path.name, names) for path, names in synced]
    plain, compressed = parts.part_path(log, 16, 48).name, parts.part_path(log, 16, 48).name + ".gz"
    assert names[0][0] == f".{plain}.unfinished"
    assert {plain, compressed} <= set(names[1][1])
    assert log.read_bytes() == TEXT[16:40]
