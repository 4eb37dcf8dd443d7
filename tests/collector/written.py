"""Runs written to disk as the collector writes them, without its process: for tests of what reads them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rankd.collector.entries import Checkpoint, Ended, Entry, Opened, Stored, encode_entry
from rankd.collector.journal import Journal
from rankd.collector.place import JOURNAL
from rankd.collector.run import Run
from rankd.collector.sinks.retention import Rotation
from rankd.collector.sinks.speclog import SpecLogSink

from .streams import Training


def entries_of(trainings: list[Training], *, batch: int = 4) -> list[Entry]:
    """All hellos, then the items in turns of `batch`, then the end."""
    entries: list[Entry] = [Opened(one.hello) for one in trainings]
    for start in range(0, max(len(one.items) for one in trainings), batch):
        for number, one in enumerate(trainings):
            if raws := one.items[start : start + batch]:
                entries.append(Stored(number, raws))
    return [*entries, Ended()]


def write_run(
    output: Path,
    entries: Iterable[Entry],
    *,
    segment_size: int = 2**20,
    keep: int | None = None,
    logs: bool = True,
    rotation: Rotation | None = None,
) -> None:
    """The journal of these entries and the logs that they make; `logs` False: the journal alone."""
    journal = Journal(output / JOURNAL, segment_size=segment_size, keep=keep)
    list(journal.replay())
    run, sink = Run(journal.fetch), SpecLogSink(output, rotation=rotation)
    sink.resume({})
    for entry in entries:
        (reference,) = journal.append([encode_entry(entry)])
        if not logs:
            continue
        sink.write(run.apply(entry, reference))
        if journal.due:
            journal.rotate(encode_entry(Checkpoint(run.freeze(), sink.sizes())))
            journal.forget(run.oldest_needed(otherwise=journal.end))
    sink.close()
    journal.close()
