"""Pure: what stands beside the logs, so that somebody who finds them knows what ran: `run.json` and `RUN.md`.

Both are made from the hellos that the journal holds (and from who writes them), so they can be made again at any time:
nothing is lost when they are overwritten, and each attempt and each process of a rank adds to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import yaml

from .intake import Session
from .protocol.about import CONFIGURATION, unpack_text
from .protocol.jsontext import parsed
from .protocol.ranges import parse_ranks, ranges, ranks_text
from .run import Run

__all__ = ["Writer", "describe", "readable"]

DESCRIPTION_VERSION = 1
# Of a configuration; ours has five.
_MOST_LEVELS = 32
_VERSIONS = ("rankd", "python", "mindspore", "mindformers")
# Where a rank stands in the parallel layout, outermost first.
_COORDINATES = ("pp", "dp", "cp", "tp", "ep")
_INTRODUCTION = (
    "Written by rankd when ranks join, and added to at each attempt. `run.json` says the same, and each rank's "
    "process, for machines. Both are written anew each time: notes of your own belong into another file."
)
_SHOWN_AS = {"rankd": "rankd", "python": "Python", "mindspore": "MindSpore", "mindformers": "MindFormers"}


@dataclass(frozen=True, slots=True)
class Writer:
    """The collector that writes the description.

    Attributes:
        run: the id of the run.
        host, pid: its process.
        started: seconds since the epoch.
        versions: of rankd and Python there.
    """

    run: str
    host: str
    pid: int
    started: float
    versions: Mapping[str, str]


def describe(run: Run, writer: Writer) -> dict[str, Any]:
    """The description, as JSON holds it."""
    sessions = run.intake.sessions
    processes = _by_rank(sessions)
    newest = [those[-1] for those in processes]
    return {
        "description_version": DESCRIPTION_VERSION,
        "run": writer.run,
        "started": _time(min((s.hello.started for s in sessions), default=writer.started)),
        "expected_steps": max((s.hello.total_steps or 0 for s in newest), default=0) or None,
        "world_size": run.intake.attempt.world_size if run.intake.attempt else None,
        "local_norm_kind": _by_value("local_norm_kind", newest),
        "versions": {name: _by_value(name, newest) for name in _VERSIONS if _by_value(name, newest) is not None},
        "hosts": sorted({s.hello.host for s in newest}),
        "attempts": _attempts(run),
        "configuration": _configuration(sessions),
        "configuration_differs_on_ranks": _differing(newest),
        "ranks": [_rank(those) for those in processes],
        "collector": {
            "host": writer.host,
            "pid": writer.pid,
            "started": _time(writer.started),
            "versions": dict(writer.versions),
        },
    }


def _time(seconds: float) -> str | None:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):  # a peer's clock is not ours to trust
        return None


def _by_rank(sessions: Iterable[Session]) -> list[list[Session]]:
    """The processes of each rank, the newest last; a recovered one only where nothing else is known of its rank."""
    ranks: dict[int, list[Session]] = {}
    for session in sessions:
        ranks.setdefault(session.rank, []).append(session)
    return [sorted(ranks[rank], key=lambda s: (not s.hello.recovered, s.number)) for rank in sorted(ranks)]


def _by_value(fact: str, newest: Iterable[Session]) -> str | dict[str, str] | None:
    """What all ranks say; where they differ, the ranks by what they say; None: nobody says anything."""
    ranks: dict[str, list[int]] = {}
    for session in newest:
        value = session.hello.about.get(fact)
        if value is not None:
            ranks.setdefault(value, []).append(session.rank)
    if len(ranks) > 1:
        return {value: ranges(those) for value, those in ranks.items()}
    return next(iter(ranks), None)


def _attempts(run: Run) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for attempt in run.intake.attempts:
        reached = max(attempt.reached.values(), default=0) if run.ended else None
        last_step = attempt.left_at if attempt.left_at is not None else reached
        found.append({"attempt": attempt.number, "world_size": attempt.world_size, "last_step": last_step})
    return found


def _configuration(sessions: Iterable[Session]) -> object:
    """As the newest process that tells it has used it."""
    for session in reversed(list(sessions)):
        text = unpack_text(CONFIGURATION, session.hello.about)
        if text is not None:
            try:
                found = parsed(text)
            except ValueError:
                return text
            return found if _is_shallow(found) else text
    return None


def _is_shallow(value: object) -> bool:
    """Whoever writes it, as JSON or YAML, goes down as deep as it is."""
    level: list[object] = [value]
    for _ in range(_MOST_LEVELS):
        level = [each for one in level for each in _entries(one)]
        if not level:
            return True
    return False


def _entries(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _differing(newest: list[Session]) -> str | None:
    """The ranks whose configuration is another than the lowest rank's."""
    digests = [(session.rank, session.hello.about.get("configuration_digest")) for session in newest]
    told = [(rank, digest) for rank, digest in digests if digest is not None]
    return ranges([rank for rank, digest in told if digest != told[0][1]]) or None


