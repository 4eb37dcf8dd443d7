"""`make demo`: train the example on 4 ranks, watch merged.log grow, and show what was written where.

Writes into `demo-output` in the current folder, made afresh; a folder of that name that the demo did not make is left
alone. Ends with the job's exit status. Ctrl-C ends everything that the demo started.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import FrameType

import psutil
import yaml

RANKS = 4
# The demo takes about a minute; a job that hangs is not worth a longer wait.
MOST_SECONDS = 170.0
# How long the collector may take to write its summary after the job has ended.
SETTLE_SECONDS = 15.0
# Marks the output folder as the demo's own, and (as an environment variable) each process that descends from it.
MARKER_FILE = ".made-by-rankd-demo"
MARKER_VARIABLE = "RANKD_DEMO"

HERE = Path(__file__).resolve().parent
CONFIG = HERE / "train.yaml"
MSRUN = HERE.parent / "msrun.sh"
LOG_DIR = "msrun-log"


def fresh_folder(path: Path) -> None:
    """Make `path` an empty folder that carries the demo's marker.

    Raises:
        SystemExit: something else of that name is there.
    """
    if path.is_symlink() or path.exists():
        if path.is_symlink() or not (path / MARKER_FILE).is_file():
            raise SystemExit(f"{path} is there and the demo did not make it; move it away, then try again")
        shutil.rmtree(path)
    path.mkdir()
    (path / MARKER_FILE).touch()


class Tail:
    """Copies to standard output what a file has gained since the last call; the file may not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = 0

    def copy(self) -> None:
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as log:
            log.seek(self._seen)
            new = log.read()
            self._seen += len(new)
            sys.stdout.buffer.write(new)
            sys.stdout.flush()


def descendants(marker: str) -> list[psutil.Process]:
    """The live processes that carry the marker: msrun, its workers and the collector, whatever session they are in."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or another user's
            if process.environ().get(MARKER_VARIABLE) == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_descendants(marker: str) -> None:
    """End what the demo started, by process id: politely, then not."""
    for end in (psutil.Process.terminate, psutil.Process.kill):
        processes = descendants(marker)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                end(process)
        psutil.wait_procs(processes, timeout=5)


def run_job(output: Path, merged: Path, marker: str) -> int:
    """Run the training job in `output`, showing `merged` as it grows; the job's exit status."""
    environment = os.environ | {MARKER_VARIABLE: marker, "PYTHON": sys.executable}
    tail = Tail(merged)
    deadline = time.monotonic() + MOST_SECONDS
    with (output / "msrun.log").open("wb") as log:
        # A session of its own, so that Ctrl-C reaches the demo alone, which then ends all of them.
        job = subprocess.Popen(
            [MSRUN, "--cpu", "--workers", str(RANKS), "--config", CONFIG, "--log-dir", LOG_DIR],
            cwd=output,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while job.poll() is None and time.monotonic() < deadline:
        tail.copy()
        time.sleep(0.2)
    if job.poll() is None:
        print(f"the job has not ended after {MOST_SECONDS:.0f} s", file=sys.stderr)
        return 124
    settled = min(deadline, time.monotonic() + SETTLE_SECONDS)
    while descendants(marker) and time.monotonic() < settled:
        tail.copy()
        time.sleep(0.2)
    tail.copy()
    return job.returncode


def show_tree(folder: Path, depth: int = 3, indent: str = "  ") -> None:
    """Print what `folder` holds, with sizes; folders below `depth` as one line with their total."""
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            print(f"{path.stat().st_size:>12,} {indent}{path.name}")
        elif depth > 1:
            print(f"{'':>12} {indent}{path.name}/")
            show_tree(path, depth - 1, indent + "  ")
        else:
            files = [p for p in path.rglob("*") if p.is_file()]
            total = sum(p.stat().st_size for p in files)
            print(f"{total:>12,} {indent}{path.name}/  ({len(files)} files)")


def show_profile(output: Path, rank: int) -> None:
    """Print what the MindSpore Profiler left for one rank."""
    traces = sorted(p for p in output.rglob("*_ascend_ms") if p.parent.name == f"rank_{rank}")
    if not traces:
        print(f"\nno profile of rank {rank} was written")
    for trace in traces:
        print(f"\nprofile of rank {rank}: {trace.relative_to(output.parent)}")
        show_tree(trace, depth=2)


def show_failure(output: Path) -> None:
    """Print the end of each log that the job left: where a failed start says why."""
    for log in [output / "msrun.log", *sorted((output / LOG_DIR).glob("*.log"))]:
        print(f"\n== end of {log.relative_to(output.parent)}", file=sys.stderr)
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]:
            print(f"   {line}", file=sys.stderr)


def interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    output = Path.cwd() / "demo-output"
    fresh_folder(output)
    merged = output / yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["rankd"]["output"] / "merged.log"
    marker = uuid.uuid4().hex
    signal.signal(signal.SIGTERM, interrupt)
    print(f"training on {RANKS} ranks; this is {merged.relative_to(output.parent)} as it grows:\n", flush=True)
    try:
        status = run_job(output, merged, marker)
    except KeyboardInterrupt:
        print("\ninterrupted; ending what the demo started", file=sys.stderr)
        status = 130
    finally:
        end_descendants(marker)
    if status:
        show_failure(output)
        print(f"\nthe job failed with status {status}", file=sys.stderr)
        return status if status > 0 else 128 - status
    if not merged.is_file():
        print(f"the job ended well, but {merged.relative_to(output.parent)} was not written", file=sys.stderr)
        return 1
    print("\nwhat was written where (bytes):")
    show_tree(output)
    show_profile(output, rank=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
