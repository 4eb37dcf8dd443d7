"""What every reading command and every file output must give of a run, whatever made that run.

Each check takes the output directory and the records that were produced, in the order of the merged log, and compares
what a user gets with those.
"""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rankd.collector.entries import Checkpoint
from rankd.collector.parsing import records_of_log
from rankd.collector.protocol.records import Record
from rankd.collector.reading import read
from rankd.collector.replay import Replay
from rankd.collector.run import Released
from rankd.collector.sinks.parts import LogReader
from rankd.collector.sinks.speclog import MERGED_LOG

from ..support import PATIENCE

# Half of the last decimal that the text logs print of norms and of the step summary's losses.
TEXT_ERROR = 5.1e-7


def rankd(command: str, *arguments: str | Path, status: int = 0) -> str:
    """What the command prints; it must end with this status, and say nothing on standard error where that is 0."""
    line: list[str | Path] = [sys.executable, "-m", "rankd.collector", command, *arguments]
    done = subprocess.run(line, capture_output=True, timeout=PATIENCE)
    assert done.returncode == status, done.stderr.decode()
    if not status and command != "parse":
        assert done.stderr == b""
    return done.stdout.decode()


def key_of(record: Record) -> tuple[object, ...]:
    """Everything that tells a record from all others."""
    return (record.position, record.rank, record.metric, record.name)


def in_blocks(records: Sequence[Record]) -> list[Record]:
    """The same in an order of their own within each block, where text and journal have different ones.

    The blocks must be in order already.
    """
    places = [(record.position.key, record.rank) for record in records]
    assert places == sorted(places)
    return sorted(records, key=lambda r: (r.position.key, r.rank, r.metric, r.name or ""))


def is_printed(found: Record, exact: Record) -> bool:
    """Whether a record that was read from text is this one, as far as the text's decimals go."""
    error = {"lr": 5.1e-7 * abs(float(exact.value)) if isinstance(exact.value, float) else 0.0, "step_time_ms": 0.51}
    if key_of(found) != key_of(exact) or isinstance(found.value, tuple) != isinstance(exact.value, tuple):
        return False
    if isinstance(found.value, tuple) and isinstance(exact.value, tuple):
        rel = 5.1e-4 if exact.metric == "max_attention_logit" else 0.0
        return len(found.value) == len(exact.value) and all(
            math.isclose(f, e, rel_tol=rel) for f, e in zip(found.value, exact.value, strict=True)
        )
    assert isinstance(found.value, float)
    assert isinstance(exact.value, float)
    return math.isclose(found.value, exact.value, rel_tol=0.0, abs_tol=error.get(exact.metric, TEXT_ERROR))


def check_tail(output: Path, exact: Sequence[Record]) -> None:
    """The whole log byte for byte; one rank's metric with the values that it had; the last lines."""
    with LogReader(output / MERGED_LOG) as log:
        whole = b"".join(log.lines()).decode()
    assert rankd("tail", output, "-n", "100000000") == whole
    assert rankd("tail", output, "-n", "3").splitlines() == whole.splitlines()[-3:]
    rank = exact[-1].rank
    wanted = [r for r in exact if r.rank == rank and r.metric == "local_loss"]
    options = ("--json", "--rank", str(rank), "--metric", "local_loss", "-n", str(len(exact)))
    found = [json.loads(line) for line in rankd("tail", output, *options).splitlines()]
    assert [(o["step"], o["micro_step"], o["value"]) for o in found] == [
        (r.position.step, r.position.micro_step, r.value) for r in wanted
    ]
    assert len(found) > 1


def check_status(output: Path, exact: Sequence[Record], ranks: int) -> None:
    """It has ended, nobody is behind, and all that was produced is counted as written."""
    status = json.loads(rankd("status", output, "--json"))
    assert status["ended"]
    assert status["step"] == exact[-1].position.step
    assert [each["rank"] for each in status["ranks"]] == list(range(ranks))
    assert {(each["state"], each["lag"], each["dropped"]) for each in status["ranks"]} == {("finished", 0, 0)}
    assert sum(each["written"] for each in status["ranks"]) == len(exact)
    last = {r.rank: r.value for r in exact if r.metric == "local_loss"}
    assert {each["rank"]: each["loss"] for each in status["ranks"]} == last
    assert status["collector"]["refused"] == {}


def check_read(output: Path, exact: Sequence[Record]) -> None:
    """`rankd.collector.read`: each record, to the last bit, in order; and as a table."""
    assert list(read(output)) == list(exact)
    frame = read(output).to_pandas()
    rows = zip(frame["step"], frame["rank"], frame["metric"], frame["value"], frame["values"], strict=True)
    assert [(step, rank, metric, values or value) for step, rank, metric, value, values in rows] == [
        (r.position.step, r.rank, r.metric, r.value) for r in exact
    ]
    assert frame["micro_step"].isna().sum() == sum(r.position.micro_step is None for r in exact)


