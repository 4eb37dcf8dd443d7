"""Records as the text of the spec format, and back (SPEC.md section 3).

Writing is bulk: a name table becomes one template, compiled once, and filling it prints a whole frame.
Reading is strict: whatever the writer here does not print is an error, so that a damaged log cannot pass for data.

A name may hold any character. What would break a line, hide in a terminal or turn the text around (control characters,
line separators, bidi controls) is written as a JSON escape, and so is the backslash; everything else stands as UTF-8.

Two comments belong to the format, because a reader follows them: `# attempt N …`, of a rank or of the collector, begins
attempt N; `# late attempt N step S [micro_step M]` stands before the header of a block that came late, and says which
attempt that one block is of.
"""

from __future__ import annotations

import functools
import math
import re
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from .errors import RankdError, SpecLogError
from .normlines import NORM_FORMAT, NormLines
from .records import SUMMARY_FIELDS, Comment, ExpertLayer, Frame, Level, NameTable, Position, RankBlock, Record
from .records import metric_of as _metric_of

__all__ = ["RESERVED_KINDS", "Renderer", "merged_parts", "merged_text", "parse"]

# Comments of these kinds tell a reader which attempt the lines after them belong to. Whoever passes on comments that
# peers may name must not let them use these.
RESERVED_KINDS = frozenset({"attempt", "late"})

# Templates are about as large as the name tables they are made of, which are in memory anyway. 1,024 ranks of 16
# pipeline stages × 8 expert shards, 700 names each, need some 25 MB; tables that all differ still fit.
_TEMPLATE_BUDGET = 128 * 2**20
# Only frames with `present` use these, to compile the template of another choice of names without escaping again.
_HEADS_BUDGET = 32 * 2**20
# What a bytes object costs beside its characters (CPython, 64 bit, with the pointer to it).
_BYTES_OVERHEAD = 41

_LOCAL_LOSS = _metric_of("local_loss", Level.MICRO_STEP).place
_LOCAL_NORM = _metric_of("local_norm", Level.MICRO_STEP).place
_TPE = _metric_of("tpe", Level.MICRO_STEP).place
_DEVICE_LOSS = _metric_of("device_loss", Level.STEP).place
_DEVICE_NORM = _metric_of("device_norm", Level.STEP).place
_MAX_LOGIT = _metric_of("max_attention_logit", Level.STEP).place
_SUMMARY = _metric_of(SUMMARY_FIELDS[0], Level.STEP).place
_SUMMARY_PLACES = frozenset(_metric_of(name, Level.STEP).place for name in SUMMARY_FIELDS)
_USER_PLACE = _metric_of("any other name", Level.STEP).place
_NORMS = frozenset({"local_norm", "device_norm"})

# How the step summary prints its fields: label, format, unit.
_SUMMARY_FORMATS = {
    "loss": ("loss", "%10.6f", ""),
    "global_loss": ("global_loss", "%10.6f", ""),
    "step_time_ms": ("per_step_time", "%6.0f", "ms"),
    "lr": ("lr", "%e", ""),
    "grad_norm": ("grad_norm", "%10.6f", ""),
    "throughput": ("throughput", "%10.6f", ""),
}

# -- escapes ----------------------------------------------------------------------------------------------------------

