"""agent/identity.py: which rank is this process (SPEC.md section 6; COMPLAINTS 13: everybody believes to be rank 0)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import PATIENCE, collected, free_port, script, values

from rankd.agent.identity import Identity, framework_identity, resolve
from rankd.collector.protocol.errors import IdentityError

# What msrun sets in a worker, as seen on MindSpore 2.10.
_CLUSTER = {"MS_WORKER_NUM": "4", "MS_SCHED_HOST": "10.0.0.1", "MS_SCHED_PORT": "8118", "MS_ROLE": "MS_WORKER"}
_MSRUN = {**_CLUSTER, "RANK_SIZE": "4"}
_MSRUN_2 = {**_MSRUN, "MS_NODE_ID": "2", "RANK_ID": "2", "DEVICE_ID": "0"}
_STEP = {"SLURM_STEP_ID": "0"}


def _says(rank: int, size: int) -> Callable[[], tuple[int, int] | None]:
    return lambda: (rank, size)


@pytest.mark.parametrize(
    ("env", "rank", "size", "source"),
    [
        pytest.param({}, 0, 1, "single process", id="nothing set"),
        pytest.param({"HOME": "/home/user", "RANK": " "}, 0, 1, "single process", id="nothing that counts"),
        pytest.param(
            _MSRUN_2, 2, 4, "MS_NODE_ID and RANK_ID and MS_WORKER_NUM and RANK_SIZE", id="msrun with a node rank"
        ),
        pytest.param({**_CLUSTER, "MS_NODE_ID": "3"}, 3, 4, "MS_NODE_ID and MS_WORKER_NUM", id="cluster by hand"),
        pytest.param({"MS_WORKER_NUM": "1"}, 0, 1, "MS_WORKER_NUM", id="a cluster of one"),
        pytest.param(
            {**_MSRUN_2, "RANK": "0", "WORLD_SIZE": "4"},
            2,
            4,
            "MS_NODE_ID and RANK_ID and MS_WORKER_NUM and RANK_SIZE",
            id="RANK is the local index",
        ),
        pytest.param(
            {**_MSRUN_2, "SLURM_PROCID": "1", "SLURM_NTASKS": "2", **_STEP},
            2,
            4,
            "MS_NODE_ID and RANK_ID and MS_WORKER_NUM and RANK_SIZE",
            id="Slurm counts nodes",
        ),
        pytest.param(
            {"RANK_ID": "5", "RANK_SIZE": "8", "DEVICE_ID": "5"}, 5, 8, "RANK_ID and RANK_SIZE", id="rank table"
        ),
        pytest.param(
            {"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, 3, 8, "SLURM_PROCID and SLURM_NTASKS", id="Slurm, not the first"
        ),
        pytest.param(
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", **_STEP, "SLURM_LOCALID": "0"},
            0,
            8,
            "SLURM_PROCID and SLURM_NTASKS",
            id="Slurm, the first task of a step",
        ),
        pytest.param(
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, 0, 1, "SLURM_PROCID and SLURM_NTASKS", id="Slurm, one task"
        ),
        pytest.param(
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            1,
            2,
            "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE",
            id="mpirun",
        ),
        pytest.param(
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "8",
                "SLURM_PROCID": "0",
                "SLURM_NTASKS": "8",
            },
            3,
            8,
            "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE",
            id="mpirun in a batch script",
        ),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, 1, 2, "RANK and WORLD_SIZE", id="torch's variables"
        ),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
            1,
            2,
            "SLURM_PROCID and RANK and SLURM_NTASKS and WORLD_SIZE",
            id="two that agree",
        ),
        pytest.param(
            {"RANKD_RANK": "1", "RANKD_WORLD_SIZE": "2", **_MSRUN}, 1, 2, "RANKD_RANK and RANKD_WORLD_SIZE", id="ours"
        ),
        pytest.param(
            {"RANKD_RANK": "3", **_MSRUN, "RANK_ID": "0"},
            3,
            4,
            "RANKD_RANK and MS_WORKER_NUM and RANK_SIZE",
            id="our rank, the launcher's size",
        ),
        pytest.param(
            {"RANKD_WORLD_SIZE": "1", "DEVICE_ID": "3"}, 0, 1, "RANKD_WORLD_SIZE", id="one process on the fourth card"
        ),
    ],
)
def test_certain(env: dict[str, str], rank: int, size: int, source: str) -> None:
    """Where the environment is certain, rank, world size and what told them."""
    assert resolve(env) == Identity(rank, size, source)


@pytest.mark.parametrize(
    ("env", "text"),
    [
        pytest.param({**_MSRUN, "RANK_ID": "0", "DEVICE_ID": "1"}, "without MS_NODE_ID", id="RANK_ID=0 inherited"),
        pytest.param({**_MSRUN, "DEVICE_ID": "1"}, "without MS_NODE_ID", id="msrun's other nodes"),
        pytest.param(
            {**_MSRUN, "RANK": "1", "WORLD_SIZE": "4"}, "without MS_NODE_ID", id="RANK may be the local index"
        ),
        pytest.param(
            {**_MSRUN, "SLURM_PROCID": "1", "SLURM_NTASKS": "4", **_STEP},
            "without MS_NODE_ID",
            id="MindSpore need not number as Slurm does",
        ),
        pytest.param({"SLURM_PROCID": "3"}, "nothing tells the world size", id="only SLURM_PROCID"),
        pytest.param({"SLURM_NTASKS": "8"}, "nothing tells the world size", id="salloc's shell"),
        pytest.param(
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, "nothing tells the world size", id="sbatch's script itself"
        ),
        pytest.param({"LOCAL_RANK": "1"}, "nothing tells the world size", id="only LOCAL_RANK"),
        pytest.param({"DEVICE_ID": "1"}, "nothing tells the world size", id="only DEVICE_ID"),
        pytest.param({"RANK_ID": "0"}, "nothing tells the world size", id="only RANK_ID"),
        pytest.param({"RANK": "0"}, "nothing tells the world size", id="only RANK"),
        pytest.param({"WORLD_SIZE": "8"}, "no launcher tells both", id="only WORLD_SIZE"),
        pytest.param({"RANK_ID": "0", "WORLD_SIZE": "8"}, "no launcher tells both", id="two halves"),
        pytest.param(
            {"RANKD_WORLD_SIZE": "8", "LOCAL_RANK": "1"}, "only indices within a node", id="size and a local index"
        ),
        pytest.param({"RANKD_WORLD_SIZE": "8"}, "no launcher tells both", id="size and nothing else"),
        pytest.param(
            {**_MSRUN_2, "RANK_ID": "0"}, "the rank: MS_NODE_ID says 2, RANK_ID says 0", id="RANK_ID disagrees"
        ),
        pytest.param({**_MSRUN_2, "RANK_SIZE": "8"}, "the world size: MS_WORKER_NUM says 4", id="sizes disagree"),
        pytest.param(
            {**_MSRUN_2, "SLURM_PROCID": "1", "SLURM_NTASKS": "4", **_STEP},
            "MS_NODE_ID says 2, RANK_ID says 2, SLURM_PROCID says 1",
            id="Slurm counts the same world otherwise",
        ),
        pytest.param({**_CLUSTER, "MS_NODE_ID": "4"}, "rank 4 of 4", id="rank outside the world"),
        pytest.param({**_CLUSTER, "MS_NODE_ID": "node-a"}, "MS_NODE_ID is not a number", id="a name"),
        pytest.param({"MS_WORKER_NUM": "9" * 5000}, "MS_WORKER_NUM is not a number", id="a huge number"),
        pytest.param({"RANK": "1", "WORLD_SIZE": "-2"}, "WORLD_SIZE is not a number", id="a negative number"),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", **_STEP},
            "the rank: SLURM_PROCID says 0, RANK says 1",
            id="two launchers disagree",
        ),
        pytest.param(
            {"RANK_ID": "3", "RANK_SIZE": "8", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
            "the world size: RANK_SIZE says 8, SLURM_NTASKS says 1",
            id="two worlds",
        ),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "3"},
            "LOCAL_RANK is 3, which rank 0 of 2 cannot have",
            id="one environment for several processes",
        ),
        pytest.param(
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "DEVICE_ID": "3"},
            "DEVICE_ID is 3, which rank 0 of 1 cannot have",
            id="one Slurm task that may have started a process a card",
        ),
        pytest.param({"RANKD_RANK": "x"}, "RANKD_RANK is not a number", id="ours is no number"),
        pytest.param({"RANKD_RANK": "2", "RANKD_WORLD_SIZE": "2"}, "rank 2 of 2", id="ours outside the world"),
        pytest.param({"RANKD_RANK": "2"}, "rank 2 of 1", id="our rank and nothing else"),
        pytest.param({"RANKD_WORLD_SIZE": "8", **_MSRUN_2}, "RANKD_WORLD_SIZE says 8", id="our size disagrees"),
    ],
)
def test_not_certain(env: dict[str, str], text: str) -> None:
    """Where it is not certain there is an error, which lists every variable found and what to set."""
    with pytest.raises(IdentityError) as caught:
        resolve(env)
    message = str(caught.value)
    assert text in message
    assert "Set RANKD_RANK (from 0) and RANKD_WORLD_SIZE for each process" in message
    for name, value in env.items():
        assert f"{name}={value[:80]!r}" in message


def test_the_scheduler_is_no_rank() -> None:
    """msrun's scheduler process runs the same script with RANK_ID=0; in it there is no identity, whatever is given."""
    env = {**_CLUSTER, "MS_ROLE": "MS_SCHED", "RANK_ID": "0", "RANK_SIZE": "4"}
    assert resolve(env) is None
    assert resolve({**env, "RANKD_RANK": "1", "RANKD_WORLD_SIZE": "4"}, rank=0, world_size=4) is None


