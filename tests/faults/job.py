"""A made-up job under test: its rank processes, and whether the logs hold what the ranks say they produced."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import ranks as script
from tests.faults.ranks import Orders, list_of
from tests.support import PATIENCE, whole_log

# `rankd verify` reads every line; this is for the ranks' own lists, and fast.
_LOSS = re.compile(r'^\[rank_(\d+)\] \{ "micro_step": \d+, "local_loss": (\S+) \}\n', re.MULTILINE)


class RankProcess:
    """A process of some ranks; see `ranks.py`."""

    def __init__(self, orders: Orders, *, shift: float = 0.0) -> None:
        self.orders = orders
        self._said = Path(orders.told) / f"said.{orders.tag}"
        with self._said.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", script.__file__, json.dumps(dataclasses.asdict(orders))],
                stdout=said,
                stderr=subprocess.STDOUT,
                env={**os.environ, script.SHIFT: str(shift)},
            )

    def pushed(self, rank: int | None = None) -> int:
        """How many micro-steps a rank (all: the one that is least far) has pushed."""
        chosen = self.orders.ranks if rank is None else (rank,)
        return min(len(Told.read(Path(self.orders.told), r, self.orders.tag).pushed) for r in chosen)

    def said(self) -> str:
        """What the process has printed."""
        return self._said.read_text()

    def stop(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and gone."""
        self.process.kill()
        self.process.wait()

    def ended(self) -> None:
        """It ends by itself, well."""
        status = self.process.wait(PATIENCE)
        assert status == 0, f"ranks {self.orders.ranks} ended with status {status}: {self.said()}"


class Job:
    """All rank processes of a test, for one output directory.

    Args:
        told: a fresh directory for the ranks' lists.
        section: the `rankd:` section of all agents.
    """

    def __init__(self, told: Path, **section: Any) -> None:
        told.mkdir()
        self.spools = told.parent / "spools"
        self._told = told
        self._section = section
        self._processes: list[RankProcess] = []

    def start(self, ranks: Sequence[int], world_size: int, *, shift: float = 0.0, **orders: Any) -> RankProcess:
        """One more process."""
        # What a killed process has accepted lies there until somebody delivers it.
        usual = {"spool": {"directory": str(self.spools)}, "exit_timeout": PATIENCE}
        section = {**usual, **self._section, **orders.pop("section", {})}
        tag = len(self._processes) + 1
        whole = Orders(section, tuple(ranks), world_size, tag, str(self._told), **orders)
        self._processes.append(RankProcess(whole, shift=shift))
        return self._processes[-1]

    def finish(self) -> None:
        """Ask all ranks to end after their present step."""
        (self._told / "stop").touch()

    def close(self) -> None:
        """Nothing is left running."""
        for each in self._processes:
            if each.process.poll() is None:
                each.kill()

    def check(self, output: Path) -> None:
        """The logs hold what the ranks say they produced: all of it, once, in each rank's own order."""
        logged: defaultdict[int, list[float]] = defaultdict(list)
        for found in _LOSS.finditer(whole_log(output / "merged.log").decode()):
            logged[int(found[1])].append(float(found[2]))
        for rank in {rank for each in self._processes for rank in each.orders.ranks} | set(logged):
            told = [
                Told.read(self._told, rank, each.orders.tag) for each in self._processes if rank in each.orders.ranks
            ]
            try:
                _check_rank(rank, told, logged[rank])
            except AssertionError as e:
                # A process without a spool file, for want of room, says so: what it loses is no wonder.
                said = [each.said() for each in self._processes]
                raise AssertionError(f"{e}; the processes said {said}") from None


@dataclass(frozen=True)
class Told:
    """What one process of a rank says it did; `whole`: it has closed well."""

    begun: list[float]
    pushed: list[float]
    whole: bool

    @classmethod
    def read(cls, told: Path, rank: int, tag: int) -> Told:
        path = list_of(told, rank, tag)
        # What stands behind the last newline is being written.
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        values = {kind: [float(line.split()[3]) for line in lines if line[0] == kind] for kind in "BP"}
        return cls(values["B"], values["P"], "E" in lines)


def _check_rank(rank: int, told: list[Told], logged: list[float]) -> None:
    assert len(set(logged)) == len(logged), f"rank {rank}: something is there twice"
    owners = {value: number for number, one in enumerate(told) for value in one.begun}
    strangers = [value for value in logged if value not in owners]
    assert not strangers, f"rank {rank}: nobody says it has pushed {strangers[:3]}"
    for number, one in enumerate(told):
        own = [value for value in logged if owners[value] == number]
        missing = sorted(set(one.pushed) - set(own))
        if one.whole:
            assert own == one.begun, f"rank {rank}, process {number + 1}: missing {missing[:3]} ({len(missing)} in all)"
            continue
        assert own == one.begun[: len(own)], f"rank {rank}, process {number + 1}: a hole before {missing[:3]}"
        assert not missing, f"rank {rank}, process {number + 1}: lost {missing[:3]} ({len(missing)} in all)"
