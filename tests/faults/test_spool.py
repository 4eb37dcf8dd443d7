"""What a killed rank had accepted is in the logs exactly once; what a full spool refused is counted and said."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import (
    SOON,
    YAML,
    CollectorProcess,
    comments,
    contents,
    finish,
    read_until,
    recover,
    rest,
    script,
    wait_for,
)

from rankd.collector.protocol.records import Comment, Record

SETTINGS = YAML + "  start_collector: False\n  beat_interval: 0.2\n"

# Says each micro-step that was accepted, once it was.
ENDLESS = """
    from itertools import count
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        for step in count(FIRST):
            with a.step(step):
                for micro_step in range(1, 5):
                    a.micro_step(loss=step + micro_step / 10)
                    print(step, micro_step, flush=True)
                    time.sleep(0.002)
"""


def losses(content: list[Record | Comment], attempt: int, rank: int = 0) -> list[tuple[int, int]]:
    """Where an attempt of a rank has a local_loss, in the order of the log; each must be the right one."""
    found = []
    for r in content:
        if isinstance(r, Record) and (r.metric, r.rank, r.position.attempt) == ("local_loss", rank, attempt):
            step, micro_step = r.position.step, r.position.micro_step
            assert micro_step is not None
            assert r.value == pytest.approx(step + micro_step / 10)
            found.append((step, micro_step))
    return found


def up_to(last: tuple[int, int], first: int = 1) -> list[tuple[int, int]]:
    """All micro-steps of a training that begins with step `first` up to `last`."""
    return [(s, m) for s in range(first, last[0] + 1) for m in range(1, 5) if (s, m) <= last]


def spools_of(process: subprocess.Popen[str]) -> Iterator[Path]:
    """The spool files below the directory in which this training runs."""
    return Path(f"/proc/{process.pid}/cwd").resolve().rglob("*.spool")


def killed(process: subprocess.Popen[str], after: str) -> tuple[int, int]:
    """Kill a training once it has said `after`; the last micro-step that it said."""
    read_until(process, after)
    # There is none where the disk had no room just then; what is lost then is no wonder.
    has_spool = any(f".{process.pid}." in path.name for path in spools_of(process))
    process.kill()
    said = [after, *rest(process).splitlines()]
    assert has_spool, "this process kept what it recorded in memory"
    step, micro_step = said[-1].split()
    return int(step), int(micro_step)


def check_no_more_than_accepted(found: list[tuple[int, int]], last: tuple[int, int]) -> None:
    """All that was said, and at most the one micro-step that was accepted and not said any more; nothing twice."""
    following = (last[0], last[1] + 1) if last[1] < 4 else (last[0] + 1, 1)
    assert found in (up_to(last), up_to(following))


@pytest.mark.slow
def test_a_rank_killed_while_the_collector_stands_still_and_started_again(tmp_path: Path) -> None:
    """COMPLAINTS 8: SIGKILL in the middle of pushes; the restart delivers what was accepted, then its own."""
    collector = CollectorProcess(tmp_path / "out")
    first = script(tmp_path, ENDLESS.replace("FIRST", "1"), yaml=SETTINGS)
    read_until(first, "5 1")
    collector.process.send_signal(signal.SIGSTOP)
    last = killed(first, "12 3")
    body = 'with Agent.from_yaml("train.yaml", model=Model()) as a: train(a, steps=2)'
    second = script(tmp_path, body, yaml=SETTINGS + "  exit_timeout: 20\n")
    collector.process.send_signal(signal.SIGCONT)
    assert finish(second)[0] == 0
    status, said = collector.ended()
    assert status == 0, said
    content = contents(tmp_path)
    check_no_more_than_accepted(losses(content, 1), last)
    assert losses(content, 2) == up_to((2, 4))
    assert not list(tmp_path.rglob("*.spool"))


@pytest.mark.slow
def test_a_rank_killed_before_a_collector_ever_ran(tmp_path: Path) -> None:
    """Nobody collected; the next start brings both in the order in which they were."""
    first = script(tmp_path, ENDLESS.replace("FIRST", "1"), yaml=SETTINGS)
    last = killed(first, "3 2")
    body = 'with Agent.from_yaml("train.yaml", model=Model()) as a: train(a, steps=2)'
    second = script(tmp_path, body, yaml=SETTINGS + "  exit_timeout: 20\n")
    collector = CollectorProcess(tmp_path / "out")
    assert finish(second)[0] == 0
    status, said = collector.ended()
    assert status == 0, said
    content = contents(tmp_path)
    check_no_more_than_accepted(losses(content, 1), last)
    assert losses(content, 2) == up_to((2, 4))
    assert not any(c.kind == "late" for c in content if isinstance(c, Comment))


@pytest.mark.slow
def test_killed_again_and_again_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    """Five processes of a rank, each going on where the one before was killed, and the collector killed in between."""
    collector = CollectorProcess(tmp_path / "out")
    begin = 1
    lasts = []
    for turn in range(5):
        process = script(tmp_path, ENDLESS.replace("FIRST", str(begin)), yaml=SETTINGS)
        read_until(process, f"{begin + 1} 3")
        if turn % 2:
            collector.kill()
        lasts.append((begin, killed(process, f"{begin + 3} 2")))
        if turn % 2:
            collector.start()
        begin = lasts[-1][1][0] + 1
    body = f"""
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        with a.step({begin}):
            a.micro_step(loss={begin}.1)
    """
    assert finish(script(tmp_path, body, yaml=SETTINGS + "  exit_timeout: 20\n"))[0] == 0
    status, said = collector.ended()
    assert status == 0, said
    content = contents(tmp_path)
    everything = [where for attempt in range(1, 7) for where in losses(content, attempt)]
    assert len(everything) == len(set(everything)), said
    for first, last in lasts:
        assert set(up_to(last, first)) <= set(everything), said


def accounts(content: list[Record | Comment]) -> tuple[int, dict[str, int]]:
    """Of rank 0: how many records are there, and how many the gaps say are missing, by cause."""
    gaps: dict[str, int] = {}
    for c in content:
        if isinstance(c, Comment) and c.kind == "gap" and c.rank == 0:
            match = re.fullmatch(r"(\d+) records? from step .* (?:is|are) missing \((\w+)\)", c.text)
            assert match is not None
            gaps[match[2]] = gaps.get(match[2], 0) + int(match[1])
    return sum(isinstance(r, Record) for r in content), gaps


FULL = """
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        for step in range(1, 301):
            with a.step(step):
                a.log("x" * 200, step)
                a.micro_step(loss=step)
            if step in (1, 250):
                print(step, flush=True)
                sys.stdin.readline()
        print(a._delivery.outbox.statistics().produced, flush=True)
