"""Records a wall second against rsyslog (Debian package), which gets the same lines over TCP.

rsyslogd writes a file a host and a merged one, as rankd writes one a rank and a merged one; 8 connections each. It gets
finished lines; a rank that makes them is not counted. rankd gets values, in order, acknowledged from the journal.

    python -m tests.bench.bench_rsyslog [--records 500000]
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from rankd.collector.protocol.records import Position, RankBlock
from rankd.collector.protocol.speclog import Renderer
from rankd.collector.protocol.wire import Block, decode_item, number_item

from .bench_collector import NORMS, block_bytes, known_tables, measure_once
from .figures import Figure, command, median, skipped

_CONNECTIONS = 8
_CONFIG = """
global(workDirectory="{folder}")
module(load="imtcp")
input(type="imtcp" port="{port}")
template(name="line" type="string" string="%msg:2:$%\\n")
template(name="merged" type="string" string="[%hostname%] %msg:2:$%\\n")
template(name="path" type="string" string="{folder}/%hostname%.log")
main_queue(queue.type="LinkedList" queue.size="1000000" queue.dequeueBatchSize="4096")
*.* action(type="omfile" dynaFile="path" template="line" dynaFileCacheSize="64" asyncWriting="off")
*.* action(type="omfile" file="{folder}/merged.log" template="merged")
"""


def messages(rank: int, blocks: int) -> bytes:
    """The syslog lines of one rank."""
    item = decode_item(number_item(block_bytes(rank), 1), known_tables())
    assert isinstance(item, Block)
    text = Renderer().block(RankBlock(rank, Position(1, 1, 1), item.frames)).splitlines()[1:]
    head = b"<14>1 2026-01-01T00:00:00Z rank_%d rankd - - - " % rank
    return b"".join([head + line + b"\n" for line in text]) * blocks


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def send(port: int, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(raw)


def lines_of(path: Path) -> int:
    return int(subprocess.run(["wc", "-l", str(path)], capture_output=True, text=True, check=True).stdout.split()[0])


def rsyslog_once(program: str, records: int) -> tuple[float, float]:
    """Records per wall second and per CPU second."""
    blocks = max(1, records // (NORMS * _CONNECTIONS))
    folder, port = Path(tempfile.mkdtemp(prefix="rankd-bench-")), free_port()
    (folder / "rsyslog.conf").write_text(_CONFIG.format(folder=folder, port=port))
    line = [program, "-n", "-f", str(folder / "rsyslog.conf"), "-i", str(folder / "pid")]
    raws = [messages(rank, blocks) for rank in range(_CONNECTIONS)]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port, process)
        times = psutil.Process(process.pid).cpu_times
        before, started = times(), time.monotonic()
        threads = [threading.Thread(target=send, args=(port, raw)) for raw in raws]
        for thread in threads:
            thread.start()
        wanted, merged = blocks * NORMS * _CONNECTIONS, folder / "merged.log"
        size = sum(map(len, raws)) // 2
        deadline = started + 120
        while not merged.exists() or merged.stat().st_size < size or lines_of(merged) < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rsyslogd has written {lines_of(merged)} of {wanted} lines")
            time.sleep(0.05)
        wall, after = time.monotonic() - started, times()
        for thread in threads:
            thread.join()
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder)
    return wanted / wall, wanted / (after.user + after.system - before.user - before.system)


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"rsyslogd does not listen (status {process.poll()})")


def measure(args: argparse.Namespace) -> Iterator[Figure]:
    program = shutil.which("rsyslogd") or shutil.which("rsyslogd", path="/usr/sbin")
    if program is None:
        yield skipped("records per wall second, of rsyslog", "rsyslogd is not here (Debian: apt-get install rsyslog)")
        return
    records, repeat = (50_000, 1) if args.quick else (args.records, 3)
    rounds = [(measure_once("rankd", _CONNECTIONS, 4 * records), rsyslog_once(program, records)) for _ in range(repeat)]
    wall = median(ours["per_second"] / theirs[0] for ours, theirs in rounds)
    cpu = median(ours["per_cpu_second"] / theirs[1] for ours, theirs in rounds)
    note = f"rsyslog {median(theirs[0] for _, theirs in rounds) / 1e6:.2f} M records per wall second"
    yield Figure("records per wall second, of rsyslog", wall, "x", 5, True, note)
    yield Figure("records per CPU second, of rsyslog", cpu, "x")


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", type=int, default=500_000)


if __name__ == "__main__":
    command(__doc__, measure, declare)
