"""The optional sinks: what they write, and that each fails alone."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import re
import urllib.request
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankd.collector.config import OutputConfig, RankdConfig
from rankd.collector.outputs import optional_sinks, sink_of
from rankd.collector.protocol.csvtext import CSV_HEAD, block_rows
from rankd.collector.protocol.jsonl import block_lines, record_object
from rankd.collector.protocol.records import Comment, Frame, Level, NameTable, Position, RankBlock
from rankd.collector.run import Released
from rankd.collector.settings import SettingsError
from rankd.collector.sinks import guarded, prometheus
from rankd.collector.sinks.prometheus import PrometheusSink, series_name
from rankd.collector.sinks.sink import FanOut, Off
from rankd.collector.sinks.speclog import MERGED_LOG, SpecLogSink
from rankd.collector.sinks.table import FileSink, csv_sink, jsonl_sink
from rankd.collector.sinks.tensorboard import TensorBoardSink, layer_group

from ... import strategies
from ..releases import begin, late, steps, write_logs

ODD = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1]


def refuse(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


@st.composite
def rank_blocks(draw: st.DrawFn) -> RankBlock:
    """Any block as the ordering releases it."""
    position = draw(strategies.positions)
    frames = draw(st.lists(strategies.frames(position.level), max_size=4).map(tuple))
    return RankBlock(draw(st.integers(0, 9)), position, frames, time=draw(strategies.seconds))


# -- JSON Lines and CSV -----------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(block=rank_blocks())
def test_json_lines_are_strict_and_whole(block: RankBlock) -> None:
    """Each record is one object that a strict reader takes; the bulk writer and the single one agree."""
    records = [r for frame in block.frames for r in frame.records(block.position, block.rank, block.time)]
    found = [json.loads(line, parse_constant=refuse) for line in block_lines(block).decode().split("\n")[:-1]]
    assert found == [json.loads(json.dumps(record_object(r), allow_nan=False)) for r in records]


@settings(max_examples=50)
@given(block=rank_blocks())
def test_csv_cells_read_back(block: RankBlock) -> None:
    """A reader of CSV finds each record's name and value again, whatever characters the name has."""
    text = (CSV_HEAD + block_rows(block)).decode()
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    records = [r for frame in block.frames for r in frame.records(block.position, block.rank, block.time)]
    assert len(rows) == len(records)
    for row, record in zip(rows, records, strict=True):
        if isinstance(record.value, float):
            assert repr(float(row["value"])) == repr(record.value)
            assert row["values"] == ""
        else:
            assert row["value"] == ""
            assert repr([float(value) for value in json.loads(row["values"])]) == repr(list(record.value))


def test_values_that_json_does_not_have_are_strings() -> None:
    """NaN and the infinities are "NaN", "Infinity" and "-Infinity"; all others keep every bit."""
    table = NameTable(tuple(f"p{i}" for i in range(len(ODD))))
    block = RankBlock(0, Position(1, 2, 3), (Frame.named("local_norm", table, ODD),), time=1.5)
    values = [json.loads(line)["value"] for line in block_lines(block).splitlines()]
    assert values[:3] == ["NaN", "Infinity", "-Infinity"]
    assert [repr(v) for v in values[3:]] == [repr(v) for v in ODD[3:]]
    first = json.loads(block_lines(block).splitlines()[0])
    keys = ["attempt", "step", "micro_step", "rank", "metric", "name", "value", "time"]
    assert list(first) == keys


def test_tokens_carry_their_layer() -> None:
    """A tpe record has block, layer, mtp_idx and iter; its value is a list of integers."""
    frame = Frame.lists("tpe", NameTable(("mtp.0.2",)), [[3, 4]], 30)
    (line,) = block_lines(RankBlock(0, Position(1, 4, 2), (frame,))).splitlines()
    found = json.loads(line)
    assert (found["block"], found["mtp_idx"], found["layer"], found["iter"], found["value"]) == (
        "mtp",
        0,
        2,
        30,
        [3, 4],
    )


@pytest.mark.parametrize("make", [jsonl_sink, csv_sink])
@pytest.mark.parametrize("checkpoint_at", [0, 2, 5])
def test_a_file_resumes_exactly(tmp_path: Path, make: Callable[[Path], FileSink], checkpoint_at: int) -> None:
    """Restarted from any checkpoint, with more written since, the file is the one of a run without restart."""
    pieces = [steps(i, i) for i in range(1, 9)]
    whole, again = make(tmp_path / "a"), make(tmp_path / "b")
    sizes: dict[str, int] = {}
    for number, piece in enumerate(pieces):
        whole.write(piece)
        if number == checkpoint_at:
            sizes = dict(again.sizes())
        if number < 7:
            again.write(piece)
    again.close()
    again = make(tmp_path / "b")
    again.resume(sizes)
    for piece in pieces[checkpoint_at:]:
        again.write(piece)
    again.settle()
    again.close()
    whole.close()
    (a,), (b,) = (list((tmp_path / name).iterdir()) for name in "ab")
    assert a.read_bytes() == b.read_bytes()


