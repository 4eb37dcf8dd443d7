"""For `mindspore.train.Model`: a callback that records what `Model.train` and `Model.fit` do.

    model.train(epochs, data, callbacks=[rankd_callback("train.yaml")])

A step of `Model` is one micro-step: loss, norms (PyNative mode) and learning rate of each step are recorded. What a
callback sees depends on the mode:

- PyNative: each step; norms through hooks on the parameters, of the gradient as the loss was scaled.
- Graph mode: each step; hooks would become part of the graph, so there are no norms, and a warning where they are
  asked for.
- Graph mode with dataset sink: `Model` calls back once a sink. What is recorded then is the last step of the sink, its
  time is that of the whole sink, and `sink_steps` says how many steps that were.

The loss is the one that this rank's network returned; `Model` reduces nothing over the ranks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..agent import Agent, Step
from ..anomaly import Anomaly
from ..config import AgentConfig
from .harmless import harmless
from .hooks import GradientHooks, parameters_of

__all__ = ["TrainRecorder", "rankd_callback"]

log = logging.getLogger("rankd.agent")


def rankd_callback(
    config: str | Path | AgentConfig,
    *,
    model: object = None,
    resumed_at: int | None = None,
    total_steps: int | None = None,
    about: Mapping[str, object] | None = None,
    on_anomaly: Callable[[Anomaly], object] | None = None,
) -> Any:
    """A `mindspore.train.Callback` for the `callbacks` of `Model.train` or `Model.fit`.

    Args:
        config: the training YAML, or what was read from it.
        model: whose parameters name the norms; None: the network of the `Model`.
        resumed_at: the global step at which the checkpoint was taken that training goes on from. None: taken from
            `initial_epoch` and the length of an epoch.
        total_steps: the length of the training in global steps; None: from `Model`'s epochs.
        about, on_anomaly: see `Agent`. With `rankd.on_anomaly: stop` AnomalyError comes out of `Model.train`.

    Raises:
        ConfigError: the configuration is wrong; nothing has been started.
    """
    read = config if isinstance(config, AgentConfig) else AgentConfig.from_yaml(config)
    return _callback_class()(TrainRecorder(read, model, resumed_at, total_steps, about, on_anomaly))


class TrainRecorder:
    """What the callback does, by `Model`'s events. `parameters` is what `RunContext.original_args()` gives."""

    def __init__(
        self,
        config: AgentConfig,
        model: object = None,
        resumed_at: int | None = None,
        total_steps: int | None = None,
        about: Mapping[str, object] | None = None,
        on_anomaly: Callable[[Anomaly], object] | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._resumed_at = resumed_at
        self._total_steps = total_steps
        self._about = about
        self._on_anomaly = on_anomaly
        self._agent: Agent | None = None
        self._hooks: GradientHooks | None = None
        self._step: Step | None = None
        self._offset = 0
        self._last = 0
        # `Model.fit` enters and leaves its callbacks once more for each evaluation.
        self._entered = 0

    def enter(self) -> None:
        """`Model` has begun to train or to evaluate."""
        self._entered += 1

    @harmless
    def epoch_begin(self, parameters: Any) -> None:
        """An epoch begins; at the first one it is known where training goes on from."""
        if self._agent is not None:
            return
        done = int(parameters.cur_step_num)
        self._offset = _offset(done, parameters, self._resumed_at)
        self._last = done + self._offset
        total = self._total_steps or self._last + int(parameters.epoch_num) * int(parameters.batch_num)
        model = parameters.network if self._model is None else self._model
        self._agent = Agent(
            self._config, model, total_steps=total, micro_steps=1, about=self._about, on_anomaly=self._on_anomaly
        )
        self._hooks = self._gradient_hooks(model)

    @harmless
    def step_begin(self, parameters: Any) -> None:
        """A step begins; its number counts already."""
        if self._agent is not None:
            self._finish_step(None)
            self._step = self._agent.step(int(parameters.cur_step_num) + self._offset)
            self._step.__enter__()

    @harmless
    def step_end(self, parameters: Any) -> None:
        """The optimizer has updated the parameters."""
        if self._agent is None:
            return
        step = int(parameters.cur_step_num) + self._offset
        loss = loss_of(parameters.net_outputs)
        grads = None if self._hooks is None else self._hooks.take()
        try:
            self._agent.micro_step(loss=loss, grads=grads)
        finally:
            # The step is over: where an anomaly stops the training, the rest of it is still recorded.
            self._end_step(self._agent, step, loss, parameters)
        self._finish_step(None)

    def _end_step(self, agent: Agent, step: int, loss: Any, parameters: Any) -> None:
        if step - self._last > 1:
            agent.log("sink_steps", step - self._last)
        self._last = step
        optimizer = parameters.optimizer or getattr(parameters.train_network, "optimizer", None)
        agent.end_step(loss=loss, lr=learning_rate(optimizer))

    @harmless
    def train_end(self) -> None:
        """Training has come to its planned end."""
        self._finish_step(None)
        self._close(None)

    @harmless
    def leave(self, error: BaseException | None) -> None:
        """`Model` has ended training or evaluation; `error` is what ended it, if anything did."""
        self._entered -= 1
        if self._entered <= 0:
            self._finish_step(error)
            self._close(error)

    def _finish_step(self, error: BaseException | None) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None if error is None else type(error), error, None)

    def _close(self, error: BaseException | None) -> None:
        agent, self._agent = self._agent, None
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.remove()
        if agent is not None:
            agent.__exit__(None if error is None else type(error), error, None)

    def _gradient_hooks(self, model: object) -> GradientHooks | None:
        train_state = self._config.monitor.train_state
        filters = [f for f in (train_state.local_norm, train_state.device_norm) if f]
        if not filters:
            return None
        import mindspore as ms

        if ms.get_context("mode") != ms.PYNATIVE_MODE:
            log.warning(
                "monitor.train_state asks for norms, which are not to be had in graph mode; set "
                "mindspore.set_context(mode=mindspore.PYNATIVE_MODE), or record the losses only"
            )
            return None
        return GradientHooks(parameters_of(model), lambda name: any(f.matches(name) for f in filters))


