"""What the agent reads from the training YAML: `monitor:` and the other sections that concern us (SPEC.md section 4).

A key that asks for something this version does not do is never passed over in silence: `AgentConfig.notices` names it.
"""

# ruff: noqa: RUF009 - `setting` declares a dataclass field, as dataclasses.field does

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from ..collector.config import RankdConfig, output_of
from ..collector.settings import (
    Kind,
    Misfit,
    Settings,
    SettingsError,
    attempt,
    error_of,
    file_path,
    flag,
    integer,
    list_of,
    load_yaml,
    misfit,
    misspelt_sections,
    nearest,
    optional,
    setting,
    subsection,
)
from ..profiler_ctl.config import ProfilerConfig
from .sampling import Rates

__all__ = [
    "AgentConfig",
    "Filter",
    "MaxLogitsConfig",
    "MoeMonitorConfig",
    "MonitorConfig",
    "OlderMonitorConfig",
    "TrainStateConfig",
    "section_warnings",
]

_NOT_OURS = "not used by rankd"


# --- monitor ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Filter:
    """Which parameters a norm is written for: all of them, or those whose name contains one of `substrings`.

    A filter that can match nothing is false: what it filters is off.
    """

    everything: bool = False
    substrings: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.everything or bool(self.substrings)

    def matches(self, name: str) -> bool:
        """Whether the parameter called `name` is chosen."""
        return self.everything or any(part in name for part in self.substrings)

    @staticmethod
    def of(value: object) -> Filter:
        """The filter that a YAML value means: true, false, one substring, or a list of them.

        "", false and [] are off; an empty string inside a list is ignored (it would match every name).

        Raises:
            SettingsError: a value of another type.
        """
        match value:
            case Filter():
                return value
            case bool():
                return Filter(everything=value)
            case str():
                return Filter(substrings=(value,) if value else ())
            case list() | tuple():
                return Filter(substrings=tuple(part for part in _SUBSTRINGS.read(value) if part))
        raise misfit(value, _FILTER_ALLOWED, wrong_type=True)

    def to_value(self) -> object:
        """The YAML value that means this filter."""
        return list(self.substrings) or self.everything


def _substring(value: object) -> str:
    if not isinstance(value, str):
        hint = "YAML reads yes, on, no and off as booleans: put text in quotes" if isinstance(value, bool) else ""
        raise misfit(value, "text, a part of a parameter's name", hint, wrong_type=True)
    return value


_SUBSTRINGS = list_of(Kind("text", _substring))
_FILTER_ALLOWED = "true, false, text (a part of the parameters' names), or a list of text"
_FILTER = Kind(_FILTER_ALLOWED, Filter.of, Filter.to_value)
_OFF = Filter()


