"""The state of a run as one object, and as one screen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankd.collector.entries import Lost
from rankd.collector.protocol.records import Frame, Position, RankBlock
from rankd.collector.protocol.wire import Beat, Data
from rankd.collector.status import STATUS, Beats, Latest, status_of
from rankd.collector.statusview import screen

from ..support import PATIENCE, CollectorProcess, Peer, wait_for
from .streams import Core, training

ABOUT = {
    "pid": 7,
    "host": "node0",
    "beat_interval": 1.0,
    "records_per_second": 5.0,
    "backlog": 0,
    "refused": {},
    "alive": True,
}


def status(ranks: int = 3, **beats: Beat) -> dict[str, Any]:
    """The status of a run of which rank 0 is a step ahead and the last rank is lost."""
    core, latest, heard = Core(), Latest(), Beats()
    for rank in range(ranks):
        one = training(rank, ranks, steps=(1, 2, 3), goodbye=None)
        core.open(one)
        latest.write(core.deliver(one, 0, None if rank == 0 else 7))
    latest.write(core.apply(Lost(ranks - 1, 61.0)))
    heard.heard(0, Beat(3, 2, 5, {"process_cpu_percent": float("nan"), "process_rss_bytes": 2.0**30}), 9.0)
    return status_of(core.run, latest, heard, now=10.0, clock=1e9, collector=ABOUT)


def test_the_status_has_the_run_and_each_rank() -> None:
    """Front, lag, latest values, beats and accounts; strict JSON also where a figure is not finite."""
    found = json.loads(json.dumps(status(), allow_nan=False))
    assert (found["attempt"], found["step"], found["world_size"], found["ended"]) == (1, 3, 3, False)
    first, second, third = found["ranks"]
    assert (first["state"], first["step"], first["lag"], first["held"], first["beat_age"]) == ("live", 3, 0, 5, 1.0)
    assert first["host_figures"] == {"process_cpu_percent": "NaN", "process_rss_bytes": 2.0**30}
    assert (second["lag"], second["beat_age"]) == (1, None)
    assert third["state"] == "lost"
    assert first["received"] >= first["written"] > 0


def test_pace_and_expected_end() -> None:
    """Seconds a step come from the ranks' clocks over the last steps; the end from the length of the training."""
    latest = Latest()
    for step in range(1, 50):
        latest.write([RankBlock(0, Position(1, step), (Frame.scalar("loss", 1.0),), total_steps=100, time=2.5 * step)])
    assert latest.seconds_per_step() == 2.5
    latest.write([RankBlock(0, Position(2, 10), (Frame.scalar("loss", 1.0),), time=500.0)])
    assert latest.seconds_per_step() is None
    assert latest.total_steps == 100


def test_eight_ranks_are_a_table() -> None:
    """A line for each rank, and the collector's above them."""
    lines = screen(status(8), 1e9)
    assert lines[0].startswith("attempt 1, step 3/?, 8 ranks")
    assert "process 7 on node0" in lines[1]
    assert len(lines) == 3 + 1 + 8
    assert lines[-1].split()[:2] == ["7", "lost"]


def test_a_thousand_ranks_are_a_map_with_the_worst_named() -> None:
    """A character a rank, 64 in a line; the ten worst are named, those that are gone or not finite first."""
    found = status(8)
    ranks = [{**found["ranks"][1], "rank": rank, "lag": rank % 3} for rank in range(1024)]
    ranks[700]["state"] = "lost"
    ranks[5]["loss"] = "NaN"
    ranks[6] |= {"state": "finished", "reason": "RuntimeError"}
    found["ranks"] = ranks
    lines = screen(found, 1e9)
    text = "\n".join(lines)
    assert len(lines) < 40
    assert max(map(len, lines)) < 160
    row = next(line for line in lines if line.startswith("   640  "))
    assert row[8 + 60] == "L"
    assert [line.split()[0] for line in lines[-10:]][:3] in (["6", "700", "5"], ["700", "6", "5"])
    assert "1022 live" in text


def test_ranks_of_whom_nothing_is_wrong_are_not_called_the_worst() -> None:
    """A map of ranks that are all at the front names none; one that has been silent for long is named."""
    found = status(8)
    ranks = [{**found["ranks"][1], "rank": rank, "lag": 0} for rank in range(64)]
    lines = screen({**found, "ranks": ranks}, 1e9)
    assert "no rank is gone, behind, silent, not finite or dropping" in lines[-1]
    assert "steps behind" not in "\n".join(lines)
    ranks[40]["beat_age"] = 20.0
    lines = screen({**found, "ranks": ranks}, 1e9)
    assert lines[-3].startswith("the worst 1 of 1 that are gone")
    assert lines[-1].split()[0] == "40"


def test_a_narrow_terminal_has_fewer_columns() -> None:
    """What is least needed goes first, so that no line is wrapped; rank, step, lag and drops stay."""
    for width in (100, 80, 60):
        lines = screen(status(8), 1e9, width)[3:]
        assert max(map(len, lines)) <= width
        assert {"rank", "state", "step", "lag", "loss", "beat", "dropped"} <= set(lines[0].split())
    assert "cpu" not in lines[0]


