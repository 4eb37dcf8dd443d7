"""What `append` has returned for is there again, whole and once, whatever happened to the file's end."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankd.collector.journal import MAGIC, MAX_ENTRY_BYTES, Journal, read_segment, segments
from rankd.collector.protocol.errors import JournalError


def journal_of(directory: Path, payloads: list[bytes]) -> None:
    journal = Journal(directory)
    assert list(journal.replay()) == []
    for payload in payloads:
        journal.append([payload])
    journal.close()


def replayed(directory: Path) -> list[bytes]:
    journal = Journal(directory)
    try:
        return [payload for _, payload in journal.replay()]
    finally:
        journal.close()


@given(st.lists(st.lists(st.binary(min_size=1, max_size=50), max_size=4), max_size=6))
def test_entries_come_back_in_order(tmp_path_factory: pytest.TempPathFactory, batches: list[list[bytes]]) -> None:
    """Batches of any size, over several openings; each entry by its reference too."""
    directory = tmp_path_factory.mktemp("journal")
    references = []
    for batch in batches:
        journal = Journal(directory)
        list(journal.replay())
        references += journal.append(batch)
        journal.close()
    journal = Journal(directory)
    payloads = [payload for batch in batches for payload in batch]
    assert list(journal.replay()) == list(zip(references, payloads, strict=True))
    assert [journal.fetch(reference) for reference in references] == payloads
    assert references == sorted(references)
    assert all(reference < journal.end for reference in references)
    journal.close()


def test_a_torn_tail_is_cut_at_every_byte(tmp_path: Path) -> None:
    """However many bytes of the last entry a crash has left, the earlier ones are there and appending goes on."""
    journal_of(tmp_path / "whole", [b"first", b"second"])
    (path,) = segments(tmp_path / "whole")
    data = path.read_bytes()
    ends = [offset for offset, _ in read_segment(path)]
    for cut in range(len(data)):
        directory = tmp_path / f"cut{cut}"
        directory.mkdir()
        (directory / path.name).write_bytes(data[:cut])
        journal = Journal(directory)
        kept = [b"first", b"second"][: sum(end <= cut for end in ends)]
        assert [payload for _, payload in journal.replay()] == kept
        journal.append([b"third"])
        journal.close()
        assert replayed(directory) == [*kept, b"third"]


@pytest.mark.parametrize("place", [28 + 9, -1])
def test_a_wrong_byte_ends_the_journal_and_nothing_is_thrown_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    """Blocks of a file may reach the disk in any order, or a disk may err; the checksum tells. What cannot be used any
    more is kept beside the segment, however much it is.
    """
    journal_of(tmp_path, [b"first", b"second", b"third"])
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    there = [b"first"] if place > 0 else [b"first", b"second"]
    begin = 29 if place > 0 else 29 + 14
    assert replayed(tmp_path) == there
    assert f"00000001.journal: cutting {len(data) - begin} bytes from byte {begin} on: an entry there is" in caplog.text
    assert (tmp_path / f"00000001.journal.{begin}.cut").read_bytes() == data[begin:]
    caplog.clear()
    assert replayed(tmp_path) == there
    assert caplog.text == ""


@pytest.mark.parametrize(("size", "kept"), [(100, False), (2**16 + 1, True)])
def test_a_write_that_was_cut_short_is_kept_if_it_is_large(tmp_path: Path, size: int, kept: bool) -> None:
    """A length that has become wrong in the middle of the journal looks like one, with all that follows."""
    journal_of(tmp_path, [b"first"])
    (path,) = segments(tmp_path)
    tail = (2**20).to_bytes(4, "little") + b"x" * (size - 4)
    with path.open("ab") as file:
        file.write(tail)
    assert replayed(tmp_path) == [b"first"]
    assert [p.read_bytes() for p in tmp_path.glob("*.cut")] == ([tail] if kept else [])


def test_zeros_behind_the_last_entry_are_not_kept(tmp_path: Path) -> None:
    """A power failure leaves them where the size of a file was on the disk before its bytes."""
    journal_of(tmp_path, [b"first"])
    (path,) = segments(tmp_path)
    with path.open("ab") as file:
        file.write(bytes(100_000))
    assert replayed(tmp_path) == [b"first"]
    assert list(tmp_path.glob("*.cut")) == []


def rotated(directory: Path, keep: int | None = None) -> tuple[Journal, list[int]]:
    """Five segments; each after the first begins with a checkpoint, and has one entry of 1,000 bytes."""
    journal = Journal(directory, segment_size=500, keep=keep)
    list(journal.replay())
    references = []
    for number in range(5):
        if journal.due:
            journal.rotate(b"checkpoint %d" % number)
        references += journal.append([bytes([number]) * 1_000])
    return journal, references


def test_reading_starts_at_the_last_checkpoint(tmp_path: Path) -> None:
    """The newest segment is enough; entries of older ones can still be fetched."""
    journal, references = rotated(tmp_path)
    journal.close()
    assert len(segments(tmp_path)) == 5
    journal = Journal(tmp_path)
    assert [payload for _, payload in journal.replay()] == [b"checkpoint 4", bytes([4]) * 1_000]
    assert [journal.fetch(reference)[:1] for reference in references] == [bytes([n]) for n in range(5)]
    journal.close()


def test_a_rotation_that_was_cut_off_never_happened(tmp_path: Path) -> None:
    """A crash while the checkpoint is written leaves the older segment as the newest."""
    journal_of(tmp_path, [b"first"])
    (tmp_path / "00000002.unfinished").write_bytes(b"rankd journal 1\nhalf a checkp")
    journal = Journal(tmp_path)
    assert [payload for _, payload in journal.replay()] == [b"first"]
    journal.rotate(b"checkpoint")
    journal.append([b"second"])
    journal.close()
    assert replayed(tmp_path) == [b"checkpoint", b"second"]


def test_old_segments_go_but_none_that_is_needed(tmp_path: Path) -> None:
    """`keep` bytes of older segments stay, and all from the oldest entry that still waits."""
    journal, references = rotated(tmp_path, keep=1_500)
    assert journal.forget(needed=references[1]) == [tmp_path / "00000001.journal"]
    assert [path.name for path in journal.forget(needed=journal.end)] == ["00000002.journal", "00000003.journal"]
    assert journal.fetch(references[3]) == bytes([3]) * 1_000
    with pytest.raises(JournalError, match=r"00000001\.journal cannot be read"):
        journal.fetch(references[0])
    journal.close()


def after_a_power_failure(directory: Path, path: Path, left: bytes) -> list[bytes]:
    """What is replayed where no more than this is left of a segment, and that something can be appended then."""
    path.write_bytes(left)
    entries = replayed(directory)
    journal = Journal(directory)
    list(journal.replay())
    journal.append([b"later"])
    journal.close()
    assert replayed(directory) == [*entries, b"later"]
    return entries


@pytest.mark.parametrize("left", [b"", MAGIC[:5], bytes(16), bytes(5_000), MAGIC, MAGIC + bytes(3_000)])
def test_a_segment_of_which_a_power_failure_left_the_name(
    tmp_path: Path, left: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Its name was on the disk before its bytes: the journal ends with the segment before."""
    rotated(tmp_path)[0].close()
    last = segments(tmp_path)[-1]
    assert after_a_power_failure(tmp_path, last, left) == [b"checkpoint 3", bytes([3]) * 1_000]
    assert "the journal ends before" in caplog.text
    assert last.with_name("00000005.journal.cut").read_bytes() == left
    assert [path.name for path in segments(tmp_path)] == [f"0000000{n}.journal" for n in range(1, 5)]


