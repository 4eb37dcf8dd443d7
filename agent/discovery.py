"""Where the collector is: an explicit setting, the environment, the connection file in the output directory, or the
machine of MindSpore's scheduler.

The connection file is read anew each time it is asked for: a collector that was restarted may have another port. It may
be stale; then nobody answers there, and it is asked for again.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from ..collector.protocol.checks import printable
from ..collector.protocol.connection import CONNECTION_FILE, Connection, key_in, key_of, read_connection
from ..collector.protocol.endpoints import PORTS, is_loopback_endpoint, join_endpoint
from ..collector.protocol.errors import ConfigError
from ..collector.protocol.keys import KEY_VARIABLE, RunKey
from .nodes import SCHEDULER_HOST, scheduler_host

__all__ = [
    "ENDPOINT_VARIABLE",
    "Endpoint",
    "EndpointFinder",
]

log = logging.getLogger("rankd.agent")

ENDPOINT_VARIABLE = "RANKD_ENDPOINT"
_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
_NOWHERE = frozenset({"*", "0.0.0.0", "[::]"})  # noqa: S104 - addresses to bind to, refused here
_GIVE_KEY = f"set {KEY_VARIABLE} to the same on all nodes, or give them one output directory"


class Endpoint(str):
    """Where to connect; and what one has to know there.

    Attributes:
        key: the run's key; None: the collector listens on this machine only, and wants none.
        run: the run that is expected there; empty: whichever it is.
    """

    key: RunKey | None = None
    run: str = ""

    @classmethod
    def of(cls, text: str, key: RunKey | None, run: str = "") -> Endpoint:
        self = cls(text)
        self.key, self.run = key, run
        return self


class EndpointFinder:
    """Looks for the collector each time it is called; None: not to be found at the moment.

    Where there are several places, each call gives the next one: it is called again only because nobody answered.

    Args:
        explicit: the configured endpoint, if any: `tcp://HOST:PORT`, `HOST:PORT` or `ipc://PATH`.
        environment: where RANKD_ENDPOINT, RANKD_KEY and MS_SCHED_HOST may stand (`os.environ`).
        output: the output directory, whose connection file is read.

    Raises:
        ConfigError: an endpoint was given that nobody can connect to, or a key that is none.
    """

    def __init__(self, explicit: str | None, environment: Mapping[str, str], output: Path | None) -> None:
        self._fixed: str | None = None
        self._output = output
        self._file: Path | None = None if output is None else output / CONNECTION_FILE
        self._key = RunKey.from_environment(environment)
        self._scheduler = scheduler_host(environment)
        self._turn = 0
        self._warned: set[str] = set()
        variable = environment.get(ENDPOINT_VARIABLE, "")
        if explicit:
            self._fixed = _checked("rankd.endpoint", explicit)
            self.where = f"the setting rankd.endpoint: {self._fixed}"
        elif variable:
            self._fixed = _checked(ENDPOINT_VARIABLE, variable)
            self.where = f"the environment variable {ENDPOINT_VARIABLE}: {self._fixed}"
        elif output is not None:
            self.where = f"the connection file {self._file}{self._beside()}"
        else:
            raise ConfigError(
                f"nothing says where the collector is: set rankd.endpoint, {ENDPOINT_VARIABLE}, or an output directory"
            )

    def __call__(self) -> Endpoint | None:
        connection = None if self._file is None else read_connection(self._file)
        if self._fixed is not None:
            places = self._known(self._fixed, connection)
        else:
            places = [*self._written(connection), *self._by_scheduler()]
        if not places:
            return None
        self._turn += 1
        return places[(self._turn - 1) % len(places)]

    def key(self) -> RunKey | None:
        """The run's key as this process knows it at the moment; None: it does not."""
        if self._key is not None or self._output is None or self._file is None:
            return self._key
        return key_of(read_connection(self._file)) or key_in(self._output)

    def _known(self, endpoint: str, connection: Connection | None) -> list[Endpoint]:
        """The endpoint that was given. The key may be in the output directory, where that is shared."""
        key = self._key or key_of(connection)
        if key is None and not is_loopback_endpoint(endpoint):
            self._warn(f"{endpoint} is on another machine, and no key of the run is known: {_GIVE_KEY}")
            return []
        return [Endpoint.of(endpoint, key)]

    def _written(self, connection: Connection | None) -> list[Endpoint]:
        """What the connection file says, where one can connect to that from here."""
        if connection is None:
            return []
        key, local = key_of(connection), is_loopback_endpoint(connection.endpoint)
        if local and connection.host != socket.gethostname():
            self._warn(
                f"the collector on {connection.host} listens there for its own machine only ({connection.endpoint}); "
                f"set rankd.endpoint to an address of {connection.host} that this machine reaches"
            )
            return []
        if key is None and not local:
            self._warn(f"{self._file} has no key for {connection.endpoint}: {_GIVE_KEY}")
            return []
        # Where RANKD_KEY is set, only who has that is believed; a collector that wants no key cannot be asked for one.
        return [Endpoint.of(connection.endpoint, self._key if key and self._key else key, connection.run)]

    def _by_scheduler(self) -> list[Endpoint]:
        """The ports of ours on the scheduler's machine; the first of them most often."""
        if self._scheduler is None or self._key is None:
            return []
        first, *others = [Endpoint.of(join_endpoint(self._scheduler, port), self._key) for port in PORTS]
        return [place for other in others for place in (first, other)]

    def _beside(self) -> str:
        if self._scheduler is None:
            return ""
        if self._key is None:
            return f" (not at {SCHEDULER_HOST}={self._scheduler}, for want of a key: {_GIVE_KEY})"
        return f" and at {SCHEDULER_HOST}={self._scheduler}, ports {PORTS[0]} to {PORTS[-1]}"

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", printable(text, line=True))


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
