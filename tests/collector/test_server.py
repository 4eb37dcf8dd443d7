"""The collector's process as its peers see it: real sockets, real files, a real process that is killed."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from tests.support import PATIENCE, SOON, CollectorProcess, Peer, check_logs, free_port, records_of, wait_for

from rankd.collector.asking import Asker
from rankd.collector.place import Place
from rankd.collector.protocol.keys import RunKey
from rankd.collector.protocol.records import Comment
from rankd.collector.protocol.speclog import parse
from rankd.collector.protocol.wire import (
    Beat,
    Data,
    Hole,
    Refused,
    Welcome,
    Who,
    encode_item,
)

from .streams import Training, hello, training


def whole(one: Training) -> Data:
    return Data(one.items)


def test_a_run_is_collected_ordered_and_ends_by_itself(collector: CollectorProcess, peers: Callable[[], Peer]) -> None:
    """Two ranks, the later one first; the collector ends with status 0 and a summary once both said goodbye."""
    ranks = [training(rank, 2) for rank in range(2)]
    for one in reversed(ranks):
        peer = peers()
        assert peer.welcome(one.hello).acked == 0
        peer.say(whole(one))
        peer.acknowledged(len(one.items))
    status, said = collector.ended()
    assert status == 0
    assert re.search(r"^   1 +1 +1001 on node0 +done +step 2 ", said, re.MULTILINE), said
    check_logs(collector.output, 2)
    order = [(r.position.key, r.rank) for r in records_of(collector.output)]
    assert order == sorted(order)
    assert len(order) == 2 * 2 * (2 * 4 + 2)
    assert not (collector.output / ".rankd" / "connection.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("segment_size", [4_096, 2**26])
def test_a_killed_collector_goes_on_where_it_was(tmp_path: Path, segment_size: int) -> None:
    """SIGKILL in the middle and a start by hand: nothing lost, nothing twice, byte for byte; with many segments too."""
    collector = CollectorProcess(tmp_path / "out", journal={"segment_size": segment_size})
    made: list[Peer] = []

    def peers() -> Peer:
        made.append(Peer(collector))
        return made[-1]

    ranks = [training(rank, 2, steps=range(1, 30)) for rank in range(2)]
    for one in ranks:
        peer = peers()
        peer.welcome(one.hello)
        peer.say(Data(one.items[:61]))
        peer.acknowledged(61)
    log = collector.output / "merged.log"
    # An acknowledgement promises the journal, not the text.
    wait_for(lambda: log.exists() and log.stat().st_size > 100)
    collector.kill()
    # What a kill in the middle of a write leaves: a torn line.
    os.truncate(log, log.stat().st_size - 7)
    collector.start()
    for one in ranks:
        peer = peers()
        assert peer.welcome(one.hello).acked == 61
        # The agent cannot know what was stored, and may send again from any earlier point.
        peer.say(Data(one.items[50:]))
        peer.acknowledged(len(one.items))
    status, _ = collector.ended()
    assert status == 0
    check_logs(collector.output, 2)

    undisturbed = CollectorProcess(collector.output.parent / "undisturbed")
    for one in ranks:
        peer = Peer(undisturbed)
        peer.welcome(one.hello)
        peer.say(whole(one))
        peer.acknowledged(len(one.items))
        peer.close()
    undisturbed.ends(0)
    assert log.read_bytes() == (undisturbed.output / "merged.log").read_bytes()
    assert (len(list((collector.output / ".rankd" / "journal").iterdir())) > 1) == (segment_size == 4_096)
    for peer in made:
        peer.close()


@pytest.mark.slow
def test_a_killed_collector_is_where_it_was(tmp_path: Path) -> None:
    """Ranks with a fixed endpoint look there. Where another job has the port now: elsewhere, with a warning."""
    collector = CollectorProcess(tmp_path / "out", endpoint=f"tcp://127.0.0.1:{free_port()}")
    was = str(collector.connection()["endpoint"])
    collector.kill()
    collector.settings = json.dumps({"output": str(collector.output), "beat_interval": 0.2})
    collector.start()
    assert collector.connection()["endpoint"] == was
    assert "WARNING" not in collector.said()
    collector.kill()
    with socket.create_server(("127.0.0.1", int(was.rpartition(":")[2]))):
        collector.start()
        now = str(collector.connection()["endpoint"])
        assert now != was
        assert f"was at {was}, where this one cannot listen; it is at {now}: ranks with a fixed" in collector.said()
    collector.process.terminate()
    collector.ends(128 + signal.SIGTERM)


def test_a_killed_collector_has_the_key_that_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started again in a shell without RANKD_KEY: the ranks that live on still come in with theirs."""
    key = RunKey.fresh().reveal()
    monkeypatch.setenv("RANKD_KEY", key)
    collector = CollectorProcess(tmp_path / "out")
    was = collector.connection()
    collector.kill()
    monkeypatch.delenv("RANKD_KEY")
    collector.start()
    now = collector.connection()
    assert (now["endpoint"], now["key"]) == (was["endpoint"], key)
    monkeypatch.setenv("RANKD_KEY", key)
    with Asker.at(str(now["endpoint"])) as asker:
        assert asker.ask("sample.status")["facts"] == {}
    collector.kill()


