"""For the PyNative Trainer of MindFormers 2.x: a callback that its configuration names.

    callbacks:
      - type: RankdCallback
        auto_register: rankd_callback.RankdCallback

with `REGISTER_PATH` naming the folder that `python -m rankd.agent.adapters` prints. A script of one's own may call
`register()` instead, or pass `RankdCallback()` in `Trainer(callbacks=[…])`.

How it gets what callbacks are not given (read in MindFormers 2.1.0, pynative/trainer/trainer.py): the Trainer makes its
callbacks before its `MonitorGroup`. So the constructor here puts a function in the place of that name, once, which
makes the `MonitorGroup` and returns it inside a `_Monitor`. That one passes every call on, and sees
`record("local_loss")` after each micro-step's backward pass and before the optimizer's update: there the accumulated
gradients are.

With pipeline parallelism the Trainer records no micro-steps; then the step's own values are recorded only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ..agent import Agent, Step
from ..anomaly import Anomaly
from ..config import AgentConfig
from .harmless import harmless
from .hooks import GradientHooks, parameters_of

__all__ = ["RankdCallback", "coordinates", "register"]

log = logging.getLogger("rankd.agent")

# What of `TrainConfig.monitor` is rankd's business; the rest stands there with its defaults even if nobody wrote it.
_OUR_MONITORS = ("train_state", "moe_monitor")


class RankdCallback:
    """Records what the PyNative Trainer does. Constructed once for each Trainer, before it.

    It is no subclass of `TrainerCallback`, which would need MindFormers to be imported; the Trainer calls its callbacks
    by name only. Whatever goes wrong here is logged and never reaches the training; what does is the AnomalyError that
    `rankd.on_anomaly: stop` asks for, which ends it.

    Args:
        keep_stock: MindFormers' own monitors print as well. False: its `train_state` and `moe_monitor` are not built
            (TensorBoard stays; so does the line of LossCallback, which also updates the experts' bias).
        config: a YAML to read instead of the Trainer's own configuration.
        on_anomaly: see `Agent`. A function, so only a script of one's own can give it.
    """

    def __init__(
        self,
        keep_stock: bool = True,
        config: str | None = None,
        on_anomaly: Callable[[Anomaly], object] | None = None,
    ) -> None:
        if not isinstance(keep_stock, bool):
            raise TypeError(f"RankdCallback: keep_stock is true or false, got {keep_stock!r}")
        if on_anomaly is not None and not callable(on_anomaly):
            raise TypeError(f"RankdCallback: on_anomaly is a function, got {on_anomaly!r}; see rankd.on_anomaly, too")
        self._on_anomaly = on_anomaly
        self._keep_stock = keep_stock
        self._config_path = config
        self._config = AgentConfig()
        self._agent: Agent | None = None
        self._hooks: GradientHooks | None = None
        self._parameters: list[Any] | None = None
        self._get_grad: Callable[[Any], object] | None = None
        self._step: Step | None = None
        self._accumulation = 1
        self._step_began = 0.0
        self._take_the_monitors_place()

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Events that are nothing to us, those of later versions too: a missing one would stop the training."""
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(name)

    # -- what the Trainer calls ---------------------------------------------------------------------------------------

    @harmless
    def on_train_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Everything is built, a checkpoint is loaded, communication is initialised."""
        self._config = self._read_config(args)
        model = kwargs.get("model")
        agent = Agent(
            self._config,
            model,
            total_steps=state.max_steps or None,
            micro_steps=int(state.num_accumulation_steps),
            about=self._about(args),
            on_anomaly=self._on_anomaly,
        )
        self._agent = agent
        if agent.identity is None:
            return
        self._prepare_norms(model)
        if self._config.profiler.enable_profiling:
            # MindSpore has one profiler a process; and the Trainer's counts from the start of the process.
            args.profiler.enable_profiling = False
            log.info("rankd runs the profiler in the Trainer's place: its steps are global ones")

    @harmless
    def on_step_begin(self, args: Any, state: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the Trainer calls it so
        """A step begins; `state.global_step` is the number of steps done."""
        if self._agent is None:
            return
        self._finish_step()
        self._accumulation = int(state.num_accumulation_steps)
        self._step_began = time.monotonic()
        self._step = self._agent.step(int(state.global_step) + 1)
        self._step.__enter__()

    @harmless
    def micro_step(self, loss: Any) -> None:
        """A micro-batch is through; `loss` is divided by their number, for the accumulation."""
        if self._agent is None:
            return
        whole = loss * self._accumulation if self._accumulation > 1 else loss
        self._agent.micro_step(loss=whole, grads=self._gradients())

    @harmless
    def on_step_end(self, args: Any, state: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the Trainer calls it so
        """The parameters are updated, the gradients are gone, `state.global_step` counts this step."""
        if self._agent is None:
            return
        elapsed = time.monotonic() - self._step_began
        self._agent.end_step(
            loss=kwargs.get("loss"),
            grad_norm=kwargs.get("grad_norm"),
            lr=_learning_rate(kwargs.get("lr_scheduler"), int(state.global_step)),
            throughput=int(state.global_batch_size) / elapsed if elapsed > 0 else None,
        )
        self._finish_step()

    @harmless
    def on_train_end(self, args: Any, state: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the Trainer calls it so
        """Training has come to its planned end. After an exception nobody calls; the agent closes itself at exit."""
        self._finish_step()
        if self._hooks is not None:
            self._hooks.remove()
        if self._agent is not None:
            self._agent.close()

    # -- parts --------------------------------------------------------------------------------------------------------

    def _take_the_monitors_place(self) -> None:
        try:
            import mindformers.pynative.trainer.trainer as trainer

            stock = getattr(trainer.MonitorGroup, "_rankd_stock", trainer.MonitorGroup)
        except (ImportError, AttributeError) as e:
            log.error(
                "rankd: this MindFormers is not the 2.x that the adapter knows (%s): micro-steps are not recorded", e
            )
            return

        def build(config: Any, model: Any = None) -> _Monitor:
            trainer.MonitorGroup = stock
            return _Monitor(stock(config if self._keep_stock else _without_prints(config), model=model), self)

        # Another callback that is constructed before the Trainer is finds the original here.
        build._rankd_stock = stock  # type: ignore[attr-defined]
        trainer.MonitorGroup = build

    def _read_config(self, args: Any) -> AgentConfig:
        if self._config_path is not None:
            return AgentConfig.from_yaml(self._config_path)
        mapping = dict(args.to_dict())
        monitor = mapping.get("monitor")
        if isinstance(monitor, Mapping):
            mapping["monitor"] = {key: monitor[key] for key in _OUR_MONITORS if key in monitor}
        return AgentConfig.from_mapping(mapping)

    def _about(self, args: Any) -> dict[str, object]:
        from ..identity import framework_identity

        who = framework_identity()
        told: dict[str, object] = {"trainer": "MindFormers PyNative"}
        return told if who is None else told | coordinates(*who, getattr(args, "parallelism", None))

    def _prepare_norms(self, model: object) -> None:
        train_state = self._config.monitor.train_state
        filters = [f for f in (train_state.local_norm, train_state.device_norm) if f]
        if not filters:
            return
        self._parameters = parameters_of(model)
        if self._config.rankd.local_norm_kind == "micro_batch":
            self._hooks = GradientHooks(self._parameters, lambda name: any(f.matches(name) for f in filters))
        else:
            from mindformers.pynative.trainer.utils import get_grad

            self._get_grad = get_grad

    def _gradients(self) -> Sequence[object | None] | None:
        if self._hooks is not None:
            return self._hooks.take()
        if self._parameters is None or self._get_grad is None:
            return None
        return [self._get_grad(parameter) for parameter in self._parameters]

    def _finish_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)


class _Monitor:
    """Stands where the Trainer keeps its `MonitorGroup`, passes everything on to it, and tells of the micro-steps."""

    def __init__(self, stock: Any, callback: RankdCallback) -> None:
        self._stock = stock
        self._callback = callback

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def record(self, key: str, value: Any = None, context: Mapping[str, Any] | None = None) -> None:
        """Called by the Trainer with `local_loss` after each micro-step, and with other keys."""
        if key == "local_loss":
            self._callback.micro_step(value)
        self._stock.record(key, value, context)


def _without_prints(config: Any) -> Any:
    """As much of the configuration as MonitorGroup needs to build its TensorBoard monitor and none of the others."""
    tensorboard = getattr(getattr(config, "monitor", None), "tensorboard", None)
    return SimpleNamespace(monitor=SimpleNamespace(tensorboard=tensorboard))


def _learning_rate(scheduler: Any, step: int) -> Any:
    """As the Trainer's own line prints it."""
    return scheduler(step) if callable(scheduler) else None


def coordinates(rank: int, world_size: int, parallelism: Any) -> dict[str, object]:
    """Where a rank stands, as MindFormers lays its meshes out (pynative/distributed/parallel_dims.py).

    The ranks in their order fill (pp, dp, cp, tp), the last one fastest; `ep` is the fastest part of a stage's ranks.
    Empty where the degrees are not known or do not fit the world size.
    """
    names = ("pipeline_parallel", "context_parallel", "tensor_parallel", "expert_parallel")
    degrees = [getattr(parallelism, name, None) for name in names]
    pp, cp, tp, ep = (degree if isinstance(degree, int) and degree > 0 else 0 for degree in degrees)
    if not pp * cp * tp * ep or world_size % (pp * cp * tp):
        return {}
    stage = world_size // pp
    place = {"pp": rank // stage, "dp": rank % stage // (cp * tp), "cp": rank // tp % cp, "tp": rank % tp}
    return {**place, **({"ep": rank % stage % ep} if stage % ep == 0 else {})}


def register() -> None:
    """Make the name `RankdCallback` known to MindFormers, where a script calls this before it builds the Trainer."""
    from mindformers.tools.register.register import MindFormerModuleType, MindFormerRegister

    MindFormerRegister.register_cls(RankdCallback, module_type=MindFormerModuleType.CALLBACK)
