"""What a collector's process pays for a record: real sockets, journal, acknowledgements, rank logs and merged log.

A driver pushes ready-made blocks of 700 norms over 8, 64 and 1,024 connections, as fast as they are acknowledged; what
is counted is the CPU time of the collector's process, between two moments when it has nothing to do. The baseline, in
the same run, is a process that takes the same messages over the same kind of socket and writes one `json.dumps` line a
record.

    python tests/bench/bench_collector.py [--records 3000000] [--connections 8 64 1024] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import zmq

from rankd.collector.protocol.records import Frame, NameTable
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

NORMS = 700
NAMES = NameTable(tuple(f"decoder.layers.{i // 7}.self_attention.linear_{i % 7}.weight" for i in range(NORMS)))
# What one connection has on its way, in blocks; the agent's window is a mebibyte.
WINDOW = 16


@dataclass(slots=True)
class Connection:
    """One rank: its socket, and how many of its blocks are sent and acknowledged."""

    socket: zmq.Socket[bytes]
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

    def __init__(self, endpoint: str, connections: int) -> None:
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
            self.connections[socket] = Connection(socket, block_bytes(rank))
            self._poller.register(socket, zmq.POLLIN)
        for connection in self.connections.values():
            assert isinstance(decode_message(connection.socket.recv()), Welcome)
            connection.socket.send(encode_message(Data((encode_item(Table(1, 1, NAMES)),))))

    def push(self, upto: int) -> None:
        """Send each connection's blocks up to number `upto`, and wait until all of them are acknowledged."""
        waiting = set(self.connections)
        ready = deque(self.connections)
        while waiting:
            while ready:
                self._fill(self.connections[ready.popleft()], upto)
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

    @staticmethod
    def _fill(connection: Connection, upto: int) -> None:
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
def rankd_collector(output: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A collector, and where it listens."""
    # For ever silent between pushes: nobody must be taken for lost.
    settings = {"output": str(output), "lost_after": 10_000, "max_hold": 10_000}
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
    process = subprocess.Popen([sys.executable, __file__, "--receive", str(output)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def measure(kind: str, connections: int, records: int) -> dict[str, float]:
    """Records per CPU second of the receiver's process, and per wall second."""
    output = Path(tempfile.mkdtemp(prefix="rankd-bench-"))
    blocks = max(2, records // (NORMS * connections))
    receiver = rankd_collector if kind == "rankd" else json_baseline
    try:
        with receiver(output) as (endpoint, process):
            driver = Driver(endpoint, connections)
            driver.push(1)
            cpu, wall = settled_cpu(process), time.monotonic()
            driver.push(1 + blocks)
            wall = time.monotonic() - wall
            cpu = settled_cpu(process) - cpu
            rss = process.memory_info().rss
            driver.close()
    finally:
        shutil.rmtree(output)
    done = blocks * connections * NORMS
    return {"per_cpu_second": done / cpu, "per_second": done / wall, "rss_mb": rss / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=3_000_000)
    parser.add_argument("--connections", type=int, nargs="+", default=[8, 64, 1_024])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive:
        json_receiver(args.receive)
        return
    print(f"{NORMS} norms a block, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; medians of {args.repeat}")
    results = []
    for connections in args.connections:
        rounds = [
            (measure("rankd", connections, args.records), measure("json", connections, max(args.records // 10, 50_000)))
            for _ in range(args.repeat)
        ]
        per_cpu = statistics.median(r["per_cpu_second"] for r, _ in rounds)
        ratio = statistics.median(r["per_cpu_second"] / b["per_cpu_second"] for r, b in rounds)
        wall = statistics.median(r["per_second"] for r, _ in rounds)
        rss = max(r["rss_mb"] for r, _ in rounds)
        print(
            f"{connections:5} connections: {per_cpu / 1e6:.2f} M records per CPU second, "
            f"{wall / 1e6:.2f} M/s acknowledged, {ratio:.1f} x one json.dumps a record, {rss:.0f} MB",
            flush=True,
        )
        results.append({"connections": connections, "per_cpu_second": per_cpu, "ratio_to_json": ratio, "rss_mb": rss})
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
