"""What README.md names exists: tests, files and commands. A promise whose test has gone is no promise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from rankd.collector.cli import main

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_test_of_the_promises_exists() -> None:
    """Each promise names at least one, by file and function."""
    _, table = README.split("| promise | meaning | test |\n| --- | --- | --- |\n")
    promises = table.split("\n\n")[0].splitlines()
    assert len(promises) == 6
    for promise in promises:
        named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", promise)
        assert named, promise
        for path, name in named:
            functions = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
            assert any(isinstance(f, ast.FunctionDef) and f.name == name for f in functions), f"{path}::{name}"


def test_every_link_leads_to_a_file() -> None:
    """Relative links are relative to the repository."""
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_every_command_exists() -> None:
    """`rankd COMMAND`: one that the command line knows, `make VERB` one of the Makefile's."""
    for command in set(re.findall(r"`rankd ([a-z]+)", README)):
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0, command
    verbs = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE)) <= verbs
