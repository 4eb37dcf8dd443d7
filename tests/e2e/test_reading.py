"""Every reading command and every output, on a run of 1,024 ranks whose logs are rotated meanwhile.

The ranks are scripted peers of a real collector, one connection each; what they produce is known from the pure core.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from rankd.collector.protocol.records import Comment, RankBlock, Record
from rankd.collector.protocol.wire import Data, Message, Welcome, decode_message, encode_message

from ..collector.streams import Core, Training, training
from ..support import CollectorProcess, wait_for
from . import reading

pytestmark = pytest.mark.slow

RANKS = 1_024
STEPS = (1, 2)
OUTPUTS = [
    {"type": "jsonl"},
    {"type": "csv", "ranks": "1000-1023", "metrics": ["local_loss"]},
    {"type": "tensorboard"},
    {"type": "prometheus", "listen": "127.0.0.1:0"},
]


@dataclass(frozen=True)
class Run:
    """A run that has ended, what was produced in it, and what was seen while it was on."""

    output: Path
    exact: list[Record]
    screen: str
    served: str


class Ranks:
    """A connection for each rank."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * RANKS)
        self._sockets = [self._context.socket(zmq.DEALER) for _ in range(RANKS)]
        for socket in self._sockets:
            socket.connect(endpoint)

    def say(self, messages: list[Message]) -> None:
        """One message of each rank."""
        for socket, message in zip(self._sockets, messages, strict=True):
            socket.send(encode_message(message))

    def hear(self) -> list[Message]:
        """One message to each rank."""
        return [decode_message(socket.recv()) for socket in self._sockets]

    def close(self) -> None:
        """What was said still leaves."""
        self._context.destroy(linger=10_000)


def produced(trainings: list[Training]) -> list[Record]:
    """All records, in the order of the merged log."""
    core = Core()
    for one in trainings:
        core.open(one)
    for one in trainings:
        core.deliver(one)
    blocks = [each for each in core.released if isinstance(each, RankBlock)]
    assert all(isinstance(each, Comment) or not each.late for each in core.released)
    return [r for b in blocks for f in b.frames for r in f.records(b.position, b.rank, b.time)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The run, made once for all tests of this file."""
    output = tmp_path_factory.mktemp("thousand") / "out"
    trainings = [training(rank, RANKS, steps=STEPS) for rank in range(RANKS)]
    collector = CollectorProcess(output, outputs=OUTPUTS, logs={"rotate_size": "256KiB"})
    try:
        ranks = Ranks(str(collector.connection()["endpoint"]))
        ranks.say([one.hello for one in trainings])
        assert all(isinstance(answer, Welcome) for answer in ranks.hear())
        ranks.say([Data(one.items[:-1]) for one in trainings])
        address = re.search(r"http://\S+/metrics", collector.said())
        assert address is not None
        served = ""

        def all_served() -> bool:
            nonlocal served
            served = urllib.request.urlopen(address[0], timeout=60).read().decode()
            return len(re.findall(rf"^rankd_step\{{.*\}} {STEPS[-1]}\.0$", served, re.MULTILINE)) == RANKS

        def all_seen() -> bool:
            return all(
                each["step"] == STEPS[-1] for each in json.loads(reading.rankd("status", output, "--json"))["ranks"]
            )

        wait_for(all_served)
        wait_for(all_seen)
        screen = reading.rankd("status", output)
        ranks.say([Data(one.items[-1:]) for one in trainings])
        ranks.close()
        collector.ends(0)
        yield Run(output, produced(trainings), screen, served)
    finally:
        collector.kill()


def test_tail(run: Run) -> None:
    """One log, although it is in parts."""
    assert list(run.output.glob("merged.log.*"))
    reading.check_tail(run.output, run.exact)


def test_status(run: Run) -> None:
    """While the run is on a map of all ranks, of whom none is named; at its end, all accounts."""
    lines = run.screen.splitlines()
    assert lines[0].startswith(f"attempt 1, step 2/?, {RANKS} ranks")
    assert [line[8:] for line in lines if re.match(r" +\d+  \.+$", line)] == ["." * 64] * 16
    assert lines[-3] == f"{RANKS} live"
    reading.check_status(run.output, run.exact, RANKS)


def test_read_export_and_parse(run: Run, tmp_path: Path) -> None:
    """Every record, by each way."""
    assert len(run.exact) == RANKS * len(STEPS) * 10
    reading.check_read(run.output, run.exact)
    reading.check_exports(run.output, run.exact, tmp_path)
    reading.check_parse(run.output, run.exact)


def test_verify_and_rebuild(run: Run, tmp_path: Path) -> None:
    """The logs are whole, rotated as they are."""
    reading.check_verify_and_rebuild(run.output, run.exact, RANKS, tmp_path)
    reading.check_asking(run.output)


def test_outputs_that_are_files(run: Run) -> None:
    """JSON Lines has everything, CSV what it was given, TensorBoard a point a step with the mean of all ranks."""
    assert list(reading.jsonl_rows(run.output / "records.jsonl")) == [reading.row_of(r) for r in run.exact]
    some = [reading.row_of(r) for r in run.exact if r.rank >= 1000 and r.metric == "local_loss"]
    assert list(reading.csv_rows(run.output / "records.csv")) == some
    events = reading.event_values(run.output / "tensorboard" / "attempt_1")
    for step in STEPS:
        losses: dict[int, list[float]] = {}
        for r in run.exact:
            if r.metric == "local_loss" and r.position.step == step:
                assert isinstance(r.value, float)
                losses.setdefault(r.rank, []).append(r.value)
        means = [sum(values) / len(values) for values in losses.values()]
        assert events["local_loss/mean"][step] == pytest.approx(sum(means) / RANKS, rel=1e-6)
        assert events["local_loss/rank_1023"][step] == pytest.approx(means[1023], rel=1e-6)
        assert events["local_norm/decoder.layers.0"][step] == RANKS * 2  # micro-steps


def test_prometheus(run: Run) -> None:
    """The latest values of all ranks, with rank and host; a norm's figures, not a series for each parameter."""
    series = dict(re.findall(r"^(rankd_\w+\{.*\}) (\S+)$", run.served, re.MULTILINE))
    last = {(r.rank, r.metric): r.value for r in run.exact if r.name is None}
    for rank in (0, 511, 1023):
        labels = f'{{host="node{rank // 8}",rank="{rank}"}}'
        assert float(series[f"rankd_local_loss{labels}"]) == last[rank, "local_loss"]
    names = {name.partition("{")[0] for name in series}
    norms = {f"rankd_local_norm_{figure}" for figure in ("min", "max", "l2")}
    assert names == {"rankd_attempt", "rankd_step", "rankd_local_loss", "rankd_device_loss", "rankd_lr", *norms}
    assert len(series) == len(names) * RANKS
    assert "rankd_values_not_exported_total 0.0" in run.served
