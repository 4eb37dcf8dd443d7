"""The sender over real sockets: the test holds a ROUTER and plays the collector."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket as sockets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from tests.support import free_port

from rankd.agent import sender as sender_module
from rankd.agent.discovery import Endpoint, EndpointFinder
from rankd.agent.link import LinkState, Timing
from rankd.agent.outbox import Outbox
from rankd.agent.sender import DealerSocket, Sender
from rankd.agent.spool import Spool
from rankd.agent.store import MemoryStore
from rankd.collector.protocol.connection import CONNECTION_FILE
from rankd.collector.protocol.keys import RunKey
from rankd.collector.protocol.wire import (
    Ack,
    Beat,
    Data,
    Goodbye,
    Hello,
    Item,
    Message,
    Note,
    Refused,
    Tables,
    Welcome,
    Who,
    decode_item,
    decode_message,
    encode_item,
    encode_message,
)

HELLO = Hello(bytes(range(16)), "", 1, 2, 99, "here", 1, 0.0)
FAST = Timing(warn_after=0.3, hello_timeout=0.4, silence=0.4, seek_first=0.02, seek_most=0.1, refused_delay=0.1)
# What has to be noticed at once, and not by a time-out.
NEVER = dataclasses.replace(FAST, hello_timeout=600.0, silence=600.0)
PATIENCE = 20.0


def note(text: str, size: int = 0) -> bytes:
    return encode_item(Note(0, 1, None, "test", text.ljust(size, "."), 0.0))


class Collector:
    """The other side: what arrives, in order, and what the test wants to answer."""

    def __init__(self, address: str = "tcp://127.0.0.1:*", secret: bytes | None = None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.setsockopt(zmq.IPV6, 1)
        if secret is not None:
            self.router.setsockopt(zmq.CURVE_SERVER, 1)
            self.router.setsockopt(zmq.CURVE_SECRETKEY, secret)
        try:
            self.router.bind(address)
        except zmq.ZMQError:
            self.close()
            raise
        endpoint = self.router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.endpoint = endpoint.decode().rstrip("\0")
        self.journal: list[Item] = []
        self.beats: list[Beat] = []
        self.hellos: list[Hello] = []

    def close(self) -> None:
        self.router.close(linger=0)
        self.context.term()

    def receive(self, timeout: float) -> tuple[bytes, Message] | None:
        if not self.router.poll(int(timeout * 1_000)):
            return None
        peer, raw = self.router.recv_multipart()
        return peer, decode_message(raw)

    def expect(self, kind: type, keep: bool = False) -> tuple[bytes, Message]:
        """The next message of this kind; others are passed over (`keep`: what is data goes to the journal)."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if (got := self.receive(0.1)) is not None:
                if keep and isinstance(got[1], Data):
                    self.store(got[1])
                if isinstance(got[1], kind):
                    return got
        raise AssertionError(f"no {kind.__name__} came")

    def store(self, data: Data) -> None:
        for item in (decode_item(raw, Tables()) for raw in data.items):
            if item.seq > len(self.journal):
                assert item.seq == len(self.journal) + 1, "a hole"
                self.journal.append(item)

    def say(self, peer: bytes, message: Message) -> None:
        self.router.send_multipart([peer, encode_message(message)])

    def welcome(self, beat_interval: float = 30.0) -> bytes:
        peer, hello = self.expect(Hello)
        assert isinstance(hello, Hello)
        self.hellos.append(hello)
        self.say(peer, Welcome("r1", len(self.journal), beat_interval))
        return peer

    def serve(self, until: Callable[[], bool]) -> None:
        """Answer as a collector does, until the condition holds."""
        deadline = time.monotonic() + PATIENCE
        while not until():
            assert time.monotonic() < deadline, f"not in time; {len(self.journal)} items came"
            if (got := self.receive(0.02)) is None:
                continue
            peer, message = got
            match message:
                case Hello():
                    self.hellos.append(message)
                    self.say(peer, Welcome("r1", len(self.journal), 30.0))
                case Data():
                    self.store(message)
                    self.say(peer, Ack(len(self.journal)))
                case Beat():
                    self.beats.append(message)

    @property
    def texts(self) -> list[str]:
        return [i.text.rstrip(".") for i in self.journal if isinstance(i, Note)]


