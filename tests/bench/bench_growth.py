"""Where the cost of a record bends as work grows: ranks, parameters, micro-steps, experts, names.

The collector's CPU time for a record, over real sockets, and what the agent's thread pays for it (frame, encoding,
outbox). Each row varies one thing and leaves the rest at 64 ranks, 700 parameters, 4 micro-steps, names of 45
characters.

    python -m tests.bench.bench_growth
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rankd.agent.outbox import Outbox
from rankd.agent.store import MemoryStore
from rankd.collector.protocol.records import Frame, NameTable
from rankd.collector.protocol.wire import Block, Data, Table, encode_item, encode_message, number_item

from .bench_collector import WINDOW, Connection, Driver, rankd_collector, settled_cpu
from .figures import Figure, command


@dataclass(frozen=True, slots=True)
class Load:
    """What is pushed; `experts`: tokens of so many experts in each of `params` layers instead of norms."""

    ranks: int = 64
    params: int = 700
    micro_steps: int = 4
    name_length: int = 45
    experts: int = 0

    def frame(self, rank: int) -> Frame:
        source = random.Random(rank)
        if self.experts:
            layers = NameTable(tuple(f"decoder.{i}" for i in range(self.params)))
            lists = [[float(source.randrange(4_096)) for _ in range(self.experts)] for _ in range(self.params)]
            return Frame.lists("tpe", layers, lists, iteration=1)
        names = tuple(f"decoder.layers.{i}.".ljust(self.name_length, "w") for i in range(self.params))
        return Frame.named("local_norm", NameTable(names), [source.lognormvariate(-3, 1) for _ in names])

    @property
    def values(self) -> int:
        """Of a block."""
        return self.params * max(1, self.experts)


VARIED = {
    "ranks": [Load(ranks=n) for n in (8, 64, 256, 1_024)],
    "parameters": [Load(params=n) for n in (10, 100, 1_000, 10_000)],
    "micro-steps": [Load(micro_steps=n) for n in (1, 8, 64)],
    "experts x 61 layers": [Load(params=61, experts=n) for n in (8, 64, 256)],
    "characters a name": [Load(name_length=n) for n in (25, 100, 200)],
}
_CHANGES = {
    "ranks": "ranks",
    "parameters": "params",
    "micro-steps": "micro_steps",
    "experts x 61 layers": "experts",
    "characters a name": "name_length",
}


def collector_cost(load: Load, values: int) -> float:
    """CPU nanoseconds of the collector for a value."""
    output = Path(tempfile.mkdtemp(prefix="rankd-bench-"))
    count = max(load.micro_steps, values // (load.ranks * load.values))
    try:
        with rankd_collector(output) as (endpoint, process):
            driver = Growing(endpoint, load, count)
            cpu = settled_cpu(process)
            driver.push_all()
            cpu = settled_cpu(process) - cpu
            driver.close()
    finally:
        shutil.rmtree(output)
    return cpu / (count * load.ranks * load.values) * 1e9


class Growing(Driver):
    """A driver whose blocks are made beforehand, with steps and micro-steps."""

    def __init__(self, endpoint: str, load: Load, count: int) -> None:
        super().__init__(endpoint, load.ranks, lambda _: b"")
        self._count = count
        self._messages: dict[int, list[bytes]] = {}
        for rank, connection in enumerate(self.connections.values()):
            frame = load.frame(rank % 8)
            assert frame.table is not None
            table = encode_item(Table(2, 2, frame.table))
            connection.socket.send(encode_message(Data((table,))))
            self._messages[id(connection)] = [
                encode_message(Data((self._block(load, frame, number),))) for number in range(count)
            ]

    @staticmethod
    def _block(load: Load, frame: Frame, number: int) -> bytes:
        step, micro_step = divmod(number, load.micro_steps)
        assert frame.table is not None
        block = Block(0, step + 1, micro_step + 1, True, 0.0, (frame,))
        return number_item(encode_item(block, {frame.table: 2}), number + 3)

    def push_all(self) -> None:
        """Send everything, a few blocks of each rank at a time, and wait for the acknowledgements."""
        for upto in range(WINDOW, self._count + WINDOW, WINDOW):
            self.push(min(upto, self._count) + 1)

    def _fill(self, connection: Connection, upto: int) -> None:
        while connection.sent < upto - 1:
            connection.socket.send(self._messages[id(connection)][connection.sent])
            connection.sent += 1


def agent_cost(load: Load) -> float:
    """CPU nanoseconds of the training thread for a value that is measured already: frame, encoding, outbox."""
    frame = load.frame(0)
    assert frame.table is not None
    values, ids = frame.values, {frame.table: 1}
    outbox = Outbox(MemoryStore(2**26))
    count = max(3, 200_000 // load.values)
    before = time.thread_time()
    for number in range(count):
        again = Frame.named(frame.metric, frame.table, values) if not load.experts else frame
        outbox.put([encode_item(Block(0, number + 1, 1, True, 0.0, (again,)), ids)], records=load.values)
        if number % 16 == 15:
            outbox.take(2**26)
            outbox.acked(outbox.next_seq - 1)
    return (time.thread_time() - before) / (count * load.values) * 1e9


def measure(args: argparse.Namespace) -> Iterator[Figure]:
    values = 200_000 if args.quick else 1_500_000
    for what, loads in VARIED.items():
        for load in loads[:: len(loads) - 1] if args.quick else loads:
            name = f"{getattr(load, _CHANGES[what]):,} {what}"
            note = f"agent {agent_cost(load):.0f} ns"
            yield Figure(f"collector for a value: {name}", collector_cost(load, values), "ns CPU", note=note)


if __name__ == "__main__":
    command(__doc__, measure)
