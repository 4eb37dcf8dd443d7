"""Host figures."""

from __future__ import annotations

import math

import pytest

from rankd.agent.host import HostFigures


def test_figures_are_finite_numbers() -> None:
    """A sample names the process and the host, in finite numbers."""
    figures = HostFigures().sample()
    assert {"process_rss_bytes", "host_memory_percent", "host_cpu_percent"} <= figures.keys()
    assert all(isinstance(v, float) and math.isfinite(v) for v in figures.values())
    assert figures["process_rss_bytes"] > 0


def test_host_is_looked_at_every_few_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the figures is most of what an idle agent costs."""
    now, samples = [100.0], []
    figures = HostFigures(lambda: now[0])
    sample = figures.sample

    def counted() -> dict[str, float]:
        samples.append(now[0])
        return sample()

    monkeypatch.setattr(figures, "sample", counted)
    for _ in range(12):
        assert figures.latest()["process_rss_bytes"] > 0
        now[0] += 1.0
    # The first has no percentages yet.
    assert samples == [100.0, 101.0, 111.0]
