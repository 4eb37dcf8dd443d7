"""Longer text in a hello's facts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankd.collector.protocol.about import CONFIGURATION, MAX_ABOUT_TEXT, pack_text, unpack_text
from rankd.collector.protocol.wire import Hello, decode_message, encode_message


@given(st.text(st.characters(max_codepoint=126, min_codepoint=32), min_size=1, max_size=5_000))
def test_text_travels_in_a_hello(text: str) -> None:
    """What is packed comes out again at the other end, whatever its length, beside other facts."""
    hello = Hello(bytes(16), "", 0, 1, 1, "host", 1, 0.0, None, {"identity": "x", **pack_text(CONFIGURATION, text)})
    received = decode_message(encode_message(hello))
    assert isinstance(received, Hello)
    assert unpack_text(CONFIGURATION, received.about) == text


def test_the_longest_text_fits_into_a_hello() -> None:
    """The longest text travels; a longer one is left out rather than keeping the agent from starting."""
    longest = "x" * MAX_ABOUT_TEXT
    hello = Hello(bytes(16), "", 0, 1, 1, "host", 1, 0.0, None, pack_text(CONFIGURATION, longest))
    assert unpack_text(CONFIGURATION, hello.about) == longest
    assert pack_text(CONFIGURATION, longest + "x") == {}


def test_no_text_is_none() -> None:
    """A hello without the text, and text that would not fit the limits by its bytes, give None."""
    assert unpack_text(CONFIGURATION, {"identity": "x"}) is None
    assert unpack_text(CONFIGURATION, pack_text(CONFIGURATION, "ä")) is None
