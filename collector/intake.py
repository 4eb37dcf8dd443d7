"""Pure: the sessions of the ranks. Numbers, duplicates, and which attempt a block belongs to.

A *session* is one process of one rank. Its items are numbered 1, 2, 3 …; what has been seen is skipped, a hole is the
peer's fault, unless it says that what is missing was acknowledged before (`Hole`: this side has lost it). Agents know
nothing of attempts; they are decided here, where all ranks are seen:

- A session whose position goes back (to one it has completed before) opens a new attempt, or joins the newest one if
  another rank has opened it already.
- The first block of a new process of a rank that has been part of the attempt goes back where its step is not above
  the highest step that *any* rank had reached before: ranks of one job stop at slightly different steps, and all of
  them must come to the same answer whichever is heard first. "Before" is told by the *launch*: it is counted up each
  time a rank comes with a new process that has had one in the current launch already.
- A hello with another world_size than the attempt's opens a new attempt.
- A rank that goes on forward while another has gone back (a single rank restarted) joins the newest attempt two steps
  above what its own had reached when the new one was opened. Not earlier: in a roll-back of all ranks, those that are
  heard late still deliver their old steps, and collectives keep ranks within one step of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .protocol.errors import LimitError, ProtocolError, UnknownTableError
from .protocol.records import NameTable, Position
from .protocol.wire import (
    Block,
    Hello,
    Hole,
    Interned,
    Item,
    Refused,
    Table,
    Tables,
    decode_item,
    decode_message,
    encode_item,
    encode_message,
    hole_of,
)

__all__ = ["Admitted", "Attempt", "Intake", "Session", "first_of"]


# What a run may hold in memory of processes and attempts, a kilobyte each: 1,024 ranks that restart 60 times.
MAX_SESSIONS = 65_536
# A run that goes back so often stays in its last attempt; what is out of order there is marked as late.
MAX_ATTEMPTS = 10_000


@dataclass(slots=True)
class Session:
    """One process of one rank, as far as it has been heard.

    Attributes:
        number: its place in the journal's list of sessions, from 0.
        admitted: the highest item number taken from the peer.
        stored: the highest item number that the journal has; what is acknowledged.
        attempt: the attempt of its latest block.
        completed: the latest position it has completed in this attempt, as (step, micro_step or infinity).
        launch: which start of the job this process belongs to.
        fresh: no block yet, and the rank had been part of the attempt in an earlier process.
        over: it has said goodbye, or another process has taken its rank.
        past: first heard of when its process was gone and another had its rank; when it did what, nobody can tell.
        holed: the journal has lost items of it, perhaps definitions of its name tables.
    """

    number: int
    hello: Hello
    tables: Tables
    launch: int
    admitted: int = 0
    stored: int = 0
    attempt: int = 0
    step: int = 0
    completed: tuple[int, float] = (0, 0)
    fresh: bool = False
    over: bool = False
    past: bool = False
    holed: bool = False

    @property
    def rank(self) -> int:
        return self.hello.rank

    def freeze(self, table: Callable[[NameTable], int]) -> list[Any]:
        """All of it as lists and numbers; `table` gives the place of a name table in the checkpoint's list."""
        tables = [[table_id, table(t)] for table_id, t in self.tables.items()]
        seen = [self.admitted, self.stored, self.attempt, self.step, *self.completed, self.launch]
        return [encode_message(self.hello), tables, seen, [self.fresh, self.over, self.past, self.holed]]

    @staticmethod
    def thaw(number: int, frozen: list[Any], tables: list[NameTable], interned: Interned) -> Session:
        """The session that `freeze` gave."""
        raw, defined, seen, flags = frozen
        admitted, stored, attempt, step, done_step, done_micro, launch = seen
        hello = decode_message(raw)
        assert isinstance(hello, Hello)
        own = Tables(interned)
        for table_id, place in defined:
            own.define(table_id, tables[place])
        completed = (done_step, done_micro)
        return Session(number, hello, own, launch, admitted, stored, attempt, step, completed, *flags)


@dataclass(slots=True)
class Attempt:
    """One attempt.

    Attributes:
        members: the ranks that took part.
        reached: the highest step that any rank has reached, by launch.
        left_at: the highest step of all when the next attempt was opened; None: it is the newest.
    """

    number: int
    world_size: int
    members: set[int] = field(default_factory=set)
    reached: dict[int, int] = field(default_factory=dict)
    left_at: int | None = None

    def freeze(self) -> list[Any]:
        """All of it as lists and numbers."""
        return [
            self.number,
            self.world_size,
            sorted(self.members),
            [list(r) for r in self.reached.items()],
            self.left_at,
        ]

    @staticmethod
    def thaw(frozen: list[Any]) -> Attempt:
        """The attempt that `freeze` gave."""
        number, world_size, members, reached, left_at = frozen
        return Attempt(number, world_size, set(members), dict(reached), left_at)

    def reached_before(self, launch: int) -> int:
        """The highest step that an earlier launch has reached."""
        return max((step for number, step in self.reached.items() if number < launch), default=0)


