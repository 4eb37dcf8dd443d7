"""What the ranks of a session did, side by side: the steps' durations, who waits for whom, the slowest operators.

Read from the ranks' directories: the receipt that rankd leaves beside a profile, and what MindSpore wrote. On a CPU
that is the Chrome trace. On Ascend it is op_statistic.csv or kernel_details.csv, step_trace_time.csv and
communication.json, by the column names of MindSpore 2.10's own writers; these were read and not run: no NPU was there.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .session import RECEIPT

__all__ = ["Operator", "Profile", "find_profiles", "read_profile", "summary"]

# Of one file, to be read into memory whole; a trace of a large model may be larger.
_MOST_BYTES = 512 * 2**20
_WIDEST_NAME = 40
_COLLECTIVE = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|barrier|hcom_|hccl", re.I)
# Who spends less than this share of what the others spend in collectives is the one that they wait for.
_WAITED_FOR = 0.5
# Below so many milliseconds a step nobody waits.
_LEAST_WAIT = 1.0
_CPU_OPERATOR = "HostCpuOps"
_INSTANCE = re.compile(r"-op\d+$")
_US = 1e-3


@dataclass(frozen=True, slots=True)
class Operator:
    """All calls of one operator on one rank: how many, and milliseconds in all."""

    name: str
    count: int
    total: float


@dataclass(frozen=True, slots=True)
class Profile:
    """One rank's profile.

    Attributes:
        steps: milliseconds of each step, by the rank's clock, by global step.
        operators: the slowest first.
        parts: milliseconds a step of what step_trace_time.csv names (`Computing`, `Free`, …); empty on a CPU.
        collectives: milliseconds in collectives, of all steps.
        waits: of these, milliseconds spent waiting; None: not told apart.
        source: the file that the operators are from.
        missing: what could not be read.
    """

    rank: int
    session: str
    path: Path
    steps: Mapping[int, float]
    operators: Sequence[Operator]
    parts: Mapping[str, float]
    collectives: float
    waits: float | None
    source: str
    missing: Sequence[str] = field(default=())


def find_profiles(folder: Path) -> dict[tuple[str, int], Path]:
    """The newest profile of each session and rank below `folder`/rank_N."""
    found: dict[tuple[str, int], Path] = {}
    for receipt in sorted(folder.glob(f"rank_*/*/{RECEIPT}"), key=lambda path: path.parent.name):
        number = receipt.parent.parent.name.removeprefix("rank_")
        session = _receipt(receipt.parent).get("session")
        if number.isdecimal() and isinstance(session, str):
            found[session, int(number)] = receipt.parent
    return found


def read_profile(path: Path, rank: int) -> Profile:
    """What a rank's directory holds; what cannot be read is left out and named."""
    receipt, missing = _receipt(path), []
    steps = {
        int(each["step"]): (each["end"] - each["begin"]) * 1e3
        for each in receipt.get("steps", ())
        if isinstance(each, dict) and {"step", "begin", "end"} <= set(each)
    }
    operators: dict[str, list[float]] = {}
    source = ""
    for name, read in (
        ("op_statistic.csv", _of_statistic),
        ("kernel_details.csv", _of_kernels),
        ("trace_view.json", _of_trace),
    ):
        file = next(iter(sorted(path.rglob(name))), None)
        if file is not None and not operators:
            try:
                operators, source = _added(read(file)), name
            except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
                missing.append(f"{name}: {type(error).__name__}: {error}"[:200])
    parts = _step_parts(path, missing)
    told = _communication(path, missing)
    listed = [Operator(name, int(count), total) for name, (count, total) in operators.items()]
    in_operators = sum(each.total for each in listed if _COLLECTIVE.search(each.name))
    return Profile(
        rank=rank,
        session=str(receipt.get("session", "?")),
        path=path,
        steps=steps,
        operators=sorted(listed, key=lambda each: -each.total),
        parts=parts,
        collectives=in_operators if told is None else told[0],
        waits=None if told is None else told[1],
        source=source,
        missing=missing,
    )


def summary(profiles: Sequence[Profile], most: int = 10) -> list[str]:
    """The lines that a person reads: of each session its steps, its waits and its slowest operators, rank by rank."""
    sessions: dict[str, list[Profile]] = defaultdict(list)
    for profile in profiles:
        sessions[profile.session].append(profile)
    lines: list[str] = []
    for name, ranks in sessions.items():
        ordered = sorted(ranks, key=lambda profile: profile.rank)
        lines += ["", *_session(name, ordered, most)] if lines else _session(name, ordered, most)
    return lines


# -- lines ------------------------------------------------------------------------------------------------------------


def _session(name: str, ranks: Sequence[Profile], most: int) -> Iterator[str]:
    heads = [f"rank {profile.rank}" for profile in ranks]
    yield f"session {name}"
    steps = sorted({step for profile in ranks for step in profile.steps})
    rows = [[f"step {step}", *(_ms(profile.steps.get(step)) for profile in ranks)] for step in steps]
    parts = list(dict.fromkeys(part for profile in ranks for part in profile.parts))
    rows += [[f"{part} (a step)", *(_ms(profile.parts.get(part)) for profile in ranks)] for part in parts]
    if any(profile.collectives for profile in ranks):
        rows.append(["in collectives (a step)", *(_ms(_a_step(profile, profile.collectives)) for profile in ranks)])
    if any(profile.waits is not None for profile in ranks):
        rows.append(["of that, waiting (a step)", *(_ms(_a_step(profile, profile.waits)) for profile in ranks)])
    yield from _table(["ms", *heads], rows)
    yield from _who_waits(ranks)
    yield ""
    yield from _operators(ranks, most, heads)
    for profile in ranks:
        for what in profile.missing:
            yield f"rank {profile.rank}: not read: {what}"


