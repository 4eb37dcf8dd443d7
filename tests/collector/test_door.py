"""The collector's socket with what guards it: who is counted as turned away, and what a peer may cost."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from rankd.collector import connections
from rankd.collector.config import RankdConfig
from rankd.collector.door import Door
from rankd.collector.protocol.keys import RunKey

from ..support import wait_for

ANSWER = bytes(2**19)


def test_what_a_peer_left_behind_is_not_another_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank says its last and goes; what of it is read only then makes no connection that never said hello."""
    monkeypatch.setattr(connections, "HELLO_WITHIN", 0.0)
    door = Door(RankdConfig(endpoint="tcp://127.0.0.1:*"), RunKey.fresh())
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.connect(door.endpoint)
    peer.send(b"hello")
    received = []

    def take() -> bool:
        if (message := door.receive()) is not None:
            received.append(message[1])
            door.greet(message[0])
        return message is not None

    wait_for(take)
    for number in range(3):
        peer.send(b"%d" % number)
    peer.close(10_000)
    context.term()

    # `receive` would tell the peer as gone once nothing is left, so its connection's end must be seen before.
    def has_ended() -> bool:
        door.tend()
        return not door.connected

    wait_for(has_ended)
    while take():
        pass
    assert received == [[b"hello"], [b"0"], [b"1"], [b"2"]]
    assert len(door.gone()) == 1
    door.tend()
    assert door.connected == 0
    assert not door.refusals
    door.close(0)


def test_a_peer_that_never_reads_costs_a_bounded_number_of_answers(tmp_path: Path) -> None:
    """What is more is dropped; it is answered again once it reads."""
    door, context = Door(RankdConfig(output=tmp_path), RunKey.fresh()), zmq.Context()
    with context.socket(zmq.DEALER) as reader:
        for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, 1), (zmq.RCVBUF, 2**16)):
            reader.setsockopt(option, value)
        reader.connect(door.endpoint)
        reader.send(b"?")
        wait_for(lambda: door.wait(0.1))
        arrived = door.receive()
        assert arrived is not None
        for _ in range(400):
            door.send(arrived[0], ANSWER)
        received = 0
        while reader.poll(500):
            assert reader.recv() == ANSWER
            received += 1
        # Beside the queue, what the system's buffers have taken.
        assert 64 <= received < 200
        door.send(arrived[0], b"again")
        assert reader.poll(10_000)
        assert reader.recv() == b"again"
    context.term()
    door.close(0)
