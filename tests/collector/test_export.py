"""Reading a run back from its journal, at full precision."""

from __future__ import annotations

import csv
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rankd.collector
from rankd.collector.cli import main
from rankd.collector.entries import Checkpoint, encode_entry
from rankd.collector.export import export
from rankd.collector.journal import Journal, read_segment, segments, tail_of
from rankd.collector.place import JOURNAL
from rankd.collector.protocol.errors import RankdError
from rankd.collector.protocol.records import Frame, NameTable, RankBlock, Record
from rankd.collector.protocol.wire import Block, Goodbye, Item, Table, encode_item
from rankd.collector.reading import read
from rankd.collector.replay import Replay
from rankd.collector.selection import Selection

from ..support import PATIENCE
from .streams import Core, Training, hello, training

STEPS = range(3598, 3703)
PARAMETERS = NameTable(("decoder.layers.0.weight", "decoder.layers.1.weight"))


def growing(rank: int) -> Training:
    """A training in which, on rank 1, the second parameter's norm grows from step 3,600 to 3,700 by 100."""
    items: list[Item] = [Table(1, 1, PARAMETERS)]
    for step in STEPS:
        norms = [0.5, float(step - 3600) if rank == 1 else 1 / 3]
        frames = (Frame.named("device_norm", PARAMETERS, norms), Frame.scalar("loss", 1 / 3))
        items.append(Block(len(items) + 1, step, None, True, float(step), frames))
    items.append(Goodbye(len(items) + 1, "done", 0, {}, 0.0))
    ids = {PARAMETERS: 1}
    return Training(hello(rank, 2), tuple(encode_item(item, ids) for item in items))


def write_journal(output: Path, *trainings: Training, cut: int | None = None) -> Core:
    """The journal of these trainings, one entry for each 10 items; `cut`: a new segment after so many entries."""
    core = Core()
    for one in trainings:
        core.open(one)
    for start in range(0, max(len(one.items) for one in trainings), 10):
        for one in trainings:
            core.deliver(one, start, start + 10)
    journal = Journal(output / JOURNAL)
    assert list(journal.replay()) == []
    again = Core()
    for number, entry in enumerate(core.entries):
        if number == cut:
            journal.rotate(encode_entry(Checkpoint(again.run.freeze(), {})))
        (reference,) = journal.append([encode_entry(entry)])
        again.run.apply(entry, reference)
    journal.close()
    return core


def records_of(core: Core) -> list[Record]:
    blocks = [each for each in core.released if isinstance(each, RankBlock)]
    return [r for b in blocks for f in b.frames for r in f.records(b.position, b.rank, b.time)]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A run of two ranks, in two segments."""
    write_journal(tmp_path / "run", growing(0), growing(1), cut=10)  # where nothing waits: what does is kept
    return tmp_path / "run"


def test_all_records_in_order(tmp_path: Path) -> None:
    """Every record that was released, in the order of the merged log, with every bit of its value."""
    core = write_journal(tmp_path, training(0, 2), training(1, 2), cut=3)
    assert list(read(tmp_path)) == records_of(core) != []


def test_a_selection_is_applied(output: Path) -> None:
    """Ranks, metrics, names and steps, as everywhere."""
    found = list(read(output, ranks={1}, metrics={"device_norm"}, name="layers.1", steps=(3600, 3601)))
    assert [(r.rank, r.position.step, r.value) for r in found] == [(1, 3600, 0.0), (1, 3601, 1.0)]


def test_the_latest_value_of_each_position(tmp_path: Path) -> None:
    """COMPLAINTS 16: crash in step 4, resume at 3 up to 3: step 3 of attempt 2, step 4 still of attempt 1."""
    before = [training(rank, 2, steps=(1, 2, 3, 4), goodbye=None) for rank in range(2)]
    after = [training(rank, 2, steps=(3,), process=2) for rank in range(2)]
    core = Core()
    for one in (*before, *after):
        core.open(one)
        core.deliver(one)
    journal = Journal(tmp_path / JOURNAL)
    assert list(journal.replay()) == []
    journal.append([encode_entry(entry) for entry in core.entries])
    journal.close()
    everything, latest = list(read(tmp_path)), list(read(tmp_path, latest=True))
    assert {(r.position.attempt, r.position.step) for r in latest} == {(1, 1), (1, 2), (2, 3), (1, 4)}
    assert [r for r in everything if (r.position.attempt, r.position.step) != (1, 3)] == latest
    assert {r.position.step for r in read(tmp_path, latest=True, attempt=1)} == {1, 2, 4}


def test_where_segments_are_gone_it_says_so_and_starts_later(output: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the oldest segment deleted, the rest is read from its checkpoint on, and a warning names what is missing."""
    everything = list(read(output))
    segments(output / JOURNAL)[0].unlink()
    with caplog.at_level(logging.WARNING):
        rest = list(read(output))
    assert rest == everything[-len(rest) :] != []
    assert "00000002.journal were deleted (rankd.journal.keep)" in caplog.text


