"""Which rank is this process (SPEC.md section 6)? A wrong rank is worse than none.

It would merge one rank's records into another's. So a rank is taken from, in this order: an explicit argument;
RANKD_RANK and RANKD_WORLD_SIZE; the framework, once its communication is initialised; the launcher's environment, only
where its variables agree with each other and with the world size. Otherwise there is an IdentityError.

What the launchers set, as read in their source and seen on MindSpore 2.10:

- msrun: MS_NODE_ID is the global rank, despite its name. Over several nodes without --node_rank it is missing, ranks
  are assigned during initialisation, and RANK_ID=0 is what the master node's workers inherited from the scheduler. So
  where MindSpore builds its own cluster (MS_WORKER_NUM and its like are set), only MS_NODE_ID tells a rank. Some
  versions export RANK as the local index; there it tells nothing.
- msrun or a loop in a shell under Slurm, mpirun or Kubernetes: the outer launcher counts nodes or pods, not ranks. Its
  values then do not agree with the world size, and are left aside beside an MS_NODE_ID.
- sbatch: the batch script itself, outside of any srun, has SLURM_PROCID=0 beside SLURM_NTASKS=8. Only srun sets
  SLURM_STEP_ID.
- LOCAL_RANK, DEVICE_ID and their like say that there are several processes, and not which one this is.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..collector.protocol.errors import IdentityError
from ..collector.protocol.wire import Hello

__all__ = ["Identity", "framework_identity", "introduction", "is_helper", "resolve"]

log = logging.getLogger("rankd.agent")

_RANK, _SIZE = "RANKD_RANK", "RANKD_WORLD_SIZE"
_FRAMEWORK = "mindspore"
# Set by msrun, or by hand where processes are started without it: MindSpore builds its own cluster.
_CLUSTER = ("MS_ROLE", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_WORKER_NUM")
# Launchers that tell a rank and a world size, in pairs.
_RANK_TABLE = ("RANK_ID", "RANK_SIZE")
_OMPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS")
_TORCH = ("RANK", "WORLD_SIZE")
_PAIRS = (_RANK_TABLE, _OMPI, _SLURM, _TORCH)
# These count within a node only. The first three also bound the rank from below; DEVICE_ID may be any card.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL = (*_LOCAL_RANKS, "DEVICE_ID")
_SLURM_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS")
_ALL = (
    _RANK,
    _SIZE,
    "MS_NODE_ID",
    *_CLUSTER,
    *(name for pair in _PAIRS for name in pair),
    *_LOCAL,
    *_SLURM_STEP,
)
# No world has a billion ranks; Python refuses to read numbers of thousands of digits.
_MAX_DIGITS = 9
_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is.

    Attributes:
        rank: the global rank id, 0-based.
        world_size: the number of ranks.
        source: what told it, for the log.

    Raises:
        IdentityError: not a rank of that world.
    """

    rank: int
    world_size: int
    source: str

    def __post_init__(self) -> None:
        for number in (self.rank, self.world_size):
            if isinstance(number, bool) or not isinstance(number, int):
                raise IdentityError(f"rank and world size are integers, {self.source} says {number!r}")
        if not 0 <= self.rank < self.world_size:
            raise IdentityError(
                f"rank {self.rank} of {self.world_size} ({self.source}) cannot be: ranks run from 0 to world size - 1"
            )


