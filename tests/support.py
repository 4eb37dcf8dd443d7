"""What the tests with real processes share: a collector, a scripted peer, and waiting for conditions."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from rankd.collector.protocol.records import Record
from rankd.collector.protocol.speclog import parse
from rankd.collector.protocol.wire import Ack, Hello, Message, Welcome, decode_message, encode_message
from rankd.collector.verify import Verification

# How long a condition may take to come true: far longer than it takes on a busy machine.
PATIENCE = 60.0


class CollectorProcess:
    """`rankd collect` for one output directory, started again as often as a test wants."""

    def __init__(
        self, output: Path, *options: str, command: Sequence[str] = ("-m", "rankd.collector"), **section: object
    ) -> None:
        self.output = output
        self._command = command
        # A file, not a pipe: a collector that nobody reads must not stop.
        self._said = output.parent / f"{output.name}.said"
        self.settings = json.dumps({"output": str(output), "beat_interval": 0.2, "linger": 0.5, **section})
        self._options = options
        self.process = self.start()

    def start(self) -> subprocess.Popen[str]:
        """Start it and wait until it can be connected to."""
        self.launch()
        wait_for(self.is_up_or_gone)
        return self.process

    def launch(self) -> subprocess.Popen[str]:
        """Start it, and do not wait."""
        with self._said.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, *self._command, "collect", "--settings", "-", *self._options],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                text=True,
            )
        assert self.process.stdin is not None
        self.process.stdin.write(self.settings)
        self.process.stdin.close()
        return self.process

    def is_up_or_gone(self) -> bool:
        """It can be connected to, or it has ended."""
        return self.connection().get("pid") == self.process.pid or self.process.poll() is not None

    def said(self) -> str:
        """All that it has printed since its latest start."""
        return self._said.read_text()

    def connection(self) -> dict[str, object]:
        """What the connection file says; empty where there is none."""
        try:
            facts: dict[str, object] = json.loads((self.output / ".rankd" / "connection.json").read_text())
        except FileNotFoundError:
            return {}
        return facts

    def ended(self) -> tuple[int, str]:
        """Its exit status and all it printed."""
        return self.process.wait(PATIENCE), self.said()

    def kill(self) -> None:
        """SIGKILL, and gone."""
        self.process.kill()
        self.process.wait()


class Peer:
    """A scripted agent: says what a test wants, on a socket of its own."""

    def __init__(self, collector: CollectorProcess) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(str(collector.connection()["endpoint"]))

    def say(self, message: Message) -> None:
        self._socket.send(encode_message(message))

    def say_raw(self, *parts: bytes) -> None:
        self._socket.send_multipart(parts)

    def hear(self) -> Message:
        assert self._socket.poll(int(PATIENCE * 1000)), "the collector says nothing"
        return decode_message(self._socket.recv())

    def welcome(self, who: Hello) -> Welcome:
        """Say hello and be welcomed."""
        self.say(who)
        answer = self.hear()
        assert isinstance(answer, Welcome), answer
        return answer

    def acknowledged(self, seq: int) -> None:
        """Hear acknowledgements until `seq` is among them."""
        while (answer := self.hear()) != Ack(seq):
            assert isinstance(answer, Ack)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def wait_for(condition: Callable[[], object]) -> None:
    """Until `condition` holds, at most PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def records_of(output: Path) -> list[Record]:
    """The records of merged.log."""
    lines = (output / "merged.log").read_bytes().splitlines(keepends=True)
    return [r for r in parse(lines) if isinstance(r, Record)]


def check_logs(output: Path, world_size: int) -> None:
    """SPEC section 3: each rank's lines of merged.log, prefix removed, are its own log."""
    merged = (output / "merged.log").read_bytes().splitlines(keepends=True)
    for rank in range(world_size):
        prefix = b"[rank_%d] " % rank
        own = b"".join(line[len(prefix) :] for line in merged if line.startswith(prefix))
        assert own == (output / f"rank_{rank}" / "monitor.log").read_bytes()


def verified(output: Path) -> Verification:
    """`rankd verify`: nothing is found."""
    check = Verification(output)
    check.run()
    assert [str(finding) for finding in check.findings] == []
    return check


def free_port() -> int:
    """A port of the loopback address that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
