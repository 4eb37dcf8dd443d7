"""What a collector leaves in its output directory for those who look for it: where it listens, and the run's key."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from .errors import ConfigError
from .keys import RunKey

__all__ = ["CONNECTION_FILE", "CONNECTION_VERSION", "KEY_FILE", "Connection", "key_in", "key_of", "read_connection"]

CONNECTION_FILE = Path(".rankd") / "connection.json"
CONNECTION_VERSION = 1
# There also where the collector listens on loopback only, and wants no key of those who train.
KEY_FILE = Path(".rankd") / "key"
# A handful of short fields; anything larger is not a connection file.
_MAX_CONNECTION_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Connection:
    """What a collector says about itself in its connection file.

    Attributes:
        endpoint: where it listens, as ZeroMQ writes it.
        run: the id of the run that it serves.
        pid, host: its process, for messages only.
        key: the run's key; None: it listens on loopback only.
    """

    endpoint: str
    run: str
    pid: int
    host: str
    key: str | None = field(default=None, repr=False)


def read_connection(path: Path) -> Connection | None:
    """The content of a connection file; None where there is none, or it is malformed or half-written."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_CONNECTION_BYTES + 1)
        fields = json.loads(raw) if len(raw) <= _MAX_CONNECTION_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("version") != CONNECTION_VERSION:
        return None
    match fields:
        case {"endpoint": str(endpoint), "run": str(run), "pid": int(pid), "host": str(host)} if endpoint:
            key = fields.get("key")
            return Connection(endpoint, run, pid, host, key if isinstance(key, str) else None)
    return None


def key_of(connection: Connection | None) -> RunKey | None:
    """The key that a connection file has, if it is one."""
    if connection is None or connection.key is None:
        return None
    try:
        return RunKey(connection.key, "the connection file")
    except ConfigError:
        return None


def key_in(output: Path) -> RunKey | None:
    """The key that lies in an output directory; None: there is none, or it is not for us to read."""
    try:
        return RunKey((output / KEY_FILE).read_text().strip(), str(output / KEY_FILE))
    except (OSError, ValueError, ConfigError):
        return None
