"""The text of the spec format, written and read back."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rankd.collector.protocol import normlines, speclog
from rankd.collector.protocol.errors import LimitError, RankdError, RecordError, SpecLogError
from rankd.collector.protocol.normlines import load_numpy
from rankd.collector.protocol.records import (
    MAX_NAME_BYTES,
    SUMMARY_FIELDS,
    Comment,
    Frame,
    Level,
    NameTable,
    Position,
    RankBlock,
    Record,
    metric_of,
)
from rankd.collector.protocol.speclog import Renderer, merged_text, parse

GOLDEN = Path(__file__).parent / "golden"
NAN, INF, LARGEST = math.nan, math.inf, sys.float_info.max
Released = RankBlock | Comment


def block(step: int, micro_step: int | None, *frames: Frame, total: int | None = None, rank: int = 3) -> RankBlock:
    return RankBlock(rank, Position(1, step, micro_step), frames, total_steps=total)


def scalar(metric: str, value: float) -> Frame:
    return Frame.scalar(metric, value)


def rank_text(released: Iterable[Released], renderer: Renderer | None = None) -> bytes:
    renderer = renderer or Renderer()
    return b"".join(renderer.block(r) if isinstance(r, RankBlock) else renderer.comment(r) for r in released)


def merged(released: Iterable[Released]) -> bytes:
    renderer = Renderer()
    return b"".join(merged_text(r.rank, rank_text([r], renderer)) for r in released)


def _norms(names: Sequence[str], values: Sequence[float], metric: str = "local_norm") -> Frame:
    return Frame.named(metric, NameTable(tuple(names)), values)


def _spec_example() -> list[Released]:
    norm = ["decoder.layers.0.self_attention.q_layernorm.weight"]
    logits = NameTable(("decoder.layers.0.self_attention.core_attention.max_logits_val",))
    # Produced in another order than the log prints them in.
    micro = (
        Frame.lists("tpe", NameTable(("mtp.0.0", "decoder.3")), [[50, 50, 141, 127], [128, 64, 96, 80]], 30),
        _norms(norm, [0.000381]),
        scalar("local_loss", 0.123),
    )
    step = (
        scalar("grad_norm", 1.166702),
        scalar("lr", 1e-3),
        scalar("loss", 4.864965),
        Frame.lists("max_attention_logit", logits, [[0.01289, 0.01189]]),
        scalar("step_time_ms", 843.2),
        _norms(norm, [0.000402], "device_norm"),
        scalar("device_loss", 0.119),
    )
    return [block(4, 2, *micro, total=100), block(4, None, *step, total=100)]


def _norm_lines() -> list[Released]:
    table = NameTable(("a", "b", "c", "d", "e", "f", "g"))
    return [
        block(1, 1, Frame.named("local_norm", table, [1.5, -0.25, -0.0, 123456789, NAN, INF, -INF])),
        block(1, 2, Frame.named("local_norm", table, [2, 3], present=[1, 6])),
        block(1, None, _norms("a", [6e-7], "device_norm")),
    ]


NASTY_NAMES = (
    "100%d %% %(x)s",
    "a: b:   0.5 }",
    '"quoted" {x} [y]',
    "back\\slash\\n",
    "line\nfeed\t\r\0\x1b[31m\x7f\x85",
    "\u2028\u2029\u202e\u2066\u200f\u061c",
    "层.权重 µ 🙂",
    " lead and trail ",
)


def _tpe_lines() -> list[Released]:
    first = Frame.lists("tpe", NameTable(("decoder.10", "mtp.1.0", "decoder.2")), [[3, 2**53], [4, 0, 6], [1, 2]], 9)
    second = Frame.lists("tpe", NameTable(("mtp.0.5", "decoder.11")), [[], [7]], 9)
    return [block(2, 1, first, second)]


def _logit_lines() -> list[Released]:
    def logits(names: Sequence[str], lists: Sequence[Sequence[float]]) -> Frame:
        return Frame.lists("max_attention_logit", NameTable(tuple(names)), lists)

    return [
        block(123456, None, logits(["a%", "b: [1"], [[1.23456, 1e10, -0.5], []]), total=1000000),
        block(123457, None, logits(["mean"], [[NAN, INF, -INF]])),
        block(123458, None, logits(["empty"], [[]])),
    ]


def _summary_lines() -> list[Released]:
    full = [scalar(name, v) for name, v in zip(SUMMARY_FIELDS, [1, 2, 11.5, 3e-5, 4.5, 6], strict=True)]
    again = [scalar("throughput", 123456.789), scalar("loss", 1.25), scalar("loss", NAN)]
    odd = [scalar(n, v) for n, v in zip(SUMMARY_FIELDS[:5], [NAN, INF, -INF, NAN, -INF], strict=True)]
    return [
        block(1, None, *full[::-1], *again),
        block(2, None, *odd, total=3),
        block(3, None, scalar("step_time_ms", NAN), total=3),
    ]


def _user_scalar_lines() -> list[Released]:
    name = 'a "b": %d \\ \n\u202e 温度'
    micro = [scalar("z", 1), scalar(name, 2.5e-300), scalar("loss", NAN), scalar("z", -INF)]
    step = [scalar("reward", 5e-324), scalar("lr", 1e-3), scalar("device_loss", 1)]
    return [block(1, 1, *micro), block(1, None, *step, total=9)]


def _comment_lines() -> list[Released]:
    gap, anomaly = Comment(3, "gap", "12 records (spool_full)"), Comment(3, "anomaly", "grad_norm nan")
    return [
        Comment(3, "attempt", "2 world_size 8"),
        Comment(3, "lost", ""),
        Comment(3, "od d", "\ta line\nand \\ % 100 – ünïcode\ud800"),
        RankBlock(3, Position(2, 5, 1), (scalar("local_loss", 1.5),), (gap,)),
        RankBlock(3, Position(2, 5), (), (anomaly,)),
        RankBlock(3, Position(1, 4, 2), (scalar("local_loss", 0.5),), late=True),
        RankBlock(3, Position(2, 6), (scalar("device_loss", 1),)),
        RankBlock(3, Position(2, 7), (), late=True),
    ]


def _merged_lines() -> list[Released]:
    return [
        Comment(None, "attempt", "1 world_size 16"),
        block(1, 1, _norms(["[rank_1] x"], [0.5]), rank=0),
        block(1, 1, scalar("local_loss", 0.25), rank=15),
        Comment(0, "lost", "no beat for 60 s"),
        block(1, 2, rank=15),
        RankBlock(15, Position(1, 1), (scalar("device_loss", 0.5),), (Comment(15, "anomaly", "loss nan"),)),
    ]


LOSSES = (0.1, 1e-5, 1e16, 0.1 + 0.2, -0.0, NAN, INF, -INF)
RANK_LOGS: dict[str, list[Released]] = {
    "spec_example": _spec_example(),
    "norms": _norm_lines(),
    "names": [block(1, 1, _norms(NASTY_NAMES, range(8)))],
    "local_loss": [block(7, 12, *(scalar("local_loss", v) for v in LOSSES))],
    "device_loss": [block(7, None, scalar("device_loss", 2.5), scalar("device_loss", NAN))],
    "tpe": _tpe_lines(),
    "max_attention_logit": _logit_lines(),
    "summary": _summary_lines(),
    "user_scalars": _user_scalar_lines(),
    "comments": _comment_lines(),
}

# -- what the log must give back --------------------------------------------------------------------------------------

PRINTED = {
    "local_norm": "%.6f", "device_norm": "%.6f", "tpe": "%d", "max_attention_logit": "%.4g", "step_time_ms": "%.0f",
    "lr": "%e", "loss": "%.6f", "global_loss": "%.6f", "grad_norm": "%.6f", "throughput": "%.6f",
}  # fmt: skip


def _as_printed(record: Record) -> tuple[object, ...]:
    user_scalar = metric_of(record.metric, record.position.level).place == metric_of("user", Level.STEP).place
    form = "%r" if user_scalar else PRINTED.get(record.metric, "%r")
    values = record.value if isinstance(record.value, tuple) else (record.value,)
    # Four digits can round the largest float64 up to what reads as infinity.
    read = [v if math.isinf(v) else max(-LARGEST, min(LARGEST, float(form % v))) for v in values]
    printed = tuple(repr(NAN if math.isnan(v) else x) for v, x in zip(values, read, strict=True))
    return (record.position, record.rank, record.metric, record.name, printed, record.iteration)


def expected(released: Iterable[Released]) -> Counter[object]:
    """The records and comments of `released`, with their values as the log prints them."""
    found: Counter[object] = Counter()
    for each in released:
        if isinstance(each, Comment):
            found[each] += 1
            continue
        for frame in each.frames:
            found.update(_as_printed(r) for r in frame.records(each.position, each.rank))
        found.update(each.comments)
        if each.late and (each.frames or each.comments):
            found[Comment(each.rank, "late", str(each.position))] += 1
    return found


def read_back(lines: Iterable[str | bytes], rank: int | None = None) -> Counter[object]:
    return Counter(_as_read(r) for r in parse(lines, rank=rank))


def _as_read(found: Record | Comment) -> object:
    if isinstance(found, Comment):
        return found
    values = found.value if isinstance(found.value, tuple) else (found.value,)
    return (found.position, found.rank, found.metric, found.name, tuple(map(repr, values)), found.iteration)


# -- golden files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RANK_LOGS)
def test_golden_rank_log(name: str) -> None:
    """Each kind of line is printed byte for byte as its golden file has it."""
    assert rank_text(RANK_LOGS[name]).decode() == (GOLDEN / f"{name}.log").read_bytes().decode()


@pytest.mark.parametrize("name", RANK_LOGS)
def test_golden_rank_log_is_read_back(name: str) -> None:
    """A golden file gives back all records and comments that it was made of."""
    with (GOLDEN / f"{name}.log").open("rb") as log:
        assert read_back(log, 3) == expected(RANK_LOGS[name])


def test_golden_merged_log() -> None:
    """A merged log has the rank before each line, and is read back."""
    assert merged(_merged_lines()).decode() == (GOLDEN / "merged.log").read_text()
    with (GOLDEN / "merged.log").open(newline="\n") as log:
        assert read_back(log) == expected(_merged_lines())


def test_every_golden_file_is_tested() -> None:
    """No golden file lies about unread."""
    assert {p.stem for p in GOLDEN.iterdir()} == {*RANK_LOGS, "merged"}


def test_public_names() -> None:
    """The module exports what the docs promise."""
    assert speclog.__all__ == ["RESERVED_KINDS", "Renderer", "merged_parts", "merged_text", "parse"]


# -- writing ----------------------------------------------------------------------------------------------------------


def test_empty_block_prints_nothing() -> None:
    """A block without frames and comments leaves no trace, in neither log."""
    assert Renderer().block(block(1, 1)) == b""
    assert merged_text(3, b"") == b""


def test_user_scalars_keep_the_order_of_production() -> None:
    """The user's own scalars come last and in the order in which they were logged, a repeated one twice."""
    lines = rank_text([block(1, 1, scalar("b", 1), scalar("a", 2), scalar("local_loss", 0), scalar("b", 3))])
    assert [line.split()[1] for line in lines.splitlines()[2:]] == [b'"b":', b'"a":', b'"b":']