def test_half_a_checkpoint_is_none(tmp_path: Path) -> None:
    """At every byte of the head and of the payload."""
    rotated(tmp_path)[0].close()
    last = segments(tmp_path)[-1]
    whole = last.read_bytes()
    for cut in range(len(MAGIC), len(MAGIC) + 8 + len(b"checkpoint 4")):
        last.write_bytes(whole[:cut])
        assert replayed(tmp_path) == [b"checkpoint 3", bytes([3]) * 1_000]
        assert not last.exists()


@pytest.mark.parametrize("left", [b"", bytes(16)])
def test_the_very_first_segment_may_be_nothing_but_a_name(tmp_path: Path, left: bytes) -> None:
    """Nothing was recorded, or nothing of it is left: a new journal."""
    journal_of(tmp_path, [])
    assert after_a_power_failure(tmp_path, segments(tmp_path)[0], left) == []
    assert [path.name for path in segments(tmp_path)] == ["00000001.journal"]


def test_a_wrong_byte_in_an_earlier_segment_is_damage(tmp_path: Path) -> None:
    """Nothing is set aside for it: somebody should know."""
    rotated(tmp_path)[0].close()
    third = segments(tmp_path)[2]
    data = bytearray(third.read_bytes())
    data[40] ^= 1
    third.write_bytes(data)
    assert replayed(tmp_path) == [b"checkpoint 4", bytes([4]) * 1_000]
    with pytest.raises(JournalError, match=r"00000003.journal is damaged at byte 36 of \d+, and later segments follow"):
        list(Journal(tmp_path).replay(lambda payload: payload == b"checkpoint 2"))


