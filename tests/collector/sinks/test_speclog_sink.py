"""The text logs as files: full disks, restarts, many ranks."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rankd.collector.protocol.errors import RecordError
from rankd.collector.protocol.records import Comment, Frame, NameTable, Position, RankBlock
from rankd.collector.protocol.speclog import Renderer, merged_text
from rankd.collector.sinks.files import Buffer, OpenFiles, write_at
from rankd.collector.sinks.speclog import MERGED_LOG, SpecLogSink, rank_log

from ...support import limit

Released = RankBlock | Comment
TABLE = NameTable(("decoder.weight", "层.bias"))


def released(steps: Sequence[int], ranks: int = 2) -> list[Released]:
    """A step's block of each rank, and a comment on the run."""
    out: list[Released] = []
    for step in steps:
        for rank in range(ranks):
            frame = Frame.named("local_norm", TABLE, [step + rank / 8, -step])
            out.append(RankBlock(rank, Position(1, step, 1), (frame,)))
        out.append(Comment(None, "note", f"step {step}"))
        out.append(Comment(0, "anomaly", f"of step {step}"))
    return out


def texts(*writes: Sequence[Released]) -> dict[str, bytes]:
    """What the logs must hold after these writes."""
    renderer, out = Renderer(), {MERGED_LOG: b""}
    for each in (r for write in writes for r in write):
        text = renderer.block(each) if isinstance(each, RankBlock) else renderer.comment(each)
        out[MERGED_LOG] += merged_text(each.rank, text)
        if each.rank is not None:
            out[rank_log(each.rank)] = out.get(rank_log(each.rank), b"") + text
    return {name: text for name, text in out.items() if text}


def logs(output: Path) -> dict[str, bytes]:
    """What the logs hold."""
    return {str(p.relative_to(output)): p.read_bytes() for p in output.rglob("*.log")}


@contextmanager
def sink_at(output: Path) -> Iterator[SpecLogSink]:
    sink = SpecLogSink(output)
    yield sink
    sink.close()


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# -- writing ----------------------------------------------------------------------------------------------------------


def test_each_rank_has_its_log_and_all_are_in_the_merged_one(tmp_path: Path) -> None:
    """What is released stands in its rank's log and, with the rank before it, in the merged log."""
    first, second = released([1, 2]), released([3])
    with sink_at(tmp_path) as sink:
        sink.write(first)
        sink.write(second)
        assert logs(tmp_path) == texts(first, second)
        assert sink.sizes() == {name: len(text) for name, text in logs(tmp_path).items()}


def test_merged_lines_of_a_rank_are_its_log(tmp_path: Path) -> None:
    """The lines of merged.log with a rank's prefix, without it, are that rank's log byte for byte."""
    with sink_at(tmp_path) as sink:
        sink.write(released([1, 2], ranks=12))
    merged = (tmp_path / MERGED_LOG).read_bytes().splitlines(keepends=True)
    for rank in range(12):
        prefix = b"[rank_%d] " % rank
        own = b"".join(line.removeprefix(prefix) for line in merged if line.startswith(prefix))
        assert own == (tmp_path / rank_log(rank)).read_bytes()


def test_nothing_is_made_before_it_is_needed(tmp_path: Path) -> None:
    """No write, and a write of empty blocks, make no file; a rank's directory comes with its first line."""
    output = tmp_path / "not" / "there"
    with sink_at(output) as sink:
        sink.write([])
        sink.write([RankBlock(0, Position(1, 1), ())])
        sink.retry()
        assert not output.exists()
        sink.write([Comment(5, "note", "hello")])
    assert logs(output) == {rank_log(5): b"# note hello\n", MERGED_LOG: b"[rank_5] # note hello\n"}


def test_logs_that_exist_are_appended_to(tmp_path: Path) -> None:
    """Without a resume, what a log holds already stays before what comes."""
    (tmp_path / MERGED_LOG).write_bytes(b"before\n")
    with sink_at(tmp_path) as sink:
        sink.write([Comment(None, "note", "after")])
        assert sink.sizes() == {MERGED_LOG: len(b"before\n[collector] # note after\n")}
    assert (tmp_path / MERGED_LOG).read_bytes() == b"before\n[collector] # note after\n"