def test_same_table_with_other_names_present() -> None:
    """A template made for one choice of names is not used for another one, nor for another metric."""
    renderer, table = Renderer(), NameTable(("a", "b"))
    frames = [Frame.named("local_norm", table, [1], present=[i]) for i in (0, 1, 0)]
    texts = [renderer.block(block(1, 1, frame)).splitlines()[1] for frame in frames]
    assert [text[16:17] for text in texts] == [b"a", b"b", b"a"]
    assert b"device_norm" in renderer.block(block(1, None, Frame.named("device_norm", table, [1, 2])))


def test_same_table_with_other_counts() -> None:
    """Lists of other lengths under the same names are printed in full."""
    renderer, table = Renderer(), NameTable(("a", "b"))
    shapes: list[list[list[float]]] = [[[1.0], [2.0, 3.0]], [[1.0, 2.0], [3.0]], [[], []]]
    for lists in shapes:
        text = renderer.block(block(1, None, Frame.lists("max_attention_logit", table, lists)))
        found = [r.value for r in parse(text.splitlines(), rank=3) if isinstance(r, Record)]
        assert found == [tuple(values) for values in lists]


def test_frame_without_any_name_present() -> None:
    """A frame in which no parameter has a gradient prints no line, and the header stays."""
    frame = Frame.named("local_norm", NameTable(("a",)), [], present=[])
    assert Renderer().block(block(1, 1, frame)) == b'{ "step": 1, "micro_step": 1 }\n'