@pytest.mark.parametrize("zeros", [0, 700])
def test_a_segment_that_was_cut_while_later_ones_are_there(tmp_path: Path, zeros: int) -> None:
    """What follows needs what is gone: the journal ends at the cut, and nothing is read across it."""
    rotated(tmp_path)[0].close()
    third = segments(tmp_path)[2]
    data = third.read_bytes()
    entries = after_a_power_failure(tmp_path, third, data[: len(data) - 700] + bytes(zeros) * (zeros > 0))
    assert entries == [b"checkpoint 2"]
    assert [path.name for path in segments(tmp_path)] == [f"0000000{n}.journal" for n in (1, 2, 3)]
    aside = {path.name for path in tmp_path.glob("*.cut")}
    assert aside - {"00000003.journal.36.cut"} == {"00000004.journal.cut", "00000005.journal.cut"}


def test_older_segments_are_not_read_for_cuts(tmp_path: Path) -> None:
    """They have been on the disk for long: a start costs what it did, and damage there is none of a power failure."""
    rotated(tmp_path)[0].close()
    first = segments(tmp_path)[0]
    first.write_bytes(first.read_bytes()[:-10])
    os.utime(first, (0, 0))
    assert replayed(tmp_path) == [b"checkpoint 4", bytes([4]) * 1_000]
    assert len(segments(tmp_path)) == 5


def test_damage_is_named_when_it_is_read(tmp_path: Path) -> None:
    """A wrong byte in an older segment names file and byte; nothing is made of it."""
    journal, references = rotated(tmp_path)
    first = segments(tmp_path)[0]
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    with pytest.raises(JournalError, match=r"00000001\.journal is damaged at byte 16"):
        journal.fetch(references[0])
    journal.close()


def test_a_file_that_is_no_journal_is_named(tmp_path: Path) -> None:
    """Somebody else's file in the journal's place is not overwritten."""
    (tmp_path / "00000001.journal").write_bytes(b"#!/bin/sh\necho something else\n")
    with pytest.raises(JournalError, match="is not a segment of a rankd journal"):
        replayed(tmp_path)


def test_an_append_that_does_not_fit_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    """On a full disk (here: a file size limit) all of an append is undone, and it works again when there is room."""
    journal = Journal(tmp_path)
    list(journal.replay())
    journal.append([b"a" * 100])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            journal.append([b"b" * 50, b"c" * 100])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p for _, p in read_segment(segments(tmp_path)[0])] == [b"a" * 100]
    journal.append([b"b" * 50, b"c" * 100])
    journal.close()
    assert replayed(tmp_path) == [b"a" * 100, b"b" * 50, b"c" * 100]