def _target_layers() -> Kind[int | tuple[int, ...]]:
    allowed = "null, a positive integer N (decoder layers 0 to N-1), or a list of decoder layer ids"
    ids, first = list_of(integer(0)), integer(1)

    def read(value: object) -> int | tuple[int, ...]:
        if isinstance(value, (list, tuple)):
            return ids.read(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise misfit(value, allowed, wrong_type=True)
        return first.read(value)

    return Kind(allowed, read, lambda layers: list(layers) if isinstance(layers, tuple) else layers)


@dataclass(frozen=True, slots=True)
class TrainStateConfig(Settings):
    """`monitor.train_state`: norms and losses.

    Attributes:
        local_norm: the parameters whose gradient norm is written at each micro-step.
        local_loss: write each micro-batch's loss.
        device_norm: the parameters whose accumulated gradient norm is written at each step.
        device_loss: write the step's loss after accumulation and reduction.
    """

    dotted: ClassVar[str] = "monitor.train_state"

    local_norm: Filter = setting(_FILTER, _OFF)
    local_loss: bool = setting(flag(), False)
    device_norm: Filter = setting(_FILTER, _OFF)
    device_loss: bool = setting(flag(), False)

    def __bool__(self) -> bool:
        """Whether anything is on; if not, nothing is built and nothing is paid."""
        return bool(self.local_norm or self.local_loss or self.device_norm or self.device_loss)


@dataclass(frozen=True, slots=True)
class MoeMonitorConfig(Settings):
    """`monitor.moe_monitor`: how many tokens each expert received.

    Attributes:
        save_tokens_per_expert_interval: micro-steps between two records; None: off.
        target_layers: None: every MoE layer; N: decoder layers 0 to N-1; a tuple: exactly those decoder layers.
    """

    dotted: ClassVar[str] = "monitor.moe_monitor"

    save_tokens_per_expert_interval: int | None = setting(optional(integer(1)), None)
    target_layers: int | tuple[int, ...] | None = setting(optional(_target_layers()), None)

    def __bool__(self) -> bool:
        return self.save_tokens_per_expert_interval is not None


@dataclass(frozen=True, slots=True)
class MonitorConfig(Settings):
    """The `monitor:` section.

    Attributes:
        train_state: see TrainStateConfig.
        moe_monitor: see MoeMonitorConfig.
    """

    dotted: ClassVar[str] = "monitor"
    foreign: ClassVar[frozenset[str]] = frozenset({"tensorboard", "health_checkpoint"})

    train_state: TrainStateConfig = setting(subsection(TrainStateConfig), TrainStateConfig())
    moe_monitor: MoeMonitorConfig = setting(subsection(MoeMonitorConfig), MoeMonitorConfig())


# --- monitor_config, callbacks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OlderMonitorConfig(Settings):
    """`monitor_config:`, the older, framework-wide form.

    Attributes:
        monitor_on: the master switch of this section.
        dump_path: another name of `rankd.output`; may hold `{rank}`, see `collector.config.output_of`.
        interval: write a step's records every N steps.
        step_interval: compute, and feed the health checks, every N steps.
        print_interval: print a line on each rank's standard output every N steps; None: never.
        local_loss: each micro-batch's loss on each rank.
        global_loss: the loss over all ranks, in the step summary; the step's `loss` where no `global_loss` is given.
        grad_norm: the norm of the whole gradient, in the step summary; made of all parameters' norms on this rank
            where none is given.
        nan_check: look for nan and inf in what is computed.
        exception_dump: write a step that was to be left out when the check finds something, or the training raises.
        skip_nan_step: not ours to do; a notice says so.
        warmup_steps: steps at the start of the training in which no check tells anything, `rankd.alerts` neither.
    """

    dotted: ClassVar[str] = "monitor_config"
    # What MindFormers itself reads from this section.
    foreign: ClassVar[frozenset[str]] = frozenset(
        {
            "target",
            "invert",
            "local_loss_format",
            "local_norm_format",
            "device_local_norm_format",
            "device_local_loss_format",
            "optimizer_state_format",
            "weight_state_format",
            "max_attention_logit_format",
            "throughput_baseline",
            "print_struct",
            "check_for_global_norm",
            "global_norm_spike_threshold",
            "global_norm_spike_count_threshold",
            "stable_rank_config",
            "health_checkpoint",
        }
    )

    monitor_on: bool = setting(flag(), False)
    dump_path: Path | None = setting(optional(file_path()), None)
    interval: int = setting(integer(1), 1)
    step_interval: int = setting(integer(1), 1)
    print_interval: int | None = setting(optional(integer(1)), None)
    local_loss: bool = setting(flag(), False)
    global_loss: bool = setting(flag(), False)
    grad_norm: bool = setting(flag(), False)
    nan_check: bool = setting(flag(), False)
    exception_dump: bool = setting(flag(), False)
    skip_nan_step: bool = setting(flag(), False)
    warmup_steps: int = setting(integer(0), 0)

    @property
    def rates(self) -> Rates:
        """The three intervals."""
        return Rates(self.step_interval, self.interval, self.print_interval)


_MAX_LOGITS = "MaxLogitsMonitor"
# agent/adapters/mindformers.py
_OUR_CALLBACK = "RankdCallback"


def _callback_type(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise misfit(value, "text, the name of a callback", wrong_type=not isinstance(value, str))
    return value


@dataclass(frozen=True, slots=True)
class MaxLogitsConfig(Settings):
    """The entry `type: MaxLogitsMonitor` of `callbacks:`.

    Attributes:
        type: the callback's name.
        step_interval: steps between two records; the maxima are reset after every step.
        enable_logging: MindFormers 2.1's argument: false: reset, and record nothing.
    """

    foreign: ClassVar[frozenset[str]] = frozenset({"auto_register"})

    type: str = setting(Kind("text", _callback_type), _MAX_LOGITS)
    step_interval: int = setting(integer(1), 1)
    enable_logging: bool = setting(flag(), True)


@dataclass(frozen=True, slots=True)
class OurCallbackConfig(Settings):
    """The entry `type: RankdCallback` of `callbacks:`; it is checked here, and MindFormers passes it to the callback.

    Attributes:
        type: the callback's name.
        keep_stock: MindFormers' own monitors print as well.
        config: a YAML that is read instead of the Trainer's own configuration.
    """

    foreign: ClassVar[frozenset[str]] = frozenset({"auto_register"})

    type: str = setting(Kind("text", _callback_type), _OUR_CALLBACK)
    keep_stock: bool = setting(flag(), True)
    config: Path | None = setting(optional(file_path()), None)


def _read_callbacks(value: object) -> tuple[str | MaxLogitsConfig, ...]:
    """The callbacks, in order: ours read, of the others the types."""
    if value is None:
        return ()
    read = list_of(Kind("a callback's `type:` and arguments", _read_callback)).read(value)
    ours = [index for index, entry in enumerate(read) if isinstance(entry, MaxLogitsConfig)]
    if len(ours) > 1:
        first, second = ours[:2]
        text = f"a second {_MAX_LOGITS}, after callbacks[{first}], which has reset the maxima by then; remove one"
        raise error_of([Misfit(f"[{second}]", text)])
    return read


def _read_callback(entry: object) -> str | MaxLogitsConfig:
    if not isinstance(entry, Mapping):
        raise misfit(entry, "a callback's `type:` and its arguments", wrong_type=True)
    if "type" not in entry:
        raise misfit(dict(entry), "a callback's `type:` and its arguments", "the key `type` is missing")
    misfits: list[Misfit] = []
    name = attempt(misfits, "type", _callback_type, entry["type"])
    if name is None:
        raise error_of(misfits)
    if name == _OUR_CALLBACK:
        OurCallbackConfig.from_mapping(entry, "")
    return MaxLogitsConfig.from_mapping(entry, "") if name == _MAX_LOGITS else name


def _needs_qk_clip(mapping: Mapping[str, object]) -> bool:
    """Whether the optimizer clips by the largest attention logits, which then must be reset after each step."""
    optimizer = _keys(mapping, "optimizer")
    return optimizer.get("type") == "Muon" and optimizer.get("qk_clip_enabled") is True


# --- everything -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """All that one training YAML says to rankd.

    Attributes:
        monitor: what is measured.
        profiler: who profiles, and when.
        rankd: where it goes.
        notices: keys that are written and that rankd does not act on, or not as one might think, a line each with the
            dotted path. Print them; "written but silently ignored" must not happen.
        monitor_config: the older form; all defaults where its `monitor_on` is not true.
        max_logits: the callback of that name; None: there is none.
        qk_clip: the optimizer is Muon with `qk_clip_enabled`.
        warnings: sections at the top that are none of ours and were probably meant to be, a line each. Print them too.
    """

    monitor: MonitorConfig = MonitorConfig()
    profiler: ProfilerConfig = ProfilerConfig()
    rankd: RankdConfig = RankdConfig()
    notices: tuple[str, ...] = ()
    monitor_config: OlderMonitorConfig = OlderMonitorConfig()
    max_logits: MaxLogitsConfig | None = None
    qk_clip: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def local_loss(self) -> bool:
        """Whether either form asks for it."""
        return self.monitor.train_state.local_loss or self.monitor_config.local_loss

    @property
    def track_max_attention_logit(self) -> bool:
        """Whether the model must keep the maxima of its attention logits; see `max_logits.track`."""
        return self.qk_clip or (self.max_logits is not None and self.max_logits.enable_logging)

    @classmethod
    def from_yaml(cls, path: str | Path) -> AgentConfig:
        """Read a training YAML.

        Raises:
            ConfigError: the file cannot be read, or something in our sections is wrong; each line names the file.
        """
        loaded = load_yaml(path)
        try:
            return cls.from_mapping(loaded)
        except SettingsError as error:
            raise error_of(error.misfits, str(path)) from None

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> AgentConfig:
        """Read the sections of a training configuration that is already loaded.

        Raises:
            ConfigError: all that is wrong in all of our sections, a line each.
        """
        misfits: list[Misfit] = []
        monitor = _read(misfits, MonitorConfig, mapping)
        profiler = _read(misfits, ProfilerConfig, mapping)
        rankd = _read(misfits, RankdConfig, mapping)
        older = _read(misfits, OlderMonitorConfig, mapping)
        callbacks = attempt(misfits, "callbacks", _read_callbacks, mapping.get("callbacks"))
        if monitor is not None and rankd is not None and older is not None and older.monitor_on:
            misfits.extend(_contradictions(mapping, monitor, rankd, older))
        if misfits:
            raise error_of(misfits)
        assert monitor is not None
        assert profiler is not None
        assert rankd is not None
        assert older is not None
        assert callbacks is not None
        notices = (
            *_monitor_notices(mapping, monitor),
            *_older_notices(mapping, older, rankd),
            *_callback_notices(callbacks),
        )
        if not older.monitor_on:
            older = OlderMonitorConfig()
        if older.dump_path is not None:
            rankd = dataclasses.replace(rankd, output=output_of(older.dump_path))
        max_logits = next((entry for entry in callbacks if isinstance(entry, MaxLogitsConfig)), None)
        warnings = section_warnings(mapping)
        config = cls(monitor, profiler, rankd, notices, older, max_logits, _needs_qk_clip(mapping), warnings)
        return dataclasses.replace(config, notices=(*notices, *_anomaly_notices(config)))


_Section = TypeVar("_Section", bound=Settings)


def _read(misfits: list[Misfit], cls: type[_Section], mapping: Mapping[str, object]) -> _Section | None:
    return attempt(misfits, cls.dotted, lambda value: cls.from_mapping(value, ""), mapping.get(cls.dotted))


def _keys(mapping: Mapping[str, object], *path: str) -> Mapping[str, object]:
    """The section at this path, or an empty one; for looking at what was written, not at its meaning."""
    here: object = mapping
    for name in path:
        here = here.get(name) if isinstance(here, Mapping) else None
    return here if isinstance(here, Mapping) else {}


def _contradictions(
    mapping: Mapping[str, object], monitor: MonitorConfig, rankd: RankdConfig, older: OlderMonitorConfig
) -> Iterator[Misfit]:
    """Both forms may stand in one file, but not set one thing to different values."""
    for where, new, there, old in (
        ("monitor.train_state.local_loss", monitor.train_state.local_loss, "local_loss", older.local_loss),
        ("rankd.output", rankd.output, "dump_path", older.dump_path and output_of(older.dump_path)),
    ):
        *section, key = where.split(".")
        written = key in _keys(mapping, *section) and there in _keys(mapping, older.dotted)
        if written and old is not None and new != old:
            yield Misfit(
                where,
                f"found {new}, but {older.dotted}.{there} is {getattr(older, there)}; "
                "remove one of them, or set both alike",
            )


def _monitor_notices(mapping: Mapping[str, object], monitor: MonitorConfig) -> Iterator[str]:
    for key in _keys(mapping, "monitor"):
        if key in MonitorConfig.foreign:
            yield f"monitor.{key}: {_NOT_OURS}"
    moe = monitor.moe_monitor
    if moe.target_layers is not None and not moe:
        yield f"{moe.dotted}.target_layers: it has no effect while save_tokens_per_expert_interval is not set"


def _older_notices(mapping: Mapping[str, object], older: OlderMonitorConfig, rankd: RankdConfig) -> Iterator[str]:
    written = _keys(mapping, older.dotted)
    if not written:
        return
    if not older.monitor_on:
        yield f"{older.dotted}: monitor_on is not true, so the section asks for nothing"
        return
    for key in written:
        if key in older.foreign:
            yield f"{older.dotted}.{key}: {_NOT_OURS}"
    yield from (f"{older.dotted}.{notice}" for notice in (*_interval_notices(older), *_health_notices(older, rankd)))


def _interval_notices(older: OlderMonitorConfig) -> Iterator[str]:
    rates = older.rates
    for key, asked, every in (
        ("interval", rates.write, rates.written_every),
        ("print_interval", rates.console, rates.printed_every),
    ):
        if asked is not None and every not in (asked, rates.compute):
            yield (
                f"{key}: only what is computed comes out, so with step_interval {rates.compute} and {key} {asked} "
                f"that is every {every} steps"
            )
    path = older.dump_path
    if path is not None and "{rank}" in str(path) and path.name != "rank_{rank}":
        yield f"dump_path: each rank's folder is called rank_N, so its log is {output_of(path)}/rank_N/monitor.log"


def _health_notices(older: OlderMonitorConfig, rankd: RankdConfig) -> Iterator[str]:
    if older.skip_nan_step:
        yield "skip_nan_step: rankd only observes, it leaves no step out; the training loop has to"
    if older.exception_dump:
        yield "exception_dump: the step's records are kept; rankd saves no tensors and no checkpoint"
    if older.warmup_steps and not older.nan_check and not rankd.alerts:
        yield "warmup_steps: it has no effect while nan_check is not true and there are no rankd.alerts"


def _anomaly_notices(config: AgentConfig) -> Iterator[str]:
    """Alerts on what is not measured, and a stop that will not come."""
    state, max_logits = config.monitor.train_state, config.max_logits
    measured = {
        "local_loss": (config.local_loss, "monitor.train_state.local_loss"),
        "local_norm": (state.local_norm, "monitor.train_state.local_norm"),
        "device_loss": (state.device_loss, "monitor.train_state.device_loss"),
        "device_norm": (state.device_norm, "monitor.train_state.device_norm"),
        "tpe": (config.monitor.moe_monitor, "monitor.moe_monitor.save_tokens_per_expert_interval"),
        "max_attention_logit": (max_logits and max_logits.enable_logging, f"a callback of type {_MAX_LOGITS}"),
    }
    alerts, checked = config.rankd.alerts, config.monitor_config.nan_check
    for index, alert in enumerate(alerts):
        on, key = measured.get(alert.metric, (True, ""))
        if not on:
            yield f"rankd.alerts[{index}]: it has no effect while {alert.metric} is not recorded ({key})"
    if config.rankd.on_anomaly == "stop" and not checked:
        what = "nan and inf do not stop the training" if alerts else "stop has no effect without rankd.alerts"
        yield f"rankd.on_anomaly: {what} while monitor_config.nan_check is not true"


def _callback_notices(callbacks: tuple[str | MaxLogitsConfig, ...]) -> Iterator[str]:
    ours = callbacks.index(_OUR_CALLBACK) if _OUR_CALLBACK in callbacks else 0
    for index, name in enumerate(callbacks):
        if isinstance(name, MaxLogitsConfig) and index < ours:
            yield (
                f"callbacks[{index}] ({_MAX_LOGITS}): the framework's callback resets the maxima before "
                f"callbacks[{ours}] ({_OUR_CALLBACK}) reads them; list {_OUR_CALLBACK} first"
            )
        if isinstance(name, MaxLogitsConfig) or name == _OUR_CALLBACK:
            continue
        hint = f"; did you mean `{_MAX_LOGITS}`?" if nearest(name, (_MAX_LOGITS.lower(),)) else ""
        yield f"callbacks[{index}] ({name}): {_NOT_OURS}{hint}"


# Where the names stand that a person may have misspelt, or written one level too far out.
_OUR_NAMES = {
    **{name: name for name in ("monitor", "profiler", "rankd", "callbacks", "monitor_config")},
    **{name: f"monitor.{name}" for name in ("train_state", "moe_monitor")},
}
# Sections of MindFormers that look like ours and are not.
_THEIR_NAMES = frozenset({"eval_callbacks"})


def section_warnings(mapping: Mapping[str, object]) -> tuple[str, ...]:
    """Sections at the top that look like ours: those are the framework's business only if nobody misspelt them."""
    others = {name: section for name, section in mapping.items() if name not in _THEIR_NAMES}
    return tuple(misspelt_sections(others, _OUR_NAMES))
