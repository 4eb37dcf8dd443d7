"""What is known of MindFormers' configuration keys: those that one of its trainers has under another name.

Read in the source of MindFormers 2.1.0 (pynative/config/config.py; trainer/trainer.py and trainer/utils.py of graph
mode). Its PyNative Trainer keeps unknown sections at the top without a word, so an older YAML there asks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

__all__ = ["KNOWN_VERSION", "is_pynative", "renamed"]

KNOWN_VERSION = "2.1.0"
# Sections by which a YAML of the PyNative Trainer is told.
_PYNATIVE = ("training", "parallelism")
# Graph mode's keys that the PyNative Trainer has under another name, and ignores.
_GRAPH_TO_PYNATIVE = {
    "runner_config": "training",
    "parallel_config": "parallelism",
    "lr_schedule": "lr_scheduler",
    "recompute_config": "recompute",
    "swap_config": "swap",
    "monitor_config": "monitor",
    "profile": "profiler.enable_profiling",
    "profile_start_step": "profiler.start_step",
    "profile_stop_step": "profiler.end_step",
    "profile_output": "profiler.output_path",
    "profile_rank_ids": "profiler.profiler_rank",
    "profile_memory": "profiler.profile_memory",
    "profiler_level": "profiler.profiler_level",
    "with_stack": "profiler.with_stack",
    "mstx": "profiler.mstx",
}
# Old names that version 2.1.0 still takes, with a warning of its own.
_DEPRECATED = {
    ("load_checkpoint",): "checkpoint.load_path",
    ("balanced_load",): "checkpoint.load_balanced",
    ("resume_training",): "checkpoint.no_load_optim (the opposite value)",
    ("reshard_worker_num",): "checkpoint.reshard_worker_num",
    ("monitor_config", "check_for_global_norm"): "monitor_config.health_checkpoint.global_norm_spike_threshold",
    ("monitor_config", "global_norm_spike_threshold"): "monitor_config.health_checkpoint.global_norm_spike_threshold",
}
# The same for arguments of the callback CheckpointMonitor.
_CHECKPOINT_MONITOR = {
    "keep_checkpoint_max": "checkpoint.save_max",
    "save_checkpoint_steps": "checkpoint.save_interleaved_steps",
    "save_optimizer": "checkpoint.no_save_optim (the opposite value)",
    "directory": "checkpoint.save_path",
}


def is_pynative(mapping: Mapping[str, object]) -> bool:
    """Whether a YAML is one for the PyNative Trainer."""
    return any(name in mapping for name in _PYNATIVE)


def renamed(mapping: Mapping[str, object]) -> Iterator[str]:
    """A line for each key that has another name in MindFormers 2.1.0."""
    if is_pynative(mapping):
        for old, new in _GRAPH_TO_PYNATIVE.items():
            if old in mapping:
                ours = "; rankd acts on it" if old == "monitor_config" else ""
                yield f"{old}: a key of graph mode, which the PyNative Trainer ignores; there it is `{new}`{ours}"
    for path, new in _DEPRECATED.items():
        if _has(mapping, path):
            yield f"{'.'.join(path)}: deprecated by MindFormers {KNOWN_VERSION}; now `{new}`"
    callbacks = mapping.get("callbacks")
    for index, entry in enumerate(callbacks if isinstance(callbacks, list) else ()):
        if isinstance(entry, Mapping) and entry.get("type") == "CheckpointMonitor":
            for old, new in _CHECKPOINT_MONITOR.items():
                if old in entry:
                    yield f"callbacks[{index}].{old}: deprecated by MindFormers {KNOWN_VERSION}; now `{new}`"


def _has(mapping: object, path: tuple[str, ...]) -> bool:
    here = mapping
    for name in path:
        if not isinstance(here, Mapping) or name not in here:
            return False
        here = here[name]
    return True
