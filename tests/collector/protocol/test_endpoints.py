"""Addresses: what is loopback, and their one text form."""

from __future__ import annotations

import pytest

from rankd.collector.protocol.endpoints import (
    DEFAULT_PORT,
    PORTS,
    is_loopback,
    is_loopback_endpoint,
    join_endpoint,
    split_endpoint,
    stays_here,
)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", "localhost"])
def test_loopback(host: str) -> None:
    """All of 127/8, in IPv6 too, and the name."""
    assert is_loopback(host)
    assert stays_here(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "::", "fd00::1", "fe80::1%eth0", "no-such-name.invalid"])
def test_beyond(host: str) -> None:
    """Also what nobody knows: only what is certain to stay here may go without a key."""
    assert not is_loopback(host)
    assert not stays_here(host)


def test_forms() -> None:
    """IPv6 in brackets, and back."""
    for host, port, text in (("h", 1, "tcp://h:1"), ("::1", "*", "tcp://[::1]:*")):
        assert join_endpoint(host, port) == text
        assert split_endpoint(text) == (host, str(port))
    assert split_endpoint("ipc://x") is None
    assert is_loopback_endpoint("ipc:///run/x")
    assert is_loopback_endpoint("tcp://[::1]:7")
    assert not is_loopback_endpoint("tcp://10.0.0.1:7")


def test_our_port_is_not_the_schedulers() -> None:
    """DESIGN: never MS_SCHED_PORT, whose default is 8118."""
    assert 8118 not in PORTS
    assert PORTS[0] == DEFAULT_PORT
