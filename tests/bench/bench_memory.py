"""Memory of a collector with 1,024 ranks.

First one of them stands still, so that nothing the others push may be released; then none does, for long.

Full rate is 700 norms × 8 micro-steps each 10 s from every rank: 573 thousand records/s. They are pushed here as fast
as the collector takes them, so the time that they stand for is stated and not waited for. `--minutes 10` is a long
stall, and 3 GB of journal; with `--stay` the stalled rank does not go on, which would be 58 GB of text then.
`--hours 1` is an hour at half the rate, with rotated logs of which little is kept.

    python -m tests.bench.bench_memory [--minutes 0.6] [--hours 0.05] [--ranks 1024]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .bench_collector import NORMS, Driver, rankd_collector
from .figures import Figure, command

# Blocks of one rank in a minute at full rate.
_BLOCKS_A_MINUTE = 48
_MB = 2**20


# Little is kept: an hour would be 170 GB of text.
_LITTLE = {
    "logs": {"rotate_size": "8MiB", "compress": "none", "keep_parts": 1},
    "journal": {"keep": "1GiB"},
}


def measure(args: argparse.Namespace) -> Iterator[Figure]:
    ranks = 128 if args.quick else args.ranks
    yield from _stalled(ranks, args.minutes, args.stay)
    yield from _long(ranks, args.hours)


def _stalled(ranks: int, minutes: float, stay: bool) -> Iterator[Figure]:
    blocks = max(4, round(minutes * _BLOCKS_A_MINUTE))
    output = Path(tempfile.mkdtemp(prefix="rankd-bench-"))
    sizes = []
    try:
        with rankd_collector(output) as (endpoint, process):
            driver = Driver(endpoint, ranks)
            driver.push(1)
            idle = process.memory_info().rss / _MB
            started = time.monotonic()
            for upto in range(2, blocks + 2):
                driver.push(upto, but=1)
                sizes.append(process.memory_info().rss / _MB)
            seconds = time.monotonic() - started
            if not stay:
                driver.push(blocks + 1)
            after = process.memory_info().rss / _MB
            driver.close()
    finally:
        shutil.rmtree(output)
    rate = blocks * (ranks - 1) * NORMS / seconds / 1e6
    note = (
        f"{blocks} blocks a rank, as in {blocks / _BLOCKS_A_MINUTE:.1f} min at full rate; {rate:.1f} M records/s here"
    )
    yield Figure(f"memory, {ranks:,} ranks joined", idle, "MB")
    yield Figure(f"memory, {ranks:,} ranks, one stalled: most", max(sizes), "MB", 300, note=note)
    half = max(sizes[: len(sizes) // 2])
    yield Figure("  growth in the second half", max(sizes[len(sizes) // 2 :]) - half, "MB")
    if not stay:
        yield Figure("memory after all was released", after, "MB", 300)


def _long(ranks: int, hours: float) -> Iterator[Figure]:
    blocks = max(8, round(hours * 60 * _BLOCKS_A_MINUTE / 2))
    output = Path(tempfile.mkdtemp(prefix="rankd-bench-"))
    sizes = []
    try:
        with rankd_collector(output, _LITTLE) as (endpoint, process):
            driver = Driver(endpoint, ranks)
            started = time.monotonic()
            for upto in range(1, blocks + 1):
                driver.push(upto)
                sizes.append(process.memory_info().rss / _MB)
            seconds = time.monotonic() - started
            driver.close()
    finally:
        shutil.rmtree(output)
    note = f"{blocks} blocks a rank, as in {60 * hours:.0f} min at half the rate, in {seconds:.0f} s"
    yield Figure(f"memory, {ranks:,} ranks, none stalled: most", max(sizes), "MB", 300, note=note)
    # The first quarter fills what is kept for use again.
    quarters = [max(sizes[start : start + blocks // 4]) for start in range(0, blocks - 3, blocks // 4)][:4]
    note = "most in each quarter: " + ", ".join(f"{size:.0f}" for size in quarters)
    yield Figure("  growth from the second quarter to the last", quarters[3] - quarters[1], "MB", 10, note=note)


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=0.6, help="at full rate, with one stalled")
    parser.add_argument("--hours", type=float, default=0.05, help="at half the rate")
    parser.add_argument("--ranks", type=int, default=1_024)
    parser.add_argument("--stay", action="store_true", help="do not let the stalled rank go on")


if __name__ == "__main__":
    command(__doc__, measure, declare)
