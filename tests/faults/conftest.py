"""A place for one faulty run: collectors, ranks, and what must hold at its end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.job import Job
from tests.support import CollectorProcess, free_port, verified, whole_log

from rankd.collector.verify import Verification


class Site:
    """One output directory, one endpoint, its collectors and its job."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.output = root / "out"
        self.port = free_port()
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self.collectors: list[CollectorProcess] = []
        self.job = Job(root / "told", output=str(self.output), endpoint=self.endpoint)

    @property
    def merged(self) -> Path:
        return self.output / "merged.log"

    def collector(self, *options: str, **section: Any) -> CollectorProcess:
        """Start a collector; it waits for nobody in particular."""
        spool = {"directory": str(self.job.spools)}
        section = {"endpoint": self.endpoint, "lost_after": 60.0, "spool": spool, **section}
        self.collectors.append(CollectorProcess(self.output, *options, **section))
        return self.collectors[-1]

    def lines(self) -> int:
        """How many lines merged.log has."""
        return whole_log(self.merged).count(b"\n")

    def has(self, text: str) -> bool:
        """Whether merged.log says so."""
        return text.encode() in whole_log(self.merged)

    def whole(self) -> Verification:
        """All is over: `rankd verify` finds nothing, and the logs hold what the ranks say they pushed."""
        check = verified(self.output)
        self.job.check(self.output)
        return check

    def close(self) -> None:
        """Nothing is left running."""
        self.job.close()
        for each in self.collectors:
            if each.process.poll() is None:
                each.kill()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A place whose processes are gone after the test."""
    it = Site(tmp_path)
    yield it
    it.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB of its own, in memory."""
    where = tmp_path / "out"
    where.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", where], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield where
    subprocess.run(["umount", "--lazy", where], check=True)
