"""records.py: what may exist, and that nothing else can be built."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import strategies as our

from rankd.collector.protocol.errors import LimitError, RecordError
from rankd.collector.protocol.records import (
    MAX_METRIC_BYTES,
    MAX_NAME_BYTES,
    MAX_NAMES,
    MAX_STEP,
    SUMMARY_FIELDS,
    ExpertLayer,
    Frame,
    Level,
    NameTable,
    Position,
    Shape,
    metric_of,
)

TABLE = NameTable(("a", "b", "c"))
LAYERS = NameTable(("decoder.0", "mtp.0.1"))
NOT_POSITIVE = [0, -1, MAX_STEP + 1, True, 1.0, "1", math.nan]


def doubles(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


def indices(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


class TestPosition:
    @pytest.mark.parametrize("wrong", [*NOT_POSITIVE, None])
    @pytest.mark.parametrize("part", ["attempt", "step"])
    def test_attempt_and_step_are_positive_integers(self, part: str, wrong: Any) -> None:
        """An attempt or step that is no positive 64-bit integer is refused; the error names the part and the value."""
        parts: dict[str, Any] = {"attempt": 1, "step": 1} | {part: wrong}
        with pytest.raises(RecordError, match=f"{part} must be an integer from 1 to {MAX_STEP}, got"):
            Position(**parts)

    @pytest.mark.parametrize("wrong", NOT_POSITIVE)
    def test_micro_step_is_a_positive_integer_or_none(self, wrong: Any) -> None:
        """A micro_step that is neither None nor a positive integer is refused."""
        with pytest.raises(RecordError, match="micro_step"):
            Position(1, 1, wrong)

    @given(our.positions)
    def test_the_key_leads_back(self, position: Position) -> None:
        """A position is made again from its sort key."""
        assert Position.from_key(position.key) == position

    @given(our.positions, our.positions)
    def test_order_is_that_of_the_keys(self, a: Position, b: Position) -> None:
        """Positions sort by (attempt, step, micro_step), a missing micro_step after every other."""
        none_last = math.inf
        plain = [(p.attempt, p.step, none_last if p.micro_step is None else p.micro_step) for p in (a, b)]
        # Python compares an integer with the float infinity exactly.
        assert (a < b) == (plain[0] < plain[1])

    def test_the_largest_micro_step_comes_before_the_step_itself(self) -> None:
        """Step-level records come after the last micro-step, however large its number."""
        assert Position(1, 1, MAX_STEP) < Position(1, 1) < Position(1, 2, 1) < Position(2, 1, 1)

    def test_it_reads_well_and_is_frozen(self) -> None:
        """A position says itself in words, knows its level, and cannot be changed."""
        assert str(Position(1, 4, 2)) == "attempt 1 step 4 micro_step 2"
        assert str(Position(2, 4)) == "attempt 2 step 4"
        assert (Position(1, 4, 2).level, Position(1, 4).level) == (Level.MICRO_STEP, Level.STEP)
        with pytest.raises(dataclasses.FrozenInstanceError):
            Position(1, 1).step = 2  # type: ignore[misc]  # the point of the test


class TestMetricOf:
    @pytest.mark.parametrize("name", ["local_loss", "local_norm", "tpe"])
    def test_a_micro_step_metric_at_step_level_is_refused(self, name: str) -> None:
        """A known micro-step metric cannot be recorded for a whole step; the error says both levels."""
        assert metric_of(name, Level.MICRO_STEP).name == name
        with pytest.raises(RecordError, match=f"'{name}' is a micro-step metric, not a step one"):
            metric_of(name, Level.STEP)

    @pytest.mark.parametrize("name", ["device_loss", "device_norm", "max_attention_logit"])
    def test_a_step_metric_at_micro_step_level_is_refused(self, name: str) -> None:
        """A known step metric cannot be recorded for a micro-step."""
        assert metric_of(name, Level.STEP).name == name
        with pytest.raises(RecordError, match=f"'{name}' is a step metric, not a micro-step one"):
            metric_of(name, Level.MICRO_STEP)

    @pytest.mark.parametrize("name", SUMMARY_FIELDS)
    def test_a_summary_field_at_micro_step_level_is_the_users_own(self, name: str) -> None:
        """`loss` of a micro-step is a scalar of the user's, not the step summary's."""
        user = metric_of("anything", Level.STEP).place
        assert metric_of(name, Level.STEP).place < user
        assert metric_of(name, Level.MICRO_STEP).place == user

    def test_the_places_are_the_documented_order(self) -> None:
        """SPEC.md section 3: loss, norms, tpe, device loss, device norms, logits, summary, the user's own."""
        micro = [metric_of(name, Level.MICRO_STEP).place for name in ("local_loss", "local_norm", "tpe", "mine")]
        names = ("device_loss", "device_norm", "max_attention_logit", *SUMMARY_FIELDS, "mine")
        step = [metric_of(name, Level.STEP).place for name in names]
        assert micro == sorted(set(micro))
        assert step == sorted(set(step))

    @pytest.mark.parametrize("name", ["step", "micro_step"])
    @pytest.mark.parametrize("level", Level)
    def test_reserved_names_are_refused(self, name: str, level: Level) -> None:
        """A metric whose line would read as a block's header is refused."""
        with pytest.raises(RecordError, match="block's header"):
            metric_of(name, level)

    @pytest.mark.parametrize("name", ["", None, 1, b"loss", "\ud800"])
    def test_what_is_no_text_is_refused(self, name: Any) -> None:
        """An empty name, another type, and half of a surrogate pair are no metric names."""
        with pytest.raises(RecordError, match="metric name"):
            metric_of(name, Level.STEP)

    def test_the_length_is_limited_in_bytes(self) -> None:
        """The limit counts UTF-8 bytes: at the limit is fine, one more is not."""
        assert metric_of("é" * (MAX_METRIC_BYTES // 2), Level.STEP).shape is Shape.SCALAR
        with pytest.raises(LimitError, match=f"{MAX_METRIC_BYTES + 2} bytes, at most {MAX_METRIC_BYTES}"):
            metric_of("é" * (MAX_METRIC_BYTES // 2 + 1), Level.STEP)


class TestExpertLayer:
    @pytest.mark.parametrize(
        ("parts", "found"),
        [
            (("encoder", 0), "block must be"),
            (("decoder", -1), "layer must be"),
            (("decoder", True), "layer must be"),
            (("decoder", 0, 0), "mtp_idx goes with"),
            (("mtp", 0), "mtp_idx goes with"),
            (("mtp", 0, -1), "mtp_idx must be"),
            (("mtp", 0, 1.0), "mtp_idx must be"),
        ],
    )
    def test_impossible_layers_are_refused(self, parts: tuple[Any, ...], found: str) -> None:
        """Another block, a wrong number, or an mtp_idx in the wrong place is refused."""
        with pytest.raises(RecordError, match=found):
            ExpertLayer(*parts)

    @given(our.expert_layers)
    def test_the_name_leads_back(self, layer: ExpertLayer) -> None:
        """A layer is made again from its name."""
        assert ExpertLayer.from_name(layer.name) == layer

    @pytest.mark.parametrize(
        "name",
        ["", "decoder", "decoder.", "decoder.-1", "decoder.1.2", "mtp.1", "mtp.1.2.3", "decoder.x", "decoder. 1",
         "decoder.٣", "decoder.1_0", "decoder.007", "mtp.00.1", "DECODER.1", "decoder." + "9" * 5_000, "decoder.1\n"],
    )  # fmt: skip
    def test_other_names_are_refused(self, name: str) -> None:
        """Only the canonical form is a layer's name, so that one layer has one name; a long number is no crash."""
        with pytest.raises(RecordError, match=r"decoder\.LAYER or mtp\.IDX\.LAYER"):
            ExpertLayer.from_name(name)

    @given(st.text())
    def test_any_text_is_a_layer_or_a_record_error(self, name: str) -> None:
        """No text makes from_name raise anything else, and what it accepts has that very name."""
        with contextlib.suppress(RecordError):
            assert ExpertLayer.from_name(name).name == name

    def test_layers_sort_by_block_mtp_index_and_layer(self) -> None:
        """SPEC.md section 3: decoder layers first, then the MTP blocks one after the other."""
        names = ["decoder.2", "decoder.10", "mtp.0.0", "mtp.0.1", "mtp.1.0"]
        layers = [ExpertLayer.from_name(name) for name in reversed(names)]
        assert [layer.name for layer in sorted(layers, key=lambda layer: layer.sort_key)] == names


class TestNameTable:
    @pytest.mark.parametrize("names", [(), ["a"], "ab", None])
    def test_it_needs_a_tuple_of_names(self, names: Any) -> None:
        """No names, or another type than a tuple, is refused."""
        with pytest.raises(RecordError, match="tuple of at least one name"):
            NameTable(names)

    @pytest.mark.parametrize("name", ["", None, 3, b"a", "\udfff"])
    def test_a_name_is_text(self, name: Any) -> None:
        """A name that is empty, of another type or no valid Unicode is refused."""
        with pytest.raises(RecordError, match="name"):
            NameTable(("fine", name))

    def test_limits(self) -> None:
        """MAX_NAMES names of MAX_NAME_BYTES bytes are fine; one more of either is not."""
        assert len(NameTable(("n",) * MAX_NAMES)) == MAX_NAMES
        assert len(NameTable(("n" * MAX_NAME_BYTES,))) == 1
        with pytest.raises(LimitError, match=f"{MAX_NAMES + 1} names"):
            NameTable(("n",) * (MAX_NAMES + 1))
        with pytest.raises(LimitError, match=f"{MAX_NAME_BYTES + 1} bytes"):
            NameTable(("n" * (MAX_NAME_BYTES + 1),))

    @given(our.name_tables)
    def test_equal_names_are_equal_tables(self, table: NameTable) -> None:
        """Tables are equal, and hash alike, when their names are."""
        twin = NameTable(tuple(table.names))
        assert twin == table
        assert hash(twin) == hash(table)
        assert NameTable((*table.names, "one more")) != table


class TestFrame:
    @pytest.mark.parametrize("value", ["1", None, 10**400, [1.0]])
    def test_what_is_no_float64_is_refused(self, value: Any) -> None:
        """A value that float64 cannot hold is refused with the metric's name, in each constructor."""
        with pytest.raises(RecordError, match="loss"):
            Frame.scalar("loss", value)
        with pytest.raises(RecordError, match="local_norm"):
            Frame.named("local_norm", TABLE, [1.0, value])
        with pytest.raises(RecordError, match="max_attention_logit"):
            Frame.lists("max_attention_logit", TABLE, [[value]])

    @pytest.mark.parametrize("index", [-1, 2**32, 0.5])
    def test_an_index_fits_uint32(self, index: Any) -> None:
        """An index that the column cannot hold is refused."""
        with pytest.raises(RecordError, match="local_norm"):
            Frame.named("local_norm", TABLE, [1.0], [index])

    @pytest.mark.parametrize("level", Level)
    @given(data=st.data())
    def test_possible_frames_pass_and_are_consistent(self, level: Level, data: st.DataObject) -> None:
        """What the constructors build passes its check; names, values, groups and counts agree."""
        frame = data.draw(our.frames(level))
        frame.check(level)
        records = list(frame.records(Position(1, 1, None if level is Level.STEP else 1), 3, 0.0))
        assert len(records) == frame.record_count == (len(frame.names) or frame.record_count)
        flat = [v for r in records for v in (r.value if isinstance(r.value, tuple) else (r.value,))]
        assert doubles(*flat) == frame.column
        if frame.table is not None:
            assert [r.name for r in records] == list(frame.names)

    @given(st.binary(min_size=8, max_size=8))
    def test_values_are_bit_exact(self, raw: bytes) -> None:
        """Every bit pattern of float64 survives, whatever kind of NaN it is."""
        (value,) = struct.unpack("<d", raw)
        assert Frame.scalar("loss", value).column == raw
        assert doubles(*Frame("loss", raw).values) == raw

    @pytest.mark.parametrize(
        ("frame", "level", "found"),
        [
            (Frame("loss", b"1234567"), Level.STEP, "no column of float64"),
            (Frame("loss", b""), Level.STEP, "one value and no names"),
            (Frame("loss", doubles(1, 2)), Level.STEP, "one value and no names"),
            (Frame("loss", doubles(1), TABLE), Level.STEP, "one value and no names"),
            (Frame("loss", doubles(1), None, b""), Level.STEP, "one value and no names"),
            (Frame("loss", doubles(1), None, None, b""), Level.STEP, "one value and no names"),
            (Frame("loss", doubles(1), iteration=1), Level.STEP, "only tpe"),
            (Frame("local_loss", doubles(1)), Level.STEP, "micro-step metric"),
            (Frame("local_norm", doubles(1)), Level.MICRO_STEP, "need a name table"),
            (Frame("local_norm", doubles(1, 2), TABLE), Level.MICRO_STEP, "2 values for 3 names"),
            (Frame("local_norm", doubles(1, 2, 3), TABLE, None, b""), Level.MICRO_STEP, "3 values for 3 names"),
            (Frame("local_norm", doubles(1, 2, 3), TABLE, iteration=1), Level.MICRO_STEP, "only tpe"),
            (Frame("local_norm", doubles(1), TABLE, b"123"), Level.MICRO_STEP, "no column of uint32"),
            (Frame("local_norm", doubles(1), TABLE, indices(3)), Level.MICRO_STEP, "stay below 3, got 3"),
            (Frame("local_norm", doubles(1, 2), TABLE, indices(1, 1)), Level.MICRO_STEP, "must rise"),
            (Frame("local_norm", doubles(1, 2), TABLE, indices(1, 0)), Level.MICRO_STEP, "must rise"),
            (Frame("max_attention_logit", doubles(1), TABLE), Level.STEP, "a count for each of its 3 names"),
            (Frame("max_attention_logit", b"", TABLE, None, indices(0)), Level.STEP, "each of its 3 names"),
            (Frame("max_attention_logit", doubles(1), TABLE, None, indices(1, 1, 0)), Level.STEP, "do not add up"),
            (Frame.lists("tpe", LAYERS, [[1], [2]]), Level.MICRO_STEP, "iteration must be"),
            (Frame.lists("tpe", LAYERS, [[1], [2]], 0), Level.MICRO_STEP, "iteration must be"),
            (Frame.lists("tpe", TABLE, [[1], [2], [3]], 1), Level.MICRO_STEP, "a tpe record is named"),
            (Frame.lists("tpe", LAYERS, [[1], [0.5]], 1), Level.MICRO_STEP, "is an integer of at most"),
            (Frame.lists("tpe", LAYERS, [[1], [math.nan]], 1), Level.MICRO_STEP, "got nan"),
            (Frame.lists("tpe", LAYERS, [[math.inf], [1]], 1), Level.MICRO_STEP, "got inf"),
            (Frame.lists("tpe", LAYERS, [[1e300], [1]], 1), Level.MICRO_STEP, "got 1e[+]300"),
            (Frame("", doubles(1)), Level.STEP, "metric name"),
        ],
    )  # fmt: skip
    def test_impossible_frames_are_refused(self, frame: Frame, level: Level, found: str) -> None:
        """Metric, shape, lengths, indices and counts must fit together; the error says which does not."""
        with pytest.raises(RecordError, match=found):
            frame.check(level)

    @pytest.mark.parametrize(("part", "wrong"), [("metric", []), ("column", "text"), ("present", 3), ("counts", [])])
    def test_parts_of_another_type_are_refused(self, part: str, wrong: Any) -> None:
        """A column that is no bytes, or a metric that is no text, is a RecordError and no crash."""
        frame = dataclasses.replace(Frame.scalar("loss", 1.0), **{part: wrong})
        with pytest.raises(RecordError):
            frame.check(Level.STEP)

    def test_present_chooses_names(self) -> None:
        """A parameter without a gradient in this micro-step has no record; the others keep their names and order."""
        frame = Frame.named("local_norm", TABLE, [1.5, 2.5], [0, 2])
        frame.check(Level.MICRO_STEP)
        assert [(r.name, r.value) for r in frame.records(Position(1, 1, 1), 0)] == [("a", 1.5), ("c", 2.5)]
        assert Frame.named("local_norm", TABLE, [], []).record_count == 0