class Agent:
    """An outbox and its sender."""

    def __init__(self, find: Callable[[], str | None], timing: Timing = FAST) -> None:
        self.outbox = Outbox(MemoryStore(2**24))
        self.sender = Sender(self.outbox, HELLO, find, where="the test", timing=timing, position=lambda: (7, 3))
        self.sender.start()

    def put(self, *texts: str, size: int = 0) -> None:
        for text in texts:
            assert self.outbox.put((note(text, size),), records=1, at=(1, 1))
            self.sender.wake()

    def end(self) -> None:
        self.sender.close(0)
        self.outbox.close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def agents(caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest) -> Iterator[Callable[..., Agent]]:
    """Makes agents, ends them after the test, and fails it if the thread of one has failed unexpectedly."""
    made: list[Agent] = []

    def make(find: str | Callable[[], str | None], timing: Timing = FAST) -> Agent:
        made.append(Agent(find if callable(find) else lambda: find, timing))
        return made[-1]

    yield make
    for agent in made:
        agent.end()
    failures = [r.message for r in caplog.get_records("call") if r.levelno >= logging.ERROR]
    assert len(failures) == ("a_bug_is_told" in request.node.name), failures


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + PATIENCE
    tick = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "did not come to pass"
        tick.wait(0.005)


