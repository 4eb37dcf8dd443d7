"""collector/settings.py: reading sections, errors a person can act on, strict YAML."""

# ruff: noqa: RUF009 - `setting` declares a dataclass field, as dataclasses.field does

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankd.collector.protocol.errors import ConfigError
from rankd.collector.settings import (
    MIB,
    Kind,
    Settings,
    SettingsError,
    SettingsTypeError,
    any_integer,
    byte_size,
    choice,
    file_path,
    flag,
    integer,
    list_of,
    load_yaml,
    nearest,
    number,
    optional,
    seconds,
    setting,
    subsection,
)


@dataclass(frozen=True, slots=True)
class Inner(Settings):
    dotted: ClassVar[str] = "outer.inner"

    depth: int = setting(integer(1), 1)


@dataclass(frozen=True, slots=True)
class Outer(Settings):
    dotted: ClassVar[str] = "outer"
    foreign: ClassVar[frozenset[str]] = frozenset({"theirs"})

    local_norm: bool = setting(flag(), False)
    interval: float = setting(seconds(), 1.0)
    ranks: tuple[int, ...] | None = setting(optional(list_of(integer(0))), None)
    inner: Inner = setting(subsection(Inner), Inner())


def lines_of(mapping: object) -> list[str]:
    """The error's lines when this is read as the section `outer`."""
    with pytest.raises(ConfigError) as caught:
        Outer.from_mapping(mapping)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("empty", [None, {}])
def test_an_empty_section_is_all_defaults(empty: object) -> None:
    """A section that is missing, or has no keys, is all defaults."""
    assert Outer.from_mapping(empty) == Outer()


def test_a_section_is_read() -> None:
    """Known keys are read, nested sections too, and a list becomes a tuple."""
    read = Outer.from_mapping({"local_norm": True, "interval": 2, "ranks": [0, 3], "inner": {"depth": 4}})
    assert read == Outer(local_norm=True, interval=2.0, ranks=(0, 3), inner=Inner(depth=4))


def test_an_unknown_key_names_the_nearest() -> None:
    """A misspelt key is named with its dotted path and the key that was probably meant."""
    assert lines_of({"local_nrom": True}) == [
        "outer.local_nrom: unknown key; did you mean `local_norm`? allowed: local_norm, interval, ranks, inner"
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("Local_Norm", "`local_norm`"),
        ("local-norm", "`local_norm`"),
        ("depth", "`inner.depth`"),
        ("dept", "`inner.depth`"),
        ("thiers", "`theirs`"),
    ],
)
def test_suggestions_look_past_case_dashes_and_one_level(key: str, meant: str) -> None:
    """Case, dashes and a forgotten level do not keep the suggestion away."""
    assert f"did you mean {meant}?" in lines_of({key: 1})[0]


def test_an_unlike_key_gets_no_suggestion() -> None:
    """A key that is like none of ours is only listed against what is allowed."""
    assert lines_of({"zzz": 1}) == ["outer.zzz: unknown key; allowed: local_norm, interval, ranks, inner"]


def test_a_boolean_key_is_explained() -> None:
    """`on:` as a key is a boolean in YAML 1.1, and the error says so."""
    assert lines_of({True: 1})[0].startswith("outer.True: unknown key; YAML reads yes, on, no and off as booleans")


def test_a_key_cannot_break_the_line() -> None:
    """Each misfit stays on a line of its own, whatever the key holds."""
    assert len(lines_of({"a\nb": 1, "x" * 10_000: 2})) == 2


def test_foreign_keys_are_accepted() -> None:
    """A key that belongs to the training framework is neither read nor refused."""
    assert Outer.from_mapping({"theirs": object()}) == Outer()


def test_all_errors_are_raised_at_once() -> None:
    """Every wrong key, type and value is listed, a line each, in one error."""
    found = lines_of({"typo": 1, "local_norm": 1, "interval": 0, "ranks": [0, -1, "x"], "inner": {"depth": 0}})
    assert [line.split(":")[0] for line in found] == [
        "outer.typo",
        "outer.local_norm",
        "outer.interval",
        "outer.ranks[1]",
        "outer.ranks[2]",
        "outer.inner.depth",
    ]


def test_a_section_that_is_none_is_refused() -> None:
    """A scalar where a section belongs names the keys that belong there."""
    assert lines_of({"inner": 5}) == ["outer.inner: found 5 (int), allowed: a section with the keys depth"]


def test_built_in_code_is_checked_too() -> None:
    """A section built in code passes the same checks as one that is read."""
    with pytest.raises(SettingsError, match=r"^interval: found -1, allowed: a number of seconds"):
        Outer(interval=-1)


