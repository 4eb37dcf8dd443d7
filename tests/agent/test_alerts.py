"""agent/alerts.py and agent/anomaly.py: lines that values cross, what is told of it, and what becomes of it."""

from __future__ import annotations

import itertools
import math
import pickle
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import check_logs, collected, comments, finish, script
from tests.support import values as recorded

from rankd.agent.alerts import QUIET_STEPS, Alerts, Window, described
from rankd.agent.anomaly import Anomaly, AnomalyError, Reaction
from rankd.collector.config import AlertConfig
from rankd.collector.protocol.records import Frame, NameTable

from .training import Log, Model, run, values

NAN, INF = float("nan"), float("inf")
NAMES = NameTable(("embedding", "层.权重", "output"))
FINITE = st.floats(-1e6, 1e6)
NOT_FINITE = st.sampled_from([NAN, INF, -INF])


def told(alerts: Alerts, series: Sequence[float], metric: str = "grad_norm") -> list[tuple[int, str]]:
    """What is told of a value each step, from step 1 on."""
    frames = enumerate((Frame.scalar(metric, value) for value in series), 1)
    return [(step, remark.text) for step, frame in frames for remark in alerts.look(step, None, [frame])]


def steps_told(alert: AlertConfig, series: Sequence[float], warmup_steps: int = 0) -> list[int]:
    """In which steps something is told of a value each step."""
    return [step for step, _ in told(Alerts([alert], 0, warmup_steps), series, alert.metric)]


# -- the window --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.lists(FINITE, max_size=40))
def test_the_window_has_the_median_of_the_last_values(size: int, series: list[float]) -> None:
    """From when it is full on, whatever came before."""
    window = Window(size)
    for count, value in enumerate(series, 1):
        window.add(value)
        last = series[max(0, count - size) : count]
        assert window.median == (pytest.approx(statistics.median(last)) if count >= size else None)


@given(st.lists(st.floats(0.1, 10.0) | NOT_FINITE, max_size=60), st.sampled_from([1, 4, 5]))
def test_nan_and_inf_poison_no_threshold(series: list[float], size: int) -> None:
    """COMPLAINTS 4: with nan and inf between them, the finite values are judged as if those had never been there."""
    alert = AlertConfig("grad_norm", times=3, window=size)
    finite = [(step, value) for step, value in enumerate(series, 1) if math.isfinite(value)]
    alone = steps_told(alert, [value for _, value in finite])
    assert steps_told(alert, series) == [finite[index - 1][0] for index in alone]


# -- what crosses ------------------------------------------------------------------------------------------------------


def test_fixed_lines() -> None:
    """`above` and `below`; the line itself is not beyond the line; nan and inf are not this check's business."""
    assert steps_told(AlertConfig("grad_norm", above=10), [9, 10, 10.5, INF, NAN]) == [3]
    assert steps_told(AlertConfig("lr", below=0), [0, -1e-9, 1]) == [2]
    assert steps_told(AlertConfig("lr", below=-1), [-INF]) == []


def test_four_times_the_usual() -> None:
    """「前 100 步观察正常范围之后按正常值的 3 到 5 倍设告警线」: nothing before the window is full, the median then."""
    alert = AlertConfig("grad_norm", times=4)
    assert steps_told(alert, [*[1.0] * 99, 100.0]) == []
    assert steps_told(alert, [*[1.0] * 100, 4.0, 4.1]) == [102]
    assert told(Alerts([alert], 0), [*[0.5, 1.5] * 50, 48.25]) == [
        (101, "grad_norm is 48.25, above 4 (4 times the median of the last 100 values), at step 101")
    ]


def test_what_is_usual_may_change() -> None:
    """A spike moves no median; a new level that stays becomes the usual one."""
    alert = AlertConfig("grad_norm", times=3, window=5)
    assert steps_told(alert, [*[1.0] * 5, 100.0, *[1.0] * QUIET_STEPS, 4.0]) == [6, 5 + 1 + QUIET_STEPS + 1]
    level = [*[1.0] * 5, *[10.0] * 200]
    assert steps_told(alert, [*level, 29.0]) == [6]
    assert steps_told(alert, [*level, 31.0]) == [6, len(level) + 1]


