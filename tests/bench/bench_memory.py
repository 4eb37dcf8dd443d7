"""Memory of a collector with 1,024 ranks of which one stands still, so that nothing the others push may be released.

Full rate is 700 norms × 8 micro-steps each 10 s from every rank: 573 thousand records/s. They are pushed here as fast
as the collector takes them, so the time at full rate that they stand for is stated and not waited for. `--minutes 10`
is all of it, and 3 GB of journal; with `--stay` the stalled rank does not go on, which would be 58 GB of text then.

    python -m tests.bench.bench_memory [--minutes 0.6] [--ranks 1024]
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


def measure(args: argparse.Namespace) -> Iterator[Figure]:
    ranks = 128 if args.quick else args.ranks
    blocks = max(4, round(args.minutes * _BLOCKS_A_MINUTE))
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
            if not args.stay:
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
    if not args.stay:
        yield Figure("memory after all was released", after, "MB", 300)


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=0.6, help="at full rate")
    parser.add_argument("--ranks", type=int, default=1_024)
    parser.add_argument("--stay", action="store_true", help="do not let the stalled rank go on")


if __name__ == "__main__":
    command(__doc__, measure, declare)
