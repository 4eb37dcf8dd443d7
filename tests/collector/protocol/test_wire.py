"""wire.py: what goes out comes back, and nothing else comes in."""

from __future__ import annotations

import dataclasses
import math
import pickle
import struct
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import strategies as our

from rankd.collector.protocol.errors import LimitError, ProtocolError, RecordError, VersionError
from rankd.collector.protocol.records import MAX_NAME_BYTES, MAX_NAMES, MAX_STEP, Frame, NameTable
from rankd.collector.protocol.wire import (
    MAX_ITEM_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_RANKS,
    MAX_TABLES,
    PROTOCOL_VERSION,
    Ack,
    Answer,
    Ask,
    Beat,
    Block,
    Command,
    Data,
    Gap,
    Goodbye,
    Hello,
    Interned,
    Item,
    Message,
    Note,
    Refused,
    Report,
    Table,
    Tables,
    Welcome,
    Who,
    decode_item,
    decode_message,
    encode_item,
    encode_message,
)

TABLE = NameTable(("a", "b", "c"))
BLOCK = Block(1, 4, 2, True, 1.5, (Frame.scalar("local_loss", 0.25), Frame.named("local_norm", TABLE, [1.0, 2.0, 3.0])))
NOTE = Note(2, 4, None, "anomaly", "loss is nan", 1.5)
GAP = Gap(3, "outbox_full", 70, (4, 1), (5, None))
GOODBYE = Goodbye(4, "end of training", 700, {"outbox_full": 70}, 1.5)
HELLO = Hello(b"s" * 16, "run", 3, 8, 1, "node-1", 4711, 1.5, 100, {"mindspore": "2.10.0"})
ITEMS: list[Item] = [Table(1, 0, TABLE), BLOCK, NOTE, GAP, GOODBYE]
MESSAGES: list[Message] = [HELLO, Welcome("run", 7, 1.0), Refused("no", True), Data((b"item",)), Ack(7), Who()]
MESSAGES += [Beat(4, 2, 0, {"rss": 1e9})]
COMMAND, ASK = Command("sample", {"first": 7, "last": None}, b"p" * 32), Ask(1, "sample", {"interval": 1}, b"p" * 32)
MESSAGES += [COMMAND, ASK, Report("sample", {"late": True, "why": "", "pace": 1.5}), Answer(1, True, b"{}")]
LONG = "x" * 100_000
NO_FACTS: tuple[object, ...] = ([], math.nan, b"", 2**63, "\ud800")


def known(item: Item) -> Tables:
    """The tables that a decoder has by the time `item` comes."""
    tables = Tables()
    if isinstance(item, Block):
        for table, number in our.table_ids(item).items():
            tables.define(number, table)
    return tables


def packed(*fields: object) -> bytes:
    return bytes(msgpack.packb(list(fields), use_bin_type=True))


def item_fields(item: Item) -> list[Any]:
    return list(msgpack.unpackb(our.numbered(item)))


def name(value: object) -> str:
    return type(value).__name__


class TestRoundTrips:
    @given(our.items)
    def test_items(self, item: Item) -> None:
        """Every item comes back equal, to the last bit of each value, from the bytes it was encoded to."""
        assert decode_item(our.numbered(item), known(item)) == item

    @given(our.messages)
    def test_messages(self, message: Message) -> None:
        """Every message comes back as it was."""
        back = decode_message(encode_message(message))
        # NaN is unlike itself; its text is not.
        assert repr(back) == repr(message)

    @given(our.items)
    def test_one_item_has_one_encoding(self, item: Item) -> None:
        """Decoding and encoding again gives the same bytes, so that a journal can be compared byte for byte."""
        raw = our.numbered(item)
        assert our.numbered(decode_item(raw, known(item))) == raw

    @pytest.mark.parametrize(
        "bits", [0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000001]
    )
    def test_nan_and_infinity_are_bit_exact(self, bits: int) -> None:
        """The infinities and every NaN, signalling and with payload, keep their bits (COMPLAINTS row 3)."""
        column = struct.pack("<Q", bits)
        block = Block(1, 1, 1, True, 0.0, (Frame("local_loss", column),))
        back = decode_item(encode_item(block), Tables())
        assert isinstance(back, Block)
        assert back.frames[0].column == column

    def test_host_figures_may_be_nan(self) -> None:
        """A host figure that could not be measured is NaN, and travels."""
        back = decode_message(encode_message(Beat(1, 1, 0, {"load": math.nan})))
        assert isinstance(back, Beat)
        assert math.isnan(back.host["load"])

    def test_the_bytes_of_version_1_stay(self) -> None:
        """Golden bytes: journals and other nodes hold what this version writes; new bytes need a new version."""
        assert PROTOCOL_VERSION == 1
        assert encode_message(Ack(7)) == bytes.fromhex("93 01 05 07")
        assert encode_message(Who()) == bytes.fromhex("92 01 07")
        assert encode_item(GAP) == bytes.fromhex("98 04 03 ab") + b"outbox_full" + bytes.fromhex("46 04 01 05 00")
        assert encode_item(Table(1, 0, TABLE)) == b"\x94\x01\x01\x00\x93\xa1a\xa1b\xa1c"


