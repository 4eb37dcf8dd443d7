"""The index of the merged log: what it says is true of the log, and a restart makes the same one."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest

from rankd.collector.protocol.records import Comment, Position
from rankd.collector.protocol.speclog import parse
from rankd.collector.run import Released
from rankd.collector.sinks import merged_index
from rankd.collector.sinks.merged_index import MERGED_INDEX, Chunk, IndexWriter, rank_mask, read_entries
from rankd.collector.sinks.speclog import MERGED_LOG, SpecLogSink

from ..releases import begin, late, steps, write_logs


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks in small logs."""
    monkeypatch.setattr(merged_index, "CHUNK_BYTES", 1_000)


def a_run() -> list[Released]:
    """Two attempts, a late block, lines about the run."""
    first = [*begin(1), *steps(1, 9), late(3, 1), Comment(None, "note", "hello"), *steps(10, 12)]
    return [*first, *begin(2), *steps(10, 30, ranks=(0, 1), attempt=2), *steps(31, 60, attempt=2)]


def test_each_chunk_says_what_is_in_it(tmp_path: Path) -> None:
    """Chunks begin at blocks, cover the log without a hole, and name its ranks and positions."""
    write_logs(tmp_path, a_run())
    log = (tmp_path / MERGED_LOG).read_bytes()
    chunks = list(read_entries((tmp_path / MERGED_INDEX).read_bytes()))
    assert len(chunks) > 20
    assert [c.start for c in chunks] == [0, *(c.end for c in chunks[:-1])]
    for chunk, after in itertools.pairwise(chunks):
        attempt = b"[collector] # attempt %d world_size 3\n" % chunk.key[0]
        found = list(parse([attempt, *log[chunk.start : chunk.end].splitlines(keepends=True)]))[1:]
        ranks = {each.rank for each in found if each.rank is not None}
        assert chunk.ranks == rank_mask(ranks)
        keys = [each.position.key for each in found if not isinstance(each, Comment)]
        is_late = any(isinstance(each, Comment) and each.kind == "late" for each in found)
        assert chunk.unordered == is_late
        assert is_late or chunk.key == keys[0] <= keys[-1] <= after.key


@pytest.mark.parametrize("checkpoint_at", [0, 1, 5, 9])
@pytest.mark.parametrize("crash_at", [10, 20])
def test_a_restart_makes_the_same_index(tmp_path: Path, checkpoint_at: int, crash_at: int) -> None:
    """From any checkpoint, the index is byte for byte the one of a run without a restart."""
    released = a_run()
    pieces = [released[i : i + 13] for i in range(0, len(released), 13)]
    whole, restarted = tmp_path / "whole", tmp_path / "restarted"
    write_logs(whole, released, each=13)
    sink = SpecLogSink(restarted, index=True)
    sizes = dict(sink.sizes())
    for number, piece in enumerate(pieces[:crash_at]):
        if number == checkpoint_at:
            sizes = dict(sink.sizes())
        sink.write(piece)
    sink.close()
    sink = SpecLogSink(restarted, index=True)
    sink.resume(sizes)
    for piece in pieces[checkpoint_at:]:
        sink.write(piece)
    sink.settle()
    sink.close()
    for name in (MERGED_INDEX, MERGED_LOG):
        assert (restarted / name).read_bytes() == (whole / name).read_bytes()


def test_of_a_log_without_index_nothing_is_claimed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An index that begins late, or was deleted, says that anything may be in what it has not seen."""
    write_logs(tmp_path, a_run(), index=False)
    before = (tmp_path / MERGED_LOG).stat().st_size
    write_logs(tmp_path, steps(61, 70, attempt=2))
    first = next(read_entries((tmp_path / MERGED_INDEX).read_bytes()))
    assert first == Chunk(0, before)
    sink = SpecLogSink(tmp_path, index=True)
    sizes = {MERGED_LOG: (tmp_path / MERGED_LOG).stat().st_size, **IndexWriter().freeze(), MERGED_INDEX: 400}
    (tmp_path / MERGED_INDEX).unlink()
    with caplog.at_level(logging.WARNING):
        sink.resume(sizes)
    sink.write(steps(71, 80, attempt=2))
    sink.close()
    assert next(read_entries((tmp_path / MERGED_INDEX).read_bytes())) == Chunk(0, sizes[MERGED_LOG])


def test_reading_ends_at_what_is_no_entry(tmp_path: Path) -> None:
    """A torn last entry is left out; entries that do not rise are those of another log."""
    write_logs(tmp_path, a_run())
    raw = (tmp_path / MERGED_INDEX).read_bytes()
    whole = list(read_entries(raw))
    assert list(read_entries(raw[:-1])) == whole[:-1]
    assert list(read_entries(raw + raw)) == whole
    assert list(read_entries(b"x")) == []


def test_more_than_64_ranks_share_bits() -> None:
    """A rank's own bit is always among those of its chunk."""
    assert rank_mask([3, 67]) == 8
    assert rank_mask([]) == 0


def test_the_state_between_entries_is_all_in_the_checkpoint() -> None:
    """A writer that is thawed after each block gives what one that lives on gives."""
    lasting, thawed = IndexWriter(), IndexWriter()
    end = 0
    for each in a_run():
        assert lasting.take(each, 400) == thawed.take(each, 400)
        end += 400
        thawed = IndexWriter.thaw(thawed.freeze(), end)
    assert Position.from_key((1, 1, 1)) < Position.from_key((1, 1, 2))
