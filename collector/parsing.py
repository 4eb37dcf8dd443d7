"""`rankd parse`: text logs as records: rankd's own, and the training logs that MindFormers writes itself."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from .foreign import MindFormersLog, is_prefixed, rank_of_path
from .protocol.errors import RankdError
from .protocol.jsonl import record_object
from .protocol.records import Record
from .protocol.speclog import parse
from .protocol.wording import counted
from .selection import add_arguments as add_selection
from .selection import selection_of
from .sinks.parts import LogReader, layout_of, log_of_part
from .tail import drop_output

__all__ = ["add_arguments", "records_of_log", "run"]

# So many first lines decide what a file is; MindFormers' logs begin with lines of other programs.
_LOOK = 1_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="merged.log, a rank's log, or MindFormers'")
    parser.add_argument("--of-rank", type=int, metavar="N", help="whose log it is, where its path does not say")
    parser.add_argument(
        "-o", "--to", default="-", metavar="FILE", help="where to, as JSON Lines; -, the default, is standard output"
    )
    add_selection(parser)


def run(args: argparse.Namespace) -> int:
    """Print the records, log after log; 0: there were some, 1: none."""
    selection = selection_of(args)
    logs = _without_parts(args.logs)
    count = 0
    try:
        with _opened(args.to) as out:
            for path in logs:
                for record in filter(selection.has, records_of_log(path, args.of_rank)):
                    out.write(json.dumps(record_object(record), ensure_ascii=False) + "\n")
                    count += 1
    except BrokenPipeError:
        drop_output()
        return 0
    except OSError as e:
        raise RankdError(f"{e.filename}: {e.strerror}") from e
    print(f"{counted(count, 'record')} of {counted(len(logs), 'log')}", file=sys.stderr)
    return 0 if count else 1


@contextlib.contextmanager
def _opened(to: str) -> Iterator[TextIO]:
    if to == "-":
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(encoding="utf-8")  # whatever the locale is: it is JSON
        yield sys.stdout
        sys.stdout.flush()
        return
    with Path(to).open("w", encoding="utf-8", newline="\n") as file:
        yield file


def _without_parts(logs: list[Path]) -> list[Path]:
    """Without those that are parts of another one of them: `rank_3/monitor.log*` names a log and its parts."""
    return [path for path in logs if log_of_part(path) not in logs]


def records_of_log(path: Path, rank: int | None = None) -> Iterator[Record]:
    """The records of one log, whatever kind of these it is; of one that was rotated, those of its older parts too.

    Where the oldest parts were deleted, it says so on standard error; attempts count then from the first that is named.

    Args:
        rank: whose log it is; None: its path says so (a merged log needs neither).

    Raises:
        SpecLogError: a log of rankd's with a line that is not in the format.
        RankdError: it cannot be told whose log it is.
        OSError: it cannot be read.
    """
    with _lines_of(path) as all_lines:
        first = list(itertools.islice(all_lines, _LOOK))
        lines = itertools.chain(first, all_lines)
        if first and first[0].startswith(("[rank_", "[collector] ")):
            yield from (found for found in parse(lines) if isinstance(found, Record))
            return
        whose = rank_of_path(path) if rank is None else rank
        if whose is None:
            raise RankdError(f"{path}: its path names no rank (rank_3/…, worker_3.log); say it with --of-rank")
        if any(map(is_prefixed, first)):
            yield from MindFormersLog(whose).read(lines)
        else:
            yield from (found for found in parse(lines, rank=whose) if isinstance(found, Record))


@contextlib.contextmanager
def _lines_of(path: Path) -> Iterator[Iterator[str]]:
    if layout_of(path).parts:
        with LogReader(path) as log:
            if log.start:
                print(
                    f"note: the first {log.start} bytes of {path} are gone: older parts were deleted", file=sys.stderr
                )
            yield (line.decode(errors="surrogateescape") for line in log.lines())
        return
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        yield iter(file)