class TestConstructors:
    @pytest.mark.parametrize(
        ("valid", "part", "wrong"),
        [
            *((item, "seq", wrong) for item in ITEMS for wrong in (-1, True, 1.0, None, MAX_STEP + 1)),
            *((ITEMS[0], "table_id", wrong) for wrong in (-1, "0")),
            *((BLOCK, "step", wrong) for wrong in (0, None, True, 2.0)),
            *((BLOCK, "micro_step", wrong) for wrong in (0, -1, True, "1")),
            *((item, "time", wrong) for item in (BLOCK, NOTE, GOODBYE) for wrong in (math.nan, math.inf, "1", None)),
            *((NOTE, "step", wrong) for wrong in (0, -1, "4")),
            *((NOTE, "micro_step", wrong) for wrong in (0, "1")),
            *((NOTE, "kind", wrong) for wrong in ("", None, "\ud800")),
            *((GAP, "cause", wrong) for wrong in ("", 3)),
            *((GAP, "records", wrong) for wrong in (-1, 1.5)),
            *((GAP, end, wrong) for end in ("first", "last") for wrong in ((0, None), (1, 0), (None, None))),
            *((GOODBYE, "produced", wrong) for wrong in (-1, None)),
            *((GOODBYE, "dropped", wrong) for wrong in ({"": 1}, {"x": -1}, {"x": 1.5}, {1: 1}, [1])),
            *((HELLO, "session", wrong) for wrong in (b"", b"s" * 15, "s" * 16)),
            *((HELLO, "run", wrong) for wrong in (None, b"run")),
            *((HELLO, "rank", wrong) for wrong in (-1, 8, "../../x", True)),
            *((HELLO, "world_size", wrong) for wrong in (0, 3, MAX_RANKS + 1, None)),
            *((HELLO, "next_seq", wrong) for wrong in (0, None)),
            *((HELLO, "host", wrong) for wrong in (None, "\udcff")),
            *((HELLO, "pid", wrong) for wrong in (-1, None)),
            *((HELLO, "started", wrong) for wrong in (math.nan, "now")),
            *((HELLO, "total_steps", wrong) for wrong in (0, -1, 1.5)),
            *((HELLO, "about", wrong) for wrong in ({1: "x"}, {"x": 1}, None)),
            *((Welcome("", 0, 1.0), "acked", wrong) for wrong in (-1, None)),
            *((Welcome("", 0, 1.0), "beat_interval", wrong) for wrong in (0, -1.0, math.nan, math.inf, None)),
            (Data(()), "items", ("text",)),
            (Ack(0), "seq", -1),
            *((Beat(0, 0, 0), part, -1) for part in ("step", "micro_step", "held")),
            *((Beat(0, 0, 0), "host", wrong) for wrong in ({"x": "y"}, {"x": True}, 3)),
            *((said, "kind", wrong) for said in (COMMAND, ASK) for wrong in ("", None, 3)),
            *((COMMAND, "facts", {"x": wrong}) for wrong in NO_FACTS),
            *((ASK, "facts", wrong) for wrong in ({1: 1}, 3)),
            *((said, "proof", "text") for said in (COMMAND, ASK)),
            (ASK, "number", -1),
            (Answer(1, True, b""), "content", "text"),
        ],
        ids=lambda value: name(value) if dataclasses.is_dataclass(value) else repr(value)[:30],
    )  # fmt: skip
    def test_impossible_parts_are_refused(self, valid: Any, part: str, wrong: Any) -> None:
        """What the other side would refuse cannot even be built here."""
        with pytest.raises(RecordError):
            dataclasses.replace(valid, **{part: wrong})

    @pytest.mark.parametrize(
        ("valid", "part", "large"),
        [
            (BLOCK, "frames", BLOCK.frames[:1] * 4_097),
            (NOTE, "kind", "k" * 65),
            (GAP, "cause", "c" * 65),
            (GOODBYE, "dropped", {str(i): 1 for i in range(65)}),
            (GOODBYE, "dropped", {"x" * 129: 1}),
            (HELLO, "run", "r" * 65),
            (HELLO, "host", "h" * (MAX_NAME_BYTES + 1)),
            (HELLO, "about", {"x": "y" * (MAX_NAME_BYTES + 1)}),
            (HELLO, "about", {str(i): "" for i in range(65)}),
            (Beat(0, 0, 0), "host", {str(i): 1.0 for i in range(65)}),
            (Data(()), "items", (b"",) * 65_537),
            (COMMAND, "kind", "k" * 65),
            (COMMAND, "facts", {str(i): 1 for i in range(65)}),
            (COMMAND, "facts", {"x": "y" * 16_385}),
            (ASK, "proof", b"p" * 65),
            (Answer(1, True, b""), "content", bytes(8 * 2**20 + 1)),
        ],
        ids=lambda value: name(value),
    )
    def test_what_is_too_large_is_refused(self, valid: Any, part: str, large: Any) -> None:
        """A part above its limit is a LimitError that says how large it is and what is allowed."""
        with pytest.raises(LimitError, match=r"at most \d+ are allowed"):
            dataclasses.replace(valid, **{part: large})

    def test_a_note_at_a_micro_step_needs_its_step(self) -> None:
        """A micro_step alone is no position."""
        with pytest.raises(RecordError, match="needs a step"):
            Note(1, None, 2, "anomaly", "", 0.0)

    def test_a_block_checks_its_frames(self) -> None:
        """A frame of the wrong level cannot get into a block, and so not to the collector."""
        with pytest.raises(RecordError, match="local_loss"):
            Block(1, 4, None, True, 0.0, (Frame.scalar("local_loss", 1.0),))

    @pytest.mark.parametrize("text", ["é" * 20_000, "a" + "é" * 20_000, "x" * 16_385, "\ud800" * 10_000])
    def test_free_text_is_cut_to_what_can_travel(self, text: str) -> None:
        """The text of an exception is not ours to choose: too long or not Unicode, it still arrives, cut and marked."""
        for item in (Note(1, 1, None, "exception", text, 0.0), Goodbye(1, text, 0, {}, 0.0)):
            assert decode_item(encode_item(item), Tables()) == item
        refused = Refused(text, False)
        assert decode_message(encode_message(refused)) == refused
        assert refused.reason.endswith("…")
        assert 16_380 <= len(refused.reason.encode()) <= 16_384

    def test_free_text_that_fits_stays(self) -> None:
        """Text at the limit is not touched."""
        assert Refused("x" * 16_384, False).reason == "x" * 16_384

    def test_items_and_messages_are_frozen(self) -> None:
        """Nothing that travels can be changed after it was checked."""
        for value in (*ITEMS, *MESSAGES):
            field = [f.name for f in dataclasses.fields(value)][:1] or ["anything"]
            with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
                setattr(value, field[0], 1)


