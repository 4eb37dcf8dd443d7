"""Norms of gradients from numpy arrays; the same through real MindSpore is in tests/e2e/test_norms_mindspore.py."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankd.agent.norms import NormMonitor, trainable_names
from rankd.collector.protocol.errors import RecordError
from rankd.collector.protocol.records import Frame, Level

np = pytest.importorskip("numpy")

NAMES = ["embedding.weight", "layers.0.attention.weight", "layers.0.layernorm.weight", "layers.1.attention.weight"]


def every(name: str) -> bool:
    return True


def attention(name: str) -> bool:
    return "attention" in name


def array(*values: float, dtype: str = "float32") -> Any:
    return np.array(values, dtype=dtype)


def by_name(frame: Frame | None, level: Level = Level.MICRO_STEP) -> dict[str, float]:
    """The values of a frame, after checking that it is a possible one."""
    if frame is None:
        return {}
    frame.check(level)
    return dict(zip(frame.names, frame.values, strict=True))


def single(gradient: Any) -> float:
    """The norm of one gradient."""
    frame = NormMonitor(["w"], every, None).micro_step([gradient]).fetch()
    return by_name(frame)["w"]


def test_an_increment_is_the_difference_of_accumulated_norms_and_may_be_negative() -> None:
    """The first micro-step reports the accumulated norm, later ones what was added to it, which can be below zero."""
    monitor = NormMonitor(["w"], every, every)
    seen = [by_name(monitor.micro_step([array(v)]).fetch())["w"] for v in (3.0, 5.0, 1.0)]
    assert seen == [3.0, 2.0, -4.0]
    assert by_name(monitor.end_step(), Level.STEP) == {"w": 1.0}


def test_micro_batch_norms_are_the_norms_themselves_and_the_last_one_is_the_device_norm() -> None:
    """With kind micro_batch nothing is subtracted."""
    monitor = NormMonitor(["w"], every, every, "micro_batch")
    assert [by_name(monitor.micro_step([array(v)]).fetch())["w"] for v in (3.0, 5.0)] == [3.0, 5.0]
    assert by_name(monitor.end_step(), Level.STEP) == {"w": 5.0}


def test_a_parameter_without_a_gradient_has_no_record_and_is_right_the_next_time() -> None:
    """What was accumulated before a micro-step without a gradient is what the next one is compared with."""
    monitor = NormMonitor(["a", "b"], every, every)
    assert by_name(monitor.micro_step([array(1), array(2)]).fetch()) == {"a": 1.0, "b": 2.0}
    assert by_name(monitor.micro_step([array(4), None]).fetch()) == {"a": 3.0}
    assert by_name(monitor.micro_step([array(5), array(7)]).fetch()) == {"a": 1.0, "b": 5.0}
    assert by_name(monitor.end_step(), Level.STEP) == {"a": 5.0, "b": 7.0}


def test_a_parameter_that_never_had_a_gradient_is_left_out_of_the_device_norm() -> None:
    """`present` names the others; a step without any gradient has no frame at all."""
    monitor = NormMonitor(["a", "b"], every, every)
    monitor.micro_step([None, array(2)])
    assert by_name(monitor.end_step(), Level.STEP) == {"b": 2.0}
    assert monitor.micro_step([None, None]).fetch() is None
    assert monitor.end_step() is None


def test_each_metric_is_written_for_its_own_filter_but_both_are_measured() -> None:
    """device_norm collects the norms of parameters that local_norm does not write, and the other way round."""
    monitor = NormMonitor(NAMES, attention, lambda name: "layers.0" in name)
    grads = [array(1), array(2), array(3), array(4)]
    assert by_name(monitor.micro_step(grads).fetch()) == {NAMES[1]: 2.0, NAMES[3]: 4.0}
    assert by_name(monitor.end_step(), Level.STEP) == {NAMES[1]: 2.0, NAMES[2]: 3.0}


def test_device_norm_alone_measures_and_writes_no_local_norm() -> None:
    """With local_norm off the micro-steps have no frame."""
    monitor = NormMonitor(["w"], None, every)
    assert monitor.micro_step([array(3)]).fetch() is None
    assert by_name(monitor.end_step(), Level.STEP) == {"w": 3.0}


def test_filters_that_choose_nothing_leave_the_monitor_inactive() -> None:
    """Gradients are then not even looked at."""
    monitor = NormMonitor(["w"], None, lambda name: False)
    assert not monitor.active
    assert monitor.micro_step([object()]).fetch() is None
    assert monitor.end_step() is None


def test_the_end_of_a_step_and_a_reset_forget_it() -> None:
    """The next step starts from nothing, whether the last one ended or was abandoned."""
    monitor = NormMonitor(["w"], every, every)
    for forget in (monitor.end_step, monitor.reset):
        assert by_name(monitor.micro_step([array(3)]).fetch()) == {"w": 3.0}
        forget()
    assert monitor.end_step() is None


def test_a_name_table_is_the_same_object_for_every_frame() -> None:
    """So that it travels once."""
    monitor = NormMonitor(["a", "b"], every, None)
    first, second = (monitor.micro_step(grads).fetch() for grads in ([array(1), array(1)], [array(2), None]))
    assert first is not None
    assert second is not None
    assert first.table is second.table


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_norm_is_computed_in_float32_at_least(dtype: str) -> None:
    """A float16 square overflows from 256 up; the norm must not."""
    assert single(np.full((30, 30), 300.0, dtype)) == pytest.approx(9000.0, rel=1e-6)


@pytest.mark.parametrize(("value", "count"), [(1e25, 16), (3e38, 4), (1e-25, 16), (1e-30, 9)])
def test_a_float32_norm_whose_square_leaves_the_range_is_computed_in_float64(value: float, count: int) -> None:
    """Neither inf nor zero is reported for a norm that float64 can hold."""
    assert single(np.full(count, value, "float32")) == pytest.approx(value * math.sqrt(count), rel=1e-5)


@pytest.mark.parametrize(("bad", "expected"), [(math.inf, math.inf), (-math.inf, math.inf), (math.nan, math.nan)])
def test_what_is_not_finite_stays_so(bad: float, expected: float) -> None:
    """An infinite or NaN gradient is the very thing to see."""
    assert struct.pack("<d", abs(single(array(1.0, bad)))) == struct.pack("<d", expected)


def test_any_shape_and_layout_is_measured() -> None:
    """Empty, 0-d, transposed and strided arrays, and one of many blocks and a rest."""
    grid = np.arange(12, dtype="float32").reshape(3, 4)
    assert single(grid.T) == pytest.approx(float(np.linalg.norm(grid)))
    assert single(grid[:, ::2]) == pytest.approx(float(np.linalg.norm(grid[:, ::2])))
    assert single(np.zeros((0, 4), "float32")) == 0.0
    assert single(np.array(-2.0, "float32")) == 2.0
    assert single(np.ones(2**20 + 5, "float32")) == pytest.approx(math.sqrt(2**20 + 5), rel=1e-9)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 3.3e-5])
@pytest.mark.parametrize("count", [1_023, 1_025, 119_716, 2**20])
def test_a_norm_of_many_equal_values_agrees_with_float64(value: float, count: int) -> None:
    """Where every float32 addition rounds the same way; summed whole, this was wrong by 4e-4."""
    gradient = np.full(count, value, "float32")
    assert single(gradient) == pytest.approx(float(np.linalg.norm(gradient.astype("float64"))), rel=1e-6)


def test_a_local_shard_is_measured_for_a_sharded_gradient() -> None:
    """What `to_local()` gives is what lies on this rank."""

    class Sharded:
        def to_local(self) -> Any:
            return array(3, 4)

    assert single(Sharded()) == 5.0


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_gradients_than_names_is_an_error_that_says_what_to_pass(count: int) -> None:
    """Names and gradients that do not belong together would be attributed to the wrong parameters."""
    with pytest.raises(RecordError, match=rf"{count} gradients? for 2 parameters.*trainable_params"):
        NormMonitor(["a", "b"], every, None).micro_step([array(1)] * count)


@pytest.mark.parametrize("bad", ["text", 3.0, [1.0], np.array([1j]), np.array(["x"])])
def test_what_is_no_gradient_is_an_error_that_names_the_parameter(bad: object) -> None:
    """And the step goes on as if that micro-step had not been."""
    monitor = NormMonitor(["a", "b"], every, every)
    monitor.micro_step([array(1), array(1)])
    with pytest.raises(RecordError, match="gradient of b"):
        monitor.micro_step([array(2), bad])
    assert by_name(monitor.micro_step([array(3), array(3)]).fetch()) == {"a": 2.0, "b": 2.0}


def test_an_unknown_kind_is_refused() -> None:
    """A typo must not quietly become the default."""
    with pytest.raises(RecordError, match="increment"):
        NormMonitor(["w"], every, None, "increments")  # type: ignore[arg-type]


def test_trainable_names_of_a_cell_and_of_chunks() -> None:
    """A pipeline stage with several chunks is a list of cells; anything else is an error."""

    class Parameter:
        def __init__(self, name: str) -> None:
            self.name = name

    class Cell:
        def __init__(self, *names: str) -> None:
            self._names = names

        def trainable_params(self) -> list[Parameter]:
            return [Parameter(name) for name in self._names]

    assert trainable_names(Cell("a", "b")) == ["a", "b"]
    assert trainable_names([Cell("a"), Cell("b")]) == ["a", "b"]
    with pytest.raises(RecordError, match=r"nn\.Cell"):
        trainable_names("model")


def test_importing_and_measuring_numpy_arrays_does_not_import_mindspore() -> None:
    """A laptop without MindSpore can simulate, and importing the module needs no numpy."""
    code = (
        "import sys\n"
        "from rankd.agent.norms import NormMonitor\n"
        "from rankd.agent.losses import read_scalar\n"
        "assert 'numpy' not in sys.modules\n"
        "import numpy\n"
        "NormMonitor(['w'], lambda name: True, None).micro_step([numpy.ones(3)])\n"
        "read_scalar(numpy.float32(1))\n"
        "assert 'mindspore' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


values = st.floats(min_value=0.0, max_value=1e6)


@settings(deadline=None)  # a busy machine is no bug
@given(st.lists(st.lists(st.none() | values, min_size=3, max_size=3), max_size=8))
def test_the_increments_of_a_parameter_add_up_to_its_device_norm(micro_steps: Sequence[Sequence[float | None]]) -> None:
    """Whatever micro-steps had no gradient, and wherever a record is missing."""
    names = ["a", "b", "c"]
    monitor = NormMonitor(names, every, every)
    sums: dict[str, float] = {}
    for step in micro_steps:
        grads = [None if v is None else array(v, dtype="float64") for v in step]
        frame = by_name(monitor.micro_step(grads).fetch())
        assert list(frame) == [n for n, v in zip(names, step, strict=True) if v is not None]
        for name, value in frame.items():
            sums[name] = sums.get(name, 0.0) + value
    assert by_name(monitor.end_step(), Level.STEP) == pytest.approx(dict(sorted(sums.items())), abs=1e-6)
