"""The collector's socket, and who may come through it.

Where other machines can reach it, or a key was given, only peers with the run's key are let in (CURVE, checked by
pyzmq's authenticator in a thread of its own). What one peer may cost is bounded here: the size of a message, how many
of them wait, how long a connection may stay without a hello, how often it may send nonsense. Whoever is turned away is
counted by reason.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket as sockets
import struct
import time
from collections import Counter

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from .binding import bind, spots
from .config import RankdConfig
from .connections import HELLO_WITHIN, Connection, Connections
from .protocol.checks import printable
from .protocol.keys import RunKey
from .protocol.wire import MAX_MESSAGE_BYTES

__all__ = ["Door"]

log = logging.getLogger("rankd.collector")

# Messages of one peer that wait to be taken; what is more stays with the peer.
_WAITING_MESSAGES = 64
# Messages for one peer that it does not read. What is more is dropped, and whatever must arrive is said again. A piece
# of the log has half a mebibyte, so a reader that stands still costs 32 MiB; agents have a few acknowledgements there.
_UNREAD_MESSAGES = 64
# A larger message is refused by name; from here on libzmq ends the connection without reading it.
_MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + 2**16
# MAX_RANKS and as many strangers are more than a process may have open; some descriptors are for the files.
_MOST_CONNECTIONS = 65_536
_DESCRIPTORS_KEPT = 64
# A peer on this machine can send a gigabyte a second; how often its connection is looked at bounds how far it gets.
# With many connections a look takes its time, and so many times that passes until the next.
_SWEEP_LEAST, _SWEEP_MOST = 0.05, 1.0
_SWEEP_SHARE = 50
# Warnings of each kind; what comes after is only counted.
_MOST_WARNINGS = 10
# struct tcp_info of Linux: tcpi_bytes_received.
_RECEIVED_AT, _TCP_INFO_BYTES = 128, 136

_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
# Of a failed handshake: another key, or none (ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC, …_MECHANISM_MISMATCH).
_ANOTHER_MECHANISM = 0x11000002
_WITHOUT_THE_KEY = (0x11000001, _ANOTHER_MECHANISM)
# Where no key is wanted: who reads with one finds out so that it is to come again without encryption. It leaves when it
# has seen that, often before this side has (EVENT_HANDSHAKE_FAILED_NO_DETAIL). Who stayed longer was something else.
_ENCRYPTED = "broken handshake"


class _Authenticator(ThreadAuthenticator):
    """Lets in who has the client's keys of this run."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], public: bytes) -> None:
        super().__init__(context, log=logging.getLogger("rankd.collector.zap"))
        self._public = public
        self.configure_curve_callback(credentials_provider=self)

    def callback(self, _domain: str, public: bytes) -> bool:
        """Called by pyzmq for each connection whose encryption has been agreed on."""
        return public == self._public


