"""The random killer in the form that CI runs; `make torture N=1000` for more."""

from __future__ import annotations

import pytest
from tests.faults.torture import Torture, seed_of_today, torture

pytestmark = pytest.mark.slow

# 200 kills of the collector in all.
RUNS, KILLS_OF_THE_COLLECTOR = 4, 50
KILLS_OF_RANKS = 30


@pytest.mark.parametrize("run", range(RUNS))
def test_collectors_killed_at_random(run: int) -> None:
    """In the middle of start, recovery, rotation and writing: nothing lost, nothing twice, in order."""
    seed = seed_of_today() + run
    print(f"SEED={seed}")
    torture(KILLS_OF_THE_COLLECTOR, seed, KILLS_OF_THE_COLLECTOR, Torture.kill_collectors)


def test_ranks_killed_at_random() -> None:
    """Single ranks and whole jobs, started again some steps earlier: what had arrived is there once."""
    seed = seed_of_today()
    print(f"SEED={seed}")
    torture(KILLS_OF_RANKS, seed, 30, Torture.kill_ranks)
