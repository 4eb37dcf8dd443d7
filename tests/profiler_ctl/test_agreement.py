"""One session as the collector sees it: the table, what ranks hear, and what survives a restart."""

from __future__ import annotations

import pytest

from rankd.collector.protocol.errors import ProfilerError, RecordError
from rankd.profiler_ctl.agreement import RESEND, TRANSITIONS, Agreement, Happening, Phase
from rankd.profiler_ctl.asked import Asked, Value
from rankd.profiler_ctl.plan import Window


class Said:
    """Reports of ranks, numbered."""

    def __init__(self, session: Agreement) -> None:
        self.session = session
        self.serial = 0

    def __call__(self, rank: int, state: str, **more: Value) -> None:
        self.serial += 1
        self.session.reported(rank, {"session": "p1", "state": state, "serial": self.serial, **more})


def proposed(*ranks: int) -> tuple[Agreement, Said]:
    session = Agreement("p1", ranks, Asked(3), deadline=10.0)
    return session, Said(session)


def committed(*ranks: int) -> tuple[Agreement, Said]:
    session, said = proposed(*ranks)
    for rank in ranks:
        said(rank, "armed")
    session.commit(Window(20, 22))
    return session, said


def what(session: Agreement, rank: int, now: float = 0.0) -> str | None:
    command = session.due(rank, now)
    return None if command is None else str(command["do"])


def test_proposed_armed_committed_recorded_done() -> None:
    """The way of a session in which nothing goes wrong, and what is said on it."""
    session, said = proposed(0, 8)
    assert [what(session, rank) for rank in (0, 8)] == ["propose", "propose"]
    said(0, "armed")
    assert (session.ready, what(session, 0), what(session, 8, RESEND)) == (False, None, "propose")
    said(8, "armed")
    assert session.ready
    session.commit(Window(20, 22))
    command = session.due(8, 5.0)
    assert command is not None
    assert (command["do"], command["start"], command["end"]) == ("commit", 20, 22)
    for state in ("planned", "recording", "exporting", "done"):
        said(0, state)
        said(8, state)
        assert what(session, 0, 99.0) is None
    assert (session.phase, session.reason) == (Phase.DONE, "")


@pytest.mark.parametrize("cause", ["refuses", "is silent", "is gone", "is another process"])
def test_one_rank_that_does_not_arm_calls_it_off_for_all(cause: str) -> None:
    """Together or not at all; the reason names the rank, and the others are told."""
    session, said = proposed(0, 8)
    said(0, "armed")
    if cause == "refuses":
        said(8, "refused", reason="too little disk")
    elif cause == "is silent":
        session.tick(9.9)
        assert session.phase is Phase.PROPOSED
        session.tick(10.0)
    elif cause == "is gone":
        session.gone(8, "its process is gone")
    else:
        said(8, "unknown")
    assert session.phase is Phase.ABORTED
    assert "rank 8" in session.reason
    assert what(session, 0, 50.0) == "abort"
    said(0, "aborted")
    assert what(session, 0, 99.0) is None


def test_who_hears_of_the_step_too_late_stops_the_others_and_fails_the_session() -> None:
    """And never starts at another one."""
    session, said = committed(0, 8)
    said(0, "recording")
    said(8, "missed", reason="told too late")
    assert session.phase is Phase.FAILING
    assert (what(session, 0), what(session, 8)) == ("stop", None)
    said(0, "done", reason="step 20")
    assert (session.phase, session.reason) == (Phase.FAILED, "rank 8: told too late")


def test_a_rank_that_dies_is_reported_and_the_others_finish() -> None:
    """They are not stopped."""
    session, said = committed(0, 3, 8)
    said(0, "recording")
    session.gone(3, "its process is gone")
    assert session.phase is Phase.COMMITTED
    said(0, "done")
    said(8, "done")
    assert (session.phase, session.reason) == (Phase.FAILED, "rank 3: its process is gone")
    assert [rank for rank, part in session.parts.items() if part.well] == [0, 8]


