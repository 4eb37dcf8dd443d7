"""`rankd rebuild`: make all logs of a run again from its journal, byte for byte, into a fresh directory."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .entries import Checkpoint
from .memory import collect_garbage_seldom, keep_freed_memory
from .printers import Printers
from .protocol.arguments import whole_number
from .protocol.errors import JournalError, RankdError
from .protocol.wording import counted
from .replay import Replay
from .run import Released
from .sinks.speclog import MERGED_LOG, SpecLogSink, cut_batches

__all__ = ["add_arguments", "printers_for", "progress_line", "rebuild", "run"]

# What one write of the logs takes at most where blocks have few bytes: enough to make the files' cost small.
_BATCH_MOST = 4_096
# One process makes the logs of so much journal in less than a second; to start others takes a third of that.
_ALONE_BYTES = 32 * 2**20
# Reading and ordering the journal takes a quarter of the time that printing takes: more processes would find no work.
_MOST_PRINTERS = 8
# What a person may ask for; each takes some 50 MB.
_MOST_NAMED = 64
# How often the progress on a terminal is renewed, in seconds.
_SHOW_EVERY = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("output", type=Path, help="output directory of the run; it is only read")
    parser.add_argument("--into", type=Path, required=True, metavar="DIR", help="where to; must be empty or not exist")
    parser.add_argument(
        "--printers",
        type=whole_number(0, _MOST_NAMED),
        metavar="N",
        help="processes that print the logs, beside this one, which reads the journal; 0: this one does all (default: "
        f"one for each processor that may be used, at most {_MOST_PRINTERS}; 0 for a small journal)",
    )


def printers_for(journal: int) -> int:
    """How many processes print the logs of so many bytes of journal; 0: the one that reads it does all."""
    processors = len(os.sched_getaffinity(0))
    return 0 if journal < _ALONE_BYTES or processors < 2 else min(processors, _MOST_PRINTERS)


def run(args: argparse.Namespace) -> int:
    """Rebuild and say what was made; 0: done, 1: the journal is damaged, and what comes before that was made."""
    keep_freed_memory()
    collect_garbage_seldom()
    with progress_line("rebuilding") as show:
        replay = rebuild(args.output, args.into, show, args.printers)
    if replay.tail.size and replay.tail.torn:
        last = replay.segments[-1]
        print(f"note: {last} ends with {counted(replay.tail.size, 'byte')} of an unfinished entry, which is left out")
    what = f"{counted(replay.entries, 'entry', 'entries')} of {counted(len(replay.segments), 'segment')}"
    print(f"{what} made again: {args.into / MERGED_LOG}")
    if (damage := replay.damage()) is not None:
        print(f"rankd rebuild: {damage}", file=sys.stderr)
        return 1
    return 0


def rebuild(output: Path, into: Path, progress: Callable[[int, int], None], printers: int | None = None) -> Replay:
    """Make all logs again below `into`; returns the journal as it was read.

    Args:
        progress: called now and then with the bytes read and the bytes in all.
        printers: processes that print, beside this one; 0: this one does all; None: as `printers_for` says.

    Raises:
        RankdError: `into` is not fit, or there is no journal, or it is damaged, or the disk is full, or one
            of the processes was killed; says why.
    """
    if into.resolve() == output.resolve() or output.resolve() in into.resolve().parents:
        raise RankdError(f"--into {into} lies in the run's own directory, which is only read; choose another place")
    replay = Replay(output)
    if not replay.whole:
        gone = f"the segments before {replay.segments[0].name} were deleted (rankd.journal.keep)"
        raise RankdError(f"{output}: {gone}, so the beginning of the logs cannot be made again")
    try:
        if into.exists() and (not into.is_dir() or any(into.iterdir())):
            raise RankdError(f"--into {into} is not an empty directory; choose a fresh one, nothing is written over")
        into.mkdir(parents=True, exist_ok=True)
        _write_logs(replay, into, progress, printers_for(replay.bytes) if printers is None else printers)
    except OSError as e:
        raise RankdError(f"the logs cannot be written into {into}: {e}") from e
    return replay


def _write_logs(replay: Replay, into: Path, progress: Callable[[int, int], None], printers: int) -> None:
    try:
        released = _released(replay, progress)
        if started := _started(into, printers):
            _write_with(started, released)
        else:
            _write_alone(SpecLogSink(into), released)
    finally:
        replay.close()


def _started(into: Path, count: int) -> Printers | None:
    if not count:
        return None
    try:
        return Printers(into, count)
    except OSError:
        return None  # no more processes are allowed here; it takes longer then


def _released(replay: Replay, progress: Callable[[int, int], None]) -> Iterator[Released]:
    for located in replay.read(progress):
        if not isinstance(located.entry, Checkpoint):
            yield from replay.run.apply(located.entry, located.reference)


def _write_alone(sink: SpecLogSink, released: Iterator[Released]) -> None:
    try:
        sink.resume({})
        for batch in cut_batches(released, most=_BATCH_MOST):
            sink.write(batch)
        sink.settle()
    finally:
        sink.close()


def _write_with(printers: Printers, released: Iterator[Released]) -> None:
    with printers:
        try:
            printers.write(released)
        except JournalError:
            printers.finish()  # what comes before the damage
            raise
        printers.finish()


@contextmanager
def progress_line(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function that shows (done, total) as a line on the terminal, gone at the end; shows nothing elsewhere."""
    shown_at = time.monotonic()
    shown = False

    def show(done: int, total: int) -> None:
        nonlocal shown, shown_at
        now = time.monotonic()
        if now - shown_at >= _SHOW_EVERY and sys.stderr.isatty():
            shown, shown_at = True, now
            percent = 100 * done / max(total, 1)
            print(f"\r{what}: {percent:3.0f} % of {total / 2**20:,.0f} MiB", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