def test_templates_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the budget the oldest templates go, and what is printed stays the same."""
    monkeypatch.setattr(speclog, "_TEMPLATE_BUDGET", 500)
    monkeypatch.setattr(speclog, "_HEADS_BUDGET", 500)
    small, table = Renderer(), [NameTable((f"{i:0100}", "b")) for i in range(7)]
    frames = [Frame.named("local_norm", table[i % 7], [i], present=[i % 2]) for i in range(30)]
    large = [block(1, i + 1, frame) for i, frame in enumerate(frames)]
    monkeypatch.undo()
    assert rank_text(large, small) == rank_text(large)
    assert len(small._templates._entries) < 7
    assert small._templates._size <= 500
    assert sum(cost for _, cost in small._templates._entries.values()) == small._templates._size


def one_by_one(released: Sequence[Released]) -> list[bytes]:
    renderer = Renderer()
    return [renderer.block(each) if isinstance(each, RankBlock) else renderer.comment(each) for each in released]


def test_norms_printed_together_are_those_printed_alone() -> None:
    """Blocks of several ranks, tables and metrics at once; a value that needs `%` costs the others nothing."""
    tables = [NameTable(tuple(f"{kind}.{i}%" for i in range(200))) for kind in "ab"]
    released: list[Released] = []
    for rank in range(6):
        values = [rank + i / 7 for i in range(200)]
        values[rank] = (math.nan, 1e9, 0.5e-6, -0.0, 1.0, 2.0)[rank]
        local = Frame.named("local_norm", tables[rank % 2], values)
        some = Frame.named("local_norm", tables[0], values[:160], present=range(40, 200))
        device = Frame.named("device_norm", tables[0], values[::-1])
        released += [
            RankBlock(rank, Position(1, 2, 1), (Frame.scalar("local_loss", 1.5), local)),
            Comment(None, "note", "between"),
            RankBlock(rank, Position(1, 2, 2), (local, some)),
            RankBlock(rank, Position(1, 2), (device,), late=True),
        ]
    assert load_numpy()
    renderer = Renderer()
    assert renderer.texts(released) == one_by_one(released)
    assert renderer.texts(released[:3]) == one_by_one(released[:3])


def test_mean_beyond_float64() -> None:
    """Logits whose sum overflows, or has no meaning, still print a mean and a maximum."""
    for values, mean, largest in (([1e308, 1e308], b"inf", b"1e+308"), ([INF, -INF], b"nan", b"inf")):
        text = rank_text([block(1, None, Frame.lists("max_attention_logit", NameTable(("a",)), [values]))])
        assert [line.split()[-1] for line in text.splitlines()[-2:]] == [mean, largest]


def test_overlong_names_are_refused_before_they_are_printed() -> None:
    """A name of the largest allowed size makes one line; one of 8 kB never gets as far as a table."""
    text = rank_text([block(1, 1, _norms(["ä" * (MAX_NAME_BYTES // 2)], [1]))])
    assert len(text.splitlines()) == 2
    with pytest.raises(LimitError, match="8192 bytes"):
        NameTable(("x" * 8192,))
    with pytest.raises(LimitError):
        metric_of("x" * 8192, Level.STEP)
    with pytest.raises(RecordError, match="surrogate"):
        NameTable(("\ud800",))


def test_metric_at_the_wrong_level_is_refused() -> None:
    """A frame that does not belong at its position is an error, not a line that no reader takes."""
    with pytest.raises(RecordError):
        rank_text([block(1, None, scalar("local_loss", 1))])


# -- reading ----------------------------------------------------------------------------------------------------------


def test_attempts_are_followed() -> None:
    """Records belong to the attempt announced last, for the run or for their rank; before that, to attempt 1."""
    log = """\
