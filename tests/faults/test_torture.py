"""The random killer in the form that CI runs; `make torture N=1000` for more."""

from __future__ import annotations

import pytest
from tests.faults.torture import Torture, seed_of_today, torture

pytestmark = pytest.mark.slow

KILLS_OF_THE_COLLECTOR = 200
KILLS_OF_RANKS = 30


def test_collectors_killed_at_random() -> None:
    """In the middle of start, recovery, rotation and writing: nothing lost, nothing twice, in order."""
    seed = seed_of_today()
    print(f"SEED={seed}")
    torture(KILLS_OF_THE_COLLECTOR, seed, 50, Torture.kill_collectors)


def test_ranks_killed_at_random() -> None:
    """Single ranks and whole jobs, started again some steps earlier: what had arrived is there once."""
    seed = seed_of_today()
    print(f"SEED={seed}")
    torture(KILLS_OF_RANKS, seed, 30, Torture.kill_ranks)
