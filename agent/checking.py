"""`rankd check`, the command: gathers what `check.examine` needs, and prints what it finds."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..collector.protocol.arguments import whole_number
from ..collector.protocol.errors import ConfigError, RankdError
from ..collector.settings import load_yaml
from . import adapters
from .about import version_of
from .check import Facts, Place, Report, examine, training_of
from .check_text import render
from .config import AgentConfig, section_warnings
from .moe import discover
from .norms import trainable_names

__all__ = ["add_arguments", "run"]

_DISTRIBUTIONS = ("rankd", "mindspore", "mindformers", "numpy")
# Cleared at boot or by age on the usual systems; /dev/shm and /run are memory.
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 - named to be warned of
_MINDSPORE_LEVEL = "GLOG_v"
# MindSpore's own levels, where its profiler says what went wrong: 3 is errors only.
_MINDSPORE_ERRORS_ONLY = ("3", "4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    positive = whole_number(1)
    parser.add_argument("config", type=Path, metavar="train.yaml", help="the training YAML")
    parser.add_argument("--model", metavar="FILE.py:FUNCTION", help="builds the model; its parameters are matched")
    parser.add_argument("--world-size", type=positive, metavar="N", help="number of ranks")
    parser.add_argument("--steps", type=positive, metavar="N", help="length of the training")
    parser.add_argument("--micro-steps", type=positive, metavar="N", help="micro-batches of a step")
    parser.add_argument("--step-seconds", type=float, metavar="S", help="how long a step takes (default 1)")
    parser.add_argument("-v", "--verbose", action="store_true", help="all settings, and all names that filters match")
    parser.add_argument("--json", action="store_true", help="the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Check; 0: usable, 1: there are errors.

    Raises:
        ConfigError: there is nothing that could be checked: the file cannot be read, or an argument is wrong.
    """
    if args.step_seconds is not None and not 0 < args.step_seconds < float("inf"):
        raise ConfigError(f"--step-seconds must be above zero, got {args.step_seconds}")
    report = _report(args)
    if args.json:
        print(json.dumps(report.to_mapping(), indent=1, default=str))
    else:
        print(render(report, everything=args.verbose), end="")
    return report.status


def _report(args: argparse.Namespace) -> Report:
    source = str(args.config)
    versions = _versions()
    mapping: Mapping[str, object] = {}
    try:
        mapping = load_yaml(args.config)
        config = AgentConfig.from_mapping(mapping)
    except RankdError as e:
        if isinstance(e.__cause__, OSError):
            raise  # it says nothing about what the file holds
        return Report(source, tuple(str(e).splitlines()), section_warnings(mapping), versions=versions)
    shape, assumed = training_of(mapping, args.world_size, args.micro_steps, args.steps, args.step_seconds)
    errors: tuple[str, ...] = ()
    if args.model is not None:
        try:
            model = _build(args.model)
            shape = replace(shape, names=tuple(trainable_names(model)), experts=_experts(model, config))
        except RankdError as e:
            errors = (f"--model: {e}",)
    register_path = (os.environ.get("REGISTER_PATH", ""), str(Path(adapters.__file__).parent / "registered"))
    facts = Facts(versions, list(_places(mapping, config)), list(_hidden()), register_path)
    report = examine(source, mapping, config, shape, assumed, facts)
    return replace(report, errors=(*errors, *report.errors))


def _versions() -> dict[str, str | None]:
    return {"python": platform.python_version(), **{name: version_of(name) for name in _DISTRIBUTIONS}}


def _build(what: str) -> Any:
    """The model that `FILE.py:FUNCTION` builds. The file's own folder can be imported from, as when it is run."""
    file, separator, function = what.rpartition(":")
    if not separator or not function.isidentifier():
        raise ConfigError(f"found {what!r}, allowed: FILE.py:FUNCTION")
    path = Path(file).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"{file} is not a Python file that can be read")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
        return getattr(module, function)()
    except Exception as e:
        raise ConfigError(f"{what} failed: {type(e).__name__}: {e}") from e


def _experts(model: object, config: AgentConfig) -> tuple[tuple[str, int], ...] | None:
    """The MoE layers that would be recorded, and the experts of each; None: the model does not tell."""
    moe = config.monitor.moe_monitor
    if not moe:
        return ()
    layers = discover(model, moe.target_layers)
    return tuple((layer.name, int(cell.tokens_per_expert.shape[0])) for layer, cell in layers)


def _places(mapping: Mapping[str, object], config: AgentConfig) -> Iterator[Place]:
    older = mapping.get("monitor_config")
    by_older = isinstance(older, Mapping) and "dump_path" in older and config.monitor_config.dump_path is not None
    yield _place("monitor_config.dump_path" if by_older else "rankd.output", Path(config.rankd.output))
    if config.profiler.enable_profiling:
        yield _place("profiler.output_path", config.profiler.output_path or Path("profile"))
    if config.rankd.spool.directory is not None:
        yield replace(_place("rankd.spool.directory", config.rankd.spool.directory), temporary=None)


def _place(key: str, path: Path) -> Place:
    whole = path.absolute()
    there = next((folder for folder in (whole, *whole.parents) if folder.exists()), Path("/"))
    try:
        free: int | None = shutil.disk_usage(there).free
    except OSError:
        free = None
    return Place(key, str(path), _temporary(whole), free)


def _temporary(path: Path) -> str | None:
    real = path.resolve()
    for folder in dict.fromkeys((tempfile.gettempdir(), *_TEMPORARY)):
        if real.is_relative_to(Path(folder).resolve()):
            return folder
    return None


def _hidden() -> Iterator[str]:
    """What keeps messages from being seen; asked after a model's file has been run, which may have set it."""
    ours = logging.getLogger("rankd.agent")
    if not ours.isEnabledFor(logging.WARNING):
        name = logging.getLevelName(max(ours.getEffectiveLevel(), logging.root.manager.disable))
        yield (
            f"logging: the level of the logger rankd.agent is {name} here, which hides rankd's warnings (the records "
            "are files, and do not depend on it)"
        )
    level = os.environ.get(_MINDSPORE_LEVEL)
    if level in _MINDSPORE_ERRORS_ONLY:
        yield (
            f"logging: {_MINDSPORE_LEVEL}={level} hides MindSpore's own warnings, its profiler's among them "
            "(rankd's are not affected)"
        )