class TestLimits:
    def test_an_item_larger_than_allowed_is_not_encoded(self) -> None:
        """The encoder refuses an item above MAX_ITEM_BYTES, before it is queued."""
        table = NameTable(tuple(f"{i:0200d}" for i in range(MAX_NAMES)))
        with pytest.raises(LimitError, match=f"at most {MAX_ITEM_BYTES}"):
            encode_item(Table(1, 0, table))

    def test_the_largest_table_travels(self) -> None:
        """100,000 names of 100 bytes are one item."""
        item = Table(1, 0, NameTable(tuple(f"{i:0100d}" for i in range(MAX_NAMES))))
        assert decode_item(encode_item(item), Tables()) == item

    def test_a_message_larger_than_allowed_is_not_encoded(self) -> None:
        """The encoder refuses a message that the decoder would refuse."""
        with pytest.raises(LimitError, match=f"at most {MAX_MESSAGE_BYTES}"):
            encode_message(Data((bytes(MAX_ITEM_BYTES), bytes(2**16))))

    def test_a_message_with_the_largest_item_travels(self) -> None:
        """A single item of MAX_ITEM_BYTES fits into a message."""
        message = Data((bytes(MAX_ITEM_BYTES),))
        assert decode_message(encode_message(message)) == message

    def test_too_many_bytes_are_refused_unread(self) -> None:
        """What is larger than any item or message is refused by its size alone."""
        with pytest.raises(LimitError, match="at most"):
            decode_item(b"\x91" * (MAX_ITEM_BYTES + 1), Tables())
        with pytest.raises(LimitError, match="at most"):
            decode_message(b"\x91" * (MAX_MESSAGE_BYTES + 1))

    @pytest.mark.parametrize(
        "raw",
        [
            packed(1, 1, 0, ["n"] * (MAX_NAMES + 1)),
            packed(1, 1, 0, ["n" * (MAX_NAME_BYTES + 1)]),
            packed(2, 1, 1, 1, 1, 0.0, [["loss", None, bytes(8), None, None, None]] * 4_097),
            packed(3, 1, 1, 1, "k" * 65, "", 0.0),
            packed(3, 1, 1, 1, "k", LONG, 0.0),
            packed(4, 1, "c" * 65, 1, 1, 0, 1, 0),
            packed(5, 1, LONG, 1, {}, 0.0),
            packed(5, 1, "", 1, {str(i): 1 for i in range(65)}, 0.0),
            packed(*range(65)),
        ],
    )
    def test_parts_of_an_item_above_their_limit_are_refused(self, raw: bytes) -> None:
        """Names, frames, words, texts and maps are limited each; the error is a LimitError."""
        with pytest.raises(LimitError):
            decode_item(raw, Tables())

    def test_the_number_of_tables_is_limited(self) -> None:
        """One process cannot define tables without end; a resent definition does not count."""
        tables = Tables()
        for number in range(MAX_TABLES):
            tables.define(number, TABLE)
        tables.define(0, TABLE)
        with pytest.raises(LimitError, match=f"more than {MAX_TABLES}"):
            tables.define(MAX_TABLES, TABLE)


