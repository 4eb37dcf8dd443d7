"""The `rankd:` section of the training YAML."""

# ruff: noqa: RUF009 - `setting` declares a dataclass field, as dataclasses.field does

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .protocol.errors import RecordError
from .protocol.ranges import parse_ranks
from .protocol.records import KNOWN_METRICS
from .settings import (
    KIB,
    MIB,
    Kind,
    Misfit,
    Settings,
    byte_size,
    choice,
    error_of,
    file_path,
    flag,
    integer,
    list_of,
    misfit,
    number,
    optional,
    seconds,
    setting,
    subsection,
)

__all__ = [
    "AlertConfig",
    "JournalConfig",
    "LogsConfig",
    "OutputConfig",
    "ProfileConfig",
    "RankdConfig",
    "SpoolConfig",
    "output_of",
]

# One micro-step of a few hundred parameters takes some 10 kB; a smaller spool would drop even that.
_MIN_SPOOL = 64 * KIB
# A page; smaller segments would only cost files.
_MIN_SEGMENT = 4 * KIB
# `tail -F` must have the time to see each part: it loses one that came and went between two of its looks.
_MIN_PART = 64 * KIB
_MIN_SPAN = 60
_MAX_PERIOD = 3_650 * 86_400

# Some hundred values say what is usual; each costs 16 bytes a rank, and looking at one takes longer the more there are.
_WINDOW, _MAX_WINDOW = 100, 10_000

_ENDPOINT = 'null, or text "tcp://HOST:PORT" (PORT 1 to 65535, or * for any free one; an IPv6 HOST in brackets)'
_LABEL = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")


def _endpoint(*, listen: bool = False) -> Kind[str]:
    """`tcp://HOST:PORT`; a PORT of 0 becomes `*`, so that readers see one form of it. `listen`: HOST may be `*`."""

    def read(value: object) -> str:
        if not isinstance(value, str):
            raise misfit(value, _ENDPOINT, wrong_type=True)
        match = re.fullmatch(r"tcp://(\[[^\[\]]*\]|[^:/\[\]]*):(\*|\d{1,5})", value, re.ASCII)
        if match is None:
            raise misfit(value, _ENDPOINT, _endpoint_hint(value))
        host, port = match[1], match[2]
        problem = "" if listen and host == "*" else _host_problem(host)
        if listen and not problem and host != "*" and not re.fullmatch(r"[0-9.]+|\[.*\]", host):
            problem = "HOST is an address of the collector's own, or * for all"
        if problem:
            raise misfit(value, _ENDPOINT, problem)
        if port != "*" and int(port) > 65_535:
            raise misfit(value, _ENDPOINT, f"there is no port {port}")
        return f"tcp://{host}:*" if port == "*" or int(port) == 0 else f"tcp://{host}:{int(port)}"

    return Kind(_ENDPOINT, read)


def _endpoint_hint(text: str) -> str:
    scheme, separator, rest = text.partition("://")
    if not separator:
        return "it starts with tcp://"
    if scheme != "tcp":
        return f"only tcp:// is spoken, not {scheme[:16]}://"
    if rest.count(":") > 1 and "[" not in rest:
        return "an IPv6 address stands in brackets: tcp://[::1]:5555"
    return "" if ":" in rest else "the port is missing: write :PORT, or :* for any free one"


def _host_problem(host: str) -> str:
    """Why no agent can connect to this host; empty if one can."""
    if host in ("", "*", "0.0.0.0", "[::]"):  # noqa: S104 - refused here, not bound
        return "HOST is what the agents connect to, so it must name one host"
    try:
        if host.startswith("["):
            ipaddress.IPv6Address(host[1:-1])
            return ""
        if re.fullmatch(r"[0-9.]+", host):
            ipaddress.IPv4Address(host)
            return ""
    except ValueError as error:
        return f"no address: {error}"
    return "" if _HOST_NAME.fullmatch(host) and len(host) <= 253 else "not a host name"


_UNITS = {"": 1, "s": 1, "min": 60, "h": 3_600, "d": 86_400, "w": 7 * 86_400}


