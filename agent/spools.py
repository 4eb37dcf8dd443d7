"""Where this rank keeps what the collector has not yet acknowledged: a spool file, or else memory."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import stat
from pathlib import Path

from ..collector.config import RankdConfig
from ..collector.protocol.errors import RankdError
from ..collector.protocol.wire import Hello
from .spool import SPOOL_SUFFIX, Spool
from .store import MemoryStore, Store

__all__ = ["ABOUT_OUTPUT", "ABOUT_SPOOL", "open_store", "private_directory", "tidy", "what_is_left"]

log = logging.getLogger("rankd.agent")

# Facts of a hello: the path of the spool on the rank's host, and the output directory that its run writes.
ABOUT_SPOOL, ABOUT_OUTPUT = "spool", "output"


def open_store(config: RankdConfig, hello: Hello) -> tuple[Store, Hello]:
    """The store for the items of the process that says `hello`, and its hello with where the spool lies.

    Where there can be no spool file, the items are kept in as much memory instead, which one warning says.
    """
    directory, size = config.spool.place(config.output), config.spool.size
    path = directory / f"rank_{hello.rank}.{hello.pid}.{hello.session[:4].hex()}{SPOOL_SUFFIX}"
    try:
        facts = {ABOUT_SPOOL: str(path), ABOUT_OUTPUT: str(config.output.absolute())}
        filed = dataclasses.replace(hello, about={**hello.about, **facts})
        return _create(path, size, filed), filed
    except (OSError, RankdError) as e:
        log.warning(
            "no spool file of %d bytes in %s (%s); what is not yet acknowledged is kept in memory, and lost if this "
            "process is killed. See rankd.spool.directory and rankd.spool.size",
            size,
            directory,
            e,
        )
        return MemoryStore(size), hello


def _create(path: Path, size: int, hello: Hello) -> Spool:
    private_directory(path.parent)
    try:
        return Spool.create(path, size, hello)
    except FileNotFoundError:
        # Another rank has just ended and tidied up.
        private_directory(path.parent)
        return Spool.create(path, size, hello)


def tidy(spool: str | None) -> None:
    """Remove the directory in which `spool` was, if nothing is left there."""
    if spool is not None:
        with contextlib.suppress(OSError):
            Path(spool).parent.rmdir()


def what_is_left(spool: str | None) -> str:
    """What becomes of items that were not acknowledged at exit; `spool`: where they lie, None: in memory."""
    if spool is None:
        return "they were kept in memory, and are lost"
    return f"they are in a spool file: the next start on this node delivers them, or `rankd recover {spool}`"


def private_directory(directory: Path) -> None:
    """Make `directory` and the one that it lies in, for this user only; what lies above may be everybody's (/tmp).

    Raises:
        OSError: they cannot be made, or are there and not this user's own: whoever can write there could read what
            is recorded, or have this process write elsewhere.
    """
    directory.parent.parent.mkdir(parents=True, exist_ok=True)
    for each in (directory.parent, directory):
        each.mkdir(mode=0o700, exist_ok=True)
        found = each.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory, or a link to one", str(each))
        if found.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"belongs to user {found.st_uid}, not to {os.geteuid()}", str(each))
        if stat.S_IMODE(found.st_mode) != 0o700:
            each.chmod(0o700)
