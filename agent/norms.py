"""L2 norms of gradients (SPEC.md section 2): what `local_norm` and `device_norm` are made of.

Where a gradient lives decides how it is measured. On the host (the CPU build of MindSpore, numpy arrays) an operator
costs 35 to 45 µs to launch and the memory of a tensor is at hand: numpy on its view is ten times cheaper. On a
device it is the other way round: launches are cheap, each wait for the device is dear. There the squares are summed on
the device, stacked into one tensor, and that is copied to the host once per micro-step and only later, so that a copy
of the previous micro-step does not hold up the launch of this one.

numpy and MindSpore are imported when they are used: a process that measures nothing needs neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from ..collector.protocol.errors import RecordError
from ..collector.protocol.records import Frame, NameTable
from ..collector.protocol.wording import counted
from .monitor import Measured, MicroBatch, Monitor, Pending, StepEnd
from .tensors import Place, is_array, lives_on_device

__all__ = [
    "DeviceOperators",
    "GradientNorms",
    "NormKind",
    "NormMonitor",
    "PendingNorms",
    "Predicate",
    "trainable_names",
]

NormKind: TypeAlias = Literal["increment", "micro_batch"]
Predicate: TypeAlias = Callable[[str], bool]

# Squares are summed in float32 within a block and in float64 across blocks. float32 rounds equal squares always the
# same way: a norm of a million equal values was wrong by 4e-4 when summed whole, by 3e-7 at most in blocks of this
# size. That costs a tenth more than one dot over the whole.
_BLOCK = 1_024
# A float64 copy made on the way (below) stays at 8 MB.
_CHUNK = 2**20
# A float32 sum of squares outside of this range has overflowed, or has lost the small squares: sum again in float64.
_SMALLEST_SQUARE, _LARGEST_SQUARE = 1e-30, 3e38
# The device path: a norm above 2**64 overflows when squared in float32. A power of two scales exactly, and this one
# keeps the square of the largest float32 below 2**97, so that a billion of them can be added.
_SCALE = 2.0**-80


class DeviceOperators:
    """The MindSpore operators of the device path, counted: their number is what the path costs.

    Attributes:
        launched: operators launched so far.
        copies: copies to the host so far.
    """

    def __init__(self) -> None:
        self.launched = 0
        self.copies = 0

    def square_sum(self, gradient: Any, scale: float | None = None) -> Any:
        """A 0-d float32 tensor: the sum of squares of `gradient` times `scale`.

        Two operators; one more for a type other than float32, one more for a scale.
        """
        import mindspore as ms
        from mindspore import ops

        if gradient.dtype != ms.float32:
            self.launched += 1
            gradient = ops.cast(gradient, ms.float32)
        if scale is not None:
            self.launched += 1
            gradient = ops.mul(gradient, scale)
        self.launched += 2
        return ops.sum(ops.square(gradient))

    def stack(self, sums: Sequence[Any]) -> Any:
        """One tensor of all sums of a micro-step."""
        from mindspore import ops

        self.launched += 1
        return ops.stack(list(sums))

    def to_host(self, stacked: Any) -> list[float]:
        """The values; waits for the device."""
        self.copies += 1
        values: list[float] = stacked.asnumpy().tolist()
        return values


class PendingNorms:
    """The norms of one micro-step, perhaps still on the device."""

    __slots__ = ("_collect", "_frame")

    def __init__(self, collect: Callable[[], Frame | None]) -> None:
        self._collect: Callable[[], Frame | None] | None = collect
        self._frame: Frame | None = None

    @property
    def ready(self) -> bool:
        """Whether `fetch` returns without waiting for the device."""
        return self._collect is None

    def fetch(self) -> Frame | None:
        """The `local_norm` frame; None where nothing is to be written. Copies from the device if it has to, once."""
        collect, self._collect = self._collect, None
        if collect is not None:
            self._frame = collect()
        return self._frame

    def discard(self) -> None:
        """Give the values up without fetching them; `fetch` then returns None."""
        self._collect = None


class NormMonitor:
    """Norms of the gradients of one model on one rank, over the micro-steps of one step at a time.

    Call `micro_step` after the backward pass of each micro-batch, `end_step` at the end of the step, or `reset` where
    the step is abandoned. Not thread-safe: it belongs to the training thread.

    Args:
        names: the names of all parameters, in the order in which `micro_step` gets their gradients.
        local: which parameters `local_norm` is written for; None: off.
        device: which parameters `device_norm` is written for; None: off.
        kind: `increment`: `micro_step` gets accumulated gradients, and `local_norm` is the accumulated norm minus that
            of the parameter's previous gradient in this step (so it may be negative). `micro_batch`: the norm of what
            `micro_step` gets, and `device_norm` is the last such norm.
        place: `auto` takes the device path for tensors that live on a device; `host` and `device` force one.
        operators: what launches the operators of the device path.
    """

    def __init__(
        self,
        names: Sequence[str],
        local: Predicate | None,
        device: Predicate | None,
        kind: NormKind = "increment",
        *,
        place: Place = "auto",
        operators: DeviceOperators | None = None,
    ) -> None:
        if kind not in ("increment", "micro_batch"):
            raise RecordError(f"kind must be 'increment' or 'micro_batch', got {kind!r}")
        self._all_names = list(names)
        self._in_local = [local is not None and local(name) for name in names]
        self._in_device = [device is not None and device(name) for name in names]
        self._kind: NormKind = kind
        self._place = place
        self._operators = operators or DeviceOperators()
        self._accumulated: dict[int, float] = {}
        self._pending: PendingNorms | None = None
        # Slots whose squares have overflowed on the device. See `_launch`.
        self._scaled: set[int] = set()
        self._everything = False
        self._choose()

    def _choose(self) -> None:
        names = self._all_names
        # A slot is a parameter that is measured, in the order of the model.
        chosen = [self._everything or a or b for a, b in zip(self._in_local, self._in_device, strict=True)]
        self._indices = [i for i, yes in enumerate(chosen) if yes]
        self._names = [names[i] for i in self._indices]
        self._local = _Selection.of("local_norm", self._names, [self._in_local[i] for i in self._indices])
        self._device = _Selection.of("device_norm", self._names, [self._in_device[i] for i in self._indices])
        self._scaled.clear()

    def measure_everything(self, everything: bool) -> None:
        """Measure the parameters that pass no filter too (nothing more is written), for `total`; between two steps."""
        if everything is not self._everything:
            self._everything = everything
            self._choose()

    @property
    def active(self) -> bool:
        """Whether any parameter passes a filter; otherwise nothing is ever measured."""
        return bool(self._indices)

    def micro_step(self, grads: Sequence[object | None]) -> PendingNorms:
        """Measure the gradients after one micro-step: numpy arrays or tensors, None where a parameter has none.

        Raises:
            RecordError: not as many gradients as names, or something that is no gradient. Nothing has changed then.
        """
        if len(grads) != len(self._all_names):
            given, wanted = counted(len(grads), "gradient"), counted(len(self._all_names), "parameter")
            raise RecordError(
                f"{given} for {wanted}; pass one for each of "
                "model.trainable_params(), in that order, None where there is none"
            )
        slots = [slot for slot, index in enumerate(self._indices) if grads[index] is not None]
        tensors = [_local_shard(grads[self._indices[slot]], self._names[slot]) for slot in slots]
        if self._pending is not None:
            self._pending.fetch()
        if tensors and self._on_device(tensors):
            self._pending = PendingNorms(self._launch(slots, tensors))
        else:
            norms = _norms(dict(zip(slots, tensors, strict=True)), self._names)
            self._pending = PendingNorms(lambda: self._settle(norms))
            self._pending.fetch()
        return self._pending

    @property
    def writes(self) -> tuple[str, ...]:
        """The metrics that have a parameter to be written for."""
        both = (("local_norm", self._local), ("device_norm", self._device))
        return tuple(metric for metric, selection in both if selection is not None)

    @property
    def totals(self) -> bool:
        """Whether `total` can give anything: all parameters are measured, with what is accumulated."""
        return self._kind == "increment" and len(self._indices) == len(self._all_names) > 0

    def total(self) -> float | None:
        """The norm of the whole gradient accumulated in this step on this rank, made of the parameters' norms.

        None where not all parameters are measured, or nothing was. Waits for the last micro-step's values.
        """
        if self._pending is not None:
            self._pending.fetch()
        return math.hypot(*self._accumulated.values()) if self.totals and self._accumulated else None

    def end_step(self) -> Frame | None:
        """The `device_norm` frame of the step (None: off, or no gradients), after which the step is forgotten."""
        try:
            if self._pending is not None:
                self._pending.fetch()
            return None if self._device is None else self._device.frame(self._accumulated)
        finally:
            self.reset()

    def reset(self) -> None:
        """Forget the step: it was abandoned. A pending micro-step that nobody fetched is given up."""
        if self._pending is not None:
            self._pending.discard()
            self._pending = None
        self._accumulated.clear()

    def _on_device(self, tensors: Sequence[object]) -> bool:
        if self._place == "auto":
            tensor = next((t for t in tensors if hasattr(t, "asnumpy")), None)
            if tensor is None:
                return False
            self._place = "device" if lives_on_device(tensor) else "host"
        return self._place == "device"

    def _launch(self, slots: list[int], tensors: Sequence[Any]) -> Callable[[], Frame | None]:
        """Launch everything on the device; what is returned copies it to the host.

        By the time an overflow is seen the gradients have moved on, and keeping them would double their memory. So a
        parameter's first norm above 2**64 reads inf here; from then on it is measured scaled as well, and whichever of
        the two is within range counts.
        """
        operators = self._operators
        scaled = [slot for slot in slots if slot in self._scaled]
        sums = [operators.square_sum(_tensor(tensor)) for tensor in tensors]
        sums += [operators.square_sum(_tensor(tensors[slots.index(slot)]), _SCALE) for slot in scaled]
        stacked = operators.stack(sums)

        def collect() -> Frame | None:
            norms = [_root(total) for total in operators.to_host(stacked)]
            values = dict(zip(slots, norms, strict=False))
            for slot, norm in zip(scaled, norms[len(slots) :], strict=True):
                if values[slot] == math.inf:
                    values[slot] = norm / _SCALE
            self._scaled.update(slot for slot, norm in values.items() if norm == math.inf)
            return self._settle(values)

        return collect

    def _settle(self, values: dict[int, float]) -> Frame | None:
        """Take the norms of a micro-step in, by slot; the local_norm frame."""
        accumulated = self._accumulated
        if self._kind == "increment":
            local = {slot: norm - accumulated.get(slot, 0.0) for slot, norm in values.items()}
        else:
            local = values
        accumulated.update(values)
        return None if self._local is None else self._local.frame(local)


class GradientNorms(Monitor):
    """`local_norm`, `device_norm` and, where the training loop gives none, `grad_norm`, of one model.

    Attributes:
        writes: the metrics of each parameter that are on.

    Args:
        norms: measures them.
        total: `monitor_config.grad_norm`: measure all parameters for `grad_norm`, unless the loop gave it at the end
            of the step before. Otherwise it is made where all are measured anyway, at no cost.
    """

    def __init__(self, norms: NormMonitor, *, total: bool = False) -> None:
        self._norms = norms
        self._wants_total = total
        self._given = False
        self.writes = norms.writes

    def begin_step(self, _step: int, /) -> None:
        self._norms.measure_everything(self._wants_total and not self._given)

    def micro_step(self, batch: MicroBatch, /) -> Pending | None:
        if batch.grads is None:
            return None
        norms = self._norms.micro_step(batch.grads)
        return Pending(lambda: _measured(norms.fetch()), norms.ready)

    def end_step(self, end: StepEnd, /) -> Measured:
        total = None
        if end.called:
            self._given = "grad_norm" in end.given
            total = None if self._given else self._norms.total()
        return _measured(self._norms.end_step(), None if total is None else Frame.scalar("grad_norm", total))

    def reset(self) -> Measured:
        self._norms.reset()
        return Measured()


def _measured(*frames: Frame | None) -> Measured:
    return Measured([frame for frame in frames if frame is not None])


class _Selection:
    """The slots that one metric is written for, and their name table."""

    def __init__(self, metric: str, slots: list[int], table: NameTable) -> None:
        self._metric = metric
        self._slots = slots
        self._table = table

    @classmethod
    def of(cls, metric: str, names: Sequence[str], chosen: Sequence[bool]) -> _Selection | None:
        slots = [slot for slot, yes in enumerate(chosen) if yes]
        return cls(metric, slots, NameTable(tuple(names[slot] for slot in slots))) if slots else None

    def frame(self, values: dict[int, float]) -> Frame | None:
        present = [i for i, slot in enumerate(self._slots) if slot in values]
        if not present:
            return None
        column = [values[self._slots[i]] for i in present]
        return Frame.named(self._metric, self._table, column, None if len(present) == len(self._slots) else present)


def trainable_names(model: object) -> list[str]:
    """The names of the trainable parameters of a cell, or of a list of cells (the chunks of a pipeline stage).

    Raises:
        RecordError: something that has no `trainable_params()`.
    """
    chunks = model if isinstance(model, list | tuple) else [model]
    names: list[str] = []
    for chunk in chunks:
        if not hasattr(chunk, "trainable_params"):
            raise RecordError(f"a model is an nn.Cell or a list of them, got {type(chunk).__name__}")
        names.extend(str(parameter.name) for parameter in chunk.trainable_params())
    return names


def _local_shard(gradient: object, name: str) -> object:
    """What of a gradient lies on this rank; checked to be a tensor or an array."""
    if hasattr(gradient, "to_local"):
        gradient = gradient.to_local()
    if hasattr(gradient, "asnumpy") or is_array(gradient):
        return gradient
    raise RecordError(f"the gradient of {name} must be a tensor, a numpy array or None, got {type(gradient).__name__}")


def _tensor(gradient: Any) -> Any:
    if hasattr(gradient, "asnumpy"):
        return gradient
    import mindspore as ms

    return ms.Tensor(gradient)


def _array(gradient: Any) -> Any:
    # On the CPU `asnumpy` is a live view without a copy; it is read here and not kept. It waits for the tensor.
    return gradient.asnumpy() if hasattr(gradient, "asnumpy") else gradient


def _norms(tensors: dict[int, object], names: Sequence[str]) -> dict[int, float]:
    """The norm of each tensor, by its slot; `names` by slot too."""
    if not tensors:
        return {}
    import numpy as np

    # A square that overflows is computed again, wider; numpy 2 would warn of it first.
    with np.errstate(over="ignore", invalid="ignore"):
        return {slot: _norm(_array(tensor), names[slot]) for slot, tensor in tensors.items()}


def _norm(array: Any, name: str) -> float:
    # Once for each parameter and micro-step: hence type codes, and no list of chunks for the usual small parameter.
    flat = array.reshape(-1)
    code = flat.dtype.char
    if code not in "fd":
        if flat.dtype.kind in "cOSUmM":
            raise RecordError(f"the gradient of {name} must hold real numbers, got {flat.dtype}")
        # float16 squares overflow from 256 up. bfloat16 is a type of its own that numpy only converts.
        code = "f" if flat.dtype.itemsize <= 2 else "d"
        flat = flat.astype(code)
    total = float(flat.dot(flat)) if code == "d" or flat.size <= _BLOCK else _sum_of_blocks(flat)
    if code == "f" and not _SMALLEST_SQUARE < total < _LARGEST_SQUARE:
        total = sum(float(wide.dot(wide)) for wide in (c.astype("d") for c in _chunks(flat)))
    return _root(total)


def _root(total: float) -> float:
    return math.sqrt(total) if total >= 0 else total  # NaN stays NaN


def _sum_of_blocks(flat: Any) -> float:
    """The sum of squares of a float32 array; one call of numpy for all whole blocks (of each a BLAS dot)."""
    import numpy as np

    whole = flat.size // _BLOCK * _BLOCK
    blocks, rest = flat[:whole], flat[whole:]
    sums = np.matmul(blocks.reshape(-1, 1, _BLOCK), blocks.reshape(-1, _BLOCK, 1))
    return float(sums.sum(dtype="d")) + float(rest.dot(rest))


def _chunks(flat: Any) -> list[Any]:
    return [flat[start : start + _CHUNK] for start in range(0, len(flat), _CHUNK)]
