"""Pure: what each process of each rank has produced, and where it is now. In records, by process and attempt.

What must hold, and `discrepancies` checks: all that a process produced has arrived, or was dropped for a cause that it
named, or is known to be lost from the journal; what has arrived is written, or waits for its position's release.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .protocol.checks import MAX_ENTRIES, MAX_STEP
from .protocol.records import Position
from .protocol.wire import Goodbye, Hello
from .protocol.wording import counted

__all__ = ["DONE", "JOURNAL_LOST", "Account", "Accounts", "ProcessAccount", "Row", "account_table"]

# The goodbye of a process that has come to its planned end; any other reason is a failure.
DONE = "done"
# What the collector calls records that it had acknowledged and has lost: a power failure cut the journal.
JOURNAL_LOST = "journal_lost"


@dataclass(slots=True)
class Account:
    """What one process did in one attempt.

    Attributes:
        received: records that the journal has.
        written: of those, records that have been released to the sinks.
        dropped: records that the agent had to refuse, by cause, as its gaps say.
        reached: its latest block's position.
        lost: records that were acknowledged and are not in the journal, as far as their number is known.
    """

    received: int = 0
    written: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    reached: Position | None = None
    lost: int = 0

    def freeze(self) -> list[Any]:
        """All of it as lists, numbers and text."""
        key = None if self.reached is None else list(self.reached.key)
        return [self.received, self.written, dict(self.dropped), key, self.lost]

    @staticmethod
    def thaw(frozen: list[Any]) -> Account:
        """The account that `freeze` gave."""
        # A checkpoint of an older version has no number of lost ones.
        received, written, dropped, key, *lost = frozen
        reached = None if key is None else Position.from_key(tuple(key))
        return Account(received, written, Counter(dropped), reached, *lost)


@dataclass(slots=True)
class ProcessAccount:
    """One process of a rank.

    Attributes:
        attempts: its accounts by attempt, in the order in which it took part.
        produced, dropped: what its goodbye says; None without a goodbye (it was killed, or still lives).
        reason: of the goodbye.
        holed: the journal has lost items of it.
        uncounted: the latest of those are of an unknown number of records; a goodbye tells.
    """

    rank: int
    pid: int
    host: str
    attempts: dict[int, Account] = field(default_factory=dict)
    produced: int | None = None
    dropped: Mapping[str, int] | None = None
    reason: str = ""
    holed: bool = False
    uncounted: bool = False

    def __str__(self) -> str:
        return f"{self.pid} on {self.host}"

    def freeze(self) -> list[Any]:
        """All of it as lists, numbers and text."""
        attempts = [[number, *account.freeze()] for number, account in self.attempts.items()]
        dropped = None if self.dropped is None else dict(self.dropped)
        flags = [self.holed, self.uncounted]
        return [self.rank, self.pid, self.host, attempts, self.produced, dropped, self.reason, *flags]

    @staticmethod
    def thaw(frozen: list[Any]) -> ProcessAccount:
        """The account that `freeze` gave."""
        rank, pid, host, attempts, produced, dropped, reason, *flags = frozen
        known = {number: Account.thaw(fields) for number, *fields in attempts}
        return ProcessAccount(rank, pid, host, known, produced, dropped, reason, *flags)

    @property
    def received(self) -> int:
        return sum(account.received for account in self.attempts.values())

    @property
    def written(self) -> int:
        return sum(account.written for account in self.attempts.values())

    @property
    def lost(self) -> int:
        return sum(account.lost for account in self.attempts.values())

    @property
    def gaps(self) -> Counter[str]:
        """What its gaps say it dropped, by cause."""
        total: Counter[str] = Counter()
        for account in self.attempts.values():
            total.update(account.dropped)
        return total


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: one process in one attempt; without a process: a rank that never came."""

    rank: int
    attempt: int
    process: str
    state: str
    reached: str = "-"
    written: int = 0
    waiting: int = 0
    produced: str = "?"
    dropped: str = "0"


