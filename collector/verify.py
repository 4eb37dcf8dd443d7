"""`rankd verify`: prove from the files alone that a run's logs are whole, in order, and without a double.

Three looks: the journal by itself (whole; numbers without a hole), the logs against what the journal renders to, and
merged.log by itself, with the accounts of the processes. Everything streams.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from .accounts import JOURNAL_LOST, Row, account_table
from .entries import Checkpoint, Entry, Stored
from .intake import first_of
from .logcheck import Finding, LogComparison, Logs, MergedLog
from .place import holder
from .protocol.errors import JournalError, ProtocolError, RankdError
from .protocol.wire import Hole, Item, Table, decode_item
from .protocol.wording import counted
from .rebuild import progress_line
from .replay import Located, Replay, show_nothing
from .run import Released
from .sinks.keeper import deleted_of
from .sinks.speclog import MERGED_LOG, is_log

__all__ = ["Verification", "add_arguments", "run"]

# Blocks that are compared at once: each log is opened once for them.
_BATCH_RELEASED = 1_024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("output", type=Path, help="output directory of the run; it is only read")
    parser.add_argument("--quiet", action="store_true", help="print findings only")


def run(args: argparse.Namespace) -> int:
    """Check and print; 0: all is as it must be, 1: something is not."""
    check = Verification(args.output)
    with progress_line("verifying") as show:
        check.run(show)
    if not args.quiet:
        print("\n".join([*account_table(check.rows()), *check.summary(), *(f"note: {note}" for note in check.notes)]))
    for finding in check.findings:
        print(f"FOUND {finding}")
    if not args.quiet or check.findings:
        print(
            f"{args.output}: {counted(len(check.findings), 'finding')}"
            if check.findings
            else f"{args.output}: verified"
        )
    return 1 if check.findings else 0


class Verification:
    """One check of one output directory.

    Attributes:
        findings: what is not as it must be.
        notes: what a person should know and is no fault.

    Raises:
        RankdError: there is nothing that could be checked.
    """

    def __init__(self, output: Path) -> None:
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self._output = output
        # Asked first: a collector that comes to work meanwhile finds a journal that this has not read.
        self._collector = holder(output)
        self._replay = Replay(output)
        self._state = self._replay.run
        self._items = 0
        self._files = Logs(output)
        self._logs = LogComparison(self._files, self._replay.sizes)
        self._merged = MergedLog(self._files)

    def run(self, progress: Callable[[int, int], None] = show_nothing) -> None:
        """Check everything.

        Raises:
            RankdError: a file cannot be read.
        """
        try:
            whole = self._check_journal(progress)
            if whole:
                self._check_logs()
            self._merged.read(self._logs.sizes.get(MERGED_LOG, 0) if whole else sys.maxsize)
            if self._merged.whole:
                exact = whole and not self._logs.short and not self._logs.findings
                self._merged.check_rank_logs(self._logs.sizes if exact else None)
            self._check_parts()
        except OSError as e:
            raise RankdError(f"{e.filename or self._output} cannot be read: {e.strerror}") from e
        self.findings += self._merged.findings
        if whole:
            self._check_accounts()

    def rows(self) -> list[Row]:
        """The accounts of all processes, by rank."""
        return self._state.rows()

    def summary(self) -> list[str]:
        """What was checked, in a few lines."""
        replay, merged = self._replay, self._merged
        journal = (
            counted(len(replay.segments), "segment"),
            counted(replay.bytes, "byte"),
            counted(replay.entries, "entry", "entries"),
            f"{counted(self._items, 'item')} of {counted(len(self._state.accounts.processes), 'process', 'processes')}",
        )
        text = (
            counted(merged.lines, "line"),
            f"{counted(sum(merged.records.values()), 'record')} of {counted(len(merged.records), 'rank')}",
            f"{counted(merged.late.total(), 'block')} late",
        )
        return [f"journal: {', '.join(journal)}", f"merged.log: {', '.join(text)}"]

    # -- the journal --------------------------------------------------------------------------------------------------

    def _check_journal(self, progress: Callable[[int, int], None]) -> bool:
        """Read it, and the logs along with it; True: it is readable to its end."""
        batch: list[Released] = []
        try:
            for located in self._replay.read(progress):
                if isinstance(located.entry, Checkpoint):
                    self._compare(batch)
                    self._check_checkpoint(located, located.entry)
                    continue
                batch += self._apply(located, located.entry)
                if len(batch) >= _BATCH_RELEASED:
                    self._compare(batch)
        except (JournalError, ProtocolError) as e:
            self.findings.append(Finding("journal", "entries that can be read to the end", str(e)))
            return False
        self._compare(batch)
        self._check_tail()
        return True

    def _compare(self, batch: list[Released]) -> None:
        self._logs.expect(batch)
        batch.clear()

    def _check_checkpoint(self, located: Located, checkpoint: Checkpoint) -> None:
        """A restart goes on from here, so it must say what the entries before it make."""
        where = f"{located.segment}: byte {located.offset}"
        made = self._logs.sizes
        # Other names in a checkpoint are of other sinks, or not of files.
        for name in sorted({*filter(is_log, checkpoint.sizes), *made}):
            if (said := checkpoint.sizes.get(name, 0)) != made.get(name, 0):
                self.findings.append(
                    Finding(where, f"{name} of {made.get(name, 0)} bytes in the checkpoint", str(said))
                )

    def _apply(self, located: Located, entry: Entry) -> list[Released]:
        where = f"{located.segment}: byte {located.offset}"
        try:
            if isinstance(entry, Stored):
                entry = self._decoded(where, entry)
            return self._state.apply(entry, located.reference)
        except ProtocolError as e:
            raise JournalError(f"{where}: {e}") from e
        except (LookupError, AssertionError) as e:
            raise JournalError(f"{where}: an entry that does not follow from those before it ({e!r})") from e

    def _decoded(self, where: str, entry: Stored) -> Stored:
        """The entry with its items decoded; their numbers are checked."""
        session = self._state.intake.sessions[entry.session]
        items: list[Item] = []
        latest = session.stored
        for raw in entry.raws:
            item = decode_item(raw, session.tables)
            if isinstance(item, Table):
                session.tables.define(item.table_id, item.table)
            if not first_of(item) <= latest + 1 <= item.seq:
                whose = f"of rank {session.rank} (process {session.hello.pid} on {session.hello.host})"
                self.findings.append(Finding(where, f"item {latest + 1} {whose}", f"item {first_of(item)}"))
            latest = item.seq
            items.append(item)
            self._items += not isinstance(item, Hole)
        session.admitted = latest
        return Stored(entry.session, entry.raws, tuple(items))

    def _check_tail(self) -> None:
        tail, last = self._replay.tail, self._replay.segments[-1]
        if tail.torn and tail.size and self._collector is None:
            self.notes.append(
                f"{last}: {counted(tail.size, 'byte')} from byte {tail.offset} on: a torn write of a collector that "
                "was killed; nothing there was acknowledged, and the next start cuts it"
            )
        elif self._replay.damaged:
            where = f"{last}: byte {tail.offset}"
            found = f"{counted(tail.size, 'byte')} whose checksum is wrong"
            self.findings.append(Finding(where, "a whole entry", found))

    # -- the logs -----------------------------------------------------------------------------------------------------

    def _check_logs(self) -> None:
        logs, alive = self._logs, self._collector
        self.findings += logs.findings
        for name, count in sorted(logs.short.items()):
            if alive is not None:
                self.notes.append(f"{name}: {counted(count, 'byte')} not written yet ({alive} is at work)")
                continue
            end = logs.sizes[name] - count
            where = f"{self._output / name}: byte {end}"
            what = f"{counted(count, 'more byte')} that the journal has (start the collector again, or `rankd rebuild`)"
            self.findings.append(Finding(where, what, "the end of the file"))
        beyond = logs.beyond()
        if beyond and alive is None:
            self.notes.append(
                f"{counted(len(beyond), 'log goes', 'logs go')} on where the journal ends: a power failure of the "
                "collector's node leaves that (rankd.journal.durability), and so does a journal that somebody has cut. "
                f"Starting the collector (`rankd collect {self._output}`) cuts the logs to what the journal makes; "
                "copy them first if they matter more"
            )
        for name, count in sorted(beyond.items()):
            if alive is not None:
                self.notes.append(f"{name}: {counted(count, 'byte')} came after the journal was read, not checked")
                continue
            where = f"{self._output / name}: byte {logs.sizes.get(name, 0)}"
            self.findings.append(
                Finding(where, "the end of the file", f"{counted(count, 'byte')} that the journal does not make")
            )

    def _check_parts(self) -> None:
        """What is gone at the beginning of a rotated log must have been deleted as `rankd.logs` says."""
        deleted = deleted_of(self._output)
        gone: list[str] = []
        for name in sorted(self._files.names()):
            start = self._files.of(name).start
            if start > deleted.get(name, 0):
                what = f"its older parts from byte {deleted.get(name, 0)} on"
                self.findings.append(Finding(f"{self._output / name}", what, f"nothing before byte {start}"))
            elif start:
                gone.append(f"{name} up to byte {start}")
        if gone:
            more = f" and {len(gone) - 10} more" if len(gone) > 10 else ""
            self.notes.append(f"deleted as rankd.logs says, so not checked: {', '.join(gone[:10])}{more}")
        if unmatched := self._merged.unmatched:
            self.notes.append(
                f"the lines of {counted(len(unmatched), 'rank')} in {MERGED_LOG} are not compared with the ranks' own "
                "logs, older parts of which are deleted or not written yet; both are compared with the journal"
            )

    # -- the accounts -------------------------------------------------------------------------------------------------

    def _check_accounts(self) -> None:
        state = self._state
        self.findings += [Finding(*found) for found in state.accounts.discrepancies(complete=state.ended)]
        self._count_records()
        self._tell_of_processes()

    def _count_records(self) -> None:
        """Count the records of the text; of a log that is not all there, less is expected."""
        written: dict[int, int] = {}
        for process in self._state.accounts.processes:
            written[process.rank] = written.get(process.rank, 0) + process.written
        if self._logs.short or self._logs.findings or self._files.of(MERGED_LOG).start:
            return
        for rank, count in sorted(written.items()):
            if (found := self._merged.records.get(rank, 0)) != count:
                where = f"{self._output / MERGED_LOG}: rank {rank}"
                self.findings.append(Finding(where, f"{counted(count, 'record')}, as the journal has them", str(found)))

    def _tell_of_processes(self) -> None:
        state = self._state
        if not self._replay.whole:
            self.notes.append(
                f"the segments before {self._replay.segments[0].name} were deleted (rankd.journal.keep): what the logs "
                "held by then is checked by itself, not against the journal"
            )
        holed = [row for row in state.rows() if JOURNAL_LOST in row.dropped]
        if holed:
            who = ", ".join(f"rank {row.rank} process {row.process} ({row.dropped})" for row in holed[:10])
            more = f" and {len(holed) - 10} more" if len(holed) > 10 else ""
            self.notes.append(
                f"{state.accounts.total_lost()} records were acknowledged, and the journal has lost them (a power "
                f"failure of the collector's node; see rankd.journal.durability): {who}{more}"
            )
        if self._collector is None and not state.ended:
            self.notes.append("no collector is at work and the run has not ended: start it again to finish the logs")
        silent = [row for row in state.rows() if row.produced == "?" and row.state != "never came"]
        if silent:
            who = ", ".join(f"rank {row.rank} process {row.process} ({row.state})" for row in silent[:10])
            more = f" and {len(silent) - 10} more" if len(silent) > 10 else ""
            self.notes.append(f"without a goodbye, so only what arrived is counted: {who}{more}")
