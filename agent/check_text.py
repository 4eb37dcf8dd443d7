"""The report of `rankd check` as text for a person."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from ..collector.protocol.ranges import ranks_text
from ..collector.protocol.wording import counted
from .check import FilterMatch, Report
from .estimate import Amount, Estimate, Row, Shape, human_bytes, human_size, human_time
from .retained import Retained

__all__ = ["render"]

_SHOWN_NAMES = 3
_HOUR = 3_600.0


def render(report: Report, *, everything: bool = False) -> str:
    """The text; `everything`: all names that each filter matches, and the settings that nobody wrote."""
    sections = [
        ("Errors", _bullets(report.errors)),
        ("Warnings", _bullets(report.warnings)),
        ("Keys without the effect one might expect", _bullets(report.no_effect)),
        ("Keys with another name in MindFormers", _bullets(report.renamed)),
        ("Settings in effect (* written in the file; the others are defaults)", _settings(report, everything)),
        ("What is recorded (estimates, on average)", _recorded(report)),
        ("Text logs on the disk (rankd.logs; estimates, not compressed)", _kept(report.retained)),
        ("Parameters that the filters match", _filters(report.filters, everything)),
        ("Anomalies", report.alerts),
        ("Profiler", _profiler(report)),
        ("Output", _output(report)),
        ("Versions", _versions(report)),
    ]
    parts = []
    for title, lines in sections:
        body = "\n".join(f"  {line}".rstrip() for line in lines)
        if body:
            parts.append(f"{title}\n{body}")
    return "\n\n".join([*parts, _verdict(report)]) + "\n"


def _verdict(report: Report) -> str:
    found = f"{counted(len(report.errors), 'error')}, {counted(len(report.warnings), 'warning')}"
    return f"{report.source}: {'not usable' if report.errors else 'usable'} ({found})"


def _bullets(lines: Iterable[str]) -> list[str]:
    return [f"- {line}" for line in lines]


def _table(rows: Sequence[Sequence[str]], right: int = 0) -> list[str]:
    """Columns; those from the `right`-th on are numbers. `right` 0: none is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def cell(index: int, text: str) -> str:
        return text.rjust(widths[index]) if right and index >= right else text.ljust(widths[index])

    return ["  ".join(cell(index, text) for index, text in enumerate(row)).rstrip() for row in rows]


def _settings(report: Report, everything: bool) -> list[str]:
    rows = [
        (f"{'*' if setting.written else ' '} {setting.key}", json.dumps(setting.value))
        for setting in report.settings
        if everything or setting.written or not setting.key.startswith(("rankd.", "monitor_config.", "profiler."))
    ]
    left_out = len(report.settings) - len(rows)
    more = [f"  ({counted(left_out, 'more default')}: -v)"] if left_out else []
    return [*_table(rows), *more] if rows else more


def _recorded(report: Report) -> Iterator[str]:
    amount = report.estimate
    if amount is None:
        return
    shape = report.shape
    who = ranks_text(range(shape.world_size))
    yield f"by {who}; {counted(shape.micro_steps, 'micro-step')} a step, {_steps(shape)}"
    for line in report.assumed:
        yield f"assumed, because not given: {line}"
    yield ""
    head = ("metric", "written", "records", "lines", "text bytes")
    yield from _table([head, *(_row(row) for row in amount.rows)], 2)
    yield "(of one step of one rank, text counted once)"
    unknown = sorted({row.each for row in amount.rows if row.each is not None})
    if unknown:
        yield f"(not in the sums, because nobody has said how many there are: {', '.join(unknown)};"
        yield " --model tells the number of parameters and MoE layers)"
    yield ""
    yield from _sums(amount, shape)


def _steps(shape: Shape) -> str:
    return "steps not known" if shape.steps is None else counted(shape.steps, "step")


