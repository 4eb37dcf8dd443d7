"""A hostile peer at a live collector, while eight honest ranks train: their log is what it would be without it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from tests.collector.streams import hello, training
from tests.support import CollectorProcess

from rankd.collector.protocol.keys import RunKey
from rankd.collector.protocol.wire import MAX_MESSAGE_BYTES, Ack, Beat, Data, Hello, Welcome, Who, encode_message

pytestmark = pytest.mark.slow

RANKS = 8
PATIENCE = 90.0
KEY = "hostile-0123456789abcdef0123456789abcdef"
# What the attack may add to the collector's memory: a few messages of the largest size, and what comes over loopback
# between two looks at a connection.
MOST_GROWTH = 512 * 2**20

HONEST = """
import sys, time
from pathlib import Path
from rankd.agent import Agent
from rankd.agent.config import AgentConfig
from rankd.collector.config import RankdConfig, SpoolConfig
from rankd.collector.protocol.records import Frame, NameTable

output = Path(sys.argv[1])
config = AgentConfig(rankd=RankdConfig(
    output=output, start_collector=False, beat_interval=0.2, exit_timeout=60.0,
    spool=SpoolConfig(directory=output.parent / "spools"),
))
agents = [Agent(config, rank=rank, world_size=8) for rank in range(8)]
names = NameTable(tuple(f"decoder.layers.{i}.weight" for i in range(50)))
while not all(agent.connected for agent in agents):
    time.sleep(0.01)
print("joined", flush=True)
for step in range(1, 81):
    if step == 70:
        sys.stdin.readline()
    contexts = [agent.step(step) for agent in agents]
    for context in contexts:
        context.__enter__()
    for micro_step in (1, 2):
        for rank, agent in enumerate(agents):
            norms = [rank + step + micro_step / 10 + i for i in range(50)]
            agent.micro_step(frames=[Frame.scalar("local_loss", step / 7), Frame.named("local_norm", names, norms)])
        time.sleep(0.01)
    for context in contexts:
        context.__exit__(None, None, None)
for agent in agents:
    agent.close()
