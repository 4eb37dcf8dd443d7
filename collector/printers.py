"""Prints a run's logs with several processes; they are byte for byte those of one.

Printing and writing is most of the work of `rankd rebuild`, and of a batch of blocks it depends on nothing else. So
this process cuts what is released into batches and gives each to the printing process (`printer`) that has least to do.
That prints it and says how long the text is for each log; as soon as this is known of all batches before, it is told
where the text belongs, and writes it there. Meanwhile it prints the next one.

One thread does all this here, with pipes that never block it: a process that is slow, stopped or dead holds up no other
answer. A printing process ends when its input does, so it cannot outlive this one, whatever ends that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from .batches import Batch, BatchWriter, Kind, Message, Places, pack, take_messages
from .protocol.errors import RankdError
from .protocol.records import Comment, RankBlock
from .sinks.speclog import MERGED_LOG, cut_batches

__all__ = ["Printers"]

# Of columns; a norm's 8 bytes become some 160 of text. Half as many cost 5 % more of this process's time, which is
# what limits many printing ones; with twice as many, the memory of a text is given back and taken again (`memory`).
_BATCH_BYTES = 2**17
# Blocks of single scalars and comments have few bytes, and cost as much to print as many more.
_BATCH_MOST = 512
# Batches that a process has at once: one to print, one whose place is not known yet, and one more for when this process
# does not get a processor. They are all that lies between the journal and a slow disk.
_IN_FLIGHT = 3
# Some batches: this process goes on at once when it has handed one over. The most that Linux gives to everybody.
_PIPE_BYTES = 2**20
_READ_BYTES = 2**16


class Printers:
    """`count` processes that print what `give` gets into the logs below `into`, where there are none yet.

    A context manager: at its end, whatever that is, none of the processes is left. Where `finish` has not come to its
    end then, each log is cut to what is whole: what it would hold if nothing had been released after that.

    Raises:
        RankdError: a process has ended before its time.
        OSError: not even one process could be started; later: of the first log that could not be written.
    """

    def __init__(self, into: Path, count: int) -> None:
        self._into = into
        self._places = Places()
        self._selector = selectors.DefaultSelector()
        self._printers: list[_Process] = []
        try:
            for _ in range(count):
                self._printers.append(_Process(into, self._selector))
        except BaseException as e:
            # Where there is a limit of processes, those that could be started do it too.
            if not isinstance(e, OSError) or not self._printers:
                self._end()
                raise

    def __enter__(self) -> Printers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end()
        for name, size in self._places.whole().items():
            # A log that is not there, or a file system that has gone: what was raised before says more.
            with contextlib.suppress(OSError):
                if (self._into / name).stat().st_size > size:
                    os.truncate(self._into / name, size)

    def _end(self) -> None:
        for printer in self._printers:
            printer.end()
        self._selector.close()

    def write(self, released: Iterable[RankBlock | Comment]) -> None:
        """Print all of these, which may be a generator; waits where the processes have enough to do."""
        for batch in cut_batches(released, _BATCH_BYTES, _BATCH_MOST):
            self._turn(0)
            while (printer := min(self._printers, key=lambda p: len(p.unwritten))).busy:
                self._turn(None)
            printer.give(self._places.add(self._printers.index(printer)), batch)

    def finish(self) -> None:
        """Wait until all is in the logs."""
        while self._places.unwritten:
            self._turn(None)
        (self._into / MERGED_LOG).touch()  # also of a run in which nothing was released

    def _turn(self, timeout: float | None) -> None:
        """Take what has come, and hand on what there is room for."""
        for key, events in self._selector.select(timeout):
            printer: _Process = key.data
            if events & selectors.EVENT_READ:
                for message in printer.receive():
                    self._answered(printer, message)
            elif events & selectors.EVENT_WRITE:
                printer.flush()

    def _answered(self, printer: _Process, message: Message) -> None:
        kind, *fields = message
        if kind == Kind.PRINTED:
            for batch in self._places.printed(printer.unprinted.popleft(), *fields):
                self._printers[batch.printer].place(batch)
        elif kind == Kind.WRITTEN:
            self._places.written(printer.unwritten.popleft())
        else:
            raise OSError(*fields)


class _Process:
    """One printing process: the pipes to and from it, and what it has been given."""

    def __init__(self, into: Path, selector: selectors.BaseSelector) -> None:
        self.unprinted: deque[Batch] = deque()
        self.unwritten: deque[Batch] = deque()
        self._selector = selector
        self._batches = BatchWriter()
        self._sending = bytearray()
        self._watched = False
        self._received = bytearray()
        self._process = subprocess.Popen(  # noqa: S603 - our own module, no shell
            [sys.executable, "-m", "rankd.collector.printer", str(into)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # Ctrl-C is for this process, which ends the others. numpy is there for tables of digits, not for algebra:
            # without a thread for each processor it starts sooner.
            start_new_session=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._input.fileno(), False)
        os.set_blocking(self._output.fileno(), False)
        with contextlib.suppress(OSError):  # all pipes of a user together have a limit
            fcntl.fcntl(self._input, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        selector.register(self._output, selectors.EVENT_READ, self)

    @property
    def busy(self) -> bool:
        """It has enough to do."""
        return len(self.unwritten) >= _IN_FLIGHT

    def give(self, batch: Batch, released: Iterable[RankBlock | Comment]) -> None:
        """Have it printed."""
        self.unprinted.append(batch)
        self.unwritten.append(batch)
        self._send(self._batches.message(released))

    def place(self, batch: Batch) -> None:
        """Have it written where it belongs. Batches come here in the order in which they were given."""
        self._send(pack(Kind.WRITE, batch.places))

    def _send(self, message: bytes) -> None:
        # Nearly always it fits the pipe, and is not copied.
        written = 0 if self._sending else self._hand_over(message)
        self._sending += memoryview(message)[written:]
        self._watch()

    def flush(self) -> None:
        """Hand over what fits the pipe."""
        del self._sending[: self._hand_over(self._sending)]
        self._watch()

    def _hand_over(self, data: bytes | bytearray) -> int:
        try:
            return os.write(self._input.fileno(), data)
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            raise self._gone() from None

    def _watch(self) -> None:
        """Hear of room in the pipe as long as something waits for it."""
        if bool(self._sending) is not self._watched:
            self._watched = not self._watched
            if self._watched:
                self._selector.register(self._input, selectors.EVENT_WRITE, self)
            else:
                self._selector.unregister(self._input)

    def receive(self) -> list[Message]:
        """What it has answered."""
        received = os.read(self._output.fileno(), _READ_BYTES)
        if not received:
            raise self._gone()
        self._received += received
        return take_messages(self._received)

    def _gone(self) -> RankdError:
        status = self._process.wait()
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        why = " (SIGKILL; is the system short of memory?)" if status == -signal.SIGKILL else ""
        return RankdError(
            f"a process that prints the logs {how}{why}, so they are not complete; remove them and start again, with "
            "fewer processes (--printers) if this happens again"
        )

    def end(self) -> None:
        """End it now. One that has something to do would go on with that."""
        self._input.close()
        self._output.close()
        self._process.kill()
        self._process.wait()
