"""What can be asked of a tensor or array without waiting for it, and without importing where it comes from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from ..collector.protocol.errors import RecordError

__all__ = ["Place", "Snapshot", "is_array", "lives_on_device"]

# Where tensors are measured: "auto" asks each where it lives.
Place: TypeAlias = Literal["auto", "host", "device"]


def is_array(value: object) -> bool:
    """Whether `value` is a numpy array or scalar. Does not import numpy."""
    return type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "dtype")


def lives_on_device(tensor: Any) -> bool:
    """Whether a MindSpore tensor lies on an accelerator, where reading it is a copy that waits."""
    import mindspore as ms

    # Older versions have no Tensor.device; there the process has one target for all.
    place = getattr(tensor, "device", None) or ms.get_context("device_target")
    return not str(place).upper().startswith("CPU")


class Snapshot:
    """The values of some small tensors as they are now, whatever becomes of the tensors.

    On the host each is copied. On a device all are put into one new tensor there, which `fetch` copies to the host:
    one wait for all of them, and not before somebody needs it.

    Args:
        tensors: tensors or numpy arrays of any shape; of a sharded one the local shard counts.
        place: `auto` asks the first tensor where it lives; `host` and `device` force one.

    Raises:
        RecordError: something that is neither.
    """

    __slots__ = ("_arrays", "_device", "_sizes")

    def __init__(self, tensors: Sequence[object], place: Place = "auto") -> None:
        local = [_local(tensor) for tensor in tensors]
        self._sizes = [_size(tensor) for tensor in local]
        self._arrays: list[Any] | None = None
        self._device: Any = None
        if local and _on_device(local, place):
            self._device = _joined(local)
        else:
            self._arrays = [_flat(tensor) for tensor in local]

    @property
    def ready(self) -> bool:
        """Whether `fetch` returns without waiting for the device."""
        return self._arrays is not None

    def fetch(self) -> list[Any]:
        """A flat float64 numpy array for each tensor. Copies from the device if it has to, once."""
        if self._arrays is None:
            values, self._device = self._device.asnumpy().astype("float64"), None
            ends = itertools.accumulate(self._sizes)
            self._arrays = [values[end - size : end] for end, size in zip(ends, self._sizes, strict=True)]
        return self._arrays


def _local(tensor: Any) -> Any:
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if hasattr(tensor, "asnumpy") or is_array(tensor):
        return tensor
    raise RecordError(f"expected a tensor or a numpy array, got {type(tensor).__name__}")


def _size(tensor: Any) -> int:
    size = 1
    for length in tensor.shape:
        size *= int(length)
    return size


def _on_device(tensors: Sequence[Any], place: Place) -> bool:
    if place == "auto":
        first = next((t for t in tensors if hasattr(t, "asnumpy")), None)
        return first is not None and lives_on_device(first)
    return place == "device"


def _flat(tensor: Any) -> Any:
    array = tensor.asnumpy() if hasattr(tensor, "asnumpy") else tensor
    return array.reshape(-1).astype("float64")  # a copy: on the CPU `asnumpy` is a live view


def _joined(tensors: Sequence[Any]) -> Any:
    import mindspore as ms
    from mindspore import ops

    flat = [(t if hasattr(t, "asnumpy") else ms.Tensor(t)).reshape(-1) for t in tensors]
    if any(t.dtype != flat[0].dtype for t in flat):
        flat = [ops.cast(t, ms.float32) for t in flat]
    # `concat` of one tensor may be that tensor.
    return ops.concat(flat) if len(flat) > 1 else flat[0].copy()