[rank_0] { "step": 1 }
[rank_0] { "device_loss": 1.0 }
[collector] # attempt 2 world_size 2
[rank_0] { "step": 1 }
[rank_0] { "device_loss": 2.0 }
[rank_1] # attempt 3
[rank_1] { "step": 1 }
[rank_1] { "device_loss": 3.0 }
[rank_0] # late attempt 1 step 9
[rank_0] { "step": 9 }
[rank_0] { "device_loss": 4.0 }
[rank_0] { "step": 2 }
[rank_0] { "device_loss": 5.0 }
"""
    found = [r for r in parse(log.splitlines()) if isinstance(r, Record)]
    assert [(r.rank, r.position.attempt, r.value) for r in found] == [
        (0, 1, 1.0), (0, 2, 2.0), (1, 3, 3.0), (0, 1, 4.0), (0, 2, 5.0)
    ]  # fmt: skip


def test_interleaved_ranks_keep_their_own_position() -> None:
    """Where lines of two ranks alternate, each belongs to its own rank's header."""
    log = [
        '[rank_0] { "step": 1, "micro_step": 1 }', '[rank_1] { "step": 2 }',
        '[rank_0] { "micro_step": 1, "local_loss": 1.0 }', '[rank_1] { "device_loss": 2.0 }',
    ]  # fmt: skip
    found = [r for r in parse(log) if isinstance(r, Record)]
    assert [(r.rank, r.position.step, r.position.micro_step) for r in found] == [(0, 1, 1), (1, 2, None)]


