"""A TCP proxy between agents and collector that cuts connections, or lets them fall silent."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress

_CHUNK = 65_536


class Proxy:
    """Forwards each connection to `port`; `endpoint` is its own.

    `cut` breaks all connections of the moment. `silence` makes them half-open: they stay, and nothing passes any more,
    in the named directions; later connections work.
    """

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()  # protects the pairs: the listener's thread adds, the test's looks
        self._pairs: list[_Pair] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def connections(self) -> int:
        """How many there have been."""
        with self._lock:
            return len(self._pairs)

    def cut(self) -> None:
        """Break all connections."""
        with self._lock:
            for pair in self._pairs:
                pair.close()

    def silence(self, *, to_collector: bool, to_agent: bool) -> None:
        """From now on nothing passes on the present connections, in these directions."""
        with self._lock:
            for pair in self._pairs:
                pair.silent = {pair.agent: to_collector, pair.collector: to_agent}

    def close(self) -> None:
        """End everything."""
        # Unlike close, this ends an accept that waits.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            for pair in self._pairs:
                pair.close()
                pair.thread.join()
                pair.agent.close()
                pair.collector.close()

    def _accept(self) -> None:
        while True:
            try:
                agent, _ = self._listener.accept()
            except OSError:
                return
            try:
                collector = socket.create_connection(self._target)
            except OSError:
                agent.close()
                continue
            with self._lock:
                self._pairs.append(_Pair(agent, collector))


class _Pair:
    """One connection: its two sockets, and a thread that moves bytes between them."""

    def __init__(self, agent: socket.socket, collector: socket.socket) -> None:
        self.agent, self.collector = agent, collector
        # By the socket that was read from: swallow what it says.
        self.silent = {agent: False, collector: False}
        self.thread = threading.Thread(target=self._move, daemon=True)
        self.thread.start()

    def close(self) -> None:
        for one in (self.agent, self.collector):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _move(self) -> None:
        with suppress(OSError):
            while True:
                for source in select.select([self.agent, self.collector], [], [])[0]:
                    data = source.recv(_CHUNK)
                    if not data:
                        self.close()
                        return
                    if not self.silent[source]:
                        (self.collector if source is self.agent else self.agent).sendall(data)