"""
TINY = SETTINGS + "  spool: {size: 64KiB}\n  exit_timeout: 20\n"


@pytest.mark.slow
def test_a_full_spool_refuses_counts_and_says_so(tmp_path: Path) -> None:
    """The collector stands still and goes on: produced = written + dropped, gaps say where; training never waits."""
    collector = CollectorProcess(tmp_path / "out")
    process = script(tmp_path, FULL, yaml=TINY, stdin=subprocess.PIPE)
    assert process.stdin is not None
    read_until(process, "1")
    collector.process.send_signal(signal.SIGSTOP)
    process.stdin.write("on\n")
    process.stdin.flush()
    read_until(process, "250")
    collector.process.send_signal(signal.SIGCONT)
    process.stdin.write("on\n")
    process.stdin.close()
    out = rest(process)
    assert process.returncode == 0
    status, summary = collector.ended()
    content = contents(tmp_path)
    written, gaps = accounts(content)
    produced = int(out.split()[-1])
    assert gaps.keys() == {"spool_full"}
    assert produced == written + gaps["spool_full"]
    assert f"{produced}  {gaps['spool_full']} spool_full" in summary
    assert status == 0


@pytest.mark.slow
def test_a_full_spool_without_a_collector_is_recovered_with_its_accounts(tmp_path: Path) -> None:
    """Nobody collects: what fits is kept, with gaps and goodbye, and a later collector gets it."""
    yaml = TINY.replace("exit_timeout: 20", "exit_timeout: 0.1")
    process = script(tmp_path, FULL, yaml=yaml, stdin=subprocess.PIPE)
    out, said = process.communicate("on\non\n")
    assert process.returncode == 0
    assert "`rankd recover " in said
    assert len(list(tmp_path.rglob("*.spool"))) == 1
    collector = CollectorProcess(tmp_path / "out")
    # The collector looks there by itself too; whoever comes first.
    recover(tmp_path, "--output", "out")
    collector.ends(0)
    written, gaps = accounts(contents(tmp_path))
    assert int(out.split()[-1]) == written + gaps["spool_full"]
    assert gaps["spool_full"] > 0
    assert not list(tmp_path.rglob("*.spool"))


@pytest.mark.slow
def test_no_room_for_the_spool_file_is_one_warning(tmp_path: Path) -> None:
    """COMPLAINTS 23: the limit on file sizes is below the spool's: the run is recorded all the same, from memory."""
    body = """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        train(a, steps=1)
    """
    collector = CollectorProcess(tmp_path / "out")
    status, said = finish(script(tmp_path, body, yaml=SETTINGS + "  spool: {size: 8MiB}\n"))
    assert status == 0
    (line,) = said.strip().splitlines()
    for part in ("no spool file of 8388608 bytes", f"rankd-{os.geteuid()}", "lost if this process is killed"):
        assert part in line
    collector.ends(0)
    assert losses(contents(tmp_path), 1) == up_to((1, 4))