@pytest.mark.parametrize("change", ["another run", "others may write it", "a link"])
def test_only_its_own_connection_file_says_where_to_listen(tmp_path: Path, change: str) -> None:
    """What another run or somebody else may have left is not followed."""
    place = Place(tmp_path / "out")
    run, path = place.run_id(), place.inner / "connection.json"
    assert place.former(run) is None
    place.publish("tcp://127.0.0.1:7801", run)
    assert (found := place.former(run)) is not None
    assert found.endpoint == "tcp://127.0.0.1:7801"
    if change == "another run":
        place.publish("tcp://127.0.0.1:7801", "0" * 16)
    elif change == "others may write it":
        path.chmod(0o666)
    else:
        path.symlink_to(path.rename(tmp_path / "elsewhere"))
    assert place.former(run) is None
    place.withdraw()


def test_a_restarted_collector_asks_who_a_peer_is(collector: CollectorProcess, peers: Callable[[], Peer]) -> None:
    """Data and beats of a peer that has not said hello on this connection are answered with Who."""
    peer = peers()
    peer.say(Beat(1, 1, 0))
    assert peer.hear() == Who()
    peer.say(whole(training(0, 1)))
    assert peer.hear() == Who()


def test_garbage_is_refused_and_the_others_go_on(collector: CollectorProcess, peers: Callable[[], Peer]) -> None:
    """COMPLAINTS 26: a pickle, random bytes, several parts, a giant, an old version: each refused with a reason."""
    honest, hostile = peers(), peers()
    one = training(0, 1)
    honest.welcome(one.hello)
    for parts in (
        (pickle.dumps({"a": 1}),),
        (b"\xc1" + os.urandom(100),),
        (b"a", b"b"),
        (b"\xc6\xff\xff\xff\xff",),
        (b"",),
    ):
        hostile.say_raw(*parts)
        answer = hostile.hear()
        assert isinstance(answer, Refused)
        assert answer.reason
    hostile.say_raw(b"\x93\x63\x01\x02")
    answer = hostile.hear()
    assert isinstance(answer, Refused)
    assert "version 99" in answer.reason
    honest.say(whole(one))
    honest.acknowledged(len(one.items))
    status, said = collector.ended()
    assert status == 0
    assert "5 × protocol" in said
    assert "1 × version" in said
    check_logs(collector.output, 1)


def test_a_peer_of_another_run_is_refused(collector: CollectorProcess, peers: Callable[[], Peer]) -> None:
    """COMPLAINTS 12: two jobs, one port: never each other's data."""
    import dataclasses

    peer = peers()
    peer.say(dataclasses.replace(hello(0, 1), run="another"))
    answer = peer.hear()
    assert isinstance(answer, Refused)
    assert "not of run another" in answer.reason


def test_a_second_live_process_of_a_rank_waits_until_the_first_is_silent(
    collector: CollectorProcess, peers: Callable[[], Peer]
) -> None:
    """The newcomer is told who holds the rank; once that one is silent it is let in (COMPLAINTS 8)."""
    first, second = peers(), peers()
    first.welcome(hello(0, 1))
    second.say(hello(0, 1, process=2))
    answer = second.hear()
    assert isinstance(answer, Refused)
    assert answer.retry
    assert "process 1000 on node0" in answer.reason

    def let_in() -> bool:
        second.say(hello(0, 1, process=2))
        return isinstance(second.hear(), Welcome)

    wait_for(let_in)
    first.say(hello(0, 1))
    answer = first.hear()
    assert isinstance(answer, Refused)
    assert not answer.retry


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_and_the_status_says_so(tmp_path: Path) -> None:
    """Rank 1 of 2 is never heard: the log goes on after lost_after, and the collector ends with 1 after linger."""
    collector = CollectorProcess(tmp_path / "out", lost_after=0.6, linger=SOON)
    peer = Peer(collector)
    one = training(0, 2)
    peer.welcome(one.hello)
    peer.say(whole(one))
    peer.acknowledged(len(one.items))
    status, said = collector.ended()
    peer.close()
    assert status == 1
    assert "no goodbye from rank 1" in said
    lines = (tmp_path / "out" / "merged.log").read_bytes().splitlines(keepends=True)
    comments = [c for c in parse(lines) if isinstance(c, Comment)]
    assert [c.kind for c in comments if c.rank is None] == ["rank_lost", "attempt", "missing", "end"]
    assert "rank 1: silent for" in next(c.text for c in comments if c.kind == "rank_lost")