def test_a_file_that_the_checkpoint_does_not_know_is_kept(tmp_path: Path) -> None:
    """An output that was off for a while appends; nothing that it wrote earlier is cut."""
    (tmp_path / "records.jsonl").write_bytes(b"{}\n")
    sink = jsonl_sink(tmp_path)
    sink.resume({MERGED_LOG: 10})
    sink.write(steps(1, 1))
    sink.settle()
    sink.close()
    assert (tmp_path / "records.jsonl").read_bytes().startswith(b'{}\n{"attempt"')


# -- choosing, and failing alone --------------------------------------------------------------------------------------


def test_outputs_take_the_ranks_and_metrics_they_are_given(tmp_path: Path) -> None:
    """`metrics` and `ranks` of each output; the text logs have everything all the same."""
    outputs = [{"type": "jsonl", "metrics": ["lr", "mine"], "ranks": "0,2"}, {"type": "csv", "ranks": 1}]
    config = RankdConfig.from_mapping({"output": str(tmp_path / "out"), "outputs": outputs})
    sink = sink_of(config, lambda rank: f"node{rank}")
    released = [*begin(1), *steps(1, 3)]
    sink.write(released)
    sink.close()
    found = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    assert {(r["metric"], r["rank"]) for r in found} == {("lr", 0), ("lr", 2), ("mine", 0), ("mine", 2)}
    rows = csv.DictReader((tmp_path / "out" / "records.csv").read_text().splitlines())
    assert {row["rank"] for row in rows} == {"1"}
    write_logs(tmp_path / "plain", released)
    assert (tmp_path / "out" / MERGED_LOG).read_bytes() == (tmp_path / "plain" / MERGED_LOG).read_bytes()


@pytest.mark.parametrize(
    ("section", "where"),
    [
        ([{"type": "jsnol"}], "rankd.outputs[0].type"),
        ([{"type": "csv"}, {"type": "csv"}], "rankd.outputs[1].type"),
        ([{"typ": "csv"}], "rankd.outputs[0].typ"),
        ([{"ranks": "a"}], "rankd.outputs[0].ranks"),
        ([{"metrics": "lr"}], "rankd.outputs[0].metrics"),
        ([{"type": "prometheus", "listen": "9464"}], "rankd.outputs[0].listen"),
        ({"type": "csv"}, "rankd.outputs"),
    ],
)
def test_wrong_outputs_name_their_path(section: object, where: str) -> None:
    """What is wrong with an output is told with its dotted path, and the configuration survives a round trip."""
    with pytest.raises(SettingsError) as caught:
        RankdConfig.from_mapping({"outputs": section})
    assert where in str(caught.value)
    config = RankdConfig.from_mapping({"outputs": [{"type": "csv", "ranks": "0-3"}]})
    assert RankdConfig.from_mapping(config.to_mapping()) == config
    assert config.outputs == (OutputConfig("csv", None, "0-3"),)


class Broken(Off):
    """A sink of somebody else that fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls = 0

    def write(self, released: Sequence[Released]) -> None:
        self.calls += 1
        raise self.error


def test_a_sink_that_breaks_is_off_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bug in an optional sink costs that sink, one warning, and no line of the logs."""
    broken = Broken(RuntimeError("oops"))
    guard = guarded.Guarded("theirs", broken)
    sink = FanOut([SpecLogSink(tmp_path), guard])
    with caplog.at_level(logging.WARNING):
        for step in range(1, 5):
            sink.write(steps(step, step))
    sink.close()
    assert (guard.off, guard.failures, broken.calls) == (True, 1, 1)
    assert [r.message.count("oops") for r in caplog.records] == [1]
    assert b'"step": 4' in (tmp_path / MERGED_LOG).read_bytes()


def test_a_full_place_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While its folder cannot be used an output waits, is told of once, and loses nothing when it can again."""
    blocked = tmp_path / "place"
    blocked.write_text("a file where a directory should be")
    guard = guarded.Guarded("jsonl", jsonl_sink(blocked))
    with caplog.at_level(logging.WARNING):
        guard.write(steps(1, 1))
        guard.write(steps(2, 2))
    assert len(caplog.records) == 1
    blocked.unlink()
    guard.write(steps(3, 3))
    guard.close()
    found = [json.loads(line)["step"] for line in (blocked / "records.jsonl").read_text().splitlines()]
    assert sorted(set(found)) == [1, 2, 3]
    assert not guard.off


def test_an_output_that_cannot_be_made_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A port that is in use costs that output and a warning that names it."""
    first = PrometheusSink("127.0.0.1:0", str)
    config = RankdConfig(output=tmp_path, outputs=(OutputConfig("prometheus", listen=f"127.0.0.1:{first.port}"),))
    with caplog.at_level(logging.WARNING):
        assert optional_sinks(config, str) == []
    first.close()
    assert "prometheus is left out" in caplog.text


