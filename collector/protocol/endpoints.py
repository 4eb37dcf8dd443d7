"""Addresses: the ports that rankd uses by itself, and what counts as loopback.

A collector that is not told its port takes the first free one of PORTS, and an agent that knows only the collector's
host tries them: two jobs on one host find each a place, and the run's key tells them apart.
"""

from __future__ import annotations

import ipaddress
import re
import socket

__all__ = [
    "DEFAULT_PORT",
    "PORTS",
    "addresses_of",
    "is_address",
    "is_loopback",
    "is_loopback_endpoint",
    "join_endpoint",
    "split_endpoint",
    "stays_here",
]

# Registered for nothing, below the ports that systems give away by themselves, and not MindSpore's (8118).
DEFAULT_PORT = 7690
# Jobs that share one host's address; an agent without a connection file looks at each of them in turn.
PORTS = range(DEFAULT_PORT, DEFAULT_PORT + 8)

_TCP = re.compile(r"tcp://(\[[^\[\]\s]+\]|[^\s:/\[\]]+):(\*|[0-9]{1,5})", re.ASCII)
# Names that mean this machine wherever they are read.
_LOCAL_NAME = re.compile(r"(.+\.)?localhost(\.localdomain)?|ip6-(localhost|loopback)", re.IGNORECASE)


def split_endpoint(endpoint: str) -> tuple[str, str] | None:
    """Host (an IPv6 address without brackets) and port of `tcp://HOST:PORT`; None: it is not of that form."""
    match = _TCP.fullmatch(endpoint)
    return None if match is None else (match[1].strip("[]"), match[2])


def join_endpoint(host: str, port: int | str) -> str:
    """`tcp://HOST:PORT`, an IPv6 address in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def addresses_of(host: str) -> list[str]:
    """The addresses that this machine's resolver gives for a name, in its order; empty: it knows none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_address(host: str) -> bool:
    """Whether this is an IPv4 or IPv6 address and not a name."""
    return _parsed(host) is not None


def stays_here(host: str) -> bool:
    """Whether this means the machine itself wherever it is read: a loopback address, or `localhost`."""
    return is_loopback(host) if is_address(host) else _LOCAL_NAME.fullmatch(host) is not None


def is_loopback(host: str) -> bool:
    """Whether what is sent to this address or name stays on this machine. Names are looked up; unknown ones do not."""
    address = _parsed(host)
    if address is None:
        addresses = addresses_of(host)
        return bool(addresses) and all(map(is_loopback, addresses))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_loopback_endpoint(endpoint: str) -> bool:
    """The same of an endpoint; what is not TCP (ipc) does not leave the machine either."""
    parts = split_endpoint(endpoint)
    return not endpoint.startswith("tcp://") or (parts is not None and is_loopback(parts[0]))


def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        # A zone (%eth0) may hold what Python takes for none.
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
