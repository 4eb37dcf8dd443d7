"""What a collector's process pays for a record: real sockets, journal, acknowledgements, rank logs and merged log.

A driver pushes ready-made blocks of 700 norms over 8, 64 and 1,024 connections, as fast as they are acknowledged; what
is counted is the CPU time of the collector's process, between two moments when it has nothing to do. The baseline, in
the same run, is a process that takes the same messages over the same kind of socket and writes one `json.dumps` line a
record. Also measured: what printing the same lines and writing them costs without sockets, order and journal, which is
what limits the rest.

    python -m tests.bench.bench_collector [--records 3000000] [--connections 8 64 1024]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import zmq

from rankd.collector.memory import keep_freed_memory
from rankd.collector.protocol.normlines import load_numpy
from rankd.collector.protocol.records import Frame, NameTable, Position, RankBlock
from rankd.collector.protocol.wire import (
    Ack,
    Block,
    Data,
    Hello,
    Table,
    Tables,
    Welcome,
    decode_item,
    decode_message,
    encode_item,
    encode_message,
    number_item,
)
from rankd.collector.sinks.speclog import SpecLogSink

from .figures import Figure, command, median

NORMS = 700
NAMES = NameTable(tuple(f"decoder.layers.{i // 7}.self_attention.linear_{i % 7}.weight" for i in range(NORMS)))
MILLION = 1e6
# What one connection has on its way, in blocks; the agent's window is a mebibyte.
WINDOW = 16


@dataclass(slots=True)
class Connection:
    """One rank: its socket, and how many of its blocks are sent and acknowledged."""

    socket: zmq.Socket[bytes]
    rank: int
    body: bytes
    sent: int = 0
    acked: int = 0


def block_bytes(rank: int) -> bytes:
    """A block of 700 norms without its number."""
    source = random.Random(rank)
    norms = Frame.named("local_norm", NAMES, [source.lognormvariate(-3, 1) for _ in range(NORMS)])
    return encode_item(Block(0, 1, 1, True, 0.0, (norms,)), {NAMES: 1})


def numbered(body: bytes, number: int) -> bytes:
    """The `number`-th block (from 1): item number + 1 (the table is the first), at step `number`."""
    # The step follows the number: replaced where it stands, so that the driver does not pay for encoding.
    raw = number_item(body, number + 1)
    place = len(raw) - len(body) + 3
    step = encode_item(Block(0, number, 1, True, 0.0))
    width = 1 if number < 128 else 2 if number < 256 else 3
    return raw[:place] + step[3 : 3 + width] + raw[place + 1 :]


class Driver:
    """All connections to one receiver."""

    def __init__(self, endpoint: str, connections: int, body: Callable[[int], bytes] = block_bytes) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * connections + 64)
        self._poller = zmq.Poller()
        self.connections: dict[zmq.Socket[bytes], Connection] = {}
        for rank in range(connections):
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(endpoint)
            hello = Hello(rank.to_bytes(16, "little"), "", rank, connections, 1, "bench", os.getpid(), 0.0)
            socket.send(encode_message(hello))
            self.connections[socket] = Connection(socket, rank, body(rank))
            self._poller.register(socket, zmq.POLLIN)
        for connection in self.connections.values():
            assert isinstance(decode_message(connection.socket.recv()), Welcome)
            connection.socket.send(encode_message(Data((encode_item(Table(1, 1, NAMES)),))))

    def push(self, upto: int, but: int = 0, sent: Callable[[int], object] = lambda _: None) -> None:
        """Send each connection's blocks up to number `upto`, and wait until all of them are acknowledged.

        Args:
            but: so many of the last connections push nothing.
            sent: called with a rank before something of it is sent.
        """
        sockets = list(self.connections)[: len(self.connections) - but]
        waiting = {socket for socket in sockets if self.connections[socket].acked < upto}
        ready = deque(socket for socket in sockets if socket in waiting)
        while waiting:
            while ready:
                connection = self.connections[ready.popleft()]
                sent(connection.rank)
                self._fill(connection, upto)
            for socket, _ in self._poller.poll(30_000):
                connection = self.connections[socket]
                while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                    answer = decode_message(socket.recv())
                    assert isinstance(answer, Ack), answer
                    connection.acked = answer.seq - 1
                if connection.acked >= upto:
                    waiting.discard(socket)
                else:
                    ready.append(socket)

    def _fill(self, connection: Connection, upto: int) -> None:
        numbers = range(connection.sent + 1, min(upto, connection.acked + WINDOW) + 1)
        if numbers:
            connection.socket.send(encode_message(Data(tuple(numbered(connection.body, n) for n in numbers))))
            connection.sent = numbers[-1]

    def close(self) -> None:
        for socket in self.connections:
            socket.close()
        self._context.term()


def settled_cpu(process: psutil.Process) -> float:
    """Its CPU time, once it no longer grows."""
    before = -1.0
    while True:
        times = process.cpu_times()
        now = times.user + times.system
        if now == before:
            return float(now)
        before = now
        time.sleep(0.3)


@contextmanager
def rankd_collector(output: Path, more: Mapping[str, object] | None = None) -> Iterator[tuple[str, psutil.Process]]:
    """A collector, with `more` settings, and where it listens."""
    # For ever silent between pushes: nobody must be taken for lost.
    settings = {"output": str(output), "lost_after": 10_000, "max_hold": 10_000, **(more or {})}
    process = subprocess.Popen(
        [sys.executable, "-m", "rankd.collector", "collect", "--settings", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(json.dumps(settings).encode())
    connection = output / ".rankd" / "connection.json"
    while not connection.exists():
        time.sleep(0.01)
    try:
        yield json.loads(connection.read_text())["endpoint"], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def json_receiver(output: str) -> None:
    """The baseline: the same messages, a `json.dumps` line a record, acknowledged."""
    socket = zmq.Context().socket(zmq.ROUTER)
    print(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}", flush=True)
    tables: dict[bytes, tuple[int, Tables]] = {}
    with (Path(output) / "records.jsonl").open("w") as log:
        while True:
            peer, raw = socket.recv_multipart()
            message = decode_message(raw)
            if isinstance(message, Hello):
                tables[peer] = (message.rank, Tables())
                socket.send_multipart([peer, encode_message(Welcome("", 0, 1.0))])
                continue
            assert isinstance(message, Data)
            rank, known = tables[peer]
            for item in (decode_item(raw_item, known) for raw_item in message.items):
                if isinstance(item, Table):
                    known.define(item.table_id, item.table)
                    continue
                assert isinstance(item, Block)
                for frame in item.frames:
                    for name, value in zip(frame.names, frame.values, strict=True):
                        record = {"step": item.step, "micro_step": item.micro_step, "rank": rank}
                        log.write(json.dumps({**record, "metric": frame.metric, "name": name, "value": value}) + "\n")
            log.flush()
            socket.send_multipart([peer, encode_message(Ack(item.seq))])


@contextmanager
def json_baseline(output: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The baseline's process, and where it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, "--receive", str(output)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def measure_once(kind: str, connections: int, records: int) -> dict[str, float]:
    """Records per CPU second of the receiver's process, and per wall second; bytes of journal per record."""
    output = Path(tempfile.mkdtemp(prefix="rankd-bench-"))
    blocks = max(2, records // (NORMS * connections))
    receiver = rankd_collector if kind == "rankd" else json_baseline
    try:
        with receiver(output) as (endpoint, process):
            driver = Driver(endpoint, connections)
            driver.push(1)
            cpu, wall = settled_cpu(process), time.monotonic()
            journal = journal_bytes(output)
            driver.push(1 + blocks)
            wall = time.monotonic() - wall
            cpu = settled_cpu(process) - cpu
            journal = journal_bytes(output) - journal
            driver.close()
    finally:
        shutil.rmtree(output)
    done = blocks * connections * NORMS
    return {"per_cpu_second": done / cpu, "per_second": done / wall, "journal": journal / done}


def journal_bytes(output: Path) -> int:
    return sum(path.stat().st_size for path in (output / ".rankd" / "journal").glob("*"))


def text_only(records: int) -> float:
    """Records per CPU second of the sink alone: lines printed, and written to 8 rank logs and the merged one."""
    frames = [decode_item(number_item(block_bytes(rank), 1), known_tables()) for rank in range(8)]
    count = max(1, records // (8 * NORMS))
    keep_freed_memory()
    load_numpy()
    with tempfile.TemporaryDirectory(prefix="rankd-bench-") as folder:
        sink = SpecLogSink(Path(folder))
        before = time.process_time()
        for step in range(1, count + 1):
            sink.write([RankBlock(r, Position(1, step, 1), f.frames) for r, f in enumerate(frames) if type(f) is Block])
        seconds = time.process_time() - before
        sink.close()
    return count * 8 * NORMS / seconds


def known_tables() -> Tables:
    tables = Tables()
    tables.define(1, NAMES)
    return tables


def measure(args: argparse.Namespace) -> Iterator[Figure]:
    records, repeat = (300_000, 1) if args.quick else (args.records, args.repeat)
    rates: dict[int, float] = {}
    journal = 0.0
    for connections in args.connections:
        rounds = [
            (
                measure_once("rankd", connections, records),
                measure_once("json", connections, max(records // 10, 50_000)),
                text_only(records // 4),
            )
            for _ in range(repeat)
        ]
        rates[connections] = median(r["per_cpu_second"] for r, _, _ in rounds)
        journal = median(r["journal"] for r, _, _ in rounds)
        of_limit = median(r["per_cpu_second"] / limit for r, _, limit in rounds)
        wall = median(r["per_second"] for r, _, _ in rounds) / MILLION
        name = f"records per CPU second, {connections} connections"
        note = f"{of_limit:.2f} of printing and writing alone; {wall:.2f} M per wall second"
        yield Figure(name, rates[connections] / MILLION, "M", 3.0, True, note)
        against_json = median(r["per_cpu_second"] / b["per_cpu_second"] for r, b, _ in rounds)
        yield Figure("  of one json.dumps a record", against_json, "x")
    if 8 in rates and 1_024 in rates:
        yield Figure("1,024 connections, of 8", rates[1_024] / rates[8], "x", 0.9, True)
    wire = len(encode_message(Data((number_item(block_bytes(0), 10_000),))))
    yield Figure("bytes of a norm on the wire", wire / NORMS, "bytes", 10)
    yield Figure("bytes of a norm in the journal", journal, "bytes", 10)


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", type=int, default=3_000_000)
    parser.add_argument("--connections", type=int, nargs="+", default=[8, 64, 1_024])
    parser.add_argument("--repeat", type=int, default=3)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--receive"]:
        json_receiver(sys.argv[2])
    else:
        command(__doc__, measure, declare)
