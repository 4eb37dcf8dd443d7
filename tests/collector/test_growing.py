"""Following a file through everything that can happen to it: each line once, and whole."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rankd.collector import growing
from rankd.collector.growing import GrowingFile
from rankd.collector.sinks.parts import cut_log, layout_of, part_path


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def drain(file: GrowingFile) -> bytes:
    """All that there is now; a second look at the end is what makes it leave a renamed file."""
    out = b""
    for _ in range(3):
        while new := file.lines():
            out += new
    return out


def test_lines_come_whole(tmp_path: Path) -> None:
    """A line that is being written is given when its end is there; a missing file is waited for."""
    path = tmp_path / "log"
    file = GrowingFile(path)
    assert drain(file) == b""
    append(path, b"one\ntw")
    assert drain(file) == b"one\n"
    append(path, b"o\n")
    assert drain(file) == b"two\n"
    file.close()


def test_it_starts_at_a_position(tmp_path: Path) -> None:
    """What is before the position is not given."""
    path = tmp_path / "log"
    append(path, b"one\ntwo\n")
    file = GrowingFile(path, 4)
    assert drain(file) == b"two\n"
    file.close()


def test_rename_and_a_new_file_lose_and_double_nothing(tmp_path: Path) -> None:
    """The old file is read to its end, also what is written to it after the rename, and then the new one."""
    path = tmp_path / "log"
    append(path, b"1\n2\n")
    file = GrowingFile(path)
    assert file.lines() == b"1\n2\n"
    append(path, b"3\n")
    old = path.rename(tmp_path / "log.1")
    append(old, b"4\n")
    assert drain(file) == b"3\n4\n"
    append(path, b"5\n")
    assert file.lines() == b""
    append(old, b"last words\n")
    assert drain(file) == b"last words\n5\n"
    file.close()


def test_truncation_to_nothing_is_a_new_log(tmp_path: Path) -> None:
    """After copy-and-truncate reading starts again at the first byte, even if the lines are the same."""
    path = tmp_path / "log"
    append(path, b"same\nsame\n")
    file = GrowingFile(path)
    assert drain(file) == b"same\nsame\n"
    path.write_bytes(b"")
    assert drain(file) == b""
    append(path, b"same\n")
    assert drain(file) == b"same\n"
    file.close()


def test_truncated_and_grown_again_before_anybody_looked(tmp_path: Path) -> None:
    """A file that is longer than before, but another, is told by what stands before the position."""
    path = tmp_path / "log"
    append(path, b"first log\n")
    file = GrowingFile(path)
    assert drain(file) == b"first log\n"
    path.write_bytes(b"second log, which is longer\n")
    assert drain(file) == b"second log, which is longer\n"
    file.close()


def test_what_is_cut_and_written_again_is_not_doubled(tmp_path: Path) -> None:
    """Lines that come again as they were are passed over; from the first that differs on all are given, whole."""
    path = tmp_path / "log"
    append(path, b"one\ntwo\nthree\nfour\n")
    file = GrowingFile(path)
    assert drain(file) == b"one\ntwo\nthree\nfour\n"
    path.write_bytes(b"one\ntw")
    assert drain(file) == b""
    append(path, b"o\nthr")
    assert drain(file) == b""
    append(path, b"owing\nfour\n")
    assert drain(file) == b"throwing\nfour\n"
    file.close()


def test_a_line_longer_than_a_piece_is_one_line(tmp_path: Path) -> None:
    """However long a line is, it is given in one go."""
    path = tmp_path / "log"
    long = b"x" * (3 * growing._PIECE) + b"\n"
    append(path, b"short\n" + long)
    file = GrowingFile(path)
    assert drain(file) == b"short\n" + long
    file.close()


@given(
    lines=st.lists(st.binary(max_size=5).map(lambda raw: raw.replace(b"\n", b"") + b"\n"), min_size=1, max_size=30),
    cuts=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=6),
)
def test_cuts_anywhere_that_are_written_again_change_nothing(lines: list[bytes], cuts: list[tuple[int, int]]) -> None:
    """A log that is cut and completed again, whenever the reader looks, reads as if nothing had happened."""
    text = b"".join(lines)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(b"")
        file, seen, written = GrowingFile(path), b"", 0
        for grow, cut in cuts:
            written = min(len(text), written + grow)
            path.write_bytes(text[:written]) if not path.stat().st_size else append(
                path, text[path.stat().st_size : written]
            )
            seen += drain(file)
            written = max(1, written - cut)
            with path.open("r+b") as out:
                out.truncate(written)
            seen += drain(file)
        append(path, text[path.stat().st_size :])
        seen += drain(file)
        file.close()
    assert seen == text


# -- rotated by the collector -----------------------------------------------------------------------------------------


def rotate(path: Path, *, compressed: bool = False) -> Path:
    """As the collector rotates it; returns where the part lies."""
    base = layout_of(path).base
    part = part_path(path, base, base + path.stat().st_size)
    path.rename(part)
    if compressed:
        part.with_name(part.name + ".gz").write_bytes(gzip.compress(part.read_bytes()))
        part.unlink()
    return part


@given(
    ops=st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(1, 4)),
            st.tuples(st.sampled_from(["rotate", "compressed", "look", "torn"]), st.just(0)),
        ),
        max_size=30,
    ),
    start=st.integers(0, 5),
)
def test_any_rotation_between_any_two_looks_loses_and_doubles_nothing(ops: list[tuple[str, int]], start: int) -> None:
    """However many parts were closed and compressed meanwhile; also while no file is there at all."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        text, seen, torn = b"", b"", b""
        for number in range(start):
            append(path, b"old %d\n" % number)
            text += b"old %d\n" % number
        file = GrowingFile(path, len(text))
        given_from = len(text)
        for what, count in ops:
            if what == "look":
                seen += drain(file)
            elif what == "write":
                line = b"".join(b"%d: line\n" % (len(text) + i) for i in range(count))
                append(path, line[len(torn) :])
                text, torn = text + line, b""
            elif what == "torn" and not torn:
                torn = b"%d" % len(text)
                append(path, torn)
            elif path.exists() and not torn and path.stat().st_size:
                rotate(path, compressed=what == "compressed")
        for _ in range(len(ops) + 2):
            seen += drain(file)
        file.close()
        assert seen == text[given_from:]
        assert file.missed == 0


