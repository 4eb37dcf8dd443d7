"""`rankd check`, pure: what a training YAML comes to, before a job is started.

It answers "configured, and nothing is printed": what is in effect, what will be recorded and how much that is, what has
no effect and why. The configuration, the training as far as it is known and what was found on this machine (`Facts`)
go in, a `Report` comes out; `checking.py` is the command around it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..collector.protocol.ranges import ranges, span
from ..collector.protocol.wording import counted
from .about import effective
from .alerts import described
from .config import AgentConfig, Filter
from .estimate import Estimate, Shape, estimate, human_bytes
from .retained import Retained, retained, retention_warnings
from .upstream import KNOWN_VERSION, is_pynative, renamed

__all__ = ["Facts", "FilterMatch", "Place", "ProfilerOutlook", "Report", "Setting", "examine", "training_of"]

# Suggestions for a filter that matches nothing.
_MOST_NEAREST = 3
_LIKENESS = 0.75
# MindSpore that fails to start with numpy 2 ("Numpy init failed").
_NO_NUMPY_2 = "2.10"
_ASKED_FOR = ("local_loss", "device_loss", "local_norm", "device_norm", "tpe", "max_attention_logit")


@dataclass(frozen=True, slots=True)
class Place:
    """A directory that something will be written to.

    Attributes:
        key: the setting that names it.
        path: as it is configured.
        temporary: why it will be cleared (the temporary directory or memory it is in); None: it stays.
        free: bytes free there; None: not known.
    """

    key: str
    path: str
    temporary: str | None = None
    free: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found on this machine.

    Attributes:
        versions: by distribution, None where it is not installed.
        places: where output will go.
        hidden: why messages of rankd's own will not be seen, a line each.
        register_path: the environment's REGISTER_PATH, and the folder where rankd's callback for MindFormers is.
    """

    versions: Mapping[str, str | None]
    places: Sequence[Place] = ()
    hidden: Sequence[str] = ()
    register_path: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class Setting:
    """An effective setting."""

    key: str
    value: object
    written: bool


@dataclass(frozen=True, slots=True)
class FilterMatch:
    """One filter of norms against the model's trainable parameters; `filter` None: all of them are asked for."""

    key: str
    filter: str | None
    names: tuple[str, ...]
    of: int


