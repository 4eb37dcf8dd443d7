"""How messages say a number of things."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rankd.collector.protocol.wording import counted

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("number", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1001, "1001 steps")])
def test_one_is_singular_and_nothing_else(number: int, text: str) -> None:
    """None of them are several, too."""
    assert counted(number, "step") == text


def test_a_plural_without_s_is_given() -> None:
    """And words that go with it, such as the verb."""
    assert [counted(n, "entry", "entries") for n in (1, 2)] == ["1 entry", "2 entries"]
    assert [counted(n, "step needs", "steps need") for n in (1, 2)] == ["1 step needs", "2 steps need"]


def test_documents_show_no_1_records() -> None:
    """What is shown in the documents is what the commands print."""
    wrong = re.compile(r"(?<![\d,.:-])1 (?:records|segments|entries|lines|ranks|steps|logs|items|blocks|bytes)\b")
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    assert len(pages) > 5
    assert [f"{page}: {m[0]}" for page in pages if (m := wrong.search(page.read_text(encoding="utf-8")))] == []