def test_nothing_is_usual_where_the_median_is_not_above_zero() -> None:
    """Four times nothing would tell of every value."""
    alert = AlertConfig("grad_norm", times=4, window=3)
    assert steps_told(alert, [0, 0, 0, 5.0, -1, -1, -1, 5.0]) == []


def test_a_column_is_judged_by_its_worst_value() -> None:
    """Of a metric with names: the largest (for `below` the smallest), whose it is, and how many have crossed."""
    column = Frame.named("local_norm", NAMES, [11.0, 30.0, 2.0])
    (remark,) = Alerts([AlertConfig("local_norm", above=10)], 3).look(7, 2, [column])
    text = "local_norm is 30, above 10, at step 7 micro_step 2: 层.权重 (2 of 3 values)"
    assert (remark.kind, remark.text) == ("anomaly", text)
    assert remark.anomaly == Anomaly(7, 2, 3, "local_norm", 30.0, "层.权重", text)
    (remark,) = Alerts([AlertConfig("local_norm", below=3)], 3).look(7, None, [column])
    assert remark.text == "local_norm is 2, below 3, at step 7: output (1 of 3 values)"
    with_nan = Frame.named("local_norm", NAMES, [NAN, 1.0], [0, 2])
    (remark,) = Alerts([AlertConfig("local_norm", below=3)], 3).look(7, None, [with_nan])
    assert remark.text == "local_norm is 1, below 3, at step 7: output (1 of 2 values)"


def test_lists_are_judged_too() -> None:
    """The largest attention logit, and in which layer."""
    frame = Frame.lists("max_attention_logit", NAMES, [[1.0, 2.0], [], [3.0, 120.0]])
    (remark,) = Alerts([AlertConfig("max_attention_logit", above=100)], 0).look(5, None, [frame])
    assert remark.text == "max_attention_logit is 120, above 100, at step 5: output (1 of 4 values)"


def test_each_alert_of_a_metric_stands_for_itself() -> None:
    """Two lines for one metric: each is told when it is crossed; other metrics are not looked at."""
    alerts = Alerts([AlertConfig("loss", above=2), AlertConfig("loss", above=4)], 0)
    assert [step for step, _ in told(alerts, [1, 3, 5, 5], "loss")] == [2, 3]
    assert told(alerts, [100.0], "lr") == []


# -- how often ---------------------------------------------------------------------------------------------------------


def test_a_crossing_is_told_once_until_it_recovers() -> None:
    """And the same alert at most once in QUIET_STEPS steps; the next line says how many were left out."""
    alerts = Alerts([AlertConfig("loss", above=2)], 0)
    series = [3.0, 3.0, 1.0, 3.0, 1.0, 3.0, *[1.0] * QUIET_STEPS, 3.0]
    assert told(alerts, series, "loss") == [
        (1, "loss is 3, above 2, at step 1"),
        (len(series), f"loss is 3, above 2, at step {len(series)}; 2 more times since step 1, not told"),
    ]


def test_a_crossing_that_lasts_is_told_however_soon_it_began() -> None:
    """It began soon after another one, and it is told when the quiet time is over."""
    series = [3.0, 1.0, *[3.0] * 2 * QUIET_STEPS]
    assert told(Alerts([AlertConfig("loss", above=2)], 0), series, "loss") == [
        (1, "loss is 3, above 2, at step 1"),
        (1 + QUIET_STEPS, f"loss is 3, above 2, at step {1 + QUIET_STEPS}"),
    ]


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 60))
def test_the_rate_is_bounded_and_nothing_is_lost(crossed: list[bool], stride: int) -> None:
    """Whatever comes: lines keep their distance, each tells of a crossing, and the first one is always told."""
    alerts = Alerts([AlertConfig("loss", above=2)], 0)
    lines = []
    for index, beyond in enumerate(crossed):
        step = 1 + index * stride
        remarks = alerts.look(step, None, [Frame.scalar("loss", 3.0 if beyond else 1.0)])
        assert len(remarks) <= beyond
        lines += [step] * len(remarks)
    assert all(later - earlier >= QUIET_STEPS for earlier, later in itertools.pairwise(lines))
    assert lines[:1] == [1 + index * stride for index, beyond in enumerate(crossed) if beyond][:1]


