"""A loss of any sort as a float; the same with real tensors is in tests/e2e/test_norms_mindspore.py."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest

from rankd.agent.losses import read_scalar, scalar
from rankd.collector.protocol.errors import RecordError

np = pytest.importorskip("numpy")


@pytest.mark.parametrize(
    "value",
    [
        2,
        2.0,
        True + 1,
        Fraction(4, 2),
        np.float16(2),
        np.float32(2),
        np.float64(2),
        np.int64(2),
        np.array(2.0),
        np.array([2.0], "float16"),
        np.array([[2]], "int32"),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}{getattr(value, 'shape', '')}",
)
def test_numbers_and_arrays_of_one_element_are_scalars(value: object) -> None:
    """Whatever a training loop has at hand; nothing of it is pending."""
    pending = scalar(value)
    assert pending.ready
    assert pending.fetch() == 2.0
    assert type(pending.fetch()) is float


@pytest.mark.parametrize("make", [float, np.float32, np.float16, np.array])
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinities_pass(make: Any, value: float) -> None:
    """They are what one wants to see of a run that diverges."""
    assert read_scalar(make(value)) == value


@pytest.mark.parametrize("make", [float, np.float32, np.float16, np.array])
def test_nan_passes(make: Any) -> None:
    """NaN is a value, not an error."""
    assert math.isnan(read_scalar(make(math.nan)))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("0.5", "str: '0.5'"),
        (None, "NoneType"),
        ([0.5], "list"),
        (1j, "complex"),
        (np.zeros(2), r"shape \(2,\)"),
        (np.zeros((0,)), r"shape \(0,\)"),
        (np.array(1j), "complex128"),
        (np.array("x"), "<U1"),
        (10**400, "too large"),
    ],
)
def test_anything_else_is_an_error_that_says_what_it_got(value: object, said: str) -> None:
    """The message carries the name of the value, and the type or shape that came."""
    with pytest.raises(RecordError, match=rf"^global_loss .*{said}"):
        read_scalar(value, "global_loss")


def test_an_array_is_read_when_it_is_handed_over() -> None:
    """What the training loop adds to it later does not change what was recorded."""
    loss = np.array([1.0])
    pending = scalar(loss)
    loss += 1
    assert pending.fetch() == 1.0
