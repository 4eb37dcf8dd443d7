"""Builds what a configuration asks for, and nothing else: what is off is not there (SPEC.md section 4)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import cast

from ..collector.protocol.errors import ConfigError
from ..collector.protocol.wording import counted
from .alerts import Alerts
from .config import AgentConfig
from .health import Check, NanCheck, Watched
from .losses import LossMonitor
from .max_logits import MaxLogitsMonitor
from .moe import MoeMonitor, discover
from .monitor import Monitor, Monitors
from .norms import GradientNorms, NormKind, NormMonitor, trainable_names
from .sampled import Console, Expectations, Sampled
from .sampling import Sampling
from .summary import StepSummary

__all__ = ["build_monitors", "sampling_of"]

log = logging.getLogger("rankd.agent")

_Trouble = Callable[[str, Exception], None]
# What the intervals of `monitor_config` are not for.
_OWN_INTERVALS = ("tpe", "max_attention_logit")
# What only the training loop can give.
_GIVEN = ("loss", "global_loss", "lr", "grad_norm", "throughput")


def build_monitors(
    config: AgentConfig,
    model: object,
    rank: int,
    total_steps: int | None,
    micro_steps: int | None,
    sampling: Sampling,
    trouble: _Trouble,
) -> Monitors:
    """The monitors of one rank.

    Expert loads and attention logits have intervals of their own; the intervals of `monitor_config` are for the rest.

    Args:
        config: what the training YAML says.
        model: a cell or a list of them; None where none was given.
        rank, total_steps: for the console; the rank also for what is told of anomalies.
        micro_steps: micro-steps a step, for `iter` after a resume.
        sampling: which steps, see `sampling_of`.
        trouble: takes the errors of the monitors.

    Raises:
        ConfigError: something is asked for that needs the model, and there is none.
    """
    older, alerts = config.monitor_config, config.rankd.alerts
    checks: list[Check] = [NanCheck(older.warmup_steps, rank)] if older.nan_check else []
    lines = [Alerts(alerts, rank, older.warmup_steps)] if alerts else []
    sampled = _sampled(config, model, rank, total_steps, sampling, trouble, [*checks, *lines])
    found = (_moe(config, model, micro_steps), _max_logits(config, model))
    others: list[Monitor] = [monitor for monitor in found if monitor is not None]
    if any(alert.metric in _OWN_INTERVALS for alert in alerts):
        others = [Watched(Monitors(others, trouble), lines)]
    return Monitors([sampled, *others], trouble)


def sampling_of(config: AgentConfig) -> Sampling:
    """Which steps are computed, written and printed, as configured."""
    older = config.monitor_config
    alerts = any(alert.metric not in _OWN_INTERVALS for alert in config.rankd.alerts)
    return Sampling(older.rates, watched=older.nan_check or older.exception_dump or alerts)


def _sampled(
    config: AgentConfig,
    model: object,
    rank: int,
    total_steps: int | None,
    sampling: Sampling,
    trouble: _Trouble,
    checks: Sequence[Check],
) -> Monitor:
    older, device_loss = config.monitor_config, config.monitor.train_state.device_loss
    losses = LossMonitor(config.local_loss, device_loss) if config.local_loss or device_loss else None
    norms = _norms(config, model)
    inner = [m for m in (losses, norms, StepSummary(global_loss=older.global_loss)) if m is not None]
    return Sampled(
        Monitors(inner, trouble),
        sampling,
        checks=checks,
        console=Console(rank, total_steps),
        keep=older.exception_dump,
        expected=Expectations(_expected(config, norms)),
    )


def _expected(config: AgentConfig, norms: GradientNorms | None) -> dict[str, str]:
    """What the training loop has to give for what was asked, by metric: the key that asks."""
    state, older = config.monitor.train_state, config.monitor_config
    keys = {
        "local_loss": state.local_loss and "monitor.train_state.local_loss",
        "device_loss": state.device_loss and "monitor.train_state.device_loss",
        "global_loss": older.global_loss and "monitor_config.global_loss",
        "grad_norm": older.grad_norm and "monitor_config.grad_norm",
    }
    if older.local_loss:
        keys["local_loss"] = keys["local_loss"] or "monitor_config.local_loss"
    for metric in () if norms is None else norms.writes:
        keys[metric] = f"monitor.train_state.{metric}"
    for index, alert in enumerate(config.rankd.alerts):
        if alert.metric in _GIVEN and not keys.get(alert.metric):
            keys[alert.metric] = f"rankd.alerts[{index}]"
    return {metric: key for metric, key in keys.items() if key}


def _norms(config: AgentConfig, model: object) -> GradientNorms | None:
    state, total = config.monitor.train_state, config.monitor_config.grad_norm
    if not state.local_norm and not state.device_norm and not (total and model is not None):
        # `grad_norm` alone may well be given by the training loop.
        return None
    names = trainable_names(_needed(model, "monitor.train_state asks for norms"))
    for key in ("local_norm", "device_norm"):
        chosen = getattr(state, key)
        if chosen and not any(map(chosen.matches, names)):
            of = counted(len(names), "trainable parameter")
            log.warning("monitor.train_state.%s matches none of the %s", key, of)
    norms = NormMonitor(
        names,
        state.local_norm.matches if state.local_norm else None,
        state.device_norm.matches if state.device_norm else None,
        cast("NormKind", config.rankd.local_norm_kind),
    )
    return GradientNorms(norms, total=total) if norms.active or total else None


def _moe(config: AgentConfig, model: object, micro_steps: int | None) -> MoeMonitor | None:
    moe = config.monitor.moe_monitor
    interval = moe.save_tokens_per_expert_interval
    if interval is None:
        return None
    layers = discover(_needed(model, "monitor.moe_monitor asks for expert loads"), moe.target_layers)
    return MoeMonitor(layers, interval, micro_steps) if layers else None


def _max_logits(config: AgentConfig, model: object) -> MaxLogitsMonitor | None:
    callback = config.max_logits
    records = callback is not None and callback.enable_logging
    if not config.qk_clip and callback is None:
        return None
    if callback is None:
        # The optimizer alone: a framework resets by itself, so a model that the agent does not know is no error.
        return None if model is None else MaxLogitsMonitor(model, None)
    needed = _needed(model, "MaxLogitsMonitor asks for attention logits")
    return MaxLogitsMonitor(needed, callback.step_interval if records else None)


def _needed(model: object, why: str) -> object:
    if model is None:
        raise ConfigError(f"{why}, which need the model: pass model= to the agent")
    return model