def test_going_back_to_an_earlier_step_ends_the_quiet_time() -> None:
    """A training that loads a checkpoint in the same process is told of as from the start."""
    alerts = Alerts([AlertConfig("loss", above=2)], 0)
    looked = [(90, 3.0), (91, 1.0), (20, 3.0)]
    assert [len(alerts.look(step, None, [Frame.scalar("loss", value)])) for step, value in looked] == [1, 0, 1]


def test_warmup_steps_count_and_are_not_told() -> None:
    """「前 N 步只记录不告警」: their values say what is usual, and a crossing that lasts is told after them."""
    assert steps_told(AlertConfig("loss", above=2), [3.0] * 5, warmup_steps=3) == [4]
    assert steps_told(AlertConfig("loss", times=3, window=4), [1, 1, 1, 1, 9, 1, 9], warmup_steps=6) == [7]


# -- in a training -----------------------------------------------------------------------------------------------------


def config(*alerts: dict[str, object], **older: object) -> dict[str, object]:
    return {
        "rankd": {"alerts": list(alerts)},
        "monitor": {"train_state": {"local_loss": True}},
        "monitor_config": {"monitor_on": True, **older},
    }


def spike(step: int, micro_step: int) -> float:
    """A loss that is 9 in one micro-step and 1 otherwise."""
    return 9.0 if (step, micro_step) == (2, 3) else 1.0


def test_an_alert_has_the_step_computed_and_told() -> None:
    """With `interval` 100 nothing is written, and the spike is told at its micro-step."""
    log = run(config({"metric": "local_loss", "above": 5}, interval=100), None, loss=spike)
    assert log.remarks == [(2, 3, "anomaly local_loss is 9, above 5, at step 2 micro_step 3")]
    assert log.frames == []


def test_exception_dump_writes_the_step_of_an_alert() -> None:
    """The step is written from its first micro-step on, and no other."""
    asked = config({"metric": "local_loss", "above": 5}, interval=100, exception_dump=True)
    log = run(asked, None, loss=spike, end={"loss": 1.0})
    assert values(log, "local_loss") == {(2, micro): spike(2, micro) for micro in (1, 2, 3, 4)}
    assert values(log, "loss") == {(2, None): 1.0}


def test_warmup_steps_hold_for_both_checks() -> None:
    """`monitor_config.warmup_steps`: neither nan nor a crossing is told before."""
    asked = config({"metric": "local_loss", "above": 5}, nan_check=True, warmup_steps=2)
    log = run(asked, None, loss=lambda _, micro: NAN if micro == 4 else 9.0)
    assert [text for _, _, text in log.remarks] == [
        "anomaly local_loss is 9, above 5, at step 3 micro_step 1",
        "anomaly local_loss is nan at step 3 micro_step 4",
    ]


def test_attention_logits_have_an_interval_of_their_own() -> None:
    """They are looked at where they are recorded, also where `monitor_config` leaves the step out."""
    model = Model()
    largest = np.zeros(1, np.float32)
    model.logits = {"layer.0": largest}
    asked = {
        "rankd": {"alerts": [{"metric": "max_attention_logit", "above": 100}]},
        "callbacks": [{"type": "MaxLogitsMonitor", "step_interval": 2}],
        "monitor_config": {"monitor_on": True, "interval": 100},
    }
    log = run(asked, model, forward=lambda *_: largest.fill(120.0))
    assert log.remarks == [
        (2, None, "anomaly max_attention_logit is 120, above 100, at step 2: layer.0 (1 of 1 value)")
    ]
    assert log.errors == []


