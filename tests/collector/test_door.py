"""The collector's door, with a peer of its own."""

from __future__ import annotations

from pathlib import Path

import zmq
from tests.support import wait_for

from rankd.collector.config import RankdConfig
from rankd.collector.door import Door
from rankd.collector.protocol.keys import RunKey

ANSWER = bytes(2**19)


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
