"""The one thread that speaks with the collector, and the one owner of the socket.

`link` decides; this carries out: socket, clock, logging. What is sent comes from the `outbox`.

The training thread's part is `wake` after an accepted put: one look at a flag, and one write into a pipe if the sender
is asleep. Each time the sender wakes it takes the interpreter lock, so it wakes seldom: what is put within SEND_SPACING
of a sending goes together, and an acknowledgement is looked for at the next put, or after ACK_PATIENCE.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from ..collector.protocol.checks import printable
from ..collector.protocol.errors import ProtocolError
from ..collector.protocol.wire import (
    MAX_MESSAGE_BYTES,
    Beat,
    Command,
    Data,
    Hello,
    Report,
    decode_message,
    encode_message,
)
from ..collector.protocol.wording import counted
from .discovery import Endpoint
from .host import HostFigures
from .link import (
    Acknowledged,
    Action,
    Link,
    LinkState,
    Obey,
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
from .outbox import Outbox

__all__ = ["SEND_SPACING", "DealerSocket", "Sender"]

DealerSocket: TypeAlias = "zmq.Socket[bytes]"

log = logging.getLogger("rankd.agent")

# Between two times that new items are sent, in seconds.
SEND_SPACING = 0.01
# After a sending: for so long an acknowledgement need not be noticed, in seconds.
ACK_PATIENCE = 0.25
# After the deadline of `close`: what the thread may need to notice it and to close the socket.
_CLOSE_MARGIN = 1.0
# A connection that is half open (the peer's host is gone) is noticed by libzmq's own thread within this, in ms.
_HEARTBEAT_INTERVAL, _HEARTBEAT_TIMEOUT = 3_000, 10_000
# libzmq's own next try to connect, in ms. It never comes to that: the link looks for the endpoint again before, as a
# collector that was restarted may listen elsewhere.
_RECONNECT = 10_000
# Between two looks of somebody who waits for acknowledgements.
_SETTLE_PAUSE = 0.005
# Nothing is ever due (refused for good): still a number that poll takes, in seconds.
_LONGEST_SLEEP = 3_600.0
# They are small and rare; a collector that is not there gets the newest.
_MOST_REPORTS = 256
# Taken off the socket before time and outbox are looked at again.
_MOST_RECEIVED_AT_ONCE = 1_000

_LOUDNESS = {Warn: logging.WARNING, Tell: logging.INFO}

_BROKEN = {
    int(zmq.EVENT_CONNECT_RETRIED): "no connection to it comes about",
    int(zmq.EVENT_DISCONNECTED): "the connection broke",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the handshake failed",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the handshake failed: another key, or no rankd collector",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "the handshake failed: this run's key was refused",
}

_senders: weakref.WeakSet[Sender] = weakref.WeakSet()


class _Waker:
    """A pipe that ends another thread's poll."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)

    def wake(self) -> None:
        # Full: it is awake anyway.
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_fd, b"\0")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4_096)

    # Not closed before nobody can call `wake` any more: the number of a closed descriptor may be another file's.
    def __del__(self) -> None:
        os.close(self.fd)
        os.close(self._write_fd)