MICRO = '{ "step": 4, "micro_step": 2 }'
STEP = '{ "step": 4 }'
BAD = [
    (MICRO, ""),
    (MICRO, " "),
    (MICRO, "x"),
    (MICRO, "#"),
    (MICRO, "#no blank"),
    (MICRO, "# kind "),
    (MICRO, "# attempt two"),
    (MICRO, "# attempt 0"),
    (MICRO, "# late now"),
    (MICRO, '{ "step": 0 }'),
    (MICRO, '{ "step": 04 }'),
    (MICRO, '{ "step": 4, "micro_step": 0 }'),
    (MICRO, '{ "step": 9223372036854775808 }'),
    (MICRO, f'{{ "step": {"9" * 5000} }}'),
    (MICRO, '{ "step": ４ }'),
    (MICRO, '{ "micro_step": 3, "local_loss": 1.0 }'),
    (MICRO, '{ "micro_step": 2, "local_loss": 1 }'),
    (MICRO, '{ "micro_step": 2, "local_loss": 1.0'),
    (MICRO, '{ "micro_step": 2, "local_loss": 1.00 }'),
    (MICRO, '{ "micro_step": 2, "local_loss": NaN }'),
    (MICRO, '{ "micro_step": 2, "local_loss": 1.0 }\r'),
    (MICRO, '{ "local_loss": 1.0 }'),
    (MICRO, '{ "micro_step": 2.0 }'),
    (MICRO, '{ "local_norm": a: 0.000381 }'),
    (MICRO, '{ "local_norm": a:    0.000381 }'),
    (MICRO, '{ "local_norm": a:   0.00038 }'),
    (MICRO, '{ "local_norm": a:   0.000381'),
    (MICRO, '{ "local_norm": a:   0_000381 }'),
    (MICRO, '{ "local_norm": :   0.000381 }'),
    (MICRO, '{ "local_norm": a\x1b:   0.000381 }'),
    (MICRO, '{ "local_norm": a\\q:   0.000381 }'),
    (MICRO, '{ "local_norm": a\\u0041:   0.000381 }'),
    (MICRO, '{ "local_norm": a\\":   0.000381 }'),
    (MICRO, '{ "device_norm": a:   0.000381 }'),
    (STEP, '{ "local_norm": a:   0.000381 }'),
    (STEP, '{ "micro_step": 2, "local_loss": 1.0 }'),
    (MICRO, '{ "x": 1.0, "y": 2.0 }'),
    (MICRO, '{ "x\u2028": 1.0 }'),
    (MICRO, '{ "": 1.0 }'),
    (MICRO, '{ "step": 1.5 }'),
    (STEP, '{ "loss": 1.0 }'),
    (STEP, '{ "tpe": 1.0 }'),
    (STEP, f'{{ "{"x" * 300}": 1.0 }}'),
    (MICRO, '{"iter": 1, "step": 4, "micro_step": 1, "block": "decoder", "layer": 3, "tpe": [[1]]}'),
    (MICRO, '{"iter": 1, "step": 5, "micro_step": 2, "block": "decoder", "layer": 3, "tpe": [[1]]}'),
    (MICRO, '{"iter": 1, "step": 4, "micro_step": 2, "block": "mtp", "layer": 3, "tpe": [[1]]}'),
    (MICRO, '{"iter": 1, "step": 4, "micro_step": 2, "block": "decoder", "layer": 3, "tpe": [1]}'),
    (MICRO, '{"iter": 1, "step": 4, "micro_step": 2, "block": "decoder", "layer": 3, "tpe": [[1,2]]}'),
    (MICRO, '{"iter": 1, "step": 4, "micro_step": 2, "block": "decoder", "layer": 3, "tpe": [[1.5]]}'),
    (STEP, "step:[    4/  100] max_attention_logit/a: [0.1"),
    (STEP, "step:[    4/  100] max_attention_logit/a: [0.10]"),
    (STEP, "step:[    4/  100] max_attention_logit/a: [0.1,0.2]"),
    (STEP, "step:[   4/  100] max_attention_logit/a: [0.1]"),
    (STEP, "step:[    5/  100] max_attention_logit/a: [0.1]"),
    (STEP, "step:[    4/  100] max_attention_logit/mean: 0.123456"),
    (STEP, "step:[    4/  100] max_attention_logit/sum: 0.1"),
    (MICRO, "step:[    4/  100] max_attention_logit/a: [0.1]"),
    (STEP, "{ step:[    4/  100] }"),
    (STEP, "{ step:[    5/  100], loss:   1.000000 }"),
    (STEP, "{ step:[    4/  100], lr: 1.000000e-03, loss:   1.000000 }"),
    (STEP, "{ step:[    4/  100], loss:   1.000000, loss:   1.000000 }"),
    (STEP, "{ step:[    4/  100], per_step_time:    843 }"),
    (STEP, "{ step:[    4/  100], loss:   1.000000ms }"),
    (STEP, "{ step:[    4/  100], gain:   1.000000 }"),
    (MICRO, "{ step:[    4/  100], loss:   1.000000 }"),
    (STEP, '[rank_3] { "step": 4 }'),
]


