"""How soon `rankd tail` shows lines of a log of some gigabytes, and what the index costs the collector.

The log is made cheaply: a step's blocks are rendered once, and their text is written again and again with another
step's number in the headers, and the index with it. Baselines of the same run: an empty Python, and reading the last
1 % of the log.

    python -m tests.bench.bench_tail [--gigabytes 0.5] [--ranks 8] [--folder DIR]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rankd.collector.protocol.records import Frame, NameTable, Position, RankBlock
from rankd.collector.protocol.speclog import Renderer, merged_text
from rankd.collector.sinks.gzipped import compress
from rankd.collector.sinks.merged_index import MERGED_INDEX, IndexWriter
from rankd.collector.sinks.parts import part_path
from rankd.collector.sinks.speclog import MERGED_LOG, SpecLogSink

from .figures import Figure, command

_NAMES = 60
_RUNS = 5
_MARK = 999_999
_PART = 256 * 2**20


def a_step(step: int, ranks: int) -> list[RankBlock]:
    """One micro-step of all ranks: a loss and norms."""
    table = NameTable(tuple(f"decoder.layers.{i // 10}.self_attention.linear_{i % 10}.weight" for i in range(_NAMES)))
    frames = (Frame.scalar("local_loss", 0.25), Frame.named("local_norm", table, [0.1 + i for i in range(_NAMES)]))
    return [RankBlock(rank, Position(1, step, 1), frames) for rank in range(ranks)]


def make_log(output: Path, size: int, ranks: int) -> int:
    """A merged log of about `size` bytes with its index; how many steps it has."""
    renderer = Renderer()
    texts = [merged_text(block.rank, renderer.block(block)) for block in a_step(_MARK, ranks)]
    index, step, written = IndexWriter(), 0, 0
    (output / ".rankd").mkdir(parents=True)
    with (output / MERGED_LOG).open("wb") as log, (output / MERGED_INDEX).open("wb") as entries:
        blocks = [RankBlock(rank, Position(1, 1, 1), ()) for rank in range(ranks)]
        while written < size:
            step += 1
            for text, block in zip(texts, blocks, strict=True):
                line = text.replace(b'"step": %d' % _MARK, b'"step": %d' % step)
                entries.write(index.take(RankBlock(block.rank, Position(1, step, 1), ()), len(line)))
                written += log.write(line)
    return step


def rotate(output: Path) -> None:
    """Cut the merged log into parts, and compress them."""
    log = output / MERGED_LOG
    size = log.stat().st_size
    with log.open("rb") as file:
        at = 0
        while size - at > _PART:
            file.seek(at + _PART)
            end = at + _PART + len(file.readline())
            source = os.open(part_path(log, at, end), os.O_RDWR | os.O_CREAT)
            target = os.open(str(part_path(log, at, end)) + ".gz", os.O_WRONLY | os.O_CREAT)
            os.sendfile(source, file.fileno(), at, end - at)
            compress(source, target, end - at)
            os.close(source)
            os.close(target)
            part_path(log, at, end).unlink()
            at = end
        file.seek(at)
        rest = file.read()
    log.write_bytes(rest)


def timed(*command: object) -> float:
    """CPU seconds, the best of several runs."""
    cpu = []
    for _ in range(_RUNS):
        before = _cpu_of_children()
        subprocess.run([*map(str, command)], stdout=subprocess.DEVNULL, check=True)
        cpu.append(_cpu_of_children() - before)
    return min(cpu)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def first_line(*command: object) -> float:
    """Until the first byte of the output, the best of several runs."""
    times = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            times.append(time.perf_counter() - start)
            process.stdout.close()
    return min(times)


def cost_of_index(names: int) -> tuple[float, float]:
    """Blocks per second that the sink writes without and with an index; a block is a loss and `names` norms."""
    table = NameTable(tuple(f"decoder.layers.{i}.weight" for i in range(names or 1)))
    frames: tuple[Frame, ...] = (Frame.scalar("local_loss", 0.25),)
    if names:
        frames += (Frame.named("local_norm", table, [0.1] * names),)
    steps = range(1, 400 if names == 0 else 20)
    blocks = [RankBlock(rank, Position(1, step, 1), frames) for step in steps for rank in range(64)]

    def write(index: bool) -> Callable[[], None]:
        def run() -> None:
            with tempfile.TemporaryDirectory() as folder:
                sink = SpecLogSink(Path(folder), index=index)
                for at in range(0, len(blocks), 2_000):
                    sink.write(blocks[at : at + 2_000])
                sink.close()

        return run

    # By turns: what else the machine does shall meet both.
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_RUNS):
        for index in (False, True):
            start = time.process_time()
            write(index)()
            times[index].append(time.process_time() - start)
    return len(blocks) / min(times[False]), len(blocks) / min(times[True])


def measure(args: argparse.Namespace) -> Iterator[Figure]:
    gigabytes = 0.05 if args.quick else args.gigabytes
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        output = Path(folder) / "run"
        steps = make_log(output, int(gigabytes * 1e9), args.ranks)
        size = (output / MERGED_LOG).stat().st_size
        tail = (sys.executable, "-m", "rankd.collector", "tail", output)
        start = timed(sys.executable, "-c", "pass")
        yield Figure("an empty Python", start, "s CPU")
        last = timed("tail", "-c", size // 100, output / MERGED_LOG)
        yield Figure(f"tail -c of the last 1 % of {size / 1e9:.2f} GB", last, "s CPU")
        middle = steps // 2
        for indexed in ("with", "rotated, compressed, with", "rotated, compressed, without"):
            if indexed.startswith("rotated") and (output / MERGED_LOG).stat().st_size > _PART:
                started = time.process_time()
                rotate(output)
                packed = sum(path.stat().st_size for path in output.glob("merged.log.*"))
                yield Figure("compressed parts, of the text", packed / size, "x")
                yield Figure("compressing", size / (time.process_time() - started) / 1e6, "MB/s of one processor")
            yield Figure(f"rankd tail -n 100 --rank 3, {indexed} index", timed(*tail, "-n", 100, "--rank", 3), "s CPU")
            line = first_line(*tail, "--step", f"{middle}:")
            yield Figure(f"rankd tail --step {middle}: to the first line, {indexed} index", line, "s")
            if indexed.startswith("rotated"):
                (output / MERGED_INDEX).unlink(missing_ok=True)
    for names in (0, 700):
        without, with_index = cost_of_index(names)
        yield Figure(f"sink with an index, of one without: {names} norms", without / with_index, "x CPU")


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--folder", help="where the log is made; default: a temporary one")


if __name__ == "__main__":
    command(__doc__, measure, declare)
