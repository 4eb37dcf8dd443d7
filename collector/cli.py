"""The command `rankd`. Each subcommand is a module with `add_arguments(parser)` and `run(args) -> exit status`.

Subcommands are attached by name and imported only when they are called: the collector does not depend on the other
packages, and `rankd collect` starts without what `rankd simulate` needs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from io import TextIOWrapper

from .protocol.arguments import Parser
from .protocol.errors import RankdError

__all__ = ["main"]

_COMMANDS = {
    "collect": (".collect", "run the collector of an output directory"),
    "tail": (".tail", "show the merged log: its history, and as it grows"),
    "status": (".statusview", "one screen: where the run and each of its ranks are"),
    "sample": (".sample", "record other steps than configured, on all ranks from the same step on, and back"),
    "stacks": (".stacksview", "where each rank is at this moment, for training that stands still"),
    "export": (".export", "a run's records at full precision, as JSON Lines, CSV or Parquet"),
    "parse": (".parsing", "text logs, also MindFormers' own, as records"),
    "profile": ("..profiler_ctl.cli", "profile chosen ranks while they train: start, status, stop, list, summary"),
    "check": ("..agent.checking", "say what a training YAML comes to: errors, what is recorded, how much"),
    "recover": ("..agent.recover", "deliver what killed processes have left in their spool files"),
    "verify": (".verify", "prove from the files alone that a run's logs are whole, in order, without a double"),
    "rebuild": (".rebuild", "make all logs of a run again from its journal, into a fresh directory"),
    "simulate": ("..agent.simulate", "try network and disk before a job: real agents, made-up metrics, no MindSpore"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit status: 0 well, 1 the command found something wrong, 2 it was called wrong."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the locale cannot show is no reason to fail
    argv = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    chosen, rest = parser.parse_args(argv[:1]), argv[1:]
    module_name, help_line = _COMMANDS[chosen.command]
    module = importlib.import_module(module_name, __package__)
    command = Parser(prog=f"rankd {chosen.command}", description=help_line)
    module.add_arguments(command)
    try:
        status = int(module.run(command.parse_args(rest)))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read the output has gone, and with it what is still buffered. The status is that of programs which
        # end of SIGPIPE: what a command had to find, it may not have found.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except RankdError as e:
        print(f"rankd {chosen.command}: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, _COMMANDS))
    lines = "\n".join(f"  {name:{width}}  {help_line}" for name, (_, help_line) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="rankd",
        description="Rank-aware aggregation of training metrics for MindSpore.",
        epilog=f"commands:\n{lines}\n\n`rankd COMMAND --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rankd {_version()}")
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND", help="one of the commands below")
    return parser


def _version() -> str:
    try:
        return metadata.version("rankd")
    except metadata.PackageNotFoundError:
        return "of a checkout that is not installed"
