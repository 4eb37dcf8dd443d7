"""The one interface of all sinks, and the two sinks that spare the loop its `if`s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..protocol.records import Comment, RankBlock

__all__ = ["FanOut", "Off", "Sink"]


class Sink(Protocol):
    """Takes what the ordering releases, in order, and keeps it somewhere.

    What a sink writes is a pure function of the sequence of `write` calls since the start of the journal, so that a
    restart can make it again. A restart calls `resume` with the sizes of a checkpoint, repeats the `write` calls since
    then, and calls `settle`.
    """

    def write(self, released: Sequence[RankBlock | Comment]) -> None:
        """Take these, in this order.

        Raises:
            OSError: the place is full or gone. What this call could not write is kept, and `retry` writes it.
        """

    def retry(self) -> None:
        """Write what an earlier call could not; does nothing when there is none.

        Raises:
            OSError: still not possible.
        """

    def sizes(self) -> Mapping[str, int]:
        """Per file (relative path): how many bytes the calls so far make. For the journal's checkpoints."""

    def resume(self, sizes: Mapping[str, int]) -> None:
        """Go on from a checkpoint: the coming `write` calls repeat earlier ones; what the files hold already is
        skipped."""

    def settle(self) -> None:
        """The repeated calls are over: cut from the files what the journal does not have."""

    def close(self) -> None:
        """Let go of all files."""


class Off:
    """A sink that does nothing."""

    def write(self, released: Sequence[RankBlock | Comment]) -> None:
        pass

    def retry(self) -> None:
        pass

    def sizes(self) -> Mapping[str, int]:
        return {}

    def resume(self, sizes: Mapping[str, int]) -> None:
        pass

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


class FanOut:
    """Several sinks as one. Their files must have different names."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, released: Sequence[RankBlock | Comment]) -> None:
        for sink in self._sinks:
            sink.write(released)

    def retry(self) -> None:
        for sink in self._sinks:
            sink.retry()

    def sizes(self) -> Mapping[str, int]:
        return {name: size for sink in self._sinks for name, size in sink.sizes().items()}

    def resume(self, sizes: Mapping[str, int]) -> None:
        for sink in self._sinks:
            sink.resume(sizes)

    def settle(self) -> None:
        for sink in self._sinks:
            sink.settle()

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
