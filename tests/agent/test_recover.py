"""`rankd recover` and an agent's leftovers: real spools, a real collector, several who want the same."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import PATIENCE, SOON, CollectorProcess, Peer, comments, contents, recover, wait_for

from rankd.agent.discovery import EndpointFinder
from rankd.agent.identity import Identity, introduction
from rankd.agent.outbox import Outbox
from rankd.agent.recover import Fate, Leftovers, deliver
from rankd.agent.spool import Spool, find_spools
from rankd.collector.config import SpoolConfig
from rankd.collector.protocol.records import Frame, Record
from rankd.collector.protocol.wire import Beat, Block, Data, Goodbye, encode_item

# Starts a training, a collector or both in each test.
pytestmark = pytest.mark.slow


def left(
    directory: Path, rank: int = 0, steps: int = 5, world: int = 2, *, goodbye: bool = True, run: str | None = None
) -> Path:
    """What a process of a rank has left that nobody has ever heard; or (`run`) that a collector had let in."""
    hello = introduction(Identity(rank, world, "test"), None, {"output": str(directory / "out")})
    spool = Spool.create(directory / f"rank_{rank}.{hello.session.hex()}.spool", 2**18, hello)
    outbox = Outbox(spool)
    if run is not None:
        outbox.joined(run)
    for step in range(1, steps + 1):
        assert outbox.put([encode_item(Block(0, step, None, True, 0.0, (Frame.scalar("loss", float(step)),)))])
    if goodbye:
        outbox.finish("done", 0.0)
    outbox.close()
    return spool.path


def losses(tmp_path: Path, rank: int = 0) -> list[int]:
    """The steps of a rank that are in merged.log."""
    return [r.position.step for r in contents(tmp_path) if isinstance(r, Record) and r.rank == rank]


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[CollectorProcess]:
    """A collector for tmp_path/out, gone after the test."""
    it = CollectorProcess(tmp_path / "out")
    yield it
    if it.process.poll() is None:
        it.kill()


def test_spools_are_delivered_and_removed(tmp_path: Path, collector: CollectorProcess) -> None:
    """Two ranks' files in a directory: a line each, status 0, everything in the log, and the collector can end."""
    left(tmp_path, 0)
    left(tmp_path, 1)
    done = recover(tmp_path, str(tmp_path), "--output", "out")
    assert done.returncode == 0
    assert [line.split(": ", 1)[1].split(" (")[0] for line in done.stdout.splitlines()] == [
        "rank 0 of 2",
        "rank 1 of 2",
    ]
    assert done.stdout.count("6 items delivered") == 2
    assert find_spools(tmp_path) == []
    collector.ends(0)
    assert losses(tmp_path, 0) == losses(tmp_path, 1) == [1, 2, 3, 4, 5]


def test_the_spool_itself_says_where_its_collector_is(tmp_path: Path, collector: CollectorProcess) -> None:
    """Neither --output nor --endpoint: the output directory that its process had; and --endpoint alone will do."""
    assert recover(tmp_path, str(left(tmp_path, 0))).returncode == 0
    endpoint = str(collector.connection()["endpoint"])
    assert recover(tmp_path, str(left(tmp_path, 1)), "--endpoint", endpoint).returncode == 0
    collector.ends(0)


def test_a_living_process_is_left_alone(tmp_path: Path, collector: CollectorProcess) -> None:
    """Status 3, and the file stays as it is."""
    hello = introduction(Identity(0, 1, "test"), None, {})
    spool = Spool.create(tmp_path / "rank_0.spool", 2**17, hello)
    done = recover(tmp_path, str(spool.path), "--output", "out")
    assert done.returncode == 3
    assert "alive" in done.stdout
    assert spool.path.exists()
    spool.close(delivered=True)


def test_what_cannot_be_delivered_stays(tmp_path: Path) -> None:
    """A damaged file, none at all, and a collector that is away: status 1 with the reason, nothing is removed."""
    damaged = tmp_path / "damaged.spool"
    damaged.write_bytes(b"rankdspl" + bytes(100))
    for path, reason in ((damaged, "cannot be read"), (tmp_path / "none.spool", "no such file")):
        done = recover(tmp_path, str(path), "--output", "out")
        assert (done.returncode, reason in done.stdout) == (1, True)
    path = left(tmp_path)
    done = recover(tmp_path, str(path), "--output", "out", "--timeout", "0.2")
    assert done.returncode == 1
    assert "6 of 6 items not taken" in done.stdout
    assert damaged.exists()
    assert path.exists()


