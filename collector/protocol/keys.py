"""The run's key: one secret, from which both sides of the encrypted connection (CURVE) are derived.

Whoever has the secret is a member of the run: an agent, the collector, a command. The two key pairs differ in their
purpose only: agents prove with the one, and the collector with the other, that they have the secret.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import msgpack
import zmq
from zmq.utils import z85

from .errors import ConfigError
from .wording import counted

__all__ = ["KEY_VARIABLE", "KeyPair", "RunKey"]

KEY_VARIABLE = "RANKD_KEY"
# The secret is not stretched, and a recorded connection lets one try guesses: only a random one is worth anything.
_LEAST_CHARACTERS, _MOST_CHARACTERS = 32, 1_024
_FRESH_BYTES = 32
# BLAKE2b's `person`, at most 16 bytes each.
_COLLECTOR, _AGENT, _PROOF = b"rankd collector", b"rankd agent", b"rankd proof"
_PROOF_BYTES = 32


@dataclass(frozen=True, slots=True, repr=False)
class KeyPair:
    """One side's CURVE keys, in the text form (Z85) that ZeroMQ takes."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public.decode()!r}, secret=…)"


class RunKey:
    """The key of one run.

    Args:
        secret: printable text without blanks, 32 to 1,024 characters of ASCII, best from a random generator.
        source: where it comes from, for messages.

    Raises:
        ConfigError: not such a text. It is not quoted.
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: str, source: str = KEY_VARIABLE) -> None:
        fits = _LEAST_CHARACTERS <= len(secret) <= _MOST_CHARACTERS
        if not (fits and secret.isascii() and secret.isprintable() and " " not in secret):
            raise ConfigError(
                f"{source}: a key is {_LEAST_CHARACTERS} to {_MOST_CHARACTERS} printable ASCII characters without "
                f"blanks, this has {counted(len(secret), 'character')}; `openssl rand -hex 32` makes one"
            )
        self._secret = secret

    @classmethod
    def fresh(cls) -> RunKey:
        """A new random key."""
        return cls(secrets.token_hex(_FRESH_BYTES))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> RunKey | None:
        """The key in RANKD_KEY; None where that is not set, or empty.

        Raises:
            ConfigError: what is there cannot be a key.
        """
        text = environ.get(KEY_VARIABLE, "").strip()
        return cls(text) if text else None

    def reveal(self) -> str:
        """The secret itself, for a file of mode 0600; for nothing else."""
        return self._secret

    def collector(self) -> KeyPair:
        """The keys that the collector listens with."""
        return self._pair(_COLLECTOR)

    def agent(self) -> KeyPair:
        """The keys that agents and commands connect with."""
        return self._pair(_AGENT)

    def proof(self, *said: object) -> bytes:
        """Shows who has this key too that whoever has said this has it.

        Args:
            said: numbers, text, bytes, None, and lists of them.
        """
        secret = hashlib.blake2b(self._secret.encode(), digest_size=64, person=_PROOF).digest()
        return hashlib.blake2b(msgpack.packb(said), digest_size=_PROOF_BYTES, key=secret).digest()

    def proves(self, proof: bytes, *said: object) -> bool:
        """Whether `proof` is that for what was `said`."""
        return secrets.compare_digest(proof, self.proof(*said))

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket that will connect to the collector prove that it has this key, and want the same of it."""
        own = self.agent()
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.collector().public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunKey) and secrets.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self._secret)

    def __repr__(self) -> str:
        return "RunKey(…)"

    def _pair(self, purpose: bytes) -> KeyPair:
        secret = z85.encode(hashlib.blake2b(self._secret.encode(), digest_size=32, person=purpose).digest())
        return KeyPair(zmq.curve_public(secret), secret)
