"""`monitor.moe_monitor`: the tokens that each expert received in a micro-batch (SPEC.md section 2, `tpe`).

MindFormers' MoE modules count in `tokens_per_expert`, in the forward pass, and zero it at times of their own:
after each step where the router's expert bias is on, never otherwise. So a record is the difference of two readings,
one before and one after the micro-batch; both are copies, and are taken only around the micro-steps that are written.

Which layer a module is, by its name (any prefix may stand before it):

    decoder.layers.N.mlp                       block decoder, layer N
    mtp.layers.N.transformer_layer.mlp         block mtp, mtp_idx N, layer 0
    mtp.layers.N.mtp_model_layer.layers.M.mlp  block mtp, mtp_idx N, layer M
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from ..collector.protocol.checks import check_int
from ..collector.protocol.errors import RecordError
from ..collector.protocol.records import ExpertLayer, Frame, NameTable
from ..collector.protocol.wording import counted
from .monitor import NOTHING, Measured, MicroBatch, Monitor, Pending
from .tensors import Place, Snapshot

__all__ = ["Iterations", "MoeMonitor", "discover", "expert_layer"]

log = logging.getLogger("rankd.agent")

_COUNTER = "tokens_per_expert"
_NUMBER = "(0|[1-9][0-9]*)"
_DECODER = re.compile(rf"(?:.*\.)?decoder\.layers\.{_NUMBER}\.mlp")
_MTP = re.compile(rf"(?:.*\.)?mtp\.layers\.{_NUMBER}\.transformer_layer\.mlp")
_MTP_INNER = re.compile(rf"(?:.*\.)?mtp\.layers\.{_NUMBER}\.mtp_model_layer\.layers\.{_NUMBER}\.mlp")
_DECODER_LAYER = re.compile(rf"(?:.*\.)?decoder\.layers\.{_NUMBER}(?:\..*)?")


def expert_layer(name: str) -> ExpertLayer | None:
    """The layer that the module called `name` is; None if the name has none of the forms above."""
    if match := _DECODER.fullmatch(name):
        return ExpertLayer("decoder", int(match[1]))
    if match := _MTP.fullmatch(name):
        return ExpertLayer("mtp", 0, int(match[1]))
    if match := _MTP_INNER.fullmatch(name):
        return ExpertLayer("mtp", int(match[2]), int(match[1]))
    return None


def discover(model: object, target: int | tuple[int, ...] | None) -> list[tuple[ExpertLayer, Any]]:
    """The modules to be recorded, by (block, mtp_idx, layer).

    Args:
        model: a cell, or the list of them that a rank has under interleaved pipelining.
        target: `target_layers`: None: every MoE module; N: decoder layers 0 to N-1; a tuple: exactly those decoder
            layers. A layer that is named and is no MoE layer is a warning.

    Raises:
        RecordError: something that has no `cells_and_names()`.
    """
    wanted = None if target is None else set(range(target)) if isinstance(target, int) else set(target)
    found: dict[ExpertLayer, Any] = {}
    here: set[int] = set()
    strange: list[str] = []
    for name, cell in _cells(model):
        if match := _DECODER_LAYER.fullmatch(name):
            here.add(int(match[1]))
        if getattr(cell, _COUNTER, None) is None:
            continue
        layer = expert_layer(name)
        if layer is None:
            strange.append(name)
        elif wanted is not None and (layer.block != "decoder" or layer.layer not in wanted):
            continue
        elif found.setdefault(layer, cell) is not cell:
            log.warning("moe_monitor: two modules are %s; only the first is recorded", layer.name)
    if wanted is None:
        _warn_of_the_unknown(strange, found)
    for number in sorted((wanted or set()) - {layer.layer for layer in found}):
        why = "" if number in here else " (this rank has no layer of that number)"
        log.warning("decoder.layers.%d is not a MoE layer%s", number, why)
    return sorted(found.items(), key=lambda item: item[0].sort_key)


def _cells(model: object) -> list[tuple[str, Any]]:
    chunks: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    for chunk in chunks:
        if not hasattr(chunk, "cells_and_names"):
            raise RecordError(f"a model is an nn.Cell or a list of them, got {type(chunk).__name__}")
    return [named for chunk in chunks for named in chunk.cells_and_names()]


def _warn_of_the_unknown(strange: Sequence[str], found: dict[ExpertLayer, Any]) -> None:
    if strange:
        log.warning(
            "moe_monitor: %s with %s not recorded, because the name says no layer: %s%s",
            counted(len(strange), "module"),
            _COUNTER,
            strange[0],
            ", …" if len(strange) > 1 else "",
        )
    elif not found:
        log.warning("moe_monitor: no module of this rank's model has %s", _COUNTER)


class Iterations:
    """`iter`: the micro-steps of the whole training, counted from 1.

    A process that begins with step 1 counts. One that resumes at a later step cannot know what was before, so it takes
    `per_step` micro-steps for each step before; without that it learns the number from its first step, and has no
    `iter` until then. The same where the loop goes to any step that is not the next one. From there on it counts, so
    that a number of micro-steps that changes on the way is right as long as the process lives.
    """

    def __init__(self, per_step: int | None = None) -> None:
        if per_step is not None:
            check_int("micro_steps", per_step, 1)
        self._given = per_step
        self._seen: int | None = None
        self._step = 0
        self._before: int | None = 0  # micro-steps before this step
        self._inside = 0
        self._abandoned = False

    def begin_step(self, step: int) -> None:
        if step == self._step:  # once more: the first try was abandoned
            self._inside, self._abandoned = 0, False
            return
        if self._inside and not self._abandoned:
            self._seen = self._inside
        if step == self._step + 1 and self._before is not None:
            self._before += self._inside
        else:
            per_step = self._given or self._seen
            self._before = 0 if step == 1 else None if per_step is None else (step - 1) * per_step
        self._step, self._inside, self._abandoned = step, 0, False

    def micro_step(self) -> None:
        self._inside += 1

    def abandon(self) -> None:
        """The step ends before its time, so it is no measure of the others."""
        self._abandoned = True

    @property
    def current(self) -> int | None:
        """`iter` of the micro-step that is through; None: not known."""
        return None if self._before is None else self._before + self._inside


class MoeMonitor(Monitor):
    """Records `tpe` for each micro-step whose `iter` is a multiple of `interval`.

    A count that has become smaller since the last reading was reset in between, and what it shows now was counted since
    then. A reset inside of a step after which no expert of the layer counts less than before cannot be seen.

    Args:
        layers: what `discover` found.
        interval: `save_tokens_per_expert_interval`.
        per_step: micro-steps a step has, for `iter` after a resume.
        place: as in NormMonitor.
    """

    def __init__(
        self,
        layers: Sequence[tuple[ExpertLayer, Any]],
        interval: int,
        per_step: int | None = None,
        *,
        place: Place = "auto",
    ) -> None:
        self._cells = [cell for _, cell in layers]
        self._table = NameTable(tuple(layer.name for layer, _ in layers))
        self._interval = interval
        self._place = place
        self._iterations = Iterations(per_step)
        self._before: Snapshot | None = None
        self._warned = False

    def begin_step(self, step: int, /) -> None:
        # Here and not at the end of the step before: in between the framework may have zeroed the counts.
        self._iterations.begin_step(step)
        self._before = self._read() if self._is_due(1) else None
        if self._iterations.current is None and not self._warned:
            self._warned = True
            log.warning(
                "moe_monitor: training resumes at step %d and `iter` needs the micro-steps of a step, which are learnt "
                "in it; tpe begins with the next step (pass micro_steps= to the agent to have it at once)",
                step,
            )

    def micro_step(self, _batch: MicroBatch, /) -> Pending | None:
        self._iterations.micro_step()
        before, self._before = self._before, None
        written, next_written = self._is_due(0), self._is_due(1)
        if not (written or next_written):
            return None
        now = self._read()
        self._before = now if next_written else None
        if not written or before is None:
            return None
        iteration = self._iterations.current
        return Pending(lambda: Measured([self._frame(before, now, iteration)]), before.ready and now.ready)

    def reset(self) -> Measured:
        self._before = None
        self._iterations.abandon()
        return NOTHING

    def _is_due(self, ahead: int) -> bool:
        iteration = self._iterations.current
        return iteration is not None and (iteration + ahead) % self._interval == 0

    def _read(self) -> Snapshot:
        # Looked up each time: a framework may reset a count by putting another tensor in its place.
        return Snapshot([getattr(cell, _COUNTER) for cell in self._cells], self._place)

    def _frame(self, before: Snapshot, now: Snapshot, iteration: int | None) -> Frame:
        lists = []
        for name, old, new in zip(self._table.names, before.fetch(), now.fetch(), strict=True):
            was_reset = old.shape != new.shape or bool((new < old).any())
            # Counts are kept in float32 by some models: exact up to 2**24, but never a fraction.
            tokens = (new if was_reset else new - old).round()
            if not abs(tokens.sum()) < float("inf"):
                raise RecordError(f"{_COUNTER} of {name} holds {new.tolist()[:8]}, which are no counts")
            lists.append(tokens.tolist())
        return Frame.lists("tpe", self._table, lists, iteration)
