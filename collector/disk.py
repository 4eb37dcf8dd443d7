"""Putting files and directories on the disk, so that a power failure leaves them as they are; and keeping what one has
left that does not fit together.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["set_aside", "sync_directory", "sync_file", "sync_tree"]

# What some network file systems say to fsync of a directory.
_UNKNOWN = (errno.EINVAL, errno.EOPNOTSUPP)


def sync_file(path: Path) -> os.stat_result:
    """Put the file's bytes on the disk, whoever has written them; what it is at that moment.

    Raises:
        OSError: it is not there, or the disk has failed: then what was not on the disk may be lost for good.
    """
    return _sync(path, os.O_RDONLY | os.O_NONBLOCK)


def sync_directory(path: Path) -> None:
    """Put the names in this directory on the disk: a file that was made, renamed or removed.

    A file system that knows no such thing sees to it by itself, or not at all.

    Raises:
        OSError: as `sync_file`.
    """
    try:
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as e:
        if e.errno not in _UNKNOWN:
            raise


def sync_tree(path: Path) -> None:
    """`sync_directory`, and those that it lies in, as far as this user may read them."""
    sync_directory(path)
    for above in path.absolute().parents:
        try:
            sync_directory(above)
        except OSError:
            # Not ours, so nothing there was made by us; or a file system that cannot.
            return


def set_aside(path: Path, place: int, pieces: Iterable[bytes]) -> Path | None:
    """Keep what is about to be cut from a file from byte `place` on: in a file beside it, `NAME.PLACE.cut`.

    Returns:
        That file; None: there are zeros only, of which nothing is kept.

    Raises:
        OSError: there is no room; or what the pieces raise.
    """
    aside = path.with_name(f"{path.name}.{place}.cut")
    something = False
    try:
        with aside.open("wb") as file:
            for piece in pieces:
                something = something or any(piece)
                file.write(piece)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    if not something:
        aside.unlink()
    return aside if something else None


def _sync(path: Path, flags: int) -> os.stat_result:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        return os.fstat(fd)
    finally:
        os.close(fd)
