"""The agent inside training scripts: real processes, a real collector that rank 0 starts, real files."""

from __future__ import annotations

import json
import math
import re
import signal
from pathlib import Path

import pytest
from tests.support import PATIENCE, YAML, collected, finish, script, values

from rankd.collector.protocol.records import Comment, Record


def test_a_training_is_recorded(tmp_path: Path) -> None:
    """Losses, norm increments and accumulated norms by their filters, the step summary, in the rank's log."""
    status, said = finish(script(tmp_path, 'with Agent.from_yaml("train.yaml", model=Model()) as a: train(a)'))
    assert (status, said) == (0, "")
    content = collected(tmp_path)
    assert values(content, "local_loss") == {(s, m): s + m / 10 for s in (1, 2, 3) for m in (1, 2, 3, 4)}
    assert values(content, "device_loss") == {(s, None): float(s) for s in (1, 2, 3)}
    norms = [r for r in content if isinstance(r, Record) and r.metric == "local_norm"]
    assert {r.name for r in norms} == {"decoder.layers.0.weight", "output.weight"}
    for r in norms:
        # Each element grows by `step` a micro-step, so the norm grows by step * sqrt(size).
        size = 4 if r.name == "decoder.layers.0.weight" else 3
        assert isinstance(r.value, float)
        assert abs(r.value - r.position.step * math.sqrt(size)) < 1e-5
    device = [r for r in content if isinstance(r, Record) and r.metric == "device_norm"]
    assert {r.name for r in device} == {"decoder.layers.0.weight", "decoder.layers.0.bias"}
    assert all(r.position.micro_step is None for r in device)
    assert values(content, "grad_norm")[3, None] == 0.5


def test_users_own_scalars_go_where_they_belong(tmp_path: Path) -> None:
    """Before the first step, in a micro-step, in a step, and between steps (marked late or at its step's end)."""
    body = """
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        a.log("before", 1)
        train(a, steps=2, before_micro_step=lambda step, micro: a.log("tokens", micro, level="micro_step"))
        a.log("eval_loss", np.float32(2.5))
        with a.step(3):
            a.log("in_step", float("nan"))
            a.log_many({"one": 1, "step": 2, "three": np.float32(3)}, level="micro_step")
        assert a.errors == {"log: RecordError": 1}
    """
    status, said = finish(script(tmp_path, body))
    assert (status, said.count("cannot name a metric")) == (0, 1)
    content = collected(tmp_path)
    assert values(content, "one") == {(3, 1): 1.0}
    assert values(content, "three") == {(3, 1): 3.0}
    assert values(content, "before") == {(1, None): 1.0}
    assert values(content, "tokens") == {(s, m): float(m) for s in (1, 2) for m in (1, 2, 3, 4)}
    assert values(content, "eval_loss") == {(2, None): 2.5}
    assert list(values(content, "in_step")) == [(3, None)]
    assert {r.position.attempt for r in content if isinstance(r, Record)} == {1}


def test_wrong_calls_warn_once_and_training_goes_on(tmp_path: Path) -> None:
    """A wrong number of gradients, a reserved name, a loss that is none, step 0: each costs its record."""
    body = """
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        with a.step(0):
            a.micro_step(loss=1.0)
        for step in (1, 2):
            with a.step(step):
                a.micro_step(loss=1.0, grads=[])
                a.micro_step(loss="high")
                a.log("step", 3)
                a.log("local_norm", 3)
                a.log("fine", step)
                a.end_step(loss=0.5)
        assert sum(a.errors.values()) == 9, a.errors
    """
    status, said = finish(script(tmp_path, body))
    assert status == 0
    assert said.count("rankd: log failed, training goes on") == 1
    assert said.count("rankd: GradientNorms.micro_step failed, training goes on") == 1
    assert said.count("rankd: LossMonitor.micro_step failed, training goes on") == 1
    assert said.count("asked for, and not given by the training loop in step 1") == 1
    assert "a step is an integer from 1 on, got 0" in said
    content = collected(tmp_path)
    assert values(content, "fine") == {(1, None): 1.0, (2, None): 2.0}


