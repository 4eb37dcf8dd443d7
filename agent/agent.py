"""`Agent`: what a training loop calls.

It measures on the training thread, turns what it measured into items, and leaves them in the outbox; the sender thread
does the rest. Nothing here waits for the collector, and no error of rankd's own reaches the loop: each kind of error
is logged once and counted.

A block is put at each micro-step and at each step, as soon as its values are known, so that what led to a crash has
left before the crash. Values that still lie on a device are fetched at the next call, when they cost no waiting.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, cast

from ..collector.protocol.assembly import scalar_part
from ..collector.protocol.errors import IdentityError, RecordError
from ..collector.protocol.records import Frame, Level, NameTable
from ..collector.protocol.steering import SAMPLE, STACKS
from ..collector.protocol.wire import Block, Note, Report, Table, encode_item
from ..profiler_ctl.asked import KIND
from ..profiler_ctl.participant import Participant
from .about import facts
from .anomaly import Anomaly, AnomalyError, Reaction
from .config import AgentConfig
from .delivery import Delivery
from .identity import Identity, framework_identity, is_helper, resolve
from .losses import read_scalar
from .monitor import Measured, MicroBatch, Pending, StepEnd
from .monitors import build_monitors, sampling_of
from .resampling import Resampling
from .stacks import StackDump

__all__ = ["Agent", "Step"]

log = logging.getLogger("rankd.agent")

# The reason of a goodbye at the planned end; the collector takes any other for a failure.
_DONE = "done"

_P = ParamSpec("_P")


def _never_raises(
    method: Callable[Concatenate[Agent, _P], None],
) -> Callable[Concatenate[Agent, _P], None]:
    """Training comes first: an error in `method` is logged once a kind, counted, and goes no further.

    But for AnomalyError, which somebody has asked for.
    """

    @functools.wraps(method)
    def guarded(self: Agent, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except AnomalyError:
            raise
        except Exception as e:  # noqa: BLE001 - whatever it is, it must not stop the training
            self._trouble(method.__name__, e)

    return cast("Callable[Concatenate[Agent, _P], None]", guarded)


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A micro-step whose values may still lie on the device."""

    step: int
    micro_step: int
    pending: Pending
    more: Sequence[Frame]


