"""The sinks of a run, as its configuration has them: the text logs, and beside them what `rankd.outputs` asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from .config import OutputConfig, RankdConfig
from .protocol.ranges import parse_ranks
from .selection import Selection
from .sinks.guarded import Guarded, Selected
from .sinks.retention import Retention, Rotation
from .sinks.sink import FanOut, Sink
from .sinks.speclog import SpecLogSink
from .sinks.table import csv_sink, jsonl_sink

__all__ = ["optional_sinks", "sink_of"]

_logger = logging.getLogger(__name__)


def sink_of(config: RankdConfig, host_of: Callable[[int], str], *others: Sink) -> FanOut:
    """Everything that a collector writes to.

    Args:
        config: the `rankd:` section.
        host_of: the host of a rank, for outputs that tell it.
        others: sinks of the collector's own.
    """
    return FanOut([_text_logs(config), *others, *optional_sinks(config, host_of)])


def _text_logs(config: RankdConfig) -> SpecLogSink:
    logs = config.logs
    return SpecLogSink(
        Path(config.output),
        index=True,
        rotation=Rotation(logs.rotate_size, logs.rotate_every) if logs.rotates else None,
        retention=Retention(logs.keep_parts, logs.keep_size, logs.keep_for, logs.compress == "gzip"),
    )


def optional_sinks(config: RankdConfig, host_of: Callable[[int], str]) -> list[Guarded]:
    """Those of `rankd.outputs`; one that cannot be made is told and left out: the logs go on without it."""
    out = []
    for output in config.outputs:
        try:
            sink = _make(output, Path(config.output), host_of)
        except ImportError as e:
            _logger.warning("rankd.outputs: %s is left out: %s; pip install 'rankd[%s]'", output.type, e, output.type)
            continue
        except Exception as e:  # noqa: BLE001 - whatever a library of others raises must not cost the logs
            _logger.warning("rankd.outputs: %s is left out: %s", output.type, e)
            continue
        ranks = None if output.ranks is None else parse_ranks(output.ranks)
        metrics = None if output.metrics is None else frozenset(output.metrics)
        out.append(Guarded(output.type, Selected(sink, Selection(ranks, metrics))))
    return out


def _make(output: OutputConfig, place: Path, host_of: Callable[[int], str]) -> Sink:
    if output.type == "jsonl":
        return jsonl_sink(place)
    if output.type == "csv":
        return csv_sink(place)
    if output.type == "tensorboard":
        from .sinks.tensorboard import TensorBoardSink

        return TensorBoardSink(place)
    from .sinks.prometheus import PrometheusSink

    return PrometheusSink(output.listen, host_of)