def test_what_another_run_has_left_is_not_delivered(tmp_path: Path, collector: CollectorProcess) -> None:
    """Its output directory was deleted, and holds a new run: status 4, the file stays, the log has nothing of it."""
    connection = collector.connection()
    own = left(tmp_path, 0, world=1, goodbye=False, run=str(connection["run"]))
    other = left(tmp_path, 1, run="0123456789abcdef")
    done = recover(tmp_path, str(own), str(other), "--output", "out")
    assert done.returncode == 4, done.stdout
    assert f"belongs to run 0123456789abcdef, and its output directory to run {connection['run']} now" in done.stdout
    assert not own.exists()
    # Who names the collector itself does not get it there either.
    assert recover(tmp_path, str(other), "--endpoint", str(connection["endpoint"])).returncode == 1
    assert other.exists()
    collector.process.terminate()
    collector.process.wait(PATIENCE)
    assert losses(tmp_path, 0) == [1, 2, 3, 4, 5]
    assert losses(tmp_path, 1) == []


def test_the_collector_leaves_alone_what_another_run_has_left_on_its_host(
    tmp_path: Path, collector: CollectorProcess
) -> None:
    """It says so once, and ends as if the file were not there."""
    spools = tmp_path / f"rankd-{os.geteuid()}" / SpoolConfig().place(tmp_path / "out").name
    spools.mkdir(parents=True)
    path = left(spools, 1, run="0123456789abcdef")
    peer = Peer(collector)
    peer.welcome(introduction(Identity(0, 1, "test"), None, {}))
    wait_for(lambda: "belongs to run 0123456789abcdef" in collector.said())
    peer.say(Data((encode_item(Goodbye(1, "done", 0, {}, 0.0)),)))
    status, said = collector.ended()
    peer.close()
    assert status == 0, said
    assert said.count("belongs to run") == 1
    assert "not delivered" not in said
    assert path.exists()
    assert losses(tmp_path, 1) == []


def test_leftovers_of_another_run_hold_no_hello_back(tmp_path: Path, collector: CollectorProcess) -> None:
    """An agent says once that the file is none of its run, and does not wait for it."""
    path = left(tmp_path, 0, run="0123456789abcdef")
    find = EndpointFinder(None, {}, tmp_path / "out")
    leftovers = Leftovers(tmp_path, 0, find)
    leftovers.start()
    started = time.monotonic()
    wait_for(lambda: leftovers.find_endpoint() is not None)
    took = time.monotonic() - started
    leftovers.stop()
    leftovers.join(PATIENCE)
    assert took < 3.0
    assert path.exists()


def test_an_empty_spool_needs_no_collector(tmp_path: Path) -> None:
    """Everything was acknowledged before the process died: the file is removed, status 0."""
    path = left(tmp_path, steps=0, goodbye=False)
    done = recover(tmp_path, str(path), "--output", "out")
    assert (done.returncode, "0 items delivered" in done.stdout) == (0, True)
    assert not path.exists()


def test_without_anything_to_do(tmp_path: Path) -> None:
    """No file and no run is a wrong call; a run without spool files on this host is fine."""
    done = recover(tmp_path)
    assert done.returncode == 2
    assert "--output" in done.stderr
    done = recover(tmp_path, "--output", "out")
    assert (done.returncode, done.stdout) == (0, "no spool files there\n")


def test_killed_in_the_middle_and_called_again(tmp_path: Path, collector: CollectorProcess) -> None:
    """The first one is killed while the collector stands still: the second delivers, nothing twice."""
    path = left(tmp_path, steps=200, world=1)
    collector.process.send_signal(signal.SIGSTOP)
    command = [sys.executable, "-m", "rankd.collector", "recover", str(path), "--output", str(tmp_path / "out")]
    first = subprocess.Popen(command)
    fds = Path(f"/proc/{first.pid}/fd")
    # Not by trying the lock: that would take it.
    wait_for(lambda: any(os.path.realpath(fd) == str(path) for fd in fds.iterdir()))
    first.kill()
    first.wait()
    collector.process.send_signal(signal.SIGCONT)
    assert recover(tmp_path, str(path), "--output", "out").returncode == 0
    collector.ends(0)
    assert losses(tmp_path) == list(range(1, 201))


def test_several_at_once_deliver_once(tmp_path: Path, collector: CollectorProcess) -> None:
    """The lock decides: one delivers, the others find it taken or gone."""
    path = left(tmp_path, steps=100, world=1)
    endpoint = str(collector.connection()["endpoint"])
    fates: list[Fate] = []

    def one() -> None:
        fates.append(deliver(path, lambda _: lambda: endpoint, timeout=20).fate)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fates.count(Fate.DELIVERED) == 1
    collector.ends(0)
    assert losses(tmp_path) == list(range(1, 101))


