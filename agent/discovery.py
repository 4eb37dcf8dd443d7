"""Where the collector is: an explicit setting, the environment, or the connection file in the output directory.

The connection file is read anew each time it is asked for: a collector that was restarted may have another port. It may
be stale; then nobody answers there, and it is asked for again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..collector.protocol.errors import ConfigError

__all__ = [
    "CONNECTION_FILE",
    "CONNECTION_VERSION",
    "ENDPOINT_VARIABLE",
    "Connection",
    "EndpointFinder",
    "read_connection",
]

CONNECTION_FILE = Path(".rankd") / "connection.json"
CONNECTION_VERSION = 1
ENDPOINT_VARIABLE = "RANKD_ENDPOINT"
# A handful of short fields; anything larger is not a connection file.
_MAX_CONNECTION_BYTES = 65_536
_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
_NOWHERE = frozenset({"*", "0.0.0.0", "[::]"})  # noqa: S104 - addresses to bind to, refused here


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
    key: str | None = None


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


class EndpointFinder:
    """Looks for the collector each time it is called; None: not to be found at the moment.

    Args:
        explicit: the configured endpoint, if any: `tcp://HOST:PORT`, `HOST:PORT` or `ipc://PATH`.
        environment: where RANKD_ENDPOINT may stand (`os.environ`).
        output: the output directory, whose connection file is read.

    Raises:
        ConfigError: an endpoint was given that nobody can connect to.
    """

    def __init__(self, explicit: str | None, environment: Mapping[str, str], output: Path | None) -> None:
        self._fixed: str | None = None
        self._file: Path | None = None
        variable = environment.get(ENDPOINT_VARIABLE, "")
        if explicit:
            self._fixed = _checked("rankd.endpoint", explicit)
            self.where = f"the setting rankd.endpoint: {self._fixed}"
        elif variable:
            self._fixed = _checked(ENDPOINT_VARIABLE, variable)
            self.where = f"the environment variable {ENDPOINT_VARIABLE}: {self._fixed}"
        elif output is not None:
            self._file = output / CONNECTION_FILE
            self.where = f"the connection file {self._file}"
        else:
            raise ConfigError(
                f"nothing says where the collector is: set rankd.endpoint, {ENDPOINT_VARIABLE}, or an output directory"
            )

    def __call__(self) -> str | None:
        if self._file is None:
            return self._fixed
        connection = read_connection(self._file)
        return None if connection is None else connection.endpoint


def _checked(what: str, endpoint: str) -> str:
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return endpoint
    whole = endpoint if "://" in endpoint else f"tcp://{endpoint}"
    match = _TCP.fullmatch(whole)
    if match is None or not 0 < int(match["port"]) < 65_536:
        raise ConfigError(f"{what}: {endpoint!r} is no endpoint; write tcp://HOST:PORT (IPv6: tcp://[ADDRESS]:PORT)")
    if match["host"] in _NOWHERE:
        raise ConfigError(f"{what}: {endpoint!r} is an address to listen on; give the one that other hosts reach")
    return whole