def _period(low: int) -> Kind[int]:
    """A span of time of at least `low` seconds, in seconds: an integer, or text with a unit."""
    allowed = f'a span of {low} seconds to 10 years: a number of seconds, or text such as "12h" or "30d"'

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise misfit(value, allowed, wrong_type=True)
        match = re.fullmatch(r"\s*(\d{1,9})\s*([A-Za-z]*)\s*", value, re.ASCII) if isinstance(value, str) else None
        unit = _UNITS.get(match[2].lower()) if match is not None else 1
        if unit is None or (match is None and isinstance(value, str)):
            raise misfit(value, allowed, "units: s, min, h, d, w")
        seconds = int(value if match is None else match[1]) * unit
        if not low <= seconds <= _MAX_PERIOD:
            raise misfit(value, allowed)
        return seconds

    return Kind(allowed, read)


@dataclass(frozen=True, slots=True)
class SpoolConfig(Settings):
    """`rankd.spool`: the file beside each rank that keeps what the collector has not yet acknowledged.

    Attributes:
        directory: below which the spool files lie; None: the system's directory for temporary files. Put it on a local
            disk or in shared memory (/dev/shm), not on a network file system: the training thread writes it. A job's
            own temporary directory that is removed at the job's end takes with it what was not delivered.
        size: bytes each rank may keep there. What does not fit is dropped, counted, and stands in the log as a gap.
    """

    dotted: ClassVar[str] = "rankd.spool"

    directory: Path | None = setting(optional(file_path()), None)
    size: int = setting(byte_size(low=_MIN_SPOOL), 64 * MIB)

    def place(self, output: Path) -> Path:
        """Where the spool files of the run in `output` lie on this node; found alike by its ranks and its collector.

        A directory of this user's, below one that all users may share.
        """
        base = Path(tempfile.gettempdir()) if self.directory is None else self.directory.absolute()
        run = hashlib.blake2b(os.fsencode(os.path.realpath(output)), digest_size=8).hexdigest()
        return base / f"rankd-{os.geteuid()}" / run


@dataclass(frozen=True, slots=True)
class JournalConfig(Settings):
    """`rankd.journal`: the collector's journal, from which all logs are made.

    Attributes:
        segment_size: bytes after which a new segment file is begun.
        durability: what an acknowledgement promises: `process`, that the record outlives the collector's process (the
            kernel has it); `disk`, that it outlives the machine (fsync before each acknowledgement, slower).
        keep: bytes of older segments that are kept; None: all, so that `rankd rebuild` can make every log again. What
            is still waiting to be written is kept in any case.
    """

    dotted: ClassVar[str] = "rankd.journal"

    segment_size: int = setting(byte_size(low=_MIN_SEGMENT), 64 * MIB)
    durability: str = setting(choice("process", "disk"), "process")
    keep: int | None = setting(optional(byte_size(low=0)), None)


@dataclass(frozen=True, slots=True)
class LogsConfig(Settings):
    """`rankd.logs`: rotation of the text logs (merged.log, rank_x/monitor.log), and what is kept of their older parts.

    Attributes:
        rotate_size: bytes after which a log's file is closed, at the end of a block, and another one begun; None: never
            for its size.
        rotate_every: seconds (or text such as "1d"): what is written in each such span of time, counted in UTC, has a
            file of its own; None: never for its age.
        compress: what is done with closed parts, once no restart has to look at them.
        keep_parts: closed parts of each log that are kept; None: all.
        keep_size: bytes that the closed parts of all logs may take together; None: no limit.
        keep_for: seconds (or text such as "30d") for which a closed part is kept after its last line; None: for ever.
    """

    dotted: ClassVar[str] = "rankd.logs"

    rotate_size: int | None = setting(optional(byte_size(low=_MIN_PART)), None)
    rotate_every: int | None = setting(optional(_period(low=_MIN_SPAN)), None)
    compress: str = setting(choice("gzip", "none"), "gzip")
    keep_parts: int | None = setting(optional(integer(1)), None)
    keep_size: int | None = setting(optional(byte_size(low=0)), None)
    keep_for: int | None = setting(optional(_period(low=_MIN_SPAN)), None)

    def conflicts(self) -> Iterator[Misfit]:
        """What is not rotated has no older parts."""
        if self.rotates:
            return
        for name in ("keep_parts", "keep_size", "keep_for"):
            if (value := getattr(self, name)) is not None:
                allowed = (
                    "null while neither rotate_size nor rotate_every is set: a log that is not rotated has one file"
                )
                yield Misfit(name, f"found {value}, allowed: {allowed}")

    @property
    def rotates(self) -> bool:
        """Whether logs are rotated at all."""
        return self.rotate_size is not None or self.rotate_every is not None


