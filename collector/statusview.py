"""`rankd status`: one screen: where the run and each of its ranks are, from the files that the collector keeps."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .place import holder
from .protocol.checks import printable
from .protocol.errors import RankdError
from .protocol.jsontext import parsed
from .protocol.wording import counted
from .status import STATUS

__all__ = ["add_arguments", "run", "screen"]

# Up to so many ranks are a table; more are a map of them, with the worst ones named.
_TABLE_RANKS = 32
_WORST = 10
_MAP_WIDTH = 64
# So many beats that did not come are worth a look.
_SILENT_BEATS = 5
# How often `--watch` looks.
_LOOK = 1.0
_SHADES = ".:-=+*#"
_HEADS = ("rank", "state", "step", "lag", "loss", "grad_norm", "beat", "host", "cpu", "rss", "held", "dropped")
# On a terminal that is too narrow for all columns these are left out, the first ones first.
_SPARE = ("cpu", "rss", "host", "held", "grad_norm")
# What a screen of something else fails with.
_NOT_OURS = (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError, OSError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("output", type=Path, help="the run's output directory")
    parser.add_argument("--watch", action="store_true", help="renew it each second, until Ctrl-C or the run's end")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Show it; 0: the run is on or has ended well, 1: a rank is lost or has failed, or the collector is gone."""
    while True:
        status = read_status(args.output)
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        try:
            status["collector"]["alive"] = holder(args.output) is not None
            text = json.dumps(status) if args.json else "\n".join(screen(status, time.time(), width, args.output))
            over, code = bool(status["ended"]), _exit_status(status)
        except _NOT_OURS as e:
            raise RankdError(
                f"{args.output / STATUS} is not what a collector writes: {type(e).__name__}: {e}"
            ) from None
        if args.watch and sys.stdout.isatty() and not args.json:
            text = "\033[H\033[J" + text
        print(text, flush=True)
        if not args.watch or over:
            return code
        time.sleep(_LOOK)


