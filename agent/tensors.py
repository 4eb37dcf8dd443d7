"""What can be asked of a tensor or array without waiting for it, and without importing where it comes from."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

__all__ = ["Place", "is_array", "lives_on_device"]

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
