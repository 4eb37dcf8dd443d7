"""Host figures."""

from __future__ import annotations

import math

from rankd.agent.host import HostFigures


def test_figures_are_finite_numbers() -> None:
    """A sample names the process and the host, in finite numbers."""
    figures = HostFigures().sample()
    assert {"process_rss_bytes", "host_memory_percent", "host_cpu_percent"} <= figures.keys()
    assert all(isinstance(v, float) and math.isfinite(v) for v in figures.values())
    assert figures["process_rss_bytes"] > 0