def rebound(endpoint: str, secret: bytes | None = None) -> Collector:
    """A collector at an address that another one has just left."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(zmq.ZMQError):
            return Collector(endpoint, secret)
    raise AssertionError("the port does not become free")


def test_hello_welcome_data_ack(collector: Collector, agents: Callable[..., Agent]) -> None:
    """The agent says hello first, sends nothing before the welcome, and forgets what is acknowledged."""
    agent = agents(collector.endpoint)
    agent.put("a", "b")
    peer, hello = collector.expect(Hello)
    assert isinstance(hello, Hello)
    assert hello == dataclasses.replace(HELLO, next_seq=hello.next_seq)
    assert not isinstance((collector.receive(0.1) or (b"", None))[1], Data)
    collector.say(peer, Welcome("r1", 0, 30.0))
    collector.expect(Data, keep=True)
    assert collector.texts == ["a", "b"]
    assert agent.outbox.held_items == 2
    collector.say(peer, Ack(2))
    eventually(lambda: agent.outbox.held_items == 0)
    assert agent.sender.state is LinkState.JOINED


def test_a_put_wakes_the_sender(collector: Collector, agents: Callable[..., Agent]) -> None:
    """An item that is put while nothing happens leaves at once, not with the next beat."""
    agent = agents(collector.endpoint)
    collector.serve(lambda: len(collector.beats) == 1)
    start = time.monotonic()
    agent.put("a")
    collector.serve(lambda: bool(collector.journal))
    assert time.monotonic() - start < PATIENCE


def test_beats_carry_position_and_host(collector: Collector, agents: Callable[..., Agent]) -> None:
    """Beats come at the interval of the welcome, with position, held items and figures of the host."""
    agents(collector.endpoint)
    collector.welcome(beat_interval=0.1)
    start = time.monotonic()
    beats = [collector.expect(Beat)[1] for _ in range(5)]
    assert 0.2 < time.monotonic() - start < PATIENCE
    for beat in beats:
        assert isinstance(beat, Beat)
        assert (beat.step, beat.micro_step, beat.held) == (7, 3, 0)
        assert beat.host["process_rss_bytes"] > 0


def test_a_thousand_items_then_close_at_once(collector: Collector, agents: Callable[..., Agent]) -> None:
    """What was put last is not lost at close: all 1,000 items and the goodbye are there when close returns 0."""
    agent = agents(collector.endpoint)
    agent.put(*map(str, range(1_000)), size=3_000)
    agent.outbox.finish("end", 0.0)
    left: list[int] = []
    thread = threading.Thread(target=lambda: left.append(agent.sender.close(PATIENCE)))
    thread.start()
    collector.serve(lambda: not thread.is_alive())
    assert left == [0]
    assert collector.texts == [str(i) for i in range(1_000)]
    assert isinstance(collector.journal[-1], Goodbye)


def test_settling_waits_for_the_acknowledgements_and_no_longer(
    collector: Collector, agents: Callable[..., Agent]
) -> None:
    """All that was put is acknowledged when it returns, or the time is over; then the sender goes on."""
    agent = agents(collector.endpoint)
    agent.put("a", "b")
    agent.sender.settle(0.05)
    assert agent.outbox.held_items == 2
    thread = threading.Thread(target=agent.sender.settle, args=(PATIENCE,))
    thread.start()
    collector.serve(lambda: not thread.is_alive())
    assert agent.outbox.held_items == 0
    agent.put("c")
    collector.serve(lambda: agent.outbox.held_items == 0)
    assert collector.texts == ["a", "b", "c"]


@pytest.fixture
def patient(agents: Callable[..., Agent], collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Agent:
    """An agent that would not notice an acknowledgement by itself within a test."""
    monkeypatch.setattr(sender_module, "ACK_PATIENCE", 2 * PATIENCE)
    made: Agent = agents(collector.endpoint, NEVER)
    return made


def test_an_acknowledgement_wakes_nobody_while_data_flows(collector: Collector, patient: Agent) -> None:
    """It is seen with a later put. Who waits for it does not have to wait, nor has a collector that says more."""
    agent, peer = patient, collector.welcome()
    deadline = time.monotonic() + PATIENCE
    while agent.outbox.statistics().acked_seq == 0:
        assert time.monotonic() < deadline
        agent.put("a")
        collector.expect(Data, keep=True)
        collector.say(peer, Ack(len(collector.journal)))
    agent.sender.settle(PATIENCE)
    assert agent.outbox.held_items == 0
    collector.say(peer, Who())
    collector.expect(Hello)


def test_end_does_not_wait_for_a_late_look(collector: Collector, patient: Agent) -> None:
    """An acknowledgement that lies there when the agent is closed is seen at once."""
    agent, peer = patient, collector.welcome()
    agent.put("a")
    collector.expect(Data, keep=True)
    collector.say(peer, Ack(1))
    start = time.monotonic()
    assert agent.sender.close(PATIENCE) == 0
    assert time.monotonic() - start < PATIENCE


def test_restart_on_another_port(tmp_path: Path, agents: Callable[..., Agent]) -> None:
    """A collector that comes back elsewhere is found by its connection file; nothing is lost and nothing doubled.

    For a while the file is a stale one: that nobody listens there is noticed without a time-out.
    """
    path = tmp_path / CONNECTION_FILE
    path.parent.mkdir()
    finder = EndpointFinder(None, {}, tmp_path)
    asked: list[None] = []

    def find() -> str | None:
        asked.append(None)
        return finder()

    agent = agents(find, NEVER)
    first = Collector()
    fields = {"version": 1, "endpoint": first.endpoint, "run": "r1", "pid": 1, "host": sockets.gethostname()}
    path.write_text(json.dumps(fields))
    agent.put("a", "b")
    first.serve(lambda: agent.outbox.held_items == 0)
    agent.put("c")
    first.expect(Data, keep=True)  # taken into the journal, but killed before the acknowledgement
    agent.put("d")
    second = Collector()
    second.journal = list(first.journal)
    first.close()
    before = len(asked)
    eventually(lambda: len(asked) > before + 1)
    path.write_text(json.dumps({**fields, "endpoint": second.endpoint}))
    second.serve(lambda: agent.outbox.held_items == 0)
    assert second.texts == ["a", "b", "c", "d"]
    assert second.hellos[-1].run == "r1"
    second.close()


def test_restart_on_the_same_port(agents: Callable[..., Agent]) -> None:
    """A collector that comes back on its own port is greeted again, though nothing was in flight."""
    first = Collector()
    agent = agents(first.endpoint)
    agent.put("a")
    first.serve(lambda: agent.outbox.held_items == 0)
    first.close()
    second = rebound(first.endpoint)
    second.journal = list(first.journal)
    second.serve(lambda: bool(second.hellos))
    agent.put("b")
    second.serve(lambda: agent.outbox.held_items == 0)
    assert second.texts == ["a", "b"]
    second.close()


@pytest.mark.parametrize("key", [None, RunKey.fresh()], ids=["open", "encrypted"])
def test_a_connection_to_itself_is_let_go_at_once(
    agents: Callable[..., Agent], caplog: pytest.LogCaptureFixture, key: RunKey | None
) -> None:
    """Where nobody listens, a connection may be given the very port that it looks for; a collector wants that."""
    there = f"127.0.0.1:{free_port()}"
    alone = True
    # ZeroMQ's way to choose the source: what otherwise happens once in some ten thousand tries.
    agent = agents(lambda: Endpoint.of(f"tcp://{there};{there}" if alone else f"tcp://{there}", key), NEVER)
    agent.put("a")
    why = "nobody listens at" if key is None else "the handshake failed"
    eventually(lambda: any(why in r.message for r in caplog.records))
    alone = False
    collector = rebound(f"tcp://{there}", None if key is None else key.collector().secret)
    collector.serve(lambda: agent.outbox.held_items == 0)
    assert collector.texts == ["a"]
    collector.close()


def test_who_is_answered_by_hello(collector: Collector, agents: Callable[..., Agent]) -> None:
    """A collector that does not know the peer gets a hello, and the data again from where its journal ends."""
    agent = agents(collector.endpoint)
    peer = collector.welcome()
    agent.put("a", "b")
    collector.expect(Data)  # not kept: it did not know whose it was
    collector.say(peer, Who())
    collector.serve(lambda: agent.outbox.held_items == 0)
    assert collector.texts == ["a", "b"]


def test_a_silent_collector_is_greeted_again(collector: Collector, agents: Callable[..., Agent]) -> None:
    """Without an answer to the hello, and without acknowledgements, the agent begins again on a fresh socket."""
    agent = agents(collector.endpoint)
    agent.put("a")
    mute, _ = collector.expect(Hello)
    again = collector.welcome()
    assert again != mute
    collector.expect(Data)
    third = collector.welcome()
    assert third not in (mute, again)
    collector.serve(lambda: agent.outbox.held_items == 0)
    assert collector.texts == ["a"]


def test_refused_for_now(collector: Collector, agents: Callable[..., Agent], caplog: pytest.LogCaptureFixture) -> None:
    """A refusal that may pass is told once, and the data waits for the welcome."""
    agent = agents(collector.endpoint)
    agent.put("a")
    for _ in range(3):
        peer, _ = collector.expect(Hello)
        collector.say(peer, Refused("rank 1 is taken by a process that still lives", True))
    collector.serve(lambda: agent.outbox.held_items == 0)
    assert collector.texts == ["a"]
    assert len([r for r in caplog.records if "is taken" in r.message]) == 1


def test_refused_for_good(collector: Collector, agents: Callable[..., Agent], caplog: pytest.LogCaptureFixture) -> None:
    """A refusal for good is one warning; nothing is sent any more, the items stay counted, and close does not wait."""
    agent = agents(collector.endpoint)
    agent.put("a")
    peer, _ = collector.expect(Hello)
    collector.say(peer, Refused("another run", False))
    eventually(lambda: agent.sender.state is LinkState.OFF)
    agent.put("b")
    start = time.monotonic()
    assert agent.sender.close(PATIENCE) == 2
    assert time.monotonic() - start < PATIENCE
    assert [r.levelname for r in caplog.records if "another run" in r.message] == ["WARNING"]
    assert collector.receive(0.05) is None


@pytest.mark.parametrize(
    "raw", [b"", b"\x80\x04N.", encode_message(Ack(9)), b"\x92\x63\x01"], ids=["empty", "pickle", "ack", "version"]
)
def test_a_bad_collector_is_no_bug_of_ours(collector: Collector, agents: Callable[..., Agent], raw: bytes) -> None:
    """Bytes that are not the protocol, or acknowledge what does not exist, cost a reconnection and no data."""
    agent = agents(collector.endpoint)
    agent.put("a")
    peer = collector.welcome()
    collector.router.send_multipart([peer, raw])
    collector.expect(Hello)
    assert agent.outbox.held_items == 1
    collector.serve(lambda: agent.outbox.held_items == 0)
    assert collector.texts == ["a"]
    assert agent.sender.alive


def test_nobody_listens(agents: Callable[..., Agent], caplog: pytest.LogCaptureFixture) -> None:
    """Without a collector there is one warning that says where it looked, and close ends within its bound."""
    agent = agents(f"tcp://127.0.0.1:{free_port()}")
    agent.put("a")
    eventually(lambda: any("no collector" in r.message for r in caplog.records))
    start = time.monotonic()
    assert agent.sender.close(0.5) == 1
    assert 0.4 < time.monotonic() - start < PATIENCE
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "the test" in warnings[0].message
    assert warnings[0].name == "rankd.agent"
    assert agent.sender.close(5) == 1


@pytest.mark.parametrize("endpoint", [None, "tcp://127.0.0.1", "nonsense"])
def test_no_endpoint_or_an_impossible_one(agents: Callable[..., Agent], endpoint: str | None) -> None:
    """An endpoint that is missing or cannot be connected to is looked for again, and close is bounded."""
    asked: list[None] = []

    def find() -> str | None:
        asked.append(None)
        return endpoint

    agent = agents(find)
    eventually(lambda: len(asked) >= 3)
    assert agent.sender.alive
    agent.put("a")
    start = time.monotonic()
    assert agent.sender.close(0.1) == 1
    assert time.monotonic() - start < PATIENCE


def test_ipv6(agents: Callable[..., Agent]) -> None:
    """An IPv6 endpoint works."""
    if not sockets.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        collector = Collector("tcp://[::1]:*")
    except zmq.ZMQError:
        pytest.skip("no IPv6 loopback here")
    agent = agents(collector.endpoint)
    agent.put("a")
    collector.serve(lambda: agent.outbox.held_items == 0)
    assert "[::1]" in collector.endpoint
    assert collector.texts == ["a"]
    collector.close()


def test_a_bug_is_told_once_and_training_goes_on(
    agents: Callable[..., Agent], caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected exception in the thread is logged with its traceback; puts go on and close returns at once."""

    def find() -> str | None:
        raise RuntimeError("unexpected")

    agent = agents(find)
    eventually(lambda: not agent.sender.alive)
    agent.put("a")
    assert agent.sender.close(PATIENCE) == 1
    (record,) = (r for r in caplog.records if r.levelno >= logging.ERROR)
    assert "Traceback" in record.message
    assert "RuntimeError: unexpected" in record.message


