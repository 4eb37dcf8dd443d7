"""What one connection may cost; pure, so time is an argument."""

from __future__ import annotations

from rankd.collector.connections import HELLO_WITHIN, HOARD_BYTES, MOST_OFFENCES, MOST_SESSIONS, Connections


def test_a_stranger_has_to_say_hello_in_time() -> None:
    """Half-open or not: who has said it stays."""
    it = Connections(100)
    it.opened(5, "a:1", 0.0)
    it.opened(6, "b:1", 1.0)
    it.heard(6, b"p", 10, 1.0)
    it.greeted(b"p")
    assert it.due(HELLO_WITHIN - 1) == []
    assert [c.fd for c in it.due(HELLO_WITHIN + 9)] == [5]


def test_too_many_connections_cost_the_oldest_strangers() -> None:
    """Never somebody who has said hello."""
    it = Connections(3)
    for fd in range(5):
        it.opened(fd, f"a:{fd}", float(fd))
    it.heard(0, b"p", 1, 1.0)
    it.greeted(b"p")
    assert [c.fd for c in it.due(5.0)] == [1, 2]


def test_offenders_and_those_who_speak_for_many() -> None:
    """A few refusals are borne; then the connection is named."""
    it = Connections(9)
    it.heard(1, b"p", 1, 0.0)
    assert [it.offended(b"p") is None for _ in range(MOST_OFFENCES)] == [True] * (MOST_OFFENCES - 1) + [False]
    assert all(it.spoke_for_another(b"p") for _ in range(MOST_SESSIONS))
    assert not it.spoke_for_another(b"p")
    assert it.offended(b"unknown") is None


def test_bytes_that_never_become_a_message() -> None:
    """What the kernel received, less what came out; heartbeats for days are none."""
    it = Connections(9)
    it.opened(1, "a:1", 0.0)
    it.opened(2, "b:1", 0.0)
    day = 86_400.0
    for hour in range(1, 25):
        it.heard(2, b"q", 10**8, hour * 3_600.0)
        received = {1: hour * 3_600 * 100, 2: hour * (10**8 + 3_600 * 100), 7: 10**12}
        assert it.hoarders(received, hour * 3_600.0) == []
    assert [c.fd for c in it.hoarders({1: 8_640_000 + HOARD_BYTES + 10_000, 2: 24 * (10**8 + 360_000)}, day + 1)] == [1]


def test_a_descriptor_that_is_another_connection_by_now() -> None:
    """The end of one and the begin of the next may be told late: nothing is laid at the wrong door."""
    it = Connections(9)
    it.heard(1, b"p", 1, 0.0)  # told of before it is accepted
    it.opened(1, "a:1", 0.1)
    assert it.address(b"p") == "a:1"
    it.heard(1, b"q", 1, 1.0)
    assert it.address(b"q") == "an unknown address"
    assert it.address(b"p") == "an unknown address"
    assert it.closed(1) is not None
    assert it.closed(1) is None
    assert len(it) == 0


def test_what_is_told_of_an_earlier_connection_does_not_end_the_one_that_has_its_descriptor() -> None:
    """Messages overtake what is told: end and begin of two connections come when the second one speaks already."""
    for spoke in (True, False):
        it = Connections(9)
        it.opened(1, "a:1", 0.0)
        if spoke:
            assert it.heard(1, b"p", 1, 0.1, "a:1") is None
        earlier = it.heard(1, b"q", 1, 1.0, "b:1")
        assert earlier is not None
        assert earlier.peer == (b"p" if spoke else None)
        assert it.ended(1) is None
        assert (it.knows(b"p"), it.address(b"q")) == (False, "b:1")
        it.opened(1, "b:1", 1.1)
        assert [it.offended(b"q") is None for _ in range(MOST_OFFENCES)][-1] is False
        gone = it.ended(1)
        assert gone is not None
        assert gone.peer == b"q"
        assert len(it) == 0
