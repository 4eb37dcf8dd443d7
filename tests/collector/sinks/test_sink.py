"""The sinks that stand for none and for several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from rankd.collector.protocol.records import Comment, RankBlock
from rankd.collector.sinks.sink import FanOut, Off, Sink
from rankd.collector.sinks.speclog import MERGED_LOG, SpecLogSink

NOTE = [Comment(None, "note", "x")]
LINE = b"[collector] # note x\n"


class Broken(Off):
    """A sink with a bug."""

    def write(self, released: Sequence[RankBlock | Comment]) -> None:
        raise ZeroDivisionError("a bug")

    def sizes(self) -> Mapping[str, int]:
        return {"broken.log": 0}


def blocked(output: Path) -> SpecLogSink:
    """A sink whose merged log cannot be opened."""
    (output / MERGED_LOG).mkdir(parents=True)
    return SpecLogSink(output)


def test_failing_sink_keeps_nothing_from_the_others(tmp_path: Path) -> None:
    """What one sink cannot write the others still get, once; a retry gives the failed one its part."""
    sinks: list[Sink] = [blocked(tmp_path / "a"), SpecLogSink(tmp_path / "b")]
    both = FanOut(sinks)
    with pytest.raises(IsADirectoryError, match=r"a/merged\.log"):
        both.write(NOTE)
    with pytest.raises(IsADirectoryError, match=r"a/merged\.log"):
        both.retry()
    (tmp_path / "a" / MERGED_LOG).rmdir()
    both.retry()
    both.close()
    assert [(tmp_path / where / MERGED_LOG).read_bytes() for where in "ab"] == [LINE, LINE]


def test_several_failures_are_told_as_one(tmp_path: Path) -> None:
    """When several sinks cannot write, the one error names the file of each."""
    both = FanOut([blocked(tmp_path / "a"), blocked(tmp_path / "b")])
    with pytest.raises(IsADirectoryError, match=r"a/merged\.log.*b/merged\.log"):
        both.write(NOTE)


def test_bug_in_a_sink_is_raised_when_the_others_have_theirs(tmp_path: Path) -> None:
    """A sink with a bug does not keep the others from writing, and its bug outweighs a full disk."""
    all_three = FanOut([blocked(tmp_path / "a"), Broken(), SpecLogSink(tmp_path / "b")])
    with pytest.raises(ZeroDivisionError):
        all_three.write(NOTE)
    all_three.close()
    assert (tmp_path / "b" / MERGED_LOG).read_bytes() == LINE


def test_fan_out_joins_sizes_and_passes_on_a_restart(tmp_path: Path) -> None:
    """The sizes of all sinks make one checkpoint, and each sink takes its own part of it."""
    first = FanOut([Broken(), SpecLogSink(tmp_path)])
    with pytest.raises(ZeroDivisionError):
        first.write(NOTE)
    sizes = first.sizes()
    first.close()
    assert sizes == {"broken.log": 0, MERGED_LOG: len(LINE)}
    (tmp_path / MERGED_LOG).write_bytes(LINE + b"torn")
    second = FanOut([Off(), SpecLogSink(tmp_path)])
    second.resume(sizes)
    second.settle()
    second.close()
    assert (tmp_path / MERGED_LOG).read_bytes() == LINE


def test_off_does_nothing() -> None:
    """The sink for no output takes everything and has no files."""
    sink: Sink = Off()
    sink.resume({"x": 1})
    sink.write(NOTE)
    sink.retry()
    sink.settle()
    sink.close()
    assert sink.sizes() == {}
