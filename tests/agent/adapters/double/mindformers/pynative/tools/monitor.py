"""Mirrors mindformers/pynative/tools/monitor.py: MonitorGroup and what it prints of losses.

`events` keeps each call, for the tests. `train_state` is built where the configuration has that section and asks for
something in it; TensorBoard where its `output_dir` is set. Norm hooks are left out: the adapter has none of that.
"""

from __future__ import annotations

from typing import Any

# What is called, over all groups of the process.
events: list[tuple[str, ...]] = []


class MonitorGroup:
    def __init__(self, config: Any, model: Any = None) -> None:
        monitor = getattr(config, "monitor", None)
        train_state = getattr(monitor, "train_state", None)
        keys = ("local_loss", "device_loss", "device_norm")
        self._recorded = {key for key in keys if getattr(train_state, key, False)}
        self._tensorboard = bool(getattr(getattr(monitor, "tensorboard", None), "output_dir", ""))
        self._records: list[str] = []
        events.append(("built", ",".join(sorted(self._recorded)), f"tensorboard={self._tensorboard}"))

    @property
    def active(self) -> bool:
        return bool(self._recorded) or self._tensorboard

    def should_record(self, key: str) -> bool:
        return key in self._recorded

    def reset(self) -> None:
        events.append(("reset",))
        self._records = []

    def setup(self, config: Any = None, state: Any = None) -> None:
        events.append(("setup", type(config).__name__))

    def record(self, key: str, value: Any = None, context: dict[str, Any] | None = None) -> None:
        events.append(("record", key))
        if key == "local_loss" and key in self._recorded:
            micro_step = (context or {}).get("micro_step", 0) + 1
            self._records.append(f'{{"micro_step": {micro_step}, "local_loss": {float(value)}}}')
        elif key == "device_loss" and key in self._recorded:
            self._records.append(f'{{"device_loss": {float(value)}}}')

    def flush(self, step: int) -> None:
        events.append(("flush", str(step)))
        for record in self._records:
            print(f'stock {{"step": {step}}} {record}')
        self._records = []

    def close(self) -> None:
        events.append(("close",))
