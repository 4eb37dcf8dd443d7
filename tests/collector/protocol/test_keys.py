"""The run's key: derivation, what it is not shown in, and what it lets through."""

from __future__ import annotations

import pytest
import zmq

from rankd.collector.protocol.errors import ConfigError
from rankd.collector.protocol.keys import RunKey

TEXT = "0123456789abcdef0123456789abcdef"


def test_both_pairs_come_from_the_one_secret() -> None:
    """The same on every machine, different by purpose, and others with another secret. Pinned: all nodes must agree."""
    key = RunKey(TEXT)
    assert key.collector() == RunKey(TEXT).collector()
    assert key.collector() != key.agent()
    assert key.collector() != RunKey(TEXT + "0").collector()
    assert key.collector().public == b"0@VncbEK$xTGx%}2<3q@ZqMO!96mi[?xboW3Qk1P"
    for pair in (key.collector(), key.agent()):
        assert zmq.curve_public(pair.secret) == pair.public


def test_it_is_not_shown() -> None:
    """Neither as text nor in the error about a wrong one."""
    key = RunKey(TEXT)
    assert TEXT not in f"{key} {key!r} {key.agent()} {key.agent()!r}"
    assert key.agent().secret.decode() not in repr(key.agent())


@pytest.mark.parametrize("text", ["short", "x" * 31, "x" * 1_025, "a b" * 20, "ü" * 40, "x" * 40 + "\n", "\x00" * 40])
def test_what_cannot_be_a_key_is_an_error_that_does_not_quote_it(text: str) -> None:
    """It says how to make one."""
    with pytest.raises(ConfigError, match="openssl rand") as error:
        RunKey(text)
    assert text not in str(error.value)


def test_the_environment() -> None:
    """Not set, or empty, is no key; blanks around it do not count."""
    assert RunKey.from_environment({}) is None
    assert RunKey.from_environment({"RANKD_KEY": " "}) is None
    assert RunKey.from_environment({"RANKD_KEY": f" {TEXT}\n"}) == RunKey(TEXT)


def test_fresh_keys_differ() -> None:
    """And are keys."""
    assert RunKey.fresh() != RunKey.fresh()
