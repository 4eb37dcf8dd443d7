"""Restarts, resumes and other worlds, in real processes; after each, `rankd verify` finds nothing."""

from __future__ import annotations

import pytest
from tests.faults.conftest import Site
from tests.support import SOON, wait_for

pytestmark = pytest.mark.slow


def states(site: Site) -> set[tuple[int, int, str]]:
    """Verified: (rank, attempt, state of its process)."""
    return {(row.rank, row.attempt, row.state) for row in site.whole().rows()}


@pytest.mark.parametrize("collector_too", [False, True], ids=["collector_stays", "collector_killed_too"])
def test_a_job_that_crashed_resumes_at_an_earlier_step(site: Site, collector_too: bool) -> None:
    """COMPLAINTS 16: all ranks are killed and start again from a checkpoint: both attempts are there, told apart."""
    collector = site.collector()
    crashed = [site.job.start(ranks, 4, last=10_000) for ranks in ([0, 1], [2, 3])]
    wait_for(lambda: min(each.pushed() for each in crashed) > 40 and site.lines() > 100)
    for each in crashed:
        each.kill()
    if collector_too:
        collector.kill()
        collector.start()
    again = [site.job.start(ranks, 4, first=15, last=60) for ranks in ([0, 1], [2, 3])]
    for each in again:
        each.ended()
    collector.ends(0)
    assert states(site) == {(r, 1, "killed") for r in range(4)} | {(r, 2, "done") for r in range(4)}


def test_a_smaller_world(site: Site) -> None:
    """COMPLAINTS 15: 8 ranks, then 6: attempt 2; nobody waits for ranks 6 and 7."""
    collector = site.collector()
    crashed = site.job.start(range(8), 8, last=10_000)
    wait_for(lambda: crashed.pushed() > 20 and site.lines() > 100)
    crashed.kill()
    again = site.job.start(range(6), 6, first=5, last=30)
    again.ended()
    collector.ends(0)
    assert states(site) == {(r, 1, "killed") for r in range(8)} | {(r, 2, "done") for r in range(6)}
    assert site.has("[collector] # attempt 2 world_size 6")


def test_run_twice_into_one_directory(site: Site) -> None:
    """COMPLAINTS 17: the second run is appended as a new attempt; the first one's lines stay as they were."""
    first = ""
    for _ in range(2):
        collector = site.collector()
        site.job.start(range(2), 2, last=10).ended()
        collector.ends(0)
        assert site.merged.read_text().startswith(first)
        first = site.merged.read_text()
    assert states(site) == {(r, a, "done") for r in range(2) for a in (1, 2)}
    assert first.count("[collector] # end ") == 2


def test_a_rank_that_ends_early(site: Site) -> None:
    """COMPLAINTS 25: rank 2 ends at step 5 of 40: the rest flows, in order."""
    collector = site.collector()
    ranks = [site.job.start([rank], 3, last=5 if rank == 2 else 40) for rank in range(3)]
    for each in ranks:
        each.ended()
    collector.ends(0)
    assert states(site) == {(r, 1, "done") for r in range(3)}
    assert site.whole().summary()[-1].endswith(" 0 blocks late")


def test_a_rank_that_never_comes(site: Site) -> None:
    """Rank 1 of 2 is never started: it is lost, named, and stands in the table; the status says so."""
    collector = site.collector(lost_after=1.0, linger=SOON)
    site.job.start([0], 2, last=20).ended()
    status, said = collector.ended()
    assert status == 1
    assert "no goodbye from rank 1" in said
    assert states(site) == {(0, 1, "done"), (1, 1, "never came")}