def damage(output: Path) -> tuple[Path, int, list[Record]]:
    """Zeros in the middle of the journal's last segment: it, where its whole entries end now, what is left to read."""
    everything, last = list(read(output)), segments(output / JOURNAL)[-1]
    raw = bytearray(last.read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 64] = bytes(64)
    last.write_bytes(raw)
    whole = [end for end, _ in read_segment(last)][-1]
    rest = list(read(output))
    assert rest == everything[: len(rest)]
    assert 0 < len(rest) < len(everything)
    return last, whole, rest


@pytest.mark.parametrize("latest", [(), ("--latest",)])
def test_damage_is_told_and_what_comes_before_it_is_given(
    output: Path, tmp_path: Path, latest: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ends with 1, once it has said where and how much was not read."""
    last, whole, rest = damage(output)
    command = ["export", str(output), "--format", "csv", "-o", str(tmp_path / "x.csv"), *latest]
    assert main(command) == 1
    told = capsys.readouterr()
    where = f"{last} is damaged at byte {whole}: {last.stat().st_size - whole} bytes from there on"
    assert told.err.count(where) == 1
    assert told.out.startswith(f"{len(rest)} records: ")
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 1 + len(rest)


def test_the_reader_warns_of_damage(output: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once for each time that it is read."""
    last, whole, _ = damage(output)
    caplog.clear()
    list(read(output))
    (warning,) = caplog.messages
    assert warning.startswith(f"{last} is damaged at byte {whole}: ")


@pytest.mark.parametrize("tail", [b"\x07", b"\x20\0\0\0\1\2\3\4x", bytes(5_000)])
def test_a_torn_write_is_no_damage(
    output: Path, tmp_path: Path, tail: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """A collector at work, or one that was killed, leaves it; nobody was told that it is stored."""
    with segments(output / JOURNAL)[-1].open("ab") as file:
        file.write(tail)
    assert main(["export", str(output), "--format", "csv", "-o", str(tmp_path / "x.csv")]) == 0
    assert capsys.readouterr().err == ""


def test_what_a_collector_writes_meanwhile_is_no_damage(output: Path) -> None:
    """Entries that came after the journal was read to its end."""
    last = segments(output / JOURNAL)[-1]
    raw, ends = last.read_bytes(), [end for end, _ in read_segment(last)]
    replay = Replay(output)
    os.truncate(last, ends[-2])
    list(replay.read())
    last.write_bytes(raw)
    replay.tail = tail_of(last, ends[-2])
    assert not replay.tail.torn
    assert replay.damage() is None
    last.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert replay.damage() is not None
    replay.close()


def test_without_a_journal_it_says_where_it_looked(tmp_path: Path) -> None:
    """A directory that holds no run is an error for a person."""
    with pytest.raises(RankdError, match="holds no run"):
        read(tmp_path)


def test_the_package_gives_the_reader() -> None:
    """`rankd.collector.read` is the reader; nothing else appears there."""
    assert rankd.collector.read is read
    with pytest.raises(AttributeError):
        _ = rankd.collector.nothing


def test_which_norm_grew_most(output: Path) -> None:
    """The query of docs/reading.md answers: which parameter's norm grew most between two steps, on which rank."""
    pytest.importorskip("pandas")
    text = (Path(__file__).parents[2] / "docs" / "reading.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    assert "3600" in code
    names: dict[str, object] = {}
    exec(code.replace('"OUTPUT"', repr(str(output))), names)
    assert names["most"] == (1, "decoder.layers.1.weight")


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_each_format_has_each_record(output: Path, tmp_path: Path, form: str) -> None:
    """As many rows as records, values to the last bit, whatever the format; a name that is filtered is left out."""
    file = tmp_path / f"records.{form}"
    selection = Selection(frozenset({0}), name="layers.1")
    count = export(output, selection, form, str(file))
    expected = [float(r.value) for r in read(output, ranks={0}, name="layers.1") if not isinstance(r.value, tuple)]
    if form == "jsonl":
        values = [json.loads(line)["value"] for line in file.read_text().splitlines()]
    elif form == "csv":
        values = [float(row["value"]) for row in csv.DictReader(file.read_text().splitlines())]
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        table = parquet.read_table(file)
        values = table["value"].to_pylist()
        assert set(table["name"].to_pylist()) == {"decoder.layers.1.weight"}
        assert table["micro_step"].null_count == count
    assert values == expected
    assert count == len(STEPS)


def test_lists_are_a_column_of_their_own_in_parquet(tmp_path: Path) -> None:
    """Values of tpe and max logits stand as lists; a scalar's row has none."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = NameTable(("decoder.0", "decoder.1"))
    frames = (Frame.scalar("local_loss", 1.0), Frame.lists("tpe", table, [[1, 2], [3]], 7))
    items: list[Item] = [Table(1, 1, table), Block(2, 1, 1, True, 0.0, frames), Goodbye(3, "done", 3, {}, 0.0)]
    write_journal(tmp_path, Training(hello(0, 1), tuple(encode_item(item, {table: 1}) for item in items)))
    export(tmp_path, Selection(), "parquet", str(tmp_path / "x.parquet"))
    found = parquet.read_table(tmp_path / "x.parquet").to_pydict()
    assert found["values"] == [None, [1.0, 2.0], [3.0]]
    assert found["value"] == [1.0, None, None]
    assert found["iter"] == [None, 7, 7]
    assert found["name"] == [None, "decoder.0", "decoder.1"]

    pytest.importorskip("pandas")
    frame = read(tmp_path).to_pandas()
    assert list(frame.columns) == list(found)
    assert frame["value"].isna().tolist() == [False, True, True]
    assert frame["values"].tolist() == [None, (1.0, 2.0), (3.0,)]
    assert frame["iter"].isna().tolist() == [True, False, False]
    assert frame["name"].tolist() == found["name"]
    assert read(tmp_path, metrics={"none"}).to_pandas().empty


def test_a_file_appears_when_it_is_complete(output: Path, tmp_path: Path) -> None:
    """A place that cannot be written is an error, and no half file is left."""
    with pytest.raises(RankdError, match="cannot be written"):
        export(output, Selection(), "csv", str(tmp_path / "no" / "where.csv"))
    export(output, Selection(steps=(1, 1)), "csv", str(tmp_path / "x.csv"))
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["x.csv"]


def test_the_command(output: Path, tmp_path: Path) -> None:
    """To a file it says how many records; to standard output it writes them alone."""
    command = [sys.executable, "-m", "rankd.collector", "export", str(output), "--format", "jsonl", "--step", "3600"]
    to_file, to_pipe = (
        subprocess.run([*command, "-o", to], capture_output=True, timeout=PATIENCE, check=True, text=True)
        for to in (str(tmp_path / "x.jsonl"), "-")
    )
    assert to_file.stdout.startswith("6 records: ")
    assert to_pipe.stdout == (tmp_path / "x.jsonl").read_text()
    assert to_pipe.stderr == ""
