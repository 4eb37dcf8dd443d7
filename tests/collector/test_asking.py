"""Questions to a running collector, and what they change in ranks that train: real processes and sockets."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import (
    CollectorProcess,
    Peer,
    comments,
    contents,
    finish,
    read_until,
    script,
    verified,
    wait_for,
)

from rankd.collector.asking import Asker, ask
from rankd.collector.entries import Decided, encode_entry
from rankd.collector.journal import Journal
from rankd.collector.protocol.about import CONFIGURATION, pack_text
from rankd.collector.protocol.checks import MAX_STEP
from rankd.collector.protocol.errors import RankdError
from rankd.collector.protocol.keys import RunKey
from rankd.collector.protocol.messages import Answer, Ask
from rankd.collector.protocol.records import Record
from rankd.collector.protocol.wire import Block, Data, Goodbye, Report, encode_item
from rankd.collector.statusview import read_status

from .streams import training

# Trains until the file `stop` is there, and two steps more.
UNTIL_STOPPED = """
    from itertools import count
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        left = 3
        for step in count(1):
            with a.step(step):
                a.micro_step(loss=float(step))
                a.end_step(loss=float(step), lr=1e-3)
            time.sleep(0.01)
            if step == 5:
                print("there", flush=True)
            left -= os.path.exists("stop")
            if not left:
                break
"""
SETTINGS = """
monitor_config: {monitor_on: True, interval: 20}
monitor:
  train_state: {local_loss: True}
