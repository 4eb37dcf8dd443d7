"""Deliveries that the collector starts for processes it does not hear; real spools and subprocesses, given time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.support import wait_for

from rankd.agent.identity import Identity, introduction
from rankd.agent.outbox import Outbox
from rankd.agent.spool import Spool
from rankd.collector.entries import Opened
from rankd.collector.liveness import Liveness
from rankd.collector.protocol.wire import Hello, Note, encode_item
from rankd.collector.rescue import Rescue
from rankd.collector.run import Run


class Watch:
    """A rescue of a run that has heard of whoever a test lets in; a beat is a second."""

    def __init__(self, tmp_path: Path) -> None:
        self.run = Run(lambda _: b"")
        self.liveness = Liveness(lost_after=60, max_hold=300)
        self.spools = tmp_path / "base" / f"rankd-{os.geteuid()}" / "run"
        self.elsewhere = tmp_path / f"rankd-{os.geteuid()}" / "run"
        for directory in (self.spools, self.elsewhere):
            directory.mkdir(parents=True)
        self.rescue = Rescue(self.run, self.liveness, output=tmp_path / "out", spools=self.spools, beat_interval=1)

    def spool(self, *, items: int = 0, there: bool = False) -> tuple[Spool, Outbox, Hello]:
        """A spool as an agent of this host makes it; `there`: with another directory for temporary files."""
        path = (self.elsewhere if there else self.spools) / "rank_0.spool"
        hello = introduction(Identity(0, 1, "test"), None, {"spool": str(path)})
        spool = Spool.create(path, 2**17, hello)
        outbox = Outbox(spool)
        for _ in range(items):
            outbox.put([encode_item(Note(0, 1, None, "test", "", 0.0))])
        return spool, outbox, hello

    def finish(self, now: float) -> list[object]:
        """Wait for what is under way; what it has led to."""
        found: list[object] = []

        def all_ended() -> bool:
            found.extend(self.rescue.due(now))
            return not started()

        wait_for(all_ended)
        return found


def started() -> list[psutil.Process]:
    """The subprocesses that were started, and of whose end nobody has been told yet."""
    return psutil.Process().children()


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """Ends what it has started."""
    it = Watch(tmp_path)
    yield it
    it.rescue.close()


def test_a_rank_that_is_heard_is_left_alone(watch: Watch) -> None:
    """Its spool is claimed; nothing is started, and nothing stands in the way of the end."""
    spool, _, hello = watch.spool()
    watch.run.apply(Opened(hello))
    watch.liveness.rejoined(0, 0.0)
    assert watch.rescue.due(2.0) == []
    assert watch.rescue.settled(2.5, 2.5)
    assert started() == []
    spool.close(delivered=True)


def test_a_silent_rank_that_lives_is_asked_again_later(watch: Watch) -> None:
    """Three beats late: its spool is locked; it is not given up, and looked at again some seconds later only.

    As long as it is locked nothing is started: on a busy machine all ranks may be late.
    """
    _, outbox, hello = watch.spool()
    watch.run.apply(Opened(hello))
    watch.liveness.rejoined(0, 0.0)
    assert watch.rescue.due(3.0) == []
    assert started() == []
    outbox.close()
    watch.rescue.due(7.9)
    assert started() == []
    watch.rescue.due(8.9)
    assert len(started()) == 1
    assert [str(entry) for entry in watch.finish(9.0)] == ["Lost(rank=0, silent=9.0, gone=True)"]


def test_a_silent_rank_whose_process_is_gone_is_given_up_at_once(watch: Watch) -> None:
    """Also where its spool lies elsewhere than this host's others; the file is removed."""
    _, outbox, hello = watch.spool(there=True)
    watch.run.apply(Opened(hello))
    watch.liveness.rejoined(0, 0.0)
    outbox.close()
    watch.rescue.due(3.0)
    assert [str(entry) for entry in watch.finish(4.0)] == ["Lost(rank=0, silent=4.0, gone=True)"]
    assert watch.rescue.settled(5.0, 4.0)
    assert watch.rescue.left() == []
    assert not Path(hello.about["spool"]).exists()


def test_a_spool_that_nobody_claims_is_given_time_to_say_hello(watch: Watch) -> None:
    """A process that has just started is not looked at; one that never comes is, before the end."""
    spool, outbox, _ = watch.spool()
    outbox.close()
    watch.rescue.due(0.0)
    watch.rescue.due(2.0)
    assert started() == []
    assert not watch.rescue.settled(2.5, 0.0)
    assert started() == []
    watch.rescue.due(3.1)
    assert len(started()) == 1
    assert watch.finish(4.0) == []
    assert not spool.path.exists()