class Accounts:
    """The accounts of a run. Processes are named by the number of their session."""

    def __init__(self) -> None:
        self.processes: list[ProcessAccount] = []

    def opened(self, hello: Hello, attempt: int) -> None:
        """The next session: a process joins."""
        self.processes.append(ProcessAccount(hello.rank, hello.pid, hello.host, {attempt: Account()}))

    def received(self, session: int, position: Position, records: int) -> None:
        """A block is in the journal."""
        account = self._account(session, position.attempt)
        account.received += records
        account.reached = position

    def written(self, session: int, attempt: int, records: int) -> None:
        """A block has been released to the sinks."""
        self._account(session, attempt).written += records

    def dropped(self, session: int, attempt: int, cause: str, records: int) -> None:
        """A gap: the agent had to refuse these."""
        dropped = self._account(session, attempt).dropped
        # No agent names as many; a peer that does must not fill the memory with them.
        cause = cause if cause in dropped or len(dropped) < MAX_ENTRIES else "other"
        # Nor does any agent drop so many: beyond it the number fits no checkpoint.
        dropped[cause] = min(dropped[cause] + records, MAX_STEP)

    def lost(self, session: int, attempt: int, accepted: int | None) -> int | None:
        """Items of this process are gone that the journal had; of how many records: None: nobody can tell yet.

        Args:
            accepted: records that its agent had accepted in all that it has let go of; None: not known.
        """
        process = self.processes[session]
        process.holed = True
        if accepted is None:
            process.uncounted = True
            return None
        lost = max(0, accepted - process.received - process.lost)
        self._account(session, attempt).lost += lost
        process.uncounted = False
        return lost

    def reached(self, session: int, attempt: int) -> Position | None:
        """The latest position that the journal has of this process in this attempt."""
        return self._account(session, attempt).reached

    def goodbye(self, session: int, goodbye: Goodbye) -> None:
        """The process has said what it produced in all."""
        process = self.processes[session]
        process.produced, process.dropped, process.reason = goodbye.produced, dict(goodbye.dropped), goodbye.reason
        if process.holed:
            lost = goodbye.produced - sum(goodbye.dropped.values()) - process.received - process.lost
            process.attempts[max(process.attempts)].lost += max(0, lost)
            process.uncounted = False

    def _account(self, session: int, attempt: int) -> Account:
        return self.processes[session].attempts.setdefault(attempt, Account())

    def freeze(self) -> list[Any]:
        """All of it as lists, numbers and text, for a checkpoint."""
        return [process.freeze() for process in self.processes]

    @classmethod
    def thaw(cls, frozen: list[Any]) -> Accounts:
        """The accounts that `freeze` gave."""
        self = cls()
        self.processes = [ProcessAccount.thaw(fields) for fields in frozen]
        return self

    # -- questions ----------------------------------------------------------------------------------------------------

    def total_written(self) -> int:
        return sum(process.written for process in self.processes)

    def total_dropped(self) -> int:
        return sum(process.gaps.total() for process in self.processes)

    def total_lost(self) -> str:
        """How many records were acknowledged and are not in the journal, for a person."""
        more = " or more" if any(process.uncounted for process in self.processes) else ""
        return f"{sum(process.lost for process in self.processes)}{more}"

    def discrepancies(self, *, complete: bool) -> Iterator[tuple[str, str, str]]:
        """What does not add up: whose account, what was expected, what is there.

        Args:
            complete: the run has ended, so nothing may wait any more.
        """
        for process in self.processes:
            who = f"rank {process.rank} (process {process})"
            if process.produced is not None and process.dropped is not None:
                dropped = sum(process.dropped.values())
                if process.produced != process.received + dropped + process.lost:
                    there = process.produced - dropped - process.lost
                    why = f"{process.produced} produced, {dropped} dropped"
                    why += f", {process.lost} lost" if process.holed else ""
                    expected = f"{counted(there, 'record')} in the journal, as its goodbye says ({why})"
                    yield who, expected, str(process.received)
                # Gaps may have been among what is lost.
                gaps = dict(process.gaps)
                too_many = any(count > process.dropped.get(cause, 0) for cause, count in gaps.items())
                if too_many or (gaps != dict(process.dropped) and not process.holed):
                    yield who, f"gaps of {_causes(process.dropped)} records, as its goodbye says", _causes(gaps)
            if (complete and process.written != process.received) or process.written > process.received:
                yield (
                    who,
                    f"{counted(process.received, 'record')} in the logs, as the journal has them",
                    str(process.written),
                )

    def rows(self, state: Callable[[int], str], expected: Mapping[int, int]) -> Iterator[Row]:
        """The table by rank, then in the order in which the processes came.

        Args:
            state: of the process with this session number, in a word or two.
            expected: ranks that belong to the run, and the attempt in which each was awaited.
        """
        numbered = sorted(enumerate(self.processes), key=lambda pair: (pair[1].rank, pair[0]))
        heard = {process.rank for process in self.processes}
        rows = [row for number, process in numbered for row in _rows(process, state(number))]
        rows += [Row(rank, attempt, "-", "never came") for rank, attempt in expected.items() if rank not in heard]
        yield from sorted(rows, key=lambda row: row.rank)


def _rows(process: ProcessAccount, state: str) -> Iterator[Row]:
    last = max(process.attempts)
    # A process that opened a new attempt with its first block has nothing in the one that it joined.
    told = {n: a for n, a in process.attempts.items() if n == last or a.received or a.dropped or a.lost}
    for attempt, account in sorted(told.items()):
        produced = "?" if process.produced is None else str(process.produced)
        if len(told) > 1:
            produced = "" if attempt != last else f"{produced} in all"
        yield Row(
            process.rank,
            attempt,
            str(process),
            state if attempt == last else "went on",
            "-" if account.reached is None else _where(account.reached),
            account.written,
            account.received - account.written,
            produced,
            _causes({**account.dropped, **_lost(process, account, last=attempt == last)}),
        )


def _lost(process: ProcessAccount, account: Account, *, last: bool) -> Mapping[str, int | str]:
    """What is told of it beside what the agent dropped."""
    if last and process.uncounted:
        return {JOURNAL_LOST: f"{account.lost} or more"}
    return {JOURNAL_LOST: account.lost} if account.lost else {}


def _where(position: Position) -> str:
    micro_step = "" if position.micro_step is None else f" micro_step {position.micro_step}"
    return f"step {position.step}{micro_step}"


def _causes(dropped: Mapping[str, int | str]) -> str:
    return ", ".join(f"{n} {cause}" for cause, n in sorted(dropped.items())) or "0"


def account_table(rows: Iterable[Row]) -> list[str]:
    """The lines of the table, the heading first."""
    cells: list[Sequence[str]] = [
        ("rank", "attempt", "process", "state", "last position", "written", "waiting", "produced", "dropped")
    ]
    for row in rows:
        counts = (str(row.written), str(row.waiting), row.produced, row.dropped)
        cells.append((str(row.rank), str(row.attempt), row.process, row.state, row.reached, *counts))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    # Numbers end where their heading ends, words begin where it begins.
    aligned = [str.rjust, str.rjust, str.ljust, str.ljust, str.ljust, str.rjust, str.rjust, str.rjust, str.ljust]
    lines = ["  ".join(a(c, w) for a, c, w in zip(aligned, line, widths, strict=True)) for line in cells]
    return [line.rstrip() for line in lines]