def _never() -> tuple[int, int] | None:
    raise AssertionError("asked although everything was given")


def test_the_argument_wins() -> None:
    """An explicit rank and world size win over everything, and nothing else is asked."""
    env = {**_MSRUN_2, "RANKD_RANK": "0", "RANKD_WORLD_SIZE": "2"}
    assert resolve(env, rank=5, world_size=8, framework=_never) == Identity(5, 8, "argument")


def test_ours_win_over_the_framework() -> None:
    """RANKD_RANK and RANKD_WORLD_SIZE come before the framework."""
    env = {"RANKD_RANK": "1", "RANKD_WORLD_SIZE": "2"}
    assert resolve(env, framework=_never) == Identity(1, 2, "RANKD_RANK and RANKD_WORLD_SIZE")


def test_the_framework_wins_over_the_launcher() -> None:
    """Once communication is initialised the framework knows, whatever was inherited."""
    env = {**_MSRUN, "RANK_ID": "0"}
    assert resolve(env, framework=_says(3, 4)) == Identity(3, 4, "mindspore")


def test_half_an_answer_is_completed() -> None:
    """An explicit rank takes the world size from the next source that has one, and the other way round."""
    assert resolve({}, rank=1, framework=_says(3, 4)) == Identity(1, 4, "argument and mindspore")
    assert resolve({}, rank=0) == Identity(0, 1, "argument and single process")
    assert resolve({"RANKD_WORLD_SIZE": "2"}, rank=1) == Identity(1, 2, "argument and RANKD_WORLD_SIZE")
    assert resolve({}, world_size=4, framework=_says(3, 4)) == Identity(3, 4, "mindspore")
    assert resolve(_MSRUN_2, world_size=4) == Identity(
        2, 4, "MS_NODE_ID and RANK_ID and MS_WORKER_NUM and RANK_SIZE and argument"
    )


