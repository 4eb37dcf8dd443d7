"""Norms through the whole way: two real ranks, their sockets, the collector, the text; against numpy in float64."""

from __future__ import annotations

import json
from typing import TypeAlias

import pytest

from rankd.collector.protocol.records import Comment, Record

from .jobs import job

pytestmark = pytest.mark.mindspore

RANKS = 2
CONFIG = """
monitor:
  train_state:
    local_norm: True
    device_norm: True
rankd:
  output: out
"""

# metric, rank, step, micro_step, parameter
Key: TypeAlias = tuple[str, int, int, int | None, str | None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[Key, float], list[Record | Comment]]:
    """The truth, and what merged.log says."""
    folder = tmp_path_factory.mktemp("norms")
    with job(folder, "norms.py", CONFIG, RANKS) as started:
        started.wait_for("the collector's end", started.has_ended)
        truth = {
            (metric, rank, step, micro_step, name): value
            for rank in range(RANKS)
            for metric, step, micro_step, name, value in json.loads((folder / f"truth_rank_{rank}.json").read_text())
        }
        return truth, started.content()


def norms(content: list[Record | Comment]) -> dict[Key, float]:
    """The norms of a log by what they are of; each of them once."""
    found: dict[Key, float] = {}
    for record in content:
        if isinstance(record, Record) and record.metric in ("local_norm", "device_norm"):
            key = (record.metric, record.rank, record.position.step, record.position.micro_step, record.name)
            assert key not in found
            assert isinstance(record.value, float)
            found[key] = record.value
    return found


def test_every_norm_agrees_with_the_independent_one(run: tuple[dict[Key, float], list[Record | Comment]]) -> None:
    """Each parameter, micro-step, step and rank is there once, and right to the sixth decimal, the last one printed."""
    truth, content = run
    seen = norms(content)
    assert seen.keys() == truth.keys()
    # Half a unit is the printing's; the other half leaves room for the sum of squares in float32.
    wrong = {key: (seen[key], value) for key, value in truth.items() if abs(seen[key] - value) > 1e-6}
    assert not wrong


def test_the_comparison_is_of_norms_that_differ(run: tuple[dict[Key, float], list[Record | Comment]]) -> None:
    """The gradients are such that a mix-up shows: ranks and micro-steps differ, and some increments are negative."""
    truth, _ = run
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    of_it = [value for key, value in truth.items() if key[4] == name]
    assert len({round(value, 6) for value in of_it}) == len(of_it) == RANKS * 3 * 4
    assert min(value for key, value in truth.items() if key[0] == "local_norm") < -1e-3