@pytest.mark.slow
def test_what_somebody_else_delivers_is_waited_for_at_the_end(watch: Watch) -> None:
    """They may fail: it is tried again each second; and once they have let go, it is delivered before the end."""
    spool, outbox, _ = watch.spool()
    watch.rescue.due(0.0)
    watch.rescue.due(3.0)
    assert watch.finish(4.0) == []
    assert not watch.rescue.settled(5.0, 5.0)
    assert not watch.rescue.settled(5.9, 5.0)
    assert started() == []
    outbox.close()
    assert not watch.rescue.settled(6.1, 5.0)
    assert len(started()) == 1
    watch.finish(7.0)
    assert watch.rescue.settled(7.1, 5.0)
    assert (watch.rescue.left(), spool.path.exists()) == ([], False)


@pytest.mark.slow
def test_what_nobody_lets_go_of_is_left_and_named(watch: Watch) -> None:
    """The end is put off for some seconds, not for ever."""
    spool, _, _ = watch.spool()
    watch.rescue.due(0.0)
    assert not watch.rescue.settled(3.0, 3.0)
    watch.finish(4.0)
    assert not watch.rescue.settled(12.0, 3.0)
    watch.finish(13.0)
    assert watch.rescue.settled(13.1, 3.0)
    assert watch.rescue.left() == [spool.path]
    spool.close(delivered=True)


@pytest.mark.slow
def test_what_an_older_process_left_elsewhere_is_found(watch: Watch) -> None:
    """Another process has its rank, and the collector looks for temporary files in another directory than both."""
    older, outbox, hello = watch.spool(there=True)
    outbox.close()
    watch.run.apply(Opened(hello))
    watch.run.apply(Opened(introduction(Identity(0, 1, "test"), None, {"spool": str(older.path) + ".spool"})))
    assert not watch.rescue.settled(0.0, 0.0)
    watch.rescue.due(3.0)
    watch.finish(4.0)
    assert watch.rescue.settled(5.0, 3.0)
    assert not older.path.exists()


@pytest.mark.slow
def test_a_delivery_does_not_outlive_the_collector(tmp_path: Path) -> None:
    """Killed itself, it cannot end it; left alone, that would hold the lock, and nobody else could deliver."""
    path = tmp_path / "rank_0.spool"
    hello = introduction(Identity(0, 1, "test"), None, {})
    outbox = Outbox(Spool.create(path, 2**17, hello))
    outbox.put([encode_item(Note(0, 1, None, "test", "", 0.0))])
    outbox.close()
    body = (
        "import os, subprocess, sys\n"
        "command = [sys.executable, '-m', 'rankd.collector', 'recover', sys.argv[1], '--output', sys.argv[2]]\n"
        "print(subprocess.Popen([*command, '--parent', str(os.getpid())]).pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", body, str(path), str(tmp_path / "out")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        delivery = psutil.Process(int(parent.stdout.readline()))
        wait_for(lambda: locked(path))
        parent.kill()
        wait_for(lambda: not delivery.is_running() or delivery.status() == psutil.STATUS_ZOMBIE)
    Spool.open(path).close(delivered=True)


def locked(path: Path) -> bool:
    """Whether a process has this spool."""
    return f":{path.stat().st_ino} " in Path("/proc/locks").read_text()


def test_what_is_under_way_ends_with_the_collector(watch: Watch) -> None:
    """A delivery that finds no collector any more is ended, and its file stays."""
    spool, outbox, hello = watch.spool(items=3)
    watch.run.apply(Opened(hello))
    watch.liveness.rejoined(0, 0.0)
    outbox.close()
    watch.rescue.due(3.0)
    assert len(started()) == 1
    watch.rescue.close()
    assert started() == []
    assert spool.path.exists()


@pytest.mark.parametrize("path", ["/etc/shadow", "--output=/tmp", "/tmp/x.spool", "/tmp/rankd-0/../../etc/x.spool", ""])
def test_a_path_that_a_peer_chose_is_not_touched(watch: Watch, path: str) -> None:
    """COMPLAINTS 27: only where spools lie is looked; what else a hello says reaches no command line."""
    hello = introduction(Identity(0, 1, "test"), None, {"spool": path})
    watch.run.apply(Opened(hello))
    watch.liveness.rejoined(0, 0.0)
    watch.rescue.due(3.0)
    assert started() == []
    assert watch.rescue.settled(4.0, 4.0)