@pytest.mark.parametrize(("header", "line"), BAD)
def test_line_that_the_writer_would_not_write(header: str, line: str) -> None:
    """A line in any other form is an error that has the line's number and text."""
    with pytest.raises(SpecLogError, match=r"^line 2: ") as caught:
        list(parse([f"{header}\n", f"{line}\n"], rank=3))
    assert repr(line[:200])[1:-1] in str(caught.value)


@pytest.mark.parametrize(
    "line",
    ["x", "", "[rank_x] # a", "[rank_03] # a", "[rank_3]# a", '[collector] { "step": 1 }', STEP, "[rank_3] "],
)
def test_merged_line_without_a_proper_prefix(line: str) -> None:
    """In a merged log a line without rank, or a record of the collector's own, is an error."""
    with pytest.raises(SpecLogError, match=r"^line 1: "):
        list(parse([line]))


def test_record_before_a_header() -> None:
    """A record that cannot be attributed is an error, also right after the start of an attempt."""
    line = '{ "local_norm": a:   1.000000 }'
    for start in ([], [MICRO, "# attempt 2"]):
        with pytest.raises(SpecLogError, match="before the header"):
            list(parse([*start, line], rank=0))


def test_bytes_that_are_no_utf8() -> None:
    """Bytes that are no text are an error of the line, not of the decoder."""
    with pytest.raises(SpecLogError, match=r"^line 1: "):
        list(parse([b"# x \xff\n"], rank=0))


