"""`rankd collect`: the collector of one output directory, in the foreground."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from .config import RankdConfig, output_of
from .memory import collect_garbage_seldom, keep_freed_memory
from .protocol.checks import printable
from .protocol.errors import ConfigError, RankdError
from .protocol.normlines import load_numpy
from .server import Collector
from .settings import load_yaml, misspelt_sections

__all__ = ["add_arguments", "run"]

_logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("output", nargs="?", help="output directory; default: rankd.output of the configuration")
    parser.add_argument("--config", metavar="YAML", help="training YAML with a `rankd:` section")
    parser.add_argument("--endpoint", metavar="tcp://HOST:PORT", help="where to listen; PORT * takes a free one")
    parser.add_argument("--settings", choices=["-"], help="read the `rankd:` section as JSON from standard input")
    parser.add_argument(
        "--near", metavar="HOST", help="how other nodes know this one, where no endpoint is set: listen there"
    )
    parser.add_argument(
        "--patience", type=float, metavar="SECONDS", help="end when no rank has come by then; default: wait for ever"
    )


def run(args: argparse.Namespace) -> int:
    """Collect until the run has ended; 0: all ranks have said goodbye, 1: some are missing, or records of some are left
    in spool files, 128+N: signal N.
    """
    _set_up_logging()
    keep_freed_memory()
    collect_garbage_seldom()
    # Its BLAS would start a thread for each core, and is not used.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    load_numpy()
    config = RankdConfig.from_mapping(_section(args))
    changes = {key: value for key in ("output", "endpoint") if (value := getattr(args, key)) is not None}
    config = dataclasses.replace(config, **changes)
    try:
        collector = Collector(config, patience=args.patience, near=args.near)
    except OSError as e:
        where = e.filename or config.output
        raise RankdError(f"the collector cannot start in {config.output}: {where}: {e.strerror}") from e
    outcome = collector.run()
    print(outcome.summary, flush=True)
    return outcome.status


class _Formatter(logging.Formatter):
    """What peers say may stand in a message: no control character of theirs reaches a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _set_up_logging() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _section(args: argparse.Namespace) -> dict[str, Any]:
    if args.settings is not None:
        section = json.load(sys.stdin)
    elif args.config is not None:
        loaded = load_yaml(args.config)
        for warning in misspelt_sections(loaded, {name: name for name in ("rankd", "monitor_config")}):
            _logger.warning("%s", warning)
        section = loaded.get("rankd") or {}
        if isinstance(section, dict):
            section = {**_older_output(loaded.get("monitor_config")), **section}
    else:
        section = {}
    if not isinstance(section, dict):
        raise ConfigError(f"rankd: expected a section of keys, got {section!r}")
    return section


def _older_output(older: object) -> dict[str, Any]:
    """The output directory as `monitor_config.dump_path` names it; the agents check that both forms agree."""
    if not isinstance(older, dict) or older.get("monitor_on") is not True:
        return {}
    path = older.get("dump_path")
    return {"output": str(output_of(Path(path)))} if isinstance(path, str) and path else {}
