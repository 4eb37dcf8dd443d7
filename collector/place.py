"""The directory of a run: who may write there, which run it is, and how its collector is reached."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import secrets
import socket
import stat
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from .description import Writer
from .disk import sync_tree
from .protocol.about import OWN_COLLECTOR
from .protocol.connection import Connection, key_of, read_connection
from .protocol.errors import ConfigError, RankdError
from .protocol.keys import RunKey
from .protocol.wire import Hello, Refused

__all__ = ["INNER", "JOURNAL", "Place", "holder"]

INNER = ".rankd"
JOURNAL = Path(INNER) / "journal"


class Place:
    """`OUTPUT` and its `.rankd` folder, held by one collector at a time.

    Args:
        output: the run's output directory; made when it is missing.

    Raises:
        RankdError: the directory cannot be made or written, or another collector holds it; says which process.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.inner = output / INNER
        try:
            self.inner.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.inner / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as e:
            raise RankdError(f"the output directory {output} cannot be used: {e.strerror}; check rankd.output") from e
        self._take_lock()

    @property
    def journal(self) -> Path:
        return self.output / JOURNAL

    def run_id(self) -> str:
        """The identity of the run that this directory holds; made at its first start."""
        path = self.inner / "run"
        if path.exists() and (known := path.read_text().strip()):
            return known
        fresh = secrets.token_hex(8)
        _write_whole(path, fresh + "\n", 0o640, lasting=True)
        return fresh

    def key(self, environ: Mapping[str, str], former: Connection | None = None) -> RunKey:
        """The run's key: RANKD_KEY, or else one that is made at the run's first start and kept here, mode 0600.

        Args:
            former: of a collector that was killed: the ranks that live on have the key that it had (RANKD_KEY, which
                whoever starts the next one may not have).

        Raises:
            ConfigError: RANKD_KEY, or the file, holds what cannot be a key.
        """
        given = RunKey.from_environment(environ) or key_of(former)
        path = self.inner / "key"
        if given is not None:
            return given
        try:
            return RunKey(path.read_text().strip(), str(path))
        except FileNotFoundError:
            fresh = RunKey.fresh()
            _write_whole(path, fresh.reveal() + "\n", 0o600, lasting=True)
            return fresh
        except (OSError, ValueError) as e:
            if isinstance(e, ConfigError):
                raise
            raise RankdError(f"the run's key in {path} cannot be read: {e}") from None

    def publish(self, endpoint: str, run: str, key: RunKey | None = None) -> None:
        """Write the connection file, by which agents that see this directory find the collector and are let in."""
        facts = {"version": 1, "endpoint": endpoint, "run": run, "pid": os.getpid(), "host": socket.gethostname()}
        if key is not None:
            facts["key"] = key.reveal()
        _write_whole(self.inner / "connection.json", json.dumps(facts) + "\n", 0o600)

    def former(self, run: str) -> Connection | None:
        """What the collector of this run said of itself that left its connection file behind; None: none did.

        It says where the next one listens, and with which key, so it has to be as `publish` writes it: ours alone.
        """
        path = self.inner / "connection.json"
        try:
            about = path.lstat()
        except OSError:
            return None
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
            return None
        connection = read_connection(path)
        return connection if connection is not None and connection.run == run else None

    def describe(self, description: str, text: str) -> None:
        """Write `run.json` and `RUN.md`, which say what ran here; OSError: not possible now, the former ones stay."""
        _write_whole(self.output / "run.json", description, 0o644)
        _write_whole(self.output / "RUN.md", text, 0o644)

    def tell(self, status: str) -> None:
        """Write the status file; OSError: not possible now, the former one stays."""
        _write_whole(self.inner / "status.json", status, 0o644)

    def tell_profiles(self, sessions: str) -> None:
        """Write the file about profiling sessions; OSError: not possible now, the former one stays."""
        _write_whole(self.inner / "profile.json", sessions, 0o644)

    def writer(self, run: str) -> Writer:
        """This process, as it signs what it describes."""
        versions = {"python": platform.python_version()}
        try:
            versions["rankd"] = metadata.version("rankd")
        except metadata.PackageNotFoundError:  # run from a checkout that is not installed
            versions["rankd"] = "unknown"
        return Writer(run, socket.gethostname(), os.getpid(), time.time(), versions)

    def objection(self, hello: Hello, endpoint: str) -> Refused | None:
        """What is said to a process of this machine whose job has a collector of its own for another directory."""
        wanted, own = hello.about.get(OWN_COLLECTOR), os.path.realpath(self.output)
        if wanted is None or wanted == own:
            return None
        return Refused(
            f"two jobs meet at {endpoint}: this is the collector for {own}, and process {hello.pid} on {hello.host} "
            f"has rankd.output {wanted}. Give each job a port of its own in rankd.endpoint, or leave that out; where "
            "they are to share a collector, set rankd.start_collector to False in the one that does not start it",
            retry=True,
        )

    def withdraw(self) -> None:
        """Remove the connection file and let go of the directory."""
        (self.inner / "connection.json").unlink(missing_ok=True)
        os.close(self._lock)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._lock, 64, 0).decode(errors="replace").strip()
            os.close(self._lock)
            raise RankdError(
                f"another collector ({holder or 'unknown process'}) works in {self.output}; stop it, or choose another "
                "rankd.output"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def holder(output: Path) -> str | None:
    """The live collector of `output`, for messages; None: there is none. Nothing is touched or locked.

    Of a collector on another host, only its connection file tells; a collector that was killed leaves that behind.
    """
    inner = output / INNER
    try:
        text, inode = (inner / "lock").read_text(errors="replace").strip(), (inner / "lock").stat().st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        return None
    # "1: FLOCK  ADVISORY  WRITE 4711 00:1b:123456 0 EOF"
    if any(line.split()[1] == "FLOCK" and f":{inode} " in line for line in locks.splitlines()):
        return text or "a collector"
    elsewhere = not text.endswith(f" on {socket.gethostname()}")
    return f"{text}, perhaps" if elsewhere and (inner / "connection.json").exists() else None


def _write_whole(path: Path, text: str, mode: int, *, lasting: bool = False) -> None:
    """Write a small file so that a reader sees all of it or the one before.

    Args:
        lasting: also after a power failure: the ranks that live on know what it says.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        if not mode & 0o077:
            # The file may be left over from a process that died here.
            os.fchmod(fd, mode)
        data = memoryview(text.encode())
        while data:
            data = data[os.write(fd, data) :]
        if lasting:
            os.fsync(fd)
        beside.replace(path)
        if lasting:
            sync_tree(path.parent)
    except OSError as e:
        beside.unlink(missing_ok=True)
        raise OSError(e.errno, e.strerror, str(path)) from e
    finally:
        os.close(fd)
