"""Where the collector is looked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankd.agent.discovery import CONNECTION_FILE, Connection, EndpointFinder, read_connection
from rankd.collector.protocol.errors import ConfigError

FIELDS = {"version": 1, "endpoint": "tcp://10.0.0.1:7000", "run": "r", "pid": 12, "host": "here"}


def write(output: Path, text: str) -> Path:
    path = output / CONNECTION_FILE
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_order_of_the_places(tmp_path: Path) -> None:
    """The explicit setting goes before the environment, and that before the connection file; each says so."""
    write(tmp_path, json.dumps(FIELDS))
    environment = {"RANKD_ENDPOINT": "tcp://b:2"}
    explicit = EndpointFinder("tcp://a:1", environment, tmp_path)
    assert (explicit(), "rankd.endpoint" in explicit.where) == ("tcp://a:1", True)
    variable = EndpointFinder(None, environment, tmp_path)
    assert (variable(), "RANKD_ENDPOINT" in variable.where) == ("tcp://b:2", True)
    file = EndpointFinder(None, {}, tmp_path)
    assert (file(), str(tmp_path) in file.where) == ("tcp://10.0.0.1:7000", True)
    with pytest.raises(ConfigError, match="RANKD_ENDPOINT"):
        EndpointFinder(None, {}, None)


def test_the_file_is_read_anew(tmp_path: Path) -> None:
    """No file, then a half-written one, then a whole one, then another port: each call says what is there now."""
    find = EndpointFinder(None, {}, tmp_path)
    assert find() is None
    path = write(tmp_path, json.dumps(FIELDS)[:-9])
    assert find() is None
    path.write_text(json.dumps(FIELDS))
    assert find() == "tcp://10.0.0.1:7000"
    path.write_text(json.dumps({**FIELDS, "endpoint": "tcp://10.0.0.1:7001"}))
    assert find() == "tcp://10.0.0.1:7001"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "1",
        "[" * 50_000,
        " " * 70_000 + json.dumps(FIELDS),
        json.dumps({**FIELDS, "version": 2}),
        json.dumps({**FIELDS, "endpoint": ""}),
        json.dumps({**FIELDS, "endpoint": 7}),
        json.dumps({**FIELDS, "pid": "x"}),
        json.dumps({"version": 1}),
    ],
    ids=range(12),
)
def test_what_is_no_connection_file_is_none(tmp_path: Path, text: str) -> None:
    """Malformed content of any kind is the same as no file."""
    assert read_connection(write(tmp_path, text)) is None


def test_the_key_is_read_where_there_is_one(tmp_path: Path) -> None:
    """A connection file carries the run's key if the collector listens beyond loopback."""
    path = write(tmp_path, json.dumps({**FIELDS, "key": "secret"}))
    assert read_connection(path) == Connection("tcp://10.0.0.1:7000", "r", 12, "here", "secret")


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("host:7000", "tcp://host:7000"),
        ("tcp://host:7000", "tcp://host:7000"),
        ("[::1]:7000", "tcp://[::1]:7000"),
        ("tcp://[fe80::1%eth0]:7000", "tcp://[fe80::1%eth0]:7000"),
        ("ipc:///tmp/x", "ipc:///tmp/x"),
    ],
)
def test_endpoints(given: str, used: str) -> None:
    """TCP over IPv4 and IPv6 and ipc are taken; a bare HOST:PORT is TCP."""
    assert EndpointFinder(given, {}, None)() == used


@pytest.mark.parametrize(
    "given", ["host", "tcp://host", "tcp://host:0", "host:99999", "::1:7000", "udp://h:1", "tcp://*:1", "0.0.0.0:1", "ipc://"]
)  # fmt: skip
def test_endpoints_nobody_can_connect_to(given: str) -> None:
    """An endpoint that cannot work is an error at once, which quotes it."""
    with pytest.raises(ConfigError, match=r"no endpoint|to listen on") as error:
        EndpointFinder(None, {"RANKD_ENDPOINT": given}, None)
    assert repr(given) in str(error.value)
