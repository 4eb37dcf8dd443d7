"""Journal entries in, released blocks and comments out."""

from __future__ import annotations

import json
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import items

from rankd.collector.accounts import account_table
from rankd.collector.entries import Back, Ended, HeldOut, Lost, decode_entry, encode_entry
from rankd.collector.protocol.errors import ProtocolError
from rankd.collector.protocol.records import Comment, Frame, NameTable, Position, RankBlock
from rankd.collector.protocol.speclog import Renderer, merged_text
from rankd.collector.protocol.wire import Block, Goodbye, Hole, Note, Table, encode_item
from rankd.collector.run import MAX_WAITING_HOLES, RankState, Released
from rankd.collector.status import Beats, Latest, status_of

from .streams import Core, Training, hello, training


def where(released: list[Released]) -> list[tuple[int, int, int | None, int]]:
    """(attempt, step, micro_step, rank) of the blocks."""
    blocks = [b for b in released if isinstance(b, RankBlock)]
    return [(b.position.attempt, b.position.step, b.position.micro_step, b.rank) for b in blocks]


def text(released: list[Released]) -> bytes:
    """The bytes of merged.log."""
    renderer = Renderer()
    return b"".join(
        merged_text(item.rank, renderer.block(item) if isinstance(item, RankBlock) else renderer.comment(item))
        for item in released
    )


def comments(released: list[Released], kind: str) -> list[Comment]:
    return [c for c in released if isinstance(c, Comment) and c.kind == kind]


def in_one_go(trainings: list[Training]) -> Core:
    """Each rank's items at once, one rank after the other."""
    core = Core()
    for one in trainings:
        core.open(one)
    for one in trainings:
        core.deliver(one)
    core.apply(Ended())
    return core


def test_blocks_come_by_step_micro_step_and_rank() -> None:
    """Step-level blocks come after the last micro-step of their step; ranks in order within each position."""
    core = in_one_go([training(rank, 2) for rank in (1, 0)])
    assert where(core.released) == [
        (1, step, micro, rank) for step in (1, 2) for micro in (1, 2, None) for rank in (0, 1)
    ]


def test_each_log_is_told_its_attempt_first() -> None:
    """The run's attempt comment comes first, then each rank's own before its first block."""
    core = in_one_go([training(rank, 2) for rank in (0, 1)])
    assert core.released[0] == Comment(None, "attempt", "1 world_size 2")
    assert comments(core.released, "attempt")[1:] == [Comment(r, "attempt", "1 world_size 2") for r in (0, 1)]


