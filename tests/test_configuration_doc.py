"""docs/configuration.md names every key, with its default, and only tests that exist."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from rankd.agent.config import MaxLogitsConfig, MoeMonitorConfig, OlderMonitorConfig, TrainStateConfig
from rankd.collector.config import (
    AlertConfig,
    JournalConfig,
    LogsConfig,
    OutputConfig,
    ProfileConfig,
    RankdConfig,
    SpoolConfig,
)
from rankd.collector.settings import MIB, Settings
from rankd.profiler_ctl.config import ProfilerConfig

ROOT = Path(__file__).parent.parent
REFERENCE, _, TESTS = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8").partition("## Which test holds")
SECTIONS = {
    "monitor.train_state": TrainStateConfig,
    "monitor.moe_monitor": MoeMonitorConfig,
    "callbacks[]": MaxLogitsConfig,
    "monitor_config": OlderMonitorConfig,
    "profiler": ProfilerConfig,
    "rankd": RankdConfig,
    "rankd.spool": SpoolConfig,
    "rankd.journal": JournalConfig,
    "rankd.profile": ProfileConfig,
    "rankd.logs": LogsConfig,
    "rankd.outputs[]": OutputConfig,
    "rankd.alerts[]": AlertConfig,
}
KEYS = [
    (f"{section}.{field.name}", field.default)
    for section, cls in SECTIONS.items()
    for field in dataclasses.fields(cls)
    if not isinstance(field.default, Settings)
]


def default_as_written(value: Any) -> str:
    """How the reference writes a default."""
    if isinstance(value, str | Path):
        return f"`{value}`"
    if value == ():
        return "`[]`"
    if isinstance(value, int) and value >= MIB:
        return f"{value // MIB} MiB"
    plain = {None: "null", True: "true", False: "false"}
    return plain[value] if value is None or isinstance(value, bool) else f"{value:g}" if value else "0"


@pytest.mark.parametrize(("key", "default"), KEYS, ids=[key for key, _ in KEYS])
def test_every_key_is_in_the_reference(key: str, default: Any) -> None:
    """A key that a section takes has a row with its default there."""
    (row,) = [line for line in REFERENCE.splitlines() if line.startswith("| `") and f"`{key}`" in line.split(" | ")[0]]
    written = row.split(" | ")[2]
    if key in ("callbacks[].type", "rankd.alerts[].metric"):
        assert written == "–"
    elif key.endswith("_norm") and key.startswith("monitor."):
        assert written == "false"
    else:
        assert written == default_as_written(default)


def test_every_key_of_the_seeds_has_a_test() -> None:
    """The last table has each key of the sections that the users' documents describe."""
    ours = [key for key, _ in KEYS if not key.startswith("rankd.")]
    assert [key for key in ours if f"`{key}`" not in TESTS] == []


def test_the_named_tests_exist() -> None:
    """Nobody renames a test and leaves the table behind."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TESTS)
    assert len(named) > 50
    wrong = [(file, test) for file, test in named if f"\ndef {test}(" not in (ROOT / file).read_text(encoding="utf-8")]
    assert wrong == []