class TestTables:
    def test_a_second_definition_must_be_the_same(self) -> None:
        """An id cannot change its meaning within one process."""
        tables = Tables()
        tables.define(0, TABLE)
        with pytest.raises(ProtocolError, match="defined twice, differently"):
            tables.define(0, NameTable(("x",)))

    def test_equal_tables_are_one_object(self) -> None:
        """Tables of several processes that share `interned` are kept once."""
        shared = Interned()
        one, two = Tables(shared), Tables(shared)
        one.define(0, NameTable(("a", "b")))
        two.define(5, NameTable(("a", "b")))
        assert one.get(0) is two.get(5)
        assert two.items() == [(5, NameTable(("a", "b")))]

    @pytest.mark.parametrize("table_id", [1, True, 0.0, "0", None, b"", -1])
    def test_an_unknown_id_is_refused(self, table_id: object) -> None:
        """A frame cannot refer to a table that was not defined, nor to id 0 by what only equals 0."""
        tables = Tables()
        tables.define(0, TABLE)
        with pytest.raises(ProtocolError, match="never defined"):
            tables.get(table_id)

    def test_encoding_needs_the_tables_id(self) -> None:
        """A block whose table was not announced is the caller's mistake: a KeyError."""
        with pytest.raises(KeyError):
            encode_item(BLOCK)


class TestVersions:
    @pytest.mark.parametrize("version", [0, 2, 65_535])
    def test_another_version_is_told_with_both_numbers(self, version: int) -> None:
        """The error names the peer's version and ours, and says what to do."""
        with pytest.raises(VersionError, match=f"version {version} .* version {PROTOCOL_VERSION}; install the same"):
            decode_message(packed(version, 99, "whatever", {"that": "says"}))

    @pytest.mark.parametrize("version", [None, "1", True, 1.0, b"\x01"])
    def test_what_is_no_version_is_no_message(self, version: object) -> None:
        """A first field that is no integer is not taken for version 1."""
        with pytest.raises(ProtocolError, match="not a message of this protocol"):
            decode_message(packed(version, 7))


