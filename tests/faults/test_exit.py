"""However a training process ends: it ends in time, and what it had recorded is in the logs."""

from __future__ import annotations

import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest
from tests.support import (
    LOOP,
    PATIENCE,
    SOON,
    YAML,
    CollectorProcess,
    collected,
    comments,
    contents,
    finish,
    read_until,
    recover,
    rest,
    script,
    values,
)

# Starts a training, a collector or both in each test.
pytestmark = pytest.mark.slow

EVERYTHING = {(s, m): s + m / 10 for s in (1, 2, 3) for m in (1, 2, 3, 4)}
AWAY = YAML + "  start_collector: False\n  exit_timeout: 0.5\n"


def saved(tmp_path: Path, body: str, where: str) -> str:
    """A training script as a file, as spawned children need it; `where`: what stands before the body. Its name."""
    (tmp_path / "train.py").write_text(LOOP + textwrap.dedent(body) + where)
    return "train.py"


@pytest.mark.slow
def test_os_exit_leaves_everything_in_the_spool(tmp_path: Path) -> None:
    """No handler runs: the collector fetches the spool, gives the rank up at once, and says its process is gone."""
    body = """
    a = Agent.from_yaml("train.yaml", model=Model())
    train(a)
    with a.step(4):
        a.log_many({f"scalar_{i}": i for i in range(3_000)}, level="micro_step")
        a.log("last", 0.5)
        os._exit(7)
    """
    collector = CollectorProcess(tmp_path / "out", lost_after=600.0, linger=SOON)
    assert finish(script(tmp_path, body, yaml=AWAY)) == (7, "")
    collector.ends(1)
    content = contents(tmp_path)
    assert values(content, "local_loss") == EVERYTHING
    assert [values(content, f"scalar_{i}") for i in range(3_000)] == [{(4, 1): float(i)} for i in range(3_000)]
    assert values(content, "last") == {(4, None): 0.5}
    (lost,) = comments(content)["rank_lost"]
    assert "its process is gone" in lost


@pytest.mark.slow
def test_sigterm_without_a_handler(tmp_path: Path) -> None:
    """The default action ends the process at once; the same as os._exit."""
    body = """
    a = Agent.from_yaml("train.yaml", model=Model())
    train(a)
    os.kill(os.getpid(), 15)
    """
    collector = CollectorProcess(tmp_path / "out", lost_after=600.0, linger=SOON)
    assert finish(script(tmp_path, body, yaml=AWAY)) == (-signal.SIGTERM, "")
    collector.ends(1)
    assert values(contents(tmp_path), "local_loss") == EVERYTHING


def test_sigterm_with_a_handler_that_raises_system_exit(tmp_path: Path) -> None:
    """What a scheduler's grace period is for: everything is delivered, and the goodbye says how it ended."""
    body = """
    import signal
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    def stop(step, micro_step):
        if (step, micro_step) == (3, 2):
            os.kill(os.getpid(), 15)
            time.sleep(60)
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        train(a, before_micro_step=stop)
    """
    assert finish(script(tmp_path, body)) == (143, "")
    content = collected(tmp_path)
    assert max(values(content, "local_loss")) == (3, 1)
    assert comments(content)["rank_ended"] == ["rank 0 ended early: SystemExit: 143"]


@pytest.mark.slow
def test_exit_without_a_collector_is_bounded_and_says_what_is_left_where(tmp_path: Path) -> None:
    """COMPLAINTS 7: the exit takes exit_timeout; the warning's command, copied, delivers what was left."""
    body = """
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        train(a)
        ended = time.monotonic()
    print(time.monotonic() - ended)
    """
    process = script(tmp_path, body, yaml=AWAY)
    out, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert 0.5 <= float(out) < 4
    (line,) = said.strip().splitlines()
    (spool,) = tmp_path.rglob("*.spool")
    assert f"`rankd recover {spool}`" in line
    collector = CollectorProcess(tmp_path / "out")
    recover(tmp_path, str(spool))
    collector.ends(0)
    assert values(contents(tmp_path), "local_loss") == EVERYTHING


def test_a_thousand_micro_steps_and_close_at_once(tmp_path: Path) -> None:
    """COMPLAINTS 6: what was sent last is not lost at close."""
    body = """
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        with a.step(1):
            for micro_step in range(1000):
                a.micro_step(loss=micro_step)
    """
    assert finish(script(tmp_path, body, yaml=YAML + "  exit_timeout: 20\n")) == (0, "")
    assert len(values(collected(tmp_path), "local_loss")) == 1000