def test_without_alerts_there_is_nothing() -> None:
    """Off: no step is computed for it, and nothing is told."""
    log = run(config(interval=100), None, loss=spike)
    assert (log.frames, log.remarks) == ([], [])


def test_what_the_loop_does_not_give_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """An alert on `grad_norm` of a loop that gives none: the warning after the first step names the alert."""
    log: Log = run(config({"metric": "grad_norm", "above": 5}), None, (1, 2), loss=spike, end={"loss": 1.0})
    assert log.errors == []
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "not given by the training loop in step 1 (see Agent.micro_step and end_step): rankd.alerts[0]"
    )


# -- what becomes of it ------------------------------------------------------------------------------------------------

ONE = Anomaly(2, 3, 0, "local_loss", 9.0, None, "local_loss is 9, above 5, at step 2 micro_step 3")
SAME_STEP = Anomaly(2, None, 0, "loss", 9.0, None, "loss is 9, above 5, at step 2")
LATER = Anomaly(3, None, 0, "loss", 9.0, None, "loss is 9, above 5, at step 3")


def test_the_callback_is_called_once_for_each() -> None:
    """In order; what it raises goes to `trouble`, and costs the next ones nothing."""
    seen: list[Anomaly] = []
    trouble: list[tuple[str, str]] = []

    def tell(anomaly: Anomaly) -> None:
        seen.append(anomaly)
        raise ValueError("no room for a checkpoint")

    reaction = Reaction(False, tell, lambda where, error: trouble.append((where, str(error))))
    assert reaction.act() is None
    reaction.found([None, ONE, None, SAME_STEP])
    assert [reaction.act(), reaction.act()] == [None, None]
    assert seen == [ONE, SAME_STEP]
    assert trouble == [("the callback on_anomaly", "no room for a checkpoint")] * 2


def test_stop_raises_once_a_step() -> None:
    """The error is about the first anomaly; what is found on the way out of the step is called back and not raised."""
    seen: list[Anomaly] = []
    reaction = Reaction(True, seen.append, lambda *_: None)
    errors = []
    for anomalies in ([ONE, SAME_STEP], [SAME_STEP], [LATER]):
        reaction.found(anomalies)
        errors.append(reaction.act())
    assert [error and error.anomaly for error in errors] == [ONE, None, LATER]
    assert seen == [ONE, SAME_STEP, SAME_STEP, LATER]
    assert str(errors[0]) == ONE.text


def test_the_error_survives_pickling() -> None:
    """It crosses processes (a launcher that re-raises) with all it says."""
    again = pickle.loads(pickle.dumps(AnomalyError(ONE)))
    assert (str(again), again.anomaly) == (ONE.text, ONE)


@pytest.mark.parametrize(
    ("alert", "text"),
    [
        (AlertConfig("loss", above=10), "above 10"),
        (AlertConfig("loss", below=-0.5), "below -0.5"),
        (AlertConfig("loss", times=4, window=50), "above 4 times the median of the last 50 values"),
    ],
)
def test_a_line_in_words(alert: AlertConfig, text: str) -> None:
    """As the log and `rankd check` say it."""
    assert described(alert) == text


# -- in a process ------------------------------------------------------------------------------------------------------

YAML = """
monitor: {train_state: {local_loss: True, device_loss: True}}
monitor_config: {monitor_on: True, interval: 100, nan_check: True, exception_dump: True}
rankd:
  output: out
  alerts: [{metric: local_loss, above: 5}]
  on_anomaly: stop
  exit_timeout: 60
"""
TRAIN = """
from rankd.agent import AnomalyError
def train(agent, wrong, value):
    for step in (1, 2, 3):
        with agent.step(step):
            for micro_step in (1, 2, 3):
                print("begins", step, micro_step, flush=True)
                agent.micro_step(loss=value if (step, micro_step) == wrong else 1.0)
            agent.end_step(loss=value if (step, None) == wrong else 1.0)
"""


def log_of(tmp_path: Path) -> list[str]:
    """The lines of rank 0, from the first that is no comment."""
    lines = (tmp_path / "out" / "rank_0" / "monitor.log").read_text().splitlines()
    return list(itertools.dropwhile(lambda line: line.startswith("#"), lines))