def _a_step(profile: Profile, total: float | None) -> float | None:
    return None if total is None else total / max(len(profile.steps), 1)


def _who_waits(ranks: Sequence[Profile]) -> Iterator[str]:
    """Everybody leaves a collective together: who is in it for the shortest has come last."""
    if len(ranks) < 2:
        return
    spent = {profile.rank: profile.collectives / max(len(profile.steps), 1) for profile in ranks}
    last = min(spent, key=lambda rank: spent[rank])
    others = {rank: ms for rank, ms in spent.items() if rank != last and ms - spent[last] >= _LEAST_WAIT}
    if others and spent[last] <= _WAITED_FOR * max(others.values()):
        waiting = ", ".join(f"rank {rank} {ms - spent[last]:.1f} ms" for rank, ms in others.items())
        yield f"rank {last} comes last to the collectives; a step the others wait for it: {waiting}"


def _operators(ranks: Sequence[Profile], most: int, heads: Sequence[str]) -> Iterator[str]:
    by_rank = [{each.name: each for each in profile.operators} for profile in ranks]
    worst: dict[str, float] = defaultdict(float)
    for operators in by_rank:
        for each in operators.values():
            worst[each.name] = max(worst[each.name], each.total)
    chosen = sorted(worst, key=lambda name: -worst[name])[:most]
    rows = [[_clipped(name), *(_calls(operators.get(name)) for operators in by_rank)] for name in chosen]
    sources = ", ".join(sorted({profile.source for profile in ranks if profile.source}))
    if rows:
        yield from _table([f"slowest operators: ms, calls ({sources})", *heads], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _calls(operator: Operator | None) -> str:
    return "-" if operator is None else f"{operator.total:,.2f} ×{operator.count}"


def _clipped(name: str) -> str:
    return name if len(name) <= _WIDEST_NAME else name[: _WIDEST_NAME - 1] + "…"


# -- files ------------------------------------------------------------------------------------------------------------


def _receipt(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / RECEIPT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(file: Path) -> str:
    size = file.stat().st_size
    if size > _MOST_BYTES:
        raise ValueError(f"{size} bytes are more than is read here ({_MOST_BYTES}); open it in a viewer")
    return file.read_text(encoding="utf-8-sig", errors="replace")


def _added(calls: Iterable[tuple[str, int, float]]) -> dict[str, list[float]]:
    """Count and milliseconds by name."""
    sums: dict[str, list[float]] = {}
    for name, count, total in calls:
        entry = sums.setdefault(name, [0, 0.0])
        entry[0] += count
        entry[1] += total
    return sums


def _of_trace(file: Path) -> Iterator[tuple[str, int, float]]:
    trace = json.loads(_text(file))
    events = trace.get("traceEvents", []) if isinstance(trace, dict) else trace
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    # On a CPU a layer of scopes (`Default`) spans the operators, which are marked as such.
    operators = [event for event in timed if event.get("args", {}).get("type") == _CPU_OPERATOR]
    for event in operators or timed:
        # Default/AllReduce-op0
        name = _INSTANCE.sub("", str(event["name"]).rpartition("/")[2])
        yield name, 1, float(event["dur"]) * _US


def _of_statistic(file: Path) -> Iterator[tuple[str, int, float]]:
    for row in csv.DictReader(_text(file).splitlines()):
        yield row["OP Type"].strip(), int(row["Count"]), float(row["Total Time(us)"]) * _US


def _of_kernels(file: Path) -> Iterator[tuple[str, int, float]]:
    for row in csv.DictReader(_text(file).splitlines()):
        yield (row.get("Type") or row["Name"]).strip(), 1, float(row["Duration(us)"]) * _US


def _step_parts(path: Path, missing: list[str]) -> dict[str, float]:
    """The means over the steps, in milliseconds."""
    file = next(iter(sorted(path.rglob("step_trace_time.csv"))), None)
    if file is None:
        return {}
    try:
        rows = list(csv.DictReader(_text(file).splitlines()))
        named = ("Computing", "Communication(Not Overlapped)", "Overlapped", "Free")
        return {
            name: sum(float(row[name]) for row in rows) * _US / len(rows) for name in named if rows and name in rows[0]
        }
    except (OSError, ValueError, TypeError, csv.Error) as error:
        missing.append(f"{file.name}: {type(error).__name__}: {error}"[:200])
        return {}


def _communication(path: Path, missing: list[str]) -> tuple[float, float] | None:
    """Milliseconds in collectives and of that waiting, of all steps; None: there is no such file."""
    file = next(iter(sorted(path.rglob("communication.json"))), None)
    if file is None:
        return None
    elapsed = waited = 0.0
    try:
        for step in json.loads(_text(file)).values():
            for name, operator in step.get("collective", {}).items():
                if not name.startswith("Total"):
                    told = operator["Communication Time Info"]
                    elapsed += float(told.get("Elapse Time(ms)", 0.0))
                    waited += float(told.get("Wait Time(ms)", 0.0))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        missing.append(f"{file.name}: {type(error).__name__}: {error}"[:200])
        return None
    return elapsed, waited
