"""What launchers' environments tell of other nodes: the environments are those that were seen."""

from __future__ import annotations

import pytest

from rankd.agent.nodes import job_of, known_as, scheduler_host

MSRUN_ONE = {"MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "8118", "MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4"}
MSRUN_TWO = {**MSRUN_ONE, "MS_SCHED_HOST": "10.99.0.1", "RANK_ID": "0"}


@pytest.mark.parametrize(
    ("environ", "world_size", "known"),
    [
        ({}, 1, None),
        ({}, 8, None),
        (MSRUN_ONE, 4, None),
        (MSRUN_TWO, 4, "10.99.0.1"),
        (MSRUN_TWO, 1, None),
        ({**MSRUN_TWO, "MS_SCHED_HOST": "node0"}, 4, "node0"),
        ({**MSRUN_TWO, "MS_SCHED_HOST": "[fd00::1]"}, 4, "fd00::1"),
        ({"SLURM_NTASKS": "16", "SLURM_NNODES": "2"}, 16, "me"),
        ({"SLURM_NTASKS": "8", "SLURM_NNODES": "1"}, 8, None),
        ({"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 16, "me"),
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 8, None),
        ({"SLURM_NNODES": "two"}, 8, None),
    ],
)
def test_how_others_know_rank_0s_node(environ: dict[str, str], world_size: int, known: str | None) -> None:
    """MindSpore's scheduler host where there is one; this machine's name where a launcher counts several nodes."""
    assert known_as(environ, world_size, "me") == known


def test_the_scheduler_on_loopback_is_no_other_node() -> None:
    """msrun's default."""
    assert scheduler_host(MSRUN_ONE) is None
    assert scheduler_host(MSRUN_TWO) == "10.99.0.1"
    assert scheduler_host({}) is None


def test_the_job() -> None:
    """By the scheduler's port, or Slurm's job; nothing is said where nothing is known."""
    assert job_of(MSRUN_TWO) == "MS_SCHED_PORT=8118"
    assert job_of({"SLURM_JOB_ID": "77"}) == "SLURM_JOB_ID=77"
    assert job_of({}) == ""