def test_fork(collector: Collector, tmp_path: Path) -> None:
    """A forked child's agent does nothing and its close returns at once; the parent goes on, unharmed."""
    spool = Spool.create(tmp_path / "a.spool", 2**20, HELLO)
    outbox = Outbox(spool)
    sender = Sender(outbox, HELLO, lambda: collector.endpoint, where="the test", timing=FAST)
    sender.start()
    outbox.put((note("before"),))
    sender.wake()
    collector.serve(lambda: outbox.held_items == 0)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            start = time.monotonic()
            refused = not outbox.put((note("child"),), records=1)
            sender.wake()
            outbox.finish("child", 0.0)
            left = sender.close(PATIENCE)
            outbox.close()
            code = 0 if refused and left == 0 and not sender.alive and time.monotonic() - start < PATIENCE else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert spool.path.exists()
    outbox.put((note("after"),))
    sender.wake()
    outbox.finish("end", 0.0)
    collector.serve(lambda: outbox.held_items == 0)
    assert sender.close(PATIENCE) == 0
    outbox.close()
    assert collector.texts == ["before", "after"]
    assert not spool.path.exists()


SCRIPT = """
import os, sys
from rankd.agent.outbox import Outbox
from rankd.agent.store import MemoryStore
from rankd.agent.sender import Sender
from rankd.collector.protocol.wire import Hello, Note, encode_item

outbox = Outbox(MemoryStore(2**20))
hello = Hello(bytes(16), "", 0, 1, 1, "here", 1, 0.0)
sender = Sender(outbox, hello, lambda: sys.argv[1], where="the test")
sender.start()
outbox.put((encode_item(Note(0, 1, None, "test", "a", 0.0)),))
sender.wake()
if "fork" in sys.argv and os.fork() == 0:
    sys.exit(0)
if "close" in sys.argv:
    print(sender.close(0.5))
if "fork" in sys.argv:
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize("how", ["close", "exit", "fork"])
def test_process_exits_in_bounded_time(collector: Collector, how: str) -> None:
    """A process whose collector never answers ends soon, closed or not, and so does its forked child; no complaint."""
    command = [sys.executable, "-W", "error", "-c", SCRIPT, collector.endpoint, how]
    # What could hang hangs for ever; starting Python twice on a busy machine may take some seconds.
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == {"close": "1", "exit": "", "fork": "0"}[how]


def test_a_killed_rank_started_again_is_heard(collector: Collector, agents: Callable[..., Agent]) -> None:
    """After kill -9 of a rank, its successor is welcomed on a new connection at once."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, collector.endpoint, "close"], stdout=subprocess.DEVNULL
    ) as one:
        first = collector.welcome()
        one.send_signal(signal.SIGKILL)
        one.wait(10)
    agent = agents(collector.endpoint)
    agent.put("b")
    second = collector.welcome()
    assert second != first
    collector.serve(lambda: agent.outbox.held_items == 0)
    assert collector.texts == ["b"]


