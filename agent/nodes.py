"""What the launcher's environment tells of other nodes, and of the job. Pure: the environment is an argument."""

from __future__ import annotations

from collections.abc import Mapping

from ..collector.protocol.endpoints import stays_here

__all__ = ["SCHEDULER_HOST", "job_of", "known_as", "scheduler_host"]

SCHEDULER_HOST = "MS_SCHED_HOST"
_SCHEDULER_PORT = "MS_SCHED_PORT"
_NODE_COUNTS = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_LOCAL_COUNTS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE")


def scheduler_host(environ: Mapping[str, str]) -> str | None:
    """Where MindSpore's scheduler is, by which all nodes know rank 0's; None: nobody says, or this machine is all."""
    host = environ.get(SCHEDULER_HOST, "").strip().strip("[]")
    return None if not host or stays_here(host) else host


def known_as(environ: Mapping[str, str], world_size: int, own_name: str) -> str | None:
    """How other nodes know this one, on which rank 0 is; None: there are none, or nothing tells of any.

    Args:
        own_name: this machine's host name.
    """
    if world_size == 1:
        return None
    if environ.get(SCHEDULER_HOST, "").strip():
        return scheduler_host(environ)
    nodes = max((_count(environ, name) for name in _NODE_COUNTS), default=0)
    local = max((_count(environ, name) for name in _LOCAL_COUNTS), default=0)
    return own_name if nodes > 1 or 0 < local < world_size else None


def job_of(environ: Mapping[str, str]) -> str:
    """What all ranks of a job have in common and two jobs on one host have not; empty: nothing is known.

    The scheduler's port, not its host: that one may be given by name here and by address there.
    """
    port = environ.get(_SCHEDULER_PORT, "").strip()
    if port:
        return f"{_SCHEDULER_PORT}={port}"[:64]
    job = environ.get("SLURM_JOB_ID", "").strip()
    return f"SLURM_JOB_ID={job}"[:64] if job else ""


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "").strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