def read_status(output: Path) -> dict[str, Any]:
    """What the collector wrote last.

    Raises:
        RankdError: there is none, or it is of another version.
    """
    path = output / STATUS
    try:
        status = parsed(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RankdError(f"{path} is not there; is {output} the output directory of a run (rankd.output)?") from None
    except (OSError, ValueError) as e:
        raise RankdError(f"{path} cannot be read: {e}") from e
    if not isinstance(status, dict) or status.get("version") != 1:
        raise RankdError(f"{path} is not of this version")
    return status


def _exit_status(status: dict[str, Any]) -> int:
    gone = not status["ended"] and not status["collector"]["alive"]
    bad = any(each["state"] in ("lost", "held_out") or _failed(each) for each in status["ranks"])
    return int(gone or bad)


def _failed(rank: dict[str, Any]) -> bool:
    return rank["state"] == "finished" and rank["reason"] not in ("", "done")


def screen(status: dict[str, Any], now: float, width: int | None = None, output: Path = Path("OUTPUT")) -> list[str]:
    """The lines of the screen.

    Args:
        width: as many columns as the terminal has; None: it does not matter.
        output: the run's output directory, for the command that starts its collector again.
    """
    # Hosts and reasons are what the ranks say.
    return [printable(line, line=True) for line in _screen(status, now, width, output)]


def _screen(status: dict[str, Any], now: float, width: int | None, output: Path) -> list[str]:
    ranks: list[dict[str, Any]] = status["ranks"]
    lines = _head(status, now, output)
    if not ranks:
        return [*lines, "", "no rank has said hello yet"]
    if len(ranks) <= _TABLE_RANKS:
        return [*lines, "", *_table(ranks, width)]
    silent = _SILENT_BEATS * status["collector"]["beat_interval"]
    bad = [each for each in ranks if any(_badness(each)[:-1]) or (each["beat_age"] or 0.0) > silent]
    lines += ["", *_map(ranks), ""]
    if not bad:
        return [*lines, "no rank is gone, behind, silent, not finite or dropping"]
    worst = sorted(bad, key=_badness, reverse=True)[:_WORST]
    named = f"the worst {len(worst)} of {len(bad)} that are gone, behind, silent, not finite or dropping:"
    return [*lines, named, *_table(worst, width)]


def _head(status: dict[str, Any], now: float, output: Path) -> list[str]:
    total = "?" if status["total_steps"] is None else status["total_steps"]
    pace = status["seconds_per_step"]
    about = status["collector"]
    parts = [f"attempt {status['attempt']}", f"step {status['step']}/{total}", counted(status["world_size"], "rank")]
    if status["ended"]:
        parts.append("ended")
    elif pace is not None and about["alive"]:
        parts.append(f"{pace:.3g} s/step")
        if status["expected_end"] is not None and status["step"] < status["total_steps"]:
            parts.append(f"ends {time.strftime('%Y-%m-%d %H:%M', time.localtime(status['expected_end']))}")
    rate = "" if status["ended"] else f"{about['records_per_second']:,.0f} records/s, "
    rate += f"{about['backlog']:,} waiting"
    memory = f"{about.get('rss_bytes', 0) / 2**20:,.0f} MiB, {about.get('disk_free_bytes', 0) / 2**30:,.1f} GiB free"
    second = f"collector: process {about['pid']} on {about['host']}, {rate}, {memory}"
    again: list[str] = []
    if not about["alive"] and not status["ended"]:
        ago = f"{now - status['time']:,.0f} s ago"
        second = f"collector: gone, and all below is as it was {ago}"
        command = f"rankd collect {shlex.quote(str(output))}"
        again = [f"start it again: `{command}`, with the same --config and --endpoint if it was given one"]
    refused = ", ".join(f"{count} × {kind}" for kind, count in sorted(about["refused"].items()))
    return [", ".join(parts), second, *again, *([f"refused: {refused}"] if refused else [])]


def _table(ranks: Sequence[dict[str, Any]], width: int | None) -> list[str]:
    columns = list(zip(_HEADS, *map(_row, ranks), strict=True))
    for spare in _SPARE:
        if width is None or len(_lines(columns)[0]) <= width:
            break
        columns = [column for column in columns if column[0] != spare]
    return [line.rstrip() for line in _lines(columns)]


def _lines(columns: Sequence[Sequence[str]]) -> list[str]:
    padded = []
    for column in columns:
        most = max(map(len, column))
        left = column[0] in ("state", "host")
        padded.append([cell.ljust(most) if left else cell.rjust(most) for cell in column])
    return ["  ".join(cells) for cells in zip(*padded, strict=True)]


def _row(rank: dict[str, Any]) -> tuple[str, ...]:
    micro = "" if rank["micro_step"] is None else f".{rank['micro_step']}"
    figures = rank["host_figures"]
    cpu, rss = figures.get("process_cpu_percent"), figures.get("process_rss_bytes")
    state = f"failed: {rank['reason']}"[:40] if _failed(rank) else rank["state"]
    return (
        str(rank["rank"]), state, f"{rank['step']}{micro}", _text(rank["lag"]), _figure(rank["loss"]),
        _figure(rank["grad_norm"]), "-" if rank["beat_age"] is None else f"{rank['beat_age']:.1f} s", rank["host"],
        "-" if cpu is None else f"{float(cpu):.0f} %", "-" if rss is None else f"{float(rss) / 2**20:,.0f} M",
        _text(rank["held"]), _dropped(rank),
    )  # fmt: skip


def _dropped(rank: dict[str, Any]) -> str:
    """By the agent; and what the collector has lost, where that is anything."""
    lost = rank.get("lost", 0)
    return f"{rank['dropped']} + {lost} lost" if lost else str(rank["dropped"])


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _figure(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.6g}"


def _badness(rank: dict[str, Any]) -> tuple[float, ...]:
    """What makes a rank worth a look: gone, not finite, behind, dropping, silent."""
    gone = {"lost": 3, "held_out": 2, "expected": 1}.get(rank["state"], 3 * _failed(rank))
    odd = isinstance(rank["loss"], str) or isinstance(rank["grad_norm"], str)
    return (gone, odd, rank["lag"] or 0, rank["dropped"] + rank.get("lost", 0) > 0, rank["beat_age"] or 0.0)


def _map(ranks: Sequence[dict[str, Any]]) -> list[str]:
    """A character a rank: how far it is behind, or that it is gone."""
    most = max(((each["lag"] or 0) for each in ranks), default=0)
    cells = [_cell(each, most) for each in ranks]
    lines = [f"{row:6}  {''.join(cells[row : row + _MAP_WIDTH])}" for row in range(0, len(cells), _MAP_WIDTH)]
    marks = "L lost, H held out, F failed, ? not heard, N not finite"
    behind = f" … {_SHADES[-1]} {most} step{'s' if most > 1 else ''} behind" if most else ""
    legend = f"{_SHADES[0]} at the front{behind}; {marks}"
    return [*lines, legend, *_count(ranks)]


def _cell(rank: dict[str, Any], most: int) -> str:
    mark = {"lost": "L", "held_out": "H", "expected": "?", "closed": " "}.get(rank["state"])
    if mark is None and _failed(rank):
        mark = "F"
    if mark is None and (isinstance(rank["loss"], str) or isinstance(rank["grad_norm"], str)):
        mark = "N"
    lag = rank["lag"] or 0
    return mark or _SHADES[math.ceil(lag / most * (len(_SHADES) - 1)) if lag else 0]


def _count(ranks: Sequence[dict[str, Any]]) -> list[str]:
    states: dict[str, int] = {}
    for each in ranks:
        states[each["state"]] = states.get(each["state"], 0) + 1
    return [", ".join(f"{count} {state}" for state, count in sorted(states.items()))]