def test_what_came_before_a_bad_line_is_given() -> None:
    """The reader gives what it has before it raises."""
    lines = parse([MICRO, '{ "x": 1.0 }', "bad"], rank=0)
    found = next(lines)
    assert isinstance(found, Record)
    assert found.value == 1.0
    with pytest.raises(SpecLogError):
        next(lines)


def parse_all(lines: Iterable[str | bytes], rank: int | None) -> tuple[int, SpecLogError | None]:
    """How many records and comments the lines give, and what ends them; any error but ours escapes."""
    count = 0
    try:
        for _ in parse(lines, rank=rank):
            count += 1
    except SpecLogError as e:
        return count, e
    return count, None


@pytest.mark.parametrize("name", RANK_LOGS)
def test_log_cut_at_any_byte(name: str) -> None:
    """A log that ends anywhere gives all its whole lines; then the torn one parses, or is a SpecLogError."""
    lines = (GOLDEN / f"{name}.log").read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        whole, error = parse_all(lines[: number - 1], 3)
        assert error is None
        for end in range(1, len(line)):
            count, error = parse_all([*lines[: number - 1], line[:end]], 3)
            assert count >= whole
            assert error is None or re.match(rf"line {number}: ", str(error))


# How fast a busy machine makes up records says nothing about the format.
at_any_pace = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# -- any records ------------------------------------------------------------------------------------------------------

_any_float = st.floats() | st.floats(-10, 10)
_names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12) | st.sampled_from(NASTY_NAMES)


def _table_of(names: st.SearchStrategy[str]) -> st.SearchStrategy[NameTable]:
    return st.lists(names, min_size=1, max_size=5, unique=True).map(lambda n: NameTable(tuple(n)))


@st.composite
def _named(draw: st.DrawFn, metric: str) -> Frame:
    table = draw(_table_of(_names))
    present = draw(st.none() | st.sets(st.integers(0, len(table) - 1)).map(sorted))
    count = len(table) if present is None else len(present)
    return Frame.named(metric, table, draw(st.lists(_any_float, min_size=count, max_size=count)), present)


@st.composite
def _lists(draw: st.DrawFn, metric: str, names: st.SearchStrategy[str], values: st.SearchStrategy[float]) -> Frame:
    table = draw(_table_of(names))
    lists = draw(st.lists(st.lists(values, max_size=4), min_size=len(table), max_size=len(table)))
    return Frame.lists(metric, table, lists, draw(st.integers(1, 10**6)) if metric == "tpe" else None)


def _is_user_metric(name: str) -> bool:
    """Whether `name` is the user's own scalar at both levels."""
    try:
        return metric_of(name, Level.STEP).place == metric_of(name, Level.MICRO_STEP).place
    except RankdError:
        return False


def _scalars(names: st.SearchStrategy[str]) -> st.SearchStrategy[Frame]:
    return st.builds(Frame.scalar, names, _any_float)


_layers = st.builds("decoder.{}".format, st.integers(0, 99)) | st.builds(
    "mtp.{}.{}".format, st.integers(0, 3), st.integers(0, 99)
)
_user = _names.filter(_is_user_metric)
_counts = st.integers(-(2**53), 2**53).map(float)
_micro_frames = st.one_of(
    _scalars(st.just("local_loss")), _named("local_norm"), _lists("tpe", _layers, _counts),
    _scalars(_user), _scalars(st.sampled_from(SUMMARY_FIELDS)),
)  # fmt: skip
_step_frames = st.one_of(
    _scalars(st.just("device_loss")), _named("device_norm"), _lists("max_attention_logit", _names, _any_float),
    _scalars(_user), _scalars(st.sampled_from(SUMMARY_FIELDS)),
)  # fmt: skip
_texts = st.text(max_size=12)
_kinds = _texts.filter(lambda kind: kind and kind not in speclog.RESERVED_KINDS)


