"""The accounts of the processes: what adds up, what does not, and how it is told."""

from __future__ import annotations

import msgpack

from rankd.collector.accounts import Accounts, account_table
from rankd.collector.protocol.checks import MAX_STEP
from rankd.collector.protocol.records import Position
from rankd.collector.protocol.wire import Goodbye

from .streams import hello


def two_processes() -> Accounts:
    """Rank 0 in two attempts, with a gap in the second; rank 1 killed while something waits."""
    accounts = Accounts()
    accounts.opened(hello(0, 2), 1)
    accounts.opened(hello(1, 2), 1)
    accounts.received(0, Position(1, 1, 1), 10)
    accounts.written(0, 1, 10)
    accounts.received(0, Position(2, 1, None), 5)
    accounts.written(0, 2, 5)
    accounts.dropped(0, 2, "spool_full", 3)
    accounts.goodbye(0, Goodbye(9, "done", 18, {"spool_full": 3}, 0.0))
    accounts.received(1, Position(1, 2, 3), 7)
    accounts.written(1, 1, 4)
    return accounts


def test_the_table_by_rank_process_and_attempt() -> None:
    """A process in two attempts has a line each; what it produced is told once; a rank that never came has a line."""
    rows = two_processes().rows(lambda number: ("done", "killed")[number], {0: 2, 1: 2, 2: 2})
    assert account_table(rows) == [
        "rank  attempt  process        state       last position        written  waiting   produced  dropped",
        "   0        1  1000 on node0  went on     step 1 micro_step 1       10        0             0",
        "   0        2  1000 on node0  done        step 1                     5        0  18 in all  3 spool_full",
        "   1        1  1001 on node0  killed      step 2 micro_step 3        4        3          ?  0",
        "   2        2  -              never came  -                          0        0          ?  0",
    ]


def test_what_waits_is_a_discrepancy_only_once_the_run_has_ended() -> None:
    """Before its end the others' records may wait for a rank."""
    accounts = two_processes()
    assert list(accounts.discrepancies(complete=False)) == []
    assert list(accounts.discrepancies(complete=True)) == [
        ("rank 1 (process 1001 on node0)", "7 records in the logs, as the journal has them", "4")
    ]


def test_a_checkpoint_keeps_all_of_it() -> None:
    """Frozen, through a file and thawed, it says the same."""
    accounts = two_processes()
    frozen = msgpack.unpackb(msgpack.packb(accounts.freeze()))
    assert Accounts.thaw(frozen).processes == accounts.processes


def test_causes_that_no_agent_has_do_not_fill_the_memory() -> None:
    """A peer that names a new cause in each gap is counted, under few names."""
    accounts = Accounts()
    accounts.opened(hello(0, 1), 1)
    for number in range(1_000):
        accounts.dropped(0, 1, f"cause {number}", 1)
    assert accounts.total_dropped() == 1_000
    assert len(accounts.processes[0].gaps) <= 65


def test_gaps_beyond_all_numbers_fit_a_checkpoint() -> None:
    """A peer that names the largest number again and again costs its own account only."""
    accounts = Accounts()
    accounts.opened(hello(0, 1), 1)
    for _ in range(3):
        accounts.dropped(0, 1, "spool_full", MAX_STEP)
    frozen = msgpack.unpackb(msgpack.packb(accounts.freeze()))
    assert Accounts.thaw(frozen).processes[0].gaps == {"spool_full": MAX_STEP}