@dataclass(frozen=True, slots=True)
class Admitted:
    """New items of a session: their bytes for the journal, and what they decode to."""

    session: Session
    raws: tuple[bytes, ...]
    items: tuple[Item, ...]


class Intake:
    """All sessions of a run. `admit` only looks and decodes; `open` and `place` change the state."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.attempts: list[Attempt] = []
        self.launch = 1
        self._by_token: dict[bytes, Session] = {}
        self._current: dict[int, Session] = {}
        self._interned = Interned()

    @property
    def attempt(self) -> Attempt | None:
        """The newest attempt; None before the first hello."""
        return self.attempts[-1] if self.attempts else None

    def session(self, token: bytes) -> Session | None:
        """The session of the process with this identity."""
        return self._by_token.get(token)

    def current(self, rank: int) -> Session | None:
        """The newest session of a rank."""
        return self._current.get(rank)

    def objection(self, hello: Hello, alive: Callable[[Session], bool]) -> Refused | None:
        """Why this process cannot join now; None: it can. `alive` tells whether a session's process is still heard.

        What a process that is gone has left in its spool is always taken: it disturbs nobody.

        Raises:
            LimitError: the run has had too many processes.
        """
        if hello.session in self._by_token:
            return self._objection_to_return(hello)
        if len(self.sessions) >= MAX_SESSIONS:
            raise LimitError(f"this run has had {MAX_SESSIONS} processes; start one with another output")
        if hello.recovered:
            return None
        older = self._current.get(hello.rank)
        if older is not None and not older.over and alive(older):
            return Refused(
                f"rank {hello.rank} is taken by {_who(older.hello)}, which is alive; {_who(hello)} must wait until it "
                "has ended. If both are meant to run, give each its own RANKD_RANK",
                retry=True,
            )
        others = [s for s in self._current.values() if not s.over]
        for other in others:
            job, own = other.hello.about.get("job"), hello.about.get("job")
            if job and own and job != own and alive(other):
                return Refused(
                    f"rank {hello.rank} is of another job ({own}) than rank {other.rank} ({_who(other.hello)}), which "
                    f"is alive ({job}); give each job its own rankd.output, and its own port in rankd.endpoint",
                    retry=True,
                )
            if other.hello.world_size != hello.world_size and alive(other):
                return Refused(
                    f"rank {hello.rank} says world_size {hello.world_size}, but rank {other.rank} ({_who(other.hello)})"
                    f" is alive with world_size {other.hello.world_size}; set RANKD_WORLD_SIZE alike on all ranks",
                    retry=True,
                )
        return None

    def _objection_to_return(self, hello: Hello) -> Refused | None:
        known = self._by_token[hello.session]
        if (known.rank, known.hello.world_size) != (hello.rank, hello.world_size):
            return Refused(
                f"this process was rank {known.rank} of {known.hello.world_size} before and now says "
                f"{hello.rank} of {hello.world_size}",
                retry=False,
            )
        newer = self._current.get(known.rank)
        if newer is not known and not hello.recovered:
            by = "" if newer is None else f" by {_who(newer.hello)}"
            return Refused(f"rank {known.rank} has been taken over{by}", retry=False)
        return None

    def open(self, hello: Hello) -> tuple[Session, bool]:
        """Take a new session; True: it opens a new attempt (the first, or another world_size).

        A recovered process belongs to the past where its rank has another one, or the world has another size: it opens
        nothing, and its rank's current session stays.
        """
        if hello.recovered and self._is_past(hello):
            return self._known(self._past(hello)), False
        opens = self.attempt is None or self.attempt.world_size != hello.world_size
        if opens:
            self._new_attempt(hello.world_size)
        attempt = self.attempts[-1]
        older = self._current.get(hello.rank)
        if older is not None:
            older.over = True
            if older.launch == self.launch:
                self.launch += 1
        session = Session(len(self.sessions), hello, Tables(self._interned), self.launch, attempt=attempt.number)
        session.fresh = hello.rank in attempt.members
        attempt.members.add(hello.rank)
        self._current[hello.rank] = session
        return self._known(session), opens

    def _is_past(self, hello: Hello) -> bool:
        newest = self.attempt
        return newest is not None and (hello.rank in self._current or newest.world_size != hello.world_size)

    def _past(self, hello: Hello) -> Session:
        current = self._current.get(hello.rank)
        launch = self.launch if current is None else current.launch
        session = Session(len(self.sessions), hello, Tables(self._interned), launch, over=True, past=True)
        of_its_size = [a.number for a in self.attempts if a.world_size == hello.world_size]
        session.attempt = current.attempt if current is not None else (of_its_size or [len(self.attempts)])[-1]
        return session

    def _known(self, session: Session) -> Session:
        self.sessions.append(session)
        self._by_token[session.hello.session] = session
        return session

    def admit(self, session: Session, raws: Sequence[bytes]) -> Admitted:
        """Decode a session's items and leave out those seen before.

        Raises:
            ProtocolError: an item that cannot be decoded, or a hole in the numbers.
        """
        new_raws: list[bytes] = []
        new_items: list[Item] = []
        expected = session.admitted + 1
        for raw in raws:
            item = _decoded(session, raw)
            if item.seq != expected:  # or it is a hole, which may reach further
                if first_of(item) > expected:
                    raise ProtocolError(f"rank {session.rank}: item {expected} is missing, got {first_of(item)}")
                if item.seq < expected:
                    continue
            if isinstance(item, Table):
                session.tables.define(item.table_id, item.table)
            elif isinstance(item, Hole):
                session.holed = True
                if new_items and isinstance(before := new_items[-1], Hole):
                    item = _joined(before, item)
                    del new_raws[-1], new_items[-1]
                raw = encode_item(item)
            new_raws.append(raw)
            new_items.append(item)
            expected = item.seq + 1
        session.admitted = expected - 1
        return Admitted(session, tuple(new_raws), tuple(new_items))

    def place(self, session: Session, block: Block) -> tuple[Position, bool]:
        """The position of a block, attempt included; True: it opens a new attempt."""
        where = (block.step, float("inf") if block.micro_step is None else float(block.micro_step))
        opens = False
        if not block.addendum:
            opens = self._choose_attempt(session, block.step, where)
            session.step = block.step
            if block.complete:
                session.completed = where
            reached = self.attempts[session.attempt - 1].reached
            reached[session.launch] = max(reached.get(session.launch, 0), block.step)
        return Position(session.attempt, block.step, block.micro_step), opens

    def _choose_attempt(self, session: Session, step: int, where: tuple[int, float]) -> bool:
        own, newest = self.attempts[session.attempt - 1], self.attempts[-1]
        goes_back = where <= session.completed
        if session.fresh:
            goes_back = step <= own.reached_before(session.launch)
        joins = goes_back or session.fresh or (own.left_at is not None and step > own.left_at + 1)
        session.fresh = False
        if self._current.get(session.rank) is not session or not joins:
            return False
        opens = goes_back and own is newest and len(self.attempts) < MAX_ATTEMPTS
        self._join(session, self._new_attempt(own.world_size) if opens else newest)
        return opens

    def _join(self, session: Session, attempt: Attempt) -> None:
        if session.attempt != attempt.number:
            session.attempt = attempt.number
            session.completed = (0, 0)
        attempt.members.add(session.rank)

    def _new_attempt(self, world_size: int) -> Attempt:
        if self.attempts:
            self.attempts[-1].left_at = max(self.attempts[-1].reached.values(), default=0)
        self.attempts.append(Attempt(len(self.attempts) + 1, world_size))
        return self.attempts[-1]

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def freeze(self) -> list[Any]:
        """The whole state as lists, numbers, text and bytes. Equal name tables are written once."""
        tables: dict[NameTable, int] = {}
        sessions = [s.freeze(lambda table: tables.setdefault(table, len(tables))) for s in self.sessions]
        current = [[rank, session.number] for rank, session in self._current.items()]
        names = [list(table.names) for table in tables]
        return [names, sessions, current, [a.freeze() for a in self.attempts], self.launch]

    @classmethod
    def thaw(cls, frozen: list[Any]) -> Intake:
        """The state that `freeze` gave."""
        self = cls()
        names, sessions, current, attempts, self.launch = frozen
        tables = [NameTable(tuple(n)) for n in names]
        for fields in sessions:
            self._known(Session.thaw(len(self.sessions), fields, tables, self._interned))
        self._current = {rank: self.sessions[number] for rank, number in current}
        self.attempts = [Attempt.thaw(fields) for fields in attempts]
        return self


def first_of(item: Item) -> int:
    """The first number that this item has, or stands for."""
    return item.first if isinstance(item, Hole) else item.seq


def _decoded(session: Session, raw: bytes) -> Item:
    try:
        return decode_item(raw, session.tables)
    except UnknownTableError:
        # The definition is gone with the journal's end, and its process, which could say it again, may be gone too.
        if not session.holed:
            raise
        return hole_of(raw)


def _joined(one: Hole, other: Hole) -> Hole:
    """Two that follow each other, as one: a line of the log for both."""
    accepted = one.accepted if other.accepted is None else other.accepted
    return Hole(other.seq, one.first, accepted, other.last or one.last)


def _who(hello: Hello) -> str:
    return f"process {hello.pid} on {hello.host}"
