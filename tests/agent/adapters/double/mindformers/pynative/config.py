"""Mirrors mindformers/pynative/config/config.py: sections with defaults; unknown ones at the top are kept.

`to_dict` gives all of it as plain dictionaries, defaults filled in. Unknown keys inside `monitor`, `profiler` and
`training` are a ValueError.
"""

from __future__ import annotations

import copy
from typing import Any

_DEFAULTS: dict[str, Any] = {
    "training": {"steps": 1000, "local_batch_size": 1, "global_batch_size": 1},
    "parallelism": {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1, "expert_parallel": 1},
    "monitor": {
        "health_checkpoint": {"embedding_local_norm_threshold": 100.0},
        "train_state": {"local_norm": "", "local_loss": False, "device_norm": False, "device_loss": False},
        "tensorboard": {"output_dir": "", "log_interval": 1, "queue_size": 1000},
        "moe_monitor": {"save_tokens_per_expert_interval": None, "target_layers": None},
    },
    "profiler": {
        "enable_profiling": False,
        "start_step": 1,
        "end_step": 1,
        "output_path": None,
        "profiler_rank": None,
        "profiler_level": 0,
        "mstx": False,
        "profile_memory": False,
        "profile_cpu": True,
        "with_stack": True,
    },
    "callbacks": [],
}
_CLOSED = ("training", "monitor", "profiler")


class Section:
    """A section whose keys are attributes."""

    def __init__(self, fields: dict[str, Any]) -> None:
        for key, value in fields.items():
            setattr(self, key, Section(value) if isinstance(value, dict) else value)

    def to_dict(self) -> dict[str, Any]:
        return {k: v.to_dict() if isinstance(v, Section) else copy.deepcopy(v) for k, v in vars(self).items()}


def train_config(given: dict[str, Any]) -> Any:
    """The TrainConfig that a YAML gives."""
    merged = copy.deepcopy(_DEFAULTS)
    for key, value in given.items():
        if key in _CLOSED:
            unknown = [name for name in value if name not in merged[key]]
            if unknown:
                raise ValueError(f"Unknown configuration keys for {key}: {unknown}")
            for name, inner in value.items():
                merged[key][name] = {**merged[key][name], **inner} if isinstance(inner, dict) else inner
        else:
            merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return Section(merged)