class Door:
    """The ROUTER socket, bound, with everything that guards it.

    Args:
        config: where to listen.
        key: the run's key.
        near, former: see `binding.spots`.
        always: want the key on loopback too.

    Attributes:
        endpoint: what the agents connect to.
        keyed: only who has the key comes in.
        refusals: who was turned away, by reason.

    Raises:
        RankdError: the endpoint cannot be used.
    """

    def __init__(
        self,
        config: RankdConfig,
        key: RunKey,
        *,
        near: str | None = None,
        former: str | None = None,
        always: bool = False,
    ) -> None:
        candidates = spots(config, near, former)
        self.refusals: Counter[str] = Counter()
        self.keyed = always or any(spot.exposed for spot in candidates)
        self._connections = Connections(_most_connections())
        # Peers whose connection has ended: first what they left is taken, then they are told as gone.
        self._leaving: dict[bytes, None] = {}
        self._gone: list[bytes] = []
        self._sweep_at = 0.0
        # Why the connection whose end is told next was turned away.
        self._failed = ""
        self._told_plain = False
        self._context = zmq.Context()
        self._authenticator: _Authenticator | None = None
        self._socket = self._make()
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            if self.keyed:
                self._guard(key)
            self.endpoint = bind(self._socket, candidates)
        except BaseException:
            self.close(0)
            raise
        if former not in (None, self.endpoint) and config.endpoint is None and config.listen is None:
            self._tell_moved(str(former))

    def _tell_moved(self, former: str) -> None:
        log.warning(
            "the collector of this run that was killed was at %s, where this one cannot listen; it is at %s: "
            "ranks with a fixed rankd.endpoint or RANKD_ENDPOINT look where it was, the others find this one "
            "by the output directory. Free that port, or say with --endpoint where to listen, and start again",
            printable(former, line=True),
            self.endpoint,
        )

    def _make(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.IPV6, 1),
            # Half-open connections (a node that vanished) end by the lifetime that the agents' heartbeats carry, or by
            # TCP's keepalive. No heartbeats from this side: one that is due on a connection which has
            # ended while its queue is full makes libzmq 4.3 abort the process (libzmq issues 3937, 4364 and 4767).
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 60),
            (zmq.TCP_KEEPALIVE_INTVL, 15),
            (zmq.TCP_KEEPALIVE_CNT, 4),
            (zmq.HANDSHAKE_IVL, int(HELLO_WITHIN * 1_000)),
            (zmq.MAXMSGSIZE, _MAX_FRAME_BYTES),
            (zmq.RCVHWM, _WAITING_MESSAGES),
            (zmq.SNDHWM, _UNREAD_MESSAGES),
        ):
            socket.setsockopt(option, value)
        return socket

    def _guard(self, key: RunKey) -> None:
        own = key.collector()
        self._authenticator = _Authenticator(self._context, key.agent().public)
        self._authenticator.start()
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)

    def close(self, linger_ms: int) -> None:
        """Let nobody in any more; what was said may still leave for so long."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    # -- messages -----------------------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> bool:
        """Until a message is there; False: none came."""
        ready = dict(self._poller.poll(int(seconds * 1_000)))
        self.tend()
        return self._socket in ready

    def tend(self) -> None:
        """See who came and went, and shut out who costs too much; also while no message is taken (disk full)."""
        now = time.monotonic()
        self._watch(now)
        if now >= self._sweep_at:
            self._sweep(now)
            took = time.monotonic() - now
            self._sweep_at = now + min(_SWEEP_MOST, max(_SWEEP_LEAST, _SWEEP_SHARE * took))

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """The next message and whose it is; None: there is none at the moment."""
        try:
            peer, *parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._gone += self._leaving
            self._leaving.clear()
            return None
        name, raws = peer.bytes, [part.bytes for part in parts]
        # A message has one part; of one that has many, the first few say as much as all.
        fd = peer.get(zmq.SRCFD)
        if name not in self._leaving:  # its connection is known as ended: what comes now is not another one
            address = "" if self._connections.knows(name) else _address(int(fd))
            earlier = self._connections.heard(int(fd), name, sum(map(len, raws)), time.monotonic(), address)
            if earlier is not None and earlier.peer is not None:
                self._leaving[earlier.peer] = None
        return name, raws

    def send(self, peer: bytes, raw: bytes) -> None:
        """Say something; a peer that has gone, or does not read, costs itself the message."""
        self._socket.send_multipart([peer, raw], zmq.NOBLOCK)

    # -- peers --------------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> int:
        """How many connections are known, of whomever."""
        return len(self._connections)

    def gone(self) -> list[bytes]:
        """Peers whose connection has ended, and of whom everything was received, since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def greet(self, peer: bytes) -> None:
        """Its hello was a proper one, so it is no stranger any more."""
        self._connections.greeted(peer)

    def may_open(self, peer: bytes) -> bool:
        """Whether this connection may bring one more process."""
        return self._connections.spoke_for_another(peer)

    def refuse(self, peer: bytes, reason: str, who: str, why: str) -> None:
        """Count and tell what was refused; a peer that goes on with it is shut out."""
        self.count(reason, f"{who}: {why}")
        if (offender := self._connections.offended(peer)) is not None:
            self._shut(offender)

    def count(self, reason: str, text: str) -> None:
        """One more was turned away; the first ones of a reason are told."""
        self.refusals[reason] += 1
        if self.refusals[reason] <= _MOST_WARNINGS:
            log.warning("refused (%s) %s", reason, printable(text, line=True))

    def address(self, peer: bytes) -> str:
        """Where a peer is, for messages."""
        return self._connections.address(peer)

    def is_local(self, peer: bytes) -> bool:
        """Whether a peer speaks from an address of this machine, to that same address."""
        fd = self._connections.fd(peer)
        if fd is None:
            return False
        try:
            with _borrowed(fd) as socket:
                return bool(socket.getpeername()[0] == socket.getsockname()[0])
        except (OSError, IndexError):
            return False

    # -- connections --------------------------------------------------------------------------------------------------

    def _watch(self, now: float) -> None:
        """What libzmq tells of connections; a failed handshake is followed by the end of the same connection."""
        while True:
            try:
                told = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            event, value = int(told["event"]), int(told["value"])
            if event == zmq.EVENT_ACCEPTED:
                self._connections.opened(value, _address(value), now)
            elif event == zmq.EVENT_DISCONNECTED:
                self._ended(value, now)
            elif not self.keyed and (value == _ANOTHER_MECHANISM or event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
                self._failed = _ENCRYPTED
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value in _WITHOUT_THE_KEY:
                self._failed = "without the key"
            else:
                self._failed = "broken handshake"

    def _ended(self, fd: int, now: float) -> None:
        gone = self._connections.ended(fd)
        failed, self._failed = self._failed, ""
        if gone is not None and gone.peer is not None:
            self._leaving[gone.peer] = None
        elif failed == _ENCRYPTED and gone is not None and now - gone.since < HELLO_WITHIN:
            if not self._told_plain:
                self._told_plain = True
                log.info(
                    "connections are not encrypted here; ranks that have RANKD_KEY need a collector that has it too"
                )
        elif failed or gone is not None:
            address = gone.address if gone is not None and gone.address else "an unknown address"
            self.count(failed or "no message", address)

    def _sweep(self, now: float) -> None:
        """Shut out who costs too much."""
        received = {c.fd: n for c in self._connections if c.address and (n := _received(c.fd)) is not None}
        for connection in self._connections.hoarders(received, now):
            self.count("endless message", connection.address)
            self._shut(connection)
        for connection in self._connections.due(now):
            if connection.peer is not None:
                self.count("no hello", connection.address)
            self._shut(connection)

    def _shut(self, connection: Connection) -> None:
        """End a connection: libzmq, who owns the descriptor, finds it at its end."""
        with contextlib.suppress(OSError), _borrowed(connection.fd) as socket:
            # The descriptor may be another connection's by now, or no connection's.
            if connection.address and _text(socket.getpeername()) == connection.address:
                socket.shutdown(sockets.SHUT_RDWR)
        if not connection.told:
            self._connections.closed(connection.fd)


def _most_connections() -> int:
    """As many as the process may have descriptors; the collector has asked the system for more before."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    usable = 2 * _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else soft
    # A quarter is for files: the logs of the ranks, the journal, spools.
    return max(16, min(_MOST_CONNECTIONS, usable * 3 // 4 - _DESCRIPTORS_KEPT))


def _borrowed(fd: int, family: int = -1) -> sockets.socket:
    """A socket of our own on libzmq's connection; closing it does not close that. `family` -1: it is asked for."""
    own = os.dup(fd)
    try:
        kind = (-1, -1, -1) if family < 0 else (family, sockets.SOCK_STREAM, 0)
        return sockets.socket(*kind, fileno=own)
    except OSError:
        os.close(own)
        raise


def _address(fd: int) -> str:
    try:
        with _borrowed(fd) as socket:
            return _text(socket.getpeername())
    except OSError:
        return ""


def _text(address: object) -> str:
    if not isinstance(address, tuple):
        return ""
    host, port = str(address[0]).removeprefix("::ffff:"), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _received(fd: int) -> int | None:
    """The bytes that the kernel has received on a connection."""
    try:
        # The family does not matter for this, and saves the questions that it is found out with.
        with _borrowed(fd, sockets.AF_INET) as socket:
            info = socket.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return None
    return int(struct.unpack_from("=Q", info, _RECEIVED_AT)[0]) if len(info) >= _TCP_INFO_BYTES else None