def test_never_started() -> None:
    """A sender that was never started closes at once and says what is left."""
    outbox = Outbox(MemoryStore(2**20))
    outbox.put((note("a"),))
    sender = Sender(outbox, HELLO, lambda: None, where="the test")
    assert sender.close(PATIENCE) == 1
    outbox.close()


def test_what_a_killed_process_left_is_delivered(collector: Collector, tmp_path: Path) -> None:
    """A recovered spool is delivered under the dead process's own session, and its file goes."""
    path = tmp_path / "a.spool"
    left = Spool.create(path, 2**20, HELLO)
    outbox = Outbox(left)
    for text in "abc":
        outbox.put((note(text),))
    left.close(delivered=False)
    spool = Spool.open(path)
    outbox = Outbox.recovered(spool, spool.entries, spool.next_seq)
    sender = Sender(outbox, spool.hello, lambda: collector.endpoint, where="the test", timing=FAST)
    sender.start()
    collector.serve(lambda: outbox.held_items == 0)
    assert sender.close(PATIENCE) == 0
    outbox.close()
    assert collector.texts == ["a", "b", "c"]
    assert (collector.hellos[0].session, collector.hellos[0].next_seq) == (HELLO.session, 4)
    assert not path.exists()


def test_few_wake_ups(collector: Collector, agents: Callable[..., Agent]) -> None:
    """Puts in quick succession travel together, and those without a collector wake nobody."""
    agent = agents(collector.endpoint)
    messages = 0
    collector.serve(lambda: bool(collector.beats))
    agent.put(*map(str, range(500)))
    deadline = time.monotonic() + PATIENCE
    while len(collector.journal) < 500 and time.monotonic() < deadline:
        got = collector.receive(0.1)
        if got is not None and isinstance(got[1], Data):
            messages += 1
            collector.store(got[1])
            collector.say(got[0], Ack(len(collector.journal)))
    assert len(collector.journal) == 500
    assert messages < 50


@pytest.mark.parametrize("right", [True, False])
def test_encrypted(caplog: pytest.LogCaptureFixture, right: bool) -> None:
    """With the collector's key data flows; with another one nothing is accepted, and the warning says why."""
    public, secret = zmq.curve_keypair()
    mine, my_secret = zmq.curve_keypair()
    believed = public if right else zmq.curve_keypair()[0]
    collector = Collector(secret=secret)

    def prepare(socket: DealerSocket) -> None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, believed)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, mine)
        socket.setsockopt(zmq.CURVE_SECRETKEY, my_secret)

    outbox = Outbox(MemoryStore(2**20))
    sender = Sender(outbox, HELLO, lambda: collector.endpoint, where="the test", timing=FAST, prepare=prepare)
    sender.start()
    outbox.put((note("a"),))
    sender.wake()
    if right:
        collector.serve(lambda: outbox.held_items == 0)
    else:
        eventually(lambda: any("no collector" in r.message for r in caplog.records))
    assert sender.close(0.1) == (0 if right else 1)
    assert collector.texts == (["a"] if right else [])
    outbox.close()
    collector.close()