def test_leftovers_of_the_same_rank_go_first_and_hold_the_hello_back(
    tmp_path: Path, collector: CollectorProcess
) -> None:
    """Until they are delivered the new process does not find its collector; other ranks' are left to those for now."""
    own, other = left(tmp_path, 0), left(tmp_path, 1)
    endpoint = str(collector.connection()["endpoint"])
    leftovers = Leftovers(tmp_path, 0, lambda: endpoint)
    assert leftovers.find_endpoint() is None
    leftovers.start()
    wait_for(lambda: leftovers.find_endpoint() == endpoint)
    assert not own.exists()
    assert other.exists()
    leftovers.stop()
    leftovers.join(10)
    assert not leftovers._thread.is_alive()


def test_leftovers_that_cannot_be_delivered_hold_it_back_for_a_moment_only(tmp_path: Path) -> None:
    """Without a collector it says so at once; with one that does not answer, the new process goes on after a while."""
    left(tmp_path, 0)
    endpoints: list[str] = []
    leftovers = Leftovers(tmp_path, 0, lambda: endpoints[0] if endpoints else None)
    leftovers.start()
    assert leftovers.find_endpoint() is None
    endpoints.append("tcp://127.0.0.1:9")
    begun = time.monotonic()
    wait_for(leftovers.find_endpoint)
    assert time.monotonic() - begun >= 2.9
    leftovers.stop()
    leftovers.join(10)
    assert len(find_spools(tmp_path)) == 1


def test_a_dead_process_of_a_larger_world_changes_nothing_for_the_living(tmp_path: Path) -> None:
    """COMPLAINTS 15: 1 rank now; what rank 7 of 8 left long ago is kept, marked late, and opens no attempt."""
    collector = CollectorProcess(tmp_path / "out", lost_after=600.0)
    peer = Peer(collector)
    peer.welcome(introduction(Identity(0, 1, "test"), None, {}))
    assert recover(tmp_path, str(left(tmp_path, 7, world=8))).returncode == 0
    peer.say(Data((encode_item(Goodbye(1, "done", 0, {}, 0.0)),)))
    collector.ends(0)
    peer.close()
    assert losses(tmp_path, 7) == [1, 2, 3, 4, 5]
    told = comments(contents(tmp_path))
    assert "attempt" not in told
    assert len(told["late"]) == 5


def test_who_delivers_does_not_make_a_rank_look_alive(tmp_path: Path) -> None:
    """Its beats and items are no word of the rank: known to be gone, it is given up once the deliverer is silent."""
    collector = CollectorProcess(tmp_path / "out", lost_after=600.0)
    rank, deliverer = Peer(collector), Peer(collector)
    hello = introduction(Identity(0, 1, "test"), None, {})
    rank.welcome(hello)
    rank.say(Data((block(1), block(2))))
    rank.acknowledged(2)
    assert deliverer.welcome(dataclasses.replace(hello, recovered=True)).acked == 2
    # A new process of the rank need not wait until the old one counts as silent.
    newer = Peer(collector)
    newer.welcome(introduction(Identity(0, 1, "test"), None, {}))
    # What the dead one had is still taken, and belongs to its own attempt.
    deliverer.say(Data((block(2), block(3))))
    deliverer.acknowledged(3)
    newer.say(Data((block(1),)))
    newer.acknowledged(1)
    deliverer.say(Beat(0, 0, 0))
    newer.say(Data((encode_item(Goodbye(2, "done", 0, {}, 0.0)),)))
    status, said = collector.ended()
    assert status == 0, said
    for peer in (rank, deliverer, newer):
        peer.close()
    where = [(r.position.attempt, r.position.step) for r in contents(tmp_path) if isinstance(r, Record)]
    assert where == [(1, 1), (1, 2), (1, 3), (2, 1)]


def test_a_deliverer_that_falls_silent_leaves_the_rank_lost(tmp_path: Path) -> None:
    """The process is known to be gone, so nobody waits for `lost_after`; the log says why."""
    collector = CollectorProcess(tmp_path / "out", lost_after=600.0, linger=SOON)
    rank, deliverer = Peer(collector), Peer(collector)
    hello = introduction(Identity(0, 1, "test"), None, {})
    rank.welcome(hello)
    deliverer.welcome(dataclasses.replace(hello, recovered=True))
    collector.ends(1)
    for peer in (rank, deliverer):
        peer.close()
    (lost,) = comments(contents(tmp_path))["rank_lost"]
    assert lost == "rank 0: its process is gone, never heard; the log goes on without it"


def block(number: int) -> bytes:
    """Item `number`: the block of the step with the same number."""
    return encode_item(Block(number, number, None, True, 0.0, (Frame.scalar("loss", float(number)),)))