# -- TensorBoard ------------------------------------------------------------------------------------------------------


def read_events(folder: Path) -> dict[str, dict[int, object]]:
    """Tag → step → value, by TensorBoard's own reader."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # protobuf and numpy, of each other
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
        accumulator.Reload()
    out: dict[str, dict[int, object]] = {}
    for tag in accumulator.Tags()["scalars"]:
        out[tag] = {event.step: event.value for event in accumulator.Scalars(tag)}
    for tag in accumulator.Tags()["histograms"]:
        out[tag] = {event.step: event.histogram_value.num for event in accumulator.Histograms(tag)}
    return out


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    """Scalars of each rank, their mean, least and most, and histograms by layer, one point a step."""
    sink = TensorBoardSink(tmp_path)
    sink.write([*begin(1), *steps(1, 5), Comment(None, "end", "")])
    sink.close()
    found = read_events(tmp_path / "tensorboard" / "attempt_1")
    assert found["local_loss/rank_2"] == {step: step + 0.25 for step in range(1, 6)}
    assert found["local_loss/mean"] == {step: step + 0.125 for step in range(1, 6)}
    assert (found["local_loss/min"][3], found["local_loss/max"][3]) == (3.0, 3.25)
    assert found["local_norm/decoder.layers.0"] == dict.fromkeys(range(1, 6), 6.0)
    assert {"lr/rank_0", "loss/mean", "mine/max"} <= set(found)


def test_an_attempt_has_a_folder_of_its_own_and_a_restart_doubles_nothing(tmp_path: Path) -> None:
    """Steps that come again in another attempt are another curve; those repeated after a restart replace the first."""
    sink = TensorBoardSink(tmp_path)
    sink.write([*steps(1, 4), *begin(2), *steps(3, 4, attempt=2)])
    sink.close()
    sink = TensorBoardSink(tmp_path)
    sink.resume({MERGED_LOG: 1})
    sink.write([*steps(4, 6, attempt=2), late(2, 1, 2)])
    sink.close()
    assert set(read_events(tmp_path / "tensorboard" / "attempt_1")["lr/mean"]) == {1, 2, 3, 4}
    assert sorted(read_events(tmp_path / "tensorboard" / "attempt_2")["lr/mean"]) == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("decoder.layers.12.self_attention.q.weight", "decoder.layers.12"),
        ("mtp.layers.0.transformer_layer.mlp.weight", "mtp.layers.0"),
        ("embedding.word.weight", "embedding"),
        ("weight", "weight"),
    ],
)
def test_layer_groups(name: str, group: str) -> None:
    """A parameter belongs to its layer, or to its first component."""
    assert layer_group(name) == group


# -- Prometheus -------------------------------------------------------------------------------------------------------


def scrape(sink: PrometheusSink, openmetrics: bool = False) -> str:
    accept = "application/openmetrics-text; version=1.0.0" if openmetrics else "text/plain"
    asked = urllib.request.Request(f"http://127.0.0.1:{sink.port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(asked, timeout=20) as answer:
        text: str = answer.read().decode()
        return text


def test_prometheus_scrapes_the_latest_values() -> None:
    """Each rank's latest values with rank and host; names give least, most and L2, not a series each."""
    sink = PrometheusSink("127.0.0.1:0", lambda rank: f"node{rank // 2}")
    sink.write([*begin(1), *steps(1, 3)])
    text = scrape(sink)
    sink.close()
    assert 'rankd_step{host="node1",rank="2"} 3.0' in text
    assert 'rankd_local_loss{host="node0",rank="1"} 3.125' in text
    assert 'rankd_local_norm_max{host="node0",rank="0"} 6.0' in text
    assert "rankd_values_not_exported_total 0.0" in text


def parsed(text: str, openmetrics: bool = False) -> dict[str, dict[str, float]]:
    """Family → rank → value, by prometheus_client's own parser; nothing may stand twice."""
    from prometheus_client.openmetrics import parser as strict
    from prometheus_client.parser import text_string_to_metric_families

    read = strict.text_string_to_metric_families if openmetrics else text_string_to_metric_families
    out: dict[str, dict[str, float]] = {}
    for family in read(text):
        assert family.name not in out, family.name
        ranks = [sample.labels.get("rank", "") for sample in family.samples]
        assert len(set(ranks)) == len(ranks), family
        out[family.name] = {sample.labels.get("rank", ""): sample.value for sample in family.samples}
    return out