def _rank(processes: list[Session]) -> dict[str, object]:
    *earlier, session = processes
    hello = session.hello
    coordinates = {name: hello.about[name] for name in _COORDINATES if name in hello.about}
    known = (*_VERSIONS, *_COORDINATES, "identity", "local_norm_kind", "configuration_digest")
    more = {k: v for k, v in hello.about.items() if k not in known and not k.startswith(f"{CONFIGURATION}.")}
    return {
        "rank": session.rank,
        **_process(session),
        "identity": hello.about.get("identity"),
        **({"coordinates": coordinates} if coordinates else {}),
        **({"about": more} if more else {}),
        **({"earlier_processes": [_process(s) for s in earlier]} if earlier else {}),
    }


def _process(session: Session) -> dict[str, object]:
    hello = session.hello
    return {"host": hello.host, "pid": hello.pid, "started": _time(hello.started), "attempt": session.attempt}


# -- for a person -----------------------------------------------------------------------------------------------------


def readable(description: Mapping[str, Any]) -> str:
    """`RUN.md`: the same for a person, in one page however many ranks there are."""
    parts = [
        "# What ran here",
        _INTRODUCTION,
        _table(("", ""), _overview(description)),
        "## Ranks",
        _table(("host", "ranks"), _hosts(description)),
        *_layout(description),
        "## Attempts",
        _table(
            ("attempt", "world_size", "last step"),
            [(a["attempt"], a["world_size"], _or_dash(a["last_step"])) for a in description["attempts"]],
        ),
        "## Configuration as used, defaults filled in",
        *_configuration_text(description),
    ]
    return "\n\n".join(parts) + "\n"


def _overview(description: Mapping[str, Any]) -> list[tuple[object, object]]:
    versions = ", ".join(f"{_SHOWN_AS[name]} {_said(v)}" for name, v in description["versions"].items())
    collector = description["collector"]
    return [
        ("started", description["started"]),
        ("steps expected", _or_dash(description["expected_steps"])),
        ("world size", _or_dash(description["world_size"])),
        ("local_norm means", _said(description["local_norm_kind"])),
        ("versions", versions or "-"),
        ("run", description["run"]),
        ("collector", f"process {collector['pid']} on {collector['host']}, since {collector['started']}"),
    ]


def _hosts(description: Mapping[str, Any]) -> list[tuple[object, object]]:
    by_host: dict[str, list[int]] = {}
    for rank in description["ranks"]:
        by_host.setdefault(rank["host"], []).append(rank["rank"])
    return [(host, ranges(ranks)) for host, ranks in by_host.items()]


def _layout(description: Mapping[str, Any]) -> list[str]:
    """The ranks at each coordinate of each dimension, where they are known."""
    ranks: dict[str, dict[str, list[int]]] = {}
    for rank in description["ranks"]:
        for name, value in rank.get("coordinates", {}).items():
            ranks.setdefault(name, {}).setdefault(value, []).append(rank["rank"])
    rows = [
        (f"{n} {value}", ranges(r)) for n, values in ranks.items() if len(values) > 1 for value, r in values.items()
    ]
    return [_table(("place in the layout", "ranks"), rows)] if rows else []


def _configuration_text(description: Mapping[str, Any]) -> list[str]:
    configuration = description["configuration"]
    if configuration is None:
        return ["Not told by any rank."]
    text = yaml.safe_dump(configuration, sort_keys=False, default_flow_style=None, width=120).rstrip()
    differing = description["configuration_differs_on_ranks"]
    warning = [f"**Another configuration is in use on {ranks_text(parse_ranks(differing))}.**"] if differing else []
    return [*warning, f"```yaml\n{text}\n```"]


def _said(value: object) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{what} on {ranks_text(parse_ranks(ranks))}" for what, ranks in value.items())
    return _or_dash(value)


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(value: object) -> str:
    # What peers say must not leave its cell.
    text = "".join(c if c.isprintable() else " " for c in str(value))
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
