"""The one interface of all sinks, and the two sinks that spare the loop its `if`s."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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

    def files(self) -> Mapping[Path, int]:
        """The files that `sizes` is about, and how many bytes the calls so far make of each."""

    def checkpointed(self, sizes: Mapping[str, int]) -> None:
        """This checkpoint, which has what `sizes` gave, is in the journal now: a restart goes on from there."""

    def reaches(self, sizes: Mapping[str, int]) -> bool:
        """Whether each file is at least as long as this checkpoint says, so that `resume` can go on from it."""

    def resume(self, sizes: Mapping[str, int]) -> None:
        """Go on from a checkpoint: the coming `write` calls repeat earlier ones; what the files hold already is
        skipped."""

    def settle(self) -> None:
        """The repeated calls are over: cut from the files what the journal does not have."""

    def close(self) -> None:
        """Let go of all files."""


class Off:
    """A sink that does nothing; the base of those that keep no file which a restart could go on with."""

    def write(self, released: Sequence[RankBlock | Comment]) -> None:
        pass

    def retry(self) -> None:
        pass

    def sizes(self) -> Mapping[str, int]:
        return {}

    def files(self) -> Mapping[Path, int]:
        return {}

    def checkpointed(self, sizes: Mapping[str, int]) -> None:
        pass

    def reaches(self, sizes: Mapping[str, int]) -> bool:  # noqa: ARG002 - it has no files that could be shorter
        return True

    def resume(self, sizes: Mapping[str, int]) -> None:
        pass

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


class FanOut:
    """Several sinks as one. Their files must have different names.

    Each call reaches all sinks, whatever some of them raise; then it raises what they did: a bug before an OSError,
    several OSErrors as one that tells all.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, released: Sequence[RankBlock | Comment]) -> None:
        self._each(lambda sink: sink.write(released))

    def retry(self) -> None:
        self._each(lambda sink: sink.retry())

    def sizes(self) -> Mapping[str, int]:
        return {name: size for sink in self._sinks for name, size in sink.sizes().items()}

    def files(self) -> Mapping[Path, int]:
        return {path: size for sink in self._sinks for path, size in sink.files().items()}

    def checkpointed(self, sizes: Mapping[str, int]) -> None:
        self._each(lambda sink: sink.checkpointed(sizes))

    def reaches(self, sizes: Mapping[str, int]) -> bool:
        return all(sink.reaches(sizes) for sink in self._sinks)

    def resume(self, sizes: Mapping[str, int]) -> None:
        self._each(lambda sink: sink.resume(sizes))

    def settle(self) -> None:
        self._each(lambda sink: sink.settle())

    def close(self) -> None:
        self._each(lambda sink: sink.close())

    def _each(self, call: Callable[[Sink], None]) -> None:
        failures = [failure for sink in self._sinks if (failure := _failure(call, sink)) is not None]
        full = [failure for failure in failures if isinstance(failure, OSError)]
        if len(full) < len(failures):
            raise next(failure for failure in failures if not isinstance(failure, OSError))
        if len(full) > 1:
            raise OSError(full[0].errno, "; ".join(map(str, full))) from full[0]
        if full:
            raise full[0]


def _failure(call: Callable[[Sink], None], sink: Sink) -> Exception | None:
    try:
        call(sink)
    except Exception as e:  # noqa: BLE001 - the caller raises it, when the other sinks have had their turn
        return e
    return None