CLASHING = (
    *("attempt", "Attempt", "rankd_attempt", "values_not_exported", "values_not_exported_total", "local_loss_", "_"),
    *(
        "local_norm_min",
        "local_norm_l2",
        "tpe_max",
        "a.b",
        "a/b",
        "a_b",
        "a b",
        "a__b",
        "a_2e_b",
        "U__a_2e_b",
        "U__attempt",
    ),
    *("损失", "准确", "é", "e\u0301", "9", "9a", "x", "x_total", "x_created", "x_count", "x_info", "loss_max", "a:b"),
)


@pytest.mark.parametrize("openmetrics", [False, True])
def test_a_users_metric_never_meets_a_series_of_ours_nor_another_metrics(openmetrics: bool) -> None:
    """Whatever they are called, in whatever order they come: each has a series, and all keep their own values."""
    values = {metric: float(number) for number, metric in enumerate(CLASHING, 100)}
    served = []
    for metrics in (CLASHING, CLASHING[::-1]):
        sink = PrometheusSink("127.0.0.1:0", str)
        frames = tuple(Frame.scalar(metric, values[metric]) for metric in metrics)
        # `loss` of a micro-step is the user's own, that of the step is not.
        micro = (*frames, Frame.scalar("local_loss", 1.5), Frame.scalar("loss", 2.5))
        sink.write([*steps(6, 7, ranks=(0, 1)), *(RankBlock(rank, Position(3, 8, 1), micro) for rank in (0, 1))])
        served.append(parsed(scrape(sink, openmetrics), openmetrics))
        sink.close()
    found = served[0]
    assert served[1] == found
    for metric, value in values.items():
        assert found[f"rankd_{series_name(metric, Level.MICRO_STEP)}"] == {"0": value, "1": value}, metric
    ours = {"attempt": 3.0, "step": 8.0, "local_loss": 1.5, "loss": 3.5, "U__loss": 2.5, "local_norm_min": 7.0}
    assert {name: found[f"rankd_{name}"]["0"] for name in ours} == ours
    assert found["rankd_values_not_exported"] == {"": 0.0}
    assert len(found) == len(CLASHING) + len({*ours, "lr", "mine", "local_norm_max", "local_norm_l2"}) + 1


@given(st.sets(strategies.user_metrics, min_size=2, max_size=8))
def test_two_metrics_have_two_names(metrics: set[str]) -> None:
    """And each name is one that Prometheus allows."""
    names = {series_name(metric, Level.STEP) for metric in metrics}
    assert len(names) == len(metrics)
    assert all(re.fullmatch("[a-zA-Z0-9_]+", name, re.ASCII) for name in names)


@given(st.lists(st.text("_.U2e/", min_size=1, max_size=9), unique=True))
def test_names_made_of_the_escapes_own_characters_stay_apart(metrics: list[str]) -> None:
    """The escape's own marks are escaped too."""
    assert len({series_name(metric, Level.STEP) for metric in metrics}) == len(metrics)


def test_another_name_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """collector.log says under which name the metric is found."""
    sink = PrometheusSink("127.0.0.1:0", str)
    with caplog.at_level(logging.INFO):
        for step in (1, 2):
            block = (Frame.scalar("eval/loss", 1.0), Frame.scalar("mine", 1.0))
            sink.write([RankBlock(rank, Position(1, step), block) for rank in (0, 1)])
    text = scrape(sink)
    sink.close()
    told = [record.message for record in caplog.records if "the metric" in record.message]
    assert len(told) == 1
    assert told[0].startswith("the metric 'eval/loss' is rankd_U__eval_2f_loss for Prometheus")
    assert "# HELP rankd_U__eval_2f_loss latest eval/loss of a rank\n" in text


def test_the_number_of_series_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics beyond the bound, and ranks beyond it, are counted and not exported."""
    monkeypatch.setattr(prometheus, "MAX_METRICS", 10)
    monkeypatch.setattr(prometheus, "MAX_RANKS", 4)
    sink = PrometheusSink("127.0.0.1:0", str)
    many = tuple(Frame.scalar(f"user metric {i}", 1.0) for i in range(50))
    sink.write([RankBlock(rank, Position(1, 1), many) for rank in range(8)])
    text = scrape(sink)
    sink.close()
    assert text.count("# TYPE rankd_U__user") == 8
    assert text.count("rankd_U__user_20_metric_20_0{") == 4
    assert f"rankd_values_not_exported_total {4 * 42 + 4 * 50}.0" in text
