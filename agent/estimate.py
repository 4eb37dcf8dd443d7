"""Pure: how much a configuration will record. A made-up step is rendered and encoded for real, and measured.

All figures are estimates: values have typical lengths, every parameter has a gradient, and nothing goes wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..collector.protocol.records import Frame, NameTable, Position, RankBlock
from ..collector.protocol.speclog import Renderer, merged_text
from ..collector.protocol.wire import Block, encode_item
from .config import AgentConfig

__all__ = ["Amount", "Estimate", "Row", "Shape", "estimate", "human_bytes", "human_size", "human_time"]

# Of typical length: a float32 loss as a float64, tokens of an expert, and a step in the middle of a long training.
_LOSS, _NORM, _TOKENS, _LOGIT = 2.345678949356079, 0.012345, 1_024.0, 12.34
_STEP = 10_000
_MICRO_STEP = 8
# Where the model is not given: a name as long as they usually are, and so many values of one layer.
_NAME = "decoder.layers.10.self_attention.linear_qkv.weight"
_LOGITS_NAME = "decoder.layers.10.self_attention.core_attention.max_logits_val"
_EXPERTS, _HEADS = 64, 16
# Around each item in the journal: length, checksum, session.
_ENTRY_BYTES = 24


@dataclass(frozen=True, slots=True)
class Shape:
    """The training that is estimated.

    Attributes:
        world_size, micro_steps: ranks, and micro-steps of a step.
        steps: its length; None: not known.
        step_seconds: how long a step takes.
        names: the trainable parameters; None: not known.
        experts: the MoE layers by name, and how many experts each has; None: not known.
    """

    world_size: int = 1
    micro_steps: int = 1
    steps: int | None = None
    step_seconds: float = 1.0
    names: tuple[str, ...] | None = None
    experts: tuple[tuple[str, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class Amount:
    """Records, lines of text, and bytes: of the text once, and of the journal."""

    records: float = 0.0
    lines: float = 0.0
    text: float = 0.0
    journal: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.records + other.records,
            self.lines + other.lines,
            self.text + other.text,
            self.journal + other.journal,
        )

    def times(self, factor: float) -> Amount:
        """So many of it."""
        return Amount(self.records * factor, self.lines * factor, self.text * factor, self.journal * factor)


@dataclass(frozen=True, slots=True)
class Row:
    """One metric: what it comes to in a step of one rank, on average.

    Attributes:
        metric: its name; "(headers)" for the lines that begin the blocks.
        when: when it is written, for a person.
        amount: of one step of one rank, on average; of one `each` where that is not None.
        each: what there are unknown numbers of: `parameter`, `MoE layer`, `attention layer`; None: the figure is whole.
    """

    metric: str
    when: str
    amount: Amount
    each: str | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """All of it.

    Attributes:
        rows: by metric.
        step: an average step of all ranks; without the rows whose number is not known.
        prefix: bytes that merged.log has before each line.
    """

    rows: tuple[Row, ...]
    step: Amount
    prefix: int

    @property
    def merged(self) -> float:
        """Bytes of merged.log in such a step."""
        return self.step.text + self.prefix * self.step.lines

    @property
    def disk(self) -> float:
        """Bytes that such a step leaves in the output directory, before anything is compressed or deleted: the text
        twice (rank logs and merged log), and the journal.
        """
        return self.step.text + self.merged + self.step.journal

    @property
    def complete(self) -> bool:
        """Whether nothing is left out of the sums."""
        return all(row.each is None for row in self.rows)


def estimate(config: AgentConfig, shape: Shape) -> Estimate:
    """What `config` records in a training of this shape."""
    every = config.monitor_config.rates.written_every
    rows = [
        *_losses(config, shape, every),
        *_norms(config, shape, every),
        *_experts(config, shape),
        *_logits(config),
        _row("step summary", every, False, _summary()),
    ]
    rows.append(_headers(rows, shape, every))
    rank = Amount()
    for row in rows:
        if row.each is None:
            rank += row.amount
    step = rank.times(shape.world_size)
    prefix = len(merged_text(shape.world_size - 1, b"\n")) - 1
    return Estimate(tuple(rows), step, prefix)


def _losses(config: AgentConfig, shape: Shape, every: int) -> list[Row]:
    rows = []
    if config.local_loss:
        rows.append(_row("local_loss", every, True, [Frame.scalar("local_loss", _LOSS)], times=shape.micro_steps))
    if config.monitor.train_state.device_loss:
        rows.append(_row("device_loss", every, False, [Frame.scalar("device_loss", _LOSS)]))
    return rows


def _norms(config: AgentConfig, shape: Shape, every: int) -> list[Row]:
    rows = []
    for metric, times in (("local_norm", shape.micro_steps), ("device_norm", 1)):
        chosen = getattr(config.monitor.train_state, metric)
        if not chosen:
            continue
        names = (_NAME,) if shape.names is None else tuple(filter(chosen.matches, shape.names))
        if names:
            frame = Frame.named(metric, NameTable(names), [_NORM] * len(names))
            each = "parameter" if shape.names is None else None
            rows.append(_row(metric, every, metric == "local_norm", [frame], times=times, each=each))
    return rows


def _experts(config: AgentConfig, shape: Shape) -> list[Row]:
    interval = config.monitor.moe_monitor.save_tokens_per_expert_interval
    layers = (("decoder.10", _EXPERTS),) if shape.experts is None else shape.experts
    if interval is None or not layers:
        return []
    table = NameTable(tuple(name for name, _ in layers))
    frame = Frame.lists("tpe", table, [[_TOKENS] * count for _, count in layers], _STEP)
    each = f"MoE layer of {_EXPERTS} experts" if shape.experts is None else None
    return [_row("tpe", interval, True, [frame], times=shape.micro_steps, each=each, unit="micro-step")]


def _logits(config: AgentConfig) -> list[Row]:
    if config.max_logits is None or not config.max_logits.enable_logging:
        return []
    frame = Frame.lists("max_attention_logit", NameTable((_LOGITS_NAME,)), [[_LOGIT] * _HEADS])
    each = f"attention layer of {_HEADS} heads"
    return [_row("max_attention_logit", config.max_logits.step_interval, False, [frame], each=each)]


def _summary() -> list[Frame]:
    return [Frame.scalar(name, _LOSS) for name in ("loss", "step_time_ms", "lr", "grad_norm")]


def _headers(rows: Sequence[Row], shape: Shape, every: int) -> Row:
    """The lines that begin the blocks: of each micro-step that has something, and of the step."""
    in_micro_steps = any(row.metric in ("local_loss", "local_norm") for row in rows)
    micro_steps = shape.micro_steps if in_micro_steps else 0
    header = Amount(0, 1, _header_bytes(None)) + Amount(0, micro_steps, micro_steps * _header_bytes(_MICRO_STEP))
    return Row("(headers)", _when(every, "step"), header.times(1 / every))


def _header_bytes(micro_step: int | None) -> int:
    frame = Frame.scalar("x", _LOSS)
    text = Renderer().block(RankBlock(0, Position(1, _STEP, micro_step), (frame,)))
    return len(text.splitlines(keepends=True)[0])


def _row(
    metric: str,
    every: int,
    in_micro_step: bool,
    frames: list[Frame],
    *,
    times: int = 1,
    each: str | None = None,
    unit: str = "step",
) -> Row:
    position = Position(1, _STEP, _MICRO_STEP if in_micro_step else None)
    text = Renderer().block(RankBlock(0, position, tuple(frames), total_steps=_STEP))
    lines = text.splitlines(keepends=True)[1:]
    ids = {frame.table: 1 for frame in frames if frame.table is not None}
    item = encode_item(Block(1, _STEP, position.micro_step, True, 1e9, tuple(frames)), ids)
    amount = Amount(
        sum(frame.record_count for frame in frames), len(lines), sum(map(len, lines)), len(item) + _ENTRY_BYTES
    )
    return Row(metric, _when(every, unit, in_micro_step and unit == "step"), amount.times(times / every), each)


def _when(every: int, unit: str, in_micro_step: bool = False) -> str:
    steps = f"every {unit}" if every == 1 else f"every {every} {unit}s"
    return f"each micro-step, {steps}" if in_micro_step else steps


def human_bytes(count: float) -> str:
    """`1.5 GB`, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1_000
    return f"{count:.3g} TB" if count < 999.5 else f"{count:,.0f} TB"


def human_size(count: float) -> str:
    """`64 MiB` where that is all of it, as sizes are written in the configuration; otherwise as `human_bytes`."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        whole, rest = divmod(count, 1_024**power)
        if whole and not rest:
            return f"{whole:.0f} {unit}"
    return human_bytes(count)


def human_time(seconds: float) -> str:
    """`1.5 h`, in the largest unit that is not more than it."""
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"
