"""Pure: the connections at the collector's door, and which of them have to be shut. Time is an argument.

A connection is known by its file descriptor. libzmq tells when one is accepted and when it has ended, and each message
carries the descriptor that it came from; so what a connection costs can be laid at its own door:

- *strangers*, who say no hello in time or have none to say (half-open connections, scanners, a slow trickle);
- *offenders*, who go on sending what is not the protocol;
- *hoarders*, who send bytes that never become a whole message. libzmq holds a message of many parts until the last one
  is there, and has no limit for that; what the kernel says was received, less what came out, is what it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["HELLO_WITHIN", "HOARD_BYTES", "MOST_OFFENCES", "MOST_SESSIONS", "Connection", "Connections"]

# An agent says hello at once. What is slower than this, on any network, is none.
HELLO_WITHIN = 20.0
# An agent that is refused for good says no more; one of another version may try again a few times.
MOST_OFFENCES = 10
# An agent is one process. Who delivers for those that are gone comes with one connection each, or a few.
MOST_SESSIONS = 16
# Four messages of the largest size; an agent has no more than its window of 1 MiB, or one message, on the way.
HOARD_BYTES = 64 * 2**20
# What travels beside the messages: heartbeats, frame headers, encryption.
_BESIDE_BYTES_PER_SECOND = 1_024.0
_BESIDE_BYTES_PER_MESSAGE = 128


@dataclass(slots=True)
class Connection:
    """One connection.

    Attributes:
        address: where from; empty: not known.
        told: libzmq has told of its begin, so an end that is told is its own.
        since: when it was accepted.
        peer: ZeroMQ's name for it; None: no message came.
        greeted: its hello was answered with a welcome, or it was told to wait.
        offences: messages that were refused.
        sessions: processes that it has spoken for.
        taken: bytes of its messages since the last measurement.
        measured: when `received`, what the kernel has taken in all, was last looked at.
        hoard: bytes that came and are no message yet.
    """

    fd: int
    address: str
    since: float
    told: bool = False
    peer: bytes | None = None
    greeted: bool = False
    offences: int = 0
    sessions: int = 0
    taken: int = 0
    received: int = 0
    measured: float = 0.0
    hoard: float = 0.0


class Connections:
    """All connections.

    Args:
        most: how many there may be; beyond that the oldest strangers are shut.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_fd: dict[int, Connection] = {}
        self._by_peer: dict[bytes, Connection] = {}

    def __len__(self) -> int:
        return len(self._by_fd)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._by_fd.values()))

    def opened(self, fd: int, address: str, now: float) -> None:
        """A connection was accepted; its first message may have been seen before."""
        known = self._by_fd.get(fd)
        if known is not None and not known.told:
            known.address, known.told = address or known.address, True
            return
        self.closed(fd)
        self._by_fd[fd] = Connection(fd, address, now, told=True, measured=now)

    def ended(self, fd: int) -> Connection | None:
        """The end of a connection is told; None: it is that of an earlier one, whose descriptor has another by now."""
        known = self._by_fd.get(fd)
        return None if known is not None and not known.told else self.closed(fd)

    def closed(self, fd: int) -> Connection | None:
        """A connection has ended; None: it was not known."""
        gone = self._by_fd.pop(fd, None)
        if gone is not None and gone.peer is not None and self._by_peer.get(gone.peer) is gone:
            del self._by_peer[gone.peer]
        return gone

    def knows(self, peer: bytes) -> bool:
        """Whether a message of this peer came before."""
        return peer in self._by_peer

    def heard(self, fd: int, peer: bytes, size: int, now: float, address: str = "") -> Connection | None:
        """A whole message came; `address`: where from, for a peer that is not known.

        Messages overtake what is told of connections: the descriptor may be that of an earlier one, which has ended.

        Returns:
            That earlier connection.
        """
        known, earlier = self._by_fd.get(fd), None
        if known is not None and (known.peer not in (None, peer) or _elsewhere(known, address)):
            known, earlier = None, self.closed(fd)
        if known is None:
            known = self._by_fd[fd] = Connection(fd, address, now, measured=now)
        if known.peer is None:
            known.peer = peer
            self._by_peer[peer] = known
        known.taken += size + _BESIDE_BYTES_PER_MESSAGE
        return earlier

    def greeted(self, peer: bytes) -> None:
        """Its hello was one."""
        if (known := self._by_peer.get(peer)) is not None:
            known.greeted = True

    def spoke_for_another(self, peer: bytes) -> bool:
        """It opens one more session; False: it has opened too many."""
        known = self._by_peer.get(peer)
        if known is None:
            return True
        known.sessions += 1
        return known.sessions <= MOST_SESSIONS

    def offended(self, peer: bytes) -> Connection | None:
        """A message of its was refused; the connection where that was once too often."""
        known = self._by_peer.get(peer)
        if known is None:
            return None
        known.offences += 1
        return known if known.offences >= MOST_OFFENCES else None

    def fd(self, peer: bytes) -> int | None:
        """The descriptor of a peer's connection; None: it is not known."""
        known = self._by_peer.get(peer)
        return None if known is None else known.fd

    def address(self, peer: bytes) -> str:
        """Where a peer is, for messages."""
        known = self._by_peer.get(peer)
        return known.address if known is not None and known.address else "an unknown address"

    def due(self, now: float) -> list[Connection]:
        """Strangers whose time is over, and the oldest of the others where there are too many connections."""
        strangers = sorted((c for c in self._by_fd.values() if not c.greeted), key=lambda c: c.since)
        late = [c for c in strangers if now - c.since >= HELLO_WITHIN]
        too_many = len(self._by_fd) - self._most
        return strangers[: max(len(late), too_many)]

    def hoarders(self, received: Mapping[int, int], now: float) -> list[Connection]:
        """Who holds too much back; `received`: the bytes that each descriptor has taken in since it was opened."""
        found = []
        for fd, total in received.items():
            known = self._by_fd.get(fd)
            if known is None:
                continue
            beside = _BESIDE_BYTES_PER_SECOND * (now - known.measured)
            known.hoard = max(0.0, known.hoard + (total - known.received) - known.taken - beside)
            known.received, known.taken, known.measured = total, 0, now
            if known.hoard > HOARD_BYTES:
                found.append(known)
        return found


def _elsewhere(known: Connection, address: str) -> bool:
    """A first message comes from another address than the connection that has this descriptor, as far as is known."""
    return known.peer is None and bool(address and known.address) and known.address != address
