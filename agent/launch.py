"""Rank 0 starts the collector, as a process in a session of its own.

On the first failing worker msrun kills the process groups of the others with SIGKILL; the collector has to survive
that, so it shares neither group, session, terminal nor pipes with the training process.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..collector.config import RankdConfig

__all__ = ["start_collector"]

log = logging.getLogger("rankd.agent")

# The collector's exit status for "could not start" (wrong configuration, output or endpoint not usable).
_COULD_NOT_START = 2
# Of the training's environment the collector must not inherit: who it is in the cluster, and what is preloaded there.
# Our own variables it does inherit, except for those that say who a rank is.
_NOT_INHERITED = re.compile(r"(MS_|RANK(_|$)|LOCAL_RANK|RANKD_(RANK|WORLD_SIZE)$|DEVICE_|LD_PRELOAD|OMPI_|SLURM_)")
_LAST_LINES = 5
# Seconds a collector waits at least for the first rank, however soon ranks count as lost: on a busy machine they need
# some to find it, and nobody starts it again once it has given up.
_LEAST_PATIENCE = 60.0


def start_collector(config: RankdConfig) -> None:
    """Start a collector for `config.output`, in the background; never raises and never waits.

    Where one works there already, the new one notices and ends. What goes wrong is one warning, from a thread that
    also takes the process's exit status.
    """
    threading.Thread(target=_start_and_watch, args=(config,), name="rankd-launch", daemon=True).start()


def _start_and_watch(config: RankdConfig) -> None:
    # The collector's working directory is this one, but a message with a whole path helps more.
    output = Path(config.output).absolute()
    try:
        log_path = output / ".rankd" / "collector.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log_file:
            begin = log_file.tell()
            process = _spawn(replace(config, output=output), log_file.fileno())
        status = process.wait()
        if status == _COULD_NOT_START:
            said = log_path.read_bytes()[begin:].decode(errors="replace").strip().splitlines()
            log.warning(
                "the collector could not start; training goes on, its records wait in the spool: %s",
                " | ".join(said[-_LAST_LINES:]),
            )
    except OSError as e:
        log.warning("the collector could not be started (%s); training goes on without logs", e)


def _spawn(config: RankdConfig, log_fd: int) -> subprocess.Popen[bytes]:
    patience = str(max(config.lost_after, _LEAST_PATIENCE))
    process = subprocess.Popen(  # noqa: S603 - our own module, no shell
        [sys.executable, "-m", "rankd.collector", "collect", "--settings", "-", "--patience", patience],
        stdin=subprocess.PIPE,
        stdout=log_fd,
        stderr=log_fd,
        start_new_session=True,
        env=_environment(os.environ),
    )
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(json.dumps(config.to_mapping()).encode())
    return process


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not _NOT_INHERITED.match(name)}