def test_a_wrong_type_is_a_type_error_too() -> None:
    """A wrong type among the misfits makes a TypeError of it, as MindFormers raises; a wrong value does not."""
    with pytest.raises(TypeError):
        Outer.from_mapping({"local_norm": "x", "interval": -1})
    with pytest.raises(ValueError) as caught:
        Outer.from_mapping({"interval": -1})
    assert not isinstance(caught.value, TypeError)


def test_the_error_survives_pickling() -> None:
    """The error crosses processes (a launcher that re-raises) with its text."""
    with pytest.raises(SettingsTypeError) as caught:
        Outer.from_mapping({"local_norm": "x"})
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        (flag(), True, True),
        (integer(1), 1, 1),
        (integer(0, 5), 5, 5),
        (any_integer(), -7, -7),
        (seconds(), 2, 2.0),
        (seconds(zero=True), -0.0, 0.0),
        (number(), -1, -1.0),
        (number(above=1), 1.5, 1.5),
        (choice("a", "b"), "b", "b"),
        (file_path(), "a/b", Path("a/b")),
        (byte_size(1), 4096, 4096),
        (byte_size(1), "4096", 4096),
        (byte_size(1), "256MiB", 256 * MIB),
        (byte_size(1), "1 gib", 2**30),
        (byte_size(1), "5kB", 5_000),
        (optional(integer(1)), None, None),
        (list_of(flag()), [True], (True,)),
    ],
)
def test_kinds_accept(kind: Kind[Any], value: object, read: object) -> None:
    """Each kind reads what it allows, and what it has read already."""
    assert kind.read(value) == read
    assert kind.read(kind.read(value)) == read
    assert kind.read(kind.write(kind.read(value))) == read


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (flag(), 1, "found 1 (int), allowed: true or false"),
        (flag(), None, "found None (NoneType), allowed: true or false"),
        (flag(), "yes", "found 'yes' (str), allowed: true or false; leave out the quotes"),
        (integer(1), True, "YAML reads yes, on and true (no, off and false) as booleans: write a number"),
        (integer(1), 1.0, "found 1.0 (float), allowed: a positive integer"),
        (integer(1), 0, "found 0, allowed: a positive integer"),
        (integer(1), "10", "found '10' (str), allowed: a positive integer; leave out the quotes"),
        (integer(0, 5), 6, "found 6, allowed: an integer from 0 to 5"),
        (integer(2), 1, "allowed: an integer of at least 2"),
        pytest.param(integer(1), -(16**5000), "found a very large int", id="huge"),
        (any_integer(), True, "allowed: an integer"),
        (number(), True, "found True (bool), allowed: a number; YAML reads yes"),
        (number(), float("inf"), "found inf, allowed: a number"),
        pytest.param(number(), 16**5000, "found a very large int, allowed: a number", id="beyond float"),
        (number(above=1), 1, "found 1, allowed: a number above 1"),
        (seconds(), "1e-3", "YAML takes this as text: write 1.0e-3, without quotes"),
        (seconds(), "2.5e3", "write 2.5e+3, without quotes"),
        (seconds(), "1e5", "write 1.0e+5"),
        (seconds(), False, "as booleans: write a number"),
        (seconds(), 0, "found 0, allowed: a number of seconds, above zero"),
        (seconds(zero=True), -1, "zero or more"),
        (seconds(), float("nan"), "found nan"),
        (seconds(), float("inf"), "found inf"),
        (seconds(), 10**400, "allowed: a number of seconds"),
        (choice("process", "disk"), "Disk", "found 'Disk', allowed: process | disk; did you mean `disk`?"),
        (choice("a"), True, "found True (bool), allowed: a"),
        (file_path(), "", "allowed: a path"),
        (file_path(), "a\0b", "allowed: a path"),
        (file_path(), 3, "found 3 (int), allowed: a path"),
        (file_path(), "~/x", "~ is not expanded"),
        (byte_size(4096), 4095, "a size from 4096 bytes"),
        (byte_size(1), 2**41, "1 TiB"),
        (byte_size(1), True, "found True (bool)"),
        (byte_size(1), 1.5, "found 1.5 (float)"),
        (byte_size(1), "256M", "units: B, KiB, MiB"),
        (byte_size(1), "9" * 5000, "a size from"),
        (list_of(flag()), "ab", "found 'ab' (str), allowed: a list"),
    ],
)
def test_kinds_refuse(kind: Kind[Any], value: object, text: str) -> None:
    """Each kind refuses the rest, and says what was found, what is allowed and what YAML made of it."""
    with pytest.raises(SettingsError) as caught:
        kind.read(value)
    assert text in str(caught.value)


@given(st.text(max_size=200))
def test_nearest_takes_any_text(word: str) -> None:
    """Any text has a nearest key or none."""
    assert nearest(word, ("monitor", "rankd")) in (None, "monitor", "rankd")


