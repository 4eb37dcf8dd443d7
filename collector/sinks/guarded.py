"""What stands between an optional sink and the collector: it fails alone."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..protocol.records import Comment, RankBlock
from ..selection import Selection
from .sink import Sink

__all__ = ["Guarded", "Selected"]

_logger = logging.getLogger(__name__)


class Guarded:
    """An optional sink whose failures are counted and told once, and go no further.

    After an OSError (its place is full) it goes on: such a sink keeps what it could not write. After any other error it
    is off until the collector starts again; what it misses is in the journal, and `rankd export` gives it.

    Attributes:
        name: what the log calls it.
        failures: how many calls have failed.
        off: it has been given up.
    """

    def __init__(self, name: str, sink: Sink) -> None:
        self.name = name
        self.failures = 0
        self.off = False
        self._sink = sink

    def write(self, released: Sequence[RankBlock | Comment]) -> None:
        self._try(lambda: self._sink.write(released))

    def retry(self) -> None:
        self._try(self._sink.retry)

    def sizes(self) -> Mapping[str, int]:
        sizes: dict[str, int] = {}
        self._try(lambda: sizes.update(self._sink.sizes()))
        return sizes

    def files(self) -> Mapping[Path, int]:
        files: dict[Path, int] = {}
        self._try(lambda: files.update(self._sink.files()))
        return files

    def checkpointed(self, sizes: Mapping[str, int]) -> None:
        self._try(lambda: self._sink.checkpointed(sizes))

    def reaches(self, sizes: Mapping[str, int]) -> bool:
        """Always: no log is rendered again for the sake of an optional sink."""
        return bool(sizes) or True

    def resume(self, sizes: Mapping[str, int]) -> None:
        self._try(lambda: self._sink.resume(sizes))

    def settle(self) -> None:
        self._try(self._sink.settle)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._sink.close()

    def _try(self, call: Callable[[], None]) -> None:
        if self.off:
            return
        try:
            call()
        except OSError as e:
            if not self.failures:
                _logger.warning(
                    "the output %s cannot be written (%s); the logs go on, and it is tried again", self.name, e
                )
            self.failures += 1
        except Exception as e:  # noqa: BLE001 - whatever a library of others raises must not cost the logs
            _logger.warning(
                "the output %s failed (%s: %s) and is off until the collector starts again; the logs go on, and "
                "`rankd export` gives what it misses", self.name, type(e).__name__, e,
            )  # fmt: skip
            self.failures += 1
            self.off = True


class Selected:
    """A sink that gets only what a selection wants: ranks and metrics. Lines about the whole run come through."""

    def __init__(self, sink: Sink, selection: Selection) -> None:
        self._sink = sink
        self._selection = selection

    def write(self, released: Sequence[RankBlock | Comment]) -> None:
        self._sink.write([chosen for each in released if (chosen := self._choose(each)) is not None])

    def retry(self) -> None:
        self._sink.retry()

    def sizes(self) -> Mapping[str, int]:
        return self._sink.sizes()

    def files(self) -> Mapping[Path, int]:
        return self._sink.files()

    def checkpointed(self, sizes: Mapping[str, int]) -> None:
        self._sink.checkpointed(sizes)

    def reaches(self, sizes: Mapping[str, int]) -> bool:
        return self._sink.reaches(sizes)

    def resume(self, sizes: Mapping[str, int]) -> None:
        self._sink.resume(sizes)

    def settle(self) -> None:
        self._sink.settle()

    def close(self) -> None:
        self._sink.close()

    def _choose(self, each: RankBlock | Comment) -> RankBlock | Comment | None:
        if each.rank is not None and not self._selection.has_rank(each.rank):
            return None
        if isinstance(each, Comment) or self._selection.metrics is None:
            return each
        metrics = self._selection.metrics
        frames = tuple(frame for frame in each.frames if frame.metric in metrics)
        return dataclasses.replace(each, frames=frames) if frames else None
