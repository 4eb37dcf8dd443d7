"""The link alone, as tables: what comes in, when, and what is to be done."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rankd.agent.link import (
    Acknowledged,
    Action,
    Link,
    LinkState,
    Open,
    Rewind,
    SayBeat,
    SayHello,
    Seek,
    Shut,
    Tell,
    Timing,
    Warn,
)
from rankd.collector.protocol.wire import Ack, Hello, Message, Refused, Welcome, Who

TIMING = Timing(warn_after=30, hello_timeout=5, silence=15, seek_first=0.5, seek_most=2, refused_delay=3)
WELCOME = Welcome("r1", 4, 10.0)
HELLO = Hello(bytes(range(16)), "", 1, 2, 99, "here", 1, 0.0)
ENDPOINT = "tcp://host:1"

S = LinkState


def seeking() -> Link:
    return Link(0.0, "the file", TIMING)


def greeting() -> Link:
    link = seeking()
    link.found(ENDPOINT, 0.0)
    return link


def joined() -> Link:
    link = greeting()
    link.received(WELCOME, 0.0)
    link.tick(0.0, False)
    return link


def waiting() -> Link:
    link = greeting()
    link.received(Refused("older one lives", True), 0.0)
    return link


def off() -> Link:
    link = greeting()
    link.received(Refused("wrong run", False), 0.0)
    return link


MADE: dict[LinkState, Callable[[], Link]] = {
    S.SEEKING: seeking,
    S.GREETING: greeting,
    S.JOINED: joined,
    S.WAITING: waiting,
    S.OFF: off,
}

TRANSITIONS: list[tuple[LinkState, Message, LinkState, list[type]]] = [
    (S.SEEKING, WELCOME, S.SEEKING, []),
    (S.SEEKING, Ack(1), S.SEEKING, []),
    (S.SEEKING, Who(), S.SEEKING, []),
    (S.SEEKING, Refused("x", False), S.SEEKING, []),
    (S.GREETING, WELCOME, S.JOINED, [Rewind]),
    (S.GREETING, Ack(1), S.GREETING, [Acknowledged]),
    (S.GREETING, Who(), S.GREETING, []),
    (S.GREETING, Refused("x", True), S.WAITING, [Warn]),
    (S.GREETING, Refused("x", False), S.OFF, [Shut, Warn]),
    (S.JOINED, WELCOME, S.JOINED, [Rewind]),
    (S.JOINED, Ack(1), S.JOINED, [Acknowledged]),
    (S.JOINED, Who(), S.GREETING, [SayHello]),
    (S.JOINED, Refused("x", True), S.WAITING, [Warn]),
    (S.JOINED, Refused("x", False), S.OFF, [Shut, Warn]),
    (S.WAITING, WELCOME, S.JOINED, [Rewind, Tell]),
    (S.WAITING, Ack(1), S.WAITING, [Acknowledged]),
    (S.WAITING, Who(), S.WAITING, []),
    (S.WAITING, Refused("x", True), S.WAITING, []),
    (S.WAITING, Refused("x", False), S.OFF, [Shut, Warn]),
    (S.OFF, WELCOME, S.OFF, []),
    (S.OFF, Ack(1), S.OFF, []),
    (S.OFF, Who(), S.OFF, []),
    # Its own, from a connection to itself.
    (S.GREETING, HELLO, S.SEEKING, [Shut]),
    (S.OFF, HELLO, S.OFF, []),
    (S.OFF, Refused("x", True), S.OFF, []),
]


@pytest.mark.parametrize(("state", "message", "after", "actions"), TRANSITIONS)
def test_messages(state: LinkState, message: Message, after: LinkState, actions: list[type]) -> None:
    """Each message in each state leads where the table says, with the actions of the table."""
    link = MADE[state]()
    assert link.state is state
    got = link.received(message, 1.0)
    assert [type(a) for a in got] == actions
    assert link.state is after
    assert link.may_send is (after is S.JOINED)


# (state, time, in flight since the last tick at 0, actions, state after)
DUE: list[tuple[LinkState, float, bool, list[Action], LinkState]] = [
    (S.SEEKING, 0.0, False, [Seek()], S.SEEKING),
    (S.GREETING, 4.9, False, [], S.GREETING),
    (S.GREETING, 5.0, False, [Shut()], S.SEEKING),
    (S.JOINED, 8.9, False, [], S.JOINED),
    (S.JOINED, 9.0, False, [SayBeat()], S.JOINED),
    (S.JOINED, 14.9, True, [SayBeat()], S.JOINED),
    (S.JOINED, 15.0, True, [Shut()], S.SEEKING),
    (S.JOINED, 15.0, False, [SayBeat()], S.JOINED),
    (S.WAITING, 2.9, False, [], S.WAITING),
    (S.WAITING, 3.0, False, [SayHello(None)], S.GREETING),
    (S.OFF, 1_000.0, True, [], S.OFF),
]


@pytest.mark.parametrize(("state", "now", "in_flight", "actions", "after"), DUE)
def test_time(state: LinkState, now: float, in_flight: bool, actions: list[Action], after: LinkState) -> None:
    """What time makes due in each state, and not a moment earlier."""
    link = MADE[state]()
    if state is S.JOINED:
        link.tick(0.0, in_flight)
    assert link.tick(now, in_flight) == actions
    assert link.state is after


@pytest.mark.parametrize("state", list(LinkState))
def test_a_broken_connection(state: LinkState) -> None:
    """A broken connection starts the search again, except where there is none or nothing to search for."""
    link = MADE[state]()
    again = state not in (S.SEEKING, S.OFF)
    assert link.lost("broke", 1.0) == ([Shut()] if again else [])
    assert link.state is (S.SEEKING if again else state)


def test_seeking_backs_off_and_opens_what_it_found() -> None:
    """Looks for the endpoint come at doubling intervals up to the most; what is found is opened and greeted."""
    link, looks, now = seeking(), [], 0.0
    while now < 12:
        if link.tick(now, False) == [Seek()]:
            looks.append(now)
            assert link.found(None, now) == []
        now = link.next_at()
    assert looks == [0.0, 0.5, 1.5, 3.5, 5.5, 7.5, 9.5, 11.5]
    assert link.tick(13.5, False) == [Seek()]
    assert link.found(ENDPOINT, 13.5) == [Open(ENDPOINT), SayHello(None)]
    assert link.found(ENDPOINT, 13.5) == []


def test_one_warning_while_alone_and_one_word_when_it_is_over() -> None:
    """Without a collector there is one warning, which names where it looked and what it saw; then news of the end."""
    link = greeting()
    now, warnings = 0.0, []
    while now < 300:
        for action in link.tick(now, False):
            if isinstance(action, Seek):
                link.found(ENDPOINT, now)
            if isinstance(action, Warn):
                warnings.append((now, action.text))
        now = link.next_at()
    assert [w[0] for w in warnings] == [30.0]
    assert "the file" in warnings[0][1]
    assert "did not answer" in warnings[0][1]
    if link.state is S.SEEKING:
        link.found(ENDPOINT, now)
    assert link.received(WELCOME, now) == [Rewind(4, "r1"), Tell(f"the collector at {ENDPOINT} answers")]


def test_a_second_outage_warns_again() -> None:
    """The warning is once an outage, counted from the moment the collector was lost."""
    link = joined()
    link.lost("broke", 100.0)
    assert not any(isinstance(a, Warn) for a in link.tick(129.0, False))
    assert any(isinstance(a, Warn) for a in link.tick(130.0, False))


def test_refusals_that_may_pass_are_told_once() -> None:
    """Refused again and again, in other words: one warning until a welcome."""
    link = waiting()
    for n in range(5):
        assert link.tick(3.0 * (n + 1), False) == [SayHello(None)]
        assert link.received(Refused(f"older one was heard {n} s ago", True), 3.0 * (n + 1)) == []
    link.tick(18.0, False)
    link.received(WELCOME, 18.0)
    assert [type(a) for a in link.received(Refused("again", True), 19.0)] == [Warn]


def test_acknowledgements_put_off_the_silence() -> None:
    """As long as acknowledgements come, data in flight is no silence."""
    link = joined()
    for now in range(10, 100, 10):
        link.tick(now, True)
        link.received(Ack(now), now)
        assert link.state is S.JOINED


def test_a_run_once_joined_is_named_in_later_hellos() -> None:
    """After a welcome the hello names that run, so that another run's collector can refuse it."""
    link = joined()
    assert link.received(Who(), 1.0) == [SayHello("r1")]
    link.lost("broke", 2.0)
    assert link.found(ENDPOINT, 3.0) == [Open(ENDPOINT), SayHello("r1")]


# An interval that is no finite number above 0 cannot be in a Welcome (tests/collector/protocol/test_wire.py).
@pytest.mark.parametrize(("asked", "first"), [(1.0, 0.9), (1e-9, 0.045), (1e9, 54.0)])
def test_beat_intervals_of_any_collector_are_bounded(asked: float, first: float) -> None:
    """Whatever interval the collector asks for, beats are neither a flood nor forgotten."""
    link = greeting()
    link.received(Welcome("r", 0, asked), 0.0)
    assert link.tick(0.0, False) == [SayBeat()]
    assert link.next_at() == pytest.approx(first)