@pytest.mark.parametrize("how", ["exception", "exit"])
def test_what_led_to_the_end_is_in_the_files(tmp_path: Path, how: str) -> None:
    """COMPLAINTS 5: an exception in micro-step 3 of 4, or sys.exit(0) there: everything before it is in the log."""
    stop = {"exception": 'raise RuntimeError("loss is nan")', "exit": "sys.exit(0)"}[how]
    body = f"""
    def stop(step, micro_step):
        if (step, micro_step) == (2, 3):
            {stop}
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        train(a, before_micro_step=stop)
    """
    status, said = finish(script(tmp_path, body))
    assert status == (1 if how == "exception" else 0)
    assert ("RuntimeError: loss is nan" in said) == (how == "exception")
    content = collected(tmp_path)
    assert max(values(content, "local_loss")) == (2, 2)
    told = {c.kind: c.text for c in content if isinstance(c, Comment)}
    if how == "exception":
        assert told["exception"] == "RuntimeError: loss is nan"
        assert told["rank_ended"] == "rank 0 ended early: RuntimeError: loss is nan"
        assert told["first_failure"] == "rank 0: RuntimeError: loss is nan"
    else:
        assert "rank_ended" not in told


def test_without_a_context_the_last_step_is_there(tmp_path: Path) -> None:
    """COMPLAINTS 5: nobody called close; the process just ends."""
    body = """
    agent = Agent.from_yaml("train.yaml", model=Model())
    train(agent)
    """
    assert finish(script(tmp_path, body)) == (0, "")
    assert (3, None) in values(collected(tmp_path), "device_loss")


def test_misspelt_sections_are_warned_of_at_the_start(tmp_path: Path) -> None:
    """They are the framework's business, perhaps; so the training runs, and the log says so once, not once a rank."""
    yaml = YAML + "profilers: {enable_profiling: True}\nmonitors: {}\n"
    body = 'with Agent.from_yaml("train.yaml", model=Model()) as a: train(a)'
    several = [script(tmp_path, body, yaml=yaml, RANKD_RANK=str(r), RANKD_WORLD_SIZE="2") for r in range(2)]
    ended = [finish(process) for process in several]
    assert [status for status, _ in ended] == [0, 0]
    assert [said.count("profilers: not used by rankd; did you mean `profiler`?") for _, said in ended] == [1, 0]
    assert [said.count("monitors: not used by rankd; did you mean `monitor`?") for _, said in ended] == [1, 0]


def test_without_a_collector_training_runs_through_and_exits_in_time(tmp_path: Path) -> None:
    """COMPLAINTS 7: nobody at the endpoint: one warning, and the exit takes the stated bound."""
    yaml = YAML + "  endpoint: tcp://127.0.0.1:9\n  start_collector: False\n  exit_timeout: 1\n"
    body = """
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        train(a)
        ended = time.monotonic()
    print(time.monotonic() - ended)
    """
    process = script(tmp_path, body, yaml=yaml)
    out, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert 1 <= float(out) < 5
    (line,) = said.strip().splitlines()
    assert re.search(r"the collector did not acknowledge \d+ items? of rank \d+ within 1 s", line)


def test_a_collector_that_cannot_start_costs_the_logs_not_the_run(tmp_path: Path) -> None:
    """A file where the output directory should be: one clear warning; training unharmed."""
    (tmp_path / "out").write_text("in the way")
    yaml = YAML + "  exit_timeout: 0.5\n"
    status, said = finish(
        script(tmp_path, 'with Agent.from_yaml("train.yaml", model=Model()) as a: train(a)', yaml=yaml)
    )
    assert status == 0
    assert said.count("the collector could not be started") == 1
    assert (tmp_path / "out").read_text() == "in the way"


def test_msruns_scheduler_process_does_nothing(tmp_path: Path) -> None:
    """SPEC section 6: the same script with MS_ROLE=MS_SCHED records nothing and starts nothing."""
    body = 'with Agent.from_yaml("train.yaml", model=Model()) as a: train(a)'
    assert finish(script(tmp_path, body, MS_ROLE="MS_SCHED", RANK_ID="0")) == (0, "")
    assert not (tmp_path / "out").exists()


def test_an_uncertain_rank_records_nothing_and_says_why(tmp_path: Path) -> None:
    """COMPLAINTS 13: only a local id is set."""
    body = 'with Agent.from_yaml("train.yaml", model=Model()) as a: train(a)'
    status, said = finish(script(tmp_path, body, LOCAL_RANK="1"))
    assert status == 0
    assert "records and profiles nothing" in said
    assert "LOCAL_RANK" in said
    assert "RANKD_RANK" in said
    assert not (tmp_path / "out").exists()