def _ranks() -> Kind[str]:
    """Ranks as text, such as `0,2-3`, or one as a number."""
    allowed = 'ranks and ranges of them, such as "0,2-3"'

    def read(value: object) -> str:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            value = str(value)
        if not isinstance(value, str):
            raise misfit(value, allowed, wrong_type=True)
        try:
            parse_ranks(value)
        except RecordError:
            raise misfit(value, allowed) from None
        return value

    return Kind(allowed, read)


def _word(allowed: str) -> Kind[str]:
    def read(value: object) -> str:
        if not isinstance(value, str) or not value.strip():
            raise misfit(value, allowed, wrong_type=not isinstance(value, str))
        return value

    return Kind(allowed, read)


@dataclass(frozen=True, slots=True)
class OutputConfig(Settings):
    """One of `rankd.outputs`: where records go besides the text logs, which are always written.

    Attributes:
        type: `jsonl` (OUTPUT/records.jsonl) and `csv` (OUTPUT/records.csv) at full precision; `tensorboard`
            (OUTPUT/tensorboard, needs the extra of that name); `prometheus` (served over HTTP, needs the extra).
        metrics: only these; None: all.
        ranks: only these, as text such as "0,2-3"; None: all.
        listen: for `prometheus`: HOST:PORT to serve on; PORT 0 takes a free one, which collector.log tells.
    """

    dotted: ClassVar[str] = "rankd.outputs"

    type: str = setting(choice("jsonl", "csv", "tensorboard", "prometheus"), "jsonl")
    metrics: tuple[str, ...] | None = setting(optional(list_of(_word("the name of a metric"))), None)
    ranks: str | None = setting(optional(_ranks()), None)
    listen: str = setting(_word("text HOST:PORT"), "127.0.0.1:9464")

    def conflicts(self) -> Iterator[Misfit]:
        """`listen` must be an address."""
        host, _, port = self.listen.rpartition(":")
        if not host or not re.fullmatch(r"\d{1,5}", port, re.ASCII) or int(port) > 65_535:
            yield Misfit("listen", f'found {self.listen!r}, allowed: text "HOST:PORT", PORT 0 to 65535')


def _metric() -> Kind[str]:
    """The name of a metric that rankd itself measures; it must be given."""
    known = choice(*KNOWN_METRICS)

    def read(value: object) -> str:
        if value == "":
            raise error_of([Misfit("", f"the key is missing, allowed: {known.allowed}")])
        return known.read(value)

    return Kind(known.allowed, read)


