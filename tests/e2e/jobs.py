"""Training jobs that deploy/msrun.sh starts, and what they leave behind. One job at a time: each fills the machine.

Everything that descends from a job has its folder as working directory, whatever session it is in: that is how what
still runs is found, and ended by process id.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from rankd.collector.protocol.records import Comment, Record
from rankd.collector.protocol.speclog import parse

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
# A job takes 15 to 30 s alone on 2 cores.
PATIENCE = 150.0
_LOOK = 0.1


def running_in(folder: Path, which: Callable[[psutil.Process], bool] = lambda _: True) -> list[psutil.Process]:
    """The live processes whose working directory is `folder` or in it; of these, `which`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or another user's
            if process.status() == psutil.STATUS_ZOMBIE or not Path(process.cwd()).is_relative_to(folder):
                continue
            if which(process):
                found.append(process)
    return found


def end_all_in(folder: Path) -> None:
    """End what runs in `folder`: politely, then not."""
    for end in (psutil.Process.terminate, psutil.Process.kill):
        processes = running_in(folder)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                end(process)
        psutil.wait_procs(processes, timeout=5)


def environment() -> dict[str, str]:
    """This process's environment without what says who a rank is; the job's scripts find the repository's modules."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "MS_", "LOCAL_RANK", "DEVICE_"))}
    return clean | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True)
class Job:
    """A job that has been started."""

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def output(self) -> Path:
        return self.folder / "out"

    def wait_for(self, what: str, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Wait until `condition` holds; otherwise fail with the end of each of the job's logs."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s\n{self.logs()}"
            time.sleep(_LOOK)

    def logs(self) -> str:
        """The ends of all logs, for a person who looks for what went wrong."""
        paths = [*self.folder.rglob("*.log"), *self.folder.rglob("*.txt")]
        texts = {path: path.read_text(errors="replace").splitlines()[-10:] for path in paths}
        return "\n".join(f"== {path.relative_to(self.folder)}\n" + "\n".join(lines) for path, lines in texts.items())

    def has_ended(self) -> bool:
        """Whether the collector has written its last line."""
        log = self.output / "merged.log"
        return log.exists() and b"\n[collector] # end " in log.read_bytes()

    def collector(self) -> list[psutil.Process]:
        """The job's collector, if it runs."""
        return running_in(self.folder, lambda process: "rankd.collector" in process.cmdline())

    def ranks(self) -> list[psutil.Process]:
        """The training processes that still run."""
        return running_in(self.folder, lambda process: process.environ().get("MS_ROLE") == "MS_WORKER")

    def content(self) -> list[Record | Comment]:
        """What merged.log says."""
        with (self.output / "merged.log").open("rb") as log:
            return list(parse(log))


@contextlib.contextmanager
def job(folder: Path, script: str, config: str, ranks: int) -> Iterator[Job]:
    """Start a script of tests/e2e/scripts on `ranks` ranks in `folder`, writing to `folder`/out; end it afterwards."""
    (folder / "train.yaml").write_text(config)
    command: list[str | Path] = [ROOT / "deploy" / "msrun.sh", "--cpu", "--workers", str(ranks), "--timeout", "60"]
    with (folder / "msrun.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--config", "train.yaml", "--script", SCRIPTS / script],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Job(folder, process)
    finally:
        end_all_in(folder)
        process.wait(10)


def merged_lines_of(merged: bytes, rank: int) -> bytes:
    """The lines of one rank in a merged log, without their prefix."""
    prefix = b"[rank_%d] " % rank
    return b"".join(line[len(prefix) :] for line in merged.splitlines(keepends=True) if line.startswith(prefix))


def verify(output: Path) -> subprocess.CompletedProcess[str]:
    """`rankd verify` of an output directory."""
    command: list[str | Path] = [sys.executable, "-m", "rankd.collector", "verify", output]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
