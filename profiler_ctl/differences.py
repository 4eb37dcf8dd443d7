"""Where ranks have read different `profiler:` sections, and in what. Pure.

Each rank says its own in its hello; rank 0's counts. A rank says nothing where it does not profile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..collector.protocol.about import unpack_text
from ..collector.protocol.errors import ConfigError
from ..collector.protocol.ranges import ranks_text
from .config import ProfilerConfig

__all__ = ["ABOUT", "differences", "read"]

# The entries of `Hello.about` that hold the section, as JSON.
ABOUT = "profiler"
_MOST_KEYS = 16


def read(about: Mapping[str, str]) -> ProfilerConfig:
    """A rank's section; profiling is off where it says none, or none that can be read."""
    written = unpack_text(ABOUT, about)
    try:
        return ProfilerConfig() if written is None else ProfilerConfig.from_mapping(json.loads(written))
    except (ValueError, ConfigError, RecursionError):
        return ProfilerConfig()


def differences(sections: Mapping[int, ProfilerConfig]) -> list[str]:
    """A line for each way in which ranks differ from rank 0: `ranks 2-3: end_step 9 (rank 0: 7)`.

    Args:
        sections: of the ranks that were heard, rank 0 among them.
    """
    reference = sections[0].to_mapping()
    on = sections[0].enable_profiling
    found: dict[tuple[str, str], list[int]] = {}
    for rank, section in sections.items():
        for key, value in section.to_mapping().items():
            # Where one of them is off, that is the difference.
            if value != reference[key] and (key == "enable_profiling" or (on and section.enable_profiling)):
                found.setdefault((key, _written(value)), []).append(rank)
    return [
        f"{ranks_text(ranks)}: {key} {value} (rank 0: {_written(reference[key])})"
        for (key, value), ranks in sorted(found.items())[:_MOST_KEYS]
    ]


def _written(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:99] + "…"