_WRITER = """
import sys
from pathlib import Path
from rankd.collector.journal import Journal
journal = Journal(Path(sys.argv[1]), segment_size=4096)
list(journal.replay())
number = 0
while True:
    if journal.due:
        journal.rotate(b"x")
    journal.append([b"%d" % number, b"x" * 300])
    print(number, flush=True)
    number += 1
"""


def test_what_a_killed_process_had_appended_is_there(tmp_path: Path) -> None:
    """SIGKILL between or in writes: everything reported before is replayed, in order, at most one more behind it."""
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) >= 200:
                break
        writer.kill()
        reported = [int(line) for line in writer.stdout if line.endswith("\n")]
    last = max([200, *reported])
    replayed(tmp_path)
    payloads = [payload for path in segments(tmp_path) for _, payload in read_segment(path)]
    numbers = [int(p) for p in payloads if not p.startswith(b"x")]
    assert numbers == list(range(len(numbers)))
    assert last + 1 <= len(numbers) <= last + 2


def test_the_journal_says_why_its_directory_cannot_be_used(tmp_path: Path) -> None:
    """A file where the directory should be."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(JournalError, match="the journal needs the directory"):
        Journal(tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_zeros_at_the_end_are_no_entries(tmp_path: Path) -> None:
    """What a power failure leaves where the file's size was stored before its bytes is cut, like any torn tail."""
    journal_of(tmp_path, [b"one"])
    path = tmp_path / "00000001.journal"
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(5_000))
    assert replayed(tmp_path) == [b"one"]
    assert path.stat().st_size == size


def test_a_state_larger_than_a_segment_does_not_rotate_for_ever(tmp_path: Path) -> None:
    """After a large checkpoint as many bytes must follow before the next one is due; also after a restart."""
    journal = Journal(tmp_path, segment_size=100)
    list(journal.replay())
    journal.append([bytes(100)])
    assert journal.due
    journal.rotate(b"c" * 5_000)
    for _ in range(2):
        assert not journal.due
        journal.append([b"x" * 1_000])
        journal.close()
        journal = Journal(tmp_path, segment_size=100)
        list(journal.replay())
    journal.append([b"x" * 3_000])
    assert journal.due
    journal.close()


def test_a_checkpoint_may_be_larger_than_any_other_entry(tmp_path: Path) -> None:
    """The name tables of many processes, or what waits of a thousand ranks: it is read again, and nothing is cut."""
    journal = Journal(tmp_path)
    assert list(journal.replay()) == []
    checkpoint = bytes(MAX_ENTRY_BYTES) + b"checkpoint"
    journal.rotate(checkpoint)
    journal.append([b"entry"])
    journal.close()
    assert replayed(tmp_path) == [checkpoint, b"entry"]
    assert replayed(tmp_path) == [checkpoint, b"entry"]


def test_a_segment_that_cannot_be_opened_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was written, and then there was no descriptor left for it: the one before stays open until it is."""
    journal = Journal(tmp_path)
    assert list(journal.replay()) == []
    journal.append([b"first"])
    (before,) = segments(tmp_path)
    really = os.open

    def out_of_files(path: Path, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith("00000002.journal"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return really(path, flags, mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", out_of_files)
        for _ in range(2):
            with pytest.raises(OSError, match="Too many open files"):
                journal.rotate(b"checkpoint")
    opened = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}  # noqa: PTH208
    assert str(before) in opened
    journal.rotate(b"checkpoint")
    journal.append([b"second"])
    journal.close()
    assert [path.name for path in segments(tmp_path)] == ["00000001.journal", "00000002.journal"]
    assert replayed(tmp_path) == [b"checkpoint", b"second"]