def test_a_rank_whose_profiler_fails_is_reported_and_the_others_finish() -> None:
    """The session has failed, for that rank."""
    session, said = committed(0, 1)
    said(1, "failed", reason="OSError: no luck")
    assert session.phase is Phase.COMMITTED
    said(0, "done")
    assert (session.phase, session.reason) == (Phase.FAILED, "rank 1: failed: OSError: no luck")


def test_a_session_that_is_stopped_ends_when_all_have() -> None:
    """Whatever they had recorded."""
    session, said = committed(0, 8)
    said(0, "recording")
    session.stop("stopped by request")
    assert [what(session, rank) for rank in (0, 8)] == ["stop", "stop"]
    said(8, "aborted", reason="stopped by request")
    said(0, "done", reason="stopped by request; of the window 20-22 …")
    assert (session.phase, session.reason) == (Phase.STOPPED, "stopped by request")


def test_what_was_said_is_said_again_until_a_report_shows_that_it_was_heard() -> None:
    """After a while, and at once to a connection that is new."""
    session, said = committed(0)
    said(0, "armed")
    assert [what(session, 0, now) for now in (0.0, RESEND / 2, RESEND)] == ["commit", None, "commit"]
    session.joined(0)
    assert what(session, 0, RESEND + 0.1) == "commit"
    said(0, "planned")
    assert what(session, 0, 99.0) is None


def test_a_report_that_comes_after_a_newer_one_changes_nothing() -> None:
    """Reports are numbered in each process; a new process begins anew."""
    session, _ = committed(0)
    assert session.reported(0, {"state": "recording", "serial": 7})
    assert not session.reported(0, {"state": "planned", "serial": 6})
    assert session.parts[0].state == "recording"
    session.joined(0)
    assert session.reported(0, {"state": "unknown", "serial": 1})
    assert (session.phase, session.reason) == (Phase.FAILED, "rank 0: its process was replaced")


@pytest.mark.parametrize("phase", ["proposed", "committed", "failing", "stopping"])
def test_a_collector_that_starts_again_goes_on_with_what_was_decided(phase: str) -> None:
    """And calls off what was not; the step stays."""
    session, said = proposed(0, 8) if phase == "proposed" else committed(0, 8)
    if phase == "failing":
        said(8, "missed")
    if phase == "stopping":
        session.stop("stopped by request")
    again = Agreement.from_facts("p1", session.facts())
    again.restarted()
    assert again.facts() | {"phase": phase, "reason": ""} == session.facts() | {"reason": ""}
    expected = {"proposed": "abort", "committed": "commit"}.get(phase, "stop")
    assert again.phase.value == ("aborted" if phase == "proposed" else phase)
    assert what(again, 0) == expected


def test_the_table_leaves_no_final_phase_and_lets_everything_end() -> None:
    """A missing entry is an error; from each phase a final one can be reached."""
    assert set(TRANSITIONS) == set(Phase)
    for phase, row in TRANSITIONS.items():
        if phase.final:
            assert all(row[happening] is phase for happening in Happening)
        else:
            assert any(to.final or any(after.final for after in TRANSITIONS[to].values()) for to in row.values())
    session, _ = proposed(0)
    with pytest.raises(ProfilerError, match="not all ranks have armed"):
        session.commit(Window(1, 1))
    assert Happening.MISSED not in TRANSITIONS[Phase.PROPOSED]


def test_facts_that_are_none_are_refused() -> None:
    """What another version has journalled, say."""
    session, _ = proposed(0)
    with pytest.raises(RecordError, match="no phase of a session"):
        Agreement.from_facts("p1", {**session.facts(), "phase": "pondering"})
    with pytest.raises(RecordError, match="without level"):
        Agreement.from_facts("p1", {"ranks": "0"})
