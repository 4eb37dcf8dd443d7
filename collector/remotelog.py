"""The merged log over the network, from its collector: `rankd tail --from HOST:PORT`."""

from __future__ import annotations

from .asking import Asker
from .logservice import LOG_INDEX, LOG_LAYOUT, LOG_READ, MOST_BYTES
from .protocol.errors import RankdError

__all__ = ["RemoteGrowing", "RemoteSource"]

# These last bytes must still stand before anything that is new: if not, the log was written anew.
_ANCHOR = 256


class RemoteSource:
    """The log as it was when this was made (`history.Source`).

    Args:
        asker: stays open; it is not closed here.
        where: the collector's address, for messages.
    """

    def __init__(self, asker: Asker, where: str) -> None:
        self._asker = asker
        found = asker.ask(LOG_LAYOUT)
        self.name = f"merged.log of {where}"
        self.start, self.end = int(found["start"]), int(found["end"])
        self._pieces = [(int(start), int(end)) for start, end in found["pieces"]]
        self._holes = [(int(start), int(end)) for start, end in found["holes"]]

    def pieces(self) -> list[tuple[int, int]]:
        """What is there."""
        return self._pieces

    def holes(self) -> list[tuple[int, int]]:
        """What is not."""
        return self._holes

    def read(self, offset: int, count: int) -> bytes:
        """So many bytes; fewer where the log ends."""
        return _read(self._asker, LOG_READ, offset, count)

    def index(self) -> bytes | None:
        """The collector's index, all of it: 40 bytes a mebibyte of log."""
        return _read(self._asker, LOG_INDEX, 0, None) or None

    def close(self) -> None:
        """Nothing is held."""


class RemoteGrowing:
    """What comes after a position: whole lines, each once (as `growing.GrowingFile`).

    Attributes:
        missed: bytes that were deleted, or written anew, before they could be given.
    """

    def __init__(self, asker: Asker, position: int) -> None:
        self._asker = asker
        self._position = position
        self._last = b""
        self.missed = 0

    def lines(self) -> bytes:
        """The whole lines that have come; empty: none have.

        Raises:
            RankdError: the collector does not answer.
        """
        known = len(self._last)
        data = _read(self._asker, LOG_READ, self._position - known, known + MOST_BYTES)
        if len(data) < known:
            return self._look_for_start()
        if data[:known] != self._last:
            return self._find_line(data[known:])
        return self._give(data[known:])

    def _give(self, data: bytes) -> bytes:
        end = data.rfind(b"\n") + 1
        if not end and len(data) >= MOST_BYTES:  # a line that is longer than what is taken at once
            data = _read(self._asker, LOG_READ, self._position, None)
            end = data.rfind(b"\n") + 1
        self._position += end
        self._last = (self._last + data[:end])[-_ANCHOR:]
        return data[:end]

    def _look_for_start(self) -> bytes:
        """It has lost its end, which ranks send again; or its older parts were deleted, faster than they were read."""
        start = int(self._asker.ask(LOG_LAYOUT)["start"])
        if start > self._position - len(self._last):
            self.missed += max(0, start - self._position)
            self._position, self._last = max(start, self._position), b""
        return b""

    def _find_line(self, data: bytes) -> bytes:
        """It was written anew, and is not the same (a power failure): go on with the next whole line."""
        skipped = data.find(b"\n") + 1
        self.missed += skipped
        self._position, self._last = self._position + skipped, b""
        return b""


def _read(asker: Asker, kind: str, offset: int, count: int | None) -> bytes:
    """So many bytes, or all that there are."""
    pieces: list[bytes] = []
    while count is None or count > 0:
        asked = MOST_BYTES if count is None else min(count, MOST_BYTES)
        piece = asker.raw(kind, {"offset": offset, "count": asked}, again=True)
        if len(piece) > asked:
            raise RankdError("not an answer of this version: more than was asked for")
        pieces.append(piece)
        offset += len(piece)
        if count is not None:
            count -= len(piece)
        if len(piece) < asked:
            break
    return b"".join(pieces)
