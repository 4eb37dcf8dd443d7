"""Logs in parts: how they lie on the disk, reading them as one, and cutting them anywhere."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankd.collector.sinks import parts as parts_module
from rankd.collector.sinks.parts import LogReader, Part, cut_log, layout_of, log_of_part, part_path, parts_of

from ...support import whole_log

TEXT = b"".join(b"line %d\n" % i for i in range(40))


def lay(log: Path, ends: Sequence[int], compressed: Sequence[int] = (), text: bytes = TEXT) -> Path:
    """The log `text`, cut at `ends`; which parts (by number) are compressed."""
    for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        path = part_path(log, start, end)
        if number in compressed:
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(text[start:end]))
        else:
            path.write_bytes(text[start:end])
    log.write_bytes(text[ends[-1] if ends else 0 :])
    return log


def test_a_listing_says_all(tmp_path: Path) -> None:
    """Names hold the bytes; other files do not disturb; the plain form counts where both are there."""
    log = lay(tmp_path / "merged.log", [16, 48], compressed=[0])
    (tmp_path / "merged.log.1").touch()
    (tmp_path / "merged.log.000000000000016-000000000000048.gz").touch()
    (tmp_path / "merged.log.000000000000048-000000000000064.gz.unfinished").touch()
    (tmp_path / "other.log.000000000000048-000000000000064").touch()
    first, second = parts_of(log)
    assert first == Part(0, 16, tmp_path / "merged.log.000000000000000-000000000000016.gz", True)
    assert second == Part(16, 48, part_path(log, 16, 48), False)
    layout = layout_of(log)
    assert (layout.start, layout.base, layout.end, layout.holes()) == (0, 48, len(TEXT), [])
    assert log_of_part(first.path) == log_of_part(second.path) == log
    assert log_of_part(log) is None


def test_where_nothing_is(tmp_path: Path) -> None:
    """No log, no directory: an empty log."""
    for log in (tmp_path / "log", tmp_path / "not" / "there"):
        assert layout_of(log).end == 0
        with LogReader(log) as reader:
            assert reader.read(0, 10) == b""


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    """At the beginning it was deleted; between two parts, or at the end of one, it is a hole."""
    log = lay(tmp_path / "log", [16, 48, 72, 100])
    part_path(log, 0, 16).unlink()
    part_path(log, 48, 72).unlink()
    os.truncate(part_path(log, 72, 100), 20)
    layout = layout_of(log)
    assert (layout.start, layout.holes()) == (16, [(48, 72), (92, 100)])
    with LogReader(log) as reader:
        assert reader.read(0, 100) == b""
        assert reader.read(20, 100) == TEXT[20:48]
        assert reader.read(80, 1_000) == TEXT[80:92]
        assert reader.pieces() == [(16, 48), (72, 92), (100, len(TEXT))]
        assert b"".join(reader.lines()) == TEXT[16:48] + TEXT[72:92] + TEXT[100:]


@given(
    ends=st.lists(st.integers(0, len(TEXT)), max_size=5, unique=True).map(sorted),
    compressed=st.sets(st.integers(0, 4)),
    offset=st.integers(0, len(TEXT) + 5),
    count=st.integers(0, len(TEXT)),
    end=st.integers(0, len(TEXT)),
)
def test_parts_are_read_and_cut_as_one_file(
    ends: list[int], compressed: set[int], offset: int, count: int, end: int
) -> None:
    """Wherever it is cut into parts and whichever are compressed: the same bytes; and so after a cut anywhere."""
    with tempfile.TemporaryDirectory() as folder:
        log = lay(Path(folder) / "log", ends, list(compressed))
        with LogReader(log) as reader:
            assert reader.read(offset, count) == TEXT[offset : offset + count]
            assert b"".join(reader.lines()) == TEXT
        base = cut_log(log, end)
        layout = layout_of(log)
        assert (layout.base, layout.end, layout.holes()) == (base, end, [])
        assert whole_log(log) == TEXT[:end]


class CrashError(Exception):
    pass


def crashing(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Every change of the directory counts; the one after so many fails."""
    left = [after]

    def guarded(call: Callable[..., object]) -> Callable[..., object]:
        def inner(*args: object, **kwargs: object) -> object:
            if not left[0]:
                raise CrashError
            left[0] -= 1
            return call(*args, **kwargs)

        return inner

    for owner, name in ((Path, "unlink"), (Path, "rename"), (os, "truncate")):
        monkeypatch.setattr(owner, name, guarded(getattr(owner, name)))


