"""What a put costs the training thread: a block of 700 norms, over memory and over the spool file.

Run it with `python tests/bench/bench_outbox.py`; prints microseconds, and the ratio against a plain deque's append.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from rankd.agent.outbox import Outbox
from rankd.agent.spool import Spool
from rankd.agent.store import MemoryStore, Store
from rankd.collector.protocol.records import Frame, NameTable
from rankd.collector.protocol.wire import Block, Hello, encode_item

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


def show(name: str, times: list[float], baseline: float) -> float:
    """Print one row; the median."""
    cut = statistics.quantiles(times, n=1_000)
    middle = statistics.median(times)
    print(
        f"{name:24} median {middle:7.2f}  p99 {cut[989]:7.2f}  p99.9 {cut[998]:7.2f}  max {max(times):8.2f} us"
        f"  ratio {middle / (baseline or middle):6.1f}"
    )
    return middle


def main() -> None:
    raw = block()
    print(f"block of {len(raw)} bytes, {PUTS} puts")
    plain: deque[bytes] = deque(maxlen=ACK_EVERY)
    baseline = show("deque.append (baseline)", measure(lambda _: plain.append(raw), lambda _: None), 0.0)
    show("outbox over memory", over(MemoryStore(SIZE), raw), baseline)
    places = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    hello = Hello(bytes(16), "", 0, 1, 1, "here", 1, 0.0)
    for place in (p for p in places if p.is_dir()):
        with tempfile.TemporaryDirectory(dir=place) as directory:
            spool = Spool.create(Path(directory) / "bench.spool", SIZE, hello)
            show(f"outbox over {place}", over(spool, raw), baseline)
            spool.close(delivered=True)


if __name__ == "__main__":
    main()