def test_a_world_size_that_the_framework_denies() -> None:
    """A rank means something within its world only: a world size that the framework denies is an error."""
    with pytest.raises(IdentityError, match="argument says 8 and mindspore says 4"):
        resolve({}, world_size=8, framework=_says(3, 4))


@pytest.mark.parametrize(("rank", "size"), [(-1, 4), (4, 4), (0, 0), (True, 2), (0, True), (1.0, 2)])
def test_impossible_identities(rank: int, size: int) -> None:
    """A rank outside its world, and what is no integer, cannot be built or given."""
    with pytest.raises(IdentityError):
        Identity(rank, size, "test")
    with pytest.raises(IdentityError):
        resolve({}, rank=rank, world_size=size)


_NAMES = [
    "MS_ROLE", "MS_NODE_ID", "MS_WORKER_NUM", "RANK_ID", "RANK_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK",
    "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "DEVICE_ID",
    "RANKD_RANK", "RANKD_WORLD_SIZE",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(_NAMES), st.sampled_from(["0", "1", "2", "3", "8", "", "x", "MS_SCHED"])))
def test_any_environment(env: dict[str, str]) -> None:
    """Any environment gives a rank of its world, the scheduler's None, or an IdentityError; nothing else."""
    try:
        found = resolve(env)
    except IdentityError:
        return
    assert (found is None) == (env.get("MS_ROLE") == "MS_SCHED")
    assert found is None or 0 <= found.rank < found.world_size


