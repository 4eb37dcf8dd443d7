"""A process that prints batches of a run's logs and writes the text to its place, for `printers`.

Batches come on standard input, answers go to standard output. Its end is the end of the input, so it outlives nobody.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from .batches import BatchReader, Kind, Message, next_message, pack
from .memory import collect_garbage_seldom, keep_freed_memory
from .protocol.normlines import load_numpy
from .protocol.speclog import Renderer
from .sinks.files import Buffer, OpenFiles, write_at
from .sinks.speclog import log_parts

__all__ = ["main"]


class _Printer:
    """Prints a batch when it comes, and keeps its text until the place of that is known."""

    def __init__(self, into: Path) -> None:
        self._into = into
        self._reader = BatchReader()
        self._renderer = Renderer()
        self._files = OpenFiles(append=False)
        self._kept: deque[Mapping[str, Sequence[Buffer]]] = deque()

    def answer(self, message: Message) -> bytes:
        """Do what the message says."""
        kind, *fields = message
        if kind == Kind.PRINT:
            logs = log_parts(self._renderer, self._reader.released(*fields))
            self._kept.append(logs)
            return pack(Kind.PRINTED, {name: sum(map(len, parts)) for name, parts in logs.items()})
        (places,) = fields
        try:
            self._write(places)
        except OSError as e:
            return pack(Kind.FAILED, e.errno, e.strerror, e.filename)
        return pack(Kind.WRITTEN)

    def _write(self, places: Mapping[str, int]) -> None:
        for name, parts in self._kept.popleft().items():
            path = self._into / name
            try:
                write_at(self._files.open(path), parts, places[name])
            except OSError as e:
                # With the file's name, which the calls that write leave out.
                raise OSError(e.errno, e.strerror, str(path)) from e


def _serve(into: Path, source: BinaryIO, answers: int) -> None:
    printer = _Printer(into)
    while (message := next_message(source)) is not None:
        left = memoryview(printer.answer(message))
        while left:
            left = left[os.write(answers, left) :]


def main() -> int:
    """`python -m rankd.collector.printer DIR`: write the logs below DIR. Always 0: the answers say what went wrong."""
    # Nothing but answers may get there, whatever some library prints.
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    keep_freed_memory()
    collect_garbage_seldom()
    load_numpy()
    with contextlib.suppress(BrokenPipeError):  # nobody waits for the answer any more
        _serve(Path(sys.argv[1]), sys.stdin.buffer, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