@pytest.mark.parametrize("loop", ["main thread", "daemon thread"])
def test_an_agent_at_module_level_that_nobody_closes(tmp_path: Path, loop: str) -> None:
    """Interpreter shutdown: the agent is closed before; a daemon thread that still pushes is not harmed."""
    body = """
    import threading
    agent = Agent.from_yaml("train.yaml", model=Model())
    def forever():
        train(agent)
        done.set()
        while True:
            agent.log("later", 1)
    done = threading.Event()
    """
    body += (
        "train(agent)"
        if loop == "main thread"
        else "threading.Thread(target=forever, daemon=True).start(); done.wait()"
    )
    assert finish(script(tmp_path, body, yaml=YAML + "  exit_timeout: 20\n")) == (0, "")
    content = collected(tmp_path)
    assert values(content, "local_loss") == EVERYTHING
    assert comments(content)["rank_ended"] == ["rank 0 ended early: the process exited before the agent was closed"]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["main", "module"])
def test_spawned_children_are_no_second_rank(tmp_path: Path, level: str) -> None:
    """`multiprocessing` imports the script again in a child, at module level with its agent: that one does nothing."""
    parent = """
    import multiprocessing
    def work(_):
        agent = globals().get("a") or Agent.from_yaml("train.yaml", model=Model())
        agent.log("from_child", 1)
        with agent.step(1):
            agent.micro_step(loss=1e9)
        return agent.identity is None
    """
    train = """
with multiprocessing.get_context("spawn").Pool(2) as pool:
    assert pool.map(work, range(2)) == [True, True]
train(a)
a.close()
"""
    create = 'a = Agent.from_yaml("train.yaml", model=Model(), rank=0, world_size=1)\n'
    guard = "if __name__ == '__main__':\n"
    inside = textwrap.indent(train, "    ")
    where = create + guard + inside if level == "module" else guard + "    " + create + inside
    name = saved(tmp_path, parent, where)
    process = script(tmp_path, "", command=[name])
    status, said = finish(process)
    assert status == 0, said
    assert said.count("started by multiprocessing") == (0 if level == "module" else 2)
    content = collected(tmp_path)
    assert values(content, "from_child") == {}
    assert values(content, "local_loss") == EVERYTHING
    assert comments(content)["attempt"] == ["1 world_size 1"] * 2


@pytest.mark.slow
def test_a_child_of_multiprocessing_that_is_given_its_rank_is_one(tmp_path: Path) -> None:
    """A launcher made of multiprocessing works, where the script says which rank each child is."""
    body = """
    import multiprocessing
    def work(rank):
        with Agent.from_yaml("train.yaml", model=Model(), rank=rank, world_size=2) as a:
            train(a)
    """
    where = """
if __name__ == "__main__":
    children = [multiprocessing.get_context("spawn").Process(target=work, args=(rank,)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
"""
    assert finish(script(tmp_path, "", command=[saved(tmp_path, body, where)])) == (0, "")
    content = collected(tmp_path)
    assert [values(content, "local_loss", rank) for rank in (0, 1)] == [EVERYTHING, EVERYTHING]


@pytest.mark.slow
def test_a_worker_that_outlives_its_rank_does_not_keep_the_spool(tmp_path: Path) -> None:
    """COMPLAINTS 9: os.fork, then SIGKILL of the parent: the spool is delivered while the child lives."""
    body = """
    a = Agent.from_yaml("train.yaml", model=Model())
    train(a)
    if os.fork() == 0:
        print("child", flush=True)
        sys.stdin.read()
        os._exit(0)
    time.sleep(60)
    """
    process = script(tmp_path, body, yaml=AWAY, stdin=subprocess.PIPE)
    assert process.stdin is not None
    read_until(process, "child")
    process.kill()
    process.wait()
    collector = CollectorProcess(tmp_path / "out", linger=SOON)
    done = recover(tmp_path, "--output", "out", "--timeout", "20")
    # The child lives still: it has been waiting for this.
    process.stdin.close()
    rest(process)
    assert collector.ended()[0] == 1, done
    assert values(contents(tmp_path), "local_loss") == EVERYTHING


@pytest.mark.slow
def test_ctrl_c_while_closing_keeps_the_spool(tmp_path: Path) -> None:
    """A person who does not want to wait for the exit loses nothing."""
    body = """
    import signal
    # Ignored where the tests were started in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    a = Agent.from_yaml("train.yaml", model=Model())
    train(a)
    print("closing", flush=True)
    a.close()
    """
    process = script(tmp_path, body, yaml=AWAY.replace("exit_timeout: 0.5", "exit_timeout: 600"))
    read_until(process, "closing")
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    rest(process)
    assert process.returncode not in (0, None)
    collector = CollectorProcess(tmp_path / "out", linger=SOON)
    recover(tmp_path, "--output", "out")
    collector.ended()
    assert values(contents(tmp_path), "local_loss") == EVERYTHING
