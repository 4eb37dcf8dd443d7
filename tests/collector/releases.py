"""Released blocks as the ordering gives them, for tests of sinks and readers; and the logs that they make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rankd.collector.protocol.records import Comment, Frame, NameTable, Position, RankBlock
from rankd.collector.run import Released
from rankd.collector.sinks.retention import Rotation
from rankd.collector.sinks.speclog import SpecLogSink

NAMES = NameTable(("decoder.layers.0.weight", "decoder.layers.1.weight", "层.权重", "back\\slash"))


def steps(first: int, last: int, *, ranks: Sequence[int] = (0, 1, 2), attempt: int = 1) -> list[Released]:
    """These steps of these ranks: two micro-steps with a loss and norms, then the step's own records."""
    out: list[Released] = []
    for step in range(first, last + 1):
        for micro in (1, 2):
            for rank in ranks:
                value = step + rank / 8
                norms = Frame.named("local_norm", NAMES, [value + i for i in range(len(NAMES))])
                of_micro = (Frame.scalar("local_loss", value), norms)
                out.append(RankBlock(rank, Position(attempt, step, micro), of_micro, time=float(step)))
        for rank in ranks:
            frames = (Frame.scalar("lr", 1e-3), Frame.scalar("loss", step / 2), Frame.scalar("mine", 0.5))
            out.append(RankBlock(rank, Position(attempt, step), frames, total_steps=last, time=float(step)))
    return out


def begin(attempt: int, *, ranks: Sequence[int] = (0, 1, 2)) -> list[Released]:
    """The lines that begin an attempt, as a run announces them before its first block."""
    text = f"{attempt} world_size {len(ranks)}"
    return [Comment(None, "attempt", text), *(Comment(rank, "attempt", text) for rank in ranks)]


def late(step: int, rank: int, attempt: int = 1) -> RankBlock:
    """A block that the merged log had passed already."""
    return RankBlock(rank, Position(attempt, step, 1), (Frame.scalar("local_loss", -1.0),), late=True)


def write_logs(
    output: Path,
    released: Iterable[Released],
    *,
    index: bool = True,
    each: int = 7,
    rotation: Rotation | None = None,
) -> None:
    """The logs of what is released, `each` so many in one write."""
    sink = SpecLogSink(output, index=index, rotation=rotation)
    everything = list(released)
    for at in range(0, len(everything), each):
        sink.write(everything[at : at + each])
    sink.close()
