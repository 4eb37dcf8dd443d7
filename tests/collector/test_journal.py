"""What `append` has returned for is there again, whole and once, whatever happened to the file's end."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankd.collector.journal import Journal, read_segment, segments
from rankd.collector.protocol.errors import JournalError


def journal_of(directory: Path, payloads: list[bytes], segment_size: int = 2**20) -> None:
    journal = Journal(directory, segment_size=segment_size)
    assert list(journal.replay()) == []
    for payload in payloads:
        journal.append([payload])
    journal.close()


def replayed(directory: Path) -> list[bytes]:
    journal = Journal(directory)
    try:
        return list(journal.replay())
    finally:
        journal.close()


@given(st.lists(st.lists(st.binary(max_size=50), max_size=4), max_size=6))
def test_entries_come_back_in_order(tmp_path_factory: pytest.TempPathFactory, batches: list[list[bytes]]) -> None:
    """Batches of any size, empty payloads included, over several openings."""
    directory = tmp_path_factory.mktemp("journal")
    for batch in batches:
        journal = Journal(directory, segment_size=64)
        list(journal.replay())
        journal.append(batch)
        journal.close()
    assert replayed(directory) == [payload for batch in batches for payload in batch]


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
        assert list(journal.replay()) == kept
        journal.append([b"third"])
        journal.close()
        assert replayed(directory) == [*kept, b"third"]


def test_a_wrong_byte_in_the_last_entry_is_a_torn_tail(tmp_path: Path) -> None:
    """Blocks of a file may reach the disk in any order; the checksum tells."""
    journal_of(tmp_path, [b"first", b"second"])
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert replayed(tmp_path) == [b"first"]


def test_damage_before_later_segments_is_an_error_not_a_skip(tmp_path: Path) -> None:
    """A wrong byte in the middle names file and byte, and nothing is dropped in silence."""
    journal_of(tmp_path, [b"x" * 40, b"y" * 40, b"z" * 40], segment_size=32)
    first = segments(tmp_path)[0]
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    with pytest.raises(JournalError, match=r"00000001\.journal is damaged at byte 16 of 64"):
        replayed(tmp_path)


def test_segments_rotate_by_size(tmp_path: Path) -> None:
    """Each segment is closed once it has reached its size; the order stays."""
    journal_of(tmp_path, [bytes([i]) * 40 for i in range(5)], segment_size=80)
    assert len(segments(tmp_path)) == 3
    assert replayed(tmp_path) == [bytes([i]) * 40 for i in range(5)]


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
    numbers = [int(p) for p in replayed(tmp_path) if not p.startswith(b"x")]
    assert numbers == list(range(len(numbers)))
    assert last + 1 <= len(numbers) <= last + 2


def test_the_journal_says_why_its_directory_cannot_be_used(tmp_path: Path) -> None:
    """A file where the directory should be."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(JournalError, match="the journal needs the directory"):
        Journal(tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