def test_what_cannot_be_rendered_is_not_written_in_part(tmp_path: Path) -> None:
    """A block that is impossible leaves no bytes of the write that it is in."""
    impossible = RankBlock(1, Position(1, 1), (Frame.scalar("local_loss", 1),))
    with sink_at(tmp_path) as sink:
        with pytest.raises(RecordError):
            sink.write([Comment(0, "note", "x"), impossible])
        assert logs(tmp_path) == {}
        assert sink.unwritten == 0


def test_a_thousand_ranks_under_the_usual_limit_of_files(tmp_path: Path) -> None:
    """1,024 ranks are written under a soft limit of 1,024 open files, and half of these stay free."""
    first, second = released([1], 1024), released([2], 1024)
    with limit(resource.RLIMIT_NOFILE, 1024), sink_at(tmp_path) as sink:
        before = open_files()
        sink.write(first)
        sink.write(second)
        assert open_files() - before <= 512
        sink.close()
        assert open_files() == before
    assert logs(tmp_path) == texts(first, second)


def test_parts_are_written_at_a_place(tmp_path: Path) -> None:
    """More buffers than one call takes, in the middle of a file and behind its end; what stands beside them stays."""
    parts: list[Buffer] = [memoryview(b"%d," % i) for i in range(2_500)]
    text, path = b"".join(parts), tmp_path / "rank_0" / "monitor.log"
    files = OpenFiles(append=False)
    write_at(files.open(path), [b"behind"], len(text) + 2)
    write_at(files.open(path), parts, 1)
    files.close()
    assert path.read_bytes() == b"\0" + text + b"\0behind"


def test_parts_for_which_there_is_no_room(tmp_path: Path) -> None:
    """Wherever it stops, that is an error, and the bytes up to there are written."""
    parts: list[Buffer] = [b"%d," % i for i in range(2_500)]
    text = b"".join(parts)
    for room in (0, 1, 1_000, 5_000, len(text) - 1):
        files = OpenFiles(append=False)
        with limit(resource.RLIMIT_FSIZE, room), pytest.raises(OSError, match="File too large"):
            write_at(files.open(tmp_path / str(room)), parts, 0)
        files.close()
        assert (tmp_path / str(room)).read_bytes() == text[:room]


# -- no room ----------------------------------------------------------------------------------------------------------


def test_short_write_at_any_byte(tmp_path: Path) -> None:
    """Wherever a write stops, retry goes on at that very byte, after whatever was released meanwhile came to wait."""
    first, second = released([1]), released([2])
    for room in range(len(texts(first)[MERGED_LOG])):
        output = tmp_path / str(room)
        with sink_at(output) as sink:
            with limit(resource.RLIMIT_FSIZE, room):
                with pytest.raises(OSError, match="File too large") as caught:
                    sink.write(first)
                assert str(output) in str(caught.value.filename)
                with pytest.raises(OSError, match="File too large"):
                    sink.write(second)
                with pytest.raises(OSError, match="File too large"):
                    sink.retry()
            assert logs(output) == {name: text[:room] for name, text in texts(first, second).items()}
            sizes = sink.sizes()
            sink.retry()
            assert sink.unwritten == 0
            assert sizes == {name: len(text) for name, text in texts(first, second).items()}
        assert logs(output) == texts(first, second)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 64 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "rankd-test", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_full_disk_that_is_freed_again(small_disk: Path) -> None:
    """On a full disk nothing is lost or written twice: when there is room again, the logs are what they should be."""
    (small_disk / "somebody else's").write_bytes(bytes(40_000))
    writes = [released([step], ranks=3) for step in range(1, 60)]
    failed = 0
    with sink_at(small_disk) as sink:
        for write in writes:
            with suppress(OSError):
                sink.write(write)
            failed += sink.unwritten > 0
        assert 10 < failed < len(writes)
        with pytest.raises(OSError, match="No space left on device"):
            sink.retry()
        sink.settle()  # nothing to cut, and no error for what merely waits
        (small_disk / "somebody else's").unlink()
        sink.retry()
        assert sink.unwritten == 0
        assert (small_disk / MERGED_LOG).stat().st_size == sink.sizes()[MERGED_LOG]
    assert logs(small_disk) == texts(*writes)