def test_what_was_deleted_before_it_was_read_is_told(tmp_path: Path) -> None:
    """It goes on with the next part that is there."""
    path = tmp_path / "log"
    append(path, b"1\n2\n")
    file = GrowingFile(path)
    assert drain(file) == b"1\n2\n"
    append(path, b"3\n")
    rotate(path)
    append(path, b"4\n5\n")
    gone = rotate(path)
    append(path, b"6\n")
    rotate(path)
    gone.unlink()
    append(path, b"7\n")
    assert drain(file) + drain(file) == b"3\n6\n7\n"
    assert file.missed == 4
    file.close()


def test_a_log_that_is_cut_back_into_a_part_and_written_again_is_not_doubled(tmp_path: Path) -> None:
    """After a power failure the collector goes back into a closed part: lines that come again are passed over."""
    path = tmp_path / "log"
    lines = [b"%d\n" % i for i in range(10, 30)]
    append(path, b"".join(lines[:8]))
    rotate(path)
    append(path, b"".join(lines[8:16]))
    file = GrowingFile(path)
    seen = drain(file) + drain(file)
    cut_log(path, 15)
    seen += drain(file)
    append(path, b"".join(lines)[15:54])
    seen += drain(file)
    rotate(path)
    append(path, b"".join(lines)[54:])
    seen += drain(file) + drain(file)
    assert seen == b"".join(lines)
    file.close()
