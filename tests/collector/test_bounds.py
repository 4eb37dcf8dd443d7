"""Each bound on what peers may cost, reached by a scripted peer where the bounds are low: told, counted, named.

The honest ranks' logs are those of a collector that nobody has disturbed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support import CollectorProcess, Peer, check_logs, verified, wait_for

from rankd.collector.protocol.records import Comment, Frame, NameTable
from rankd.collector.protocol.speclog import parse
from rankd.collector.protocol.wire import Block, Data, Message, Refused, Table, Welcome, encode_item

from .streams import Training, hello, training

pytestmark = pytest.mark.slow

MOST_SESSIONS, MAX_SESSIONS, MAX_ATTEMPTS, MAX_HELD, MAX_TABLES = 4, 10, 3, 30, 3
LOWERED = f"""
import sys
from rankd.collector import connections, intake, run
from rankd.collector.protocol import tables
connections.MOST_SESSIONS, intake.MAX_SESSIONS, intake.MAX_ATTEMPTS = {MOST_SESSIONS}, {MAX_SESSIONS}, {MAX_ATTEMPTS}
run.MAX_HELD_ITEMS, tables.MAX_TABLES = {MAX_HELD}, {MAX_TABLES}
from rankd.collector.cli import main
sys.exit(main())
"""


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[CollectorProcess]:
    """A collector with low bounds, gone after the test."""
    it = CollectorProcess(tmp_path / "out", command=("-c", LOWERED))
    yield it
    if it.process.poll() is None:
        it.kill()


def refusals(collector: CollectorProcess) -> dict[str, int]:
    """What `rankd status` shows of them."""
    counts: dict[str, int] = json.loads((collector.output / ".rankd" / "status.json").read_text())["collector"][
        "refused"
    ]
    return counts


def refused(answer: Message) -> str:
    """The reason of a refusal."""
    assert isinstance(answer, Refused), answer
    return answer.reason


def undisturbed(tmp_path: Path, ranks: list[Training]) -> bytes:
    """The merged log of these ranks alone."""
    collector = CollectorProcess(tmp_path / "undisturbed")
    for one in ranks:
        peer = Peer(collector)
        peer.welcome(one.hello)
        peer.say(Data(one.items))
        peer.acknowledged(len(one.items))
        peer.close()
    collector.ends()
    return (collector.output / "merged.log").read_bytes()


def test_processes_and_names(tmp_path: Path, collector: CollectorProcess, peers: Callable[[], Peer]) -> None:
    """Processes on one connection, processes in all, name tables of one process; the ranks that are there go on."""
    ranks = [training(rank, 2) for rank in range(2)]
    honest = [peers() for _ in ranks]
    for peer, one in zip(honest, ranks, strict=True):
        peer.welcome(one.hello)
        peer.say(Data(one.items[:3]))
        peer.acknowledged(3)
    strangers = iter([dataclasses.replace(hello(0, 2, process=n), recovered=True) for n in range(2, 250)])

    many_names = peers()
    many_names.welcome(next(strangers))
    tables = [Table(n, n, NameTable((f"name {n}",))) for n in range(1, MAX_TABLES + 2)]
    many_names.say(Data(tuple(map(encode_item, tables))))
    assert f"more than {MAX_TABLES} name tables" in refused(many_names.hear())

    one_connection = peers()
    for _ in range(MOST_SESSIONS):
        one_connection.welcome(next(strangers))
    one_connection.say(next(strangers))
    assert "too many processes on one connection" in refused(one_connection.hear())

    opened = len(ranks) + 1 + MOST_SESSIONS
    for _ in range(MAX_SESSIONS - opened):
        peers().welcome(next(strangers))
    last = peers()
    last.say(next(strangers))
    assert f"this run has had {MAX_SESSIONS} processes" in refused(last.hear())

    for peer, one in zip(honest, ranks, strict=True):
        peer.say(Data(one.items[3:]))
        peer.acknowledged(len(one.items))
    collector.ends()
    assert refusals(collector) == {"limit": 3}
    assert "refused: 3 × limit" in collector.said()
    assert (collector.output / "merged.log").read_bytes() == undisturbed(tmp_path, ranks)
    check_logs(collector.output, 2)


def test_blocks_that_wait_for_others(tmp_path: Path, collector: CollectorProcess, peers: Callable[[], Peer]) -> None:
    """A rank that is far ahead has to wait, and is told; once the others have come, it goes on where it was."""
    ranks = [training(rank, 2, steps=range(1, 21)) for rank in range(2)]
    slow, fast = peers(), peers()
    slow.welcome(ranks[0].hello)
    acked = fast.welcome(ranks[1].hello).acked
    assert len(ranks[1].items) > MAX_HELD + 10
    while True:
        fast.say(Data(ranks[1].items[acked : acked + 5]))
        answer = fast.hear()
        if isinstance(answer, Refused):
            break
        acked += 5
    assert answer.retry
    assert "rank 1 is too far ahead" in answer.reason
    assert MAX_HELD <= acked <= MAX_HELD + 5
    wait_for(lambda: refusals(collector) == {"too far ahead": 1})

    slow.say(Data(ranks[0].items))
    slow.acknowledged(len(ranks[0].items))
    fast.say(ranks[1].hello)
    assert fast.hear() == Welcome(str(collector.connection()["run"]), acked, 0.2)
    fast.say(Data(ranks[1].items[acked:]))
    fast.acknowledged(len(ranks[1].items))
    collector.ends()
    assert (collector.output / "merged.log").read_bytes() == undisturbed(tmp_path, ranks)


def test_attempts(collector: CollectorProcess, peers: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that goes back again and again stays in the last attempt; what is out of order there is marked as late."""
    where = [step for _ in range(MAX_ATTEMPTS + 2) for step in (1, 2)]
    frames = (Frame.scalar("loss", 0.5),)
    items = [encode_item(Block(seq, step, None, True, 0.0, frames)) for seq, step in enumerate(where, 1)]
    peer = peers()
    peer.welcome(hello(0, 1))
    for seq, item in enumerate(items, 1):
        peer.say(Data((item,)))
        peer.acknowledged(seq)
    log = collector.output / "merged.log"
    wait_for(lambda: log.exists() and log.read_bytes().count(b"# late") == 2 * 2)
    collector.process.terminate()
    collector.ended()
    content = list(parse(log.read_bytes().splitlines(keepends=True)))
    attempts = [c.text.split()[0] for c in content if isinstance(c, Comment) and c.kind == "attempt" and c.rank is None]
    assert attempts == [str(n) for n in range(1, MAX_ATTEMPTS + 1)]
    monkeypatch.setattr("rankd.collector.intake.MAX_ATTEMPTS", MAX_ATTEMPTS)
    verified(collector.output)