# --- YAML -------------------------------------------------------------------------------------------------------------


Write = Callable[[str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a YAML file and gives its path."""

    def to_file(content: str | bytes) -> Path:
        file = tmp_path / "train.yaml"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return to_file


@pytest.mark.parametrize(
    ("text", "loaded"),
    [
        ("", {}),
        ("# nothing\n", {}),
        ("a: 1\nb: {c: [1, 2]}\n", {"a": 1, "b": {"c": [1, 2]}}),
        ("\ufeffname: 层\n", {"name": "层"}),
        ("x: {k: &b {v: 1}}\ny: {<<: *b, v: 2}\n", {"x": {"k": {"v": 1}}, "y": {"v": 2}}),
        (
            "p: &p {speed: 1}\na: {b: &b {<<: *p, speed: 2}}\nc: {<<: *b}\n",
            {"p": {"speed": 1}, "a": {"b": {"speed": 2}}, "c": {"speed": 2}},
        ),
    ],
    ids=["empty", "comment", "sections", "byte order mark", "merge", "merge of a merge"],
)
def test_yaml_is_loaded(write: Write, text: str, loaded: object) -> None:
    """Sections, anchors, merges and a byte order mark load as in any YAML; a merged key may be overridden."""
    assert load_yaml(write(text)) == loaded


@pytest.mark.parametrize(
    ("content", "line", "text"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "the key 'a' stands twice, first in line 1; remove one"),
        ('a: 1\n"a": 3\n', 2, "stands twice"),
        ("s: {k: 1, k: 1}\n", 1, "the key 'k' stands twice, first in line 1"),
        ("a: 1\n  b: 2\n", 2, "mapping values are not allowed here"),
        ("a: [1, 2\nb: 3\n", 2, "expected ',' or ']'"),
        ("a: !!python/object:os.system x\n", 1, "could not determine a constructor"),
        ("a: 1\nd: 2024-13-45\n", 2, "a value that cannot be read"),
        ("a: !!bool maybe\n", 1, "a value that cannot be read"),
        ("? [a]\n: 1\n", 1, "unhashable key"),
        ("a: 1\n---\nb: 2\n", 2, "but found another document"),
        ("a: *nowhere\n", 1, "undefined alias"),
        ("a: 1\nb: \x07\n", 2, "special characters are not allowed"),
        (b"a: 1\nb: \xff\xfe\n", 2, "not UTF-8 text"),
    ],
)
def test_bad_yaml_names_file_and_line(write: Write, content: str | bytes, line: int, text: str) -> None:
    """What is no YAML, or has a key twice, is an error with the file and the line."""
    file = write(content)
    with pytest.raises(ConfigError) as caught:
        load_yaml(file)
    assert str(caught.value).startswith(f"{file}, line {line}: ")
    assert text in str(caught.value)


@pytest.mark.parametrize("text", ["- a\n", "7\n", "just words\n"])
def test_yaml_must_hold_sections(write: Write, text: str) -> None:
    """A list or a scalar at the top is no configuration."""
    with pytest.raises(ConfigError, match="allowed: sections"):
        load_yaml(write(text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A file that is not there, or is a directory, is named with the reason."""
    with pytest.raises(ConfigError, match=r"nothing\.yaml: cannot be read: No such file"):
        load_yaml(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_yaml(tmp_path)


def test_deep_nesting_is_refused(write: Write) -> None:
    """Nesting beyond Python's stack is an error of the file, not a crash."""
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_yaml(write("a: " + "[" * 100_000))


_FRAGMENTS = st.sampled_from(
    [
        *(
            "a",
            "b: ",
            "- ",
            "? ",
            ": ",
            "\n",
            "\n  ",
            "{",
            "}",
            "[",
            "]",
            ", ",
            "&x ",
            "*x",
            "<<: ",
            "| ",
            '"',
            "'",
            "#",
        ),
        *("!!int ", "!!float ", "!!bool ", "!!timestamp ", "!!binary ", "!!set ", "!!omap ", "!!pairs ", "!!null "),
        *("1e-3", "0x", "0b2", "1:99", "_", "2024-99-99", ".inf", "9" * 5000, "---\n", "...\n", "%YAML 9.9\n", "\t"),
    ]
)


@given(st.lists(_FRAGMENTS, max_size=25).map("".join))
def test_any_yaml_is_loaded_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """However the pieces of YAML are put together, the file is loaded or it is a ConfigError that names it."""
    file = tmp_path_factory.getbasetemp() / "pieces.yaml"
    file.write_text(text)
    try:
        loaded = load_yaml(file)
    except ConfigError as error:
        message = str(error)
    else:
        message = str(file)
        assert isinstance(loaded, dict)
    assert message.startswith(str(file))
