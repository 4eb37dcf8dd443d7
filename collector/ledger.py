"""The run as it lies on disk: the journal, the state that its entries make, and the logs that follow from them.

Whatever changes the run is appended to the journal first, then applied to the state; what that releases goes to the
logs. A write that is not possible is tried again until it is (`patience`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from .config import RankdConfig
from .entries import Checkpoint, Entry, decode_entry, encode_entry
from .fallbacks import Fallbacks
from .journal import MAX_CHECKPOINT_BYTES, Journal
from .outputs import sink_of
from .patience import PatientWriting
from .protocol.errors import JournalError
from .protocol.wording import counted
from .run import Released, Run
from .sinks.sink import Sink
from .sinks.speclog import MERGED_LOG
from .syncing import Syncing

__all__ = ["Ledger"]

log = logging.getLogger("rankd.collector")


class Ledger:
    """The journal, the run and its sinks, recovered.

    Args:
        config: the `rankd:` section.
        journal: the journal's directory.
        latest: a sink that sees all that is released.
        writing: tries writes again.

    Attributes:
        run: the state. Only `commit` and `apply` change it.

    Raises:
        RankdError: the journal cannot be read.
    """

    def __init__(self, config: RankdConfig, journal: Path, latest: Sink, writing: PatientWriting) -> None:
        self._journal = Journal(
            journal,
            segment_size=config.journal.segment_size,
            durability=config.journal.durability,
            keep=config.journal.keep,
        )
        self._sink = sink_of(config, self._host_of, latest)
        self._writing = writing
        self._syncing = Syncing(Path(config.output), journal)
        self.run = Run(self._journal.fetch)
        self._fallbacks = Fallbacks()
        self._of_another_version = False
        self._recover()

    def append(self, entries: Sequence[Entry]) -> list[int]:
        """The journal has them then; their references."""
        payloads = [encode_entry(entry) for entry in entries]
        references: list[int] = []
        self._writing.until_possible("the journal", lambda: references.extend(self._journal.append(payloads)))
        return references

    def apply(self, entries: Sequence[Entry], references: Sequence[int]) -> None:
        """Apply what was appended, and write what it releases."""
        released: list[Released] = []
        for entry, reference in zip(entries, references, strict=True):
            released += self.run.apply(entry, reference)
        self._write(released)
        if self._journal.due:
            self._next_segment()
        self._forget()

    def commit(self, entries: Sequence[Entry]) -> None:
        """Append and apply."""
        self.apply(entries, self.append(entries))

    def close(self) -> None:
        """Let go of all files."""
        self._syncing.close()
        self._sink.close()
        self._journal.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _host_of(self, rank: int) -> str:
        session = self.run.intake.current(rank)
        return "" if session is None else session.hello.host

    def _write(self, released: list[Released]) -> None:
        try:
            self._sink.write(released)
        except OSError as e:
            self._writing.report("the logs", e)
            self._writing.until_possible("the logs", self._sink.retry)

    def _next_segment(self) -> None:
        """Only when all that was applied is also written."""
        sizes = self._sink.sizes()
        checkpoint = encode_entry(Checkpoint(self.run.freeze(), sizes))
        if len(checkpoint) > MAX_CHECKPOINT_BYTES:
            # Nobody could read it again. Without it the next start takes longer, and that is all.
            log.warning(
                "the state of the run takes %d bytes, more than a checkpoint may (%d): this segment of the journal "
                "grows on", len(checkpoint), MAX_CHECKPOINT_BYTES,
            )  # fmt: skip
            self._journal.put_off()
            return
        self._writing.until_possible("the journal", lambda: self._journal.rotate(checkpoint))
        self._sink.checkpointed(sizes)
        needed = self.run.oldest_needed(otherwise=self._journal.end)
        kept_from = self._fallbacks.passed(sizes.get(MERGED_LOG, 0), needed)
        if kept_from is not None and self._journal.forgettable(kept_from):
            # All of the logs, although the checkpoint that is fallen back to needs less of them.
            self._syncing.ask(kept_from, self._sink.files())

    def _forget(self) -> None:
        """Delete segments whose logs are on the disk by now."""
        needed = self._syncing.reached()
        if needed is None:
            return
        try:
            for path in self._journal.forget(needed):
                log.info("deleted %s (rankd.journal.keep)", path)
        except OSError as e:
            log.warning("a segment of the journal cannot be deleted now (rankd.journal.keep): %s", e)

    def _recover(self) -> None:
        """Make the run's state again from the journal, and complete what the logs miss."""
        begun = False
        for reference, payload in self._entries():
            entry = decode_entry(payload)
            if not begun:
                begun = True
                self._sink.resume(entry.sizes if isinstance(entry, Checkpoint) else {})
                if isinstance(entry, Checkpoint):
                    self.run = Run.thaw(entry.state, self._journal.fetch)
                    needed = self.run.oldest_needed(otherwise=reference)
                    self._fallbacks = Fallbacks(entry.sizes.get(MERGED_LOG, 0), needed)
            if not isinstance(entry, Checkpoint):
                self._write(self.run.apply(entry, reference))
        self._sink.settle()
        if self.run.intake.sessions:
            log.info("recovered %s from the journal", counted(len(self.run.intake.sessions), "session"))

    def _entries(self) -> Iterator[tuple[int, bytes]]:
        """Of the journal, from a checkpoint on that can be started from."""
        try:
            yield from self._journal.replay(self._can_start_from, self._has_what_waits)
        except JournalError as e:
            if not self._of_another_version:
                raise
            raise JournalError(
                f"{e}. Checkpoints there are of another version of rankd: finish this run with that one"
            ) from e

    def _can_start_from(self, payload: bytes) -> bool:
        """Not from a checkpoint that a log is shorter than (power failure, truncation): what is missing is rendered.
        Nor from one of another version.
        """
        checkpoint = decode_entry(payload)
        return (
            isinstance(checkpoint, Checkpoint)
            and self._sink.reaches(checkpoint.sizes)
            and self._has_what_waits(payload)
        )

    def _has_what_waits(self, payload: bytes) -> bool:
        """What waited at this checkpoint can be read back (`rankd.journal.keep` may have deleted it)."""
        checkpoint = decode_entry(payload)
        if not isinstance(checkpoint, Checkpoint):
            return False
        try:
            run = Run.thaw(checkpoint.state, self._journal.fetch)
        except JournalError as e:
            # What it is made of says the same, where that is still there.
            if not self._of_another_version:
                log.warning("the journal is read from further back: %s", e)
            self._of_another_version = True
            return False
        oldest = run.oldest_needed(otherwise=0)
        return not oldest or self._journal.holds(oldest)