def check_exports(output: Path, exact: Sequence[Record], scratch: Path) -> None:
    """Each format has each record once, in order, with every bit of its value; a selection is applied."""
    for form, rows_of in (("jsonl", jsonl_rows), ("csv", csv_rows), ("parquet", parquet_rows)):
        file = scratch / f"records.{form}"
        assert rankd("export", output, "--format", form, "-o", file) == f"{len(exact)} records: {file}\n"
        assert list(rows_of(file)) == [row_of(record) for record in exact]
    some = [r for r in exact if r.rank == 1 and r.metric == "local_norm" and r.position.step == 2]
    lines = rankd("export", output, "--format", "jsonl", "-o", "-", "--rank", "1", "--metric", "local_norm",
                  "--step", "2").splitlines()  # fmt: skip
    assert [json.loads(line)["value"] for line in lines] == [r.value for r in some]
    assert some


def row_of(record: Record) -> tuple[object, ...]:
    """A record as the rows of all formats are compared."""
    at = record.position
    value = list(record.value) if isinstance(record.value, tuple) else record.value
    return (at.attempt, at.step, at.micro_step, record.rank, record.metric, record.name, value, record.time)


def jsonl_rows(file: Path) -> Iterator[tuple[object, ...]]:
    """Of a file of JSON Lines; also what the output `jsonl` writes."""
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            o: dict[str, Any] = json.loads(line)
            yield (o["attempt"], o["step"], o.get("micro_step"), o["rank"], o["metric"], o.get("name"), o["value"],
                   o["time"])  # fmt: skip


def csv_rows(file: Path) -> Iterator[tuple[object, ...]]:
    """Of a CSV file; also what the output `csv` writes."""
    with file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            micro = int(row["micro_step"]) if row["micro_step"] else None
            value = json.loads(row["values"]) if row["values"] else float(row["value"])
            yield (int(row["attempt"]), int(row["step"]), micro, int(row["rank"]), row["metric"], row["name"] or None,
                   value, float(row["time"]))  # fmt: skip


def parquet_rows(file: Path) -> Iterator[tuple[object, ...]]:
    """Of a Parquet file."""
    import pyarrow.parquet as pq

    for row in pq.read_table(file).to_pylist():
        value = row["value"] if row["values"] is None else row["values"]
        yield (row["attempt"], row["step"], row["micro_step"], row["rank"], row["metric"], row["name"], value,
               row["time"])  # fmt: skip


def check_parse(output: Path, exact: Sequence[Record]) -> None:
    """The text says what was recorded, of all ranks and of one."""
    found = list(records_of_log(output / MERGED_LOG))
    assert len(found) == len(exact)
    assert [f for f, e in zip(in_blocks(found), in_blocks(exact), strict=True) if not is_printed(f, e)] == []
    lines = rankd("parse", output / "rank_1" / "monitor.log", "--metric", "local_loss").splitlines()
    own = [r.value for r in exact if r.rank == 1 and r.metric == "local_loss"]
    assert [json.loads(line)["value"] for line in lines] == own


def check_verify_and_rebuild(output: Path, exact: Sequence[Record], ranks: int, scratch: Path) -> None:
    """The files prove it, and the journal alone makes the same logs again."""
    said = rankd("verify", output)
    assert f" {len(exact)} records of {ranks} ranks, 0 blocks late" in said
    assert said.endswith(f"{output}: verified\n")
    again = scratch / "again"
    rankd("rebuild", output, "--into", again)
    for name in (MERGED_LOG, "rank_0/monitor.log", f"rank_{ranks - 1}/monitor.log"):
        with LogReader(output / name) as log:
            assert (again / name).read_bytes() == b"".join(log.lines())


def release(output: Path) -> list[Released]:
    """What the collector of this run has given to its outputs, from the journal."""
    replay = Replay(output)
    try:
        return [each for at in replay.read() if not isinstance(at.entry, Checkpoint)
                for each in replay.run.apply(at.entry, at.reference)]  # fmt: skip
    finally:
        replay.close()


def check_asking(output: Path) -> None:
    """Of a run that has ended nobody can be asked, and that is said."""
    for command, *options in (("stacks",), ("sample", "--interval", "1")):
        rankd(command, output, *options, status=2)


def event_values(folder: Path) -> dict[str, dict[int, float]]:
    """TensorBoard's own reader: tag → step → value; of a histogram how many values it has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # protobuf and numpy, of each other
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
        events.Reload()
    out = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    out |= {tag: {e.step: e.histogram_value.num for e in events.Histograms(tag)} for tag in events.Tags()["histograms"]}
    return out
