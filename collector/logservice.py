"""The merged log for those who do not see the output directory: pieces of it, as answers to questions.

One piece is read a turn of the collector's loop, whoever asks and however much: a reader of the whole history waits for
the ranks, and not they for it.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

from .protocol.checks import check_int, shown
from .protocol.errors import RankdError, RecordError
from .protocol.messages import Answer, Ask
from .sinks.gzipped import DamagedPartError
from .sinks.merged_index import MERGED_INDEX
from .sinks.parts import LogReader
from .sinks.speclog import MERGED_LOG

__all__ = ["LOG", "LOG_INDEX", "LOG_LAYOUT", "LOG_READ", "MOST_BYTES", "LogService"]

LOG = "log"
LOG_LAYOUT, LOG_READ, LOG_INDEX = "log.layout", "log.read", "log.index"
# Of one answer: some milliseconds of reading, also out of a compressed part.
MOST_BYTES = 2**19
# Who follows asks several times a second; a page of history that somebody looks at does not count.
_FOLLOWS_WITHIN = 1.0
# A reader asks for one piece after the other.
_MOST_WAITING = 256


class LogService:
    """Takes questions about the log of this output directory, and answers one at a time."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._log: LogReader | None = None
        self._waiting: deque[tuple[bytes, Ask]] = deque()
        # Who reads: when each asked last, and up to where it has been given the log.
        self._readers: dict[bytes, tuple[float, int]] = {}

    @property
    def waiting(self) -> bool:
        """Somebody waits for an answer."""
        return bool(self._waiting)

    def take(self, peer: bytes, ask: Ask, now: float) -> None:
        """A question of this peer, at this time (seconds of a clock that never goes back).

        Raises:
            RankdError: too many wait.
        """
        if len(self._waiting) >= _MOST_WAITING:
            raise RankdError(f"more than {_MOST_WAITING} questions about the log wait for their answers")
        self._waiting.append((peer, ask))
        given = self._readers.pop(peer, (now, 0))[1]
        self._readers[peer] = (now, given)
        while len(self._readers) > _MOST_WAITING:
            del self._readers[next(iter(self._readers))]

    def next(self) -> tuple[bytes, Answer]:
        """The answer to the question that has waited longest, and whose it is."""
        peer, ask = self._waiting.popleft()
        try:
            content = self._answer(ask)
            if ask.kind == LOG_READ and peer in self._readers:
                offset = ask.facts["offset"]
                assert isinstance(offset, int)
                self._readers[peer] = (self._readers[peer][0], offset + len(content))
            return peer, Answer(ask.number, True, content)
        except RankdError as e:
            why = str(e)
        except DamagedPartError as e:
            why = f"{e.filename} {e.strerror}"
        except OSError as e:
            why = f"the log cannot be read: {e.strerror}"
        return peer, Answer(ask.number, False, why.encode())

    def followed(self, now: float) -> bool:
        """Somebody follows the log, and has not been given its end yet."""
        late = [given for asked, given in self._readers.values() if now - asked < _FOLLOWS_WITHIN]
        if not late:
            return False
        log = self._reader()
        try:
            log.look()
        except OSError:  # there is no end that could be given
            return False
        return min(late) < log.layout.end

    def close(self) -> None:
        """Let go of the files."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _answer(self, ask: Ask) -> bytes:
        if ask.kind == LOG_LAYOUT:
            return self._layout()
        if ask.kind == LOG_READ:
            return self._reader().read(*_span(ask))
        if ask.kind == LOG_INDEX:
            return self._index(*_span(ask))
        raise RankdError(f"the log knows no {shown(ask.kind)}")

    def _layout(self) -> bytes:
        log = self._reader()
        log.look()
        layout = log.layout
        about = {"start": layout.start, "end": layout.end, "pieces": log.pieces(), "holes": layout.holes()}
        return json.dumps({"output": str(self._output), **about}).encode()

    def _index(self, offset: int, count: int) -> bytes:
        try:
            with (self._output / MERGED_INDEX).open("rb") as file:
                file.seek(offset)
                return file.read(count)
        except FileNotFoundError:
            return b""

    def _reader(self) -> LogReader:
        if self._log is None:
            self._log = LogReader(self._output / MERGED_LOG)
        return self._log


def _span(ask: Ask) -> tuple[int, int]:
    offset, count = ask.facts.get("offset"), ask.facts.get("count")
    try:
        check_int("offset", offset, 0)
        check_int("count", count, 1, MOST_BYTES)
    except RecordError as e:
        raise RankdError(str(e)) from None
    assert isinstance(offset, int)
    assert isinstance(count, int)
    return offset, count
