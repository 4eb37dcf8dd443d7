"""What a process says about itself when it joins: versions and configuration, for the run's description."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from ..collector.protocol.about import CONFIGURATION, OWN_COLLECTOR, pack_text
from ..collector.protocol.records import MAX_NAME_BYTES
from ..collector.settings import Settings
from ..profiler_ctl.differences import ABOUT as PROFILER
from .config import AgentConfig
from .identity import Identity

__all__ = ["effective", "facts", "own_collector", "version_of"]

# The limits of `Hello.about`: what a user adds must not keep the agent from starting.
_MOST_ADDED = 16
_LONGEST_KEY, _LONGEST_VALUE = 64, 256
_DIGEST_DIGITS = 16
_MOST_PROFILER_PIECES = 8


def facts(config: AgentConfig, who: Identity, more: Mapping[str, object] | None = None) -> dict[str, str]:
    """The facts of this process.

    Args:
        config: the configuration as used. Rank 0 tells all of it, the others its digest, by which a difference is seen.
        who: the identity of the process.
        more: added as it is, as text; where the rank stands in the parallel layout (`dp`, `tp`, `pp`, `ep`), say.
    """
    text = json.dumps(effective(config))
    told = {
        "local_norm_kind": config.rankd.local_norm_kind,
        "identity": _clipped(who.source, _LONGEST_VALUE),
        "python": platform.python_version(),
        "configuration_digest": hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS],
    }
    for name in ("rankd", "mindspore", "mindformers"):
        version = version_of(name)
        if version is not None:
            told[name] = version
    more_facts = {_clipped(str(k), _LONGEST_KEY): _clipped(str(v), _LONGEST_VALUE) for k, v in (more or {}).items()}
    told |= dict([(k, v) for k, v in more_facts.items() if k][:_MOST_ADDED])
    told |= profiler_facts(config)
    return told | pack_text(CONFIGURATION, text) if who.rank == 0 else told


def own_collector(output: Path) -> dict[str, str]:
    """The fact that this job starts a collector of its own for `output`; none where the path is too long to be told."""
    path = os.path.realpath(output)
    raw = os.fsencode(path)
    return {OWN_COLLECTOR: path} if path.isprintable() and len(raw) <= MAX_NAME_BYTES else {}


def profiler_facts(config: AgentConfig) -> dict[str, str]:
    """The `profiler:` section as this process has read it, for the collector to compare; nothing where it is off."""
    if not config.profiler.enable_profiling:
        return {}
    packed = pack_text(PROFILER, json.dumps(config.profiler.to_mapping()))
    # A longer one lists more ranks than a hello has room for; then nobody compares.
    return packed if len(packed) <= _MOST_PROFILER_PIECES else {}


def effective(config: AgentConfig) -> dict[str, dict[str, object]]:
    """The sections that rankd reads, with every default filled in, as YAML and JSON hold them."""
    sections = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {
        # An entry of the list `callbacks` has no place of its own.
        section.dotted or f"callbacks.{name}": section.to_mapping()
        for name, section in sections.items()
        if isinstance(section, Settings)
    }


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution, without importing it; None: it is not installed."""
    try:
        return _clipped(metadata.version(distribution), _LONGEST_VALUE)
    except (metadata.PackageNotFoundError, TypeError):  # TypeError: broken metadata that has no version
        return None


def _clipped(text: str, longest: int) -> str:
    return text.encode("utf-8", "replace")[:longest].decode("utf-8", "ignore")