def test_mindspore_is_not_imported_to_ask() -> None:
    """A process without MindSpore is not made to import it."""
    script = (
        "import sys; from rankd.agent.identity import framework_identity;"
        "print(framework_identity(), 'mindspore' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "False"]


_SCRIPT = """
import os, sys
import mindspore
from mindspore.communication import init, get_rank
from rankd.agent.identity import framework_identity, resolve

if resolve(os.environ, framework=framework_identity) is not None:
    before = framework_identity()
    mindspore.set_device("CPU")
    init()
    found = resolve(os.environ, framework=framework_identity)
    print("FOUND", before, found.rank, found.world_size, found.source, get_rank(), flush=True)
else:
    print("SCHEDULER", flush=True)
    init()
"""


@pytest.mark.mindspore
def test_mindspore_before_init(tmp_path: Path) -> None:
    """Before init() MindSpore says 0 of 1 on every rank, so nothing is taken from it."""
    pytest.importorskip("mindspore")
    script = (
        "import mindspore; from rankd.agent.identity import framework_identity; print('SAID', framework_identity())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "SAID None" in done.stdout


@pytest.mark.mindspore
@pytest.mark.slow
def test_mindspore_after_init(tmp_path: Path) -> None:
    """Under msrun each worker has its rank from MindSpore after init(), and the scheduler process has none."""
    pytest.importorskip("mindspore")
    (tmp_path / "train.py").write_text(_SCRIPT)
    # msrun starts its workers with the `python` that is found first.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "MS_DEV_LAUNCH_BLOCKING": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, "-m", "mindspore.parallel.cluster.run", "--worker_num=2", "--local_worker_num=2",
        "--master_addr=127.0.0.1", f"--master_port={free_port()}", "--join=True", "--log_dir=logs",
        "--cluster_time_out=60", "train.py",
    ]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, timeout=100)
    logs = {log.name: log.read_text() for log in (tmp_path / "logs").glob("*.log")}
    assert "SCHEDULER" in logs["scheduler.log"]
    assert "FOUND None 0 2 mindspore 0" in logs["worker_0.log"]
    assert "FOUND None 1 2 mindspore 1" in logs["worker_1.log"]


@pytest.mark.slow
def test_a_real_mpirun(tmp_path: Path) -> None:
    """Two processes of Open MPI's own launcher are ranks 0 and 1 of 2, and both are in the log."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("Open MPI's mpirun is not installed here (Debian: openmpi-bin)")
    body = """
    with Agent.from_yaml("train.yaml", model=Model()) as a:
        print("FOUND", a.identity.rank, a.identity.world_size, flush=True)
        train(a, steps=2)
    """
    training = script(
        tmp_path, body, launcher=[mpirun, "--oversubscribe", "-n", "2"],
        OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )  # fmt: skip
    said, trouble = training.communicate(timeout=PATIENCE)
    assert training.returncode == 0, trouble
    assert sorted(line for line in said.splitlines() if "FOUND" in line) == ["FOUND 0 2", "FOUND 1 2"], said
    content = collected(tmp_path)
    assert len(values(content, "local_loss", 0)) == len(values(content, "local_loss", 1)) == 2 * 4


def test_framework_identity_without_mindspore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process has no MindSpore the framework says nothing."""
    monkeypatch.delitem(sys.modules, "mindspore", raising=False)
    assert framework_identity() is None
