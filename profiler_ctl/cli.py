"""`rankd profile start | status | stop | list | summary`: profiling chosen ranks while they train."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from ..collector.protocol.checks import printable
from ..collector.protocol.ranges import ranks_text, steps_text
from ..collector.protocol.wording import counted
from . import requests
from .agreement import Phase
from .asked import ProfilerOptions
from .summary import Profile, find_profiles, read_profile, summary

__all__ = ["add_arguments", "run"]

# The ranks arm and the step is decided within the collector's ARM_TIMEOUT; a little more for a busy one.
_DECIDED_WITHIN = 60.0
_MOST_RANKS = 64
_NOT_HERE = "no profile can be read here; --in DIR names the folder in which the ranks' rank_N lie"
# As `requests.sessions` has it.
_Session: TypeAlias = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    begin = commands.add_parser("start", help="profile ranks, all at one step or none")
    _output(begin)
    begin.add_argument("--ranks", metavar="LIST", help="such as 0,8-10, or all")
    begin.add_argument("--pp-stage", type=int, metavar="N", help="only ranks of this pipeline stage")
    begin.add_argument("--one-per-node", action="store_true", help="only the lowest of these ranks on each host")
    begin.add_argument("--slowest", type=int, metavar="N", help="only the N of these that are furthest behind")
    begin.add_argument("--steps", type=int, default=1, metavar="N", help="how many steps (default: 1)")
    begin.add_argument("--at", type=int, metavar="STEP", help="the first global step; default: as soon as possible")
    begin.add_argument("--level", type=int, default=0, metavar="0|1|2", help="ProfilerLevel (default: 0)")
    begin.add_argument("--mstx", action="store_true", help="light-weight marks")
    begin.add_argument("--memory", action="store_true", help="memory of tensors")
    begin.add_argument("--no-cpu", action="store_true", help="without the CPU activity")
    begin.add_argument("--stack", action="store_true", help="Python call stacks")
    begin.add_argument("--output", dest="path", metavar="PATH", help="rank x writes to PATH/rank_x")
    begin.add_argument("--wait", action="store_true", help="until all have written, and show what")
    end = commands.add_parser("stop", help="end a session, or all")
    _output(end)
    end.add_argument("session", nargs="?", help="its name, such as p1; without: all")
    for name, text in (("status", "a session and each of its ranks"), ("list", "all sessions, a line each")):
        shown = commands.add_parser(name, help=text)
        _output(shown)
        if name == "status":
            shown.add_argument("session", nargs="?", help="its name; without: those that go on, or else the latest")
    after = commands.add_parser("summary", help="slowest operators and steps' durations, rank by rank")
    _output(after)
    after.add_argument("session", nargs="?", help="its name; without: all")
    after.add_argument("--in", dest="folder", type=Path, metavar="DIR", help="where the ranks' rank_N lie here")
    after.add_argument("--top", type=int, default=10, metavar="N", help="so many operators (default: 10)")


def run(args: argparse.Namespace) -> int:
    """Do it; 0: well, 1: the session failed or was called off, or there is nothing to show."""
    handlers = {"start": _start, "stop": _stop, "status": _status, "list": _list, "summary": _summary}
    return handlers[args.what](args)


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="OUTPUT", type=Path, help="the run's output directory")


def _start(args: argparse.Namespace) -> int:
    name = requests.start(
        args.run,
        ranks=args.ranks,
        steps=args.steps,
        at=args.at,
        options=ProfilerOptions(args.level, args.mstx, args.memory, not args.no_cpu, args.stack),
        path=args.path,
        pp_stage=args.pp_stage,
        one_per_node=args.one_per_node,
        slowest=args.slowest,
    )
    if args.level not in (0, 1, 2):
        print(f"--level {args.level}: allowed are 0, 1 and 2; LevelNone is used")
    session = requests.wait(args.run, name, decided=True, timeout=_DECIDED_WITHIN, told=_say)
    if args.wait:
        said = session["phase"]
        session = requests.wait(args.run, name, told=lambda each: _say(each) if each["phase"] != said else None)
        _show(session)
    return int(session["phase"] not in (Phase.COMMITTED.value, Phase.DONE.value))


def _stop(args: argparse.Namespace) -> int:
    stopped = requests.stop(args.run, args.session)
    print(f"stopping: {', '.join(stopped)}" if stopped else "nothing goes on")
    return 0


def _status(args: argparse.Namespace) -> int:
    found = requests.sessions(args.run)
    live = [each for each in found if not Phase(each["phase"]).final]
    chosen = [each for each in found if each["name"] == args.session] if args.session else live or found[-1:]
    if not chosen:
        print(_no_session(args.session, [each["name"] for each in found]))
        return 1
    for session in chosen:
        _say(session)
        _show(session)
    return 0


def _list(args: argparse.Namespace) -> int:
    for session in requests.sessions(args.run):
        _say(session)
    return 0


def _say(session: _Session) -> None:
    """One line."""
    steps = steps_text(session["start"], session["end"]) if session["start"] else counted(session["steps"], "step")
    ranks = ranks_text([part["rank"] for part in session["parts"]])
    parts = [str(session["phase"]), steps, ranks, f"level {session['level']}"]
    if session["bytes"]:
        parts.append(counted(session["bytes"], "byte"))
    why = f" ({session['reason']})" if session["reason"] else ""
    print(printable(f"{session['name']}: {', '.join(parts)}{why}", line=True), flush=True)


def _show(session: _Session) -> None:
    """A line for each rank."""
    for part in session["parts"][:_MOST_RANKS]:
        said = [f"  rank {part['rank']}: {part['outcome']}"]
        if part.get("count") and "first" in part and "last" in part:
            said.append(steps_text(part["first"], part["last"]))
        if part.get("path"):
            covered = {True: ", each step has events in the trace"}.get(part.get("covered"), "")
            took = part.get("seconds")
            export = "" if took is None else f", export {took:.1f} s"
            said.append(f"{part.get('bytes', '?')} bytes{export}{covered}, {part['path']}")
        print(printable(", ".join(said), line=True))
    if len(session["parts"]) > _MOST_RANKS:
        print(f"  … {counted(len(session['parts']) - _MOST_RANKS, 'rank')} more")


def _summary(args: argparse.Namespace) -> int:
    profiles, why = (_profiles_in if args.folder else _profiles_of)(args.folder or args.run, args.session)
    for line in [*summary(profiles, args.top), *([] if profiles else [why])]:
        print(printable(line, line=True))
    return int(not profiles)


def _profiles_in(folder: Path, wanted: str | None) -> tuple[list[Profile], str]:
    """Those below a folder; where there are none: why."""
    found = find_profiles(folder)
    profiles = [read_profile(path, rank) for (name, rank), path in found.items() if wanted in (None, name)]
    return profiles, _no_session(wanted, dict.fromkeys(name for name, _ in found)) if found else _NOT_HERE


def _profiles_of(output: Path, wanted: str | None) -> tuple[list[Profile], str]:
    """Those that the sessions of a run have written; where there are none: why."""
    known = requests.sessions(output)
    chosen = [each for each in known if wanted in (None, each["name"])]
    profiles = []
    for session in chosen:
        for part in session["parts"]:
            path = part.get("path")
            if isinstance(path, str) and is_asked_for(path, session["path"], part["rank"]) and Path(path).is_dir():
                profiles.append(read_profile(Path(path), part["rank"]))
    return profiles, _why_none(chosen) if chosen else _no_session(wanted, [each["name"] for each in known])


def _why_none(chosen: Sequence[_Session]) -> str:
    if all(each["phase"] == Phase.ABORTED.value for each in chosen):
        return "; ".join(f"{each['name']} was aborted: {each['reason']}" for each in chosen)
    if all(not Phase(each["phase"]).final for each in chosen):
        return f"{', '.join(each['name'] for each in chosen)}: not over yet; `rankd profile status` says how far it is"
    return _NOT_HERE


def _no_session(wanted: str | None, known: Collection[str]) -> str:
    return "no session yet" if wanted is None else f"no session {wanted}; there are: {', '.join(known) or 'none'}"


def is_asked_for(reported: str, asked: str | None, rank: int) -> bool:
    """Whether a directory that a rank has reported is where the key holder asked it to write.

    Args:
        asked: the path of the session; None: as the rank is configured, so that only the end of it is known.
    """
    path = PurePath(reported)
    if not path.is_absolute() or ".." in path.parts or not path.name.endswith("_ascend_ms"):
        return False
    if path.parent.name != f"rank_{rank}":
        return False
    base = path.parent.parent
    if asked is None:
        return True
    wanted = PurePath(asked)
    return base == wanted if wanted.is_absolute() else base.parts[-len(wanted.parts) :] == wanted.parts
