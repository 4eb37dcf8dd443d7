"""A loss, or any scalar that a training loop has at hand, as a float (SPEC.md section 2: `local_loss` and others)."""

from __future__ import annotations

import numbers
from typing import Any

from ..collector.protocol.errors import RecordError
from ..collector.protocol.records import Frame
from .monitor import NOTHING, Measured, MicroBatch, Monitor, Pending, StepEnd
from .tensors import Place, lives_on_device

__all__ = ["LossMonitor", "PendingScalar", "read_scalar", "scalar"]


class PendingScalar:
    """A scalar that perhaps still lies on a device."""

    __slots__ = ("_tensor", "_value")

    def __init__(self, tensor: Any | None, value: float) -> None:
        self._tensor = tensor
        self._value = value

    @property
    def ready(self) -> bool:
        """Whether `fetch` returns without waiting for the device."""
        return self._tensor is None

    def fetch(self) -> float:
        """The value; waits for the device if it has to, once."""
        tensor, self._tensor = self._tensor, None
        if tensor is not None:
            self._value = _from_array(tensor.asnumpy())
        return self._value


def scalar(value: object, what: str = "loss", *, place: Place = "auto") -> PendingScalar:
    """Take `value` as it is now: a number, a numpy scalar or array of one element, a tensor of one element.

    NaN and the infinities are values like any other. Nothing here waits for a device: a tensor that lives on one is
    copied there, because the training loop may go on to add to it in place. `place` forces one way, as in NormMonitor.

    Raises:
        RecordError: anything else, with its type and shape.
    """
    if isinstance(value, numbers.Real):
        return PendingScalar(None, _from_number(value, what))
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise RecordError(f"{what} must be a number or a tensor of one element, got {type(value).__name__}: {value!r}")
    tensor: Any = value
    shape = tuple(tensor.shape)
    if any(size != 1 for size in shape):
        raise RecordError(f"{what} must have one element, got {type(value).__name__} of shape {shape}")
    _check_kind(tensor.dtype, what)
    if not hasattr(tensor, "asnumpy"):
        return PendingScalar(None, _from_array(tensor))
    if lives_on_device(tensor) if place == "auto" else place == "device":
        return PendingScalar(tensor.copy(), float("nan"))
    return PendingScalar(None, _from_array(tensor.asnumpy()))


def read_scalar(value: object, what: str = "loss") -> float:
    """`scalar(value, what).fetch()`: the float, now."""
    return scalar(value, what).fetch()


class LossMonitor(Monitor):
    """`local_loss` of each micro-batch and `device_loss` of each step, where the training loop gives them.

    Args:
        local, device: which of the two.
    """

    def __init__(self, local: bool, device: bool) -> None:
        self._local = local
        self._device = device

    def micro_step(self, batch: MicroBatch, /) -> Pending | None:
        if not self._local or batch.loss is None:
            return None
        loss = scalar(batch.loss, "loss")
        return Pending(lambda: Measured([Frame.scalar("local_loss", loss.fetch())]), loss.ready)

    def end_step(self, end: StepEnd, /) -> Measured:
        if not self._device or "loss" not in end.given:
            return NOTHING
        return Measured([Frame.scalar("device_loss", read_scalar(end.given["loss"], "loss"))])


def _from_number(value: numbers.Real, what: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise RecordError(f"{what} is an number too large for a float") from None


def _check_kind(dtype: object, what: str) -> None:
    name = str(dtype).lower()
    if not any(kind in name for kind in ("float", "int", "bool")):
        raise RecordError(f"{what} must be a real number, got one of type {dtype}")


def _from_array(array: Any) -> float:
    # Through float64: bfloat16 is a type of its own that numpy converts, but that has no `float()` in every version.
    return float(array.reshape(-1).astype("float64")[0])
