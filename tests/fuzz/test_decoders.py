"""Every decoder against bytes that nobody wrote: it decodes, or raises its own error, and nothing else happens.

A small coverage-free fuzzer: seeds are what the encoders write, and the files of `corpus/`; each round cuts, flips,
doubles, splices or replaces bytes of one, and what gets an answer not seen before (its error without the figures, or
the kind of thing decoded) becomes a seed too. RANKD_FUZZ_SECONDS is the time of all decoders together (default 60);
RANKD_FUZZ_SAVE=1 keeps in `corpus/` what failed.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import os
import random
import re
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.collector.streams import Core
from tests.profiler_ctl.test_part import Both

from rankd.agent.config import AgentConfig
from rankd.agent.discovery import EndpointFinder
from rankd.agent.spool import Spool
from rankd.collector.config import RankdConfig
from rankd.collector.entries import Lost, Opened, Stored, decode_entry, encode_entry
from rankd.collector.journal import Journal
from rankd.collector.protocol.assembly import block_head, scalar_part
from rankd.collector.protocol.checks import printable
from rankd.collector.protocol.connection import read_connection
from rankd.collector.protocol.errors import (
    ConfigError,
    JournalError,
    ProtocolError,
    RankdError,
    SpecLogError,
)
from rankd.collector.protocol.keys import RunKey
from rankd.collector.protocol.records import Frame, Level, NameTable
from rankd.collector.protocol.speclog import parse
from rankd.collector.protocol.wire import (
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
    Hole,
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
from rankd.collector.settings import load_yaml
from rankd.collector.sinks.gzipped import DamagedPartError, GzipReader, compress
from rankd.collector.sinks.keeper import DELETED, deleted_of
from rankd.collector.sinks.parts import LogReader
from rankd.collector.status import Beats, Latest, status_of
from rankd.collector.statusview import run as show_status
from rankd.profiler_ctl.cli import run as show_profiles
from rankd.profiler_ctl.requests import PROFILES

pytestmark = pytest.mark.slow

CORPUS = Path(__file__).parent / "corpus"
SECONDS = float(os.environ.get("RANKD_FUZZ_SECONDS", "60"))
# What one decoder may take beyond what the process has: a bomb takes hundreds of times its size.
MOST_BYTES = 256 * 2**20
# And how long one input may take, on a machine that does other things too.
MOST_SECONDS = 5.0
MOST_SEEDS = 400

NAMES = NameTable(("decoder.layers.0.weight", "层.权重", "a\x1b[2J\\b"))
HELLO = Hello(bytes(range(16)), "run", 1, 4, 7, "node0", 12, 1.5, 100, {"job": "x"}, False)
FRAMES = (
    Frame.scalar("local_loss", 1.5),
    Frame.named("local_norm", NAMES, [1.0, float("nan"), 1e300]),
)
ITEMS = (
    Table(1, 1, NAMES),
    Block(2, 3, 1, True, 1.5, FRAMES),
    Block(3, 3, None, True, 2.5, (Frame.scalar("lr", 1e-3),), True),
    Note(4, 3, 2, "exception", "RuntimeError: \x1b]0;x\x07", 1.0),
    Gap(5, "spool_full", 12, (3, 1), (4, None)),
    Goodbye(6, "done", 12, {"spool_full": 3}, 9.0),
    Hole(9, 7, 12, (4, None)),
)
RAWS = tuple(encode_item(item, {NAMES: 1}) for item in ITEMS)
MESSAGES = (
    HELLO, Welcome("run", 3, 1.0), Refused("no", True), Data(RAWS), Ack(5), Beat(1, 2, 3, {"cpu": 1.0}), Who(),
    Command("sample", {"first": 3, "last": None}, b"p" * 32), Report("sample", {"late": True, "x": 1.5}),
    Ask(1, "sample", {"interval": 1}, b"p" * 32), Answer(1, True, b"{}"),
)  # fmt: skip
LOG = b"""[rank_0] # attempt 1 world_size 2
[rank_0] { "step": 1, "micro_step": 1 }
[rank_0] { "local_loss": 1.500000 }
[rank_0] { "local_norm": decoder.layers.0.weight: 0.250000 }
[collector] # end attempt 1: 2 records of 2 ranks, 0 dropped
"""
YAML = b"""monitor: {train_state: {local_norm: [weight], device_norm: "layers.0", local_loss: True}}
profiler: {enable_profiling: True, start_step: 2, end_step: 3, profiler_rank: [0, 1]}
rankd: &a
  output: out
  endpoint: "tcp://[::1]:*"
  spool: {size: 64MiB}
  beat_interval: 1e0
