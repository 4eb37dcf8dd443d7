"""Where the collector is looked for."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from rankd.agent.discovery import EndpointFinder
from rankd.collector.protocol.connection import CONNECTION_FILE, Connection, read_connection
from rankd.collector.protocol.endpoints import PORTS
from rankd.collector.protocol.errors import ConfigError
from rankd.collector.protocol.keys import RunKey

KEY = "0123456789abcdef0123456789abcdef"
FIELDS = {"version": 1, "endpoint": "tcp://10.0.0.1:7000", "run": "r", "pid": 12, "host": "here", "key": KEY}


def write(output: Path, text: str) -> Path:
    path = output / CONNECTION_FILE
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_order_of_the_places(tmp_path: Path) -> None:
    """The explicit setting goes before the environment, and that before the connection file; each says so."""
    write(tmp_path, json.dumps(FIELDS))
    environment = {"RANKD_ENDPOINT": "tcp://b:2", "RANKD_KEY": KEY}
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
    assert EndpointFinder(given, {"RANKD_KEY": KEY}, None)() == used


@pytest.mark.parametrize(
    "given", ["host", "tcp://host", "tcp://host:0", "host:99999", "::1:7000", "udp://h:1", "tcp://*:1", "0.0.0.0:1", "ipc://"]
)  # fmt: skip
def test_endpoints_nobody_can_connect_to(given: str) -> None:
    """An endpoint that cannot work is an error at once, which quotes it."""
    with pytest.raises(ConfigError, match=r"no endpoint|to listen on") as error:
        EndpointFinder(None, {"RANKD_ENDPOINT": given}, None)
    assert repr(given) in str(error.value)


def test_beyond_loopback_nothing_goes_without_a_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the given endpoint nor the file's is connected to in the clear; said once, with what to set."""
    find = EndpointFinder("tcp://10.0.0.1:7000", {}, tmp_path)
    assert find() is None
    assert find() is None
    assert len(caplog.records) == 1
    assert "set RANKD_KEY to the same on all nodes" in caplog.text
    write(tmp_path, json.dumps(FIELDS))
    found = find()
    assert found == "tcp://10.0.0.1:7000"
    assert found.key == RunKey(KEY)
    write(tmp_path, json.dumps({**FIELDS, "key": "short"}))
    assert EndpointFinder(None, {}, tmp_path)() is None


def test_the_files_collector_is_of_a_run_and_has_its_key(tmp_path: Path) -> None:
    """A stale file whose port another run has got by now: the hello says which run is meant, so that one refuses it."""
    write(tmp_path, json.dumps(FIELDS))
    found = EndpointFinder(None, {}, tmp_path)()
    assert found is not None
    assert (found.run, found.key) == ("r", RunKey(KEY))
    other = "f" * 40
    found = EndpointFinder(None, {"RANKD_KEY": other}, tmp_path)()
    assert found is not None
    assert found.key == RunKey(other)


def test_another_machines_loopback_is_not_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A shared directory, and a collector that listens on its own machine only: said, and not looked for here."""
    fields = {"version": 1, "endpoint": "tcp://127.0.0.1:7000", "run": "r", "pid": 12, "host": socket.gethostname()}
    write(tmp_path, json.dumps(fields))
    found = EndpointFinder(None, {}, tmp_path)()
    assert found == "tcp://127.0.0.1:7000"
    assert found is not None
    assert found.key is None
    write(tmp_path, json.dumps({**fields, "host": "elsewhere"}))
    assert EndpointFinder(None, {}, tmp_path)() is None
    assert "the collector on elsewhere listens there for its own machine only" in caplog.text


def test_by_the_schedulers_host(tmp_path: Path) -> None:
    """Without a shared directory: our ports there, the first most often; with a (perhaps stale) file, that too."""
    environment = {"MS_SCHED_HOST": "10.0.0.9", "MS_SCHED_PORT": "8118", "RANKD_KEY": KEY}
    find = EndpointFinder(None, environment, tmp_path)
    asked = [find() for _ in range(14)]
    assert asked[:4] == [f"tcp://10.0.0.9:{PORTS[i]}" for i in (0, 1, 0, 2)]
    assert set(asked) == {f"tcp://10.0.0.9:{port}" for port in PORTS}
    assert "MS_SCHED_HOST=10.0.0.9" in find.where
    write(tmp_path, json.dumps(FIELDS))
    find = EndpointFinder(None, environment, tmp_path)
    assert [find(), find()] == ["tcp://10.0.0.1:7000", f"tcp://10.0.0.9:{PORTS[0]}"]
    without = EndpointFinder(None, {"MS_SCHED_HOST": "10.0.0.9"}, tmp_path / "nowhere")
    assert without() is None
    assert "for want of a key" in without.where