class TestHostileBytes:
    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_a_pickle_is_refused(self, protocol: int) -> None:
        """A pickle is not a message and not an item, whatever its protocol; it is not run (COMPLAINTS row 26)."""
        for value in (ValueError("run me"), {"rank": 0}, [1, 4, [b"x"]], 1, None):
            raw = pickle.dumps(value, protocol)
            with pytest.raises(ProtocolError):
                decode_message(raw)
            with pytest.raises(ProtocolError):
                decode_item(raw, Tables())

    @given(st.binary(max_size=200))
    def test_any_bytes(self, raw: bytes) -> None:
        """Bytes raise ProtocolError or are what our encoder writes; nothing else happens."""
        refused_or_ours(raw)

    @given(st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=13) | st.dictionaries(st.text(), inner, max_size=3),
    ).flatmap(lambda rest: st.sampled_from([[1], [1, 1], [1, 4], [1, 6], [2], [3], [4], [5], []]).map(
        lambda start: packed(*start, *(rest if isinstance(rest, list) else [rest]))
    )))  # fmt: skip
    def test_any_msgpack(self, raw: bytes) -> None:
        """Well-formed msgpack of any content is refused as politely, also where it begins like ours."""
        refused_or_ours(raw)

    @given(our.items.map(our.numbered) | our.messages.map(encode_message), st.data())
    def test_mutated_bytes(self, raw: bytes, data: st.DataObject) -> None:
        """Valid bytes with some cut, doubled or changed never raise anything but ProtocolError."""
        at = data.draw(st.integers(0, len(raw)))
        end = data.draw(st.integers(at, min(len(raw), at + 4)))
        refused_or_ours(raw[:at] + data.draw(st.binary(max_size=4)) + raw[end:])

    @given(our.items)
    def test_every_cut_is_refused(self, item: Item) -> None:
        """No prefix of an item is an item, and nothing may follow one."""
        raw = our.numbered(item)
        tables = known(item)
        for end in {0, 1, 2, len(raw) // 2, len(raw) - 1}:
            with pytest.raises(ProtocolError):
                decode_item(raw[:end], tables)
        with pytest.raises(ProtocolError, match=r"bytes? too many"):
            decode_item(raw + b"\0", tables)

    @pytest.mark.parametrize("item", ITEMS, ids=name)
    @pytest.mark.parametrize("wrong", [None, True, -1, 1.5, "x", b"x", [], {}, [[]], 2**63, "\0" * 100])
    def test_each_field_of_each_item_is_checked(self, item: Item, wrong: object) -> None:
        """A wrong type or value in any one field is ProtocolError, or is a value that this field may have."""
        fields = item_fields(item)
        for position in range(len(fields)):
            changed = [*fields[:position], wrong, *fields[position + 1 :]]
            refused_or_ours(packed(*changed), known(item))

    @pytest.mark.parametrize("message", MESSAGES, ids=name)
    @pytest.mark.parametrize("wrong", [None, True, -1, 1.5, "x", b"x", [], {}, [[]], 2**63, "\0" * 100])
    def test_each_field_of_each_message_is_checked(self, message: Message, wrong: object) -> None:
        """A wrong type or value in any one field is ProtocolError, or is a value that this field may have."""
        fields = msgpack.unpackb(encode_message(message))
        for position in range(len(fields)):
            refused_or_ours(packed(*fields[:position], wrong, *fields[position + 1 :]))

    @pytest.mark.parametrize("kind", [True, 1.0, 0, 99, -1, None, "1", [], {}])
    def test_an_unknown_kind_is_refused(self, kind: object) -> None:
        """Only the kinds there are; True and 1.0 are not kind 1."""
        with pytest.raises(ProtocolError, match="unknown kind of item"):
            decode_item(packed(kind, 1, 0, ["a"]), Tables())
        with pytest.raises(ProtocolError, match="unknown type of message"):
            decode_message(packed(PROTOCOL_VERSION, kind, 1))

    @pytest.mark.parametrize("item", ITEMS, ids=name)
    def test_an_item_without_a_number_is_refused(self, item: Item) -> None:
        """Number 0 means "not numbered yet"; such an item must not travel."""
        with pytest.raises(ProtocolError, match="without a number"):
            decode_item(our.numbered(dataclasses.replace(item, seq=0)), known(item))

    def test_a_name_given_twice_is_refused(self) -> None:
        """A map in which a name stands twice is not what the encoder writes."""
        with pytest.raises(ProtocolError, match="expected a new name, got 'x'"):
            decode_message(b"\x96\x01\x06\x00\x00\x00\x82\xa1x\xcb" + bytes(8) + b"\xa1x\xcb" + bytes(8))

    @pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\x81", b"\xdd\x00\x00\x00\x01", b"\x93\x01\x04"])
    @pytest.mark.parametrize("depth", [100, 1_000, 100_000])
    def test_deep_nesting_is_refused(self, opening: bytes, depth: int) -> None:
        """Arrays in arrays and maps in maps, however deep, are refused without exhausting the stack."""
        refused(opening * depth + b"\x90")
        for start in (b"\x97\x02\x01\x01\x01\x01\x00", b"\x93\x01\x04", b"\x94\x01\x01\x00"):
            refused(start + opening * depth + b"\x90")

    @pytest.mark.parametrize(
        "claim",
        [
            b"\xdd\xff\xff\xff\xff",  # array of 4 billion
            b"\xdd\x00\x01\x86\xa0",  # array of 100,000, as large as a table of names may be
            b"\xdc\xff\xff",  # array of 65,535
            b"\xdf\xff\xff\xff\xff",  # map of 4 billion
            b"\xdb\xff\xff\xff\xff",  # text of 4 GB
            b"\xc6\xff\xff\xff\xff",  # binary of 4 GB
            b"\xc9\xff\xff\xff\xff\x01",  # extension of 4 GB
        ],
    )
    def test_huge_declared_lengths_allocate_nothing(self, claim: bytes) -> None:
        """A length that the bytes do not hold is refused before memory is taken for it, nested claims too."""
        starts = (
            b"",
            b"\x94\x01\x01\x00",
            b"\x97\x02\x01\x01\x01\x01\x00",
            b"\x93\x01\x04",
            b"\x96\x01\x06\x01\x01\x01",
        )
        tracemalloc.start()
        try:
            for start in starts:
                refused(start + claim)
                refused(start + claim * 1_000)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 2**20

    def test_many_empty_containers_allocate_nothing(self) -> None:
        """A byte for an empty list costs 56 in memory; 1 MB of them must not become 56."""
        raw = b"\x97\x02\x01\x01\x01\x01\x00" + b"\xdc\xff\xff".join([b"\x90" * 65_535] * 16)
        tracemalloc.start()
        try:
            refused(raw)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 3 * len(raw)

    @pytest.mark.parametrize("wrong", [LONG, LONG.encode(), 2**64 - 1])
    def test_errors_stay_short(self, wrong: object) -> None:
        """An error's text does not carry a peer's megabyte into the log."""
        for raw in (packed(wrong, 1, 2), packed(1, wrong, 2), packed(2, 1, 1, wrong, 1, 0.0, []), packed(3, 1, wrong)):
            with pytest.raises(ProtocolError) as caught:
                decode_item(raw, Tables())
            assert len(str(caught.value)) < 500
            with pytest.raises(ProtocolError) as caught:
                decode_message(raw)
            assert len(str(caught.value)) < 500


def refused(raw: bytes) -> None:
    """Neither an item nor a message, and said so by ProtocolError."""
    with pytest.raises(ProtocolError):
        decode_item(raw, Tables())
    with pytest.raises(ProtocolError):
        decode_message(raw)


def refused_or_ours(raw: bytes, tables: Tables | None = None) -> None:
    """Bytes either raise ProtocolError, or decode to what encodes and decodes again to the same."""
    tables = Tables() if tables is None else tables
    try:
        item = decode_item(raw, tables)
    except ProtocolError:
        pass
    else:
        ids = {table: number for number, table in tables.items()}
        assert decode_item(encode_item(item, ids), tables) == item
    try:
        message = decode_message(raw)
    except ProtocolError:
        pass
    else:
        assert repr(decode_message(encode_message(message))) == repr(message)
