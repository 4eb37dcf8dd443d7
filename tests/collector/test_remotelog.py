"""`rankd tail --from HOST:PORT`: what the collector gives of its log is what the files hold, wherever one reads."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.faults.job import Job
from tests.support import PATIENCE, CollectorProcess, free_port, wait_for

from rankd.collector.asking import Asker
from rankd.collector.history import History, LocalSource
from rankd.collector.logservice import LOG_LAYOUT, MOST_BYTES, LogService
from rankd.collector.protocol.errors import RankdError
from rankd.collector.protocol.keys import RunKey
from rankd.collector.protocol.messages import Ask
from rankd.collector.remotelog import RemoteGrowing, RemoteSource
from rankd.collector.selection import Selection
from rankd.collector.sinks.parts import part_path
from rankd.collector.sinks.speclog import MERGED_LOG

from .releases import begin, steps, write_logs
from .test_following import selections


class Direct(Asker):
    """Asks the service without a network in between."""

    def __init__(self, output: Path) -> None:
        self.service = LogService(output)

    def raw(self, kind: str, facts: Mapping[str, Any] | None = None, *, again: bool = False) -> bytes:
        self.service.take(b"peer", Ask(1, kind, facts or {}, b""), 0.0)
        _, answer = self.service.next()
        if not answer.fine:
            raise RankdError(answer.content.decode())
        return answer.content


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of two attempts whose first third is a closed part."""
    path = tmp_path_factory.mktemp("run")
    write_logs(path, [*begin(1), *steps(1, 12), *begin(2), *steps(9, 24, attempt=2)])
    raw = (path / MERGED_LOG).read_bytes()
    cut = raw.index(b"\n", len(raw) // 3) + 1
    part_path(path / MERGED_LOG, 0, cut).write_bytes(raw[:cut])
    (path / MERGED_LOG).write_bytes(raw[cut:])
    return path


@settings(max_examples=30)
@given(selection=selections, count=st.none() | st.integers(0, 30))
def test_history_is_that_of_the_files(output: Path, selection: Selection, count: int | None) -> None:
    """Whatever is asked for."""
    direct = Direct(output)
    try:
        with History(output, selection) as near, History(RemoteSource(direct, "here"), selection) as far:
            if count is None:
                assert list(far.all()) == list(near.all())
            else:
                assert list(far.last(count)) == list(near.last(count))
            assert far.size == near.size
    finally:
        direct.service.close()


@pytest.mark.parametrize("most", [64, MOST_BYTES])
def test_growth_is_given_in_whole_lines_each_once(tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that are half written, longer than an answer, or lost and written again."""
    monkeypatch.setattr("rankd.collector.remotelog.MOST_BYTES", most)
    log = tmp_path / MERGED_LOG
    log.write_bytes(b"first\nsec")
    direct = Direct(tmp_path)
    growing = RemoteGrowing(direct, 0)
    assert growing.lines() == b"first\n"
    assert growing.lines() == b""
    long = b"ond " + b"x" * 500 + b"\n"
    with log.open("ab") as file:
        file.write(long)
    assert growing.lines() == b"sec" + long
    whole = log.read_bytes()
    log.write_bytes(whole[:300])
    assert growing.lines() == b""
    log.write_bytes(whole + b"third\n")
    assert growing.lines() == b"third\n"
    assert growing.missed == 0
    log.write_bytes(b"y" * (len(whole) + 10) + b"\nfourth\n")
    assert (growing.lines(), growing.lines()) == (b"", b"fourth\n")
    assert growing.missed == 5
    direct.service.close()


def test_parts_that_were_deleted_are_counted(output: Path, tmp_path: Path) -> None:
    """A reader that was slower than retention goes on with what is there, and says how much it has missed."""
    source = LocalSource(output)
    whole = source.read(0, source.end)
    source.close()
    part_path(tmp_path / MERGED_LOG, 0, 500).write_bytes(whole[:500])
    part_path(tmp_path / MERGED_LOG, 500, 1_000).write_bytes(whole[500:1_000])
    direct = Direct(tmp_path)
    read = whole[:400].rfind(b"\n") + 1
    growing = RemoteGrowing(direct, read)
    (tmp_path / MERGED_LOG).write_bytes(whole[1_000:])
    assert growing.lines() == whole[read : whole.rfind(b"\n") + 1]
    late = RemoteGrowing(direct, read)
    late._last = whole[read - 50 : read]
    part_path(tmp_path / MERGED_LOG, 0, 500).unlink()
    assert late.lines() == b""
    assert late.missed == 500 - read
    assert late.lines() == whole[500 : whole.rfind(b"\n") + 1]
    direct.service.close()


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("log.read", {}),
        ("log.read", {"offset": -1, "count": 1}),
        ("log.read", {"offset": 0, "count": MOST_BYTES + 1}),
        ("log.read", {"offset": "0", "count": 1}),
        ("log.write", {"offset": 0, "count": 1}),
        ("log.index", {"offset": 0, "count": 0}),
    ],
)
def test_what_makes_no_sense_is_refused(output: Path, kind: str, facts: dict[str, Any]) -> None:
    """A path cannot even be asked for."""
    with pytest.raises(RankdError):
        Direct(output).raw(kind, facts)


def test_only_so_many_questions_wait(output: Path) -> None:
    """A key holder that asks and does not read costs himself the answers."""
    service = LogService(output)
    for number in range(256):
        service.take(b"peer", Ask(number, "log.layout", {}, b""), 0.0)
    with pytest.raises(RankdError, match="wait for their answers"):
        service.take(b"peer", Ask(256, "log.layout", {}, b""), 0.0)


def test_who_follows_is_given_the_end(tmp_path: Path) -> None:
    """The collector waits for those who follow, at its end: not for who has it all, nor for who asks no more."""
    log = tmp_path / MERGED_LOG
    log.write_bytes(b"line\n" * 10)
    direct = Direct(tmp_path)
    service = direct.service
    assert not service.followed(0.0)
    growing = RemoteGrowing(direct, 0)
    growing.lines()
    assert not service.followed(0.5)
    with log.open("ab") as file:
        file.write(b"end\n")
    assert service.followed(0.5)
    assert not service.followed(1.5)
    assert growing.lines() == b"end\n"
    assert not service.followed(0.5)
    service.close()


@pytest.mark.slow
def test_tail_from_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Followed through a SIGKILL of the collector and rotations to the run's end: all lines, each once."""
    key = secrets.token_hex(32)
    monkeypatch.setenv("RANKD_KEY", key)
    port = free_port()
    endpoint = f"tcp://127.0.0.1:{port}"
    out = tmp_path / "out"
    job = Job(tmp_path / "told", output=str(out), endpoint=endpoint)
    logs = {"rotate_size": "64KiB", "compress": "gzip"}
    spool = {"directory": str(job.spools)}
    collector = CollectorProcess(out, endpoint=endpoint, lost_after=60.0, logs=logs, spool=spool)
    command = [sys.executable, "-m", "rankd.collector", "tail", "--from", f"127.0.0.1:{port}"]
    try:
        ranks = job.start(range(2), 2, last=10_000, pace=0.002)
        wait_for(lambda: list(out.glob("merged.log.*")))
        seen = tmp_path / "seen"
        with seen.open("wb") as file:
            follower = subprocess.Popen([*command, "-f", "-n", "100000000"], stdout=file, stderr=subprocess.PIPE)
        wait_for(lambda: seen.stat().st_size > 100_000)
        os.kill(follower.pid, signal.SIGSTOP)  # a slow reader
        collector.kill()
        collector.start()
        os.kill(follower.pid, signal.SIGCONT)
        before = seen.stat().st_size
        wait_for(lambda: seen.stat().st_size > before + 100_000)
        near = subprocess.run([*command[:-2], str(out), "-n", "3", "--rank", "1", "--step", ":5"], capture_output=True)
        far = subprocess.run([*command, "-n", "3", "--rank", "1", "--step", ":5"], capture_output=True)
        assert (far.returncode, far.stdout) == (0, near.stdout)
        assert far.stdout
        job.finish()
        ranks.ended()
        assert collector.ended()[0] == 0, collector.said()
        status = follower.wait(PATIENCE)
        assert follower.stderr is not None
        with follower.stderr as said:
            assert (status, said.read()) == (0, b"")
    finally:
        job.close()
        if collector.process.poll() is None:
            collector.kill()
    source = cast("Any", LocalSource(out))
    assert seen.read_bytes() == source.read(0, source.end)


def test_the_wrong_place_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, no address, both places or none: what to do, and status 2."""
    command = [sys.executable, "-m", "rankd.collector", "tail"]
    monkeypatch.delenv("RANKD_KEY", raising=False)
    for arguments, expected in (
        (["--from", "127.0.0.1:7690"], "set RANKD_KEY"),
        (["--from", "here"], "write HOST:PORT"),
        ([], "give the run's output directory, or --from"),
        (["out", "--from", "127.0.0.1:7690"], "give the run's output directory, or --from"),
    ):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2
        assert expected in done.stderr


@pytest.mark.parametrize("keyed", [True, False])
def test_a_collector_on_loopback_is_asked_as_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keyed: bool
) -> None:
    """Its job has set RANKD_KEY, or it has made a key of its own and wants none of connections: `--from` finds out."""
    monkeypatch.delenv("RANKD_KEY", raising=False)
    if keyed:
        monkeypatch.setenv("RANKD_KEY", secrets.token_hex(32))
    collector = CollectorProcess(tmp_path / "out")
    if not keyed:
        monkeypatch.setenv("RANKD_KEY", (tmp_path / "out" / ".rankd" / "key").read_text().strip())
    try:
        with Asker.at(str(collector.connection()["endpoint"])) as asker:
            assert asker.ask(LOG_LAYOUT)["end"] == 0
    finally:
        collector.kill()


def test_a_collector_that_was_killed_is_said_to_be_gone(tmp_path: Path) -> None:
    """At once, with what starts it again."""
    collector = CollectorProcess(tmp_path / "out")
    collector.kill()
    with pytest.raises(RankdError, match=r"is gone; `rankd collect .*out` starts it again"), Asker.of(tmp_path / "out"):
        pass


@pytest.mark.parametrize("keyed", [False, True])
def test_who_has_the_key_is_not_counted_as_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keyed: bool
) -> None:
    """On loopback a reader has to find out whether connections are encrypted; that turns nobody away."""
    key = RunKey.fresh()
    if keyed:
        monkeypatch.setenv("RANKD_KEY", key.reveal())
    collector = CollectorProcess(tmp_path / "out")
    monkeypatch.setenv("RANKD_KEY", key.reveal() if keyed else (tmp_path / "out/.rankd/key").read_text().strip())
    endpoint = str(collector.connection()["endpoint"])
    # Which side sees first that the other does not encrypt is chance.
    for _ in range(8):
        with Asker.at(endpoint) as asker:
            assert asker.ask(LOG_LAYOUT)["end"] >= 0
    collector.process.terminate()
    status, said = collector.ended()
    assert status == 128 + signal.SIGTERM
    assert "refused" not in said, said
    assert json.loads((tmp_path / "out/.rankd/status.json").read_text())["collector"]["refused"] == {}


def test_who_has_another_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the one above: what is not counted there still is here."""
    monkeypatch.setenv("RANKD_KEY", RunKey.fresh().reveal())
    collector = CollectorProcess(tmp_path / "out")
    endpoint = str(collector.connection()["endpoint"])
    monkeypatch.setenv("RANKD_KEY", RunKey.fresh().reveal())
    with Asker.at(endpoint, patience=0.1) as asker, pytest.raises(RankdError, match="its key is another one"):
        asker.ask(LOG_LAYOUT)
    wait_for(lambda: "refused (without the key)" in collector.said())
    collector.kill()