@pytest.mark.slow
def test_one_of_four_raises_and_the_others_are_killed(tmp_path: Path) -> None:
    """COMPLAINTS 14: all steps 1 to 6 and what ranks had accepted of 7 is merged, at once; the collector reports."""
    body = """
    rank = int(os.environ["RANKD_RANK"])
    def stop(step, micro_step):
        if (step, micro_step) == (7, 3):
            if rank == 2:
                raise RuntimeError("loss is nan")
            print("there", flush=True)
            while True:
                time.sleep(60)
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        train(a, steps=9, before_micro_step=stop)
    """
    collector = CollectorProcess(tmp_path / "out", lost_after=600.0, linger=SOON)
    processes = [script(tmp_path, body, yaml=SETTINGS, RANKD_RANK=str(r), RANKD_WORLD_SIZE="4") for r in range(4)]
    failed = processes.pop(2)
    for process in processes:
        read_until(process, "there")
        process.kill()
        rest(process)
    assert finish(failed)[0] == 1
    status, _ = collector.ended()
    assert status == 1
    content = contents(tmp_path)
    for rank in range(4):
        assert losses(content, 1, rank) == up_to((7, 2))
    lost = [c.text for c in content if isinstance(c, Comment) and c.kind == "rank_lost"]
    assert len(lost) == 3
    assert all("its process is gone" in text for text in lost)
    assert comments(content)["first_failure"] == ["rank 2: RuntimeError: loss is nan"]


@pytest.mark.slow
def test_everything_is_killed_and_the_collector_is_started_again(tmp_path: Path) -> None:
    """SIGKILL of the ranks and of the collector: the next collector fetches what lies on its host, and ends."""
    collector = CollectorProcess(tmp_path / "out", lost_after=600.0, linger=SOON)
    ranks = [
        script(tmp_path, ENDLESS.replace("FIRST", "1"), yaml=SETTINGS, RANKD_RANK=str(r), RANKD_WORLD_SIZE="3")
        for r in range(2)
    ]
    for process in ranks:
        read_until(process, "3 1")
    collector.process.send_signal(signal.SIGSTOP)
    # It never gets to say hello.
    ranks.append(script(tmp_path, ENDLESS.replace("FIRST", "1"), yaml=SETTINGS, RANKD_RANK="2", RANKD_WORLD_SIZE="3"))
    lasts = [killed(process, after) for process, after in zip(ranks, ("4 1", "4 1", "2 2"), strict=True)]
    collector.kill()
    collector.start()
    status, said = collector.ended()
    assert status == 1, said
    content = contents(tmp_path)
    for rank, last in enumerate(lasts):
        check_no_more_than_accepted(losses(content, 1, rank), last)
    assert len(comments(content)["rank_lost"]) == 3
    wait_for(lambda: not list(tmp_path.rglob("*.spool")))


