"""`rankd rebuild` (all logs from the journal) against `LC_ALL=C sort -m` of the rank logs with their prefixes.

The prefixed logs are there before `sort` starts, as text; it makes one file. Rebuild prints every number from its
float64, and makes that file and all rank logs, with as many processes as it takes by itself. What CPython needs for the
printing and writing alone is measured too.

    python -m tests.bench.bench_rebuild [--records 12000000] [--turns 3] [--printers N]
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rankd.collector.rebuild import printers_for

from .bench_collector import NORMS, Driver, journal_bytes, rankd_collector, text_only
from .figures import Figure, command, median, ratio

_RANKS = 16


def timed(line: list[str], to: Path | None = None) -> tuple[float, float]:
    """Wall and CPU seconds of a command."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with (to or Path(os.devnull)).open("wb") as out:
        subprocess.run(line, stdout=out, check=True, env={**os.environ, "LC_ALL": "C"})
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(args: argparse.Namespace) -> Iterator[Figure]:
    folder = Path(tempfile.mkdtemp(prefix="rankd-bench-"))
    output = folder / "out"
    blocks = max(2, (200_000 if args.quick else args.records) // (NORMS * _RANKS))
    try:
        with rankd_collector(output) as (endpoint, _):
            driver = Driver(endpoint, _RANKS)
            driver.push(blocks)
            driver.close()
        prefixed = []
        for log in sorted(output.glob("rank_*/monitor.log")):
            path = folder / f"{log.parent.name}.log"
            with path.open("wb") as out:
                subprocess.run(["sed", f"s/^/[{log.parent.name}] /", str(log)], stdout=out, check=True)
            prefixed.append(str(path))
        printers = printers_for(journal_bytes(output)) if args.printers is None else args.printers
        into = folder / "into"
        rebuild = [sys.executable, "-m", "rankd.collector", "rebuild", str(output), "--into", str(into)]
        rebuild += ["--printers", str(printers)]
        rebuilt, sorted_ = [], []
        for _ in range(1 if args.quick else args.turns):
            rebuilt.append(timed(rebuild))
            same = (into / "merged.log").read_bytes() == (output / "merged.log").read_bytes()
            shutil.rmtree(into)
            sorted_.append(timed(["sort", "-m", *prefixed], folder / "sorted.log"))
            assert same, "what was rebuilt differs from what was written"
    finally:
        shutil.rmtree(folder)
    wall = ratio([w for w, _ in rebuilt], [w for w, _ in sorted_])
    cpu = ratio([c for _, c in rebuilt], [c for _, c in sorted_])
    records = blocks * _RANKS * NORMS
    how = f"{records / 1e6:.1f} M records, {1 + printers} processes; rank logs included"
    yield Figure("rankd rebuild, of sort -m: wall time", wall, "x", 1, note=f"{how}; {_seconds(rebuilt, sorted_, 0)}")
    yield Figure("  CPU time", cpu, "x", note=_seconds(rebuilt, sorted_, 1))
    limit = records / text_only(records) / median(c for _, c in sorted_)
    yield Figure("  its limit: printing and writing alone, of sort -m", limit, "x")


def _seconds(rebuilt: list[tuple[float, float]], sorted_: list[tuple[float, float]], which: int) -> str:
    one, other = (median(times[which] for times in series) for series in (rebuilt, sorted_))
    return f"{one:.1f} s against {other:.1f} s"


def declare(parser: argparse.ArgumentParser) -> None:
    # So many that starting the processes is a small part.
    parser.add_argument("--records", type=int, default=12_000_000)
    parser.add_argument("--turns", type=int, default=3, help="how often each is measured (default 3)")
    parser.add_argument("--printers", type=int, help="as of `rankd rebuild` (default: what that takes by itself)")


if __name__ == "__main__":
    command(__doc__, measure, declare)
