"""Import rules that import-linter cannot see (see `[tool.importlinter]` in pyproject.toml)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("agent", "collector", "profiler_ctl")
SOURCES = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PROTOCOL = [p for p in SOURCES if p.match("collector/protocol/*.py")]
SETTINGS = [p for p in SOURCES if p.as_posix() in ("collector/settings.py", "collector/config.py")]
# The command line attaches the other packages' commands by name, when they are called.
NAMES_MODULES_IN_STRINGS = {Path("collector/cli.py")}
# MindFormers copies this file to a folder of its own and loads it from there.
LOADED_FROM_ELSEWHERE = Path("agent/adapters/registered/rankd_callback.py")


def module_name(path: Path) -> str:
    parts = ("rankd", *path.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Level (0: absolute) and module of each import statement, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""


def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path))


@pytest.mark.parametrize("path", PROTOCOL, ids=str)
def test_protocol_imports_its_siblings_only(path: Path) -> None:
    """collector.protocol imports no other room of ours, also none that the layers in pyproject.toml do not list."""
    depth = len(path.parts) - len(("collector", "protocol"))
    ours = [(level, name) for level, name in imports(parse(path)) if level > depth or name.split(".")[0] == "rankd"]
    assert ours == []


@pytest.mark.parametrize("path", SETTINGS, ids=str)
def test_settings_and_config_stand_on_the_ground(path: Path) -> None:
    """settings and config import of ours the protocol and each other, nothing of the collector's shell."""
    allowed = ("protocol", "settings", "config")
    upper = [name for level, name in imports(parse(path)) if level and name.split(".")[0] not in allowed]
    assert upper == []


@pytest.mark.parametrize("path", [p for p in SOURCES if p != LOADED_FROM_ELSEWHERE], ids=str)
def test_imports_of_ours_are_relative(path: Path) -> None:
    """Inside and across packages imports are relative, so that the import root can differ from the folder name."""
    absolute = {"rankd", "agent", "collector", "profiler_ctl"}
    assert [name for level, name in imports(parse(path)) if level == 0 and name.split(".")[0] in absolute] == []


@pytest.mark.parametrize("path", [p for p in SOURCES if p not in NAMES_MODULES_IN_STRINGS], ids=str)
def test_no_module_of_ours_is_imported_by_a_string(path: Path) -> None:
    """Only the command line loads modules by name; anywhere else the import contracts would not see it."""
    calls = [
        ast.unparse(node)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("import_module", "importlib.import_module", "__import__")
        and not (node.args and isinstance(node.args[0], ast.Constant) and "rankd" not in str(node.args[0].value))
    ]
    assert calls == []


def test_no_module_of_ours_imports_mindspore_when_it_is_imported() -> None:
    """Everything can be imported where MindSpore is not installed: it is imported inside functions only."""
    names = [module_name(path) for path in SOURCES]
    script = (
        "import importlib, sys\n"
        "sys.modules['mindspore'] = None\n"  # importing it now raises ImportError
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
