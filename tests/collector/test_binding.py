"""Where the collector listens: real sockets, on loopback; other addresses by what is planned."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import zmq
from tests.support import free_port, wait_for

from rankd.collector.binding import Spot, bind, spots
from rankd.collector.config import RankdConfig
from rankd.collector.protocol.endpoints import PORTS
from rankd.collector.protocol.errors import RankdError


@pytest.fixture
def router() -> Iterator[zmq.Socket[bytes]]:
    """A socket that is not bound."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as it:
        it.setsockopt(zmq.IPV6, 1)
        yield it


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """/etc/hosts of Debian: this machine's own name is 127.0.1.1; and one with two addresses."""
    known = {"node0": ["127.0.1.1"], "two": ["127.0.1.1", "10.9.9.9", "fd00::9"], "none": []}
    monkeypatch.setattr("rankd.collector.binding.addresses_of", lambda name: known[name])


def test_nothing_configured_is_loopback_without_a_key(router: zmq.Socket[bytes]) -> None:
    """A single node needs nothing."""
    for near in (None, "localhost", "127.0.0.1", "::1"):
        (spot,) = spots(RankdConfig(), near)
        assert not spot.exposed
    assert bind(router, spots(RankdConfig())).startswith("tcp://127.0.0.1:")


def test_other_nodes_get_the_address_that_they_know(router: zmq.Socket[bytes]) -> None:
    """MindSpore's scheduler host: our first free port there; last of all, any address of ours."""
    found = spots(RankdConfig(), "10.1.2.3")
    assert [s.listen for s in found[: len(PORTS)]] == [f"tcp://10.1.2.3:{port}" for port in PORTS]
    assert all(s.exposed for s in found)
    assert found[-1].listen == "tcp://*:*"
    assert "RANKD_ENDPOINT" in found[-1].remark