def resolve(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    framework: Callable[[], tuple[int, int] | None] = lambda: None,
) -> Identity | None:
    """Who this process is; None in msrun's scheduler process, which runs the user's script too and trains nothing.

    Args:
        environ: the environment; a variable that is set to nothing counts as not set.
        rank: given by the user's script; wins over everything.
        world_size: the same.
        framework: (rank, world size) once communication is initialised, and None before: until then MindSpore's
            get_rank() says 0 on every rank. See `framework_identity`. Called only if it is needed.

    Raises:
        IdentityError: it is not certain; lists every variable that was found, and what to set.
    """
    env = {name: environ[name].strip() for name in _ALL if environ.get(name, "").strip()}
    if env.get("MS_ROLE") == "MS_SCHED":
        return None
    given_rank = _Given(rank, "argument") if rank is not None else _Given(_number(env, _RANK), _RANK)
    given_size = _Given(world_size, "argument") if world_size is not None else _Given(_number(env, _SIZE), _SIZE)
    if given_rank.number is not None and given_size.number is not None:
        return _identity(env, given_rank.number, given_size.number, given_rank.source, given_size.source)
    told = framework()
    if told is None:
        return _from_environment(env, given_rank, given_size)
    if given_rank.number is not None:
        return _identity(env, given_rank.number, told[1], given_rank.source, _FRAMEWORK)
    if given_size.number not in (None, told[1]):
        raise _uncertain(env, f"{given_size} and {_FRAMEWORK} says {told[1]}")
    return _identity(env, told[0], told[1], _FRAMEWORK)


def introduction(who: Identity, total_steps: int | None, about: Mapping[str, str]) -> Hello:
    """What this process says first; told from every other process of its rank by 16 random bytes."""
    session, host, now = secrets.token_bytes(16), socket.gethostname(), time.time()
    facts = {"identity": who.source, **about}
    return Hello(session, "", who.rank, who.world_size, 1, host, os.getpid(), now, total_steps, facts)


def is_helper(who: Identity, rank: int | None) -> bool:
    """Whether `multiprocessing` has started this process, a data-loading worker for one, so that it is no rank.

    It has its parent's environment, and a spawned one imports the parent's script again.

    Args:
        who: which rank it would be.
        rank: what the user's script says; that counts, except while a spawned process imports the script.
    """
    # What multiprocessing itself asks before it refuses to start processes during that import; a parent is known later.
    importing = bool(getattr(multiprocessing.current_process(), "_inheriting", False))
    if not importing and (rank is not None or multiprocessing.parent_process() is None):
        return False
    log.log(
        logging.INFO if importing else logging.WARNING,
        "this process was started by multiprocessing: it records nothing, and does not become a second rank %d. If it "
        "is a rank of its own, give the agent its rank and world_size",
        who.rank,
    )
    return True


def framework_identity() -> tuple[int, int] | None:
    """(rank, world size) from MindSpore, once its communication is initialised; None before, and without MindSpore.

    MindSpore is asked only if the process has it already: importing it costs a second and 400 MB.
    """
    if "mindspore" not in sys.modules:
        return None
    from mindspore.communication import GlobalComm, get_group_size, get_rank

    # init() and mint.distributed.init_process_group() both set it. Without it, get_rank() is RANK_ID or else 0.
    if not GlobalComm.INITED:
        return None
    return get_rank(), get_group_size()


@dataclass(frozen=True, slots=True)
class _Given:
    """A number that the user gave, or None, and where."""

    number: int | None
    source: str

    def __str__(self) -> str:
        return f"{self.source} says {self.number}"


def _from_environment(env: Mapping[str, str], given_rank: _Given, given_size: _Given) -> Identity:
    """What the user gave, completed from what the launcher set."""
    told = {name: text for name, text in env.items() if name not in (_RANK, _SIZE)}
    cluster = any(name in env for name in ("MS_NODE_ID", *_CLUSTER))
    pairs = [] if cluster else [pair for pair in _PAIRS if not (pair is _SLURM and _is_allocation(env))]
    sizes = _numbers(env, ("MS_WORKER_NUM", "RANK_SIZE") if cluster else [size for _, size in pairs])
    if given_size.number is not None:
        sizes[given_size.source] = given_size.number
    elif not told:
        sizes["single process"] = 1
    size = _agreed(env, "world size", sizes)
    if size is None:
        raise _uncertain(env, "nothing tells the world size")
    if given_rank.number is not None:
        return _identity(env, given_rank.number, size, given_rank.source, *sizes)
    ranks = _cluster_ranks(env, size) if cluster else _paired_ranks(env, pairs, size)
    rank = _agreed(env, "rank", ranks)
    if rank is None and size == 1:
        rank = 0
    if rank is None:
        raise _uncertain(env, _why_no_rank(told, cluster))
    # One task of an outer launcher may have started a process a card; only the user can say that it did not.
    _check_local(env, rank, size, _LOCAL if size == 1 and given_size.number is None else _LOCAL_RANKS)
    return _identity(env, rank, size, *ranks, *sizes)


