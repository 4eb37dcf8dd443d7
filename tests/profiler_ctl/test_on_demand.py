"""Profiling while three ranks train: real processes and sockets, the command line, and a collector that is killed.

The profiler is a double of MindSpore's (`double/`); the real one is in tests/e2e/test_profile_msrun.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import (
    CollectorProcess,
    check_logs,
    comments,
    contents,
    finish,
    read_until,
    script,
    verified,
    wait_for,
)

from rankd.collector.cli import main
from rankd.collector.protocol.errors import RankdError
from rankd.profiler_ctl.requests import sessions, start, stop, wait

pytestmark = pytest.mark.slow

TRAIN = """
    from itertools import count
    with Agent.from_yaml(os.environ["TRAIN"], model=Model(), about={"pp": os.environ["RANKD_RANK"]}) as a:
        while not a.connected:
            time.sleep(0.01)
        print("connected", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.01)
        for step in count(1):
            with a.step(step):
                a.micro_step(loss=float(step))
                time.sleep(0.01)
                a.end_step(loss=float(step))
            if step == 5:
                print("there", flush=True)
            if os.path.exists("stop"):
                break
    print("imported" if "rankd.profiler_ctl.mindspore_profiler" in sys.modules else "never imported", flush=True)
"""
CONFIG = """
monitor:
  train_state: {{local_loss: True}}
profiler: {{enable_profiling: True, start_step: 20, end_step: {end}, profiler_rank: [1], output_path: static}}
rankd: {{output: out, start_collector: False, beat_interval: 0.2}}
"""
DOUBLE = Path(__file__).parent / "double"


def ranks(folder: Path) -> list[subprocess.Popen[str]]:
    """Three; rank 1 has read another file."""
    (folder / "one.yaml").write_text(CONFIG.format(end=21))
    (folder / "other.yaml").write_text(CONFIG.format(end=29))

    def rank(number: int, config: str) -> subprocess.Popen[str]:
        path = str(DOUBLE)
        return script(folder, TRAIN, RANKD_RANK=str(number), RANKD_WORLD_SIZE="3", PYTHONPATH=path, TRAIN=config)

    return [rank(0, "one.yaml"), rank(1, "other.yaml"), rank(2, "one.yaml")]


def session(folder: Path, name: str) -> dict[str, Any]:
    found = {each["name"]: each for each in sessions(folder / "out")}
    return found.get(name, {"parts": [{}]})


def profiled(folder: Path, under: str) -> dict[str, list[int]]:
    """Of each rank below a folder, the number of steps in each profile's trace."""
    found: dict[str, list[int]] = {}
    for trace in sorted((folder / under).rglob("trace_view.json")):
        rank = trace.relative_to(folder / under).parts[0]
        found.setdefault(rank, []).append(len(json.loads(trace.read_text())))
    return found


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """The ranks; where the test fails they would train for ever."""
    started = ranks(tmp_path)
    yield started
    for process in started:
        process.kill()
        process.communicate()


def test_sessions_while_training_through_a_killed_collector(
    tmp_path: Path, processes: list[subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The window of rank 0's file, a decided session that outlives the collector, one that is stopped, refusals."""
    collector = CollectorProcess(tmp_path / "out")
    for process in processes:
        read_until(process, "connected")
    # Rank 1 has heard of rank 0's window when the collector has had its answer.
    wait_for(lambda: session(tmp_path, "static")["parts"][0].get("state") == "planned", 60)
    (tmp_path / "go").touch()
    for process in processes:
        read_until(process, "there")
    wait(tmp_path / "out", "static", timeout=60)
    assert profiled(tmp_path, "static") == {"rank_1": [2]}

    at = session(tmp_path, "static")["parts"][0]["last"] + 10_000
    name = start(tmp_path / "out", ranks="0-2", pp_stage=2, steps=1, at=at)
    with pytest.raises(RankdError, match=f"{name} (has been proposed to|profiles step {at} on) rank 2"):
        start(tmp_path / "out", ranks="1-2", at=at)
    assert wait(tmp_path / "out", name, decided=True, timeout=60)["phase"] == "committed"
    assert stop(tmp_path / "out", name) == [name]
    assert wait(tmp_path / "out", name, timeout=60)["phase"] == "stopped"

    command = [sys.executable, "-m", "rankd.collector", "profile", "start", "out", "--ranks", "0-1", "--steps", "3"]
    asked = subprocess.run([*command, "--output", "kept"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    decided = session(tmp_path, "p2")
    assert f"p2: committed, steps {decided['start']}-{decided['end']}, ranks 0-1, level 0" in asked.stdout, asked
    collector.kill()
    collector.start()
    again = wait(tmp_path / "out", "p2", timeout=60)
    assert (again["phase"], again["start"], again["end"]) == ("done", decided["start"], decided["end"])
    assert profiled(tmp_path, "kept") == {"rank_0": [3], "rank_1": [3]}

    long = start(tmp_path / "out", one_per_node=True, steps=5_000, path=tmp_path / "long")
    wait(tmp_path / "out", long, decided=True, timeout=60)
    wait_for(lambda: session(tmp_path, long)["parts"][0].get("state") == "recording", 60)
    assert stop(tmp_path / "out") == [long]
    stopped = wait(tmp_path / "out", long, timeout=60)
    assert (stopped["phase"], stopped["ranks"]) == ("stopped", "0")
    assert 0 < profiled(tmp_path, "long")["rank_0"][0] < 5_000

    asked = subprocess.run(
        [*command, "--output", "/proc/no", "--wait"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert asked.returncode == 1
    assert asked.stdout.count("p4: aborted, ") == 1, asked
    why = session(tmp_path, "p4")["reason"]
    for name, said in ("p4", f"p4 was aborted: {why}\n"), ("p9", "no session p9; there are: static, p1, p2, p3, p4\n"):
        capsys.readouterr()
        assert main(["profile", "summary", str(tmp_path / "out"), name]) == 1
        assert capsys.readouterr().out == said

    (tmp_path / "stop").touch()
    outs = [finish_saying(process) for process in processes]
    assert ["never imported" in out for out in outs] == [False, False, True]
    assert collector.ended()[0] == 0
    told = comments(contents(tmp_path))["profile"]
    assert "the ranks' profiler sections differ, and rank 0's is used: rank 1: end_step 29 (rank 0: 21)" in told, told
    assert f"p2 done: steps {again['start']}-{again['end']} on ranks 0-1, {again['bytes']} bytes" in told
    assert [each["phase"] for each in sessions(tmp_path / "out")] == ["done", "stopped", "done", "stopped", "aborted"]
    check_logs(tmp_path / "out", 3)
    verified(tmp_path / "out")


def finish_saying(process: subprocess.Popen[str]) -> str:
    """What it printed until its end."""
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    return out


def test_ranks_of_a_configuration_that_are_none_are_named(tmp_path: Path) -> None:
    """`profiler_rank: []`, on rank 0; nobody profiles."""
    yaml = "profiler: {enable_profiling: True, profiler_rank: []}\nrankd: {output: out}\n"
    body = "with Agent.from_yaml('train.yaml', model=Model()) as a:\n    with a.step(1):\n        a.end_step(loss=1.0)"
    status, said = finish(script(tmp_path, "\n" + body, yaml=yaml, RANKD_RANK="0", RANKD_WORLD_SIZE="1"))
    assert status == 0, said
    assert "profiler.profiler_rank: found [], so no rank profiles; leave it out for all ranks" in said
    assert not (tmp_path / "profile").exists()
