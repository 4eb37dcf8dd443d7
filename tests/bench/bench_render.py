"""How many lines a second the text logs take, against one `json.dumps` a record in the same run.

A line is counted once, though it is made for the rank's log and for the merged log; so "3 M lines/s" prints six
million.

    python -m tests.bench.bench_render [--names 700] [--blocks 200]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from rankd.collector.protocol.records import Frame, NameTable, Position, RankBlock
from rankd.collector.protocol.speclog import Renderer, merged_text, parse

from .figures import Figure, command

# The best of several runs: the others measure what else the machine was doing.
_RUNS = 5


def blocks(names: int, count: int) -> list[RankBlock]:
    """Blocks of one rank: the local norms of `names` parameters at each of `count` micro-steps, and a loss."""
    rng = random.Random(7)
    table = NameTable(tuple(f"decoder.layers.{i // 10}.self_attention.linear_{i % 10}.weight" for i in range(names)))
    out = []
    for micro_step in range(1, count + 1):
        norms = Frame.named("local_norm", table, [rng.lognormvariate(-3, 2) for _ in range(names)])
        out.append(RankBlock(3, Position(1, 4, micro_step), (Frame.scalar("local_loss", rng.random()), norms)))
    return out


def render(released: list[RankBlock]) -> Iterator[bytes]:
    """The rank's text and the merged text of each block, as the sink makes them (and lets go of them)."""
    renderer = Renderer()
    for block in released:
        text = renderer.block(block)
        yield text
        yield merged_text(block.rank, text)


def dump(released: list[RankBlock]) -> Iterator[bytes]:
    """The baseline: one JSON object a record."""
    return (
        json.dumps(
            {"step": r.position.step, "rank": r.rank, "metric": r.metric, "name": r.name, "value": r.value}
        ).encode()
        for block in released
        for frame in block.frames
        for r in frame.records(block.position, block.rank)
    )


def _best(work: Callable[[], Iterable[object]]) -> float:
    times = []
    for _ in range(_RUNS):
        start = time.process_time()
        deque(work(), maxlen=0)
        times.append(time.process_time() - start)
    return min(times)


def measure(args: argparse.Namespace) -> Iterator[Figure]:
    released = blocks(args.names, 20 if args.quick else args.blocks)
    rank_lines = b"".join(list(render(released))[::2]).splitlines(keepends=True)
    lines = sum(frame.record_count for block in released for frame in block.frames)
    rendered, dumped = lines / _best(lambda: render(released)), lines / _best(lambda: dump(released))
    yield Figure("lines a second, rank and merged text", rendered / 1e6, "M")
    yield Figure("  of one json.dumps a record", rendered / dumped, "x")
    yield Figure("lines a second, parsed", lines / _best(lambda: parse(rank_lines, rank=3)) / 1e6, "M")


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--names", type=int, default=700)
    parser.add_argument("--blocks", type=int, default=200)


if __name__ == "__main__":
    command(__doc__, measure, declare)
