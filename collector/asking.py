"""Ask a running collector: what command lines say to it, and how they find it."""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from .place import holder
from .protocol.checks import shown
from .protocol.connection import CONNECTION_FILE, key_in, key_of, read_connection
from .protocol.endpoints import is_loopback_endpoint, split_endpoint
from .protocol.errors import ProtocolError, RankdError
from .protocol.jsontext import parsed
from .protocol.keys import KEY_VARIABLE, RunKey
from .protocol.messages import MAX_ANSWER_BYTES, Answer, Ask, Facts
from .protocol.wire import decode_message, encode_message

__all__ = ["Asker", "add_arguments", "ask", "asker_of", "is_remote"]

# A collector whose disk is full answers when there is room again.
_PATIENCE = 15.0
_AGAIN = 2.0
# Between two looks at how far ranks are with something.
_LOOK_EVERY = 0.1
# For both sides to agree on an encryption, within one machine.
_PROBE = 3.0
_SHAKEN = zmq.EVENT_HANDSHAKE_SUCCEEDED
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED


def ask(output: Path, kind: str, facts: Facts | None = None, *, patience: float = _PATIENCE) -> dict[str, Any]:
    """One question to the collector of an output directory; its answer, a JSON object.

    Raises:
        RankdError: nobody collects there, or it cannot be done; says why.
    """
    with Asker.of(output, patience=patience) as asker:
        return asker.ask(kind, facts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where the collector is: `output` or `--from`."""
    parser.add_argument("output", type=Path, nargs="?", help="the run's output directory; or else --from")
    parser.add_argument(
        "--from",
        dest="endpoint",
        metavar="HOST:PORT",
        help=f"the collector's address, where the directory is not seen; the run's key in {KEY_VARIABLE}",
    )


def is_remote(args: argparse.Namespace) -> bool:
    """Whether `--from` was given. Raises RankdError where neither or both were."""
    if (args.output is None) == (args.endpoint is None):
        raise RankdError("give the run's output directory, or --from HOST:PORT")
    return args.endpoint is not None


def asker_of(args: argparse.Namespace) -> AbstractContextManager[Asker]:
    """To the collector that these arguments name. Raises RankdError as `Asker.of` and `Asker.at` do."""
    return Asker.at(args.endpoint) if is_remote(args) else Asker.of(args.output)


class Asker:
    """A connection to a collector, for questions one after the other.

    Args:
        endpoint: where it listens.
        key: the run's key.
        keyed: connections there are encrypted; None: that is found out.
        where: for messages.
        patience: seconds to wait for an answer.
    """

    def __init__(
        self, endpoint: str, key: RunKey, *, keyed: bool | None, where: str, patience: float = _PATIENCE
    ) -> None:
        self._key, self._where, self._patience = key, where, patience
        self._number = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        try:
            if keyed is not None:
                self._connect(endpoint, keyed=keyed)
            elif not self._agreed(endpoint):
                self._socket.close()
                self._socket = self._context.socket(zmq.DEALER)
                self._connect(endpoint, keyed=False)
        except zmq.ZMQError as e:
            self.close()
            raise RankdError(f"cannot connect to {endpoint}: {e}") from None

    @classmethod
    @contextmanager
    def of(cls, output: Path, *, patience: float = _PATIENCE) -> Iterator[Asker]:
        """To the collector of an output directory.

        Raises:
            RankdError: nobody collects there, or the key is not to be had.
        """
        connection = read_connection(output / CONNECTION_FILE)
        if connection is None:
            raise RankdError(
                f"no collector runs for {output}: it has no {CONNECTION_FILE}; is it the run's output directory, and "
                "does training still run?"
            )
        if holder(output) is None:
            raise RankdError(
                f"the collector of {output} is gone; `rankd collect {shlex.quote(str(output))}` starts it again"
            )
        key = RunKey.from_environment(os.environ) or key_of(connection) or key_in(output)
        if key is None:
            raise RankdError(f"the run's key cannot be read in {output}: set {KEY_VARIABLE}, or be who runs the job")
        asker = cls(connection.endpoint, key, keyed=connection.key is not None, where=str(output), patience=patience)
        try:
            yield asker
        finally:
            asker.close()

    @classmethod
    @contextmanager
    def at(cls, endpoint: str, *, patience: float = _PATIENCE) -> Iterator[Asker]:
        """To the collector that listens at `HOST:PORT` (or `tcp://HOST:PORT`); the key is in RANKD_KEY.

        Raises:
            RankdError: that is no address, or there is no key.
        """
        whole = endpoint if "://" in endpoint else f"tcp://{endpoint}"
        if not (split_endpoint(whole) or ("", "*"))[1].isdigit():
            raise RankdError(f"{endpoint} is no address of a collector; write HOST:PORT (IPv6: [ADDRESS]:PORT)")
        key = RunKey.from_environment(os.environ)
        if key is None:
            raise RankdError(
                f"set {KEY_VARIABLE} to the run's key: .rankd/key in the output directory, on the collector's machine"
            )
        # On loopback they are encrypted only where RANKD_KEY was set for the collector.
        keyed = None if is_loopback_endpoint(whole) else True
        asker = cls(whole, key, keyed=keyed, where=endpoint, patience=patience)
        try:
            yield asker
        finally:
            asker.close()

    def ask(self, kind: str, facts: Facts | None = None) -> dict[str, Any]:
        """One question; the answer's JSON object. Raises RankdError as `raw` does."""
        try:
            found = parsed(self.raw(kind, facts))
        except ValueError as e:
            raise RankdError(f"{self._where}: not an answer of this version: {e}") from None
        if not isinstance(found, dict):
            raise RankdError(f"{self._where}: not an answer of this version: {shown(found)}")
        return found

    def while_waiting(self, answer: dict[str, Any], kind: str, seconds: float) -> dict[str, Any]:
        """Ask again with `kind` while somebody is `waiting` in the answer, at most so many seconds; the last answer."""
        deadline = time.monotonic() + seconds
        while answer["waiting"] and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY)
            answer = self.ask(kind)
        return answer

    def raw(self, kind: str, facts: Mapping[str, Any] | None = None, *, again: bool = False) -> bytes:
        """One question; the answer as it came.

        Args:
            again: the question may be asked more than once, and is, when no answer comes: a collector that was killed
                and started again has forgotten it.

        Raises:
            RankdError: no answer came, or it cannot be done.
        """
        self._number += 1
        answer = self._answer(encode_message(Ask.proved(self._key, self._number, kind, facts or {})), again=again)
        if not answer.fine:
            raise RankdError(answer.content.decode(errors="replace"))
        return answer.content

    def close(self) -> None:
        """Let go of the connection."""
        self._socket.close()
        self._context.term()

    def _connect(self, endpoint: str, *, keyed: bool) -> None:
        for option, value in ((zmq.LINGER, 0), (zmq.IPV6, 1), (zmq.MAXMSGSIZE, MAX_ANSWER_BYTES + 2**16)):
            self._socket.setsockopt(option, value)
        if keyed:
            self._key.protect(self._socket)
        self._socket.connect(endpoint)

    def _agreed(self, endpoint: str) -> bool:
        """Connect encrypted; False: the other side does not encrypt. This connection is kept where it does: one that
        ended without a word would count as turned away there.
        """
        with self._socket.get_monitor_socket(_SHAKEN | _REFUSED) as monitor:
            self._connect(endpoint, keyed=True)
            told = monitor.poll(int(_PROBE * 1_000)) and parse_monitor_message(monitor.recv_multipart())
            # Before anything else: from now on nobody reads there.
            self._socket.disable_monitor()
        return not told or bool(told["event"] & _SHAKEN)

    def _answer(self, question: bytes, *, again: bool) -> Answer:
        deadline = time.monotonic() + self._patience
        self._socket.send(question)
        while (left := deadline - time.monotonic()) > 0:
            if not self._socket.poll(int(min(left, _AGAIN if again else left) * 1_000) + 1):
                if again:
                    self._socket.send(question)
                continue
            try:
                message = decode_message(self._socket.recv())
            except ProtocolError as e:
                raise RankdError(f"{self._where}: {e}") from None
            if isinstance(message, Answer) and message.number == self._number:
                return message
        raise RankdError(
            f"the collector of {self._where} did not answer within {self._patience:g} s: it has gone, its disk is "
            "full, or its key is another one"
        )