# C0, DEL and C1, the bidi controls, the line and paragraph separators, and halves of surrogate pairs.
_CONTROLS = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_TO_ESCAPE = re.compile(f"[\\\\{_CONTROLS}]")
_ESCAPED = re.compile(r'\\(["\\bfnrt]|u[0-9a-f]{4})')
_SHORT = {"\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_LONG = {short[1]: plain for plain, short in _SHORT.items()} | {'"': '"'}


def _escape(text: str) -> str:
    if text.isprintable() and "\\" not in text:
        return text
    return _TO_ESCAPE.sub(lambda m: _SHORT.get(m[0]) or f"\\u{ord(m[0]):04x}", text)


def _quote(text: str) -> str:
    return '"' + _escape(text).replace('"', '\\"') + '"'


def _unescape(text: str) -> str:
    """The opposite; what is no escape stays. Whether `text` is what `_escape` writes is for the caller to compare."""
    if "\\" not in text:
        return text
    return _ESCAPED.sub(lambda m: _LONG.get(m[1]) or chr(int(m[1][1:], 16)), text)


# -- writing ----------------------------------------------------------------------------------------------------------

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class _Cache(Generic[_Key, _Value]):
    """Keeps what was used last, up to a budget of bytes (one entry that is larger stays until the next)."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._size = 0
        self._entries: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()

    def get(self, key: _Key) -> _Value | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: _Key, value: _Value, cost: int) -> None:
        self._entries[key] = (value, cost)
        self._size += cost
        while self._size > self._budget and len(self._entries) > 1:
            _, (_, dropped) = self._entries.popitem(last=False)
            self._size -= dropped


@dataclass(frozen=True, slots=True)
class _Lists:
    """`text % values` prints a frame of lists; a NUL in `text` stands where a line names its position (no name has a
    NUL). Bytes rather than str: `%` on bytes prints floats 1.5 times as fast here, and needs no encoding afterwards.
    """

    text: bytes
    order: tuple[int, ...] | None  # which value goes where, if the lines are not in the order of the column

    @property
    def size(self) -> int:
        return len(self.text) + (0 if self.order is None else 8 * len(self.order))

    def fill(self, column: bytes) -> bytes:
        values = struct.unpack(f"<{len(column) // 8}d", column)
        if self.order is not None:
            values = tuple(map(values.__getitem__, self.order))
        return self.text % values


def _head(metric: str, name: str) -> bytes:
    """A line up to its value."""
    if metric == "tpe":
        layer = ExpertLayer.from_name(name)
        mtp = "" if layer.mtp_idx is None else f'"mtp_idx": {layer.mtp_idx}, '
        return f'{{\0"block": "{layer.block}", {mtp}"layer": {layer.layer}, "tpe": [['.encode()
    escaped = _escape(name)
    if metric == "max_attention_logit":
        return f"\0 max_attention_logit/{escaped}: [".encode()
    return f'{{ "{metric}": {escaped}: '.encode()


class Renderer:
    """Prints what the ordering releases. Keeps only compiled templates: what it prints depends on the argument alone.

    Frames must have passed `Frame.check`.
    """

    def __init__(self) -> None:
        self._templates: _Cache[tuple[str, NameTable, bytes | None, bytes | None], NormLines | _Lists]
        self._templates = _Cache(_TEMPLATE_BUDGET)
        self._heads: _Cache[tuple[str, NameTable], tuple[bytes, ...]] = _Cache(_HEADS_BUDGET)
        # Lines of norms that were printed ahead, by the frame's id, while `texts` is at work.
        self._ahead: dict[int, bytes | bytearray | memoryview] = {}
        self._room = bytearray()
        self._sections: dict[int, Callable[[RankBlock, Sequence[Frame]], bytes | bytearray | memoryview]] = {
            _LOCAL_LOSS: self._local_loss,
            _LOCAL_NORM: self._norms,
            _TPE: self._tpe,
            _DEVICE_LOSS: self._scalars,
            _DEVICE_NORM: self._norms,
            _MAX_LOGIT: self._max_logits,
            _SUMMARY: self._summary,
            _USER_PLACE: self._scalars,
        }

    def texts(self, released: Sequence[RankBlock | Comment]) -> list[bytes]:
        """`block` or `comment` of each. Their norms are printed together, which takes half the time."""
        self._print_ahead(released)
        try:
            return [self.block(each) if isinstance(each, RankBlock) else self.comment(each) for each in released]
        finally:
            self._ahead.clear()

    def _print_ahead(self, released: Sequence[RankBlock | Comment]) -> None:
        alike: dict[NormLines, list[Frame]] = {}
        for block in released:
            if isinstance(block, RankBlock):
                for frame in block.frames:
                    if frame.metric in _NORMS and isinstance(template := self._template(frame), NormLines):
                        alike.setdefault(template, []).append(frame)
        several = [(template, frames) for template, frames in alike.items() if len(frames) > 1]
        needed = sum(template.text_size * len(frames) for template, frames in several)
        if len(self._room) < needed:
            self._room = bytearray(needed)
        room = memoryview(self._room)
        for template, frames in several:
            taken, room = room[: template.text_size * len(frames)], room[template.text_size * len(frames) :]
            lines = template.fill_all([frame.column for frame in frames], taken)
            self._ahead.update(zip(map(id, frames), lines, strict=True))

    def block(self, block: RankBlock) -> bytes:
        """The lines of one rank's block, as they stand in that rank's log; empty without frames and comments."""
        if not block.frames and not block.comments:
            return b""
        position = block.position
        parts: list[bytes | bytearray | memoryview] = []
        if block.late:
            parts.append(self.comment(Comment(block.rank, "late", str(position))))
        if position.micro_step is None:
            parts.append(b'{ "step": %d }\n' % position.step)
        else:
            parts.append(b'{ "step": %d, "micro_step": %d }\n' % (position.step, position.micro_step))
        sections: dict[int, list[Frame]] = {}
        for frame in block.frames:
            place = _metric_of(frame.metric, position.level).place
            sections.setdefault(_SUMMARY if place in _SUMMARY_PLACES else place, []).append(frame)
        parts.extend(self._sections[place](block, sections[place]) for place in sorted(sections))
        parts.extend(map(self.comment, block.comments))
        return b"".join(parts)

    @staticmethod
    def comment(comment: Comment) -> bytes:
        """The line `# KIND TEXT`, whatever the two hold (a blank in the kind is escaped)."""
        kind = _escape(comment.kind).replace(" ", "\\u0020")
        text = f" {_escape(comment.text)}" if comment.text else ""
        return f"# {kind}{text}\n".encode()

    def _template(self, frame: Frame) -> NormLines | _Lists:
        assert frame.table is not None
        key = (frame.metric, frame.table, frame.present, frame.counts)
        template = self._templates.get(key)
        if template is None:
            template = self._compile(frame, frame.table)
            self._templates.put(key, template, template.size + len(frame.present or b""))
        return template

    def _compile(self, frame: Frame, table: NameTable) -> NormLines | _Lists:
        where = frame.indices
        if where is None:
            heads: Sequence[bytes] = [_head(frame.metric, name) for name in table.names]
        else:
            all_heads = self._heads.get((frame.metric, table))
            if all_heads is None:
                all_heads = tuple(_head(frame.metric, name) for name in table.names)
                self._heads.put(
                    (frame.metric, table), all_heads, sum(map(len, all_heads)) + _BYTES_OVERHEAD * len(table)
                )
            heads = [all_heads[i] for i in where]
        if frame.counts is None:
            return NormLines(heads)
        return _compile_lists(frame, [head.replace(b"%", b"%%") for head in heads])

    def _local_loss(self, block: RankBlock, frames: Sequence[Frame]) -> bytes:
        micro_step = block.position.micro_step or 0  # never 0: the metric's level has been checked
        return b"".join(
            [b'{ "micro_step": %d, "local_loss": %r }\n' % (micro_step, frame.values[0]) for frame in frames]
        )

    def _norms(self, _: RankBlock, frames: Sequence[Frame]) -> bytes | bytearray | memoryview:
        if len(frames) == 1:  # nearly always, and so large that a copy counts
            return self._norm_lines(frames[0])
        return b"".join(map(self._norm_lines, frames))

    def _norm_lines(self, frame: Frame) -> bytes | bytearray | memoryview:
        ahead = self._ahead.get(id(frame))
        return self._template(frame).fill(frame.column) if ahead is None else ahead

    def _tpe(self, block: RankBlock, frames: Sequence[Frame]) -> bytes | bytearray:
        at = block.position
        texts: list[bytes | bytearray] = []
        for frame in frames:
            where = f'"iter": {frame.iteration}, "step": {at.step}, "micro_step": {at.micro_step}, '
            texts.append(self._template(frame).fill(frame.column).replace(b"\0", where.encode()))
        if len(texts) == 1:
            return texts[0]
        # Each frame's lines are in order already; only their layers together are not.
        keys = [key for f in frames for key in sorted(ExpertLayer.from_name(name).sort_key for name in f.names)]
        lines = [line for text in texts for line in text.splitlines(keepends=True)]
        return b"".join([lines[i] for i in sorted(range(len(lines)), key=keys.__getitem__)])

    def _max_logits(self, block: RankBlock, frames: Sequence[Frame]) -> bytes:
        where = _step_of(block)
        parts = [self._template(frame).fill(frame.column).replace(b"\0", where) for frame in frames]
        values = [value for frame in frames for value in frame.values]
        if values:
            parts.append(b"%s max_attention_logit/mean: %.4g\n" % (where, _mean(values)))
            parts.append(b"%s max_attention_logit/max: %.4g\n" % (where, _max(values)))
        return b"".join(parts)

    def _summary(self, block: RankBlock, frames: Sequence[Frame]) -> bytes:
        # A field that was logged twice goes to a second line: nothing may be lost.
        lines: list[dict[str, float]] = []
        for frame in frames:
            line = next((line for line in lines if frame.metric not in line), None)
            if line is None:
                lines.append(line := {})
            line[frame.metric] = frame.values[0]
        where = _step_of(block)
        return b"".join(b"{ %s, %s }\n" % (where, _summary_fields(line)) for line in lines)

    def _scalars(self, _: RankBlock, frames: Sequence[Frame]) -> bytes:
        return b"".join([f"{{ {_quote(frame.metric)}: {frame.values[0]!r} }}\n".encode() for frame in frames])


def _compile_lists(frame: Frame, heads: Sequence[bytes]) -> _Lists:
    number, tail = (b"%d", b"]]}\n") if frame.metric == "tpe" else (b"%.4g", b"]\n")
    spans, start = [], 0
    for group in frame.groups:
        spans.append(range(start, start + len(group)))
        start += len(group)
    lines = [head + b", ".join([number] * len(span)) + tail for head, span in zip(heads, spans, strict=True)]
    if frame.metric != "tpe":
        return _Lists(b"".join(lines), None)
    names = frame.names
    by_layer = sorted(range(len(names)), key=lambda i: ExpertLayer.from_name(names[i]).sort_key)
    order = tuple(index for i in by_layer for index in spans[i])
    return _Lists(b"".join([lines[i] for i in by_layer]), None if order == tuple(range(start)) else order)


def _step_of(block: RankBlock) -> bytes:
    if block.total_steps is None:
        return b"step:[%5d/    ?]" % block.position.step
    return b"step:[%5d/%5d]" % (block.position.step, block.total_steps)


def _summary_fields(values: dict[str, float]) -> bytes:
    given = [(*_SUMMARY_FORMATS[name], values[name]) for name in SUMMARY_FIELDS if name in values]
    return ", ".join(f"{label}: {form % value}{unit}" for label, form, unit, value in given).encode()


def _mean(values: Sequence[float]) -> float:
    try:
        # Exact, so that every Python prints the same digits (3.12 changed what `sum` of floats gives).
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # beyond float64 in between, or inf - inf
        return sum(values) / len(values)


def _max(values: Sequence[float]) -> float:
    # Python's max passes over a NaN, or not, as the order has it.
    return math.nan if any(map(math.isnan, values)) else max(values)


def merged_text(rank: int | None, text: bytes) -> bytes:
    """The lines `text` of a rank's log as they stand in the merged log; rank None: lines about the whole run."""
    return b"".join(merged_parts(rank, text))


def merged_parts(rank: int | None, text: bytes) -> tuple[bytes | memoryview, ...]:
    """`merged_text` as buffers to be written one after the other, which spares two copies of the text."""
    if not text:
        return ()
    prefix = b"[collector] " if rank is None else b"[rank_%d] " % rank
    # Seven times as fast as a second template with the prefix in it; cutting the prefix that ends up after the last
    # newline is cheaper than keeping it from getting there.
    return prefix, memoryview(text.replace(b"\n", b"\n" + prefix))[: -len(prefix)]


# -- reading ----------------------------------------------------------------------------------------------------------

_NOT_IN_FORMAT = "not in the spec format"
_NUMBER = "(?:-?[0-9][-+.0-9e]*|-?inf|nan)"
_WHOLE = "(?:0|[1-9][0-9]*)"
_STEP = rf"step:\[ *({_WHOLE})/ *({_WHOLE}|\?)\]"

_PREFIX = re.compile(rf"\[(?:rank_({_WHOLE})|collector)\] ")
_ATTEMPT = re.compile(r"([1-9][0-9]*)(?: .*)?", re.DOTALL)
_LATE = re.compile(r"attempt ([1-9][0-9]*) step [1-9][0-9]*(?: micro_step [1-9][0-9]*)?")
_LOCAL_NORM_START, _DEVICE_NORM_START = '{ "local_norm": ', '{ "device_norm": '
_HEADER = re.compile(r'\{ "step": ([1-9][0-9]*)(?:, "micro_step": ([1-9][0-9]*))? \}')
_LOCAL_LOSS_LINE = re.compile(rf'\{{ "micro_step": ([1-9][0-9]*), "local_loss": ({_NUMBER}) \}}')
_SCALAR = re.compile(rf'\{{ ("(?:[^"\\]|\\.)+"): ({_NUMBER}) \}}')
_TPE_LINE = re.compile(
    rf'\{{"iter": ([1-9][0-9]*), "step": ({_WHOLE}), "micro_step": ({_WHOLE}), '
    rf'"block": "(decoder|mtp)", (?:"mtp_idx": ({_WHOLE}), )?"layer": ({_WHOLE}), "tpe": \[\[([-0-9, ]*)\]\]\}}'
)
_LOGIT = re.compile(rf"{_STEP} max_attention_logit/(?:(mean|max): ({_NUMBER})|(.+): \[([^\[\]]*)\])")
_SUMMARY_LINE = re.compile(rf"\{{ {_STEP}, ([^{{}}]+) \}}")
_SUMMARY_FIELD = re.compile(rf"([a-z_]+): ( *{_NUMBER})(ms)?")
_LABELS = {label: (name, form, unit) for name, (label, form, unit) in _SUMMARY_FORMATS.items()}

_Found = tuple[Record | Comment, ...]


def parse(lines: Iterable[str | bytes], *, rank: int | None = None) -> Iterator[Record | Comment]:
    """What a text log says, in the order of its lines. Values come back as they were printed.

    A file that is open for reading, in text (UTF-8, `newline="\\n"`) or bytes, is such an iterable. Lines of means and
    maxima are derived; they are checked for their form, and give nothing. The last line may lack its newline, as long
    as it is whole otherwise.

    Args:
        lines: of a rank's own log, if `rank` is given; of a merged log otherwise.
        rank: whose log this is.

    Raises:
        SpecLogError: a line that the writer would not write; the message has its number and text.
    """
    read = _MergedReader().read if rank is None else _RankReader(rank).read
    for number, raw in enumerate(lines, 1):
        try:
            found = read((raw if isinstance(raw, str) else raw.decode()).removesuffix("\n"))
        except (RankdError, ValueError) as e:
            raise SpecLogError(f"line {number}: {e}: {raw[:300]!r}") from None
        yield from found


def _canonical(form: str, text: str) -> float:
    """The float that `text` is, if `form` prints it so."""
    value = float(text)
    if math.isinf(value) and not text.strip().endswith("inf"):
        # Four digits can round the largest float64 up to what reads as infinity; it was finite.
        value = math.copysign(sys.float_info.max, value)
    if form % value != text:
        raise SpecLogError(f"expected a number as {form!r} prints it, found {text!r}")
    return value


# A log repeats its names in every block. One string for each is also what a reader wants to hold.
@functools.lru_cache(maxsize=65_536)
def _plain_name(text: str) -> str:
    """The name that `_escape` writes as `text`."""
    name = _unescape(text)
    if _escape(name) != text:
        raise SpecLogError(f"{text!r} is not how a name is written")
    return name


class _RankReader:
    """Reads the lines of one rank, remembering which attempt and block they belong to."""

    def __init__(self, rank: int | None, attempt: int = 1) -> None:
        self.rank = rank
        self.start_attempt(attempt)

    def start_attempt(self, attempt: int) -> None:
        self._attempt = attempt
        self._late: int | None = None  # the attempt of the block whose `# late` line was read
        self._position: Position | None = None
        self._checked: set[str] = set()  # the metrics that were found to belong to this level

    def read(self, line: str) -> _Found:
        # Nearly all lines are norms.
        if line.startswith(_LOCAL_NORM_START):
            return self.norm("local_norm", line[len(_LOCAL_NORM_START) : -2], line)
        if line.startswith(_DEVICE_NORM_START):
            return self.norm("device_norm", line[len(_DEVICE_NORM_START) : -2], line)
        for start, reader in _READERS:
            if line.startswith(start):
                return reader(self, line)
        raise SpecLogError("no line of the spec format starts like this")

    def at(self, metric: str) -> Position:
        """The position of the block, which must be one where `metric` can be."""
        if self._position is None:
            raise SpecLogError("a record before the header of its block")
        if metric not in self._checked:
            _metric_of(metric, self._position.level)
            self._checked.add(metric)
        return self._position

    def record(self, metric: str, name: str | None, value: float | tuple[float, ...]) -> _Found:
        assert self.rank is not None
        return (Record(self.at(metric), self.rank, metric, name, value),)

    def comment(self, line: str) -> _Found:
        kind, _, text = line[2:].partition(" ")
        comment = Comment(self.rank, _unescape(kind), _unescape(text))
        if Renderer.comment(comment) != f"{line}\n".encode():
            raise SpecLogError("not how a comment is written")
        if comment.kind == "attempt":
            self.start_attempt(int(_match(_ATTEMPT, comment.text)[1]))
        elif comment.kind == "late":
            self._late = int(_match(_LATE, comment.text)[1])
            self._position = None
        return (comment,)

    def header(self, line: str) -> _Found:
        step, micro_step = _match(_HEADER, line).groups()
        attempt = self._attempt if self._late is None else self._late
        self._position = Position(attempt, int(step), None if micro_step is None else int(micro_step))
        self._late = None
        self._checked.clear()
        return ()

    def norm(self, metric: str, named: str, line: str) -> _Found:
        # String methods take a third of the time of a regular expression here; the value holds no colon, so the last
        # one ends the name, whatever is in that.
        name, _, text = named.rpartition(": ")
        if not name or not line.endswith(" }"):
            raise SpecLogError(_NOT_IN_FORMAT)
        value = float(text)
        if NORM_FORMAT % value != text:
            raise SpecLogError(f"expected a norm in ten columns with six decimals, found {text!r}")
        position = self._position if metric in self._checked else self.at(metric)
        assert position is not None
        assert self.rank is not None
        return (Record(position, self.rank, metric, _plain_name(name), value),)

    def local_loss(self, line: str) -> _Found:
        micro_step, value = _match(_LOCAL_LOSS_LINE, line).groups()
        found = self.record("local_loss", None, _canonical("%r", value))
        self._expect(None, int(micro_step))
        return found

    def scalar(self, line: str) -> _Found:
        quoted, value = _match(_SCALAR, line).groups()
        name = _unescape(quoted[1:-1])
        if _quote(name) != quoted:
            raise SpecLogError(f"{quoted} is not how a name is quoted")
        place = _metric_of(name, self.at(name).level).place
        if place not in (_USER_PLACE, _DEVICE_LOSS):
            raise SpecLogError(f"{name} is not printed as a scalar of its own")
        return self.record(name, None, _canonical("%r", value))

    def tpe(self, line: str) -> _Found:
        iteration, step, micro_step, block, mtp_idx, layer, counts = _match(_TPE_LINE, line).groups()
        position = self.at("tpe")
        self._expect(int(step), int(micro_step))
        name = ExpertLayer(block, int(layer), None if mtp_idx is None else int(mtp_idx)).name
        values = tuple(_canonical("%d", count) for count in counts.split(", ")) if counts else ()
        assert self.rank is not None
        return (Record(position, self.rank, "tpe", name, values, None, int(iteration)),)

    def max_logit(self, line: str) -> _Found:
        step, total, derived, derived_value, name, numbers = _match(_LOGIT, line).groups()
        self.at("max_attention_logit")
        self._expect_step(line, step, total)
        if derived is not None:
            _canonical("%.4g", derived_value)
            return ()
        values = tuple(_canonical("%.4g", number) for number in numbers.split(", ")) if numbers else ()
        return self.record("max_attention_logit", _plain_name(name), values)

    def summary(self, line: str) -> _Found:
        step, total, fields = _match(_SUMMARY_LINE, line).groups()
        self._expect_step(line.removeprefix("{ "), step, total)
        found: list[Record | Comment] = []
        latest = -1
        for field in fields.split(", "):
            label, value, unit = _match(_SUMMARY_FIELD, field).groups()
            name, form, its_unit = _LABELS.get(label, ("", "", ""))
            if not name or (unit or "") != its_unit or SUMMARY_FIELDS.index(name) <= latest:
                raise SpecLogError(f"{field!r} is no field of the step summary, or not in its place")
            latest = SUMMARY_FIELDS.index(name)
            found += self.record(name, None, _canonical(form, value))
        return tuple(found)

    def _expect(self, step: int | None, micro_step: int | None) -> None:
        at = self._position
        if at is None or step not in (None, at.step) or micro_step != at.micro_step:
            raise SpecLogError(f"the line is of another position than its block ({at})")

    def _expect_step(self, line: str, step: str, total: str) -> None:
        self._expect(int(step), None)
        if not line.startswith(f"step:[{step:>5}/{total:>5}]"):
            raise SpecLogError("step and number of steps stand in five columns each")


def _match(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise SpecLogError(_NOT_IN_FORMAT)
    return match


# By what a line starts with; norms are told before.
_READERS: tuple[tuple[str, Callable[[_RankReader, str], _Found]], ...] = (
    ('{ "step": ', _RankReader.header),
    ('{ "micro_step": ', _RankReader.local_loss),
    ('{"iter": ', _RankReader.tpe),
    ("step:[", _RankReader.max_logit),
    ("{ step:[", _RankReader.summary),
    ('{ "', _RankReader.scalar),
    ("# ", _RankReader.comment),
)


class _MergedReader:
    """Reads a merged log: a `_RankReader` for each rank, because ranks interleave."""

    def __init__(self) -> None:
        self._attempt = 1
        self._readers: dict[str, _RankReader] = {}

    def read(self, line: str) -> _Found:
        end = line.find("] ") + 2
        reader = self._readers.get(line[:end])
        if reader is None:
            rank = _match(_PREFIX, line[:end])[1]
            reader = _RankReader(None if rank is None else int(rank), self._attempt)
            self._readers[line[:end]] = reader
        rest = line[end:]
        if reader.rank is None:
            return self._about_the_run(reader, rest)
        return reader.read(rest)

    def _about_the_run(self, reader: _RankReader, line: str) -> _Found:
        if not line.startswith("# "):
            raise SpecLogError("the collector's own lines are comments")
        found = reader.read(line)
        (comment,) = found
        if isinstance(comment, Comment) and comment.kind == "attempt":
            self._attempt = int(_match(_ATTEMPT, comment.text)[1])
            for each in self._readers.values():
                each.start_attempt(self._attempt)
        return found