rankd: {output: out, start_collector: False, beat_interval: 0.2}
"""


def rankd(tmp_path: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "rankd.collector", *arguments],
        cwd=tmp_path,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
def test_sample_changes_all_ranks_at_one_step_and_back(tmp_path: Path) -> None:
    """`rankd sample` while three ranks train, through a SIGKILL of the collector: what was written says when."""
    collector = CollectorProcess(tmp_path / "out")
    ranks = [script(tmp_path, UNTIL_STOPPED, yaml=SETTINGS, RANKD_RANK=str(r), RANKD_WORLD_SIZE="3") for r in range(3)]
    for process in ranks:
        read_until(process, "there")
    done = rankd(tmp_path, "sample", "out", "--interval", "3", "--for-steps", "30")
    assert done.returncode == 0, done.stderr
    assert "interval 3; confirmed by ranks 0-2" in done.stdout
    (facts,) = [ask(tmp_path / "out", "sample.status")["facts"]]
    first, last = facts["first"], facts["last"]
    assert last == first + 29
    collector.kill()
    collector.start()
    assert ask(tmp_path / "out", "sample.status")["facts"] == facts
    wait_for(lambda: f'"step": {(last // 20 + 2) * 20} }}' in (tmp_path / "out" / "merged.log").read_text())
    wait_for(lambda: rankd(tmp_path, "sample", "out", "--interval", "1").returncode == 0)
    forever = ask(tmp_path / "out", "sample.status")["facts"]["first"]
    wait_for(lambda: f'"step": {forever + 1} }}' in (tmp_path / "out" / "merged.log").read_text())
    (tmp_path / "stop").touch()
    assert [finish(process)[0] for process in ranks] == [0, 0, 0]
    assert collector.ended()[0] == 0
    content = contents(tmp_path)
    end = max(r.position.step for r in content if isinstance(r, Record))
    inside = {step for step in range(first, last + 1) if step % 3 == 0}
    outside = {step for step in range(20, end + 1, 20) if not first <= step <= last}
    wanted = inside | outside | set(range(forever, end + 1))
    for rank in range(3):
        own = {r.position.step for r in content if isinstance(r, Record) and r.rank == rank and r.metric == "lr"}
        # Ranks may end some steps apart.
        shared = {step for step in wanted if step <= max(own)}
        assert own == shared
    assert comments(content)["sample"][0] == f"steps {first}-{last}: interval 3"
    assert done.stdout.startswith(f"{comments(content)['sample'][0]}; confirmed by")


@pytest.mark.slow
def test_a_question_is_answered_or_says_why_not(tmp_path: Path) -> None:
    """No collector, another key, no rank, no such question: each says what is wrong; a command line ends with 2."""
    with pytest.raises(RankdError, match="no collector runs for"):
        ask(tmp_path / "out", "sample")
    collector = CollectorProcess(tmp_path / "out")
    assert ask(tmp_path / "out", "sample.status") == {"facts": {}, "confirmed": [], "waiting": []}
    with pytest.raises(RankdError, match="no rank is connected"):
        ask(tmp_path / "out", "sample", {"interval": 1})
    with pytest.raises(RankdError, match=r"knows no 'profit'; it knows .*sample"):
        ask(tmp_path / "out", "profit")
    for wrong in (["--interval", "0"], [], ["--reset", "--interval", "1"], ["--for-steps", "3"]):
        done = rankd(tmp_path, "sample", "out", *wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("rankd sample: ")
    collector.kill()


def test_nothing_is_done_without_the_key(tmp_path: Path) -> None:
    """On loopback, where training needs no key, questions need it all the same; the refusal is counted."""
    collector = CollectorProcess(tmp_path / "out")
    peer = Peer(collector)
    for number, proof in itertools.product(range(3), [b"", b"x" * 32]):
        peer.say(Ask(number, "sample.status", {}, proof))
        answer = peer.hear()
        assert isinstance(answer, Answer)
        assert (answer.number, answer.fine) == (number, False)
        assert b"needs the run's key" in answer.content
    peer.say(Ask.proved(RunKey.fresh(), 9, "sample.status", {}))
    assert isinstance(answer := peer.hear(), Answer)
    assert not answer.fine
    assert "without the key" in collector.said()
    endpoint = str(collector.connection()["endpoint"])
    with pytest.raises(RankdError, match="set RANKD_KEY"), Asker.at(endpoint):
        pass
    peer.close()
    collector.kill()


def test_the_collector_lives_with_nonsense_from_key_holders(tmp_path: Path) -> None:
    """An agent's messages on a command line's connection, and the other way round, are refused and cost nothing."""
    collector = CollectorProcess(tmp_path / "out")
    with Asker.of(tmp_path / "out") as asker:
        for facts in ({"x" * 100: "y" * 16_000}, {"interval": 2**62}, {"interval": "\x1b]0;x\x07"}):
            with pytest.raises(RankdError):
                asker.ask("sample", facts)
        assert asker.ask("sample.status")["facts"] == {}
    assert collector.process.poll() is None
    collector.kill()


@pytest.mark.slow
def test_what_ranks_and_askers_say_never_ends_the_collector(tmp_path: Path) -> None:
    """A configuration nested without end, clocks of no calendar, steps beyond the last one; not after a restart."""
    collector = CollectorProcess(tmp_path / "out")
    odd = training(0, 1, goodbye=None)
    deep = dataclasses.replace(odd.hello, total_steps=1_000_000, about=pack_text(CONFIGURATION, "[" * 30_000))
    times = [0.0, 1e-300, -1.7e308, 1e308, 1.7e308]
    blocks = [encode_item(Block(len(odd.items) + n, 2 + n, None, True, t)) for n, t in enumerate(times, 1)]
    peer = Peer(collector)
    peer.welcome(deep)
    peer.say(Data((*odd.items, *blocks)))
    peer.acknowledged(len(odd.items) + len(blocks))
    peer.say(Report("profile", {"session": "p1", "state": "x" * 16_000, "serial": 1}))
    output = collector.output
    with pytest.raises(RankdError, match="the last there is"):
        ask(output, "sample", {"interval": 1, "for_steps": MAX_STEP})
    wait_for(lambda: read_status(output)["step"] == 7)
    # As an older version has journalled it.
    collector.kill()
    peer.close()
    journal = Journal(output / ".rankd" / "journal")
    list(journal.replay())
    facts = {"number": 1, "first": 9, "last": 2**63 + 8, "interval": 1}
    journal.append([encode_entry(Decided("sample", "newest", facts, "from step 9 on"))])
    journal.close()
    collector.process = collector.start()
    again = Peer(collector)
    again.welcome(deep)
    assert ask(output, "sample", {"interval": 1, "for_steps": 3})["facts"]["number"] == 2
    goodbye = Goodbye(len(odd.items) + len(blocks) + 1, "done", 20, {}, 0.0)
    again.say(Data((encode_item(goodbye),)))
    assert collector.ended()[0] == 0
    again.close()
    verified(output)
