"""Reads a section of a YAML into a frozen dataclass, and says exactly what is wrong with it.

A section is a subclass of `Settings` whose fields are declared with the kind of value they take::

    @dataclass(frozen=True, slots=True)
    class JournalConfig(Settings):
        dotted: ClassVar[str] = "rankd.journal"
        segment_size: int = setting(byte_size(low=4096), 64 * MIB)

An instance is checked when it is built, whether from a YAML or in code, so there is one way in and nothing half-read.
All that is wrong is gathered and raised as one `SettingsError`, a line for each. There is no pydantic here, because
this is read inside somebody's training process, whose versions of everything are their own.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import yaml

from .protocol.errors import ConfigError

__all__ = [
    "KIB",
    "MIB",
    "Kind",
    "Misfit",
    "Settings",
    "SettingsError",
    "SettingsTypeError",
    "any_integer",
    "attempt",
    "byte_size",
    "choice",
    "error_of",
    "file_path",
    "flag",
    "integer",
    "list_of",
    "load_yaml",
    "misfit",
    "misspelt_sections",
    "nearest",
    "number",
    "optional",
    "seconds",
    "setting",
    "subsection",
]

T = TypeVar("T")
S = TypeVar("S", bound="Settings")

KIB = 2**10
MIB = 2**20
# Poll timeouts are milliseconds in a C int, so that nothing can be waited for longer than 24.8 days.
MAX_SECONDS = 2_147_483.0
# Larger than any file that one process of ours writes; above it a unit is probably wrong.
MAX_SIZE = 2**40
# Below this likeness a suggestion confuses more than it helps.
_LIKENESS = 0.7
# Of sections at the top: `moniter` must be found, and `train_dataset` must not be taken for `train_state`.
_SECTION_LIKENESS = 0.8
_MAX_KEY_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Misfit:
    """One thing that is wrong: the dotted path, what was found and what is allowed, and whether the type is wrong."""

    where: str
    text: str
    wrong_type: bool = False

    def under(self, prefix: str) -> Misfit:
        """The same, seen from one section further out."""
        dot = "." if prefix and self.where and not self.where.startswith("[") else ""
        return dataclasses.replace(self, where=f"{prefix}{dot}{self.where}")


class SettingsError(ConfigError):
    """All that is wrong with a configuration; its text has a line for each misfit."""

    def __init__(self, misfits: Iterable[Misfit], source: str | None = None) -> None:
        self.misfits = tuple(misfits)
        self.source = source
        super().__init__(self.misfits, source)

    def __str__(self) -> str:
        prefix = "" if self.source is None else f"{self.source}: "
        return "\n".join(f"{prefix}{m.where}: {m.text}" for m in self.misfits)

    def under(self, prefix: str) -> SettingsError:
        """The same error, seen from one section further out."""
        return error_of([m.under(prefix) for m in self.misfits], self.source)


class SettingsTypeError(SettingsError, TypeError):
    """A value of a wrong type is among what is wrong: MindFormers raises TypeError there, so this is one too."""


def error_of(misfits: Iterable[Misfit], source: str | None = None) -> SettingsError:
    """The error that says all this."""
    found = tuple(misfits)
    return (SettingsTypeError if any(m.wrong_type for m in found) else SettingsError)(found, source)


def misfit(value: object, allowed: str, hint: str = "", *, wrong_type: bool = False) -> SettingsError:
    """The error about one value; whoever knows the dotted path adds it with `under`."""
    kind = f" ({type(value).__name__})" if wrong_type else ""
    tail = f"; {hint}" if hint else ""
    return error_of([Misfit("", f"found {_shown(value)}{kind}, allowed: {allowed}{tail}", wrong_type)])


def attempt(misfits: list[Misfit], where: str, read: Callable[[object], T], value: object) -> T | None:
    """`read(value)`; or None, and what is wrong is added to `misfits`."""
    try:
        return read(value)
    except SettingsError as error:
        misfits.extend(m.under(where) for m in error.misfits)
        return None


def _shown(value: object) -> str:
    """The value as an error shows it: short, on one line, however large or deep it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return f"a very large {type(value).__name__}"


# --- kinds of value ---------------------------------------------------------------------------------------------------