def test_one_log_that_cannot_be_opened_does_not_stop_the_others(tmp_path: Path) -> None:
    """A log whose place is taken waits; the others are written, and it follows when the place is free."""
    (tmp_path / rank_log(0)).mkdir(parents=True)
    with sink_at(tmp_path) as sink:
        with pytest.raises(IsADirectoryError, match="rank_0"):
            sink.write(released([1]))
        assert (tmp_path / MERGED_LOG).read_bytes() == texts(released([1]))[MERGED_LOG]
        (tmp_path / rank_log(0)).rmdir()
        sink.retry()
    assert logs(tmp_path) == texts(released([1]))


@pytest.mark.parametrize("more", [0, 1, 2])
def test_ranks_that_come_when_no_file_can_be_opened_lose_nothing(tmp_path: Path, more: int) -> None:
    """Their logs' directories cannot even be looked at: what is written for them, and for all others, waits."""
    writes = [released([1], ranks=1), released([2], ranks=4), released([3], ranks=5)]
    with sink_at(tmp_path) as sink:
        sink.write(writes[0])
        lowest = os.open(tmp_path, os.O_RDONLY)
        os.close(lowest)
        with limit(resource.RLIMIT_NOFILE, lowest + more):
            for each in writes[1:]:
                with pytest.raises(OSError, match="Too many open files"):
                    sink.write(each)
        sink.retry()
        assert sink.unwritten == 0
        assert sink.sizes() == {name: len(text) for name, text in texts(*writes).items()}
    assert logs(tmp_path) == texts(*writes)


# -- restarts ---------------------------------------------------------------------------------------------------------

FIRST, SECOND, THIRD = released([1]), released([2]), released([3], ranks=3)
ALL = texts(FIRST, SECOND, THIRD)
CHECKPOINT = {name: len(text) for name, text in texts(FIRST).items()}