@dataclass(frozen=True, slots=True)
class AlertConfig(Settings):
    """One of `rankd.alerts`: a line that a metric must not cross; exactly one of `above`, `below` and `times`.

    Of a metric with a value for each name the largest counts (for `below` the smallest). nan and inf cross no line, and
    do not count as usual either: `monitor_config.nan_check` is for those.

    Attributes:
        metric: what is looked at; one that rankd itself measures.
        above: an anomaly is a value larger than this.
        below: an anomaly is a value smaller than this.
        times: an anomaly is a value larger than this many times the median of this rank's last `window` finite values,
            from when there are so many, and while that median is above zero.
        window: how many values say what is usual.
    """

    dotted: ClassVar[str] = "rankd.alerts"

    metric: str = setting(_metric(), "")
    above: float | None = setting(optional(number()), None)
    below: float | None = setting(optional(number()), None)
    times: float | None = setting(optional(number(above=1)), None)
    window: int = setting(integer(1, _MAX_WINDOW), _WINDOW)

    def conflicts(self) -> Iterator[Misfit]:
        """One line each, so that it is clear which one was crossed."""
        lines = {name: getattr(self, name) for name in ("above", "below", "times")}
        given = [name for name, line in lines.items() if line is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            yield Misfit("", f"found {found}, allowed: exactly one of above, below and times; write an alert for each")
        if self.times is None and self.window != _WINDOW:
            yield Misfit("window", f"found {self.window}, allowed: with `times` only, which looks at a window")


@dataclass(frozen=True, slots=True)
class ProfileConfig(Settings):
    """`rankd.profile`: what profiling on demand (`rankd profile`) may cost one run.

    Attributes:
        sessions: so many sessions; 0 switches it off.
        size: bytes of all that is profiled, the configuration's window too; None: no limit.
    """

    dotted: ClassVar[str] = "rankd.profile"

    # The collector's checkpoints keep 64 decisions of a kind.
    sessions: int = setting(integer(0, 60), 50)
    size: int | None = setting(optional(byte_size(low=0)), None)


@dataclass(frozen=True, slots=True)
class RankdConfig(Settings):
    """The `rankd:` section: where the logs go, and how agents and collector treat each other.

    Attributes:
        output: directory of the logs, the journal and the connection file.
        endpoint: where the collector listens and the agents connect, `tcp://HOST:PORT`, PORT `*` for any free one;
            None: found through the environment, the connection file, or MS_SCHED_HOST. Beyond loopback only peers with
            the run's key are let in (RANKD_KEY, or the connection file).
        listen: where the collector listens, if not at `endpoint`: `tcp://ADDRESS:PORT`, ADDRESS an own one or `*` for
            all (a container, NAT); PORT `*` for any free one.
        start_collector: rank 0 starts the collector when none runs for this output directory.
        local_norm_kind: what `local_norm` means: `increment`, the growth of the accumulated gradient's norm in this
            micro-step; `micro_batch`, the norm of the micro-batch's own gradient (as MindFormers 2.1 prints).
        beat_interval: seconds between two beats of an agent.
        lost_after: seconds without a beat after which a rank is given up, and the others no longer wait for it.
        max_hold: seconds for which a rank that beats but does not get on may hold up the others' lines.
        linger: seconds the collector waits, when all other ranks have said goodbye, for those that have not.
        exit_timeout: seconds a training process waits at its exit for the last acknowledgements.
        spool: see SpoolConfig.
        journal: see JournalConfig.
        logs: rotation of the text logs; see LogsConfig.
        profile: see ProfileConfig.
        outputs: where records go besides the text logs; see OutputConfig.
        alerts: what is told as an anomaly, besides nan and inf; see AlertConfig.
        on_anomaly: what else becomes of an anomaly: `log`, nothing; `stop`, `AnomalyError` is raised into the training
            loop once all is recorded.
    """

    dotted: ClassVar[str] = "rankd"

    output: Path = setting(file_path(), Path("rankd-output"))
    endpoint: str | None = setting(optional(_endpoint()), None)
    listen: str | None = setting(optional(_endpoint(listen=True)), None)
    start_collector: bool = setting(flag(), True)
    local_norm_kind: str = setting(choice("increment", "micro_batch"), "increment")
    beat_interval: float = setting(seconds(), 1.0)
    lost_after: float = setting(seconds(), 60.0)
    max_hold: float = setting(seconds(), 300.0)
    linger: float = setting(seconds(zero=True), 10.0)
    exit_timeout: float = setting(seconds(zero=True), 5.0)
    spool: SpoolConfig = setting(subsection(SpoolConfig), SpoolConfig())
    journal: JournalConfig = setting(subsection(JournalConfig), JournalConfig())
    logs: LogsConfig = setting(subsection(LogsConfig), LogsConfig())
    profile: ProfileConfig = setting(subsection(ProfileConfig), ProfileConfig())
    outputs: tuple[OutputConfig, ...] = setting(list_of(subsection(OutputConfig)), ())
    alerts: tuple[AlertConfig, ...] = setting(list_of(subsection(AlertConfig)), ())
    on_anomaly: str = setting(choice("log", "stop"), "log")

    def conflicts(self) -> Iterator[Misfit]:
        """A rank must be able to miss a beat without being given up or held out."""
        for name in ("lost_after", "max_hold"):
            value = getattr(self, name)
            if value <= 2 * self.beat_interval:
                yield Misfit(
                    name,
                    f"found {value}, allowed: more than twice beat_interval ({self.beat_interval}), "
                    "so that one late beat costs nothing",
                )
        types = [each.type for each in self.outputs]
        for index, kind in enumerate(types):
            if kind in types[:index]:
                yield Misfit(f"outputs[{index}].type", f"found {kind} a second time; give one output all it takes")


def output_of(dump_path: Path) -> Path:
    """The output directory that `monitor_config.dump_path` names.

    rankd makes a folder `rank_N` for each rank in one output directory. So where the path holds `{rank}`, the output
    directory is what stands before the component that does: `./monitor/rank_{rank}` is the output `./monitor`.
    """
    parts = dump_path.parts
    first = next((i for i, part in enumerate(parts) if "{rank}" in part), len(parts))
    return Path(*parts[:first])
