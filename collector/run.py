"""Pure: the state of a run. Journal entries go in, released blocks and comments come out.

`Run` joins the intake (numbers, attempts) and the ordering (what may be released). What comes out is a function of the
entries and of nothing else, so the same journal gives the same logs, byte for byte.
"""

from __future__ import annotations

import enum
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from .accounts import DONE, JOURNAL_LOST, Accounts, Row
from .entries import Back, Decided, Ended, Entry, HeldOut, Lost, Opened, Stored, decode_entry
from .intake import Admitted, Attempt, Intake, Session
from .ordering import Key, Ordering, above, at
from .protocol.errors import JournalError, ProtocolError
from .protocol.messages import Facts
from .protocol.records import Comment, Position, RankBlock
from .protocol.wire import Block, Gap, Goodbye, Hole, Item, Note, Table, decode_item
from .protocol.wording import counted

__all__ = ["DONE", "HELD_BYTES", "RankState", "RankView", "Released", "Run"]

Released: TypeAlias = RankBlock | Comment

# Some seconds of 1,024 ranks at full rate. A stalled rank makes the others wait for longer than that on disk.
HELD_BYTES = 64 * 2**20
_MAX_FETCHED = 2_048
# Of one rank, some 80 bytes of memory each wherever its text is. More than an hour of 50 micro-steps a second.
MAX_HELD_ITEMS = 200_000
# Of all ranks. A power failure makes one or two of a rank; a peer that sends any number must not fill the memory, for
# their lines are longer than they are.
MAX_WAITING_HOLES = 16_384
# Of each kind; the oldest go first.
_MAX_DECISIONS = 64


class RankState(enum.Enum):
    """Where a rank stands."""

    EXPECTED = "expected"  # part of the world, not heard yet in this attempt; or ended before, and awaited again
    LIVE = "live"
    LOST = "lost"  # silent for lost_after
    HELD_OUT = "held_out"  # alive, but held the others up for max_hold
    FINISHED = "finished"  # said goodbye
    CLOSED = "closed"  # not part of the newest attempt's world


@dataclass(slots=True)
class RankView:
    """What is known of one rank: where it stands, and the reason of its latest goodbye."""

    state: RankState = RankState.EXPECTED
    position: Position | None = None
    reason: str = ""

    def freeze(self) -> list[Any]:
        """All of it as lists, numbers and text."""
        key = None if self.position is None else list(self.position.key)
        return [self.state.value, key, self.reason]

    @staticmethod
    def thaw(frozen: list[Any]) -> RankView:
        """The view that `freeze` gave."""
        state, key, reason = frozen
        return RankView(RankState(state), None if key is None else Position.from_key(tuple(key)), reason)


@dataclass(frozen=True, slots=True)
class _Held:
    """A block (or note) waiting for its position's release: the `index`-th item of the journal's entry `reference`."""

    session: Session
    reference: int
    index: int
    size: int
    item: Block | Note | Gap | Hole


# The same of an item that is read from the journal when its time comes, which may be hundreds of thousands: the numbers
# of session and item, and the reference.
_IN_JOURNAL = struct.Struct("<IIQ")


# What reading a checkpoint runs into that another version has laid out in its own way.
_OTHER_LAYOUT = (
    ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, struct.error, ProtocolError,
)  # fmt: skip


def _in_journal(held: _Held | bytes) -> bytes:
    return held if isinstance(held, bytes) else _IN_JOURNAL.pack(held.session.number, held.index, held.reference)


def _checked(place: bytes) -> bytes:
    if type(place) is not bytes or len(place) != _IN_JOURNAL.size:
        raise ValueError(f"a place in the journal has {_IN_JOURNAL.size} bytes")
    return place


