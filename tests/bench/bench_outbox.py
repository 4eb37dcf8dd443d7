"""What a put costs the training thread, and how much of the interpreter the agent takes.

A block of 700 norms goes over memory and over the spool file; microseconds, and the ratio against a plain deque's
append. Then an agent pushes 10 micro-steps a second; the CPU time of its calls and of its Python thread is the most
that they can hold the interpreter's lock for.

    python -m tests.bench.bench_outbox
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from rankd.agent import Agent
from rankd.agent.config import AgentConfig
from rankd.agent.outbox import Outbox
from rankd.agent.spool import Spool
from rankd.agent.store import MemoryStore, Store
from rankd.collector.protocol.records import Frame, NameTable
from rankd.collector.protocol.wire import Block, Hello, encode_item

from .figures import Figure, command

PUTS = 20_000
SIZE = 64 * 2**20
# A batch is acknowledged this often, so that the ring goes round and nothing is refused.
ACK_EVERY = 64


def block() -> bytes:
    """A micro-step of 700 parameters."""
    table = NameTable(tuple(f"decoder.layers.{i // 10}.part_{i % 10}.weight" for i in range(700)))
    frame = Frame.named("local_norm", table, [0.1 * i for i in range(700)])
    return encode_item(Block(0, 1, 1, True, 0.0, (frame,)), {table: 1})


def measure(put: Callable[[int], None], between: Callable[[int], None]) -> list[float]:
    """Microseconds of each `put`, with `between` outside the measurement."""
    out = []
    for i in range(PUTS):
        start = time.perf_counter_ns()
        put(i)
        out.append((time.perf_counter_ns() - start) / 1_000)
        between(i)
    return out


def over(store: Store, raw: bytes) -> list[float]:
    """Puts into an outbox over `store`."""
    outbox = Outbox(store)

    def put(_: int) -> None:
        assert outbox.put((raw,), records=700, at=(1, 1))

    def between(i: int) -> None:
        if i % ACK_EVERY == ACK_EVERY - 1:
            while outbox.take():
                outbox.acked(outbox.next_seq - 1)

    return measure(put, between)


def interpreter_share(seconds: float) -> tuple[float, float]:
    """Percent of the time that the calls, and the sender thread, of an agent run at 10 micro-steps a second."""
    table = NameTable(tuple(f"decoder.layers.{i // 10}.part_{i % 10}.weight" for i in range(700)))
    frames = [Frame.named("local_norm", table, [0.1 * i for i in range(700)])]
    calls = 0.0
    with tempfile.TemporaryDirectory() as output:
        config = AgentConfig.from_mapping({"rankd": {"output": output}})
        with Agent(config, rank=0, world_size=1) as agent:
            while not agent.connected:
                time.sleep(0.01)
            (sender,) = [thread for thread in threading.enumerate() if thread.name == "rankd-sender"]
            task = Path(f"/proc/self/task/{sender.native_id}/schedstat")
            before, started = int(task.read_text().split()[0]), time.monotonic()
            for step in range(1, round(seconds * 10 / 4) + 1):
                with agent.step(step):
                    for _ in range(4):
                        begin = time.thread_time()
                        agent.micro_step(frames=frames)
                        calls += time.thread_time() - begin
                        time.sleep(0.1)
            wall = time.monotonic() - started
            thread = (int(task.read_text().split()[0]) - before) / 1e9
    return 100 * calls / wall, 100 * thread / wall


def percentiles(times: list[float]) -> tuple[float, float, str]:
    """Median, 99th percentile, and the rest as a note."""
    cut = statistics.quantiles(times, n=1_000)
    return statistics.median(times), cut[989], f"p99.9 {cut[998]:.1f}, most {max(times):.0f}"


def measure_all(args: argparse.Namespace) -> Iterator[Figure]:
    raw = block()
    plain: deque[bytes] = deque(maxlen=ACK_EVERY)
    baseline = statistics.median(measure(lambda _: plain.append(raw), lambda _: None))
    _, p99, note = percentiles(over(MemoryStore(SIZE), raw))
    yield Figure("put of 700 norms, over memory: p99", p99, "us", 50, note=note)
    hello = Hello(bytes(16), "", 0, 1, 1, "here", 1, 0.0)
    for place in (p for p in (Path(tempfile.gettempdir()), Path("/dev/shm")) if p.is_dir()):
        with tempfile.TemporaryDirectory(dir=place) as directory:
            spool = Spool.create(Path(directory) / "bench.spool", SIZE, hello)
            middle, p99, note = percentiles(over(spool, raw))
            spool.close(delivered=True)
        yield Figure(f"put of 700 norms, over a spool in {place}: p99", p99, "us", 50, note=note)
        yield Figure("  median", middle, "us", note=f"{middle / baseline:.0f} x a deque's append")
    calls, thread = interpreter_share(2.0 if args.quick else 8.0)
    yield Figure("sender thread, of the time, at 10 micro-steps/s", thread, "%", 0.5, note="with what it runs unlocked")
    yield Figure("training thread's calls, of the time", calls, "%")


if __name__ == "__main__":
    command(__doc__, measure_all)
