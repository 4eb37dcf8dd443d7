"""The latest values for Prometheus, served over HTTP.

Series, all with the labels `rank` and `host`:

- `rankd_attempt`, `rankd_step`: where the rank is.
- `rankd_METRIC`: the latest value of a scalar.
- `rankd_METRIC_min`, `_max`, `_l2`: over the parameters or layers of a metric that has names (norms, logits, tokens); a
  series for each parameter is what Prometheus is not made for.
- `rankd_U__ESCAPED`: the same of a user's own metric whose name Prometheus does not allow, or is one of the above.

What a metric's series are called depends on its name alone, not on what else there is or came first, and no two metrics
share one: a dashboard shows the same curve after a restart, and never two as one.

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

from ..protocol.checks import printable
from ..protocol.records import KNOWN_METRICS, Comment, Frame, Level, RankBlock, metric_of
from .sink import Off

__all__ = ["MAX_METRICS", "MAX_RANKS", "PrometheusSink", "series_name"]

_logger = logging.getLogger(__name__)

# 64 × 1,024 series is what one Prometheus takes from one target without trouble.
MAX_METRICS = 64
MAX_RANKS = 1_024
# Where the rank is.
_PLACE = ("attempt", "step")
_FIGURES = ("min", "max", "l2")
_BEYOND = "values_not_exported"
# What no metric of a user's own may be called: the series of ours, and what a counter's may be called in OpenMetrics.
_OURS = frozenset(
    (
        *_PLACE,
        *KNOWN_METRICS,
        *(f"{metric}_{figure}" for metric in KNOWN_METRICS for figure in _FIGURES),
        *(f"{_BEYOND}{suffix}" for suffix in ("", "_total", "_created")),
    )
)
# As in Prometheus' own escaping of names (its "values" scheme), so no plain name may begin with it.
_ESCAPED = "U__"
_PLAIN = re.compile(rf"(?!{_ESCAPED})[a-zA-Z0-9_]+", re.ASCII)
_TO_ESCAPE = re.compile(r"[^a-zA-Z0-9]", re.ASCII)


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
        self._values: dict[str, dict[int, float]] = {name: {} for name in _PLACE}
        self._metrics: dict[str, str] = {}
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

    def metrics(self) -> dict[str, str]:
        """The metric that each series is of, where that is called otherwise."""
        with self._lock:
            return dict(self._metrics)

    def _take(self, block: RankBlock) -> None:
        rank = block.rank
        if rank >= MAX_RANKS:
            self._beyond += len(block.frames)
            return
        self._hosts[rank] = self._host_of(rank)
        self._values["attempt"][rank] = block.position.attempt
        self._values["step"][rank] = block.position.step
        for frame in block.frames:
            for name, value in _figures(frame, block.position.level):
                if name not in self._values:
                    if len(self._values) >= MAX_METRICS:
                        self._beyond += 1
                        continue
                    self._add(name, frame)
                self._values[name][rank] = value

    def _add(self, name: str, frame: Frame) -> None:
        self._values[name] = {}
        if frame.table is None and name != frame.metric:
            self._metrics[name] = frame.metric
            _logger.info(
                "the metric %r is rankd_%s for Prometheus: its own name is not allowed there, or is taken",
                frame.metric, name,
            )  # fmt: skip


def series_name(metric: str, level: Level) -> str:
    """What the series of a metric with one value is called, without `rankd_`; another one for each metric."""
    own = not metric_of(metric, level).known
    return _escaped(metric) if own and (metric in _OURS or not _PLAIN.fullmatch(metric)) else metric


def _escaped(metric: str) -> str:
    return _ESCAPED + _TO_ESCAPE.sub(lambda m: "__" if m[0] == "_" else f"_{ord(m[0]):x}_", metric)


def _figures(frame: Frame, level: Level) -> Iterator[tuple[str, float]]:
    values = frame.values
    if frame.table is None:
        yield series_name(frame.metric, level), values[0]
    elif values:
        found = (min(values), max(values), math.hypot(*values))
        yield from zip((f"{frame.metric}_{figure}" for figure in _FIGURES), found, strict=True)


class _Exporter:
    """Gives the registry what the sink holds, at each scrape."""

    def __init__(self, sink: PrometheusSink) -> None:
        self._sink = sink

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        values, hosts, beyond = self._sink.snapshot()
        metrics = self._sink.metrics()
        for name, by_rank in values.items():
            text = f"latest {printable(metrics.get(name, name), line=True)} of a rank"
            family = GaugeMetricFamily(f"rankd_{name}", text, labels=("rank", "host"))
            for rank, value in sorted(by_rank.items()):
                family.add_metric((str(rank), hosts.get(rank, "")), value)
            yield family
        text = "values beyond the bound on series"
        yield CounterMetricFamily(f"rankd_{_BEYOND}", text, value=beyond)
