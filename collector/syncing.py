"""Before journal segments are deleted: what a restart needs in place of them is put on the disk, beside the loop.

A log can be made again from the journal, so nobody syncs it while it grows. Where segments are deleted
(`rankd.journal.keep`), the logs that were made of them are all that is left: they, and the segments that stay, have to
be on the disk before. That is a thousand files, so a thread does it, and the collector deletes when it hears of it.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from .disk import sync_directory, sync_file
from .journal import segment_of, segments
from .sinks.parts import parts_of

__all__ = ["Syncing"]

log = logging.getLogger("rankd.collector")

# How long a collector that ends waits for the file that is just being synced.
_LAST_WAIT = 10.0
# Of opening a file: this process, or the system, has too many. It says nothing about the disk, and passes.
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


class Syncing:
    """Puts logs and journal on the disk when it is asked to. All calls are quick: the work is the thread's.

    After a failure of the disk it never says again that all is there: nobody knows which bytes were lost.

    Args:
        output: the run's output directory.
        journal: the journal's directory, in there.
    """

    def __init__(self, output: Path, journal: Path) -> None:
        self._output = output
        self._journal = journal
        self._asked: queue.SimpleQueue[tuple[int, Mapping[Path, int]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def ask(self, needed: int, files: Mapping[Path, int]) -> None:
        """Put these logs on the disk, by their sizes, and the journal from the entry `needed` on."""
        if self._stopped.is_set():
            return
        if self._thread is None:
            # Whatever the end of the process interrupts only leaves segments that the next start deletes.
            self._thread = threading.Thread(target=self._run, name="rankd-sync", daemon=True)
            self._thread.start()
        self._asked.put((needed, files))

    def reached(self) -> int | None:
        """From which entry on the journal is still needed, now that the logs are on the disk; None: no news."""
        newest = None
        while not self._done.empty():
            newest = self._done.get()
        return newest

    def close(self) -> None:
        """Stop; what was asked for need not be done."""
        self._stopped.set()
        self._asked.put(None)
        if self._thread is not None:
            self._thread.join(_LAST_WAIT)
            self._thread = None

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except OSError as e:
            log.warning(
                "%s cannot be put on the disk (%s): no more segments of the journal are deleted until the collector "
                "starts again (rankd.journal.keep)", e.filename or self._journal, e.strerror,
            )  # fmt: skip
        except Exception:
            log.exception("no more segments of the journal are deleted until the collector starts again")
        finally:
            # Nobody takes what is asked for any more.
            self._stopped.set()

    def _serve(self) -> None:
        synced = _Synced(self._output, self._journal, self._stopped)
        told = False
        while (wanted := self._newest()) is not None and not self._stopped.is_set():
            try:
                if synced.bring(*wanted):
                    self._done.put(wanted[0])
                    told = False
            except OSError as e:
                if e.errno not in _TOO_MANY_FILES:
                    raise
                if not told:
                    log.warning(
                        "%s cannot be put on the disk now (%s): segments of the journal stay until the next one is "
                        "full", e.filename or self._journal, e.strerror,
                    )  # fmt: skip
                told = True
                # Which of the names had been seen to is not known any more.
                synced = _Synced(self._output, self._journal, self._stopped)

    def _newest(self) -> tuple[int, Mapping[Path, int]] | None:
        """What was asked for last: it comprises what was asked for before."""
        wanted = self._asked.get()
        while not self._asked.empty() and wanted is not None:
            wanted = self._asked.get()
        return wanted


class _Synced:
    """What is on the disk, as far as this process has seen to it."""

    def __init__(self, output: Path, journal: Path, stopped: threading.Event) -> None:
        self._output = output
        self._journal = journal
        self._stopped = stopped
        self._sizes: dict[Path, int] = {}
        # Of each log: the file that grows, by its inode, and where the closed parts end that are there for good.
        self._live: dict[Path, int] = {}
        self._closed: dict[Path, int] = {}
        self._segments: set[Path] = set()
        self._directories: set[Path] = set()

    def bring(self, needed: int, files: Mapping[Path, int]) -> bool:
        """Put all of it on the disk; False: stopped before the end.

        Raises:
            OSError: the disk has failed; `filename` says where.
        """
        changed = {self._journal}
        for path, size in files.items():
            if self._stopped.is_set():
                return False
            if self._sizes.get(path) != size:
                if self._bring_log(path):
                    changed.add(path.parent)
                self._sizes[path] = size
        self._bring_journal(segment_of(needed))
        for directory in sorted(self._with_new_ones(changed)):
            self._bring_directory(directory)
        return not self._stopped.is_set()

    def _bring_log(self, path: Path) -> bool:
        """True: its directory has other names than before."""
        inode = 0
        # Before the parts are listed: what is renamed after this is synced already, what was before is among them.
        with suppress(FileNotFoundError):
            inode = _named(path)
        known = self._closed.get(path, -1)
        fresh = [part for part in parts_of(path) if part.end > known]
        for part in fresh:
            # Not there: compressed meanwhile, which is on the disk before this one goes; or deleted (`rankd.logs`).
            with suppress(FileNotFoundError):
                _named(part.path)
        self._closed[path] = max([known, *(part.end for part in fresh)])
        renamed = self._live.get(path) != inode or bool(fresh)
        self._live[path] = inode
        return renamed

    def _bring_journal(self, first: int) -> None:
        there = [path for path in segments(self._journal) if int(path.stem) >= first]
        for path in there:
            if path not in self._segments:
                _named(path)
        # The newest one grows.
        self._segments = set(there[:-1])

    def _with_new_ones(self, changed: set[Path]) -> set[Path]:
        """Also those that the ones lie in which are seen for the first time: they may have been made by this run."""
        out = set()
        for each in changed:
            directory = each.absolute()
            out.add(directory)
            while directory not in self._directories:
                self._directories.add(directory)
                directory = directory.parent
                out.add(directory)
        return out

    def _bring_directory(self, directory: Path) -> None:
        try:
            sync_directory(directory)
        except FileNotFoundError:
            # Somebody has removed it, with the log that was in there.
            return
        except OSError as e:
            # Above the run's own one there may be some that this user cannot read.
            if e.errno in _TOO_MANY_FILES or self._output.absolute() in (directory, *directory.parents):
                raise OSError(e.errno, e.strerror, str(directory)) from e


def _named(path: Path) -> int:
    """Sync it; its inode. An OSError has its name, which `os.fsync` leaves out."""
    try:
        return sync_file(path).st_ino
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from e
