"""Mirrors mindformers/pynative/trainer/trainer.py and pynative/callback/callback.py: who is called, when, with what.

The order, from `Trainer.__init__`, `train`, `_inner_train_loop`, `training_step`, `training_pp_step`:

    __init__         built-in callbacks, the constructor's, the configuration's; then MonitorGroup(config, model=[…])
    train            monitor.setup(config, state); on_train_begin; the loop; on_train_end; monitor.close()
    each step        on_step_begin; monitor.reset(); monitor.record("moe_tpe_step_begin"); the micro-steps;
                     consumed_samples and global_step are counted up; on_step_end(loss, grad_norm, monitor, …);
                     monitor.flush(step)
    each micro-step  forward and backward of the loss divided by num_accumulation_steps; what that raises is a
                     RuntimeError; monitor.record("local_loss", loss, context={"micro_step": 0-based, "model": […]})
    after the last   optimizer, which clips in place, and gradients to None; should_record and record of device_loss
                     (all-reduced) and device_norm
    pipeline         no record of micro-steps; loss None except on the last stage; device_loss by MonitorCallback

The profiler's context is entered after on_train_begin. Nothing is caught: after an exception neither on_train_end nor
monitor.close is called. Left out: checkpoints, epochs' contents, dynamic batch sizes, communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from mindformers.pynative.config import train_config
from mindformers.pynative.tools.monitor import MonitorGroup, events
from mindformers.pynative.trainer.utils import get_grad
from mindformers.tools.register.register import MindFormerModuleType, MindFormerRegister

_EVENTS = ("on_train_begin", "on_step_begin", "on_step_end", "on_epoch_begin", "on_epoch_end", "on_train_end")


class MonitorCallback:
    """Mirrors pynative/callback/monitor_callback.py."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def on_step_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        monitor = kwargs.get("monitor")
        if monitor and monitor.active and kwargs.get("pp_metric_reduce_group") is not None:
            if kwargs.get("loss") is not None and monitor.should_record("device_loss"):
                monitor.record("device_loss", kwargs["loss"])
            if monitor.should_record("device_norm"):
                monitor.record("device_norm")


class CallbackHandler:
    def __init__(self, callbacks: Sequence[Any], **passed: Any) -> None:
        self.callbacks = list(callbacks)
        self._passed = passed

    def call_event(self, event: str, args: Any, state: Any, **kwargs: Any) -> None:
        assert event in _EVENTS
        events.append((event,))
        for callback in self.callbacks:
            getattr(callback, event)(args, state, **self._passed, **kwargs)


class Profiler:
    """Mirrors pynative/tools/profiler.py as far as whether it runs."""

    def __init__(self, config: Any) -> None:
        events.append(("stock profiler", str(config.enable_profiling)))


class Trainer:
    """Trains `model`, whose cells have `trainable_params()` and a `forward_backward(scale)` that returns a loss."""

    def __init__(
        self,
        config: dict[str, Any],
        model: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        callbacks: Sequence[Any] | None = None,
    ) -> None:
        self.config = train_config(config)
        self.model = model if isinstance(model, list) else [model]
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.num_accumulation_steps = self.config.training.global_batch_size // self.config.training.local_batch_size
        self.pp_enabled = self.config.parallelism.pipeline_parallel > 1
        configured = [
            MindFormerRegister.get_instance_from_cfg(dict(entry), MindFormerModuleType.CALLBACK)
            for entry in self.config.callbacks
        ]
        self.callback_handler = CallbackHandler(
            [MonitorCallback(), *(callbacks or []), *configured],
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            train_dataset=None,
            eval_dataset=None,
        )
        self.monitor = MonitorGroup(self.config, model=self.model)
        self.state: Any = None

    def train(self, global_step: int = 0) -> None:
        """`global_step`: what the checkpoint that is gone on from had reached."""
        self.state = SimpleNamespace(
            global_step=global_step,
            max_steps=self.config.training.steps,
            num_accumulation_steps=self.num_accumulation_steps,
            global_batch_size=self.config.training.global_batch_size,
            consumed_samples=0,
            is_train_begin=True,
        )
        self.monitor.setup(self.config, self.state)
        self.callback_handler.call_event("on_train_begin", self.config, self.state)
        self._inner_train_loop()
        self.callback_handler.call_event("on_train_end", self.config, self.state)
        self.monitor.close()

    def _inner_train_loop(self) -> None:
        Profiler(self.config.profiler)
        step = self.state.global_step
        while step < self.state.max_steps:
            self.callback_handler.call_event("on_step_begin", self.config, self.state)
            self.monitor.reset()
            self.monitor.record("moe_tpe_step_begin")
            loss, grad_norm = self._training_pp_step() if self.pp_enabled else self._training_step(step)
            self.state.consumed_samples += self.state.global_batch_size
            self.state.global_step += 1
            step = self.state.global_step
            self.callback_handler.call_event(
                "on_step_end",
                self.config,
                self.state,
                loss=loss,
                grad_norm=grad_norm,
                monitor=self.monitor,
                metric_reduce_group=None,
                metric_reduce_group_size=None,
                pp_metric_reduce_group="pp" if self.pp_enabled else None,
                pp_metric_reduce_group_size=None,
                has_last=True,
            )
            self.monitor.flush(step)

    def _training_step(self, step: int) -> tuple[Any, Any]:
        loss: Any = 0.0
        grad_norm: Any = 0.0
        for micro_step in range(self.num_accumulation_steps):
            try:
                micro_loss = self.model[0].forward_backward(1 / self.num_accumulation_steps)
            except Exception as e:
                raise RuntimeError(f"Error in training step {step}.") from e
            loss += micro_loss
            self.monitor.record("local_loss", micro_loss, context={"micro_step": micro_step, "model": self.model})
            if micro_step >= self.num_accumulation_steps - 1:
                grad_norm = self._optimizer_update()
                if self.monitor.should_record("device_loss"):
                    self.monitor.record("device_loss", loss)
                if self.monitor.should_record("device_norm"):
                    self.monitor.record("device_norm")
        return loss, grad_norm

    def _training_pp_step(self) -> tuple[Any, Any]:
        loss = sum(self.model[0].forward_backward(1.0) for _ in range(self.num_accumulation_steps))
        return loss / self.num_accumulation_steps, self._optimizer_update()

    def _optimizer_update(self) -> float:
        square = 0.0
        for model in self.model:
            for param in model.trainable_params():
                grad = get_grad(param)
                if grad is not None:
                    square += float((grad * grad).sum())
                    grad *= 0.5  # clipped in place
                param.grad = None
        return float(square**0.5)
