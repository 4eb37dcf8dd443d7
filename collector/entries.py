"""What the journal holds: everything that decides what the logs look like, in the order in which it was decided.

An entry is applied to a `Run` both when it happens and when the journal is read again; there is no other way to change
a run. `Stored` carries the bytes of a rank's items as they came over the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgpack

from .protocol.errors import JournalError, ProtocolError
from .protocol.messages import Facts
from .protocol.wire import Hello, Item, decode_message, encode_message

__all__ = [
    "Back",
    "Checkpoint",
    "Decided",
    "Ended",
    "Entry",
    "HeldOut",
    "Lost",
    "Opened",
    "Stored",
    "decode_entry",
    "encode_entry",
]


@dataclass(frozen=True, slots=True)
class Opened:
    """A new process of a rank was let in."""

    hello: Hello


@dataclass(frozen=True, slots=True)
class Stored:
    """Items of the session with this number, in the order of their own numbers.

    `items` are the same, decoded, where they have just been admitted; empty when read back from the journal.
    """

    session: int
    raws: tuple[bytes, ...]
    items: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True)
class Lost:
    """Nothing was heard of a rank for `silent` seconds, or its process is known to be `gone`: it no longer counts."""

    rank: int
    silent: float
    gone: bool = False


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A rank is alive, but has held the others up for `held` seconds: it no longer counts until it has caught up."""

    rank: int
    held: float


@dataclass(frozen=True, slots=True)
class Back:
    """A lost rank is heard again."""

    rank: int


@dataclass(frozen=True, slots=True)
class Decided:
    """Something was decided that ranks are told: a collector that starts again must know of it.

    Attributes:
        kind: what it is about; the first word of its line in the log.
        key: which of this kind; the newest of each is kept.
        facts: what was decided.
        text: the rest of the line in the log; empty: there is none.
    """

    kind: str
    key: str
    facts: Facts
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The collector ends: all ranks have said goodbye, or it has waited long enough for the missing ones."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of the run before the entries that follow (`Run.freeze`), and the sizes of the sinks' files then.

    The one entry that decides nothing: the entries before it give the same.
    """

    state: list[Any]
    sizes: Mapping[str, int]


Entry: TypeAlias = Opened | Stored | Lost | HeldOut | Back | Decided | Ended


def encode_entry(entry: Entry | Checkpoint) -> bytes:
    """The journal payload of an entry."""
    fields: list[Any]
    match entry:
        case Stored():
            fields = ["items", entry.session, list(entry.raws)]
        case Opened():
            fields = ["opened", encode_message(entry.hello)]
        case Lost():
            fields = ["lost", entry.rank, entry.silent, entry.gone]
        case HeldOut():
            fields = ["held_out", entry.rank, entry.held]
        case Back():
            fields = ["back", entry.rank]
        case Decided():
            fields = ["decided", entry.kind, entry.key, dict(entry.facts), entry.text]
        case Ended():
            fields = ["ended"]
        case Checkpoint():
            fields = ["checkpoint", entry.state, dict(entry.sizes)]
    return bytes(msgpack.packb(fields, use_bin_type=True))


def decode_entry(payload: bytes) -> Entry | Checkpoint:
    """The entry of a journal payload.

    Raises:
        JournalError: the payload is none; the journal was written by another version, or is not a journal.
    """
    try:
        kind, *fields = msgpack.unpackb(payload, raw=False, strict_map_key=True)
        return _DECODERS[kind](*fields)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException, ProtocolError) as e:
        raise JournalError(f"not an entry of this version's journal: {payload[:40]!r} ({e})") from e


def _opened(raw: bytes) -> Opened:
    hello = decode_message(raw)
    if not isinstance(hello, Hello):
        raise TypeError(f"expected a hello, got {type(hello).__name__}")
    return Opened(hello)


_DECODERS: dict[str, Callable[..., Entry | Checkpoint]] = {
    "items": lambda session, raws: Stored(session, tuple(raws)),
    "opened": _opened,
    "lost": Lost,
    "held_out": HeldOut,
    "back": Back,
    "decided": Decided,
    "ended": Ended,
    "checkpoint": Checkpoint,
}