class _Channel:
    """The DEALER socket, a fresh one for each connection that is begun, and news of its connection."""

    def __init__(self, waker: _Waker, prepare: Callable[[DealerSocket], None] | None) -> None:
        self._context = zmq.Context()
        self._waker = waker
        self._prepare = prepare
        self._socket: DealerSocket | None = None
        self._monitor: DealerSocket | None = None
        self._poller = zmq.Poller()
        self._poller.register(waker.fd, zmq.POLLIN)
        self._doorbell = zmq.Poller()
        self._doorbell.register(waker.fd, zmq.POLLIN)
        # What the last `wait` found something on; looking at the others would cost an exception each.
        self._ready: dict[object, int] = {}

    def open(self, endpoint: str) -> None:
        """Connect to `endpoint`; raises zmq.ZMQError where that is none."""
        self.shut()
        self._socket = socket = self._context.socket(zmq.DEALER)
        # No identity: the collector's ROUTER gives each connection a new one, so a restarted peer is never mute.
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, 1),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_INTERVAL),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT),
            (zmq.HEARTBEAT_TTL, _HEARTBEAT_TIMEOUT),
            (zmq.RECONNECT_IVL, _RECONNECT),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            # A full receive queue and heartbeats can make libzmq 4.3 abort the process (libzmq issues 3937, 4767); what
            # a collector says is small, and bounded by what it is asked.
            (zmq.RCVHWM, 0),
        ):
            socket.setsockopt(option, value)
        if isinstance(endpoint, Endpoint) and endpoint.key is not None:
            endpoint.key.protect(socket)
        if self._prepare is not None:
            self._prepare(socket)
        self._monitor = socket.get_monitor_socket(sum(_BROKEN))
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        socket.connect(endpoint)

    def shut(self) -> None:
        socket, monitor = self._socket, self._monitor
        self._socket = self._monitor = None
        if socket is None:
            return
        if monitor is not None:
            self._poller.unregister(monitor)
            self._poller.unregister(socket)
            socket.disable_monitor()
            monitor.close(linger=0)
        socket.close(linger=0)

    def close(self) -> None:
        self.shut()
        self._context.term()

    def send(self, raw: bytes) -> bool:
        """False: the socket takes no more; its connection has not moved for long."""
        if self._socket is None:
            return False
        try:
            self._socket.send(raw, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def wait(self, seconds: float, *, for_peer: bool = True) -> None:
        """Until something comes, or for so long; not `for_peer`: what the peer says ends it no sooner."""
        milliseconds = int(min(max(seconds, 0.0), _LONGEST_SLEEP) * 1_000 + 0.999)
        if not for_peer:
            self._doorbell.poll(milliseconds)
            milliseconds = 0
        self._ready = dict(self._poller.poll(milliseconds))
        if self._waker.fd in self._ready:
            self._waker.drain()

    def received(self) -> Iterator[bytes]:
        for _ in range(_MOST_RECEIVED_AT_ONCE):
            if self._socket is None or self._socket not in self._ready:
                return
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            yield parts[0] if len(parts) == 1 else b""

    def broken(self) -> str | None:
        """Why the connection broke since the last call, if it did."""
        why = None
        while self._monitor is not None and self._monitor in self._ready:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                break
            # The first says why; what follows is its consequence.
            why = why or _BROKEN.get(int(event["event"]))
        return why


class Sender:
    """Delivers an outbox to the collector, in a daemon thread of its own, until `close`.

    Args:
        outbox: what to deliver. This thread alone takes from it.
        hello: who this process is; `next_seq` and, once a run was joined, `run` are filled in.
        find_endpoint: where the collector is; None: not known at the moment. Called again whenever the collector is
            silent, on the sender's thread.
        where: what `find_endpoint` looks at, for messages.
        position: the (step, micro_step) that training is at, for the beats; any thread may call it.
        obey: does what a command says, on the sender's thread; what it returns is told to the collector.
        timing: how long is long.
        prepare: called with each fresh socket before it connects (sets CURVE keys).

    In the child of a fork every sender is inert, and so is its outbox; nothing needs to be called for that.
    """

    def __init__(
        self,
        outbox: Outbox,
        hello: Hello,
        find_endpoint: Callable[[], str | None],
        *,
        where: str,
        position: Callable[[], tuple[int, int]] = lambda: (0, 0),
        obey: Callable[[Command], Sequence[Report]] = lambda _: (),
        timing: Timing | None = None,
        prepare: Callable[[DealerSocket], None] | None = None,
    ) -> None:
        self._outbox = outbox
        self._hello = hello
        self._find_endpoint = find_endpoint
        self._position = position
        self._obey = obey
        # What else to tell the collector; said in this order as soon as there is one.
        self._reports: deque[Report] = deque(maxlen=_MOST_REPORTS)
        self._host = HostFigures()
        self._link = Link(time.monotonic(), where, timing)
        self._waker = _Waker()
        self._channel = _Channel(self._waker, prepare)
        # The run that is expected at the endpoint, for a process that has not joined one yet.
        self._expected = ""
        self._send_again_at = 0.0
        # When acknowledgements are to be looked for, though nothing is put.
        self._look_at = 0.0
        self._settling = False
        # Written by the sender thread before it sleeps and by whoever wakes it. Both sides write first and look then
        # (the sender at the outbox, the training thread at this), so no item is left behind.
        self._asleep = False
        # When the sender has to end, delivered or not; None: not asked to. Set once, by `close`.
        self._deadline: float | None = None
        self._inert = False
        self._thread = threading.Thread(target=self._guarded, name="rankd-sender", daemon=True)
        _senders.add(self)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def state(self) -> LinkState:
        """Where the agent stands with its collector at the moment."""
        return self._link.state

    @property
    def alive(self) -> bool:
        """The thread runs."""
        return not self._inert and self._thread.is_alive()

    def wake(self) -> None:
        """Something was put into the outbox; costs nothing unless the sender sleeps."""
        if self._asleep and not self._inert:
            self._asleep = False
            self._waker.wake()

    def report(self, report: Report) -> None:
        """Have something told to the collector, from any thread; it may get lost with the connection."""
        self._reports.append(report)
        self.wake()

    def settle(self, timeout: float) -> None:
        """Wait until all that was put so far is acknowledged, at most `timeout` seconds; then go on as before."""
        deadline = time.monotonic() + timeout
        self._settling = True
        self.wake()
        try:
            while self._outbox.held_items and self.alive and self.state is not LinkState.OFF:
                if time.monotonic() >= deadline:
                    return
                time.sleep(_SETTLE_PAUSE)
        finally:
            self._settling = False

    def close(self, timeout: float) -> int:
        """End: wait until everything is acknowledged, at most `timeout` seconds (and a constant second).

        Call `Outbox.finish` before, so that the collector learns that this rank has ended, and `Outbox.close` after.

        Returns:
            How many items were left.
        """
        if self._inert:
            return 0
        if self._deadline is None:
            self._deadline = time.monotonic() + timeout
        self._waker.wake()
        if self._thread.ident is None:
            self._channel.close()
        else:
            self._thread.join(timeout + _CLOSE_MARGIN)
        return self._outbox.held_items

    def forked(self) -> None:
        """This is the child of a fork: do nothing from now on. Called by itself; sockets and files are the parent's."""
        self._inert = True
        self._outbox.abandon()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _guarded(self) -> None:
        try:
            try:
                self._run()
            finally:
                self._asleep = False
                self._channel.close()
        except Exception:  # noqa: BLE001 - whatever it is, training goes on, and somebody is told
            log.error(
                "the sender has failed and sends nothing more; training goes on. Please report this:\n%s",
                traceback.format_exc(),
            )

    def _run(self) -> None:
        while True:
            now = time.monotonic()
            self._perform(self._link.tick(now, self._outbox.has_in_flight))
            self._send_data(now)
            if self._is_over(now):
                return
            self._sleep(now)
            self._listen()

    @property
    def _is_waited_for(self) -> bool:
        return self._settling or self._deadline is not None

    def _is_over(self, now: float) -> bool:
        if self._deadline is None:
            return False
        return not self._outbox.held_items or now >= self._deadline or self._link.state is LinkState.OFF

    def _send_data(self, now: float) -> None:
        if now < self._send_again_at and self._deadline is None:
            return
        # Before the data: the last of that is the goodbye, after which a collector may end.
        while self._reports and self._link.may_send:
            self._say(encode_message(self._reports.popleft()))
        while self._link.may_send and (items := self._outbox.take()):
            self._send_again_at, self._look_at = now + SEND_SPACING, now + ACK_PATIENCE
            self._say(encode_message(Data(items)))

    def _sleep(self, now: float) -> None:
        until, for_peer = self._link.next_at(), True
        if self._deadline is not None:
            until = min(until, self._deadline)
        elif (self._outbox.has_unsent or self._reports) and now < self._send_again_at:
            # Awake for the training thread: it need not ring.
            self._channel.wait(min(until, self._send_again_at) - now)
            return
        if self._link.may_send:
            self._asleep = True
            if self._outbox.has_unsent or self._reports:
                # Put just now, or it waits for an acknowledgement; more of it need not ring.
                self._asleep = False
                until = now if self._outbox.has_sendable or self._reports else until
            elif self._outbox.has_in_flight and now < self._look_at and not self._is_waited_for:
                until, for_peer = min(until, self._look_at), False
        self._channel.wait(until - now, for_peer=for_peer)
        self._asleep = False

    def _listen(self) -> None:
        for raw in self._channel.received():
            now = time.monotonic()
            try:
                self._perform(self._link.received(decode_message(raw), now))
            except ProtocolError as e:
                self._perform(self._link.lost(str(e), now))
        if (why := self._channel.broken()) is not None:
            self._perform(self._link.lost(why, time.monotonic()))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Seek():
                    self._perform(self._link.found(self._find_endpoint(), time.monotonic()))
                case Open():
                    self._open(action.endpoint)
                case Shut():
                    self._channel.shut()
                case SayHello():
                    self._say(encode_message(self._greeting(action.run)))
                case SayBeat():
                    self._say(encode_message(self._beat()))
                case Rewind():
                    self._outbox.joined(action.run)
                    self._rewind(action.acked)
                case Acknowledged():
                    self._outbox.acked(action.seq)
                case Obey():
                    self._reports.extend(self._obey(action.command))
                case _:
                    # What a collector says stands in it.
                    log.log(_LOUDNESS[type(action)], "%s", printable(action.text, line=True))

    def _rewind(self, acked: int) -> None:
        if lost := self._outbox.rewind(acked):
            log.warning(
                "the collector has lost %s of rank %d that it had acknowledged (has its node lost power?): what "
                "was in there is missing in the logs, and a line there says so; all later ones are recorded",
                counted(lost, "item"),
                self._hello.rank,
            )

    def _greeting(self, joined: str | None) -> Hello:
        run = (self._hello.run or self._expected) if joined is None else joined
        return dataclasses.replace(self._hello, run=run, next_seq=self._outbox.next_seq)

    def _beat(self) -> Beat:
        return Beat(*self._position(), self._outbox.held_items, self._host.latest())

    def _open(self, endpoint: str) -> None:
        self._expected = endpoint.run if isinstance(endpoint, Endpoint) else ""
        try:
            self._channel.open(endpoint)
        except zmq.ZMQError as e:
            self._perform(self._link.lost(f"cannot connect to {endpoint}: {e}", time.monotonic()))

    def _say(self, raw: bytes) -> None:
        if not self._channel.send(raw):
            self._perform(self._link.lost("the connection takes no more", time.monotonic()))


def _forked() -> None:
    for sender in list(_senders):
        sender.forked()


os.register_at_fork(after_in_child=_forked)