"""


def message(raw: bytes, _: Path) -> object:
    return type(decode_message(raw))


def item(raw: bytes, _: Path) -> object:
    tables = Tables()
    tables.define(1, NAMES)
    return type(decode_item(raw, tables))


def entry(raw: bytes, _: Path) -> object:
    return type(decode_entry(raw))


def journal(raw: bytes, folder: Path) -> object:
    for old in folder.glob("*"):
        old.unlink()
    (folder / _journal_name()).write_bytes(raw)
    it = Journal(folder)
    try:
        return min(len([decode_entry(payload) for _, payload in it.replay()]), 5)
    finally:
        it.close()


def spool(raw: bytes, folder: Path) -> object:
    path = folder / "x.spool"
    path.write_bytes(raw)
    it = Spool.open(path)
    try:
        return len([it.read(e) for e in it.entries])
    finally:
        it.close(delivered=False)


def connection(raw: bytes, folder: Path) -> object:
    path = folder / ".rankd" / "connection.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(raw)
    read = read_connection(path)
    # What it says is also used.
    found = EndpointFinder(None, {}, folder)()
    return read is None, found is None


def text(raw: bytes, _: Path) -> object:
    lines = raw.splitlines(keepends=True)
    return [type(each) for each in parse(lines)][:3]


def yaml(raw: bytes, folder: Path) -> object:
    path = folder / "train.yaml"
    path.write_bytes(raw)
    RankdConfig.from_mapping(load_yaml(path).get("rankd") or {})
    AgentConfig.from_yaml(path)
    return "read"


def notebook(raw: bytes, folder: Path) -> object:
    """Parts with proper checksums, and what they do to the records before them."""
    path = folder / "x.spool"
    path.unlink(missing_ok=True)
    it = Spool.create(path, 65_536, HELLO)
    after = None
    for seq, each in enumerate(RAWS, 1):
        after = it.append(seq, each, after)
    for part in raw.split(b"|"):
        it.jot(len(RAWS) + (part[0] % 8 if part else 1), [part[1:]])
    it.close(delivered=False)
    it = Spool.open(path)
    try:
        found = [it.read(e) for e in it.entries]
    finally:
        it.close(delivered=False)
    assert tuple(found[: len(RAWS)]) == RAWS
    return [item(each, folder) for each in found[len(RAWS) :]][:3]


def gzipped(raw: bytes, folder: Path) -> object:
    path = folder / "x.gz"
    path.write_bytes(raw)
    reader = GzipReader(path)
    try:
        return [len(reader.read(offset, 1_000)) for offset in (0, 5, 2**20, 2**40)]
    finally:
        reader.close()


def part_names(raw: bytes, folder: Path) -> object:
    for old in folder.glob("*"):
        old.unlink()
    (folder / "merged.log").write_bytes(LOG)
    for name in raw.split(b"\n"):
        if 0 < len(name) < 256 and name not in (b".", b"..") and b"/" not in name and b"\0" not in name:
            Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(b"12345")
    with LogReader(folder / "merged.log") as log:
        end, pieces = log.layout.end, log.pieces()
        assert all(0 <= start < to <= end < 2**63 for start, to in pieces)
        return len(pieces), len(log.read(log.start, 100)), len(log.read(max(0, end - 10), 100))


def status(raw: bytes, folder: Path) -> object:
    return shown(folder, ".rankd/status.json", raw, show_status, watch=False, json=False)


def profiles(raw: bytes, folder: Path) -> object:
    return shown(folder, PROFILES, raw, show_profiles, what="status", session=None)


def shown(folder: Path, name: str, raw: bytes, run: Callable[[argparse.Namespace], int], **given: object) -> object:
    """What a command makes of this file: nothing that steers a terminal."""
    (folder / ".rankd").mkdir(exist_ok=True)
    (folder / name).write_bytes(raw)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        result = run(argparse.Namespace(output=folder, run=folder, **given))
    assert all(each.isprintable() or each == "\n" for each in printable(said.getvalue()))
    assert "\x1b" not in said.getvalue()
    return result


def deleted(raw: bytes, folder: Path) -> object:
    (folder / DELETED).parent.mkdir(exist_ok=True)
    (folder / DELETED).write_bytes(raw)
    return len(deleted_of(folder))


def _journal_name() -> str:
    return f"{1:08d}.journal"


def journal_seed(folder: Path) -> tuple[str, bytes]:
    """The name and the bytes of a journal's segment."""
    it = Journal(folder / "seed")
    list(it.replay())
    it.append([encode_entry(e) for e in (Opened(HELLO), Stored(0, RAWS), Lost(1, 3.0))])
    it.close()
    (path,) = (folder / "seed").iterdir()
    return path.name, path.read_bytes()


