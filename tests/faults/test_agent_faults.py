"""What can happen to a rank's process while the others train, in real processes: what it had pushed is there once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from tests.faults.conftest import Site
from tests.faults.job import RankProcess
from tests.faults.proxy import Proxy
from tests.support import wait_for

pytestmark = pytest.mark.slow


def end(site: Site, *processes: RankProcess) -> None:
    """All that still train come to their end, and the collector with them."""
    site.job.finish()
    for each in processes:
        each.ended()
    (collector,) = site.collectors
    status, said = collector.ended()
    assert status == 0, said


def test_sigkill_and_restart(site: Site) -> None:
    """COMPLAINTS 8: a rank is killed and started again three steps earlier: heard, in a new attempt, nothing twice."""
    site.collector()
    steady = site.job.start([0], 2, last=10_000)
    killed = site.job.start([1], 2, last=10_000)
    wait_for(lambda: killed.pushed() > 20 and steady.pushed() > 20 and site.lines() > 50)
    killed.kill()
    again = site.job.start([1], 2, first=killed.pushed() // 2 - 3, last=10_000)
    wait_for(lambda: again.pushed() > 40 and site.has("[collector] # attempt 2"))
    end(site, steady, again)
    rows = [(row.rank, row.attempt, row.state) for row in site.whole().rows()]
    assert (1, 1, "killed") in rows
    assert (1, 2, "done") in rows


def test_sigstop_for_shorter_than_lost_after(site: Site) -> None:
    """The others wait for it; the order is as if nothing had happened."""
    site.collector()
    steady = site.job.start([0], 2, last=10_000)
    stopped = site.job.start([1], 2, last=10_000)
    wait_for(lambda: stopped.pushed() > 20 and site.lines() > 50)
    stopped.stop()
    pushed = steady.pushed()
    wait_for(lambda: steady.pushed() > pushed + 100)
    stopped.go_on()
    end(site, steady, stopped)
    assert not site.has("# rank_lost")
    assert site.whole().summary()[-1].endswith(" 0 blocks late")


def test_sigstop_for_longer_than_lost_after(site: Site) -> None:
    """The others go on without it, and the log says so; it comes back, and what it brings is marked late."""
    site.collector(lost_after=1.0)
    steady = site.job.start([0], 2, last=10_000)
    stopped = site.job.start([1], 2, last=10_000)
    wait_for(lambda: stopped.pushed() > 20 and site.lines() > 50)
    stopped.stop()
    wait_for(lambda: site.has("# rank_lost rank 1: silent for "))
    lines = site.lines()
    wait_for(lambda: site.lines() > lines + 50)
    stopped.go_on()
    wait_for(lambda: site.has("# rank_back rank 1: heard again"))
    wait_for(lambda: site.has("[rank_1] # late attempt 1 step "))
    end(site, steady, stopped)
    site.whole()


def test_read_only_directory(site: Site, small_disk: Path) -> None:
    """Rank 0 cannot start a collector there: one warning that says why; the training runs and ends in time."""
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    alone = {"start_collector": True, "endpoint": None, "exit_timeout": 0.5}
    ranks = site.job.start([0], 1, last=20, section=alone)
    ranks.ended()
    assert ranks.said().count("the collector could not be started") == 1
    assert "Read-only file system" in ranks.said()


def test_port_taken(site: Site) -> None:
    """COMPLAINTS 12: a stranger has the collector's port: one warning names the setting; the training ends in time."""
    with socket.create_server(("127.0.0.1", site.port)):
        ranks = site.job.start([0], 1, last=200, section={"start_collector": True, "exit_timeout": 0.5})
        ranks.ended()
    assert ranks.said().count("the collector could not start; training goes on") == 1
    assert "check rankd.endpoint" in ranks.said()


def test_fork_that_outlives_its_rank(site: Site) -> None:
    """COMPLAINTS 9: a worker made by fork stays when its rank is killed: it does not hold the rank."""
    site.collector()
    steady = site.job.start([0], 2, last=10_000)
    forking = site.job.start([1], 2, last=10_000, fork=3)
    wait_for(lambda: forking.pushed() > 20 and site.lines() > 50)
    (child,) = psutil.Process(forking.process.pid).children()
    try:
        forking.kill()
        assert child.is_running()
        again = site.job.start([1], 2, first=4, last=10_000)
        wait_for(lambda: again.pushed() > 20 and site.has("[collector] # attempt 2"))
        end(site, steady, again)
    finally:
        child.send_signal(signal.SIGKILL)
    assert not site.has("from_child")
    site.whole()


def test_clocks_apart(site: Site) -> None:
    """One rank's clock is 11 s ahead, one 11 s behind: the order does not care."""
    site.collector(lost_after=8.0)
    ranks = [site.job.start([rank], 3, last=60, shift=shift) for rank, shift in enumerate((0.0, 11.0, -11.0))]
    end(site, *ranks)
    assert not site.has("# rank_lost")
    assert site.whole().summary()[-1].endswith(" 0 blocks late")


@pytest.mark.parametrize("how", ["cut", "half_open"])
def test_connection_of_one_rank(site: Site, how: str) -> None:
    """The connection of one of two ranks breaks, or falls silent both ways: the other waits, the order holds."""
    site.collector()
    proxy = Proxy(site.port)
    steady = site.job.start([0], 2, last=10_000, pace=0.05)
    apart = site.job.start([1], 2, last=10_000, pace=0.05, section={"endpoint": proxy.endpoint})
    wait_for(lambda: apart.pushed() > 20 and site.lines() > 50)
    before = proxy.connections
    if how == "cut":
        proxy.cut()
    else:
        proxy.silence(to_collector=True, to_agent=True)
    wait_for(lambda: proxy.connections > before)
    lines = site.lines()
    wait_for(lambda: site.lines() > lines + 20)
    end(site, steady, apart)
    proxy.close()
    assert site.whole().summary()[-1].endswith(" 0 blocks late")


def test_a_rank_that_ended_is_started_again(site: Site) -> None:
    """A rank ends well at step 10 and starts again at step 8, while the other trains on."""
    site.collector()
    steady = site.job.start([0], 2, last=10_000)
    site.job.start([1], 2, last=10).ended()
    again = site.job.start([1], 2, first=8, last=10_000)
    wait_for(lambda: again.pushed() > 20 and site.has("[collector] # attempt 2"))
    end(site, steady, again)
    own = [(row.attempt, row.state) for row in site.whole().rows() if row.rank == 1]
    assert own == [(1, "done"), (2, "done")]


def test_exit_without_a_collector_is_bounded(site: Site) -> None:
    """COMPLAINTS 7: no collector at all: the ranks end within `exit_timeout` and say what was left."""
    started = time.monotonic()
    ranks = site.job.start(range(2), 2, last=5, section={"exit_timeout": 1.0})
    ranks.ended()
    assert time.monotonic() - started < 30
    assert ranks.said().count("the collector did not acknowledge ") == 2
    assert not os.path.lexists(site.output)
