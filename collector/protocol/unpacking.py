"""Msgpack bytes of a peer, field by field: nothing is made of a length before it is checked.

msgpack's own way, one call for the whole object, makes a list of any declared length before its elements are there, and
nests it a thousand times: 5 kB that claim 800 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import msgpack

from .checks import MAX_TEXT_BYTES, check_number, check_text, shown
from .errors import LimitError, ProtocolError, RecordError
from .wording import counted

__all__ = ["Reader", "decoder_of", "flag_of", "float_of", "guarded", "text_of"]

_T = TypeVar("_T")


def _not_ours(error: Exception) -> ProtocolError:
    return ProtocolError(f"not msgpack as rankd writes it: {type(error).__name__}: {error}")


class Reader:
    """Pulls the fields of one msgpack array out of bytes, one call a field.

    A call gives one scalar; an array or a map is asked for by `array` or `map`, which check its length before anything
    is made of it. Empty ones may come out of `next`; no field lets a list or dict through.
    """

    __slots__ = ("_size", "_unpack", "_unpacker")

    def __init__(self, raw: bytes, most: int) -> None:
        if len(raw) > most:
            raise LimitError(f"{len(raw)} bytes, at most {most} are allowed")
        self._size = len(raw)
        self._unpacker = msgpack.Unpacker(
            raw=False, max_buffer_size=max(len(raw), 1), max_array_len=0, max_map_len=0, max_ext_len=0
        )
        self._unpacker.feed(raw)
        self._unpack = self._unpacker.unpack

    def next(self) -> Any:
        """The next field, which is a scalar, text or binary."""
        try:
            return self._unpack()
        except Exception as e:  # noqa: BLE001 - msgpack raises many kinds; each means that these bytes are not ours
            raise _not_ours(e) from None

    def array(self, what: str, most: int, least: int = 0) -> int:
        """The length of the array that comes next."""
        try:
            length = self._unpacker.read_array_header()
        except Exception as e:  # noqa: BLE001 - as above
            raise _not_ours(e) from None
        return self._length(what, length, least, most)

    def map(self, what: str, most: int) -> dict[str, Any]:
        """The map of scalars that comes next."""
        try:
            length = self._unpacker.read_map_header()
        except Exception as e:  # noqa: BLE001 - as above
            raise _not_ours(e) from None
        count = self._length(what, length, 0, most)
        entries: dict[str, Any] = {}
        for _ in range(count):
            key = self.next()
            if type(key) is not str or key in entries:
                raise ProtocolError(f"{what}: expected a new name, got {shown(key)}")
            entries[key] = self.next()
        return entries

    def end(self) -> None:
        """Nothing may follow."""
        if self._unpacker.tell() != self._size:
            raise ProtocolError(f"{counted(self._size - self._unpacker.tell(), 'byte')} too many")

    @staticmethod
    def _length(what: str, length: int, least: int, most: int) -> int:
        if length > most:
            raise LimitError(f"{what} of {length} entries, at most {most} are allowed")
        if length < least:
            raise ProtocolError(f"{what} of {counted(length, 'entry', 'entries')}, at least {least} are needed")
        return length


def decoder_of(known: Mapping[int, _T], what: str, kind: object) -> _T:
    """What decodes this kind of item or message; ProtocolError where there is none."""
    # True and 1.0 equal 1, but are not it.
    decode = known.get(kind) if type(kind) is int else None
    if decode is None:
        raise ProtocolError(f"unknown {what}: {shown(kind)}")
    return decode


def guarded(decode: Callable[..., _T], *arguments: Any) -> _T:
    """Call a decoder; what the peer's fields make a constructor refuse is the peer's fault."""
    try:
        return decode(*arguments)
    except RecordError as e:
        raise ProtocolError(str(e)) from None
    except (TypeError, ValueError, OverflowError) as e:
        raise ProtocolError(f"malformed fields: {e}") from None


def float_of(value: Any) -> float:
    """A number, which may be NaN or infinite."""
    check_number("a number", value, finite=False)
    return float(value)


def text_of(value: Any) -> str:
    """A text, possibly empty."""
    check_text("a text", value, MAX_TEXT_BYTES, empty=True)
    return cast(str, value)


def flag_of(value: Any) -> bool:
    """True or false, and no number."""
    if type(value) is not bool:
        raise ProtocolError(f"expected a bool, got {shown(value)}")
    return value