@pytest.mark.slow
def test_a_stopped_process_is_not_taken_for_a_dead_one(tmp_path: Path) -> None:
    """SIGSTOP for longer than beats may be late, then CONT: it is not given up, and everything is there."""
    collector = CollectorProcess(tmp_path / "out", lost_after=600.0)
    body = """
    def stop(step, micro_step):
        if (step, micro_step) == (2, 1):
            print("there", flush=True)
            sys.stdin.readline()
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        train(a, before_micro_step=stop)
    """
    process = script(tmp_path, body, yaml=SETTINGS, stdin=subprocess.PIPE)
    read_until(process, "there")
    wait_for(lambda: beat_age(tmp_path / "out") is not None)
    process.send_signal(signal.SIGSTOP)
    # Three beats (0.6 s) late, the rescue looks each beat, and finds the spool locked.
    wait_for(lambda: (beat_age(tmp_path / "out") or 0.0) > 2.0)
    process.send_signal(signal.SIGCONT)
    assert process.stdin is not None
    process.stdin.write("on\n")
    process.stdin.close()
    rest(process)
    assert process.returncode == 0
    collector.ends(0)
    content = contents(tmp_path)
    assert losses(content, 1) == up_to((3, 4))
    assert "rank_lost" not in comments(content)


def beat_age(output: Path) -> float | None:
    """Seconds since the collector has heard a beat of the first rank; None: it has heard none."""
    ranks = json.loads((output / ".rankd" / "status.json").read_text())["ranks"]
    return None if not ranks or ranks[0]["beat_age"] is None else float(ranks[0]["beat_age"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The output directory on a disk of 2 MB of its own."""
    output = tmp_path / "out"
    output.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(output)], capture_output=True)
    if done.returncode:
        pytest.skip("a tmpfs of one's own needs root")
    yield output
    subprocess.run(["umount", "-l", str(output)], check=True)


@pytest.mark.slow
def test_a_full_disk_of_the_collector(tmp_path: Path, small_disk: Path) -> None:
    """COMPLAINTS 23: training goes on, the warning names the disk; with room again, all is there or counted."""
    filler = small_disk / "something else"
    filler.write_bytes(bytes(2**20 + 2**19))
    collector = CollectorProcess(small_disk)
    body = """
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        for step in range(1, 2001):
            with a.step(step):
                a.micro_step(loss=step)
                a.log("x" * 200, step)
        print("trained", flush=True)
        sys.stdin.readline()
        print(a._delivery.outbox.statistics().produced, flush=True)
    """
    yaml = SETTINGS + "  spool: {size: 128KiB}\n  exit_timeout: 20\n"
    process = script(tmp_path, body, yaml=yaml, stdin=subprocess.PIPE)
    assert process.stdin is not None
    wait_for(lambda: "make room and it goes on" in collector.said())
    warning = next(line for line in collector.said().splitlines() if "cannot be written" in line)
    assert str(small_disk) in warning
    assert "make room and it goes on" in warning
    read_until(process, "trained")
    filler.unlink()
    process.stdin.write("on\n")
    process.stdin.close()
    produced = int(rest(process))
    assert process.returncode == 0
    status, _ = collector.ended()
    assert status == 0
    written, gaps = accounts(contents(tmp_path))
    assert produced == written + gaps.get("spool_full", 0)
