"""`rankd rebuild`: make all logs of a run again from its journal, byte for byte, into a fresh directory."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .entries import Checkpoint
from .memory import keep_freed_memory
from .protocol.errors import RankdError
from .protocol.wording import counted
from .replay import Replay
from .run import Released
from .sinks.speclog import MERGED_LOG, SpecLogSink

__all__ = ["add_arguments", "progress_line", "rebuild", "run"]

# What one write of the logs takes: enough to make the files' cost small, little enough to hold in memory.
_BATCH_ENTRIES = 256
_BATCH_RELEASED = 4_096
# How often the progress on a terminal is renewed, in seconds.
_SHOW_EVERY = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("output", type=Path, help="output directory of the run; it is only read")
    parser.add_argument("--into", type=Path, required=True, metavar="DIR", help="where to; must be empty or not exist")


def run(args: argparse.Namespace) -> int:
    """Rebuild and say what was made; 0: done."""
    keep_freed_memory()
    with progress_line("rebuilding") as show:
        replay = rebuild(args.output, args.into, show)
    if replay.tail.size:
        last = replay.segments[-1]
        print(f"note: {last} ends with {counted(replay.tail.size, 'byte')} of an unfinished entry, which is left out")
    what = f"{counted(replay.entries, 'entry', 'entries')} of {counted(len(replay.segments), 'segment')}"
    print(f"{what} made again: {args.into / MERGED_LOG}")
    return 0


def rebuild(output: Path, into: Path, progress: Callable[[int, int], None]) -> Replay:
    """Make all logs again below `into`; returns the journal as it was read.

    Raises:
        RankdError: `into` is not fit, or there is no journal, or it is damaged, or the disk is full; says why.
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
        _write_logs(replay, into, progress)
    except OSError as e:
        raise RankdError(f"the logs cannot be written into {into}: {e}") from e
    return replay


def _write_logs(replay: Replay, into: Path, progress: Callable[[int, int], None]) -> None:
    sink = SpecLogSink(into)
    try:
        sink.resume({})
        batch: list[Released] = []
        for count, located in enumerate(replay.read(progress), 1):
            if isinstance(located.entry, Checkpoint):
                continue
            batch += replay.run.apply(located.entry, located.reference)
            if count % _BATCH_ENTRIES == 0 or len(batch) >= _BATCH_RELEASED:
                sink.write(batch)
                batch.clear()
        sink.write(batch)
        sink.settle()
    finally:
        replay.close()
        sink.close()


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