def _offset(done: int, parameters: Any, resumed_at: int | None) -> int:
    """What is added to `cur_step_num` to give the global step.

    `Model` counts from where it was told to (`initial_step`), which then is a global step, or from 0, also where
    `initial_epoch` says that epochs lie behind.
    """
    if resumed_at is not None:
        return resumed_at - done
    return 0 if done else (int(parameters.cur_epoch_num) - 1) * int(parameters.batch_num)


def loss_of(outputs: Any) -> Any:
    """The loss among what a train network returns: the output, or the first (before overflow and loss scale).

    One that was not reduced to a scalar is averaged, as MindSpore's LossMonitor does.
    """
    while isinstance(outputs, list | tuple):
        outputs = outputs[0] if outputs else None
    size = getattr(outputs, "size", 1)
    return outputs.mean() if isinstance(size, int) and size > 1 else outputs


def learning_rate(optimizer: Any) -> Any:
    """The learning rate of the update just made (of the first group, where there are several); None: not to be had."""
    if optimizer is None:
        return None
    groups = getattr(optimizer, "param_groups", None)
    if groups:  # mindspore.experimental.optim
        return groups[0]["lr"]
    rate = getattr(optimizer, "learning_rate", None)
    if rate is None:
        return None
    if getattr(optimizer, "is_group_lr", False):
        rate = rate[0]
    if getattr(optimizer, "dynamic_lr", False) and callable(rate):
        # The optimizer has counted the update already.
        rate = rate(optimizer.global_step - 1)
    return rate


@functools.cache
def _callback_class() -> Any:
    from mindspore.train import Callback

    class RankdCallback(Callback):  # type: ignore[misc]  # MindSpore has no types
        """See `rankd_callback`."""

        def __init__(self, recorder: TrainRecorder) -> None:
            super().__init__()
            self._recorder = recorder

        def __enter__(self) -> RankdCallback:
            self._recorder.enter()
            return self

        def __exit__(self, *error: object) -> None:
            self._recorder.leave(error[1] if len(error) > 1 and isinstance(error[1], BaseException) else None)

        def on_train_epoch_begin(self, run_context: Any) -> None:
            self._recorder.epoch_begin(run_context.original_args())

        def on_train_step_begin(self, run_context: Any) -> None:
            self._recorder.step_begin(run_context.original_args())

        def on_train_step_end(self, run_context: Any) -> None:
            self._recorder.step_end(run_context.original_args())

        def on_train_end(self, run_context: Any) -> None:  # noqa: ARG002 - MindSpore calls it so
            self._recorder.train_end()

    return RankdCallback