def _row(row: Row) -> tuple[str, ...]:
    each = "" if row.each is None else f" (for each {row.each})"
    amount = row.amount
    return (row.metric + each, row.when, _number(amount.records), _number(amount.lines), _number(amount.text))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _sums(amount: Estimate, shape: Shape) -> Iterator[str]:
    spans: list[tuple[str, float]] = [("a step", 1.0), (f"an hour at {shape.step_seconds:g} s a step", 0.0)]
    spans[1] = (spans[1][0], _HOUR / shape.step_seconds)
    if shape.steps is not None:
        spans.append(("its step" if shape.steps == 1 else f"all {shape.steps} steps", float(shape.steps)))
    head = ("all ranks together", "records", "lines", "on disk")
    rows = [(what, *_sum(amount.step, times), human_bytes(amount.disk * times)) for what, times in spans]
    yield from _table([head, *rows], 1)
    rest = "" if amount.complete else ", without the lines whose number is not known"
    yield f"(on disk: the text twice, by rank and merged, and the journal{rest})"


def _kept(kept: Retained | None) -> Iterator[str]:
    """What rotation and retention come to; nothing where no log is rotated."""
    if kept is None or not kept.logs.rotates:
        return
    logs = kept.logs
    size = None if logs.rotate_size is None else f"at {human_size(logs.rotate_size)}"
    span = None if logs.rotate_every is None else f"after each {human_time(logs.rotate_every)}"
    closed = " and ".join(each for each in (size, span) if each is not None)
    how = "compressed (gzip)" if logs.compress == "gzip" else "not compressed"
    yield f"merged.log and each rank's log: the file is closed {closed} and becomes a part, {how}"
    yield f"kept of the parts: {', '.join(_limits(kept)) or 'all'}"
    about = "about" if kept.whole else "at least"
    took = "" if kept.seconds is None else f", in {human_time(kept.seconds)}"
    amount = f"{human_bytes(kept.merged)} of merged.log, {human_bytes(kept.text)} of all text logs"
    yield "nothing is compressed or deleted that came after the newest checkpoint of the journal; there is one each"
    yield f"  {human_size(kept.segment)} of journal (rankd.journal.segment_size): {about} {amount}{took}"
    if kept.text_at_most is not None:
        yield f"all text logs together: about {human_bytes(kept.text_at_most)} at most, however long it trains"
    elif any(_limits(kept)):
        yield "all text logs together: not known, as long as the sums above leave something out"
    journal = "all of it" if kept.journal_at_most is None else f"about {human_bytes(kept.journal_at_most)} at most"
    yield f"the journal beside them: {journal} (rankd.journal.keep)"


def _limits(kept: Retained) -> Iterator[str]:
    logs = kept.logs
    if logs.keep_parts is not None:
        yield f"the newest {'one' if logs.keep_parts == 1 else logs.keep_parts} of each log"
    if logs.keep_size is not None:
        yield f"{human_size(logs.keep_size)} of all logs together"
    if logs.keep_for is not None:
        yield f"those whose last line is not older than {human_time(logs.keep_for)}"


def _sum(step: Amount, times: float) -> tuple[str, str]:
    return _number(step.records * times), _number(step.lines * times)


def _filters(filters: Sequence[FilterMatch], everything: bool) -> Iterator[str]:
    for match in filters:
        what = "true" if match.filter is None else json.dumps(match.filter)
        yield f"{match.key} {what}: {len(match.names)} of {match.of}"
        shown = match.names if everything else match.names[:_SHOWN_NAMES]
        yield from (f"  {name}" for name in shown)
        if len(shown) < len(match.names):
            yield f"  … and {len(match.names) - len(shown)} more (-v)"


def _profiler(report: Report) -> list[str]:
    profiler = report.profiler
    if profiler is None:
        return ["off"] if report.estimate is not None else []
    rows = [
        ("ranks", profiler.ranks),
        ("steps", profiler.steps),
        ("level", profiler.level),
        ("to", profiler.directory),
        ("expected size", f"{profiler.size}; a class, not a measurement"),
    ]
    return _table(rows)


def _output(report: Report) -> list[str]:
    rows = [
        (place.key, place.path, "" if place.free is None else f"{human_bytes(place.free)} free")
        for place in report.places
    ]
    return _table(rows) if rows else []


def _versions(report: Report) -> list[str]:
    rows = [(name, version or "not found here") for name, version in report.versions.items()]
    return _table(rows) if rows else []