def _same(value: Any) -> object:
    return value


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """What a key takes.

    Attributes:
        allowed: says so, in the words of an error.
        read: the value from what YAML gave, or from itself; raises SettingsError.
        write: back to what JSON and YAML hold; `read` of that gives the value again.
        nested: the section that stands here, if one does.
    """

    allowed: str
    read: Callable[[object], T]
    write: Callable[[T], object] = _same
    nested: type[Settings] | None = None


def flag() -> Kind[bool]:
    """true or false, and nothing that merely counts as such."""
    allowed = "true or false"

    def read(value: object) -> bool:
        if isinstance(value, bool):
            return value
        words = isinstance(value, str) and value.strip().lower() in ("true", "false", "yes", "no", "on", "off")
        raise misfit(value, allowed, "leave out the quotes" if words else "", wrong_type=True)

    return Kind(allowed, read)


def _number_hint(value: object) -> str:
    """Why YAML 1.1 did not see a number where a person wrote one (or the other way round)."""
    if isinstance(value, bool):
        return "YAML reads yes, on and true (no, off and false) as booleans: write a number"
    if not isinstance(value, str):
        return ""
    text = value.strip()
    if not re.fullmatch(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?", text, re.ASCII):
        return ""
    mantissa, exponent, power = text.lower().partition("e")
    if not exponent:
        return "leave out the quotes"
    dotted = mantissa if "." in mantissa else f"{mantissa}.0"
    signed = power if power[0] in "+-" else f"+{power}"
    return f"YAML takes this as text: write {dotted}e{signed}, without quotes"


def integer(low: int, high: int | None = None) -> Kind[int]:
    """An integer from `low` to `high` (None: no bound)."""
    if high is not None:
        allowed = f"an integer from {low} to {high}"
    else:
        allowed = {0: "zero or a positive integer", 1: "a positive integer"}.get(low, f"an integer of at least {low}")

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise misfit(value, allowed, _number_hint(value), wrong_type=True)
        if value < low or (high is not None and value > high):
            raise misfit(value, allowed)
        return value

    return Kind(allowed, read)


def any_integer() -> Kind[int]:
    """Any integer at all; a bool is none."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise misfit(value, "an integer", _number_hint(value), wrong_type=True)
        return value

    return Kind("an integer", read)


def seconds(*, zero: bool = False) -> Kind[float]:
    """A length of time in seconds, above zero unless `zero` allows that too."""
    allowed = f"a number of seconds, {'zero or more' if zero else 'above zero'} and at most {MAX_SECONDS:.0f}"

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise misfit(value, allowed, _number_hint(value), wrong_type=True)
        # The comparison also refuses nan, which compares with nothing.
        if not 0 <= value <= MAX_SECONDS or (value == 0 and not zero):
            raise misfit(value, allowed)
        return math.fabs(value)  # -0.0 is zero

    return Kind(allowed, read)


def number(*, above: float | None = None) -> Kind[float]:
    """A finite number, larger than `above` where that is given."""
    allowed = "a number" if above is None else f"a number above {above:g}"

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise misfit(value, allowed, _number_hint(value), wrong_type=True)
        try:
            found = float(value)
        except OverflowError:
            raise misfit(value, allowed) from None
        if not math.isfinite(found) or (above is not None and found <= above):
            raise misfit(value, allowed)
        return found

    return Kind(allowed, read)


def choice(*words: str) -> Kind[str]:
    """One of these words."""
    allowed = " | ".join(words)

    def read(value: object) -> str:
        if not isinstance(value, str):
            raise misfit(value, allowed, wrong_type=True)
        if value not in words:
            near = nearest(value, words)
            raise misfit(value, allowed, f"did you mean `{near}`?" if near else "")
        return value

    return Kind(allowed, read)


def file_path() -> Kind[Path]:
    """The path of a file or directory; a relative one counts from where training was started."""
    allowed = "a path"

    def read(value: object) -> Path:
        if not isinstance(value, (str, Path)):
            raise misfit(value, allowed, wrong_type=True)
        text = str(value)
        if not text or "\0" in text:
            raise misfit(value, allowed)
        if text.startswith("~"):
            # Expanded here it could differ from what the collector, or another node, makes of it.
            raise misfit(value, allowed, "~ is not expanded: write the home directory out")
        return Path(text)

    return Kind(allowed, read, str)


_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def byte_size(low: int) -> Kind[int]:
    """A number of bytes of at least `low`: an integer, or text with a unit (256MiB is 2**28, 256MB is 256e6)."""
    allowed = f'a size from {low} bytes to 1 TiB: a number of bytes, or text such as "256MiB"'

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise misfit(value, allowed, _number_hint(value), wrong_type=True)
        count = value if isinstance(value, int) else _bytes_of(value, allowed)
        if not low <= count <= MAX_SIZE:
            raise misfit(value, allowed)
        return count

    return Kind(allowed, read)


def _bytes_of(text: str, allowed: str) -> int:
    # No size that is allowed has more digits; Python refuses to convert thousands of them.
    match = re.fullmatch(r"\s*(\d{1,15})\s*([A-Za-z]*)\s*", text, re.ASCII)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise misfit(text, allowed, "units: B, KiB, MiB, GiB, TiB, KB, MB, GB, TB")
    return int(match[1]) * unit


def optional(kind: Kind[T]) -> Kind[T | None]:
    """That, or null."""

    allowed = f"null, or {kind.allowed}"

    def read(value: object) -> T | None:
        return None if value is None else kind.read(value)

    def write(value: T | None) -> object:
        return None if value is None else kind.write(value)

    return Kind(allowed, read, write, kind.nested)


def list_of(kind: Kind[T]) -> Kind[tuple[T, ...]]:
    """A list of those; kept as a tuple."""
    allowed = f"a list, each of it {kind.allowed}"

    def read(value: object) -> tuple[T, ...]:
        if not isinstance(value, (list, tuple)):
            raise misfit(value, allowed, wrong_type=True)
        misfits: list[Misfit] = []
        items = [attempt(misfits, f"[{index}]", kind.read, item) for index, item in enumerate(value)]
        if misfits:
            raise error_of(misfits)
        return tuple(cast("list[T]", items))

    return Kind(allowed, read, lambda items: [kind.write(item) for item in items])


def subsection(cls: type[S]) -> Kind[S]:
    """A section of its own below this key; an empty one is all defaults."""
    return Kind("a section of keys", lambda value: _read_section(cls, value), lambda part: part.to_mapping(), cls)


def setting(kind: Kind[T], default: T) -> T:
    """Declares a field of a `Settings`: what it takes, and its default."""
    # The dataclass machinery replaces the field by its default; to a type checker it is the value all along.
    return dataclasses.field(default=default, metadata={"kind": kind})


# --- sections ---------------------------------------------------------------------------------------------------------


class Settings:
    """Base of the frozen dataclasses that hold a section; see the module's text.

    Attributes:
        dotted: where the section usually stands in the YAML, dotted.
        foreign: keys of this section that belong to the training framework: accepted, not read.
    """

    __slots__ = ()
    dotted: ClassVar[str] = ""
    foreign: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        misfits: list[Misfit] = []
        for name, kind in _kinds(type(self)).items():
            value = attempt(misfits, name, kind.read, getattr(self, name))
            object.__setattr__(self, name, value)
        if misfits:
            raise error_of(misfits)
        conflicts = tuple(self.conflicts())
        if conflicts:
            raise error_of(conflicts)

    def conflicts(self) -> Iterator[Misfit]:
        """What is wrong between keys that are each right; asked only when they are."""
        return iter(())

    @classmethod
    def from_mapping(cls: type[S], mapping: object, path: str | None = None) -> S:  # noqa: PYI019 - Self is Python 3.11
        """The section that YAML or JSON gave; None is an empty one.

        Args:
            mapping: the section.
            path: where it stands, for the errors; `cls.dotted` if not given.

        Raises:
            SettingsError: all that is wrong, a line each.
        """
        try:
            return _read_section(cls, mapping)
        except SettingsError as error:
            raise error.under(cls.dotted if path is None else path) from None

    def to_mapping(self) -> dict[str, object]:
        """The section as JSON and YAML hold it; `from_mapping` of that equals this."""
        return {name: kind.write(getattr(self, name)) for name, kind in _kinds(type(self)).items()}


def _kinds(cls: type[Settings]) -> dict[str, Kind[Any]]:
    """The section's own keys, in the order of their declaration."""
    return {f.name: f.metadata["kind"] for f in dataclasses.fields(cast("Any", cls))}


def _read_section(cls: type[S], value: object) -> S:
    if isinstance(value, cls):
        return value
    given = {} if value is None else value
    if not isinstance(given, Mapping):
        raise misfit(value, f"a section with the keys {', '.join(_kinds(cls))}", wrong_type=True)
    known: dict[str, object] = {}
    misfits: list[Misfit] = []
    for key, item in given.items():
        if isinstance(key, str) and key in _kinds(cls):
            known[key] = item
        elif key not in cls.foreign:
            misfits.append(_unknown_key(cls, key))
    build: Callable[..., S] = cls
    try:
        built = build(**known)
    except SettingsError as error:
        raise error_of((*misfits, *error.misfits)) from None
    if misfits:
        raise error_of(misfits)
    return built


def _unknown_key(cls: type[Settings], key: object) -> Misfit:
    where = key if isinstance(key, str) and key.isprintable() and 0 < len(key) <= _MAX_KEY_SHOWN else _shown(key)
    near = _nearest_key(cls, key) if isinstance(key, str) else None
    hint = f"did you mean `{near}`? " if near else ""
    if isinstance(key, bool):
        hint = "YAML reads yes, on, no and off as booleans; "
    return Misfit(where, f"unknown key; {hint}allowed: {', '.join(_kinds(cls))}")


def _nearest_key(cls: type[Settings], key: str) -> str | None:
    """The key that was probably meant: of this section, or of one below it (a level forgotten)."""
    below = {
        name: f"{outer}.{name}"
        for outer, kind in _kinds(cls).items()
        if kind.nested is not None
        for name in _kinds(kind.nested)
    }
    if key in below:
        return below[key]
    near = nearest(key, (*_kinds(cls), *cls.foreign))
    if near is None:
        inner = nearest(key, below)
        near = None if inner is None else below[inner]
    return near


def nearest(word: str, known: Iterable[str], likeness: float = _LIKENESS) -> str | None:
    """The known word that looks most like this one, if any does; case and dashes do not count."""
    if len(word) > _MAX_KEY_SHOWN:  # likeness takes quadratic time, and no key of ours is as long
        return None
    found = difflib.get_close_matches(word.lower().replace("-", "_"), sorted(known), n=1, cutoff=likeness)
    return found[0] if found else None


def misspelt_sections(mapping: Mapping[str, object], meant: Mapping[str, str]) -> Iterator[str]:
    """A warning for each section at the top that is none of ours and looks like one: nothing in it has an effect.

    It is no error: what rankd does not know may be the framework's.

    Args:
        meant: what may have been meant, and where in the file that belongs.
    """
    for name, section in mapping.items():
        # A value of its own, such as `profile: True` of MindFormers, is no section.
        if not isinstance(name, str) or meant.get(name) == name or isinstance(section, (str, int, float)):
            continue
        near = nearest(name, meant, _SECTION_LIKENESS)
        if near is not None:
            yield f"{name}: not used by rankd; did you mean `{meant[near]}`?"


# --- YAML -------------------------------------------------------------------------------------------------------------


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, without its silence about a key that stands twice (it keeps the last one)."""

    # Checked on the nodes as composed: later on, merges (`<<`) have put their keys beside those that override them.
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            name = (key.tag, key.value)
            if name in first:
                problem = f"the key {_shown(key.value)} stands twice, first in line {first[name]}; remove one"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            first[name] = key.start_mark.line + 1
        return node

    # PyYAML lets what int(), float() and date() raise pass through without a place.
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
            problem = f"a value that cannot be read ({error})"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


def load_yaml(path: str | Path) -> dict[Any, Any]:
    """The mapping that a YAML file holds; an empty file holds an empty one.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or has a key twice; names the file and the line.
    """
    try:
        raw = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8 text; save the file as UTF-8") from error
    loaded = _parse(text, str(path))
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: found {_shown(loaded)}, allowed: sections, each `name:` with its keys below")
    return loaded


def _parse(text: str, source: str) -> object:
    try:
        loader = _StrictLoader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{source}{line}: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        line_number = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{source}, line {line_number}: {error.reason}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply to be a configuration") from error