def notebook_seed() -> bytes:
    """Two blocks that were begun."""
    parts = [block_head(4, 1, 1.0), scalar_part("local_loss", Level.MICRO_STEP, 1.5)]
    return b"|".join(bytes([n]) + part for n in (1, 2) for part in parts)


def gzip_seeds(folder: Path) -> list[bytes]:
    """One of ours, and one of somebody else's."""
    (folder / "plain").write_bytes(LOG * 99)
    source, target = os.open(folder / "plain", os.O_RDONLY), os.open(folder / "gz", os.O_RDWR | os.O_CREAT)
    compress(source, target, len(LOG) * 99)
    raw = os.pread(target, 2**20, 0)
    os.close(source)
    os.close(target)
    return [raw, raw + raw, gzip.compress(LOG)]


def status_seed() -> bytes:
    core = Core()
    core.apply(Opened(HELLO))
    about = {"pid": 1, "host": "h", "records_per_second": 1.0, "backlog": 0, "refused": {"limit": 1}, "alive": True}
    said = status_of(core.run, Latest(), Beats(), now=1.0, clock=1.0, collector=about)
    return json.dumps(said).encode()


def profiles_seed() -> bytes:
    both = Both()
    both.start()
    for rank in (0, 1):
        both.report(rank, "armed", step=10)
        both.report(rank, "done", bytes=10, count=2, first=15, last=16, path="/x", seconds=1.5, covered=True)
    return json.dumps({"version": 1, "sessions": both.part.status()}).encode()


def spool_seed(folder: Path) -> bytes:
    it = Spool.create(folder / "seed.spool", 65_536, HELLO)
    after = None
    for seq, raw in enumerate(RAWS, 1):
        after = it.append(seq, raw, after)
    it.close(delivered=False)
    return (folder / "seed.spool").read_bytes()


@dataclass(frozen=True)
class Target:
    decode: Callable[[bytes, Path], object]
    allowed: tuple[type[Exception], ...]
    seeds: Callable[[Path], Sequence[bytes]]


TARGETS = {
    "message": Target(message, (ProtocolError,), lambda _: [encode_message(m) for m in MESSAGES]),
    "item": Target(item, (ProtocolError,), lambda _: RAWS),
    "entry": Target(
        entry, (JournalError,), lambda _: [encode_entry(e) for e in (Opened(HELLO), Stored(0, RAWS), Lost(1, 3.0))]
    ),
    "journal": Target(journal, (JournalError,), lambda folder: [journal_seed(folder)[1]]),
    "spool": Target(spool, (ProtocolError,), lambda folder: [spool_seed(folder)]),
    "connection": Target(
        connection,
        (),
        lambda _: [
            b'{"version": 1, "endpoint": "tcp://10.0.0.1:7000", "run": "r", "pid": 12, "host": "h", "key": "%s"}'
            % (b"k" * 32)
        ],
    ),
    "notebook": Target(notebook, (ProtocolError,), lambda _: [notebook_seed()]),
    "gzipped": Target(gzipped, (DamagedPartError,), gzip_seeds),
    "part_names": Target(
        part_names,
        (DamagedPartError,),
        lambda _: [b"merged.log.000000000000000-000000000000005\nmerged.log.000000000000007-000000000000009.gz"],
    ),
    "status": Target(status, (RankdError,), lambda _: [status_seed()]),
    "profiles": Target(profiles, (RankdError,), lambda _: [profiles_seed()]),
    "deleted": Target(deleted, (), lambda _: [b'{"merged.log": 12, "rank_0/monitor.log": 5}']),
    "text": Target(text, (SpecLogError,), lambda _: [LOG]),
    "yaml": Target(yaml, (ConfigError,), lambda _: [YAML]),
}