def test_a_port_that_another_job_has_is_passed_over(router: zmq.Socket[bytes]) -> None:
    """COMPLAINTS 12: the automatic case takes the next one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        candidates = [Spot(f"tcp://127.0.0.1:{p}", "127.0.0.1", "*", exposed=False) for p in (port, "*")]
        assert bind(router, candidates) not in ("", f"tcp://127.0.0.1:{port}")


def test_an_explicit_port_that_is_taken_is_an_error(router: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """COMPLAINTS 12: it names the endpoint, the reason and the setting."""
    monkeypatch.setattr("rankd.collector.binding._PATIENCE", 0.2)  # somebody listens
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RankdError, match=r"another job's collector has the port; check rankd\.endpoint") as error:
            bind(router, spots(RankdConfig(endpoint=endpoint)))
    assert endpoint in str(error.value)


def test_an_explicit_port_that_is_in_use_for_a_moment_is_waited_for(
    router: zmq.Socket[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """An outgoing connection has it: one word about it, and then it listens."""
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        holder = socket.create_connection(somebody.getsockname(), source_address=("127.0.0.1", port))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        def let_go() -> None:
            wait_for(lambda: caplog.messages)
            holder.close()

        thread = threading.Thread(target=let_go)
        thread.start()
        endpoint = f"tcp://127.0.0.1:{port}"
        assert bind(router, spots(RankdConfig(endpoint=endpoint))) == endpoint
        thread.join()
    assert caplog.messages == [f"{endpoint} is in use; trying again for 75 s"]


def test_an_address_of_another_machine_is_an_error(router: zmq.Socket[bytes]) -> None:
    """It says that the collector runs where rank 0 is."""
    with pytest.raises(RankdError, match="the collector runs where rank 0 is"):
        bind(router, spots(RankdConfig(endpoint="tcp://192.0.2.7:7800")))


@pytest.mark.usefixtures("mapped")
def test_a_name_that_means_loopback_here_is_listened_for_on_all_addresses() -> None:
    """COMPLAINTS 11: 127.0.1.1 in /etc/hosts; others know the name by its real address. With a warning, and the key."""
    (spot,) = spots(RankdConfig(endpoint="tcp://node0:7801"))
    assert (spot.listen, spot.host, spot.exposed) == ("tcp://*:7801", "node0", True)
    assert "node0 is 127.0.1.1 on this machine" in spot.remark
    assert all(s.listen.startswith("tcp://*:") and s.exposed for s in spots(RankdConfig(), "node0"))


@pytest.mark.usefixtures("mapped")
def test_of_a_names_addresses_those_that_others_reach_count() -> None:
    """Loopback is left aside where there is another; no address at all is an error."""
    found = spots(RankdConfig(endpoint="tcp://two:7801"))
    assert [s.listen for s in found] == ["tcp://10.9.9.9:7801", "tcp://[fd00::9]:7801"]
    with pytest.raises(RankdError, match="no address is known for none"):
        spots(RankdConfig(endpoint="tcp://none:1"))


def test_ipv6_loopback(router: zmq.Socket[bytes]) -> None:
    """COMPLAINTS 10: `[::1]` works, and stays in brackets."""
    (spot,) = spots(RankdConfig(endpoint="tcp://[::1]:*"))
    assert not spot.exposed
    assert bind(router, [spot]).startswith("tcp://[::1]:")


def test_listening_elsewhere_than_the_agents_connect(router: zmq.Socket[bytes]) -> None:
    """A container: all addresses inside, another one outside."""
    (spot,) = spots(RankdConfig(listen="tcp://*:*", endpoint="tcp://outside.example:7801"))
    assert spot.exposed
    assert bind(router, [spot]) == "tcp://outside.example:7801"


def test_where_a_killed_collector_was_comes_first(router: zmq.Socket[bytes]) -> None:
    """Ranks with a fixed endpoint know no other place; what is configured goes before it."""
    former = f"tcp://127.0.0.1:{free_port()}"
    found = spots(RankdConfig(), None, former)
    assert [s.listen for s in found] == [former, "tcp://127.0.0.1:*"]
    assert bind(router, found) == former
    (told,) = spots(RankdConfig(endpoint="tcp://127.0.0.1:7801"), None, former)
    assert told.listen == "tcp://127.0.0.1:7801"
    (told,) = spots(RankdConfig(listen="tcp://127.0.0.1:7802"), None, former)
    assert told.listen == "tcp://127.0.0.1:7802"


@pytest.mark.parametrize(
    "former", ["tcp://192.0.2.7:7801", "tcp://127.0.0.1:1", "ipc:///x", "tcp://[", "tcp://a:0", ""]
)
def test_a_former_place_that_cannot_be_had_is_passed_over(router: zmq.Socket[bytes], former: str) -> None:
    """Another machine's address, a port that is not for us, nonsense: loopback, as without it."""
    candidates = spots(RankdConfig(), None, former)
    if former.endswith(":1"):  # root may have it
        candidates = [s for s in candidates if not s.former] if os.geteuid() == 0 else candidates
    assert bind(router, candidates).startswith("tcp://127.0.0.1:")


def test_a_former_place_opens_nothing_that_near_does_not() -> None:
    """Known to other nodes by an address: only the order of its ports changes. On this machine alone: loopback."""
    usual = [s.listen for s in spots(RankdConfig(), "10.1.2.3")]
    again = spots(RankdConfig(), "10.1.2.3", f"tcp://10.1.2.3:{PORTS[2]}")
    assert again[0].listen == f"tcp://10.1.2.3:{PORTS[2]}"
    assert sorted(s.listen for s in again) == sorted(usual)
    for elsewhere in ("tcp://127.0.0.1:7801", "tcp://10.9.9.9:7690", "tcp://10.1.2.3:4711"):
        assert [s.listen for s in spots(RankdConfig(), "10.1.2.3", elsewhere)] == usual
    (only,) = spots(RankdConfig(), "localhost", "tcp://10.1.2.3:7690")
    assert not only.exposed