def test_wrong_configuration_is_one_error_and_starts_nothing(tmp_path: Path) -> None:
    """Several mistakes: all of them in one error, with path, value and nearest key."""
    yaml = """
    monitor: {train_state: {local_nrom: True, device_loss: 3}}
    profiler: {enable_profiling: True, start_step: 9, end_step: 7}
    rankd: {output: out, lost_after: -1}
    """
    status, said = finish(script(tmp_path, 'Agent.from_yaml("train.yaml", model=Model())', yaml=yaml))
    assert status == 1
    for part in (
        "monitor.train_state.local_nrom",
        "did you mean `local_norm`",
        "monitor.train_state.device_loss",
        "profiler.start_step",
        "rankd.lost_after",
    ):
        assert part in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.yaml"]


def test_a_forked_worker_is_silent_and_the_parent_unharmed(tmp_path: Path) -> None:
    """COMPLAINTS 9: a data-loading worker made by os.fork logs and exits; nothing of it is recorded."""
    body = """
    def fork(step, micro_step):
        child = os.fork()
        if child == 0:
            a.log("from_child", 1)
            a.micro_step(loss=1e9)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        train(a, steps=2, micro_steps=2, before_micro_step=fork)
    """
    assert finish(script(tmp_path, body)) == (0, "")
    content = collected(tmp_path)
    assert values(content, "from_child") == {}
    assert values(content, "local_loss") == {(s, m): s + m / 10 for s in (1, 2) for m in (1, 2)}


@pytest.mark.slow
def test_the_collector_outlives_the_process_group_of_rank_0(tmp_path: Path) -> None:
    """msrun kills process groups with SIGKILL: the collector has a session of its own, and all that was pushed."""
    body = """
    os.setsid()
    def stop(step, micro_step):
        if (step, micro_step) == (2, 3):
            while not a.connected or a._delivery.outbox.held_items:
                time.sleep(0.01)
            os.killpg(0, 9)
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        train(a, before_micro_step=stop)
    """
    yaml = YAML + "  lost_after: 1\n  beat_interval: 0.2\n  linger: 0.5\n"
    status, _ = finish(script(tmp_path, body, yaml=yaml))
    assert status == -signal.SIGKILL
    content = collected(tmp_path)
    assert max(values(content, "local_loss")) == (2, 2)
    told = [c.text for c in content if isinstance(c, Comment) and c.kind in ("rank_lost", "missing")]
    assert len(told) == 2
    assert all("rank 0" in text for text in told)


def test_the_collector_inherits_our_variables_and_not_who_the_rank_is(tmp_path: Path) -> None:
    """What a user sets for all processes reaches it; the launcher's variables and the rank's identity do not."""
    body = """
    import json, psutil
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        train(a)
        while not a.connected:
            time.sleep(0.01)
        (collector,) = psutil.Process().children()
        print(json.dumps([name for name in collector.environ() if "RANK" in name or name.startswith("MS_")]))
    """
    rank = script(
        tmp_path,
        body,
        RANKD_RANK="0",
        RANKD_WORLD_SIZE="1",
        RANKD_OF_A_USER="1",
        RANK_TABLE_FILE="x",
        MS_ROLE="MS_WORKER",
    )
    out, said = rank.communicate(timeout=PATIENCE)
    assert (json.loads(out), said) == (["RANKD_OF_A_USER"], "")
    collected(tmp_path)


@pytest.mark.slow
def test_eight_ranks_with_long_lines_at_once(tmp_path: Path) -> None:
    """COMPLAINTS 1 and 2: every line whole and with its rank; equal values on all ranks and in a row all there."""
    name = "x" * 1_000
    body = f"""
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        for step in range(1, 51):
            with a.step(step):
                a.log("{name}"[:250], 1.0)
                a.micro_step(loss=0.25)
                a.end_step(loss=0.25)
    """
    yaml = "monitor: {train_state: {local_loss: True}}\nrankd: {output: out, exit_timeout: 60}\n"
    ranks = [script(tmp_path, body, yaml=yaml, RANKD_RANK=str(r), RANKD_WORLD_SIZE="8") for r in range(8)]
    assert [finish(r) for r in ranks] == [(0, "")] * 8
    content = collected(tmp_path)
    for rank in range(8):
        assert values(content, "local_loss", rank) == {(s, 1): 0.25 for s in range(1, 51)}
        assert values(content, name[:250], rank) == {(s, None): 1.0 for s in range(1, 51)}
    order = [(r.position.key, r.rank) for r in content if isinstance(r, Record)]
    assert order == sorted(order)