@given(st.data())
@settings(max_examples=settings().max_examples * 3 // 2)
def test_any_interleaving_duplication_and_delay_gives_the_same_log(data: st.DataObject) -> None:
    """Promise 1: up to 8 ranks, items in any mixture, resent from any earlier point, delayed to the end; the collector
    goes on from checkpoints in between, and what waits lies in memory or on disk."""
    world = data.draw(st.integers(1, 8))
    trainings = [training(rank, world, steps=(1, 2), micro_steps=2) for rank in range(world)]
    expected = in_one_go(trainings)
    core = Core(held_bytes=data.draw(st.sampled_from([0, 1_000, 10**9])))
    for rank in data.draw(st.permutations(range(world))):
        core.open(trainings[rank])
    sent = dict.fromkeys(range(world), 0)
    while pending := [r for r in range(world) if sent[r] < len(trainings[r].items)]:
        rank = data.draw(st.sampled_from(pending))
        start = data.draw(st.integers(0, sent[rank]))
        stop = data.draw(st.integers(sent[rank] + 1, len(trainings[rank].items)))
        core.deliver(trainings[rank], start, stop)
        sent[rank] = stop
        if data.draw(st.booleans()):
            core.restart()
    core.apply(Ended())
    assert core.released == expected.released
    assert core.replayed() == core.released
    assert text(core.released) == text(expected.released)


def test_a_hole_in_the_numbers_is_the_peers_fault() -> None:
    """An item whose predecessor is missing is refused, and nothing of the batch is taken."""
    core = Core()
    one = training(0, 1)
    core.open(one)
    core.deliver(one, 0, 1)
    with pytest.raises(ProtocolError, match="item 2 is missing, got 3"):
        core.deliver(one, 2)
    core.deliver(one)
    assert len(where(core.released)) == 6


def test_a_lost_rank_is_named_and_the_others_flow() -> None:
    """After `lost` the held positions come, and the log says which rank is missing and where it was."""
    core = Core()
    ranks = [training(rank, 3, goodbye=None) for rank in range(3)]
    for one in ranks:
        core.open(one)
    core.deliver(ranks[0])
    core.deliver(ranks[1])
    core.deliver(ranks[2], 0, 2)
    assert where(core.released)[-1] == (1, 1, 1, 2)
    out = core.apply(Lost(2, 61.0))
    assert comments(out, "rank_lost")[0].text.startswith("rank 2: silent for 61 s, last at attempt 1 step 1 micro_step")
    assert where(out)[-1] == (1, 2, None, 1)


def test_what_a_lost_rank_brings_later_is_marked_and_in_its_own_order() -> None:
    """Blocks below the released position are late; once the rank has caught up it counts again."""
    core = Core()
    ranks = [training(rank, 2, steps=(1, 2, 3), goodbye=None) for rank in range(2)]
    for one in ranks:
        core.open(one)
    core.apply(Lost(1, 61.0))
    core.deliver(ranks[0], 0, 6)
    assert where(core.released)[-1] == (1, 2, 2, 0)
    core.apply(Back(1))
    out = core.deliver(ranks[1], 0, 6)
    late = [b for b in out if isinstance(b, RankBlock)]
    assert all(block.late for block in late)
    assert where(out) == [(1, 1, 1, 1), (1, 1, 2, 1), (1, 1, None, 1), (1, 2, 1, 1), (1, 2, 2, 1)]
    assert core.deliver(ranks[0], 6) == []
    assert where(core.deliver(ranks[1], 6))[:2] == [(1, 2, None, 0), (1, 2, None, 1)]


def test_a_rank_that_holds_the_others_up_counts_again_when_it_has_caught_up() -> None:
    """`held_out` lets the others flow; the rank is waited for again from where it passed them."""
    core = Core()
    ranks = [training(rank, 2, steps=(1, 2), goodbye=None) for rank in range(2)]
    for one in ranks:
        core.open(one)
    core.deliver(ranks[0], 0, 4)
    core.apply(HeldOut(1, 301.0))
    core.deliver(ranks[1], 0, 4)
    assert core.run.ranks[1].state is RankState.LIVE
    assert core.deliver(ranks[0], 4) == []
    assert core.run.waiting() == ((1, 2, 1), frozenset({1}))


def test_a_rank_that_ended_early_stalls_nobody() -> None:
    """COMPLAINTS 25: rank 2 ends at step 1 of 3; the rest flows in order."""
    core = in_one_go([training(0, 3, steps=(1, 2, 3)), training(1, 3, steps=(1, 2, 3)), training(2, 3, steps=(1,))])
    got = where(core.released)
    assert got == sorted(got, key=lambda w: (w[1], w[2] or 99, w[3]))
    assert (1, 3, None, 1) in got


def test_a_rank_that_ends_before_another_has_come_is_not_expected_again() -> None:
    """One rank is through before the other says hello; the run still finishes."""
    core = Core()
    for rank in (1, 0):
        one = training(rank, 2)
        core.open(one)
        core.deliver(one)
    assert core.run.finished


def test_a_restart_that_goes_back_is_a_new_attempt_for_every_rank_whichever_is_heard_first() -> None:
    """COMPLAINTS 16: crash in step 4, resume at 3; ranks stopped at different steps and still agree."""
    for first in (0, 1):
        core = Core()
        before = [training(0, 2, steps=(1, 2, 3, 4), goodbye=None, last_micro_step=1)]
        before += [training(1, 2, steps=(1, 2, 3), goodbye=None)]
        after = [training(rank, 2, steps=(3, 4), process=2) for rank in range(2)]
        for one in before:
            core.open(one)
        for one in before:
            core.deliver(one)
        for rank in (first, 1 - first):
            core.open(after[rank])
            core.deliver(after[rank])
        core.apply(Ended())
        got = where(core.released)
        assert got == sorted(got, key=lambda w: (w[0], w[1], w[2] or 99, w[3]))
        assert [w for w in got if w[0] == 2] == [
            (2, step, micro, rank) for step in (3, 4) for micro in (1, 2, None) for rank in (0, 1)
        ]


def test_a_run_that_goes_on_where_it_stopped_stays_in_its_attempt() -> None:
    """Stopped after step 2, started again at step 3: nothing went back."""
    core = Core()
    for process, steps in ((1, (1, 2)), (2, (3, 4))):
        ranks = [training(rank, 2, steps=steps, process=process) for rank in range(2)]
        for one in ranks:
            core.open(one)
        for one in ranks:
            core.deliver(one)
    core.apply(Ended())
    assert {w[0] for w in where(core.released)} == {1}
    assert where(core.released)[-1] == (1, 4, None, 1)


def test_after_a_restart_no_rank_runs_ahead_of_those_that_are_not_back_yet() -> None:
    """The first rank to return waits for the others even though all had said goodbye before."""
    core = in_one_go([training(rank, 2) for rank in range(2)])
    again = [training(rank, 2, process=2) for rank in range(2)]
    core.open(again[0])
    assert core.deliver(again[0]) == []
    core.open(again[1])
    assert where(core.deliver(again[1]))[0] == (2, 1, 1, 0)


def test_a_smaller_world_is_a_new_attempt_and_waits_for_nobody_who_left() -> None:
    """COMPLAINTS 15: 8 ranks, then 6: attempt 2, ranks 6 and 7 closed, no stall."""
    core = Core()
    for one in [training(rank, 8, goodbye=None) for rank in range(8)]:
        core.open(one)
        core.deliver(one)
    for one in [training(rank, 6, process=2, steps=(2, 3)) for rank in range(6)]:
        core.open(one)
        core.deliver(one)
    assert core.run.finished
    assert core.run.ranks[7].state is RankState.CLOSED
    assert where(core.released)[-1] == (2, 3, None, 5)


def test_going_back_inside_one_process_is_a_new_attempt() -> None:
    """A roll-back without a restart: every rank's steps from there on are in attempt 2."""
    core = in_one_go([training(rank, 2, steps=(1, 2, 1, 2)) for rank in range(2)])
    assert [w for w in where(core.released) if w[3] == 1] == [
        (attempt, step, micro, 1) for attempt in (1, 2) for step in (1, 2) for micro in (1, 2, None)
    ]


def test_a_single_rank_that_restarts_in_the_middle_takes_the_others_along() -> None:
    """Attempt 2 begins with the restarted rank; the others join it two steps above where they were."""
    core = Core()
    steady = training(0, 2, steps=(1, 2, 3, 4))
    killed = training(1, 2, steps=(1, 2), goodbye=None, last_micro_step=1)
    restarted = training(1, 2, steps=(2, 3, 4), process=2)
    core.open(steady)
    core.open(killed)
    core.deliver(killed)
    core.deliver(steady, 0, 6)
    core.open(restarted)
    core.deliver(restarted)
    core.deliver(steady)
    got = where(core.released)
    assert got == sorted(got, key=lambda w: (w[0], w[1], w[2] or 99, w[3]))
    assert (2, 2, 1, 1) in got
    assert (1, 2, None, 0) in got
    assert (1, 3, None, 0) in got
    assert (2, 4, 1, 0) in got
    assert core.run.finished


def test_an_exception_stands_in_the_ranks_block_and_the_first_one_in_the_end() -> None:
    """The note is in the failing rank's log at its place; the end names who failed first."""
    failing = training(1, 2, steps=(1, 2), last_micro_step=1, exception="RuntimeError: boom", goodbye="exception")
    core = in_one_go([training(0, 2), failing])
    block = next(b for b in core.released if isinstance(b, RankBlock) and b.rank == 1 and b.comments)
    assert block.comments == (Comment(1, "exception", "RuntimeError: boom"),)
    assert comments(core.released, "first_failure") == [Comment(None, "first_failure", "rank 1: RuntimeError: boom")]


def test_an_addendum_to_a_released_position_is_late_and_no_new_attempt() -> None:
    """A value logged after its step's end is written with its step, marked late."""
    core = Core()
    one = training(0, 1, steps=(1,), goodbye=None)
    core.open(one)
    core.deliver(one)
    session = core.run.intake.session(one.hello.session)
    assert session is not None
    extra = Block(len(one.items) + 1, 1, None, False, 0.0, (Frame.scalar("eval_loss", 2.5),), addendum=True)
    admitted = core.run.intake.admit(session, [encode_item(extra)])
    (block,) = core.apply(core.run.admitted(admitted))
    assert isinstance(block, RankBlock)
    assert block.late
    assert block.position == Position(1, 1, None)
    assert len(core.run.intake.attempts) == 1


def test_a_note_behind_the_last_step_is_not_late() -> None:
    """What became of a profile is known when its step has been released: a line, and not a late block."""
    core = Core()
    one = training(0, 1, steps=(1, 2), goodbye=None)
    core.open(one)
    core.deliver(one)
    session = core.run.intake.session(one.hello.session)
    assert session is not None
    number = len(one.items)
    notes = [Note(number + 1, 2, None, "profile", "done", 0.0), Note(number + 2, 1, None, "profile", "older", 0.0)]
    admitted = core.run.intake.admit(session, [encode_item(note) for note in notes])
    line, block = core.apply(core.run.admitted(admitted))
    assert line == Comment(0, "profile", "done")
    assert isinstance(block, RankBlock)
    assert block.late


def test_a_value_of_the_step_before_its_micro_steps_does_not_pass_them() -> None:
    """A scalar logged for a step at its beginning: the step's micro-steps are still waited for, and are not late."""
    core = Core()
    trainings = [training(rank, 2, steps=(1,)) for rank in (0, 1)]
    early = Block(2, 1, None, False, 0.0, (Frame.scalar("eval_loss", 2.5),))
    for one in trainings:
        core.open(one)
    core.deliver(trainings[0])
    session = core.run.intake.session(trainings[1].hello.session)
    assert session is not None
    first = [trainings[1].items[0], encode_item(early)]
    core.apply(core.run.admitted(core.run.intake.admit(session, first)))
    assert where(core.released) == []


def test_a_second_live_process_of_a_rank_is_refused_and_told_who_holds_it() -> None:
    """SPEC section 6: two live agents that claim one rank; a dead one is replaced."""
    core = Core()
    core.open(training(0, 1))
    second = hello(0, 1, process=2)
    refusal = core.run.intake.objection(second, alive=lambda _: True)
    assert refusal is not None
    assert refusal.retry
    assert "process 1000 on node0" in refusal.reason
    assert core.run.intake.objection(second, alive=lambda _: False) is None


def test_another_world_size_is_refused_while_the_old_world_lives() -> None:
    """Ranks of different world sizes are not mixed."""
    core = Core()
    core.open(training(0, 2))
    refusal = core.run.intake.objection(hello(1, 3), alive=lambda _: True)
    assert refusal is not None
    assert "world_size 3" in refusal.reason
    assert "RANKD_WORLD_SIZE" in refusal.reason


def test_a_process_that_was_replaced_stays_out() -> None:
    """The older process of a rank that was taken over does not get back in."""
    core = Core()
    core.open(training(0, 1))
    core.open(training(0, 1, process=2))
    refusal = core.run.intake.objection(hello(0, 1), alive=lambda _: True)
    assert refusal is not None
    assert not refusal.retry


def test_a_checkpoint_keeps_attempts_lost_ranks_and_what_waits() -> None:
    """After a restart everything goes on as if there had been none: late blocks, new attempts, the end's accounts."""
    plain, restarted = Core(), Core(held_bytes=0)
    for core in (plain, restarted):
        pause = core.restart if core is restarted else lambda: None
        first = [training(rank, 3, steps=(1, 2, 3), goodbye=None) for rank in range(3)]
        again = [training(rank, 3, steps=(2, 3, 4), process=2, exception="E: x", goodbye="E: x") for rank in range(3)]
        for one in first:
            core.open(one)
        core.deliver(first[0])
        pause()
        core.deliver(first[1])
        core.apply(Lost(2, 61.0))
        pause()
        core.deliver(first[2], 0, 5)
        core.apply(Back(2))
        pause()
        core.deliver(first[2])
        for one in again:
            core.open(one)
            pause()
            core.deliver(one)
        core.apply(Ended())
        pause()
    assert restarted.released == plain.released
    assert restarted.run.freeze() == plain.run.freeze()


def test_what_waits_for_a_stalled_rank_costs_no_memory_beyond_its_bound() -> None:
    """Blocks above the budget are dropped from memory and come out whole when the rank goes on."""
    core = Core(held_bytes=3_000)
    steady, stalled = (training(rank, 2, steps=range(1, 40), goodbye=None) for rank in range(2))
    core.open(steady)
    core.open(stalled)
    core.deliver(steady)
    in_memory = [h for h in core.run._ordering.held() if not isinstance(h, bytes)]
    assert sum(h.size for h in in_memory) <= 3_000
    assert core.run.oldest_needed(otherwise=99) == 2
    core.deliver(stalled)
    assert len(where(core.released)) == 2 * 39 * 3
    assert core.run.oldest_needed(otherwise=99) == 99


def recovered(training: Training) -> Training:
    """The same, delivered by somebody else after its process was gone."""
    return replace(training, hello=replace(training.hello, recovered=True))


def test_what_a_replaced_process_left_belongs_to_its_own_attempt() -> None:
    """Known before, and delivered when the next process is there already: its attempt, and not the new one's floor."""
    core = Core()
    first, second = training(0, 1, steps=range(1, 6), goodbye=None), training(0, 1, steps=range(1, 6), process=2)
    core.open(first)
    core.deliver(first, 0, 4)
    core.open(second)
    core.deliver(second, 0, 3)
    core.deliver(first, 3)
    core.deliver(second)
    got = where(core.released)
    everything = [(a, s, m, 0) for a in (1, 2) for s in range(1, 6) for m in (1, 2, None)]
    assert sorted(got, key=lambda w: (w[0], w[1], w[2] or 99)) == everything
    assert [w for w in got if w[0] == 2] == [(2, s, m, 0) for s in range(1, 6) for m in (1, 2, None)]
    assert not any(b.late for b in core.released if isinstance(b, RankBlock) and b.position.attempt == 2)
    assert core.run.ranks[0].position == Position(2, 5)
    assert core.replayed() == core.released


def test_a_process_first_heard_of_after_its_successor_is_late() -> None:
    """Nobody can tell when it did what: all of it is there, marked late; the living one is not disturbed."""
    core = Core()
    living, dead = training(0, 2, process=2), recovered(training(0, 2))
    core.open(living)
    core.open(dead)
    out = core.deliver(dead)
    assert [block.late for block in out if isinstance(block, RankBlock)] == [True] * 6
    assert core.run.ranks[0].state is RankState.LIVE
    assert core.run.ranks[0].position is None
    other = training(1, 2)
    core.open(other)
    core.deliver(other)
    core.deliver(living)
    blocks = [b for b in core.released if isinstance(b, RankBlock) and not b.late]
    assert len(blocks) == 12
    assert core.run.finished
    assert core.replayed() == core.released


def test_a_dead_process_opens_no_attempt_of_an_older_world() -> None:
    """COMPLAINTS 15: 8 ranks, then 6; what ranks 3 and 7 of 8 left, known or not, changes neither world nor states."""
    core = Core()
    known = training(7, 8, goodbye=None)
    core.open(known)
    core.deliver(known, 0, 2)
    core.open(training(0, 6))
    assert core.run.intake.objection(replace(known.hello, recovered=True), lambda _: True) is None
    core.deliver(known)
    unknown = recovered(training(3, 8))
    core.open(unknown)
    core.deliver(unknown)
    assert [attempt.world_size for attempt in core.run.intake.attempts] == [8, 6]
    assert {b.position.attempt for b in core.released if isinstance(b, RankBlock) and b.rank == 3} == {1}
    assert core.run.ranks[7].state is RankState.CLOSED
    assert core.run.ranks[3].state is RankState.EXPECTED


def test_a_dead_process_of_a_rank_that_was_never_heard_is_its_current_one() -> None:
    """Nobody else has the rank: its data count, in order, until it is given up."""
    core = Core()
    here, dead = training(0, 2), recovered(training(1, 2, goodbye=None))
    core.open(here)
    core.deliver(here)
    core.open(dead)
    core.deliver(dead)
    assert not any(b.late for b in core.released if isinstance(b, RankBlock))
    assert where(core.released) == sorted(where(core.released), key=lambda w: (w[1], w[2] or 99, w[3]))
    out = core.apply(Lost(1, 3.0, gone=True))
    assert comments(out, "rank_lost")[0].text.startswith("rank 1: its process is gone, last at attempt 1 step 2")


def test_a_session_cannot_change_its_rank_by_being_recovered() -> None:
    """Whoever delivers says what the process itself had said."""
    core = Core()
    core.open(training(0, 2))
    liar = replace(hello(0, 2), rank=1, recovered=True)
    refused = core.run.intake.objection(liar, lambda _: False)
    assert refused is not None
    assert not refused.retry


def test_what_comes_after_the_end_is_followed_by_another_end() -> None:
    """A collector that is started again takes what dead processes have left, and sums up anew."""
    core = Core()
    one = training(0, 1, goodbye=None)
    core.open(one)
    core.deliver(one, 0, 3)
    core.apply(Lost(0, 61.0))
    core.apply(Ended())
    core.deliver(one)
    assert not core.run.ended
    out = core.apply(Ended())
    assert len(comments(out, "end")) == 1
    assert len(comments(out, "missing")) == 1


def test_a_rank_that_was_held_out_is_still_watched() -> None:
    """It no longer counts, but its process may die: then it is lost like any other."""
    core = Core()
    ranks = [training(rank, 2, goodbye=None) for rank in range(2)]
    for one in ranks:
        core.open(one)
    core.deliver(ranks[0], 0, 4)
    core.apply(HeldOut(1, 301.0))
    assert core.run.counting() == frozenset({0})
    assert core.run.watched() == frozenset({0, 1})
    core.apply(Lost(1, 61.0))
    assert core.run.watched() == frozenset({0})


def test_lost_is_read_as_an_earlier_journal_has_it() -> None:
    """An entry without the reason, and with it."""
    assert decode_entry(msgpack.packb(["lost", 2, 61.0])) == Lost(2, 61.0)
    assert decode_entry(encode_entry(Lost(2, 3.0, gone=True))) == Lost(2, 3.0, gone=True)


@pytest.mark.parametrize(("comes_again", "states"), [(False, ["rank_away"]), (True, [])])
def test_a_rank_that_had_ended_and_does_not_come_again_is_not_missing(comes_again: bool, states: list[str]) -> None:
    """Rank 1 alone is started again, and goes back; or all are, and rank 0 only takes its time."""
    core = Core()
    for one in (training(0, 2), training(1, 2, goodbye=None)):
        core.open(one)
        core.deliver(one)
    again = [training(rank, 2, process=2) for rank in (1, 0)]
    core.open(again[0])
    core.deliver(again[0])
    assert core.run.ranks[0].state is RankState.EXPECTED
    if comes_again:
        core.open(again[1])
        core.deliver(again[1])
    else:
        core.apply(Lost(0, 61.0))
    core.apply(Ended())
    assert (core.run.finished, core.run.missing()) == (True, [])
    kinds = [c.kind for c in core.released if isinstance(c, Comment) and c.rank is None]
    assert kinds == ["attempt", *states, "attempt", "end"]
    second = [rank for attempt, _, _, rank in where(core.released) if attempt == 2]
    assert set(second) == ({0, 1} if comes_again else {1})


def test_a_rank_that_had_failed_and_does_not_come_again_is_missing() -> None:
    """It ended early, so its second process was to make up for that."""
    core = Core()
    for one in (training(0, 2, goodbye="RuntimeError: x"), training(1, 2, goodbye=None)):
        core.open(one)
        core.deliver(one)
    again = training(1, 2, process=2)
    core.open(again)
    core.deliver(again)
    core.apply(Lost(0, 61.0))
    assert (core.run.finished, core.run.missing()) == (False, [0])


def test_a_lost_rank_of_a_larger_world_that_is_heard_again_keeps_nobody_waiting() -> None:
    """Its process was stopped, say, when the others went on without it."""
    core = Core()
    for one in (training(rank, 2, goodbye=None) for rank in range(2)):
        core.open(one)
        core.deliver(one)
    core.apply(Lost(1, 61.0))
    alone = training(0, 1, process=2)
    core.open(alone)
    core.apply(Back(1))
    core.deliver(alone)
    assert core.run.ranks[1].state is RankState.CLOSED
    assert core.run.finished
    assert not comments(core.released, "rank_back")


def lost(one: Training, first: int, last: int, accepted: int | None, *, tables: bool = True) -> list[bytes]:
    """What an agent sends whose items `first` to `last` were acknowledged, and are lost now; and the rest."""
    again = [one.items[0]] if tables and first == 1 else []
    hole = Hole(last, first + len(again), accepted, (2, 1))
    return [*again, encode_item(hole), *one.items[last:]]


@pytest.mark.parametrize("held_bytes", [2**20, 0])
def test_a_journal_that_has_lost_its_end_takes_a_rank_on_again(held_bytes: int) -> None:
    """A line stands where something is missing, it is counted, and all from there on is there; read again it is the
    same, also from a checkpoint.
    """
    ranks = [training(rank, 2, steps=range(1, 5)) for rank in range(2)]
    core = Core(held_bytes)
    for one in ranks:
        core.open(one)
    # Two blocks of step 1; the next three items are gone: 2, 4 and 4 records.
    core.deliver(ranks[0], 0, 3)
    session = core.run.intake.session(ranks[0].hello.session)
    assert session is not None
    with pytest.raises(ProtocolError, match="item 4 is missing, got 7"):
        core.run.intake.admit(session, ranks[0].items[6:])
    core.apply(core.run.admitted(core.run.intake.admit(session, lost(ranks[0], 4, 6, 18))))
    core.restart()
    core.deliver(ranks[1])
    core.apply(Ended())
    (gap,) = [c for b in core.released if isinstance(b, RankBlock) for c in b.comments]
    assert gap == Comment(
        0, "gap", "10 records after step 1 micro_step 2 up to step 2 micro_step 1 are missing (journal_lost)"
    )
    (before,) = [b for b in core.released if isinstance(b, RankBlock) and b.comments]
    assert before.position == Position(1, 1, 2)
    assert [at[1:3] for at in where(core.released) if at[3] == 0] == [
        (1, 1), (1, 2), (2, None), *((step, micro) for step in (3, 4) for micro in (1, 2, None)),
    ]  # fmt: skip
    assert list(core.run.accounts.discrepancies(complete=True)) == []
    assert [(row.rank, row.written, row.produced, row.dropped) for row in core.run.rows()] == [
        (0, 30, "40", "10 journal_lost"),
        (1, 40, "40", "0"),
    ]
    assert comments(core.released, "end")[0].text.endswith("70 records of 2 ranks, 0 dropped, 10 lost")
    assert text(core.replayed()) == text(core.released)


def test_what_is_lost_of_a_rank_that_others_have_passed_has_its_line_at_once() -> None:
    """Nothing of its rank stands behind it, so it is in order."""
    one = training(0, 1, steps=range(1, 3), goodbye=None)
    core = Core()
    core.open(one)
    core.deliver(one, 0, 4)
    session = core.run.intake.session(one.hello.session)
    assert session is not None
    released = core.apply(core.run.admitted(core.run.intake.admit(session, [encode_item(Hole(6, 5, 20, None))])))
    assert released == [Comment(0, "gap", "10 records after step 1 are missing (journal_lost)")]


def test_the_journal_knows_nothing_of_a_process_any_more() -> None:
    """Its hello was lost too: it is a new one, whose beginning is missing."""
    one = training(0, 1, steps=range(1, 5))
    core = Core()
    core.open(one)
    session = core.run.intake.session(one.hello.session)
    assert session is not None
    core.apply(core.run.admitted(core.run.intake.admit(session, lost(one, 1, 9, 28))))
    core.apply(Ended())
    assert where(core.released)[-1] == (1, 4, None, 0)
    assert b"28 records up to step 2 micro_step 1 are missing (journal_lost)" in text(core.released)
    assert list(core.run.accounts.discrepancies(complete=True)) == []
    assert text(core.replayed()) == text(core.released)


@pytest.mark.parametrize("goodbye", ["done", None])
def test_blocks_whose_tables_nobody_has_are_lost_too(goodbye: str | None) -> None:
    """A dead process's spool, without its tables: what can be read is there, the rest is one hole, counted by the
    goodbye if there is one. Without a hole before it, such a block is the peer's fault.
    """
    one = training(0, 1, steps=range(1, 5), goodbye=goodbye)
    core = Core()
    core.open(one)
    session = core.run.intake.session(one.hello.session)
    assert session is not None
    with pytest.raises(ProtocolError, match="item 1 is missing"):
        core.run.intake.admit(session, one.items[6:])
    admitted = core.run.intake.admit(session, lost(one, 1, 6, None, tables=False))
    assert [item for item in admitted.items if isinstance(item, Hole)] == [
        Hole(6, 1, None, (2, 1)),
        Hole(9, 8, None, (3, 2)),
        Hole(12, 11, None, (4, 2)),
    ]
    core.apply(core.run.admitted(admitted))
    core.apply(Ended())
    assert list(core.run.accounts.discrepancies(complete=True)) == []
    (row,) = core.run.rows()
    assert (row.written, row.dropped) == (6, "34 journal_lost" if goodbye else "0 or more journal_lost")
    assert b"an unknown number of records up to step 2 micro_step 1 are missing (journal_lost)" in text(core.released)
    assert text(core.replayed()) == text(core.released)


def test_gaps_may_be_among_what_is_lost() -> None:
    """A goodbye tells of more dropped records than the gaps that arrived: no discrepancy where items are lost."""
    one = training(0, 1, goodbye=None)
    core = Core()
    core.open(one)
    core.deliver(one)
    session = core.run.intake.session(one.hello.session)
    assert session is not None
    count = len(one.items)
    bye = encode_item(Goodbye(count + 2, "done", 20 + 3 + 1, {"spool_full": 3}, 0.0))
    core.apply(core.run.admitted(core.run.intake.admit(session, [encode_item(Hole(count + 1, count + 1, 21)), bye])))
    assert list(core.run.accounts.discrepancies(complete=False)) == []
    assert core.run.rows()[0].dropped == "1 journal_lost"


@pytest.mark.slow
def test_holes_of_a_broken_peer_do_not_fill_the_memory() -> None:
    """Beyond what power failures make, the line of each is written at once; a restart in between changes nothing."""
    ranks = [training(rank, 2, goodbye=None) for rank in range(2)]
    core = Core()
    for one in ranks:
        core.open(one)
    core.deliver(ranks[0])
    session = core.run.intake.session(ranks[0].hello.session)
    assert session is not None
    first, count = len(ranks[0].items) + 1, MAX_WAITING_HOLES + 10
    for start in range(0, count, 1_000):
        raws = []
        for number in range(start, min(start + 1_000, count)):
            seq = first + 2 * number
            raws += [encode_item(Hole(seq, seq)), encode_item(Note(seq + 1, 2, None, "note", "n", 0.0))]
        core.apply(core.run.admitted(core.run.intake.admit(session, raws)))
        core.restart()
        session = core.run.intake.session(ranks[0].hello.session)
        assert session is not None
    assert len(comments(core.released, "gap")) == 10
    assert len(dict(core.run.freeze()[-1])) == MAX_WAITING_HOLES
    core.apply(Lost(1, 61.0))
    core.apply(Ended())
    assert core.run.freeze()[-1] == []
    assert text(core.released).count(b"an unknown number of records") == count
    assert core.replayed() == core.released


@given(st.data())
def test_whatever_members_say_the_run_goes_on_and_starts_again(data: st.DataObject) -> None:
    """Any items that can be decoded, in the order of their numbers: what comes of them is text, fits a checkpoint, and
    is the same when the journal is read again.
    """
    core = Core(held_bytes=data.draw(st.sampled_from([0, 10**9])))
    for rank in range(2):
        core.open(training(rank, 2))
    defined: dict[int, int] = {0: 0, 1: 0}
    for _ in range(data.draw(st.integers(1, 12))):
        session = core.run.intake.sessions[data.draw(st.integers(0, 1))]
        item = data.draw(items)
        raws: list[bytes] = []
        ids: dict[NameTable, int] = {}
        if isinstance(item, Block):
            for table in dict.fromkeys(frame.table for frame in item.frames if frame.table is not None):
                defined[session.number] += 1
                ids[table] = 10 + defined[session.number]
                raws.append(encode_item(Table(session.admitted + len(raws) + 1, ids[table], table)))
        seq = session.admitted + len(raws) + 1
        if isinstance(item, Hole):
            item = replace(item, seq=max(item.seq % 2**62, seq), first=min(item.first, seq))
        else:
            item = replace(item, seq=seq)
        try:
            admitted = core.run.intake.admit(session, [*raws, encode_item(item, ids)])
        except ProtocolError:
            core.restart()
            continue
        core.apply(core.run.admitted(admitted))
        assert core.run.intake.session(session.hello.session) is session
        core.restart()
        list(core.run.accounts.discrepancies(complete=False))
        assert account_table(core.run.rows())
    core.apply(Ended())
    core.restart()
    assert text(core.replayed()) == text(core.released)
    now = status_of(core.run, Latest(), Beats(), now=0.0, clock=0.0, collector={})
    assert json.loads(json.dumps(now, allow_nan=False)) == now
