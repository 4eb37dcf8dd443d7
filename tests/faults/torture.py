"""The random killer: SIGKILLs collectors and ranks at random points, as often as asked, and looks for what is missing.

    python -m tests.faults.torture --kills 1000 --seed 7

A run is a collector (or a job) that is killed some dozens of times while ranks push; at its end `rankd verify` must
find nothing, and the logs must hold what the ranks say they pushed. The same seed makes the same choices; when exactly
a kill hits is the machine's.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.faults.job import Job, RankProcess, Told
from tests.support import CollectorProcess, free_port, verified, wait_for, whole_log

from rankd.collector.sinks.parts import Part, compressed_path, layout_of, parts_of, unfinished_path

# Until a collector has started; half of the kills come in this time, in the middle of its recovery.
_START_UP = 0.35
_FOR_EVER = 10_000_000


@dataclass
class Torture:
    """One run in a directory of its own.

    Attributes:
        choose: all choices come from here.
        root: an empty directory; left as it is when something fails.
    """

    choose: random.Random
    root: Path

    def __post_init__(self) -> None:
        self.output = self.root / "out"
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.job = Job(self.root / "told", output=str(self.output), endpoint=self.endpoint)
        # Small segments, so that kills hit checkpoints and rotation as well.
        journal = {"segment_size": self.choose.choice(["16KiB", "64KiB", "1MiB"])}
        if self.choose.random() < 0.3:
            journal["keep"] = "128KiB"
        # Half of the runs rotate their logs, most of these compress them.
        self.rotates = self.choose.random() < 0.5
        logs: dict[str, str] = {}
        if self.rotates:
            logs = {"rotate_size": "64KiB", "compress": self.choose.choice(["gzip", "gzip", "none"])}
        self.collector = CollectorProcess(
            self.output,
            endpoint=self.endpoint,
            lost_after=120.0,
            journal=journal,
            logs=logs,
            spool={"directory": str(self.job.spools)},
        )

    def kill_collectors(self, kills: int) -> None:
        """Several ranks push in one process; the collector is killed and started again."""
        ranks = self.job.start(range(4), 4, last=_FOR_EVER, pace=0.02, params=self.choose.choice([1, 10, 50]))
        for _ in range(kills):
            self._kill_collector()
        self._end([ranks])

    def kill_ranks(self, kills: int) -> None:
        """Three ranks, each a process; each kill hits one of them, or all of them, and they go back some steps.

        Now and then the collector goes with them.
        """
        ranks = {rank: self._start(rank, 1) for rank in range(3)}
        while kills > 0:
            victims = list(ranks) if self.choose.random() < 0.2 else [self.choose.choice(list(ranks))]
            pushed = self.choose.randrange(1, 60)
            wait_for(lambda v=victims, p=pushed: all(ranks[r].pushed() > p for r in v))  # type: ignore[misc]
            if self.choose.random() < 0.5:
                self._wait_for_growth()
            if self.choose.random() < 0.2:
                self.collector.kill()
                self.collector.launch()
            reached = max(ranks[r].orders.first + ranks[r].pushed() // 2 for r in victims)
            first = max(1, reached - self.choose.randrange(4))
            for rank in victims:
                ranks[rank].kill()
                ranks[rank] = self._start(rank, first)
                kills -= 1
        # A rank that says goodbye before another one's restart has opened its attempt would be expected in that.
        wait_for(lambda: all(self._has_come(each) for each in ranks.values()))
        self._end(list(ranks.values()))

    def close(self) -> None:
        """Nothing is left running."""
        self.job.close()
        if self.collector.process.poll() is None:
            self.collector.kill()

    def _has_come(self, process: RankProcess) -> bool:
        """Something of it is in the merged log."""
        (rank,) = process.orders.ranks
        begun = Told.read(self.root / "told", rank, process.orders.tag).begun
        return bool(begun) and f'"local_loss": {begun[0]!r} }}'.encode() in whole_log(self.output / "merged.log")

    def _start(self, rank: int, first: int) -> RankProcess:
        return self.job.start([rank], 3, first=first, last=_FOR_EVER)

    def _end(self, ranks: list[RankProcess]) -> None:
        self.job.finish()
        for each in ranks:
            each.ended()
        status, said = self.collector.ended()
        assert status == 0, f"the collector ended with status {status}: {said}"
        verified(self.output)
        self.job.check(self.output)

    def _kill_collector(self) -> None:
        """Kill it somewhere in its start, or once it has written some more; and start it again."""
        if self.choose.random() < 0.65:
            with suppress(subprocess.TimeoutExpired):
                self.collector.process.wait(self.choose.uniform(0, _START_UP))
        else:
            self._wait_for_growth()
        status = self.collector.process.poll()
        assert status is None, f"the collector ended by itself with status {status}: {self.collector.said()}"
        self.collector.kill()
        if self.choose.random() < 0.2:
            self._tear()
        self.collector.launch()

    def _wait_for_growth(self) -> None:
        more = self.choose.randrange(10_000)
        before = self._size()
        wait_for(lambda: self._size() > before + more)

    def _size(self) -> int:
        """Bytes of journal and merged log: what the collector has done so far."""
        total = layout_of(self.output / "merged.log").end
        for path in (self.output / ".rankd" / "journal").glob("*.journal"):
            with suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def _tear(self) -> None:
        """What a kill in the middle of a write leaves: a part of an entry, a part of a line."""
        journal = sorted((self.output / ".rankd" / "journal").glob("*.journal"))
        if journal:
            with journal[-1].open("ab") as file:
                file.write(bytes([200, 0, 0, 0, 1, 2, 3, 4, 5])[: self.choose.randrange(1, 10)])
        log = self.output / "merged.log"
        if log.exists():
            os.truncate(log, max(0, log.stat().st_size - self.choose.randrange(1, 40)))
        if parts := parts_of(log):
            self._tear_part(log, parts)

    def _tear_part(self, log: Path, parts: list[Part]) -> None:
        """What a kill in the middle of compression leaves; now and then what a power failure does to a part."""
        part = self.choose.choice(parts)
        if part.compressed:
            return
        compressed = compressed_path(part)
        self.choose.choice([compressed, unfinished_path(compressed)]).write_bytes(b"\x1f\x8b\x08")
        journal_is_whole = (log.parent / ".rankd" / "journal" / "00000001.journal").exists()
        if part == parts[-1] and journal_is_whole and self.choose.random() < 0.3:
            os.truncate(part.path, max(0, part.path.stat().st_size - self.choose.randrange(1, 4_000)))


def torture(kills: int, seed: int, per_run: int, body: Callable[[Torture, int], None]) -> None:
    """Runs of `per_run` kills each, until there have been `kills`."""
    choose = random.Random(seed)
    while kills > 0:
        root = Path(tempfile.mkdtemp(prefix="rankd-torture-"))
        run = Torture(choose, root)
        try:
            body(run, min(per_run, kills))
        except BaseException:
            print(f"seed {seed}: look at {root}; the collector's last words:\n{run.collector.said()}", flush=True)
            raise
        finally:
            run.close()
        shutil.rmtree(root)
        kills -= per_run


def seed_of_today() -> int:
    """$SEED, or another one each time."""
    return int(os.environ.get("SEED") or time.time_ns() % 10**9)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="kill collectors and ranks at random, and look for what is missing")
    parser.add_argument("--kills", type=int, default=200, help="of the collector; a fifth as many of ranks")
    parser.add_argument("--seed", type=int, default=None, help="default: $SEED, or another one each time")
    parser.add_argument("--per-run", type=int, default=50, help="kills within one run (default 50)")
    args = parser.parse_args()
    seed = seed_of_today() if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    started = time.monotonic()
    torture(args.kills, seed, args.per_run, Torture.kill_collectors)
    print(f"{args.kills} kills of the collector in {time.monotonic() - started:.0f} s: nothing lost, nothing twice")
    torture(args.kills // 5, seed, args.per_run, Torture.kill_ranks)
    print(f"{args.kills // 5} kills of ranks: what arrived is there once ({time.monotonic() - started:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