def test_two_collectors_do_not_share_a_directory(collector: CollectorProcess) -> None:
    """COMPLAINTS 29: the second one says who holds it, and the first is unharmed."""
    again = subprocess.run(
        [sys.executable, "-m", "rankd.collector", "collect", str(collector.output)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert again.returncode == 2
    assert f"process {collector.process.pid}" in again.stderr
    assert collector.process.poll() is None


@pytest.mark.slow
def test_a_taken_port_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    """COMPLAINTS 12: an explicit endpoint that is in use."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        endpoint = f"tcp://127.0.0.1:{port}"
        done = subprocess.run(
            [sys.executable, "-m", "rankd.collector", "collect", str(tmp_path), "--endpoint", endpoint],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert done.returncode == 2
    assert f"cannot listen on {endpoint}" in done.stderr
    assert "rankd.endpoint" in done.stderr


def test_sigterm_ends_it_and_it_can_be_started_again(collector: CollectorProcess, peers: Callable[[], Peer]) -> None:
    """A stopped collector has its status, and the next one finds everything."""
    one = training(0, 1)
    peer = peers()
    peer.welcome(one.hello)
    peer.say(Data(one.items[:3]))
    peer.acknowledged(3)
    collector.process.send_signal(signal.SIGTERM)
    assert collector.ended()[0] == 128 + signal.SIGTERM
    collector.start()
    assert peers().welcome(one.hello).acked == 3


def test_without_ranks_it_ends_after_its_patience(tmp_path: Path) -> None:
    """Started by a rank 0 that died at once, it does not stay for ever."""
    collector = CollectorProcess(tmp_path / "out", "--patience", "0.3")
    status, said = collector.ended()
    assert status == 1
    assert "no rank has said hello" in said


def test_what_the_journal_has_lost_is_one_warning(tmp_path: Path) -> None:
    """Ranks that live on were told more than it has: the collector's own log names them and counts the records."""
    collector = CollectorProcess(tmp_path / "out")
    ranks = [training(rank, 2) for rank in range(2)]
    made = [Peer(collector) for _ in ranks]
    for one, peer in zip(ranks, made, strict=True):
        peer.welcome(one.hello)
        # The first of them defines the names.
        peer.say(Data((one.items[0], encode_item(Hole(3, 2, 10)), *one.items[3:])))
        peer.acknowledged(len(one.items))
        peer.close()
    status, said = collector.ended()
    assert status == 0, said
    (told,) = [line for line in said.splitlines() if "WARNING" in line]
    assert "the journal has lost 20 records of ranks 0-1 that had been acknowledged" in told


@pytest.mark.slow
@pytest.mark.parametrize(("options", "told"), [((), "--patience SECONDS"), (("--patience", "0.3"), "for 0.3 s")])
def test_of_a_run_that_has_ended_it_says_what_it_waits_for(tmp_path: Path, options: tuple[str, ...], told: str) -> None:
    """Somebody starts it by hand although nothing is missing: it says so, and what ends the waiting does."""
    before = CollectorProcess(tmp_path / "out")
    assert "has ended" not in before.said()
    one, peer = training(0, 1), Peer(before)
    peer.welcome(one.hello)
    peer.say(whole(one))
    before.ends(0)
    peer.close()
    after = CollectorProcess(tmp_path / "out", *options)
    wait_for(lambda: "this run has ended; waiting for the job to be started again" in after.said())
    assert told in after.said()
    if not options:
        after.process.terminate()
    after.ends(1 if options else 128 + signal.SIGTERM)


def test_a_wrong_section_is_one_error_and_nothing_is_started(tmp_path: Path) -> None:
    """An unknown key names its path and the nearest one; no directory is made."""
    yaml = tmp_path / "train.yaml"
    yaml.write_text(f"rankd:\n  output: {tmp_path / 'out'}\n  lost_afer: 3\n")
    done = subprocess.run(
        [sys.executable, "-m", "rankd.collector", "collect", "--config", str(yaml)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 2
    assert "lost_afer" in done.stderr
    assert "lost_after" in done.stderr
    assert not (tmp_path / "out").exists()
