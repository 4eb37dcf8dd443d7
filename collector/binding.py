"""Where the collector listens, and what it tells the agents.

Said explicitly (`rankd.endpoint`), that is where it listens, or an error says why it cannot. Otherwise it is loopback,
or, where the agent that starts it knows of other nodes, the address by which these know this one. A collector that was
killed has left behind where it was; ranks may know only that place, so it is tried first.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import socket as sockets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from .config import RankdConfig
from .protocol.endpoints import PORTS, addresses_of, is_address, is_loopback, join_endpoint, split_endpoint, stays_here
from .protocol.errors import RankdError

__all__ = ["Spot", "bind", "spots"]

log = logging.getLogger("rankd.collector")

_ANY = "*"
# Another spot may be free, or ours.
_ELSEWHERE_PERHAPS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.ENODEV)
# How long a port in use is waited for, in seconds. Somebody listens there: perhaps the collector before this one, which
# is just ending. Nobody does: an outgoing connection of any process was given this port by the system, which keeps it
# for 60 s even after its end.
_PATIENCE, _LONGER_PATIENCE, _AGAIN = 3.0, 75.0, 0.1
# Of Linux: what listens has this state in /proc/net/tcp.
_SOCKETS, _LISTENS = ("/proc/net/tcp", "/proc/net/tcp6"), "0A"
# An address for documentation: nothing is sent there, the routing table is asked which way it would go.
_ELSEWHERE = "192.0.2.1"


@dataclass(frozen=True, slots=True)
class Spot:
    """One place to listen at.

    Attributes:
        listen: what the socket is bound to.
        host, port: what the agents are told; port `*`: the one that was bound.
        exposed: other machines can reach it.
        remark: a warning, where this spot is not what one would expect.
        former: the collector before this one, which was killed, was here.
    """

    listen: str
    host: str
    port: str
    exposed: bool
    remark: str = ""
    former: bool = False


def spots(config: RankdConfig, near: str | None = None, former: str | None = None) -> list[Spot]:
    """Where to listen, best first. If one of them is exposed, the key is wanted at all.

    Args:
        near: the name or address by which the other nodes know this one, or one close to it; None: there are none, or
            nobody knows.
        former: the endpoint of the collector before this one, which was killed; what is configured goes before it.

    Raises:
        RankdError: no address is known for what is configured.
    """
    if config.listen is not None:
        return [_told(config.listen, config.endpoint)]
    if config.endpoint is not None:
        return _explicit(config.endpoint)
    earlier = [] if former is None else _earlier(former)
    if near is not None and not stays_here(near):
        # Other nodes look there, at these ports: only the order changes.
        found, known = _automatic(near), {spot.listen for spot in earlier}
        again = [dataclasses.replace(spot, former=True) for spot in found if spot.listen in known]
        return [*again, *(spot for spot in found if spot.listen not in known)]
    if near is not None:  # the job stays on this machine
        earlier = [spot for spot in earlier if not spot.exposed]
    return [*earlier, Spot("tcp://127.0.0.1:*", "127.0.0.1", "*", exposed=False)]


def bind(socket: zmq.Socket[bytes], candidates: Sequence[Spot]) -> str:
    """Bind to the first spot that is free and ours; what the agents connect to. A port in use is waited for a little.

    Raises:
        RankdError: there is none; says why not, and which settings matter.
    """
    started = time.monotonic()
    told = False
    while True:
        spot, error = _first_free(socket, candidates)
        if error is None:
            break
        patience = _PATIENCE if _somebody_listens(spot.port) else _LONGER_PATIENCE
        if error.errno != errno.EADDRINUSE or time.monotonic() - started >= patience:
            why = f"cannot listen on {spot.listen}: {_why(error)}; check rankd.endpoint and rankd.listen"
            raise RankdError(why) from error
        if not told:
            log.warning("%s is in use; trying again for %g s", spot.listen, patience)
            told = True
        time.sleep(_AGAIN)
    if spot.remark:
        log.warning("%s", spot.remark)
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return join_endpoint(spot.host, bound if spot.port == "*" else spot.port)


def _first_free(socket: zmq.Socket[bytes], candidates: Sequence[Spot]) -> tuple[Spot, zmq.ZMQError | None]:
    """The spot that the socket is bound to now; or the last that was tried, and why it is not to be had."""
    for spot in candidates:
        try:
            socket.bind(spot.listen)
        except zmq.ZMQError as e:
            if (e.errno not in _ELSEWHERE_PERHAPS and not spot.former) or spot is candidates[-1]:
                return spot, e
        else:
            return spot, None
    raise RankdError("there is nowhere to listen")


def _somebody_listens(port: str) -> bool:
    """Whether a socket of this machine listens on this port, at any address; not known: it is taken for granted."""
    wanted = f"{int(port):04X}" if port.isdigit() else ""
    try:
        tables = [path.read_text() for path in map(Path, _SOCKETS) if path.exists()]
    except OSError:
        return True
    sockets_of = (line.split() for table in tables for line in table.splitlines())
    return any(line[1].endswith(f":{wanted}") and line[3] == _LISTENS for line in sockets_of)


def _told(listen: str, endpoint: str | None) -> Spot:
    host, port = _parts(listen)
    shown, shown_port = _parts(endpoint) if endpoint is not None else (host, port)
    if shown == _ANY:
        shown = _own_address(_ELSEWHERE)
    return Spot(listen, shown, shown_port, exposed=host == _ANY or not is_loopback(host))


def _explicit(endpoint: str) -> list[Spot]:
    host, port = _parts(endpoint)
    if stays_here(host):
        address = host if is_address(host) else "127.0.0.1"
        return [Spot(join_endpoint(address, port), host, port, exposed=False)]
    addresses = _addresses(host)
    if not addresses:
        raise RankdError(f"cannot listen on {endpoint}: no address is known for {host}; check rankd.endpoint")
    if addresses == [host]:
        return [Spot(endpoint, host, port, exposed=True)]
    reachable = [address for address in addresses if not is_loopback(address)]
    if reachable:
        return [Spot(join_endpoint(address, port), host, port, exposed=True) for address in reachable]
    remark = (
        f"rankd.endpoint: {host} is {addresses[0]} on this machine (/etc/hosts?), where no other node comes through; "
        "listening on all its addresses, for those who have the run's key"
    )
    return [Spot(join_endpoint(_ANY, port), host, port, True, remark)]


def _earlier(endpoint: str) -> list[Spot]:
    """Where a collector that told this endpoint can be again; none: it cannot be understood, or was somewhere else."""
    port = (split_endpoint(endpoint) or ("", ""))[1]
    if not port.isdigit() or not 0 < int(port) < 65_536:
        return []
    try:
        return [dataclasses.replace(spot, former=True) for spot in _explicit(endpoint)]
    except RankdError:
        return []


def _automatic(near: str) -> list[Spot]:
    """At the address that others know, at the first free port of ours; elsewhere only those come who read of it."""
    addresses = _addresses(near)
    reachable = [address for address in addresses if not is_loopback(address)]
    ports = [*map(str, PORTS), "*"]
    found = [Spot(join_endpoint(address, port), address, "*", True) for address in reachable for port in ports]
    # Another node's address, or a name that means loopback here.
    own = _own_address(reachable[0] if reachable else _ELSEWHERE)
    remark = (
        f"{near} is no address of this machine that other nodes reach; listening on all its addresses, and telling "
        f"{own}: agents that do not see the output directory need RANKD_ENDPOINT"
    )
    return [*found, *(Spot(join_endpoint(_ANY, port), own, "*", True, remark) for port in ports)]


def _parts(endpoint: str) -> tuple[str, str]:
    parts = split_endpoint(endpoint)
    if parts is None:
        raise RankdError(f"{endpoint} is no endpoint")
    return parts


def _addresses(host: str) -> list[str]:
    """The address itself, or those of a name."""
    return [host] if is_address(host) else addresses_of(host)


def _own_address(target: str) -> str:
    """The address of this machine that faces `target`; its name where it faces nobody."""
    family = sockets.AF_INET6 if ":" in target else sockets.AF_INET
    with sockets.socket(family, sockets.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return sockets.gethostname()
        return str(probe.getsockname()[0])


def _why(error: zmq.ZMQError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"{error.strerror}: perhaps another job's collector has the port"
        case errno.EADDRNOTAVAIL | errno.ENODEV:
            return f"{error.strerror}: the collector runs where rank 0 is, and that machine has no such address"
    return error.strerror or str(error)
