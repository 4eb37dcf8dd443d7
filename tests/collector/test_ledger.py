"""A collector that starts on checkpoints that it cannot start from, or that are too large to be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support import verified, whole_log

from rankd.collector import ledger as ledger_module
from rankd.collector.cli import main
from rankd.collector.config import RankdConfig
from rankd.collector.entries import Checkpoint, Entry, decode_entry, encode_entry
from rankd.collector.journal import Journal, read_segment, segments
from rankd.collector.ledger import Ledger
from rankd.collector.patience import PatientWriting
from rankd.collector.place import JOURNAL
from rankd.collector.protocol.errors import JournalError
from rankd.collector.run import Run
from rankd.collector.sinks.sink import Off
from rankd.collector.sinks.speclog import SpecLogSink

from .streams import training
from .written import entries_of


def entries(ranks: int = 2, steps: int = 120) -> list[Entry]:
    return entries_of([training(rank, ranks, steps=range(1, steps + 1)) for rank in range(ranks)])


def ledger_of(output: Path) -> Ledger:
    section = {"output": str(output), "journal": {"segment_size": "4KiB"}}
    return Ledger(RankdConfig.from_mapping(section), output / JOURNAL, Off(), PatientWriting(output, lambda: None))


def written_by(output: Path, some: list[Entry], layout: Callable[[list[Any]], list[Any]]) -> None:
    """Journal and logs as another version leaves them: its checkpoints look like this."""
    journal = Journal(output / JOURNAL, segment_size=4_096)
    list(journal.replay())
    run, sink = Run(journal.fetch), SpecLogSink(output)
    sink.resume({})
    for entry in some:
        (reference,) = journal.append([encode_entry(entry)])
        sink.write(run.apply(entry, reference))
        if journal.due:
            journal.rotate(encode_entry(Checkpoint(layout(run.freeze()), sink.sizes())))
    sink.close()
    journal.close()


OTHER_LAYOUTS = {
    "fewer fields": lambda state: state[:-1],
    "places as lists": lambda state: [state[0], [*state[1][:3], [[1, 1, 1, [[0, [[0, 1, 1]]]]]]], *state[2:]],
    "places of another size": lambda state: [state[0], [*state[1][:3], [[1, 1, 1, b"\0" * 4, b"1"]]], *state[2:]],
    "ranks of another size": lambda state: [state[0], [*state[1][:3], [[1, 1, 1, b"\0", b"1" * 16]]], *state[2:]],
    "decisions as a list": lambda state: [*state[:7], [], *state[8:]],
}


@pytest.mark.parametrize("layout", OTHER_LAYOUTS.values(), ids=OTHER_LAYOUTS)
def test_checkpoints_of_another_version_are_passed_over(
    tmp_path: Path, layout: Callable[[list[Any]], list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """The journal says the same from its beginning: nothing is lost, and the next start is as quick as ever."""
    output, some = tmp_path / "run", entries()
    written_by(output, some[: len(some) // 2], layout)
    assert len(segments(output / JOURNAL)) > 3
    ledger = ledger_of(output)
    assert caplog.text.count("the journal is read from further back: not a checkpoint of this version's") == 1
    for entry in some[len(some) // 2 :]:
        ledger.commit([entry])
    ledger.close()
    caplog.clear()
    ledger_of(output).close()
    assert "further back" not in caplog.text
    verified(output)
    assert main(["rebuild", str(output), "--into", str(tmp_path / "again")]) == 0
    assert whole_log(output / "merged.log") == (tmp_path / "again" / "merged.log").read_bytes()


def test_where_the_beginning_is_gone_another_version_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is touched, and the message says what to do."""
    written_by(tmp_path, entries(), OTHER_LAYOUTS["fewer fields"])
    segments(tmp_path / JOURNAL)[0].unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(JournalError, match="of another version of rankd: finish this run with that one"):
        ledger_of(tmp_path)
    assert main(["verify", str(tmp_path)]) != 0
    said = capsys.readouterr().err
    assert "00000002.journal: not a checkpoint of this version's journal" in said
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_state_too_large_for_a_checkpoint_lets_the_segment_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What could not be read again is not written; it is tried again when there is twice as much."""
    some = entries()
    with monkeypatch.context() as patch:
        patch.setattr(ledger_module, "MAX_CHECKPOINT_BYTES", 100)
        ledger = ledger_of(tmp_path)
        for entry in some[: len(some) // 2]:
            ledger.commit([entry])
        (only,) = segments(tmp_path / JOURNAL)
        assert 1 <= caplog.text.count("more than a checkpoint may (100)") <= 3
        ledger.close()
    ledger = ledger_of(tmp_path)
    for entry in some[len(some) // 2 :]:
        ledger.commit([entry])
    ledger.close()
    assert only.stat().st_size > 8_192
    newest = segments(tmp_path / JOURNAL)[-1]
    assert newest != only
    assert isinstance(decode_entry(next(read_segment(newest))[1]), Checkpoint)
    verified(tmp_path)
