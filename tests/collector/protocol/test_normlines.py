"""Norms printed many at once, against `%10.6f` one by one."""

from __future__ import annotations

import math
import random
import struct
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankd.collector.protocol import normlines
from rankd.collector.protocol.normlines import NormLines, load_numpy

COUNT = 160
HEADS = [b"%d%% of " % i + b"x" * (i % 7) + b": " for i in range(COUNT)]


def column(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


def expected(values: Sequence[float], heads: Sequence[bytes] = HEADS) -> bytes:
    return b"".join(head + b"%10.6f }\n" % value for head, value in zip(heads, values, strict=True))


def both(values: Sequence[float]) -> tuple[bytes, bytes]:
    """What is printed, alone and beside values that are easy, and what should be."""
    easy = [*values, *[0.25] * (COUNT - len(values))]
    return bytes(NormLines(HEADS).fill(column(easy))), expected(easy)


@pytest.fixture
def at_once() -> None:
    """The way with numpy is there, or the test would prove nothing."""
    assert load_numpy()


# Middles between two millionths: some are exact in binary (multiples of 2**-7), most are a little off.
MIDDLES = [k / 2**7 for k in range(1, 128, 2)]
MIDDLES += [(k + 0.5) * 1e-6 for k in (0, 1, 2, 122, 499_999, 999_998, 99_999_999)]
EDGES = [0.0, -0.0, 5e-324, -5e-324, 4.9e-7, -4.9e-7, 5e-7, 0.9999995, 9.9999995, 99.8999995, -99.8999995, 999.8999995]
TOO_WIDE = [999.9, 999.9999994, 999.9999996, 1e3, 1e9, 1e300, -99.9, -99.9999996, -100.0, -1e300]
NO_NUMBERS = [math.nan, math.inf, -math.inf]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("value", [*MIDDLES, *EDGES, *TOO_WIDE, *NO_NUMBERS])
def test_hard_value_among_easy_ones(value: float) -> None:
    for near in (math.nextafter(value, -math.inf), value, math.nextafter(value, math.inf), -value):
        printed, right = both([near])
        assert printed == right


@pytest.mark.usefixtures("at_once")
@given(st.lists(st.floats(-99.5, 999.5) | st.floats(), min_size=1, max_size=COUNT))
def test_any_values(values: list[float]) -> None:
    printed, right = both(values)
    assert printed == right


@pytest.mark.usefixtures("at_once")
@given(st.lists(st.integers(-99_900_000, 999_900_000), min_size=1, max_size=COUNT), st.floats(-0.51, 0.51))
def test_values_around_millionths(millionths: list[int], beside: float) -> None:
    printed, right = both([(m + beside) * 1e-6 for m in millionths])
    assert printed == right


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_a_million_norms() -> None:
    source, lines = random.Random(1), NormLines(HEADS)
    for scale in (1e-7, 1e-4, 1e-2, 1.0, 30.0):
        for _ in range(200_000 // COUNT):
            values = [source.gauss(0, scale) for _ in range(COUNT)]
            assert lines.fill(column(values)) == expected(values)


@pytest.mark.usefixtures("at_once")
def test_easy_values_are_not_printed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests above would compare `%` with itself."""

    def refuse(*_: object) -> bytes:
        raise AssertionError("printed by %")

    monkeypatch.setattr(NormLines, "_printed", refuse)
    values = [0.001 * i - 0.05 for i in range(COUNT)]
    assert NormLines(HEADS).fill(column(values)) == expected(values)
    both = NormLines(HEADS).fill_all([column(values)] * 2, memoryview(bytearray(2 * len(expected(values)))))
    assert [bytes(text) for text in both] == [expected(values)] * 2
    with pytest.raises(AssertionError, match="printed by %"):
        NormLines(HEADS).fill(column([math.nan] * COUNT))


@given(st.lists(st.lists(st.floats(-99.5, 999.5) | st.floats(), min_size=3, max_size=3), min_size=1, max_size=5))
def test_several_columns_are_each_as_alone(columns: list[list[float]]) -> None:
    """Also beside one that has to be printed by itself, and in memory that was used before."""
    heads = HEADS[:60]
    lines = NormLines(heads)
    room = memoryview(bytearray(b"x" * lines.text_size * len(columns)))
    whole = [[*values, *[0.125] * 57] for values in columns]
    for _ in range(2):
        texts = lines.fill_all([column(values) for values in whole], room)
        assert [bytes(text) for text in texts] == [expected(values, heads) for values in whole]


@pytest.mark.parametrize("count", [1, 2, 3, 149, 150, 151, 1_000])
def test_any_number_of_lines(count: int) -> None:
    heads = [b"%%s %d" % i for i in range(count)]
    values = [i / 3 for i in range(count)]
    assert NormLines(heads).fill(column(values)) == expected(values, heads)


def test_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normlines, "_numpy_write", lambda: None)
    lines = NormLines(HEADS)
    for values in ([0.5] * COUNT, [math.nan, *[1e6] * (COUNT - 1)], [-0.0] * COUNT):
        assert lines.fill(column(values)) == expected(values)


def test_numpy_that_cannot_be_imported() -> None:
    """An installation without it, or with one that is broken, prints the same."""
    code = f"""
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            raise RuntimeError("compiled for another machine")
sys.meta_path.insert(0, Broken())
from rankd.collector.protocol.normlines import NormLines, load_numpy
assert not load_numpy()
print(bytes(NormLines([b"a "] * 200).fill({column([0.1] * 200)!r})).decode(), end="")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout == "a   0.100000 }\n" * 200


def test_its_size_is_what_it_may_keep() -> None:
    lines = NormLines(HEADS)
    blank = sum(len(head) + 10 + len(b" }\n") for head in HEADS)
    lines.fill(column([math.nan] * COUNT))
    assert lines.size == 2 * blank + 8 * COUNT