def put(output: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_bytes(content)


@pytest.mark.slow
def test_resume_completes_a_log_torn_at_any_byte(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a crash at any byte beyond the checkpoint, the repeated writes complete the logs, and repeat no byte."""
    for extra in range(len(ALL[MERGED_LOG]) - CHECKPOINT[MERGED_LOG] + 1):
        output = tmp_path / str(extra)
        put(output, {name: text[: CHECKPOINT.get(name, 0) + extra] for name, text in ALL.items()})
        with sink_at(output) as sink:
            sink.resume(CHECKPOINT)
            assert {name: size for name, size in sink.sizes().items() if size} == CHECKPOINT
            sink.write(SECOND)
            sink.write(THIRD)
            sink.settle()
            assert sink.sizes() == {name: len(text) for name, text in ALL.items()}
        assert logs(output) == ALL
    assert not caplog.records


def test_resume_leaves_in_place_what_a_follower_has_seen(tmp_path: Path) -> None:
    """Bytes that the log holds already are not written again: the file neither shrinks nor changes its time."""
    put(tmp_path, ALL)
    os.utime(tmp_path / MERGED_LOG, (1, 1))
    with sink_at(tmp_path) as sink:
        sink.resume(CHECKPOINT)
        sink.write(SECOND)
        sink.write(THIRD)
        sink.settle()
    assert (tmp_path / MERGED_LOG).stat().st_mtime == 1


def test_settle_cuts_what_was_not_made_again(tmp_path: Path) -> None:
    """What the journal does not have goes from the logs at any byte, logs of unknown ranks included; it is kept beside
    them, for nobody else has these records any more.
    """
    for extra in (1, 7, 1000):
        put(tmp_path, {name: text + b"x" * extra for name, text in ALL.items()} | {rank_log(7): b"# x\n"})
        with sink_at(tmp_path) as sink:
            sink.resume(CHECKPOINT)
            sink.write(SECOND)
            sink.write(THIRD)
            sink.settle()
            sink.write([Comment(7, "note", "new")])
        assert logs(tmp_path) == texts(FIRST, SECOND, THIRD, [Comment(7, "note", "new")])
        for name, text in ALL.items():
            assert (tmp_path / f"{name}.{len(text)}.cut").read_bytes() == b"x" * extra
        assert (tmp_path / f"{rank_log(7)}.0.cut").read_bytes() == b"# x\n"


def test_settle_without_repeated_writes(tmp_path: Path) -> None:
    """If nothing is repeated, the logs go back to the checkpoint; without one, to nothing."""
    put(tmp_path, ALL)
    with sink_at(tmp_path) as sink:
        sink.resume(CHECKPOINT)
        sink.settle()
        assert {name: text for name, text in logs(tmp_path).items() if text} == texts(FIRST)
        sink.resume({})
        sink.settle()
    assert not any(logs(tmp_path).values())


def test_log_shorter_than_its_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A log that somebody truncated is named with the missing bytes, and written on; its size counts from there."""
    put(tmp_path, texts(FIRST) | {MERGED_LOG: b"cut"})
    with sink_at(tmp_path) as sink:
        sink.resume(CHECKPOINT)
        sink.write(SECOND)
        sink.settle()
        sizes = dict(sink.sizes())
        assert sizes[MERGED_LOG] == (tmp_path / MERGED_LOG).stat().st_size
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert str(tmp_path / MERGED_LOG) in warning.getMessage()
    assert f"{CHECKPOINT[MERGED_LOG] - 3} bytes" in warning.getMessage()
    assert (tmp_path / MERGED_LOG).read_bytes() == b"cut" + texts(SECOND)[MERGED_LOG]
    with sink_at(tmp_path) as again:
        again.resume(sizes)
        again.write(THIRD)
        again.settle()
    assert (tmp_path / MERGED_LOG).read_bytes() == b"cut" + texts(SECOND, THIRD)[MERGED_LOG]


@pytest.mark.parametrize("good", [0, 1, 60])
def test_log_that_differs_from_the_journal(tmp_path: Path, caplog: pytest.LogCaptureFixture, good: int) -> None:
    """Zeros that a power cut left behind are replaced from the first wrong byte on, with a warning."""
    start = CHECKPOINT[MERGED_LOG] + good
    put(tmp_path, ALL | {MERGED_LOG: ALL[MERGED_LOG][:start] + bytes(len(ALL[MERGED_LOG]) - start)})
    with sink_at(tmp_path) as sink:
        sink.resume(CHECKPOINT)
        sink.write(SECOND)
        sink.write(THIRD)
        sink.settle()
    assert logs(tmp_path) == ALL
    (warning,) = caplog.records
    assert f"{MERGED_LOG} differs from the journal after byte {start}" in warning.getMessage()


def test_crash_during_a_retry(tmp_path: Path) -> None:
    """A disk that fills up again while a restart repeats its writes costs nothing either."""
    put(tmp_path, texts(FIRST))
    with sink_at(tmp_path) as sink:
        sink.resume(CHECKPOINT)
        with limit(resource.RLIMIT_FSIZE, CHECKPOINT[MERGED_LOG] + 10), pytest.raises(OSError, match="too large"):
            sink.write(SECOND)
    with sink_at(tmp_path) as sink:
        sink.resume(CHECKPOINT)
        sink.write(SECOND)
        sink.write(THIRD)
        sink.settle()
    assert logs(tmp_path) == ALL


def test_resume_leaves_other_sinks_files_alone(tmp_path: Path) -> None:
    """Names in a checkpoint that are not text logs are somebody else's, also where they climb out of the directory."""
    output = tmp_path / "output"
    put(output, {"records.jsonl": b"{}\n"})
    put(tmp_path, {"victim/monitor.log": b"x"})
    with sink_at(output) as sink:
        sink.resume({"records.jsonl": 0, "../victim/monitor.log": 0, "rank_07/monitor.log": 5})
        sink.settle()
        assert sink.sizes() == {MERGED_LOG: 0}
    assert (output / "records.jsonl").read_bytes() == b"{}\n"
    assert (tmp_path / "victim/monitor.log").read_bytes() == b"x"