assert not any(agent.errors for agent in agents)
"""


class Attacker:
    """Everything that a peer can do wrong, at one collector."""

    def __init__(self, collector: CollectorProcess, key: RunKey | None) -> None:
        self._endpoint = str(collector.connection()["endpoint"])
        host, _, port = self._endpoint.removeprefix("tcp://").rpartition(":")
        self._address = (host, int(port))
        self._key = key
        self._context = zmq.Context()
        self._raw: list[socket.socket] = []

    @contextlib.contextmanager
    def peer(self, key: RunKey | None = None) -> Iterator[zmq.Socket[bytes]]:
        """A connection that can say whatever it likes."""
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.SNDTIMEO, int(PATIENCE * 1_000))
            if (key or self._key) is not None:
                (key or self._key).protect(dealer)  # type: ignore[union-attr]
            dealer.connect(self._endpoint)
            yield dealer

    def say(self, *messages: bytes | list[bytes], answers: int) -> None:
        """Say these on one connection, and wait for as many answers, or until it is shut."""
        with self.peer() as dealer:
            for message in messages:
                dealer.send_multipart(message if isinstance(message, list) else [message])
            for _ in range(answers):
                assert dealer.poll(int(PATIENCE * 1_000)), "no answer"
                dealer.recv_multipart()

    def _until_shut(self, messages: list[bytes]) -> None:
        """Say these on one connection, and wait until it is shut."""
        with self.peer() as dealer:
            monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            try:
                for message in messages:
                    dealer.send(message)
                assert monitor.poll(int(PATIENCE * 1_000)), "not shut"
            finally:
                dealer.disable_monitor()
                monitor.close(0)

    def garbage(self) -> None:
        """Bytes, pickles, several parts, other versions, messages that only a collector sends."""
        version = b"\x93\x63\x01\x02"
        self.say(os.urandom(1_000), b"", pickle.dumps({"rank": 0}), pickle.dumps(os.getpid), answers=4)
        self.say([b"a", b"b"], [b""] * 50, b"\xdd\xff\xff\xff\xff", version, answers=4)
        self.say(encode_message(Welcome("x", 1, 1.0)), encode_message(Ack(1)), encode_message(Who()), answers=3)
        for _ in range(20):
            self.say(os.urandom(64), answers=1)
        # One that goes on and on is shut out.
        self._until_shut([b"\xc1" * 100] * 2_000)

    def giants(self) -> None:
        """A message above the limit, one that libzmq does not even read, and names without end."""
        self.say(b"\xc6" + bytes(MAX_MESSAGE_BYTES), answers=1)
        self._until_shut([bytes(MAX_MESSAGE_BYTES * 2)])

    def endless(self) -> None:
        """One message of ever more parts, each as large as it may be, and never the last one."""
        if self._key is not None:
            return  # the same, through an encryption that this test does not speak by hand
        part = bytes(MAX_MESSAGE_BYTES)
        # libzmq sends a message when it has all of it, so the wire's own bytes are needed.
        raw = self._connect()
        # ZMTP 3.0: signature, version, mechanism NULL, as-client; READY with a DEALER's socket type.
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        ready = b"\x05READY" + b"\x0bSocket-Type" + b"\0\0\0\x06DEALER"
        raw.sendall(greeting + bytes([4, len(ready)]) + ready)
        header = b"\x03" + len(part).to_bytes(8, "big")
        try:
            for _ in range(64):
                raw.sendall(header + part)
        except OSError:
            return
        raise AssertionError("the collector took a gigabyte of one message")

    def forged(self) -> None:
        """Ranks that are taken, or of another world; data and beats without a hello; holes in the numbers."""
        for rank in range(RANKS):
            self.say(
                encode_message(dataclasses.replace(hello(rank, RANKS, process=9), host="\x1b[2J../../x")), answers=1
            )
        self.say(encode_message(hello(3, 16, process=9)), encode_message(hello(40, 41, process=9)), answers=2)
        self.say(encode_message(Data(training(0, RANKS).items)), encode_message(Beat(1, 1, 0)), answers=2)
        gone = dataclasses.replace(
            hello(5, RANKS, process=9), recovered=True, host="\x1b]0;x\x07", about={"a": "\x1b[2J"}
        )
        holes = training(5, RANKS).items[3:]
        self.say(encode_message(gone), encode_message(Data(holes)), answers=2)
        flood = [
            encode_message(Hello(os.urandom(16), "", 2, RANKS, 1, "x", 1, 0.0, recovered=True)) for _ in range(100)
        ]
        self._until_shut(flood)

    def idle(self) -> None:
        """Half-open connections, and one that trickles; they stay until the attack is over."""
        self._raw += [self._connect() for _ in range(200)]
        trickle = self._connect()
        for byte in b"\xff\0\0\0":
            trickle.send(bytes([byte]))
        self._raw.append(trickle)

    def _connect(self) -> socket.socket:
        it = socket.create_connection(self._address, PATIENCE)
        self._raw.append(it)
        return it

    def close(self) -> None:
        for it in self._raw:
            it.close()
        self._context.term()


def run(folder: Path, attack: bool, key: RunKey | None, wanted: tuple[str, ...]) -> tuple[bytes, str]:
    """Eight ranks train to the end; merged.log and what the collector said."""
    environ = {**os.environ, **({"RANKD_KEY": KEY} if key is not None else {})}
    before, os.environ["RANKD_KEY"] = os.environ.get("RANKD_KEY"), environ.get("RANKD_KEY", "")
    try:
        collector = CollectorProcess(folder / "out", lost_after=60.0)
    finally:
        os.environ.pop("RANKD_KEY")
        if before is not None:
            os.environ["RANKD_KEY"] = before
    honest = subprocess.Popen(
        [sys.executable, "-c", HONEST, str(folder / "out")],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert honest.stdout is not None
    assert honest.stdin is not None
    try:
        assert honest.stdout.readline() == "joined\n"
        if attack:
            _attack(collector, key, wanted)
        honest.communicate("go on\n", timeout=PATIENCE)
        assert honest.returncode == 0
        status, said = collector.ended()
        assert status == 0, said
        return (folder / "out" / "merged.log").read_bytes(), said
    except BaseException:
        print(f"the collector (status {collector.process.poll()}) said:\n{collector.said()[-8_000:]}")
        raise
    finally:
        honest.kill()
        honest.wait()
        if collector.process.poll() is None:
            collector.kill()


def _attack(collector: CollectorProcess, key: RunKey | None, wanted: tuple[str, ...]) -> None:
    memory = psutil.Process(collector.process.pid)
    before = memory.memory_info().rss
    attacker = Attacker(collector, key)
    most = before
    try:
        for blow in (attacker.idle, attacker.garbage, attacker.giants, attacker.forged, attacker.endless):
            begin = time.monotonic()
            blow()
            most = max(most, memory.memory_info().rss)
            print(f"{blow.__name__}: {time.monotonic() - begin:.1f} s, collector {most >> 20} MiB")
        if key is not None:
            with attacker.peer(RunKey("another-" + KEY)) as dealer:
                dealer.send(b"x")
                assert not dealer.poll(1_000)
    finally:
        attacker.close()
    assert most - before < MOST_GROWTH, f"{before >> 20} MiB before, {most >> 20} MiB at most"


@pytest.mark.parametrize("keyed", [False, True], ids=["loopback", "with_the_key"])
def test_a_hostile_peer_changes_nothing_of_the_honest_ranks_log(tmp_path: Path, keyed: bool) -> None:
    """Byte-identical, bounded memory, every kind of refusal counted and named; with RANKD_KEY the attacker has it."""
    key = RunKey(KEY) if keyed else None
    wanted = ("protocol", "version", "limit", *(("without the key",) if keyed else ("endless message",)))
    for name in ("calm", "attacked"):
        (tmp_path / name).mkdir()
    calm, _ = run(tmp_path / "calm", False, key, ())
    attacked, said = run(tmp_path / "attacked", True, key, wanted)
    summary = next(line for line in said.splitlines() if line.startswith("refused: "))
    print(summary)
    for kind in wanted:
        assert f"× {kind}" in summary, said
    assert "\x1b" not in said
    assert KEY not in said
    assert attacked == calm
    written = [p for p in (tmp_path / "attacked" / "out").rglob("*") if p.is_file() and "journal" not in p.parts]
    assert [p for p in written if b"\x1b" in p.read_bytes()] == []
    ranks = {f"rank_{rank}/monitor.log" for rank in range(RANKS)}
    top = {str(p.relative_to(tmp_path / "attacked" / "out")) for p in written if ".rankd" not in p.parts}
    assert top == ranks | {"merged.log", "run.json", "RUN.md"}
