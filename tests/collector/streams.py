"""Streams of items as an agent makes them, for tests of the pure core: whole trainings, cut, doubled and mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankd.collector.entries import Checkpoint, Entry, Opened, decode_entry, encode_entry
from rankd.collector.protocol.records import Frame, NameTable
from rankd.collector.protocol.wire import Block, Goodbye, Hello, Item, Note, Table, encode_item
from rankd.collector.run import HELD_BYTES, Released, Run

NAMES = NameTable(("decoder.layers.0.weight", "decoder.layers.1.weight", "output.bias"))


def hello(rank: int, world_size: int, *, process: int = 1, total_steps: int | None = None) -> Hello:
    """The hello of the `process`-th process of a rank."""
    token = bytes([rank % 256, rank // 256, process]) + bytes(13)
    return Hello(token, "", rank, world_size, 1, f"node{rank // 8}", 1000 * process + rank, 0.0, total_steps)


@dataclass(frozen=True)
class Training:
    """What one process of one rank produces: its hello and its encoded items."""

    hello: Hello
    items: tuple[bytes, ...]


def training(
    rank: int,
    world_size: int,
    *,
    steps: Sequence[int] = (1, 2),
    micro_steps: int = 2,
    process: int = 1,
    names: NameTable = NAMES,
    goodbye: str | None = "done",
    last_micro_step: int | None = None,
    exception: str | None = None,
) -> Training:
    """A whole training; `last_micro_step` cuts its last step there; `goodbye` None: it was killed."""
    items: list[Item] = [Table(1, 1, names)]

    def push(step: int, micro: int | None, *frames: Frame) -> None:
        items.append(Block(len(items) + 1, step, micro, complete=True, time=float(step), frames=frames))

    for step in steps:
        cut = last_micro_step if step == steps[-1] else None
        for micro in range(1, (cut or micro_steps) + 1):
            value = rank + step / 10 + micro / 100
            norms = Frame.named("local_norm", names, [value + i for i in range(len(names))])
            push(step, micro, Frame.scalar("local_loss", value), norms)
        if cut is None:
            push(step, None, Frame.scalar("device_loss", float(step)), Frame.scalar("lr", 1e-3))
    if exception is not None:
        items.append(Note(len(items) + 1, steps[-1], last_micro_step, "exception", exception, 0.0))
    if goodbye is not None:
        produced = sum(item.record_count for item in items if isinstance(item, Block))
        items.append(Goodbye(len(items) + 1, goodbye, produced, {}, 0.0))
    ids = {names: 1}
    return Training(hello(rank, world_size, process=process), tuple(encode_item(item, ids) for item in items))


class Core:
    """A run under test: delivers items as the server does, and keeps entries and what was released.

    `held_bytes` 0: everything that waits is read back from the journal (here: a list).
    """

    def __init__(self, held_bytes: int = HELD_BYTES) -> None:
        self.run = Run(self.fetch, held_bytes=held_bytes)
        self.entries: list[Entry] = []
        self.released: list[Released] = []

    def apply(self, entry: Entry) -> list[Released]:
        """Journal and apply one entry."""
        self.entries.append(entry)
        out = self.run.apply(entry, len(self.entries) - 1)
        self.released += out
        return out

    def fetch(self, reference: int) -> bytes:
        """What the journal has at this place."""
        return encode_entry(self.entries[reference])

    def restart(self) -> None:
        """The collector dies here and goes on from a checkpoint, whose bytes went through a file."""
        checkpoint = decode_entry(encode_entry(Checkpoint(self.run.freeze(), {})))
        assert isinstance(checkpoint, Checkpoint)
        self.run = Run.thaw(checkpoint.state, self.fetch)

    def open(self, training: Training) -> None:
        """Let a process in."""
        self.apply(Opened(training.hello))

    def deliver(self, training: Training, start: int = 0, stop: int | None = None) -> list[Released]:
        """Deliver items `start` to `stop` (indices) of a training; those seen before are skipped by the intake."""
        session = self.run.intake.session(training.hello.session)
        assert session is not None
        admitted = self.run.intake.admit(session, training.items[start:stop])
        return self.apply(self.run.admitted(admitted)) if admitted.raws else []

    def replayed(self) -> list[Released]:
        """What the journal's bytes give when read again."""
        again, released = Run(self.fetch), []
        for reference in range(len(self.entries)):
            entry = decode_entry(self.fetch(reference))
            assert not isinstance(entry, Checkpoint)
            released += again.apply(entry, reference)
        return released