def _is_allocation(env: Mapping[str, str]) -> bool:
    """Whether SLURM_PROCID and SLURM_NTASKS are those of sbatch or salloc, which speak of the job, not this process."""
    in_step = any(name in env for name in _SLURM_STEP) or env.get("SLURM_PROCID", "0") != "0"
    return not in_step and env.get("SLURM_NTASKS") != "1"


def _cluster_ranks(env: Mapping[str, str], size: int) -> dict[str, int]:
    """What tells the rank where MindSpore builds its own cluster: MS_NODE_ID, and whoever counts the same world."""
    ranks = _numbers(env, ("MS_NODE_ID",))
    if ranks:
        ranks |= _numbers(env, ("RANK_ID",))
        for rank_name, size_name in (_OMPI, _SLURM):
            if not (size_name == "SLURM_NTASKS" and _is_allocation(env)) and _number(env, size_name) == size:
                ranks |= _numbers(env, (rank_name,))
    return ranks


def _paired_ranks(env: Mapping[str, str], pairs: Iterable[tuple[str, str]], size: int) -> dict[str, int]:
    """What tells the rank elsewhere: launchers that tell the world size too; who tells a rank alone may only agree."""
    known = list(pairs)
    ranks = _numbers(env, [rank for rank, _ in known])
    _agreed(env, "rank", ranks)
    whole = any(rank in env and size_name in env for rank, size_name in known)
    return ranks if whole or size == 1 else {}


def _check_local(env: Mapping[str, str], rank: int, size: int, names: Iterable[str]) -> None:
    """The local index cannot exceed the rank: somebody started several processes with one environment."""
    for name, local in _numbers(env, names).items():
        if local > rank:
            raise _uncertain(env, f"{name} is {local}, which rank {rank} of {size} cannot have")


def _why_no_rank(told: Mapping[str, str], cluster: bool) -> str:
    if cluster:
        return (
            "without MS_NODE_ID MindSpore assigns the ranks during initialisation (RANK_ID may be inherited); start "
            "the agent after mindspore.communication.init(), or give msrun --node_rank"
        )
    if told and all(name in _LOCAL for name in told):
        return "only indices within a node are set"
    return "no launcher tells both rank and world size"


def _agreed(env: Mapping[str, str], what: str, votes: Mapping[str, int]) -> int | None:
    """What all of these say; None if there are none."""
    if len(set(votes.values())) > 1:
        said = ", ".join(f"{name} says {number}" for name, number in votes.items())
        raise _uncertain(env, f"they do not agree on the {what}: {said}")
    return next(iter(votes.values()), None)


def _numbers(env: Mapping[str, str], names: Iterable[str]) -> dict[str, int]:
    found = {name: _number(env, name) for name in names}
    return {name: number for name, number in found.items() if number is not None}


def _number(env: Mapping[str, str], name: str) -> int | None:
    """The variable as a number; None if it is not set."""
    text = env.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise _uncertain(env, f"{name} is not a number")
    return int(text)


def _identity(env: Mapping[str, str], rank: int, size: int, *sources: str) -> Identity:
    try:
        return Identity(rank, size, " and ".join(dict.fromkeys(sources)))
    except IdentityError as error:
        raise _uncertain(env, str(error)) from None


def _uncertain(env: Mapping[str, str], why: str) -> IdentityError:
    found = ", ".join(f"{name}={text[:_MAX_SHOWN]!r}" for name, text in env.items()) or "no variable that tells a rank"
    return IdentityError(
        f"the rank of this process is not certain: {why}. Found: {found}. "
        f"Set {_RANK} (from 0) and {_SIZE} for each process"
    )