@pytest.mark.slow
def test_stop_ends_the_training_when_all_is_recorded(tmp_path: Path) -> None:
    """The script ends with AnomalyError; the step that was not due, the line at its place and the reason are there."""
    body = """
    agent = Agent.from_yaml("train.yaml", on_anomaly=lambda a: print(a, flush=True))
    with agent:
        try:
            train(agent, (2, 2), 9.0)
        except AnomalyError:
            print("held:", agent._delivery.outbox.held_items, flush=True)
            raise
    """
    process = script(tmp_path, TRAIN + textwrap.dedent(body), yaml=YAML)
    assert process.stdout is not None
    said = process.stdout.readlines()
    status, complained = finish(process)
    text = "local_loss is 9, above 5, at step 2 micro_step 2"
    assert status == 1
    assert complained.splitlines()[-1] == f"rankd.agent.anomaly.AnomalyError: {text}"
    anomaly = Anomaly(2, 2, 0, "local_loss", 9.0, None, text)
    assert [line.strip() for line in said[-3:]] == ["begins 2 2", str(anomaly), "held: 0"]
    content = collected(tmp_path)
    assert recorded(content, "local_loss") == {(2, 1): 1.0, (2, 2): 9.0}
    assert log_of(tmp_path) == [
        '{ "step": 2, "micro_step": 1 }',
        '{ "micro_step": 1, "local_loss": 1.0 }',
        '{ "step": 2, "micro_step": 2 }',
        '{ "micro_step": 2, "local_loss": 9.0 }',
        f"# anomaly {text}",
        '{ "step": 2, "micro_step": 3 }',
        f"# exception AnomalyError: {text}",
    ]
    assert comments(content)["first_failure"] == [f"rank 0: AnomalyError: {text}"]
    check_logs(tmp_path / "out", 1)


@pytest.mark.slow
def test_a_stop_at_the_end_of_a_step_stands_there(tmp_path: Path) -> None:
    """nan_check stops as alerts do; outside of the agent's context the exit says goodbye, and nothing is said twice."""
    process = script(tmp_path, TRAIN + 'train(Agent.from_yaml("train.yaml"), (3, None), float("nan"))', yaml=YAML)
    status, complained = finish(process)
    text = "device_loss is nan at step 3"
    assert (status, complained.splitlines()[-1]) == (1, f"rankd.agent.anomaly.AnomalyError: {text}")
    told = comments(collected(tmp_path))
    assert told["first_failure"] == [f"rank 0: AnomalyError: {text}"]
    assert told["exception"] == [f"AnomalyError: {text}"]
    assert told["rank_ended"] == [f"rank 0 ended early: AnomalyError: {text}"]
    assert [line for line in log_of(tmp_path) if line.startswith("# ")] == [
        f"# anomaly {text}",
        "# anomaly loss is nan at step 3",
        f"# exception AnomalyError: {text}",
    ]


@pytest.mark.slow
def test_the_callback_cannot_harm_the_training(tmp_path: Path) -> None:
    """What it raises is said once, and it may record something itself."""
    body = """
    def tell(anomaly):
        agent.log("saved_at", anomaly.step)
        raise OSError("no room for a checkpoint")
    with Agent.from_yaml("train.yaml", on_anomaly=tell) as agent:
        train(agent, (2, None), float("inf"))
        print(agent.errors)
    """
    process = script(tmp_path, TRAIN + textwrap.dedent(body), yaml=YAML.replace("stop", "log"))
    assert process.stdout is not None
    said = process.stdout.readlines()
    status, complained = finish(process)
    assert status == 0
    assert complained.count("rankd: the callback on_anomaly failed, training goes on (this is said once)") == 1
    assert said[-1].strip() == "{'the callback on_anomaly: OSError': 2}"
    content = collected(tmp_path)
    assert recorded(content, "saved_at") == {(2, None): 2.0}
    assert "first_failure" not in comments(content)