@pytest.mark.parametrize("compressed", [[], [0, 1, 2]], ids=["plain", "compressed"])
@pytest.mark.parametrize("after", range(8))
def test_a_cut_may_break_off_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, compressed: list[int]
) -> None:
    """What is left is a log that ends somewhere between, and the same cut completes it."""
    log = lay(tmp_path / "log", [16, 48, 100], compressed)
    with monkeypatch.context() as patch:
        crashing(patch, after)
        with contextlib.suppress(CrashError):
            cut_log(log, 30)
    text = whole_log(log)
    assert TEXT.startswith(text)
    assert len(text) >= 30
    cut_log(log, 30)
    assert whole_log(log) == TEXT[:30]
    assert (layout_of(log).base, layout_of(log).end) == (16, 30)


def test_a_cut_behind_something_missing_keeps_the_places(tmp_path: Path) -> None:
    """What is written next must not take the place of what is missing."""
    log = lay(tmp_path / "log", [16, 48, 100])
    os.truncate(part_path(log, 16, 48), 10)
    assert cut_log(log, 40) == 40
    layout = layout_of(log)
    assert (layout.end, layout.holes()) == (40, [(26, 40)])
    part_path(log, 0, 16).unlink()
    part_path(log, 16, 26).unlink()
    assert cut_log(log, 8) == 8
    assert layout_of(log).end == 8


def test_reading_goes_on_while_the_log_is_rotated_compressed_and_deleted_from(tmp_path: Path) -> None:
    """Each byte comes as it is, whatever has become of its file since the directory was listed."""
    log = lay(tmp_path / "log", [16])
    with LogReader(log) as reader:
        assert reader.read(20, 5) == TEXT[20:25]
        log.rename(part_path(log, 16, len(TEXT)))
        log.write_bytes(b"more\n")
        assert reader.read(20, 1_000) == TEXT[20:] + b"more\n"
        plain = part_path(log, 0, 16)
        plain.with_name(plain.name + ".gz").write_bytes(gzip.compress(TEXT[:16]))
        plain.unlink()
        assert reader.read(0, 20) == TEXT[:20]
        plain.with_name(plain.name + ".gz").unlink()
        reader.close()
        assert reader.read(0, 20) == b""
        assert reader.start == 16


def test_a_log_renamed_between_listing_and_opening_is_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing and the file that grows are of one moment."""
    log = lay(tmp_path / "log", [])
    listed = parts_module.parts_of

    def rotated(path: Path) -> list[Part]:
        found = listed(path)
        if not found:
            log.rename(part_path(log, 0, len(TEXT)))
            log.write_bytes(b"new\n")
        return found

    monkeypatch.setattr(parts_module, "parts_of", rotated)
    assert layout_of(log).end == len(TEXT) + 4


def test_errors_name_what_cannot_be_read(tmp_path: Path) -> None:
    """A damaged part is an error of its file, not an end of the log."""
    log = lay(tmp_path / "log", [16, 48], compressed=[0])
    path = parts_of(log)[0].path
    path.write_bytes(path.read_bytes()[:15])
    with LogReader(log) as reader, pytest.raises(OSError, match="damaged") as error:
        reader.read(0, 30)
    assert (error.value.errno, error.value.filename) == (errno.EIO, str(path))


def test_only_files_with_places_in_a_log_are_parts(tmp_path: Path) -> None:
    """A pipe would be waited for for ever; no log has so many bytes."""
    log = lay(tmp_path / "merged.log", [16])
    os.mkfifo(part_path(log, 16, 20))
    part_path(log, 20, 30).mkdir()
    part_path(log, 30, 40).symlink_to("nowhere")
    part_path(log, 40, 10**18).touch()
    (tmp_path / f"merged.log.{'٣' * 15}-{'٤' * 15}").touch()
    assert [part.end for part in parts_of(log)] == [16]
    with LogReader(log) as reader:
        assert b"".join(reader.lines()) == TEXT
