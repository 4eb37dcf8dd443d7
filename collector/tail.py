"""`rankd tail`: the merged log of a run, its history and as it grows; from the files, or over the network.

Reads only; a slow reader never slows the collector.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import select
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from .asking import add_arguments as add_place
from .asking import asker_of, is_remote
from .following import Line
from .growing import GrowingFile
from .history import History
from .protocol.arguments import whole_number
from .protocol.errors import RankdError
from .protocol.jsonl import comment_object, record_object
from .protocol.records import Comment
from .protocol.wording import counted
from .remotelog import RemoteGrowing, RemoteSource
from .selection import Selection, selection_of
from .selection import add_arguments as add_selection
from .sinks.gzipped import DamagedPartError
from .sinks.parts import layout_of
from .sinks.speclog import MERGED_LOG

__all__ = ["add_arguments", "drop_output", "run"]

# How many lines of history are shown unless told otherwise; as `tail` does.
_LINES = 10
# How often a log that does not grow is looked at, in milliseconds.
_LOOK_MS = 50
# The same over the network: a question and an answer of some bytes.
_ASK_MS = 200
# The last line of a run that is over.
_END = b"[collector] # end "
# Colours of the 256 that can be read on light and dark ground; neighbouring ranks get different ones.
_COLOURS = (33, 166, 35, 133, 37, 162, 100, 69, 172, 71, 127, 31)
_COMMENT_COLOUR = b"\x1b[1m"
_PLAIN = b"\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_place(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on as the log grows, until Ctrl-C")
    parser.add_argument(
        "-n",
        "--lines",
        type=whole_number(0),
        metavar="N",
        help=f"the last N lines; default {_LINES}, or with --step all",
    )
    add_selection(parser)
    parser.add_argument("--json", action="store_true", help="a JSON object for each record, values as printed")


def run(args: argparse.Namespace) -> int:
    """Print what is wanted; 0 also when the reader of the output has gone."""
    selection = selection_of(args)
    printer = _Printer(sys.stdout.buffer, selection if args.json else None)
    try:
        (_show_remote if is_remote(args) else _show_local)(args, selection, printer)
    except BrokenPipeError:
        drop_output()
    except DamagedPartError as e:
        raise RankdError(f"{e.filename} {e.strerror}; `rankd rebuild` makes the log again from the journal") from e
    return 0


def _show_local(args: argparse.Namespace, selection: Selection, printer: _Printer) -> None:
    path: Path = args.output / MERGED_LOG
    if not args.follow and not path.exists() and not layout_of(path).end:
        raise RankdError(f"{path} is not there; is {args.output} the output directory of a run (rankd.output)?")
    with History(args.output, selection, records=args.json) as history:
        _show(args, history, printer)
        if args.follow:
            file = GrowingFile(path, history.size)
            try:
                _follow(file, str(path), _LOOK_MS, history, printer)
            finally:
                file.close()


def _show_remote(args: argparse.Namespace, selection: Selection, printer: _Printer) -> None:
    with asker_of(args) as asker:
        with History(RemoteSource(asker, args.endpoint), selection, records=args.json) as history:
            _show(args, history, printer)
        if args.follow:
            _follow(RemoteGrowing(asker, history.size), args.endpoint, _ASK_MS, history, printer)


def _show(args: argparse.Namespace, history: History, printer: _Printer) -> None:
    wanted = args.lines if args.lines is not None or args.step is not None else _LINES
    count = printer.print(history.last(wanted) if wanted is not None else history.all())
    nothing = not count and wanted != 0
    if nothing and history.size and not args.follow:
        _tell(history.selection.nothing(whole=history.whole))
    for note in history.notes(nothing=nothing):
        _tell(note)


def _follow(log: GrowingFile | RemoteGrowing, name: str, look_ms: int, history: History, printer: _Printer) -> None:
    missed, answers, ended = 0, True, False
    # A pipe whose other end has gone is noticed while nothing comes that could be written to it.
    poller = select.poll()
    poller.register(sys.stdout.fileno(), 0)
    while True:
        try:
            new = log.lines()
        except RankdError as e:
            if ended:
                return  # the collector of a run that is over
            if answers:
                _tell(f"{e}; trying again")
            new, answers = b"", False
        if new:
            if log.missed > missed:
                _tell(f"{counted(log.missed - missed, 'byte')} of {name} deleted before this could be shown")
                missed = log.missed
            answers, ended = True, _END in new[new.rfind(b"\n", 0, -1) + 1 :]
            printer.print(history.filter.choose(new.splitlines(keepends=True)))
        elif poller.poll(look_ms):
            return


def _tell(note: str) -> None:
    sys.stderr.write(f"note: {note}\n")
    sys.stderr.flush()


def drop_output() -> None:
    """What is still buffered has nowhere to go: let the interpreter's exit not complain of it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Printer:
    """Writes lines as somebody wants to read them: coloured by rank on a terminal, otherwise plain.

    Args:
        as_json: not None: as JSON, those of a line's records that are in this selection.
    """

    def __init__(self, out: BinaryIO, as_json: Selection | None) -> None:
        self._out = out
        coloured = out.isatty() and not os.environ.get("NO_COLOR")
        self._text: Callable[[Line], bytes] = _coloured if coloured else _plain
        if as_json is not None:
            self._text = functools.partial(_json_of, as_json)

    def print(self, lines: Iterable[Line]) -> int:
        """Print these; how many bytes they were."""
        count = sum(self._out.write(self._text(line)) for line in lines)
        self._out.flush()
        return count


def _plain(line: Line) -> bytes:
    return line.text


def _coloured(line: Line) -> bytes:
    end = line.text.find(b"] ") + 2
    own = line.text[end:-1]
    if own.startswith(b"# "):
        own = _COMMENT_COLOUR + own + _PLAIN
    if line.rank is None:
        return line.text[:end] + own + b"\n"
    return b"\x1b[38;5;%dm%s\x1b[0m%s\n" % (_COLOURS[line.rank % len(_COLOURS)], line.text[:end], own)


def _json_of(selection: Selection, line: Line) -> bytes:
    objects = [
        comment_object(each) if isinstance(each, Comment) else record_object(each)
        for each in line.found()
        if isinstance(each, Comment) or selection.has(each)
    ]
    return b"".join(json.dumps(each, ensure_ascii=False).encode() + b"\n" for each in objects)
