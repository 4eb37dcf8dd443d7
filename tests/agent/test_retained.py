"""What rotation and retention leave on the disk, as `rankd check` says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rankd.agent.config import AgentConfig
from rankd.agent.estimate import Estimate, Shape, estimate, human_size, human_time
from rankd.agent.retained import Retained, retained, retention_warnings

MIB = 2**20
NAMES = tuple(f"decoder.layers.{i}.self_attention.linear_qkv.weight" for i in range(700))
SHAPE = Shape(8, 4, None, 1.0, NAMES)


def looked_at(
    logs: Mapping[str, object], journal: Mapping[str, object] | None = None, shape: Shape = SHAPE
) -> tuple[Retained, Estimate, list[str]]:
    """What stays, the estimate that it is made of, and the warnings."""
    rankd: dict[str, Any] = {"logs": logs, "journal": journal or {}}
    config = AgentConfig.from_mapping({"monitor": {"train_state": {"local_norm": True}}, "rankd": rankd})
    amount = estimate(config, shape)
    found = retained(config.rankd, shape, amount)
    return found, amount, list(retention_warnings(found, shape, amount))


def test_what_is_written_between_two_checkpoints() -> None:
    """As much as fills a segment of the journal: of norms some ten times as much text (docs/configuration.md)."""
    found, amount, _ = looked_at({"rotate_size": MIB})
    steps = 64 * MIB / amount.step.journal
    assert found.merged == pytest.approx(steps * amount.merged)
    assert found.text == pytest.approx(steps * (amount.merged + amount.step.text))
    assert found.seconds == pytest.approx(steps)
    assert 8 < found.merged / found.segment < 13
    half, _, _ = looked_at({"rotate_size": MIB}, {"segment_size": 32 * MIB})
    assert half.merged == pytest.approx(found.merged / 2)


def test_where_the_model_is_not_known_it_is_the_least() -> None:
    """One parameter counts then; more of them make more text of one byte of journal."""
    known, _, _ = looked_at({"rotate_size": MIB, "keep_parts": 1})
    unknown, _, (warning,) = looked_at({"rotate_size": MIB, "keep_parts": 1}, shape=Shape(8, 4))
    assert (known.whole, unknown.whole) == (True, False)
    assert unknown.segment < unknown.merged < known.merged
    assert (unknown.text_at_most, unknown.seconds) == (None, None)
    assert "and at least " in warning


def test_the_most_that_all_logs_take() -> None:
    """Parts that are kept, or what a checkpoint holds back, and the files that grow; the narrowest limit counts."""
    held = {"segment_size": 4096}
    parts, amount, _ = looked_at({"rotate_size": 100 * MIB, "keep_parts": 5}, held)
    assert parts.text_at_most == pytest.approx(9 * (5 + 1) * 100 * MIB)
    by_size, _, _ = looked_at({"rotate_size": MIB, "keep_size": 300 * MIB}, held)
    assert by_size.text_at_most == pytest.approx(300 * MIB + 9 * 2 * MIB)
    by_age, _, _ = looked_at({"rotate_size": MIB, "keep_for": 3_600}, held)
    assert by_age.text_at_most == pytest.approx(3_600 * (amount.merged + amount.step.text) + 9 * 2 * MIB)
    both, _, _ = looked_at({"rotate_size": MIB, "keep_for": 3_600, "keep_size": 300 * MIB}, held)
    assert both.text_at_most == by_size.text_at_most
    usual, _, _ = looked_at({"rotate_size": MIB, "keep_parts": 5})
    assert usual.text_at_most == pytest.approx(usual.text + 9 * 2 * MIB)


def test_parts_by_time_are_as_large_as_what_is_written_meanwhile() -> None:
    """Or as `rotate_size`, if that comes sooner."""
    daily, amount, _ = looked_at({"rotate_every": "1d"})
    assert daily.part == pytest.approx(86_400 * amount.merged)
    assert looked_at({"rotate_every": "1d", "rotate_size": MIB})[0].part == MIB
    assert looked_at({"rotate_every": "1d"}, shape=Shape(8, 4))[0].part is None


def test_what_nothing_limits_has_no_limit() -> None:
    """And the journal has one where `rankd.journal.keep` sets it."""
    found, _, warnings = looked_at({"rotate_size": MIB})
    assert (found.text_at_most, found.journal_at_most, warnings) == (None, None, [])
    assert looked_at({"rotate_size": MIB}, {"keep": 128 * MIB})[0].journal_at_most == (128 + 64) * MIB


@pytest.mark.parametrize(
    ("logs", "told"),
    [
        ({"rotate_size": MIB, "keep_parts": 2}, "rankd.logs.keep_parts: 2 parts of 1 MiB cannot be kept to, "),
        ({"rotate_size": MIB, "keep_parts": 1}, "rankd.logs.keep_parts: 1 part of 1 MiB cannot be kept to, "),
        ({"rotate_size": MIB, "keep_size": 20 * MIB}, "rankd.logs.keep_size: 20 MiB cannot be kept to, "),
        ({"rotate_size": MIB, "keep_for": "2min"}, "rankd.logs.keep_for: 2 min cannot be kept to, "),
    ],
)
def test_what_cannot_be_kept_is_warned_of(logs: dict[str, object], told: str) -> None:
    """A part is deleted behind a checkpoint only; with a smaller segment it can, and in a short training it will."""
    _, _, (warning,) = looked_at(logs)
    assert warning.startswith(f"{told}because a part is deleted (and compressed) only behind a checkpoint of ")
    assert warning.endswith("keep more, or make rankd.journal.segment_size (64 MiB) smaller")
    assert looked_at(logs, {"segment_size": 64 * 1_024})[2] == []
    assert looked_at(logs, shape=Shape(8, 4, 1, 0.001, NAMES[:10]))[2] == []
    _, _, (long,) = looked_at(logs, shape=Shape(8, 4, 1_000_000, 1.0, NAMES))
    assert long == warning


def test_sizes_and_times_for_people() -> None:
    """Sizes as the configuration has them, where they are whole."""
    sizes = [64 * 1_024, 64 * MIB, 3 * 2**30, 1_000_000, 2**20 + 1, 512]
    assert [human_size(n) for n in sizes] == ["64 KiB", "64 MiB", "3 GiB", "1 MB", "1.05 MB", "512 B"]
    assert [human_time(s) for s in (0.5, 60, 5_400, 86_400)] == ["0.5 s", "1 min", "1.5 h", "1 d"]
