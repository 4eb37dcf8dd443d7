"""Looks after the closed parts of the text logs, on a thread of its own: compresses them and deletes the oldest.

The directory is all that it knows: each round lists the parts, deletes what `Retention` says, and compresses what is
plain. So a round that was cut short anywhere is made good by the next one. It touches nothing beyond the newest
checkpoint in the journal: what lies behind that may have to be compared, or cut, by a restart. (A restart that has to
go back further, because a log was damaged, decompresses what it needs.)

What was deleted is written down in OUTPUT/.rankd/deleted.json, so that a reader can tell it from what was lost.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from ..disk import sync_directory, sync_file
from ..protocol.jsontext import parsed
from .gzipped import compress
from .parts import Part, compressed_path, parts_of, unfinished_path
from .retention import ClosedPart, Retention, forgettable

__all__ = ["DELETED", "Keeper", "deleted_of"]

DELETED = Path(".rankd") / "deleted.json"

_logger = logging.getLogger(__name__)

# How often the parts are looked at where nothing happens: age passes by itself.
_ROUND = 60.0
# How long a collector that ends waits for what is being compressed to be dropped: one member's time.
_LAST_WAIT = 10.0
# Of the scheduler's niceness: training comes first.
_NICE = 19


def deleted_of(output: Path) -> dict[str, int]:
    """Per log: up to which byte its parts were deleted by `rankd.logs`."""
    try:
        known = parsed((output / DELETED).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {str(name): end for name, end in known.items() if type(end) is int and end >= 0}


class Keeper:
    """Looks after the parts of these logs from `start` on. All calls are quick: the work is the thread's.

    Args:
        output: the run's output directory.
        retention: what to keep, and whether it is compressed.
    """

    def __init__(self, output: Path, retention: Retention) -> None:
        self._output = output
        self._retention = retention
        self._news: queue.SimpleQueue[tuple[Iterable[str], Mapping[str, int]]] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, names: Iterable[str], safe: Mapping[str, int]) -> None:
        """The logs are there now, and a restart will look at nothing before these sizes."""
        if self._thread is None and not self._stopped.is_set():
            # It holds nothing that the process's end could harm: a part is there whole, or is made again.
            self._thread = threading.Thread(target=self._run, name="rankd-parts", daemon=True)
            self._thread.start()
        self._news.put((list(names), safe))

    def look(self, names: Iterable[str], safe: Mapping[str, int] | None = None) -> None:
        """Parts of these logs were closed, or there is another checkpoint; nothing before `start`."""
        if self._thread is not None:
            self._news.put((names, safe or {}))

    def close(self) -> None:
        """Stop; what is being compressed is dropped, and done at the next start."""
        self._stopped.set()
        self._news.put(((), {}))
        if self._thread is not None:
            self._thread.join(_LAST_WAIT)
            self._thread = None

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # A thread of Linux has a niceness of its own.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        caring = _Round(self._output, self._retention, self._stopped)
        names: set[str] = set()
        safe: dict[str, int] = {}
        failing = False
        while not self._stopped.is_set():
            try:
                fresh = [self._news.get(timeout=_ROUND)]
                while not self._news.empty():
                    fresh.append(self._news.get())
            except queue.Empty:
                fresh = []
            for more, sizes in fresh:
                names.update(more)
                safe.update(sizes)
            try:
                caring.run(names, safe)
                failing = False
            except OSError as e:
                if not failing and not self._stopped.is_set():
                    _logger.warning("older parts of the logs cannot be compressed or deleted now: %s", e)
                failing = True
            except Exception:
                _logger.exception("older parts of the logs stay as they are until the collector starts again")
                return


class _Round:
    """What the thread does each time."""

    def __init__(self, output: Path, retention: Retention, stopped: threading.Event) -> None:
        self._output = output
        self._retention = retention
        self._stopped = stopped
        self._deleted = deleted_of(output)
        self._owed = False  # `_deleted` is not written down
        self._short: set[Path] = set()  # told of

    def run(self, names: set[str], safe: Mapping[str, int]) -> None:
        """Delete, compress, and delete again what is too much even so; from `names` goes which log has no parts.

        Raises:
            OSError: the first thing that was not possible; all others were done.
        """
        names.intersection_update([name for name in names if parts_of(self._output / name)])
        failures: list[OSError] = []
        self._delete(names, safe, failures)
        if self._retention.compress:
            for name in sorted(names):
                self._compress_log(name, safe.get(name, 0), failures)
            self._delete(names, safe, failures)
        if failures:
            raise failures[0]

    def _delete(self, names: Iterable[str], safe: Mapping[str, int], failures: list[OSError]) -> None:
        if not self._retention.deletes:
            return
        logs = {name: self._closed_parts(name) for name in names}
        doomed = forgettable(logs, safe, self._retention, time.time())
        for name, each in doomed:
            self._deleted[name] = max(each.part.end, self._deleted.get(name, 0))
        self._owed = self._owed or bool(doomed)
        # Before they are gone; unless the disk is so full that only their going makes room for it.
        with suppress(OSError):
            self._write_down()
        for name, each in doomed:
            _unlink_both(self._output / name, each.part, failures)
        try:
            self._write_down()
        except OSError as e:
            failures.append(e)

    def _write_down(self) -> None:
        if not self._owed:
            return
        path = self._output / DELETED
        beside = unfinished_path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(self._deleted) + "\n")
            sync_file(beside)
            beside.replace(path)
            sync_directory(path.parent)
        except OSError as e:
            raise OSError(e.errno, e.strerror, str(path)) from e
        self._owed = False

    def _closed_parts(self, name: str) -> list[ClosedPart]:
        found = []
        for part in parts_of(self._output / name):
            with suppress(FileNotFoundError):
                there = part.path.stat()
                found.append(ClosedPart(part, there.st_size, there.st_mtime))
        return found

    def _compress_log(self, name: str, safe: int, failures: list[OSError]) -> None:
        log = self._output / name
        for left in log.parent.glob(unfinished_path(log.with_name(f"{log.name}.*")).name):
            left.unlink(missing_ok=True)
        for part in parts_of(log):
            if self._stopped.is_set():
                return
            if not part.compressed and part.start < part.end <= safe and part.path not in self._short:
                try:
                    self._compress(part)
                except OSError as e:
                    failures.append(OSError(e.errno, e.strerror, str(part.path)))

    def _compress(self, part: Part) -> None:
        compressed = compressed_path(part)
        unfinished = unfinished_path(compressed)
        source = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            there = os.fstat(source)
            if there.st_size < part.end - part.start:
                self._short.add(part.path)
                _logger.warning("%s has %d bytes; it stays as it is", part.path, there.st_size)
                return
            target = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                done = compress(source, target, part.end - part.start, self._stopped.is_set)
                # Its age is that of its last line.
                os.utime(target, ns=(there.st_atime_ns, there.st_mtime_ns))
                os.fsync(target)
            except OSError:
                unfinished.unlink()
                raise
            finally:
                os.close(target)
        finally:
            os.close(source)
        if not done:
            unfinished.unlink()
            return
        unfinished.rename(compressed)
        sync_directory(part.path.parent)  # a power failure leaves one of the two
        part.path.unlink()


def _unlink_both(log: Path, part: Part, failures: list[OSError]) -> None:
    plain = part.path.with_name(part.path.name.removesuffix(".gz"))
    try:
        # The plain one last: it counts.
        plain.with_name(plain.name + ".gz").unlink(missing_ok=True)
        plain.unlink(missing_ok=True)
    except OSError as e:
        failures.append(OSError(e.errno, e.strerror, str(log)))
        return
    _logger.info("deleted bytes %d to %d of %s (rankd.logs)", part.start, part.end, log)
