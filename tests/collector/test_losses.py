"""What the journal has lost: one warning for all ranks that come back."""

from __future__ import annotations

from rankd.collector.accounts import Accounts
from rankd.collector.losses import Losses

from .streams import hello


def accounts_of(ranks: int) -> Accounts:
    """One process of each rank, of which nothing is lost."""
    accounts = Accounts()
    for rank in range(ranks):
        accounts.opened(hello(rank, ranks), 1)
    return accounts


def test_one_warning_for_all_ranks_that_come_back() -> None:
    """It waits until the others have come too, and counts what is lost of them together, since this start."""
    accounts, losses = accounts_of(5), Losses()
    accounts.lost(3, 1, 1_000)  # in an earlier start
    for session, when in ((0, 10.0), (3, 10.5), (2, 14.0)):
        losses.found(session, accounts, when)
        accounts.lost(session, 1, 1_000 + 7)
        assert losses.due(accounts, when) is None
    told = losses.due(accounts, 15.0)
    assert told is not None
    assert told.startswith("the journal has lost 2021 records of ranks 0,2-3 that had been acknowledged")
    assert losses.due(accounts, 1_000.0, last=True) is None


def test_what_nobody_can_count_is_said_so() -> None:
    """A dead process's spool does not tell how much it was."""
    accounts, losses = accounts_of(2), Losses()
    losses.found(1, accounts, 0.0)
    accounts.lost(1, 1, None)
    told = losses.due(accounts, 0.0, last=True)
    assert told is not None
    assert "an unknown number of records of rank 1 " in told
    losses.found(0, accounts, 1.0)
    losses.found(1, accounts, 1.0)
    accounts.lost(0, 1, 1)
    told = losses.due(accounts, 100.0)
    assert told is not None
    assert "lost 1 record or more of ranks 0-1 " in told


def test_a_hole_in_which_nothing_was_is_none() -> None:
    """Name tables only, which were sent again."""
    accounts, losses = accounts_of(1), Losses()
    losses.found(0, accounts, 0.0)
    accounts.lost(0, 1, 0)
    assert losses.due(accounts, 100.0) is None


def test_what_comes_after_the_warning_is_told_seldom() -> None:
    """A peer that goes on with it does not fill the log."""
    accounts, losses = accounts_of(1), Losses()
    told = []
    for second in range(300):
        losses.found(0, accounts, float(second))
        accounts.lost(0, 1, second + 1)
        told.append(losses.due(accounts, float(second)))
    assert len([text for text in told if text]) == 1 + 294 // 61