def test_before_anybody_came_and_after_the_end() -> None:
    """No empty table, and no pace or expected end where there is none."""
    found = {**status(), "seconds_per_step": 2.0, "expected_end": 1e9, "total_steps": 3}
    assert "no rank has said hello yet" in screen({**found, "ranks": []}, 1e9)[-1]
    head, about, *_ = screen({**found, "ended": True}, 1e9)
    assert head.endswith(", ended")
    assert "records/s" not in about
    assert screen(found, 1e9)[0].endswith("2 s/step")  # all steps are done
    assert "ends" in screen({**found, "total_steps": 4}, 1e9)[0]
    gone = {**found, "collector": {**ABOUT, "alive": False}, "total_steps": 4}
    assert "ends" not in screen(gone, 1e9)[0]


def test_the_loss_is_the_same_metric_for_all_ranks() -> None:
    """A rank in the middle of a step is not compared with the reduced loss of one at its end; a rank without
    local_loss has what it has."""
    latest = Latest()

    def take(rank: int, attempt: int, micro_step: int | None, metric: str, value: float) -> float:
        frame = Frame.scalar(metric, value)
        latest.write([RankBlock(rank, Position(attempt, 1, micro_step), (frame,), time=1.0)])
        return latest.losses[rank]

    assert take(0, 1, None, "loss", 5.0) == 5.0
    assert take(0, 1, 1, "local_loss", 1.0) == 1.0
    assert take(0, 1, None, "device_loss", 2.0) == 1.0
    assert take(0, 1, 2, "local_loss", 3.0) == 3.0
    assert take(0, 2, None, "device_loss", 4.0) == 4.0


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    """`rankd status --json | head -c 1` of many ranks: without a word, and not with status 0."""
    (tmp_path / ".rankd").mkdir()
    found = status(8)
    found["ranks"] = [{**found["ranks"][1], "rank": rank} for rank in range(1024)]
    (tmp_path / STATUS).write_text(json.dumps(found))
    command = [sys.executable, "-m", "rankd.collector", "status", str(tmp_path), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(PATIENCE) == 128 + signal.SIGPIPE
    assert process.stderr.read() == b""
    process.stderr.close()


def test_any_host_name_whatever_the_encoding_is(tmp_path: Path) -> None:
    """COMPLAINTS 28: what the terminal cannot show is escaped."""
    (tmp_path / ".rankd").mkdir()
    found = status(2)
    found["ranks"][0]["host"] = "节点"
    (tmp_path / STATUS).write_text(json.dumps(found))
    command = [sys.executable, "-m", "rankd.collector", "status", str(tmp_path)]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE, env=environment)
    assert rb"\u8282\u70b9" in done.stdout
    assert done.stderr == b""


def test_a_collector_that_is_gone_is_said() -> None:
    """A status that nobody renews says since when."""
    found = status()
    found["collector"] = {**ABOUT, "alive": False, "refused": {"protocol": 2}}
    lines = screen(found, 1e9 + 90, output=Path("/data/a run"))
    assert lines[1] == "collector: gone, and all below is as it was 90 s ago"
    # To be copied as it is.
    assert "`rankd collect '/data/a run'`, with the same --config and --endpoint" in lines[2]
    assert lines[3] == "refused: 2 × protocol"


def show(output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankd.collector", "status", str(output), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.slow
def test_of_a_real_run(tmp_path: Path) -> None:
    """A collector leaves its status beside the logs, and a last one when it ends; the command reads both."""
    collector = CollectorProcess(tmp_path / "out")
    peer = Peer(collector)
    one = training(0, 1, steps=(1, 2))
    peer.welcome(one.hello)
    peer.say(Data(one.items[:-1]))
    peer.say(Beat(2, 0, 3, {"process_rss_bytes": 2.0**20}))

    def seen() -> bool:
        text = (tmp_path / "out" / STATUS).read_text() if (tmp_path / "out" / STATUS).exists() else "{}"
        ranks = json.loads(text).get("ranks") or [{}]
        return bool(ranks[0].get("held") == 3 and ranks[0].get("step") == 2)

    wait_for(seen)
    live = show(tmp_path / "out", "--json")
    found = json.loads(live.stdout)
    assert (live.returncode, found["collector"]["alive"], found["ranks"][0]["loss"]) == (0, True, 0.22)
    peer.say(Data(one.items[-1:]))
    collector.ends(0)
    peer.close()
    ended = show(tmp_path / "out", "--watch")
    assert ended.returncode == 0
    assert "ended" in ended.stdout.splitlines()[0]
    assert "finished" in ended.stdout


@pytest.mark.parametrize("text", [None, "{", '{"version": 9}'])
def test_without_a_status_it_says_so(tmp_path: Path, text: str | None) -> None:
    """A wrong directory, a broken file and another version are errors for a person."""
    if text is not None:
        (tmp_path / ".rankd").mkdir()
        (tmp_path / STATUS).write_text(text)
    done = show(tmp_path)
    assert done.returncode == 2
    assert STATUS in done.stderr


def test_what_ranks_say_does_not_steer_the_terminal_nor_the_clock() -> None:
    """Hosts as escapes; a pace that can be none is none, and an end in no calendar is not told."""
    found = status(1)
    found["ranks"][0]["host"] = "\x1b[2J"
    assert "\\u001b[2J" in "".join(screen(found, 1e9))
    for ends in (1e-9, 1e300):
        latest = Latest()
        latest.write([RankBlock(0, Position(1, step), (), time=ends * step) for step in (1, 2)])
        assert latest.seconds_per_step() is None
    latest = Latest()
    latest.write([RankBlock(0, Position(1, s), (), total_steps=2**62, time=2.5 * s) for s in (1, 2)])
    assert status_of(Core().run, latest, Beats(), now=0.0, clock=1e9, collector=ABOUT)["expected_end"] is None