class Run:
    """The state of one run (one output directory).

    Args:
        fetch: gives the payload of a journal entry back, by its reference.
        held_bytes: of what waits for release, this much is kept in memory; the rest is fetched.
    """

    def __init__(self, fetch: Callable[[int], bytes], *, held_bytes: int = HELD_BYTES) -> None:
        self._fetch = fetch
        self._held_bytes_most = held_bytes
        self._held_bytes = 0
        # Entries that were fetched lately, by reference: the items of one entry are released one position at a time.
        self._fetched: OrderedDict[int, tuple[bytes, ...]] = OrderedDict()
        self.intake = Intake()
        self.ranks: dict[int, RankView] = {}
        self.accounts = Accounts()
        self.ended = False
        self.first_failure: tuple[int, str] | None = None
        # What ranks were told, by kind and key, oldest first (`Decided`).
        self.decisions: dict[str, dict[str, Facts]] = {}
        self._ordering: Ordering[_Held | bytes] = Ordering()
        # The lines of holes that wait, by the place of each in the journal: they say more than the item does.
        self._hole_texts: dict[bytes, str] = {}
        # The attempt that each rank's log, and the merged log (None), was last told of.
        self._announced: dict[int | None, int] = {}

    # -- questions ----------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """All ranks of the newest attempt's world have said goodbye."""
        attempt = self.intake.attempt
        return attempt is not None and not self.missing()

    def missing(self) -> list[int]:
        """Ranks of the newest attempt's world that have not said goodbye."""
        attempt = self.intake.attempt
        world = range(attempt.world_size) if attempt else range(0)
        return [r for r in world if self.ranks[r].state is not RankState.FINISHED]

    def counting(self) -> frozenset[int]:
        """The ranks that the release waits for."""
        return self._ordering.counting()

    def watched(self) -> frozenset[int]:
        """The ranks that may be given up: those that are waited for, and those that held the others up."""
        held_out = (rank for rank, view in self.ranks.items() if view.state is RankState.HELD_OUT)
        return self.counting().union(held_out)

    def holds_too_much(self, rank: int) -> bool:
        """So much of this rank waits for others that it has to wait too: each item costs memory, also on disk."""
        return self._ordering.held_of(rank) >= MAX_HELD_ITEMS

    def waiting(self) -> tuple[Key, frozenset[int]] | None:
        """The lowest position that is held up, and the ranks that hold it up."""
        return self._ordering.waiting()

    def rows(self) -> list[Row]:
        """The accounts of all processes, as a table."""
        attempt = self.intake.attempt
        expected = range(attempt.world_size) if attempt else range(0)
        return list(self.accounts.rows(self._process_state, dict.fromkeys(expected, len(self.intake.attempts))))

    def _process_state(self, number: int) -> str:
        process, session = self.accounts.processes[number], self.intake.sessions[number]
        if process.produced is not None:
            return "done" if process.reason == DONE else "ended early"
        state = self.ranks[session.rank].state
        if self.intake.current(session.rank) is not session or state is RankState.CLOSED:
            return "killed"
        # Expected is the next process of that rank.
        return str((RankState.LOST if state is RankState.EXPECTED else state).value)

    # -- changes ------------------------------------------------------------------------------------------------------

    def apply(self, entry: Entry, reference: int = 0) -> list[Released]:
        """Take one entry, which the journal has at `reference`, and return what it releases, in order."""
        out: list[Released] = []
        match entry:
            case Stored():
                out += self._stored(entry, reference)
            case Opened():
                self._opened(entry)
            case Lost():
                out += self._lost(entry)
            case HeldOut():
                out += self._held_out(entry)
            case Back():
                out += self._back(entry)
            case Decided():
                out += self._decided(entry)
            case Ended():
                return [*self._release(), *self._end()]
        out += self._release()
        return out

    def admitted(self, admitted: Admitted) -> Stored:
        """The entry for newly admitted items."""
        return Stored(admitted.session.number, admitted.raws, admitted.items)

    def _opened(self, entry: Opened) -> None:
        self.ended = False
        nobody_lives = not any(view.state is RankState.LIVE for view in self.ranks.values())
        launch = self.intake.launch
        session, opens = self.intake.open(entry.hello)
        self.accounts.opened(entry.hello, session.attempt)
        if opens:
            self._begin_attempt(self.intake.attempts[-1])
        elif nobody_lives and self.intake.launch != launch:
            self._expect_all()
        if self.intake.current(session.rank) is not session:
            # Of the past; perhaps of a larger world.
            self.ranks.setdefault(session.rank, RankView(RankState.CLOSED))
            return
        view = self.ranks[session.rank]
        view.state, view.reason = RankState.LIVE, ""
        self._ordering.expect(session.rank)

    def _begin_attempt(self, attempt: Attempt) -> None:
        for rank in range(attempt.world_size):
            self.ranks.setdefault(rank, RankView())
        for rank, view in self.ranks.items():
            if rank >= attempt.world_size:
                view.state = RankState.CLOSED
                self._ordering.drop(rank)
        self._expect_all()

    def _expect_all(self) -> None:
        """A new start of the job: ranks that had ended or were lost are expected again."""
        for rank, view in self.ranks.items():
            if view.state in (RankState.FINISHED, RankState.LOST, RankState.EXPECTED):
                view.state = RankState.EXPECTED
                self._ordering.expect(rank)

    def _stored(self, entry: Stored, reference: int) -> Iterator[Released]:
        # What comes after the end (recovered from a dead process) is followed by another one.
        self.ended = False
        session = self.intake.sessions[entry.session]
        for index, item in enumerate(entry.items or self._decoded(session, entry.raws)):
            session.stored = max(session.stored, item.seq)
            match item:
                case Block():
                    yield from self._block(item, _Held(session, reference, index, len(entry.raws[index]), item))
                case Note() | Gap():
                    yield from self._note(item, _Held(session, reference, index, len(entry.raws[index]), item))
                case Hole():
                    yield from self._hole(item, _Held(session, reference, index, len(entry.raws[index]), item))
                case Goodbye():
                    yield from self._goodbye(session, item)
                case Table():
                    session.tables.define(item.table_id, item.table)

    def _decoded(self, session: Session, raws: tuple[bytes, ...]) -> Iterator[Item]:
        for raw in raws:
            item = decode_item(raw, session.tables)
            session.admitted = max(session.admitted, item.seq)
            yield item

    def _block(self, block: Block, held: _Held) -> Iterator[Released]:
        session = held.session
        position, opens = self.intake.place(session, block)
        if opens:
            self._begin_attempt(self.intake.attempts[-1])
        rank, key = session.rank, position.key
        view = self.ranks[rank]
        self.accounts.received(session.number, position, block.record_count)
        if block.frames:
            yield from self._hold_or_late(position, held)
        if not block.addendum and self.intake.current(rank) is session:
            view.position = position
            self._ordering.raise_floor(rank, above(key) if block.complete else at(_open_key(position)))
            self._catch_up(rank)

    def _hold_or_late(self, position: Position, held: _Held) -> Iterator[Released]:
        if held.session.past or self._ordering.is_late(position.key):
            yield from self._rank_block(held.session.rank, position, [held], late=True)
            return
        in_memory = self._held_bytes + held.size <= self._held_bytes_most
        self._held_bytes += held.size if in_memory else 0
        self._ordering.hold(held.session.rank, position.key, held if in_memory else _in_journal(held))

    def _catch_up(self, rank: int) -> None:
        """A rank that was lost or held out counts again once it has passed what is already released."""
        view, ordering = self.ranks[rank], self._ordering
        caught_up = ordering.floor(rank) >= above(ordering.passed)
        if caught_up and not ordering.counts(rank) and view.state in (RankState.HELD_OUT, RankState.LIVE):
            view.state = RankState.LIVE
            ordering.expect(rank)

    def _note(self, note: Note | Gap, held: _Held) -> Iterator[Released]:
        session = held.session
        if isinstance(note, Gap):
            self.accounts.dropped(session.number, session.attempt, note.cause, note.records)
            step, micro_step = note.last
        else:
            if note.kind == "exception" and self.first_failure is None:
                self.first_failure = (session.rank, note.text)
            step, micro_step = (note.step or session.step or 1), note.micro_step
        position = Position(session.attempt, step, micro_step)
        if isinstance(note, Note) and self._follows_all(session, position):
            yield Comment(session.rank, note.kind, note.text)
            return
        yield from self._hold_or_late(position, held)

    def _hole(self, hole: Hole, held: _Held) -> Iterator[Released]:
        """The line stands behind the last that the journal has of this process."""
        session = held.session
        session.holed = True
        reached = self.accounts.reached(session.number, session.attempt)
        lost = self.accounts.lost(session.number, session.attempt, hole.accepted)
        if lost == 0:
            return
        records = "an unknown number of records" if lost is None else counted(lost, "record")
        are = "is" if lost == 1 else "are"
        after = "" if reached is None else f" after {_where(reached.step, reached.micro_step)}"
        until = "" if hole.last is None else f" up to {_where(*hole.last)}"
        text = f"{records}{after}{until} {are} missing ({JOURNAL_LOST})"
        position = reached or Position(session.attempt, session.step or 1)
        too_many = len(self._hole_texts) >= MAX_WAITING_HOLES
        if session.past or too_many or self._ordering.is_late(position.key):
            yield Comment(session.rank, "gap", text)
        else:
            self._hole_texts[_in_journal(held)] = text
            yield from self._hold_or_late(position, held)

    def _follows_all(self, session: Session, position: Position) -> bool:
        """About a step that has been released, of a rank that has begun no other since: nothing is out of order."""
        newest = self.intake.current(session.rank) is session and not session.past and position.step >= session.step
        return newest and position.micro_step is None and self._ordering.is_late(position.key)

    def _goodbye(self, session: Session, goodbye: Goodbye) -> Iterator[Released]:
        session.over = True
        self.accounts.goodbye(session.number, goodbye)
        if self.intake.current(session.rank) is not session:
            return
        view = self.ranks[session.rank]
        view.state, view.reason = RankState.FINISHED, goodbye.reason
        self._ordering.drop(session.rank)
        if goodbye.reason != DONE:
            yield Comment(None, "rank_ended", f"rank {session.rank} ended early: {goodbye.reason}")

    def _lost(self, entry: Lost) -> Iterator[Released]:
        view = self.ranks[entry.rank]
        self._ordering.drop(entry.rank)
        if view.state is RankState.EXPECTED and view.reason == DONE:
            # A single rank was started again after the others had come to their end.
            view.state = RankState.FINISHED
            text = f"rank {entry.rank}: had ended, and did not come again for {entry.silent:.0f} s"
            yield Comment(None, "rank_away", f"{text}; the log goes on without it")
            return
        view.state = RankState.LOST
        last = "never heard" if view.position is None else f"last at {view.position}"
        why = "its process is gone" if entry.gone else f"silent for {entry.silent:.0f} s"
        text = f"rank {entry.rank}: {why}, {last}; the log goes on without it"
        yield Comment(None, "rank_lost", text)

    def _held_out(self, entry: HeldOut) -> Iterator[Released]:
        view = self.ranks[entry.rank]
        view.state = RankState.HELD_OUT
        self._ordering.drop(entry.rank)
        text = f"rank {entry.rank}: has held the others up for {entry.held:.0f} s; the log goes on without it"
        yield Comment(None, "rank_held_out", text)

    def _back(self, entry: Back) -> Iterator[Released]:
        view = self.ranks[entry.rank]
        if view.state is RankState.CLOSED:
            # A process of a larger world, which outlives that: nobody waits for its end.
            return
        view.state = RankState.LIVE
        self._catch_up(entry.rank)
        yield Comment(None, "rank_back", f"rank {entry.rank}: heard again")

    def _decided(self, entry: Decided) -> Iterator[Released]:
        known = self.decisions.setdefault(entry.kind, {})
        known.pop(entry.key, None)
        known[entry.key] = entry.facts
        if len(known) > _MAX_DECISIONS:
            del known[next(iter(known))]
        if entry.text:
            yield Comment(None, entry.kind, entry.text)

    # -- release ------------------------------------------------------------------------------------------------------

    def _release(self) -> Iterator[Released]:
        for key, by_rank in self._ordering.release():
            position = Position.from_key(key)
            yield from self._announce(None, position.attempt)
            for rank, held in by_rank:
                self._held_bytes -= sum(h.size for h in held if isinstance(h, _Held))
                yield from self._rank_block(
                    rank, position, [h if isinstance(h, _Held) else self._read(h) for h in held]
                )

    def _rank_block(self, rank: int, position: Position, held: list[_Held], late: bool = False) -> Iterator[Released]:
        if not late:
            yield from self._announce(rank, position.attempt)
        items = [h.item for h in held]
        blocks = [item for item in items if isinstance(item, Block)]
        frames = tuple(frame for block in blocks for frame in block.frames)
        comments = tuple(self._comment(rank, h) for h in held if not isinstance(h.item, Block))
        for h, item in zip(held, items, strict=True):
            if isinstance(item, Block):
                self.accounts.written(h.session.number, position.attempt, item.record_count)
        time = blocks[-1].time if blocks else 0.0
        yield RankBlock(rank, position, frames, comments, late, held[-1].session.hello.total_steps, time)

    def _comment(self, rank: int, held: _Held) -> Comment:
        item = held.item
        if isinstance(item, Note):
            return Comment(rank, item.kind, item.text)
        if isinstance(item, Hole):
            return Comment(rank, "gap", self._hole_texts.pop(_in_journal(held)))
        assert isinstance(item, Gap)
        first, last = (_where(*ends) for ends in (item.first, item.last))
        are = "is" if item.records == 1 else "are"
        lost = counted(item.records, "record")
        return Comment(rank, "gap", f"{lost} from {first} to {last} {are} missing ({item.cause})")

    def _read(self, place: bytes) -> _Held:
        number, index, reference = _IN_JOURNAL.unpack(place)
        raws = self._fetched.get(reference)
        if raws is None:
            entry = decode_entry(self._fetch(reference))
            assert isinstance(entry, Stored)
            raws = self._fetched[reference] = entry.raws
            if len(self._fetched) > _MAX_FETCHED:
                self._fetched.popitem(last=False)
        session = self.intake.sessions[number]
        item = decode_item(raws[index], session.tables)
        assert isinstance(item, Block | Note | Gap | Hole)
        return _Held(session, reference, index, len(raws[index]), item)

    def _announce(self, who: int | None, attempt: int) -> Iterator[Released]:
        if self._announced.get(who, 0) < attempt:
            self._announced[who] = attempt
            yield Comment(who, "attempt", f"{attempt} world_size {self.intake.attempts[attempt - 1].world_size}")

    def _end(self) -> Iterator[Released]:
        self.ended = True
        for rank in self.missing():
            yield Comment(None, "missing", f"rank {rank}: no goodbye ({self.ranks[rank].state.value})")
        if self.first_failure is not None:
            rank, text = self.first_failure
            yield Comment(None, "first_failure", f"rank {rank}: {text}")
        written, dropped = self.accounts.total_written(), self.accounts.total_dropped()
        records = f"{counted(written, 'record')} of {counted(len(self.ranks), 'rank')}"
        text = f"attempt {len(self.intake.attempts)}: {records}, {dropped} dropped"
        if any(process.holed for process in self.accounts.processes):
            text += f", {self.accounts.total_lost()} lost"
        yield Comment(None, "end", text)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def oldest_needed(self, otherwise: int) -> int:
        """The reference of the oldest entry that may have to be fetched; `otherwise` where there is none."""
        held = map(_in_journal, self._ordering.held())
        return min((reference for _, _, reference in map(_IN_JOURNAL.unpack, held)), default=otherwise)

    def freeze(self) -> list[Any]:
        """The whole state as lists, numbers, text and bytes, for a checkpoint."""
        ordering = self._ordering.freeze(_in_journal)
        ranks = [[rank, *view.freeze()] for rank, view in self.ranks.items()]
        announced = [[-1 if who is None else who, attempt] for who, attempt in self._announced.items()]
        accounts = self.accounts.freeze()
        decisions = {kind: dict(known) for kind, known in self.decisions.items()}
        so_far = [self.ended, self.first_failure, decisions, list(self._hole_texts.items())]
        return [self.intake.freeze(), ordering, ranks, accounts, announced, *so_far]

    @classmethod
    def thaw(cls, frozen: list[Any], fetch: Callable[[int], bytes], *, held_bytes: int = HELD_BYTES) -> Run:
        """The state that `freeze` gave; what was held is fetched when its time comes.

        Raises:
            JournalError: another version has written this.
        """
        try:
            return cls._thaw(frozen, fetch, held_bytes)
        except _OTHER_LAYOUT as e:
            raise JournalError(f"not a checkpoint of this version's journal ({e})") from e

    @classmethod
    def _thaw(cls, frozen: list[Any], fetch: Callable[[int], bytes], held_bytes: int) -> Run:
        self = cls(fetch, held_bytes=held_bytes)
        intake, ordering, ranks, accounts, announced, self.ended, failure, decisions, holes = frozen
        self.intake = Intake.thaw(intake)
        self._ordering = Ordering.thaw(ordering, _checked)
        self.ranks = {rank: RankView.thaw(fields) for rank, *fields in ranks}
        self.accounts = Accounts.thaw(accounts)
        self._announced = {None if who < 0 else who: attempt for who, attempt in announced}
        self.first_failure = None if failure is None else (failure[0], failure[1])
        self.decisions = {kind: dict(known) for kind, known in decisions.items()}
        self._hole_texts = dict(holes)
        return self


def _open_key(position: Position) -> Key:
    """Where a rank may still produce that has an open block here: a step's value may come before its micro-steps."""
    return Position(position.attempt, position.step, position.micro_step or 1).key


def _where(step: int, micro_step: int | None) -> str:
    return f"step {step}" if micro_step is None else f"step {step} micro_step {micro_step}"
