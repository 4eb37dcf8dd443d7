"""`make demo`: train the example on 4 ranks, watch merged.log grow, and show what was written where.

Writes into `demo-output` in the current folder, made afresh; a folder of that name that the demo did not make is left
alone. Ends with the job's exit status. Ctrl-C ends everything that the demo started.
"""

from __future__ import annotations

import argparse
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
from typing import Any

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


def end_descendants(marker: str) -> list[str]:
    """End what the demo started, by process id: politely, then not. What had to be ended so, one description each."""
    ended = []
    for end in (psutil.Process.terminate, psutil.Process.kill):
        processes = descendants(marker)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                ended.append(f"{process.pid}: {' '.join(process.cmdline())}")
                end(process)
        psutil.wait_procs(processes, timeout=5)
    return ended


def run_job(output: Path, merged: Path, marker: str, steps: int) -> int:
    """Run the training job in `output`, showing `merged` as it grows; the job's exit status."""
    environment = os.environ | {MARKER_VARIABLE: marker, "PYTHON": sys.executable}
    tail = Tail(merged)
    deadline = time.monotonic() + MOST_SECONDS
    with (output / "msrun.log").open("wb") as log:
        # A session of its own, so that Ctrl-C reaches the demo alone, which then ends all of them.
        job = subprocess.Popen(
            [
                *(MSRUN, "--cpu", "--workers", str(RANKS), "--config", CONFIG, "--log-dir", LOG_DIR),
                *("--", "--steps", str(steps)),
            ],
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
        if path.name == MARKER_FILE:
            continue
        if not path.is_dir():
            print(f"{path.stat().st_size:>12,} {indent}{path.name}")
        elif depth > 1:
            print(f"{'':>12} {indent}{path.name}/")
            show_tree(path, depth - 1, indent + "  ")
        else:
            files = [p for p in path.rglob("*") if p.is_file()]
            total = sum(p.stat().st_size for p in files)
            print(f"{total:>12,} {indent}{path.name}/  ({len(files)} {'file' if len(files) == 1 else 'files'})")


def show_profile(logs: Path, section: dict[str, Any]) -> None:
    """Print what the chosen rank says about its profile, and what the MindSpore Profiler left."""
    (rank,) = section["profiler_rank"]
    lines = (logs / f"rank_{rank}" / "monitor.log").read_text(encoding="utf-8").splitlines()
    told = [line for line in lines if line.startswith("# profile ")]
    print(
        f"\nOnly rank {rank} ran the MindSpore Profiler, in steps {section['start_step']}-{section['end_step']}. ",
        end="",
    )
    print("When the output had been checked, its log said:" if told else "Its log does not say what became of it.")
    for line in told:
        print(f"  [rank_{rank}] {line}")
    for trace in sorted((logs.parent / section["output_path"] / f"rank_{rank}").glob("*_ascend_ms")):
        print("  In there:")
        show_tree(trace, depth=2)
        print("  trace_view.json opens in MindStudio Insight, chrome://tracing or https://ui.perfetto.dev.")


def show_commands(merged: Path, logs: Path) -> None:
    """Print how to look at the logs."""
    commands = {
        f"tail -F {merged}": "all ranks, in order",
        f"tail -F {logs / 'rank_2' / 'monitor.log'}": "one rank",
        f"grep device_loss {merged}": "one metric, all ranks",
        f"grep -F '] # ' {merged}": "what rankd itself has to say",
    }
    print("\nLook at it again, or at a run while it trains:")
    for command, meaning in commands.items():
        print(f"  {command:{max(map(len, commands))}}  {meaning}")


def show_failure(output: Path) -> None:
    """Print the end of each log that the job left: where a failed start says why."""
    for log in [output / "msrun.log", *sorted((output / LOG_DIR).glob("*.log"))]:
        print(f"\n== end of {log.relative_to(output.parent)}", file=sys.stderr)
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]:
            print(f"   {line}", file=sys.stderr)


def interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the example on 4 ranks and show what rankd writes.")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: %(default)s)")
    steps = parser.parse_args().steps
    output = Path.cwd() / "demo-output"
    fresh_folder(output)
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    logs = output / config["rankd"]["output"]
    merged = logs / "merged.log"
    marker = uuid.uuid4().hex
    signal.signal(signal.SIGTERM, interrupt)
    print(f"Training {steps} steps on {RANKS} ranks with MindSpore on CPU; they need 10 to 20 s to start.")
    print(f"What follows is {merged.relative_to(output.parent)} as it grows.\n", flush=True)
    left: list[str] = []
    try:
        status = run_job(output, merged, marker, steps)
    except KeyboardInterrupt:
        print("\ninterrupted; ending what the demo started", file=sys.stderr)
        status = 130
    finally:
        left = end_descendants(marker)
    if status:
        show_failure(output)
        print(f"\nthe job failed with status {status}", file=sys.stderr)
        return status if status > 0 else 128 - status
    if left:
        print(
            f"\nthe job ended well, but these had not ended {SETTLE_SECONDS:.0f} s later:",
            *left,
            sep="\n  ",
            file=sys.stderr,
        )
        return 1
    if not merged.is_file():
        print(f"the job ended well, but {merged.relative_to(output.parent)} was not written", file=sys.stderr)
        return 1
    print(f"\nThat was the whole run. In {output.name}/ (bytes):")
    show_tree(output)
    show_profile(logs, config["profiler"])
    show_commands(merged.relative_to(output.parent), logs.relative_to(output.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
