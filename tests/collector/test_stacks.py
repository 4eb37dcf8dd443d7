"""`rankd stacks`: where ranks are; those that say the same are one group, and who says nothing is named."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pytest
from tests.collector.test_asking import rankd
from tests.collector.test_sampler import Now
from tests.support import YAML, CollectorProcess, finish, read_until, script, wait_for

from rankd.agent.stacks import StackDump, stacks_text
from rankd.collector.protocol.errors import RankdError
from rankd.collector.protocol.messages import Facts
from rankd.collector.protocol.steering import Tell
from rankd.collector.stacks import StackRequests

STUCK = """
    rank = int(os.environ["RANKD_RANK"])

    def load_batch():
        print("stuck", flush=True)
        sys.stdin.readline()

    def all_reduce():
        print("stuck", flush=True)
        sys.stdin.readline()

    def stop(step, micro_step):
        if (step, micro_step) == (2, 3):
            load_batch() if rank == 1 else all_reduce()

    with Agent.from_yaml("train.yaml", model=Model()) as a:
        train(a, steps=2, before_micro_step=stop)
"""


def test_the_stacks_of_a_process_name_functions_and_lines() -> None:
    """The main thread's stack ends where it is; of the others, rankd's own are left out."""
    there, go = threading.Event(), threading.Event()

    def waits_here() -> None:
        there.set()
        go.wait()

    threads = [threading.Thread(target=waits_here, name=name) for name in ("loader", "rankd-test")]
    for thread in threads:
        thread.start()
        there.wait()
    both, main_only = stacks_text(others=True), stacks_text(others=False)
    go.set()
    for thread in threads:
        thread.join()
    assert main_only.startswith("main thread:\n")
    assert "in test_the_stacks_of_a_process_name_functions_and_lines" in main_only
    assert main_only.rstrip().splitlines()[-2].endswith("in stacks_text")
    assert "waits_here" not in main_only
    assert both.count("in waits_here") == 1
    assert "rankd-test" not in both


def test_a_deep_recursion_is_cut_to_what_can_travel() -> None:
    """It says where it is all the same."""

    def deeper(n: int) -> Facts:
        return deeper(n - 1) if n else StackDump(lambda: (3, 1))({"number": 1})[0].facts

    facts = deeper(min(700, sys.getrecursionlimit() - 250))
    assert (facts["step"], facts["micro_step"]) == (3, 1)
    assert "stacks_text" in str(facts["text"])


def test_ranks_at_one_place_are_one_group() -> None:
    """The smallest group comes first: that is where one looks."""
    stacks, now = StackRequests(), Now({0: 7, 1: 7, 2: 7, 3: 6})
    moves, answer = stacks.asked("stacks", {"ranks": None}, now)
    assert [move.rank for move in moves if isinstance(move, Tell)] == [0, 1, 2, 3]
    assert answer["waiting"] == [0, 1, 2, 3]
    for rank, (step, text) in enumerate([(7, "reduce"), (7, "reduce"), (6, "reduce"), (6, "load\x1b[2J")]):
        stacks.reported(rank, "stacks", {"number": 1, "step": step, "micro_step": 2, "text": text}, now)
    stacks.reported(0, "stacks", {"number": 0, "text": "older"}, now)
    _, answer = stacks.asked("stacks.found", {}, now)
    assert [(g["ranks"], g["from"], g["to"], g["text"]) for g in answer["groups"]] == [
        ("3", (6, 2), (6, 2), "load\\u001b[2J"),
        ("0-2", (6, 2), (7, 2), "reduce"),
    ]
    assert (answer["waiting"], answer["gone"]) == ([], [])


def test_who_is_silent_or_gone_or_refuses_is_named() -> None:
    """And what nobody fetches is let go."""
    stacks, now = StackRequests(), Now({0: 7, 1: 7, 2: 7})
    stacks.asked("stacks", {"ranks": "0-2"}, now)
    stacks.reported(0, "stacks", {"number": 1, "refused": "no key"}, now)
    _, answer = stacks.asked("stacks.found", {}, Now({0: 7, 1: 7}))
    assert (answer["waiting"], answer["gone"]) == ([1], [2])
    assert [g["text"] for g in answer["groups"]] == ["refused: no key"]
    stacks.tick(Now({0: 7}, now=1_000.0))
    assert stacks.asked("stacks.found", {}, now)[1]["groups"] == []


@pytest.mark.parametrize("ranks", ["0-9", "x", "", 3, "1," * 2_000])
def test_ranks_that_are_not_there_are_an_error(ranks: str | int) -> None:
    """With what was found."""
    with pytest.raises(RankdError, match="ranks"):
        StackRequests().asked("stacks", {"ranks": ranks}, Now({0: 7, 1: 7}))


@pytest.mark.slow
def test_stacks_of_ranks_that_stand_still(tmp_path: Path) -> None:
    """Three ranks stand still, one of them for another reason; one that is stopped gives no answer, and is named."""
    collector = CollectorProcess(tmp_path / "out", lost_after=600.0)
    yaml = YAML + "  start_collector: False\n  beat_interval: 0.2\n"
    ranks = [script(tmp_path, STUCK, yaml=yaml, stdin=-1, RANKD_RANK=str(r), RANKD_WORLD_SIZE="3") for r in range(3)]
    for process in ranks:
        read_until(process, "stuck")
    log, last = tmp_path / "out" / "merged.log", b'{ "step": 2, "micro_step": 2 }'
    wait_for(lambda: log.exists() and log.read_bytes().count(last) == 3)
    done = rankd(tmp_path, "stacks", "out")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("\n== ")
    assert first.startswith("== rank 1, step 2 micro_step 2\nmain thread:\n")
    assert "in load_batch" in first
    assert second.startswith("ranks 0,2, step 2 micro_step 2\n")
    assert "in all_reduce" in second
    ranks[2].send_signal(signal.SIGSTOP)
    done = rankd(tmp_path, "stacks", "out", "--rank", "0,2", "--wait", "0.5")
    assert done.returncode == 1
    assert "== rank 0, step 2" in done.stdout
    assert "no answer from rank 2 within 0.5 s" in done.stdout
    ranks[2].send_signal(signal.SIGCONT)
    for process in ranks:
        assert process.stdin is not None
        process.stdin.write("on\n")
        process.stdin.flush()
    assert [finish(process)[0] for process in ranks] == [0, 0, 0]
    assert collector.ended()[0] == 0
