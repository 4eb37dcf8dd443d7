"""Pure: when a log is rotated, and which of its closed parts are deleted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .parts import Part

__all__ = ["ClosedPart", "Retention", "Rotation", "forgettable"]


@dataclass(frozen=True, slots=True)
class Rotation:
    """When the file that grows is closed.

    Attributes:
        size: bytes after which it is; None: whatever its size.
        every: length in seconds of the spans of time, counted from 1970 (UTC), that have a part of their own; None:
            whatever its age.
    """

    size: int | None = None
    every: float | None = None

    def due(self, size: int, written: float, now: float) -> bool:
        """Whether a file of this size, last written to at that time, is closed before something is added now."""
        if size <= 0:
            return False
        if self.size is not None and size >= self.size:
            return True
        return self.every is not None and written // self.every != now // self.every


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept of the closed parts; None: no limit.

    Attributes:
        parts: so many of each log.
        size: so many bytes of all logs together, as they lie on the disk.
        age: those that were written to within so many seconds.
        compress: whether they are compressed.
    """

    parts: int | None = None
    size: int | None = None
    age: float | None = None
    compress: bool = False

    @property
    def deletes(self) -> bool:
        """Whether there is any limit."""
        return (self.parts, self.size, self.age) != (None, None, None)


@dataclass(frozen=True, slots=True)
class ClosedPart:
    """A part as it lies on the disk.

    Attributes:
        size: its bytes there.
        written: when it was last written to.
    """

    part: Part
    size: int
    written: float


def forgettable(
    logs: Mapping[str, Sequence[ClosedPart]], safe: Mapping[str, int], retention: Retention, now: float
) -> list[tuple[str, ClosedPart]]:
    """The parts that are to be deleted, each log's oldest first.

    The newest part of each log stays in any case, because it tells where the file that grows begins; and so does what a
    restart may still have to compare.

    Args:
        logs: the closed parts of each, oldest first.
        safe: up to which byte of each log no restart will look at it.
    """
    doomed: dict[str, int] = {}  # so many of each log's parts
    for name, parts in logs.items():
        most = _most(parts, safe.get(name, 0))
        over = 0 if retention.parts is None else len(parts) - retention.parts
        old = 0
        if retention.age is not None:
            young = [index for index, each in enumerate(parts) if now - each.written <= retention.age]
            old = young[0] if young else len(parts)
        doomed[name] = max(0, min(most, max(over, old)))
    if retention.size is not None:
        total = sum(each.size for name, parts in logs.items() for each in parts[doomed[name] :])
        for name, each in _by_age(logs, doomed, safe):
            if total <= retention.size:
                break
            total -= each.size
            doomed[name] += 1
    return [(name, each) for name, parts in logs.items() for each in parts[: doomed[name]]]


def _most(parts: Collection[ClosedPart], safe: int) -> int:
    return min(max(0, len(parts) - 1), sum(each.part.end <= safe for each in parts))


def _by_age(
    logs: Mapping[str, Sequence[ClosedPart]], doomed: Mapping[str, int], safe: Mapping[str, int]
) -> list[tuple[str, ClosedPart]]:
    """What could be deleted too, oldest first; of one log in its order, whatever its clocks said."""
    found = []
    for name, parts in logs.items():
        latest = 0.0
        for each in parts[doomed[name] : _most(parts, safe.get(name, 0))]:
            latest = max(latest, each.written)
            found.append((latest, name, each))
    found.sort(key=lambda item: (item[0], item[1], item[2].part.start))
    return [(name, each) for _, name, each in found]