class Agent:
    """Records what one rank's training does.

    Use it as a context manager around the training loop, `step` around each step, and `micro_step` after the backward
    pass of each micro-batch. Construct it after the framework's communication has been initialised.

    Args:
        config: what the training YAML says; see `from_yaml`.
        model: the model (or the list of its chunks) whose `trainable_params()` name the gradients; needed for norms,
            expert loads and attention logits.
        total_steps: the length of the training, for the logs; None: not known.
        micro_steps: micro-batches a step, for the `iter` of expert loads when training resumes; None: learnt.
        rank, world_size: who this process is, where the environment cannot tell.
        about: a few facts for the run's description (`run.json`); `dp`, `tp`, `pp`, `cp` and `ep` are this rank's place
            in the parallel layout.
        on_anomaly: called on the training thread for each line `# anomaly …` of the log, from `micro_step`, `end_step`
            or the end of the step, whichever comes next once the values are recorded: the place to save a checkpoint.
            What it raises is logged once and goes no further.

    Raises:
        ConfigError: something is asked for that needs the model, and none is given. Nothing has been started.

    A process that must not record gets an agent whose methods do nothing: msrun's scheduler; a rank that is not
    certain; the child of a fork; a child that `multiprocessing` has started (a data-loading worker imports the training
    script again, and inherits its environment), unless it is given its `rank` here after that import.

    What the collector has not yet stored lies in a file that outlives this process, however that ends (`os._exit`,
    SIGKILL): the next start on this node delivers it, the collector of this node, or `rankd recover`.
    """

    def __init__(
        self,
        config: AgentConfig,
        model: object = None,
        *,
        total_steps: int | None = None,
        micro_steps: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        about: Mapping[str, object] | None = None,
        on_anomaly: Callable[[Anomaly], object] | None = None,
    ) -> None:
        self._config = config
        self._reaction = Reaction(config.rankd.on_anomaly == "stop", on_anomaly, self._trouble)
        self._errors: Counter[str] = Counter()
        self._step = 0
        self._micro_step = 0
        self._inside_step = False
        self._deferred: _Deferred | None = None
        self._early: list[Frame] = []
        self._tables: dict[NameTable, int] = {}
        self._profiles: Participant | None = None
        self._closed = False
        self._pid = os.getpid()
        self.identity = self._identify(rank, world_size)
        # Also where nothing will be recorded, so that a wrong set-up fails on every rank alike.
        who = self.identity.rank if self.identity is not None else 0
        sampling = sampling_of(config)
        self._resampling = Resampling(sampling, lambda: self._step)
        self._monitors = build_monitors(config, model, who, total_steps, micro_steps, sampling, self._trouble)
        self._delivery: Delivery | None = None
        if self.identity is not None:
            self._start(self.identity, total_steps, about)

    @classmethod
    def from_yaml(cls, path: str | Path, model: object = None, **options: Any) -> Agent:
        """An agent as the sections `monitor`, `profiler` and `rankd` of a training YAML say.

        Raises:
            ConfigError: everything that is wrong there, a line each; nothing has been started.
        """
        return cls(AgentConfig.from_yaml(path), model, **options)

    # -- what a training loop calls -----------------------------------------------------------------------------------

    def step(self, step: int) -> Step:
        """One training step, as a context: `with agent.step(7): …`.

        Args:
            step: the global step, 1-based; it goes on counting after a resume from a checkpoint.
        """
        return Step(self, step)

    @_never_raises
    def micro_step(
        self, *, loss: object = None, grads: Sequence[object | None] | None = None, frames: Sequence[Frame] = ()
    ) -> None:
        """A micro-batch is through: forward and backward.

        Args:
            loss: its loss: a number or a tensor of one element.
            grads: the accumulated gradients, in the order of `model.trainable_params()`, None for a parameter without
                one; with `rankd.local_norm_kind: micro_batch`, the micro-batch's own.
            frames: what was measured elsewhere, for this micro-step.

        Raises:
            AnomalyError: where `rankd.on_anomaly` is `stop`: see there. Nothing else is raised.
        """
        if not self._active or not self._inside_step:
            return
        self._flush()
        self._micro_step += 1
        pending = self._monitors.micro_step(MicroBatch(self._step, self._micro_step, loss, grads))
        self._deferred = _Deferred(self._step, self._micro_step, pending, frames)
        if pending.ready:
            self._flush()
        self._react(self._micro_step + 1)

    @_never_raises
    def end_step(
        self,
        *,
        loss: object = None,
        global_loss: object = None,
        lr: object = None,
        grad_norm: object = None,
        throughput: object = None,
    ) -> None:
        """The optimizer has updated the parameters; what is given goes into the step summary.

        Args:
            loss: the step's loss after accumulation and reduction; also recorded as `device_loss`, where that is on.
            global_loss: the loss over all ranks, where `loss` is not that.
            lr: the learning rate.
            grad_norm: the global gradient norm.
            throughput: in the training's own unit.

        Raises:
            AnomalyError: as `micro_step`.
        """
        if not self._active or not self._inside_step:
            return
        self._flush()
        given = {"loss": loss, "global_loss": global_loss, "lr": lr, "grad_norm": grad_norm, "throughput": throughput}
        end = StepEnd({name: value for name, value in given.items() if value is not None})
        self._put_measured(self._step, None, self._monitors.end_step(end))
        self._react(None)

    @_never_raises
    def log(self, name: str, value: object, level: str = "step") -> None:
        """Record a scalar of your own.

        Args:
            name: what it is called; not the name of a metric that rankd computes.
            value: a number or a tensor of one element (read at once, so a tensor on a device is waited for).
            level: "step", or "micro_step": that of the micro-batch whose `micro_step` call comes next.

        Values of one position are gathered and travel together, before the next call of another kind; from the moment
        this returns they survive the process like all else.

        Between two steps a value belongs to the step that has ended (and is marked late in the log); before the first
        step, to the first one.
        """
        self._log(name, value, Level(level))

    def log_many(self, values: Mapping[str, object], level: str = "step") -> None:
        """`log` for each of several values; one that is refused costs itself only."""
        for name, value in values.items():
            self.log(name, value, level)

    @_never_raises
    def close(self, reason: str = _DONE) -> None:
        """Training is over: say goodbye and wait for the last acknowledgements, at most `rankd.exit_timeout` seconds.

        Called by itself at the end of the context, and at exit.
        """
        atexit.unregister(self._close_at_exit)
        if self._closed or not self._active:
            return
        self._flush()
        if self._profiles is not None:
            self._profiles.close()
            self._tell_profiles()
        self._closed = True
        assert self._delivery is not None
        self._delivery.close(reason)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._note_exception(error)
        self.close(_reason(error))

    # -- steps --------------------------------------------------------------------------------------------------------

    @_never_raises
    def _begin_step(self, step: int) -> None:
        if not self._active:
            return
        if not isinstance(step, int) or isinstance(step, bool) or step < 1:
            raise RecordError(f"a step is an integer from 1 on, got {step!r}; nothing is recorded for it")
        self._step, self._micro_step, self._inside_step = step, 0, True
        self._monitors.begin_step(step)
        if self._profiles is not None:
            self._profiles.step_begin(step)
            self._tell_profiles()
        if self._early:
            early, self._early = self._early, []
            self._put_block(step, None, early, complete=False)

    @_never_raises
    def _finish_step(self, error: BaseException | None) -> None:
        if not self._active or not self._inside_step:
            return
        self._flush()
        if error is not None:
            self._put_measured(self._step, None, self._monitors.reset())
            self._note_exception(error)
            self._inside_step = False
            return
        # Where end_step was not called, what does not depend on it is still recorded.
        self._put_measured(self._step, None, self._monitors.end_step(StepEnd(called=False)))
        self._react(None)
        self._inside_step = False
        if self._profiles is not None:
            # Before the step is completed: what there is to tell is then a line of this step, and not a late one.
            self._profiles.step_end(self._step)
            self._tell_profiles()
        self._put_block(self._step, None, [], complete=True)

    def _flush(self) -> None:
        """Put the micro-step whose values were deferred."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self._put_measured(deferred.step, deferred.micro_step, deferred.pending.fetch(), deferred.more)

    @_never_raises
    def _note_exception(self, error: BaseException | None) -> None:
        """Leave the exception in the log, once, where it happened."""
        if not self._active or error is None or getattr(error, "_rankd_noted", False) or not _is_failure(error):
            return
        self._flush()
        self._put_exception(self._micro_step + 1 if self._inside_step else None, error)

    def _put_exception(self, micro_step: int | None, error: BaseException) -> None:
        self._put_note(micro_step, "exception", f"{type(error).__name__}: {error}"[:1_000])
        # Seen again on its way out of the agent's own context. An exception with slots is noted twice.
        error._rankd_noted = True  # type: ignore[attr-defined]

    def _react(self, micro_step: int | None) -> None:
        """Do what the user wants done about the anomalies that are recorded by now; `micro_step`: what comes next."""
        error = self._reaction.act()
        if error is None:
            return
        assert self._delivery is not None
        self._flush()
        self._put_exception(micro_step, error)
        # Whoever starts the ranks kills them all as soon as this one ends.
        self._delivery.settle()
        raise error

    # -- putting ------------------------------------------------------------------------------------------------------

    def _put_measured(self, step: int, micro_step: int | None, measured: Measured, more: Sequence[Frame] = ()) -> None:
        for earlier, kept in measured.earlier:
            if kept:
                self._put_block(step, earlier, list(kept), complete=False, addendum=True)
        # Before the block, which completes the position.
        for remark in measured.remarks:
            self._put_note(micro_step, remark.kind, remark.text)
        frames = [*measured.frames, *more]
        if frames:
            self._put_block(step, micro_step, frames)
        self._reaction.found(remark.anomaly for remark in measured.remarks)

    def _log(self, name: str, value: object, level: Level) -> None:
        if not self._active:
            return
        number = value if type(value) is float else read_scalar(value, name)
        part = scalar_part(name, level, number)
        if self._inside_step:
            assert self._delivery is not None
            at = (self._step, self._micro_step + 1 if level is Level.MICRO_STEP else None)
            self._delivery.outbox.hold(part, at, time.time())
        elif self._step == 0:
            self._early.append(Frame.scalar(name, number))
        else:
            self._put_block(self._step, None, [Frame.scalar(name, number)], complete=False, addendum=True)

    def _put_note(self, micro_step: int | None, kind: str, text: str) -> None:
        self._put([encode_item(Note(0, self._step or None, micro_step, kind, text, time.time()))])

    def _put_block(
        self,
        step: int,
        micro_step: int | None,
        frames: list[Frame],
        *,
        complete: bool | None = None,
        addendum: bool = False,
    ) -> None:
        """Put a block; by default it completes a micro-step and leaves a step open (more may be logged for it)."""
        whole = micro_step is not None if complete is None else complete
        block = Block(0, step, micro_step, whole, time.time(), tuple(frames), addendum)
        new = list(dict.fromkeys(f.table for f in frames if f.table is not None and f.table not in self._tables))
        ids = {**self._tables, **{table: len(self._tables) + 1 + i for i, table in enumerate(new)}}
        raws = [encode_item(Table(0, ids[table], table)) for table in new]
        if self._put([*raws, encode_item(block, ids)], block.record_count, (step, micro_step)):
            self._tables = ids

    def _put(self, raws: list[bytes], records: int = 0, at: tuple[int, int | None] | None = None) -> bool:
        assert self._delivery is not None
        return self._delivery.put(raws, records, at)

    # -- starting -----------------------------------------------------------------------------------------------------

    @property
    def _active(self) -> bool:
        return self._delivery is not None and not self._closed and self._pid == os.getpid()

    def _identify(self, rank: int | None, world_size: int | None) -> Identity | None:
        try:
            who = resolve(os.environ, rank=rank, world_size=world_size, framework=framework_identity)
        except IdentityError as e:
            log.error("this process records and profiles nothing, because a wrong rank would be worse: %s", e)
            return None
        return None if who is None or is_helper(who, rank) else who

    def _start(self, who: Identity, total_steps: int | None, about: Mapping[str, object] | None) -> None:
        profiler = self._config.profiler
        if who.rank == 0:
            for notice in (*self._config.warnings, *self._config.notices, *profiler.warnings(who.world_size)):
                log.warning("%s", notice)
        where = lambda: (self._step, self._micro_step)  # noqa: E731
        delivery = Delivery(self._config.rankd, who, total_steps, facts(self._config, who, about), where)
        self._profiles = Participant(
            who.rank, profiler, lambda body: delivery.report(Report(KIND, body)), cwd=Path.cwd()
        )
        delivery.commands.on(SAMPLE, self._resampling)
        delivery.commands.on(STACKS, StackDump(where))
        delivery.commands.on(KIND, self._profiles.command)
        delivery.start()
        self._delivery = delivery
        atexit.register(self._close_at_exit)

    def _tell_profiles(self) -> None:
        """A line in the log for each session that has come to its end."""
        for note in self._profiles.notes() if self._profiles is not None else ():
            self._put_note(None, KIND, note)

    # -- ending -------------------------------------------------------------------------------------------------------

    def _close_at_exit(self) -> None:
        # A loop that is not inside the agent's context (a framework's trainer) ends by an exception that Python has
        # printed by now, and keeps here.
        error = getattr(sys, "last_value", None)
        self._note_exception(error)
        self.close("the process exited before the agent was closed" if error is None else _reason(error))

    def _trouble(self, where: str, error: Exception) -> None:
        kind = f"{where}: {type(error).__name__}"
        self._errors[kind] += 1
        if self._errors[kind] == 1:
            log.warning(
                "rankd: %s failed, training goes on (this is said once): %s",
                where,
                error,
                exc_info=not isinstance(error, RecordError),
            )

    @property
    def connected(self) -> bool:
        """Whether the collector has welcomed this rank and is heard."""
        return self._delivery is not None and self._delivery.connected

    @property
    def errors(self) -> Mapping[str, int]:
        """How often rankd itself has failed in this process, by method and kind of error."""
        return dict(self._errors)


class Step:
    """The context of one training step; made by `Agent.step`."""

    __slots__ = ("_agent", "_step")

    def __init__(self, agent: Agent, step: int) -> None:
        self._agent = agent
        self._step = step

    def __enter__(self) -> Step:
        self._agent._begin_step(self._step)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._agent._finish_step(error)


def _is_failure(error: BaseException) -> bool:
    """Whether this ends the training otherwise than planned: `sys.exit(0)` does not."""
    return not (isinstance(error, SystemExit) and error.code in (None, 0))


def _reason(error: BaseException | None) -> str:
    if error is None or not _is_failure(error):
        return _DONE
    return f"{type(error).__name__}: {error}"[:300]
