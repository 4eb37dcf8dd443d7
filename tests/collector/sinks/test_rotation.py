"""Rotation of the files that a sink writes: whatever happens to them, the parts together are the log."""

from __future__ import annotations

import gzip
import os
import resource
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankd.collector.sinks.files import LogFiles
from rankd.collector.sinks.parts import (
    LogReader,
    compressed_path,
    layout_of,
    log_of_part,
    part_path,
    parts_of,
    unfinished_path,
)
from rankd.collector.sinks.retention import Rotation
from rankd.collector.sinks.speclog import MERGED_LOG, SpecLogSink, rank_log

from ...support import limit, whole_log
from ..releases import begin, steps
from .test_speclog_sink import open_files, texts

SMALL = Rotation(size=40)


def block(number: int) -> bytes:
    """What one write adds: one or some lines that are like no others."""
    return b"".join(b"[rank_%d] block %d\n" % (i, number) for i in range(1 + number % 3))


@dataclass
class World:
    """A log, what was written to it, and the checkpoints: a journal in little."""

    root: Path
    blocks: int = 0
    checkpoints: list[tuple[int, dict[str, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log = self.root / "log"
        self.rotation = SMALL
        self.start()

    @property
    def text(self) -> bytes:
        return b"".join(map(block, range(self.blocks)))

    def start(self) -> None:
        """As a collector does: from the newest checkpoint that the files reach."""
        self.files = LogFiles(self.root, lambda _: self.rotation)
        usable = (each for each in reversed(self.checkpoints) if self.files.reaches(each[1]))
        first, sizes = next(usable, (0, {"log": 0}))
        self.files.resume(sizes)
        for number in range(first, self.blocks):
            self.files.take("log", [block(number)])
            self.files.push()
        self.files.settle()

    def write(self) -> None:
        self.files.take("log", [block(self.blocks)])
        self.files.push()
        self.blocks += 1

    def checkpoint(self) -> None:
        self.checkpoints.append((self.blocks, dict(self.files.sizes())))

    def kill(self) -> None:
        self.files.close()


def pack(path: Path, *, keep: bool = False) -> None:
    """As the keeper does; `keep`: up to the moment before the plain form goes."""
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
    if not keep:
        path.unlink()


def damage(world: World, how: str, amount: int) -> None:
    """What a kill, a power failure or a person may have done to the files meanwhile."""
    log, parts = world.log, parts_of(world.log)
    plain = [part for part in parts if not part.compressed and part.path.stat().st_size == part.end - part.start]
    match how:
        case "torn" if log.exists():
            os.truncate(log, max(0, log.stat().st_size - amount))
        case "zeros" if log.exists():
            with log.open("ab") as file:
                file.write(bytes(amount))
        case "closed" if log.exists() and log.stat().st_size and layout_of(log).end == len(world.text):
            layout = layout_of(log)
            log.rename(part_path(log, layout.base, layout.end))
        case "packed" if plain:
            pack(plain[amount % len(plain)].path)
        case "half packed" if plain:
            pack(plain[amount % len(plain)].path, keep=True)
            unfinished_path(compressed_path(plain[0])).write_bytes(b"\x1f\x8b")
        case "short part" if plain:
            os.truncate(plain[-1].path, max(0, plain[-1].path.stat().st_size - amount))
        case "lost part" if parts:
            parts[amount % len(parts)].path.unlink()
        case "edited" if log.exists() and log.stat().st_size:
            raw = bytearray(log.read_bytes())
            raw[amount % len(raw)] ^= 1
            log.write_bytes(raw)


HARMLESS = ("torn", "zeros", "closed", "packed", "half packed")
moves = st.lists(
    st.one_of(
        st.integers(1, 6).map(lambda count: ("write", "", count)),
        st.just(("checkpoint", "", 0)),
        st.tuples(st.just("kill"), st.sampled_from(HARMLESS), st.integers(1, 60)),
    ),
    max_size=14,
)


@given(moves=moves)
def test_any_sequence_of_writes_kills_and_restarts_makes_the_same_log(moves: list[tuple[str, str, int]]) -> None:
    """Rotated anywhere, killed anywhere, torn, half compressed: the parts together are what was written, always."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for move, how, amount in moves:
            if move == "write":
                for _ in range(amount):
                    world.write()
            elif move == "checkpoint":
                world.checkpoint()
            else:
                world.kill()
                damage(world, how, amount)
                world.start()
            assert whole_log(world.log) == world.text
            assert layout_of(world.log).holes() == []
            assert all(
                part.path.suffix == ".gz" or part.path.read_bytes()[-1:] == b"\n" for part in parts_of(world.log)
            )
        world.kill()


@given(
    counts=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    faults=st.lists(
        st.tuples(st.sampled_from([*HARMLESS, "short part", "lost part", "edited"]), st.integers(0, 60)), max_size=3
    ),
)
def test_what_was_lost_is_made_again_from_the_journal(counts: list[int], faults: list[tuple[str, int]]) -> None:
    """A part that is gone or shorter, an edited line: a restart that finds it goes back and writes it again.

    What it does not look at, because the newest checkpoint is behind it, stays in its place for `rankd verify`.
    """
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for count in counts:
            for _ in range(count):
                world.write()
            world.checkpoint()
        world.kill()
        for how, amount in faults:
            damage(world, how, amount)
        world.start()
        world.write()
        text = world.text
        assert layout_of(world.log).end == len(text)
        with LogReader(world.log) as log:
            for start, end in log.pieces():
                # What is there stands where it belongs, apart from what replaced letters before a checkpoint.
                there = log.read(start, end - start)
                assert len(there) == end - start
                assert there == text[start:end] or any(how in ("edited", "zeros") for how, _ in faults)
        world.kill()


def test_all_parts_moved_away(tmp_path: Path) -> None:
    """Into an archive, say: the log goes on where it was, and keeps its place also for the next restart."""
    world = World(tmp_path)
    for _ in range(9):
        world.write()
    world.checkpoint()
    base = layout_of(world.log).base
    for _ in range(3):
        world.kill()
        for part in parts_of(world.log):
            part.path.unlink()
        world.start()
        world.write()
        world.checkpoint()
    assert layout_of(world.log).start >= base
    assert whole_log(world.log) == world.text[layout_of(world.log).start :]
    world.kill()


def test_time_alone_rotates_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each span of time has its part; across a restart the file's own time tells; a pause makes no empty part."""
    now = [1_000.0]
    monkeypatch.setattr("rankd.collector.sinks.files.time.time", lambda: now[0])
    world = World(tmp_path)
    world.files.close()
    world.rotation = Rotation(every=60)
    world.start()
    for at in (1_000.0, 1_010.0, 1_030.0, 2_000.0, 2_001.0):
        now[0] = at
        world.write()
    ends = [part.end for part in parts_of(world.log)]
    assert ends == [len(b"".join(map(block, range(2)))), len(b"".join(map(block, range(3))))]
    world.kill()
    os.utime(world.log, (2_001, 2_001))
    world.start()
    now[0] = 2_099.0
    world.write()
    assert len(parts_of(world.log)) == 3
    assert whole_log(world.log) == world.text
    world.kill()


def test_one_open_file_a_log_and_none_for_its_parts(tmp_path: Path) -> None:
    """However many parts there are."""
    world = World(tmp_path)
    before = open_files()
    for _ in range(100):
        world.write()
    assert len(parts_of(world.log)) > 20
    assert open_files() <= before + 1
    world.kill()


def test_a_rename_that_fails_costs_nothing_but_a_longer_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Told once; the next write that can closes it."""
    world = World(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        for _ in range(10):
            world.write()
    assert parts_of(world.log) == []
    assert [record.message for record in caplog.records] == [
        f"{world.log} cannot be rotated now (No space left on device); it goes on growing"
    ]
    world.write()
    assert len(parts_of(world.log)) == 1
    assert whole_log(world.log) == world.text
    world.kill()


def test_what_something_else_cut_is_a_hole_not_another_place(tmp_path: Path) -> None:
    """logrotate's copytruncate beside it: the lines that are left keep their place in the log."""
    world = World(tmp_path)
    world.write()
    os.truncate(world.log, 0)
    world.write()
    world.write()
    world.write()
    world.write()
    (part, *_) = parts_of(world.log)
    assert part.path.read_bytes() == world.text[part.start : part.end]
    assert part.start == len(block(0))
    world.kill()


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_cut_across_parts_is_kept(tmp_path: Path, packed: bool) -> None:
    """The journal has lost its end, and with it what several parts of the log were made of."""
    world = World(tmp_path)
    world.checkpoint()
    for _ in range(10):
        world.write()
    whole = world.text
    world.kill()
    if packed:
        for part in parts_of(world.log):
            pack(part.path)
    world.blocks = 2
    world.start()
    assert whole_log(world.log) == world.text
    place = len(world.text)
    assert world.log.with_name(f"{world.log.name}.{place}.cut").read_bytes() == whole[place:]
    world.write()
    assert whole_log(world.log) == world.text
    world.kill()


def test_a_full_disk_around_a_rotation(tmp_path: Path) -> None:
    """Whichever byte the disk is full at, before and after a rename: retry goes on there, and parts end with lines."""
    for room in range(30, 90):
        folder = tmp_path / str(room)
        folder.mkdir()
        world = World(folder)
        with limit(resource.RLIMIT_FSIZE, room):
            for _ in range(12):
                try:
                    world.write()
                except OSError:
                    world.blocks += 1
        world.files.push()
        assert whole_log(world.log) == world.text
        assert all(part.path.read_bytes().endswith(b"\n") for part in parts_of(world.log))
        world.kill()


def rotated(output: Path, released: Iterable[object], size: int = 2_000) -> None:
    """These logs, rotated."""
    sink = SpecLogSink(output, index=True, rotation=Rotation(size=size))
    everything = list(released)
    for at in range(0, len(everything), 5):
        sink.write(everything[at : at + 5])  # type: ignore[arg-type]
    sink.close()


def test_all_text_logs_are_rotated_and_nothing_else(tmp_path: Path) -> None:
    """merged.log and each rank's; the index stays one file, and speaks of the log as one."""
    everything = [*begin(1), *steps(1, 40)]
    rotated(tmp_path, everything)
    for name, text in texts(everything).items():
        assert whole_log(tmp_path / name) == text
    assert len(parts_of(tmp_path / MERGED_LOG)) > len(parts_of(tmp_path / rank_log(0))) > 1
    logs = {log_of_part(path) or path for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.relative_to(tmp_path).as_posix() for path in logs} == set(texts(everything))
