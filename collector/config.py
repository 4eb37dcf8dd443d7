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
from .settings import (
    KIB,
    MIB,
    Kind,
    Misfit,
    Settings,
    byte_size,
    choice,
    file_path,
    flag,
    integer,
    list_of,
    misfit,
    optional,
    seconds,
    setting,
    subsection,
)

__all__ = ["JournalConfig", "OutputConfig", "ProfileConfig", "RankdConfig", "SpoolConfig", "output_of"]

# One micro-step of a few hundred parameters takes some 10 kB; a smaller spool would drop even that.
_MIN_SPOOL = 64 * KIB
# A page; smaller segments would only cost files.
_MIN_SEGMENT = 4 * KIB

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
        profile: see ProfileConfig.
        outputs: where records go besides the text logs; see OutputConfig.
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
    profile: ProfileConfig = setting(subsection(ProfileConfig), ProfileConfig())
    outputs: tuple[OutputConfig, ...] = setting(list_of(subsection(OutputConfig)), ())

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