@dataclass(frozen=True, slots=True)
class ProfilerOutlook:
    """When, where and how much will be profiled; `size` is a class, not a figure."""

    ranks: str
    steps: str
    level: str
    directory: str
    size: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything; `errors` decide about the exit status."""

    source: str
    errors: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    no_effect: tuple[str, ...] = ()
    renamed: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    shape: Shape = dataclasses.field(default_factory=Shape)
    assumed: tuple[str, ...] = ()
    estimate: Estimate | None = None
    retained: Retained | None = None
    filters: tuple[FilterMatch, ...] = ()
    alerts: tuple[str, ...] = ()
    profiler: ProfilerOutlook | None = None
    places: tuple[Place, ...] = ()
    versions: Mapping[str, str | None] = dataclasses.field(default_factory=dict)

    @property
    def status(self) -> int:
        """The exit status: 0, or 1 where there are errors."""
        return 1 if self.errors else 0

    def to_mapping(self) -> dict[str, object]:
        """The report as JSON holds it."""
        mapping = dataclasses.asdict(self)
        if self.estimate is not None:
            mapping["estimate"] |= {"complete": self.estimate.complete, "disk": self.estimate.disk}
        return {"status": self.status, **mapping}


def examine(
    source: str,
    mapping: Mapping[str, object],
    config: AgentConfig,
    shape: Shape,
    assumed: Sequence[str],
    facts: Facts,
) -> Report:
    """The report about a configuration that could be read.

    Args:
        source: the file's name.
        mapping: what it holds.
        config: what rankd reads in it.
        shape: the training; its `names` are those of the model, where one was given.
        assumed: what of the shape nobody said, a line each.
        facts: what was found on this machine.
    """
    filters = tuple(_filters(config, shape.names)) if shape.names is not None else ()
    amount = estimate(config, shape)
    kept = retained(config.rankd, shape, amount)
    return Report(
        source,
        errors=tuple(_unmatched(filters, shape.names or ())),
        warnings=tuple(_warnings(mapping, config, shape, amount, kept, facts)),
        no_effect=(*config.notices, *config.profiler.warnings(shape.world_size), *_without_effect(mapping, config)),
        renamed=tuple(renamed(mapping)),
        settings=tuple(_settings(mapping, config)),
        shape=shape,
        assumed=tuple(assumed),
        estimate=amount,
        retained=kept,
        filters=filters,
        alerts=tuple(_alerts(config)),
        profiler=_profiler(config, shape, facts),
        places=tuple(facts.places),
        versions=dict(facts.versions),
    )


def training_of(
    mapping: Mapping[str, object],
    world_size: int | None,
    micro_steps: int | None,
    steps: int | None,
    step_seconds: float | None,
) -> tuple[Shape, list[str]]:
    """The training's shape: what was given, or what MindFormers' sections of the YAML say, or an assumption."""
    assumed = []
    if world_size is None:
        world_size = _product(mapping, "parallelism", "tensor_parallel", "pipeline_parallel", "context_parallel")
        assumed.append(f"--world-size: {counted(world_size, 'rank')}")
    if micro_steps is None:
        micro_steps = _accumulation(mapping, world_size)
        if micro_steps is None:
            micro_steps = 1
            assumed.append("--micro-steps: 1 micro-step a step")
    if step_seconds is None:
        step_seconds = 1.0
        assumed.append("--step-seconds: a step takes 1 s")
    if steps is None:
        steps = _whole(_section(mapping, "training").get("steps"))
    return Shape(world_size, micro_steps, steps, step_seconds), assumed


# -- parts ------------------------------------------------------------------------------------------------------------


def _section(mapping: Mapping[str, object], name: str) -> Mapping[str, object]:
    section = mapping.get(name)
    return section if isinstance(section, Mapping) else {}


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _product(mapping: Mapping[str, object], section: str, *keys: str) -> int:
    product = 1
    for key in keys:
        product *= _whole(_section(mapping, section).get(key)) or 1
    return product


def _accumulation(mapping: Mapping[str, object], world_size: int) -> int | None:
    """Micro-steps a step, as MindFormers computes them: global batch / (data parallel ranks * local batch)."""
    training = _section(mapping, "training")
    whole, local = _whole(training.get("global_batch_size")), _whole(training.get("local_batch_size")) or 1
    if whole is None:
        return None
    model_ranks = _product(mapping, "parallelism", "tensor_parallel", "pipeline_parallel", "context_parallel")
    micro_steps, rest = divmod(whole, max(world_size // model_ranks, 1) * local)
    return micro_steps if micro_steps and not rest else None


def _settings(mapping: Mapping[str, object], config: AgentConfig) -> Iterator[Setting]:
    for section, values in effective(config).items():
        yield from _flat(section, values, _written(mapping, section))


def _written(mapping: Mapping[str, object], section: str) -> object:
    if section.startswith("callbacks."):
        callbacks = mapping.get("callbacks")
        entries = [e for e in callbacks if isinstance(e, Mapping)] if isinstance(callbacks, list) else []
        return next((entry for entry in entries if entry.get("type") == "MaxLogitsMonitor"), {})
    return mapping.get(section)


def _flat(key: str, values: Mapping[str, object], written: object) -> Iterator[Setting]:
    for name, value in values.items():
        below = written.get(name) if isinstance(written, Mapping) else None
        if isinstance(value, Mapping):
            yield from _flat(f"{key}.{name}", value, below)
        else:
            yield Setting(f"{key}.{name}", value, isinstance(written, Mapping) and name in written)


def _filters(config: AgentConfig, names: Sequence[str]) -> Iterator[FilterMatch]:
    for metric in ("local_norm", "device_norm"):
        chosen: Filter = getattr(config.monitor.train_state, metric)
        key = f"monitor.train_state.{metric}"
        if chosen.everything:
            yield FilterMatch(key, None, tuple(names), len(names))
        for part in chosen.substrings:
            yield FilterMatch(key, part, tuple(name for name in names if part in name), len(names))


def _alerts(config: AgentConfig) -> Iterator[str]:
    """What is an anomaly, a line each, and what becomes of one."""
    alerts, older = config.rankd.alerts, config.monitor_config
    if older.nan_check:
        yield "any metric that is nan or inf (monitor_config.nan_check)"
    for index, alert in enumerate(alerts):
        yield f"{alert.metric} {described(alert)} (rankd.alerts[{index}])"
    if not alerts and not older.nan_check:
        return
    start = f"from step {older.warmup_steps + 1} on: " if older.warmup_steps else "then: "
    written = ", its step written also where it is not due" if older.exception_dump else ""
    stop = ", and AnomalyError raised into the training" if config.rankd.on_anomaly == "stop" else ""
    yield f"{start}a line in the log{written}{stop}"


def _unmatched(filters: Sequence[FilterMatch], names: Sequence[str]) -> Iterator[str]:
    for match in filters:
        if match.filter is not None and not match.names:
            near = nearest_parts(match.filter, names)
            hint = f"; the nearest: {', '.join(near)}" if near else ""
            yield f'{match.key}: "{match.filter}" matches none of the {counted(match.of, "trainable parameter")}{hint}'


def nearest_parts(text: str, names: Sequence[str]) -> list[str]:
    """Parts of the names that look most like `text`, as many dots in them as in it, each once.

    Where `text` is one word, so are they: of `input_layernorm` also `layernorm`.
    """
    wide = text.count(".") + 1
    parts: dict[str, str] = {}
    for name in names:
        pieces = name.split(".")
        for start in range(len(pieces) - wide + 1):
            part = ".".join(pieces[start : start + wide])
            words = part.split("_") if wide == 1 and "_" not in text else []
            for one in (part, *words):
                parts.setdefault(one.lower(), one)
    close = difflib.get_close_matches(text.lower(), list(parts), n=_MOST_NEAREST, cutoff=_LIKENESS)
    return [parts[part] for part in close]


def _without_effect(mapping: Mapping[str, object], config: AgentConfig) -> Iterator[str]:
    profiler = _section(mapping, "profiler")
    if profiler and not config.profiler.enable_profiling:
        yield "profiler: enable_profiling is not true, so the section asks for nothing"
    if mapping.get("run_mode") == "predict":
        yield "monitor: run_mode is predict, so nothing is trained and nothing is recorded"


def _warnings(
    mapping: Mapping[str, object],
    config: AgentConfig,
    shape: Shape,
    amount: Estimate,
    kept: Retained,
    facts: Facts,
) -> Iterator[str]:
    yield from config.warnings
    for place in facts.places:
        if place.temporary is not None:
            yield f"{place.key}: {place.path} lies in {place.temporary}, which is cleared; choose a lasting directory"
    yield from _nothing_comes(mapping, amount)
    yield from _disk(shape, amount, kept, facts.places)
    yield from retention_warnings(kept, shape, amount)
    yield from facts.hidden
    yield from _callback(mapping, facts)
    yield from _versions(config, facts.versions)


def _nothing_comes(mapping: Mapping[str, object], amount: Estimate) -> Iterator[str]:
    if not any(row.metric in _ASKED_FOR for row in amount.rows):
        yield "monitor: no metric is asked for (monitor.train_state.local_loss, …): only the step summary is recorded"
    callbacks = mapping.get("callbacks")
    types = [e.get("type") for e in callbacks if isinstance(e, Mapping)] if isinstance(callbacks, list) else []
    if is_pynative(mapping) and "RankdCallback" not in types:
        yield (
            "callbacks: no RankdCallback, and this looks like a YAML of MindFormers, whose Trainer then never calls "
            "rankd (a loop of your own that uses rankd.agent.Agent does not need it)"
        )


def _disk(shape: Shape, amount: Estimate, kept: Retained, places: Sequence[Place]) -> Iterator[str]:
    output = next((place for place in places if place.key in ("rankd.output", "monitor_config.dump_path")), None)
    if output is None or output.free is None or shape.steps is None:
        return
    text, journal = (amount.merged + amount.step.text) * shape.steps, amount.step.journal * shape.steps
    needed = min(text, kept.text_at_most or text) + min(journal, kept.journal_at_most or journal)
    steps = counted(shape.steps, "step needs", "steps need")
    if needed > output.free:
        yield (
            f"{output.key}: {output.path} has {human_bytes(output.free)} free, and {steps} about "
            f"{human_bytes(needed)}; record less often or fewer names, make room, or set rankd.journal.keep and "
            "rankd.logs"
        )


def _callback(mapping: Mapping[str, object], facts: Facts) -> Iterator[str]:
    callbacks = mapping.get("callbacks")
    for index, entry in enumerate(callbacks if isinstance(callbacks, list) else ()):
        if not isinstance(entry, Mapping) or entry.get("type") != "RankdCallback":
            continue
        found, wanted = facts.register_path
        if entry.get("auto_register") == "rankd_callback.RankdCallback" and found != wanted:
            yield (
                f"callbacks[{index}].auto_register: REGISTER_PATH is {found!r} here; it must name the folder "
                "that `python -m rankd.agent.adapters` prints, on each rank"
            )


def _versions(config: AgentConfig, versions: Mapping[str, str | None]) -> Iterator[str]:
    mindspore, numpy = versions.get("mindspore"), versions.get("numpy")
    if mindspore is not None and mindspore.startswith(_NO_NUMPY_2) and numpy is not None and numpy.startswith("2."):
        yield f"versions: MindSpore {mindspore} does not work with numpy {numpy}; install numpy<2"
    mindformers = versions.get("mindformers")
    norms = config.monitor.train_state.local_norm or config.monitor.train_state.device_norm
    if mindformers is not None and norms and config.rankd.local_norm_kind == "increment":
        yield (
            f"rankd.local_norm_kind: increment; MindFormers since {KNOWN_VERSION} itself prints the norms of the "
            "micro-batch's own gradient, so its lines and rankd's differ (set micro_batch for the same)"
        )


# What makes a profile large, in points; a guess from what each adds to the files, not a measurement.
_CLASSES = (
    (2, "small (some 10 MB a rank)"),
    (5, "medium (some 100 MB a rank)"),
    (9, "large (some GB a rank)"),
)
_HUGE = "huge (10 GB a rank and more; fewer steps or a lower level)"


def _profiler(config: AgentConfig, shape: Shape, facts: Facts) -> ProfilerOutlook | None:
    profiler = config.profiler
    if not profiler.enable_profiling:
        return None
    ranks = [rank for rank in range(shape.world_size) if profiler.chooses(rank)]
    points = (
        {"Level0": 0, "Level1": 1, "Level2": 3}.get(profiler.level.value, 0)
        + 2 * profiler.with_stack
        + 2 * profiler.profile_memory
        + profiler.profile_cpu
        + (profiler.step_count > 3) * 2
        + (profiler.step_count > 20) * 4
    )
    size = next((text for most, text in _CLASSES if points <= most), _HUGE)
    directory = next((place.path for place in facts.places if place.key == "profiler.output_path"), "profile")
    count = profiler.step_count
    steps = f"{span(profiler.start_step, profiler.end_step)} ({counted(count, 'step')})"
    if shape.steps is not None and profiler.start_step > shape.steps:
        steps += f", never reached: the training has {counted(shape.steps, 'step')}"
    return ProfilerOutlook(ranges(ranks) or "none", steps, profiler.level.value, f"{directory}/rank_N", size)