_NASTY = (
    b"\xdd\xff\xff\xff\xff", b"\x93" * 40, b"&a ", b"*a", b"\n", b"[" * 99, b"[" * 9_999, b'"', b"|\x01", b"null",
    b"1e999", b"9" * 30, b"-1", b"\\u001b[2J", "\u0663".encode() * 15,
)  # fmt: skip


def mutated(raw: bytes, seeds: Sequence[bytes], chance: random.Random) -> bytes:
    """`raw`, changed in one to four places."""
    data = bytearray(raw)
    for _ in range(chance.randint(1, 4)):
        at, to = sorted((chance.randint(0, len(data)), chance.randint(0, len(data))))
        match chance.randint(0, 7):
            case 0 if data:
                data[at % len(data)] ^= 1 << chance.randint(0, 7)
            case 1 if data:
                data[at % len(data)] = chance.choice((0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xC7, 0xDC, 0xDD, 0xDF, 0xFF))
            case 2:
                del data[at:to]
            case 3:
                data[at:at] = data[at:to][:4_096]
            case 4:
                other = chance.choice(seeds)
                begin = chance.randint(0, len(other))
                data[at:to] = other[begin : begin + chance.randint(0, 64)]
            case 5:
                data[at : at + 4] = chance.randbytes(4)
            case 6:
                del data[at:]
            case 7:
                data[at:at] = chance.choice(_NASTY)
    return bytes(data[:65_536])


def answer(target: Target, raw: bytes, folder: Path) -> str:
    """What the decoder makes of it, without the figures."""
    try:
        return repr(target.decode(raw, folder))
    except target.allowed as e:
        return re.sub(r"\d+|'[^']*'|\"[^\"]*\"|b[\"'].*", "", f"{type(e).__name__}: {e}".replace(str(folder), ""))[:60]


@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_decodes_or_raises_its_own_error(name: str, tmp_path: Path) -> None:
    """Whatever the bytes: within time and memory."""
    target, chance = TARGETS[name], random.Random(f"{name} {os.environ.get('RANKD_FUZZ_SEED', 1)}")
    folder = tmp_path / "work"
    folder.mkdir()
    seeds = [*target.seeds(tmp_path), *(p.read_bytes() for p in sorted((CORPUS / name).glob("*")))]
    seen = {answer(target, seed, folder) for seed in seeds}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rounds, until = 0, time.monotonic() + SECONDS / len(TARGETS)
    while (begin := time.monotonic()) < until:
        rounds += 1
        raw = mutated(chance.choice(seeds), seeds, chance)
        try:
            said = answer(target, raw, folder)
            assert time.monotonic() - begin < MOST_SECONDS, "too slow"
        except BaseException:
            _save(name, raw)
            raise
        if said not in seen:
            seen.add(said)
            if len(seeds) < MOST_SEEDS:
                seeds.append(raw)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1_024
    print(f"{name}: {rounds} inputs, {len(seen)} different answers, grown by {grown >> 20} MiB")
    assert grown < MOST_BYTES


def _save(name: str, raw: bytes) -> None:
    print(f"failed with {raw[:400]!r}")
    if os.environ.get("RANKD_FUZZ_SAVE"):
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
        (CORPUS / name / hashlib.sha256(raw).hexdigest()[:16]).write_bytes(raw)


def test_a_key_never_shows_in_text() -> None:
    """Neither its text form nor its error quotes it."""
    key = RunKey.fresh()
    assert key.reveal() not in f"{key!r} {key} {key.agent()!r} {key.agent()}"
    with pytest.raises(ConfigError) as error:
        RunKey("hunter2 but with blanks in it, so it is none")
    assert "hunter2" not in str(error.value)
