"""The latest values for Prometheus, served over HTTP.

Series, all with the labels `rank` and `host`:

- `rankd_attempt`, `rankd_step`: where the rank is.
- `rankd_METRIC`: the latest value of a scalar.
- `rankd_METRIC_min`, `_max`, `_l2`: over the parameters or layers of a metric that has names (norms, logits, tokens); a
  series for each parameter is what Prometheus is not made for.

How many: at most MAX_METRICS different metrics, those that come first, for at most MAX_RANKS ranks, the lowest. What is
beyond is counted in `rankd_values_not_exported_total`.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..protocol.records import Comment, Frame, RankBlock
from .sink import Off

__all__ = ["MAX_METRICS", "MAX_RANKS", "PrometheusSink"]

_logger = logging.getLogger(__name__)

# 64 × 1,024 series is what one Prometheus takes from one target without trouble.
MAX_METRICS = 64
MAX_RANKS = 1_024
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusSink(Off):
    """Serves the latest values with prometheus-client (the extra `prometheus`); a `Sink` that keeps nothing.

    It cannot resume: after a restart it has what is released from then on, and from the journal's newest segment.

    Args:
        listen: HOST:PORT; PORT 0 takes a free one.
        host_of: the host of a rank.

    Raises:
        ImportError: prometheus-client is not installed.
        OSError: the address cannot be listened on.
    """

    def __init__(self, listen: str, host_of: Callable[[int], str]) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._host_of = host_of
        # What the HTTP threads read while the collector's thread writes.
        self._lock = threading.Lock()
        self._values: dict[str, dict[int, float]] = {"attempt": {}, "step": {}}
        self._hosts: dict[int, str] = {}
        self._beyond = 0
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Exporter(self))
        host, _, port = listen.rpartition(":")
        self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        _logger.info("metrics for Prometheus on http://%s:%d/metrics", host, self.port)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_port)

    def write(self, released: Sequence[RankBlock | Comment]) -> None:
        """Take these as the latest values."""
        with self._lock:
            for each in released:
                if isinstance(each, RankBlock) and not each.late:
                    self._take(each)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def snapshot(self) -> tuple[dict[str, dict[int, float]], dict[int, str], int]:
        """Values by metric and rank, hosts by rank, and how many values were not exported."""
        with self._lock:
            return {metric: dict(ranks) for metric, ranks in self._values.items()}, dict(self._hosts), self._beyond

    def _take(self, block: RankBlock) -> None:
        rank = block.rank
        if rank >= MAX_RANKS:
            self._beyond += len(block.frames)
            return
        self._hosts[rank] = self._host_of(rank)
        self._values["attempt"][rank] = block.position.attempt
        self._values["step"][rank] = block.position.step
        for frame in block.frames:
            for name, value in _figures(frame):
                if name not in self._values and len(self._values) >= MAX_METRICS:
                    self._beyond += 1
                    continue
                self._values.setdefault(name, {})[rank] = value


def _figures(frame: Frame) -> Iterator[tuple[str, float]]:
    name, values = _NOT_IN_NAMES.sub("_", frame.metric), frame.values
    if frame.table is None:
        yield name, values[0]
    elif values:
        yield f"{name}_min", min(values)
        yield f"{name}_max", max(values)
        yield f"{name}_l2", math.hypot(*values)


class _Exporter:
    """Gives the registry what the sink holds, at each scrape."""

    def __init__(self, sink: PrometheusSink) -> None:
        self._sink = sink

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        values, hosts, beyond = self._sink.snapshot()
        for metric, by_rank in values.items():
            family = GaugeMetricFamily(f"rankd_{metric}", f"latest {metric} of a rank", labels=("rank", "host"))
            for rank, value in sorted(by_rank.items()):
                family.add_metric((str(rank), hosts.get(rank, "")), value)
            yield family
        text = "values beyond the bound on series"
        yield CounterMetricFamily("rankd_values_not_exported", text, value=beyond)