@st.composite
def _released(draw: st.DrawFn, ranks: int) -> list[Released]:
    """Blocks and comments of several ranks over two attempts, late ones among them."""
    released: list[Released] = []
    for attempt in (1, 2):
        who = st.none() | st.integers(0, ranks - 1) if ranks > 1 else st.just(0)
        released.append(Comment(None if ranks > 1 else 0, "attempt", f"{attempt} world_size {ranks}"))
        for _ in range(draw(st.integers(0, 4))):
            rank = draw(st.integers(0, ranks - 1))
            micro_step = draw(st.none() | st.integers(1, 10**6))
            late = draw(st.booleans())
            position = Position(draw(st.integers(1, 3)) if late else attempt, draw(st.integers(1, 10**6)), micro_step)
            frames = draw(st.lists(_step_frames if micro_step is None else _micro_frames, max_size=4))
            comments = draw(st.lists(st.builds(Comment, st.just(rank), _kinds, _texts), max_size=2))
            total = draw(st.none() | st.integers(1, 10**7))
            for frame in frames:
                frame.check(position.level)
            released.append(RankBlock(rank, position, tuple(frames), tuple(comments), late, total))
            released += draw(st.lists(st.builds(Comment, who, _kinds, _texts), max_size=1))
    return released


@at_any_pace
@given(_released(1))
def test_any_rank_log_is_read_back(released: list[Released]) -> None:
    """Whatever a rank records, its log gives it back up to the printed precision."""
    lines = rank_text(released).split(b"\n")[:-1]
    assert read_back(lines, 0) == expected(released)


@at_any_pace
@given(_released(3))
def test_any_blocks_printed_together_are_those_printed_alone(released: list[Released]) -> None:
    """Whatever is in them, and however small the frames are that numpy prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normlines, "_FEW", 0)
        assert Renderer().texts(released) == one_by_one(released)


@at_any_pace
@given(_released(3))
def test_any_merged_log_is_read_back(released: list[Released]) -> None:
    """Whatever several ranks record, the merged log gives it back up to the printed precision."""
    text = merged(released)
    assert read_back(text.splitlines(keepends=True)) == expected(released)


@at_any_pace
@given(_released(3))
def test_merged_lines_of_a_rank_are_its_log(released: list[Released]) -> None:
    """The merged lines that begin with a rank's prefix are, without it, that rank's log."""
    lines = merged(released).splitlines(keepends=True)
    for rank in range(3):
        prefix = b"[rank_%d] " % rank
        own = b"".join(line[len(prefix) :] for line in lines if line.startswith(prefix))
        assert own == rank_text(r for r in released if r.rank == rank)


@at_any_pace
@given(_released(1))
def test_every_line_is_one_line_to_every_tool(released: list[Released]) -> None:
    """No line holds anything that a terminal, an editor or str.splitlines takes for the end of a line."""
    text = rank_text(released).decode()
    assert text.splitlines() == text.split("\n")[:-1]


@at_any_pace
@given(st.lists(st.binary(max_size=40) | st.text(max_size=40)), st.none() | st.just(0))
@example(["[rank_0] "], None)
@example(['{ "x\\ud800": 1.0 }'], 0)
def test_any_lines_parse_or_raise_our_error(lines: list[str | bytes], rank: int | None) -> None:
    """Whatever a file holds, the reader gives records or a SpecLogError, and nothing else."""
    _, error = parse_all(lines, rank)
    assert error is None or str(error).startswith("line ")


@at_any_pace
@given(st.sampled_from(sorted(RANK_LOGS)), st.data())
def test_damaged_log_parses_or_raises_our_error(name: str, data: st.DataObject) -> None:
    """A log with a byte changed gives records or a SpecLogError, and nothing else."""
    text = bytearray((GOLDEN / f"{name}.log").read_bytes())
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    _, error = parse_all(bytes(text).split(b"\n"), 3)
    assert error is None or str(error).startswith("line ")
