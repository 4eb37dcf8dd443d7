"""The spool file: what is there after the process is gone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankd.agent import spool as spool_module
from rankd.agent.outbox import Outbox
from rankd.agent.spool import Spool, find_spools, remove_unfinished
from rankd.agent.store import LEAST_STORE_BYTES, Entry
from rankd.collector.protocol.assembly import block_head, join_block, scalar_part
from rankd.collector.protocol.errors import ProtocolError, VersionError
from rankd.collector.protocol.records import Level
from rankd.collector.protocol.wire import Block, Hello, Note, Tables, decode_item, encode_item, number_item

HELLO = Hello(bytes(range(16)), "run", 3, 8, 1, "here", 4_711, 1.5, 100, {"mindspore": "2.10"})

CHILD = """
import sys
from pathlib import Path
from rankd.agent.outbox import Outbox
from rankd.agent.spool import Spool
from rankd.collector.protocol.wire import Hello, Note, encode_item

spool = Spool.create(Path(sys.argv[1]), 2**16, Hello(bytes(16), "run", 0, 1, 1, "here", 1, 0.0))
outbox = Outbox(spool)
n = 0
while True:
    n += 1
    assert outbox.put((encode_item(Note(0, n, None, "test", str(n) * 200, 0.0)),))
    if n % 20 == 0:
        outbox.take()
        outbox.acked(n - 10)
    if n == 500:
        print("going", flush=True)
"""


def note(text: str) -> bytes:
    return encode_item(Note(0, 1, None, "test", text, 0.1))


def fill(path: Path, texts: list[str]) -> None:
    """What a process leaves that puts `texts` and is killed."""
    spool = Spool.create(path, LEAST_STORE_BYTES, HELLO)
    outbox = Outbox(spool)
    for text in texts:
        assert outbox.put((note(text),))
    spool.close(delivered=False)


def recovered(path: Path) -> list[str]:
    spool = Spool.open(path)
    raws = [spool.read(entry) for entry in spool.entries]
    spool.close(delivered=False)
    items = [decode_item(raw, Tables()) for raw in raws]
    assert [i.seq for i in items] == [e.seq for e in spool.entries]
    return [i.text for i in items if isinstance(i, Note)]


def test_what_was_not_acknowledged_is_recovered(tmp_path: Path) -> None:
    """Who the process was and all its items after the last acknowledged one come back, in order, and can be sent."""
    path = tmp_path / "a.spool"
    spool = Spool.create(path, LEAST_STORE_BYTES, HELLO)
    outbox = Outbox(spool)
    for i in range(10):
        outbox.put((note(str(i)),))
    outbox.take()
    outbox.acked(4)
    spool.close(delivered=False)

    spool = Spool.open(path)
    assert spool.hello == HELLO
    outbox = Outbox.recovered(spool, spool.entries, spool.next_seq)
    assert outbox.next_seq == 11
    items = [decode_item(raw, Tables()) for raw in outbox.take()]
    assert [i.seq for i in items] == list(range(5, 11))
    assert not outbox.put((note("new"),))
    outbox.acked(10)
    outbox.close()
    assert not path.exists()


def test_a_journal_that_is_ahead_of_the_file_frees_it(tmp_path: Path) -> None:
    """Where the machine went down the file may lack its newest items; the collector's word that it has them counts."""
    fill(tmp_path / "a.spool", ["a", "b"])
    spool = Spool.open(tmp_path / "a.spool")
    outbox = Outbox.recovered(spool, spool.entries, spool.next_seq)
    outbox.rewind(7)
    assert outbox.held_items == 0
    outbox.close()


def test_what_is_remembered_lies_beside_the_spool_and_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For this user only, as long as the spool; what does not fit, or cannot be written, is left out of the file, but a
    process that lives knows it.
    """
    spool = Spool.create(tmp_path / "a.spool", LEAST_STORE_BYTES, HELLO)
    assert list(spool.remembered()) == []
    monkeypatch.setattr(spool_module, "_MOST_TABLES_BYTES", 250)
    spool.remember(1, b"a" * 100)
    spool.remember(2, b"b" * 200)
    spool.remember(3, b"c" * 100)
    beside = tmp_path / "a.spool.tables"
    assert beside.stat().st_mode & 0o777 == 0o600
    assert list(spool.remembered()) == [(1, b"a" * 100), (2, b"b" * 200), (3, b"c" * 100)]
    assert find_spools(tmp_path) == [tmp_path / "a.spool"]
    spool.close(delivered=False)
    spool = Spool.open(tmp_path / "a.spool")
    assert list(spool.remembered()) == [(1, b"a" * 100), (3, b"c" * 100)]
    spool.close(delivered=True)
    assert list(tmp_path.iterdir()) == []
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch()
    spool = Spool.create(tmp_path / "a.spool", LEAST_STORE_BYTES, HELLO)
    beside.symlink_to(elsewhere)
    spool.remember(1, b"a")
    assert elsewhere.stat().st_size == 0
    spool.close(delivered=False)
    spool = Spool.open(tmp_path / "a.spool")
    assert list(spool.remembered()) == []
    spool.close(delivered=True)


def test_a_living_process_remembers_what_somebody_has_removed(tmp_path: Path) -> None:
    """Who tidies a temporary directory takes what nobody has touched for days. All that is recorded later needs it."""
    spool = Spool.create(tmp_path / "a.spool", LEAST_STORE_BYTES, HELLO)
    spool.remember(1, b"a")
    (tmp_path / "a.spool.tables").unlink()
    spool.remember(7, b"b")
    assert list(spool.remembered()) == [(1, b"a"), (7, b"b")]
    spool.close(delivered=False)
    spool = Spool.open(tmp_path / "a.spool")
    assert list(spool.remembered()) == [(1, b"a"), (7, b"b")]
    spool.close(delivered=True)


def test_tables_without_their_spool_are_removed(tmp_path: Path) -> None:
    """What a kill between the two removals has left; those of a spool that is there stay."""
    spool = Spool.create(tmp_path / "a.spool", LEAST_STORE_BYTES, HELLO)
    spool.remember(1, b"a")
    (tmp_path / "b.spool.tables").write_bytes(b"b")
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.spool", "a.spool.tables"]
    spool.close(delivered=True)


@pytest.mark.slow
def test_kill_while_appending(tmp_path: Path) -> None:
    """SIGKILL in the middle of appending: all complete records after the last acknowledgement are there."""
    path = tmp_path / "a.spool"
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"going\n"
            with pytest.raises(BlockingIOError):
                Spool.open(path)
            child.kill()
            assert child.wait(10) == -signal.SIGKILL
        spool = Spool.open(path)
        assert 10 <= len(spool.entries) <= 31
        items = [decode_item(spool.read(entry), Tables()) for entry in spool.entries]
        assert [i.seq for i in items] == list(range(items[0].seq, items[0].seq + len(items)))
        assert all(isinstance(i, Note) and i.text == str(i.seq) * 200 and i.step == i.seq for i in items)
        spool.close(delivered=True)


def gathered(path: Path) -> list[tuple[int, list[str]]]:
    """The number of each recovered block, and what it holds."""
    spool = Spool.open(path)
    items = [decode_item(spool.read(entry), Tables()) for entry in spool.entries]
    spool.close(delivered=False)
    return [(i.seq, [frame.metric for frame in i.frames]) for i in items if isinstance(i, Block)]


def test_gathered_scalars_are_recovered_once_and_up_to_the_torn_one(tmp_path: Path) -> None:
    """Those of earlier blocks lie in the ring by then, and not in the notebook."""
    path = tmp_path / "a.spool"
    spool = Spool.create(path, LEAST_STORE_BYTES, HELLO)
    outbox = Outbox(spool)
    for name in ("old_1", "old_2", "old_3"):
        assert outbox.hold(scalar_part(name, Level.STEP, 1.0), (1, None), 0.0)
    assert outbox.put((note("between"),))
    ends = []
    for name, level in (("a", Level.STEP), ("b", Level.MICRO_STEP), ("c", Level.STEP)):
        assert outbox.hold(scalar_part(name, level, 1.0), (2, None if level is Level.STEP else 4), 0.0)
        ends.append(spool._jotted)
    spool.close(delivered=False)
    whole = path.read_bytes()

    old = (1, ["old_1", "old_2", "old_3"])
    assert gathered(path) == [old, (3, ["a", "c"]), (4, ["b"])]
    assert gathered(path) == [old, (3, ["a", "c"]), (4, ["b"])]
    for torn, expected in zip(ends, ([], [(3, ["a"])], [(3, ["a"]), (4, ["b"])]), strict=True):
        path.write_bytes(whole[: torn - 1] + b"\xff" + whole[torn:])
        assert gathered(path) == [old, *expected]


def test_a_spool_without_a_notebook_is_read(tmp_path: Path) -> None:
    """As an older rankd has left it."""
    path = tmp_path / "a.spool"
    fill(path, ["first", "last"])
    whole = path.read_bytes()
    head, about = whole[:28], whole[128:]
    start = struct.unpack_from("<I", head, 12)[0]
    about = about[: struct.unpack_from("<I", head, 24)[0]]
    older = head[:12] + struct.pack("<I", 4_096) + head[16:28]
    older += struct.pack("<I", zlib.crc32(about, zlib.crc32(older)))
    path.write_bytes(older + whole[32:4_096] + whole[start:])
    assert recovered(path) == ["first", "last"]


def test_torn_at_every_byte(tmp_path: Path) -> None:
    """Wherever the last record is damaged, all before it comes back, and not it."""
    path = tmp_path / "a.spool"
    fill(path, ["first", "second", "last"])
    spool = Spool.open(path)
    last, start = spool.entries[-1], spool._start
    spool.close(delivered=False)
    whole = path.read_bytes()
    assert recovered(path) == ["first", "second", "last"]
    for offset in range(last.where, last.where + spool.cost(last.size)):
        torn = bytearray(whole)
        torn[start + offset] ^= 0x55
        path.write_bytes(torn)
        assert recovered(path) == ["first", "second"], offset


def test_cut_at_every_byte(tmp_path: Path) -> None:
    """A record of which only the first bytes were written is not there."""
    path = tmp_path / "a.spool"
    fill(path, ["first", "last"])
    spool = Spool.open(path)
    last, start = spool.entries[-1], spool._start
    spool.close(delivered=False)
    whole = path.read_bytes()
    end = start + last.where + spool.cost(last.size)
    for written in range(spool.cost(last.size)):
        cut = start + last.where + written
        path.write_bytes(whole[:cut] + bytes(end - cut) + whole[end:])
        assert recovered(path) == ["first"], written


def test_a_torn_header_or_tail_is_not_believed(tmp_path: Path) -> None:
    """A damaged header is refused; of two tails the whole one counts; with both damaged the file is refused."""
    path = tmp_path / "a.spool"
    spool = Spool.create(path, LEAST_STORE_BYTES, HELLO)
    outbox = Outbox(spool)
    for text in "abc":
        outbox.put((note(text),))
    outbox.take()
    outbox.acked(1)
    outbox.acked(2)
    spool.close(delivered=False)
    whole = path.read_bytes()
    assert recovered(path) == ["c"]

    def damaged(*places: int) -> None:
        torn = bytearray(whole)
        for place in places:
            torn[place] ^= 0x55
        path.write_bytes(torn)

    for place in [*range(32), 130]:
        damaged(place)
        with pytest.raises(ProtocolError):
            recovered(path)
    for place in range(20):
        damaged(64 + place)
        older = recovered(path)
        damaged(96 + place)
        newer = recovered(path)
        assert {tuple(older), tuple(newer)} == {("c",), ("b", "c")}
        damaged(64 + place, 96 + place)
        with pytest.raises(ProtocolError):
            recovered(path)


def test_another_version_is_said(tmp_path: Path) -> None:
    """A spool of another version is refused with both versions named."""
    path = tmp_path / "a.spool"
    fill(path, ["a"])
    raw = bytearray(path.read_bytes())
    raw[8] = 9
    path.write_bytes(raw)
    with pytest.raises(VersionError, match="version 9, this is version 1"):
        Spool.open(path)


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"rankdspl", bytes(8_192)])
def test_what_is_no_spool_is_refused(tmp_path: Path, content: bytes) -> None:
    """An empty, foreign or unfinished file raises ProtocolError and stays as it is."""
    path = tmp_path / "a.spool"
    path.write_bytes(content)
    with pytest.raises(ProtocolError):
        Spool.open(path)
    assert path.read_bytes() == content


def test_mode_and_cleanup(tmp_path: Path) -> None:
    """The file is for this user only, holds its space from the start, and goes when all is delivered."""
    path = tmp_path / "a.spool"
    spool = Spool.create(path, 2**20, HELLO)
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 >= 2**20
    assert find_spools(tmp_path) == [path]
    outbox = Outbox(spool)
    outbox.finish("end", 0.0)
    outbox.take()
    outbox.acked(1)
    outbox.close()
    outbox.close()
    assert find_spools(tmp_path) == []
    assert find_spools(tmp_path / "none") == []


@pytest.mark.parametrize("acknowledge", [True, False])
def test_the_file_stays_unless_all_is_over(tmp_path: Path, acknowledge: bool) -> None:
    """Without the goodbye, or with an item left, closing keeps the file for recovery."""
    outbox = Outbox(Spool.create(tmp_path / "a.spool", 2**20, HELLO))
    outbox.put((note("a"),))
    outbox.take()
    if acknowledge:
        outbox.acked(1)
    else:
        outbox.finish("end", 0.0)
    outbox.close()
    assert (tmp_path / "a.spool").exists()


def test_no_room_shows_at_creation(tmp_path: Path) -> None:
    """More than the disk has is an OSError at creation, and leaves no file."""
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(OSError) as error:
        Spool.create(tmp_path / "a.spool", free + 2**40, HELLO)
    assert error.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert find_spools(tmp_path) == []


def test_never_over_an_existing_file(tmp_path: Path) -> None:
    """A path that exists is refused, and its content stays."""
    path = tmp_path / "a.spool"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        Spool.create(path, 2**20, HELLO)
    assert path.read_bytes() == b"precious"


def test_child_of_a_fork_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A worker that outlives its parent does not keep the spool from being recovered."""
    path = tmp_path / "a.spool"
    spool = Spool.create(path, 2**20, HELLO)
    ready, tell = os.pipe()
    stop, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            spool.abandon()
            os.close(end)
            os.write(tell, b"!")
            os.read(stop, 1)
        os._exit(0)
    assert os.read(ready, 1) == b"!"
    spool.close(delivered=False)
    Spool.open(path).close(delivered=True)
    os.close(end)
    os.waitpid(pid, 0)
    for fd in (ready, tell, stop):
        os.close(fd)


def test_a_locked_file_is_left_alone(tmp_path: Path) -> None:
    """A file that somebody holds is not recovered; once let go, it is."""
    path = tmp_path / "a.spool"
    fill(path, ["a"])
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            Spool.open(path)
    assert recovered(path) == ["a"]


def test_an_interrupted_put_leaves_no_trace(tmp_path: Path) -> None:
    """What the store was given when Ctrl-C came is written over by the next put, which gets its number."""
    path = tmp_path / "a.spool"
    spool = Spool.create(path, LEAST_STORE_BYTES, HELLO)
    outbox = Outbox(spool)
    outbox.put((note("a"),))
    outbox._store.append(2, number_item(note("interrupted"), 2), outbox._newest())
    outbox.put((note("b"),))
    outbox.put((note("c"),))
    spool.close(delivered=False)
    assert recovered(path) == ["a", "b", "c"]


@given(sizes=st.lists(st.integers(1, 3_000), min_size=1, max_size=60), keep=st.integers(1, 4))
def test_the_ring_goes_round(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], keep: int) -> None:
    """Whatever the sizes and wherever the ring wraps, the newest items are read back, alive and after a crash."""
    path = tmp_path_factory.mktemp("ring") / "a.spool"
    spool = Spool.create(path, LEAST_STORE_BYTES, HELLO)
    held: list[tuple[Entry, bytes]] = []
    for seq, size in enumerate(sizes, 1):
        raw = bytes([seq]) * size
        held.append((spool.append(seq, raw, held[-1][0] if held else None), raw))
        if len(held) > keep:
            spool.free(held.pop(0)[0])
        assert [spool.read(entry) for entry, _ in held] == [raw for _, raw in held]
        assert spool.room() == LEAST_STORE_BYTES - sum(spool.cost(len(raw)) for _, raw in held)
    spool.close(delivered=False)
    spool = Spool.open(path)
    assert [(entry, spool.read(entry)) for entry in spool.entries] == held
    spool.close(delivered=True)


def test_killed_between_the_appends_of_two_gathered_blocks(tmp_path: Path) -> None:
    """The first is in the ring, the second only in the notebook, between parts of the first."""
    spool = Spool.create(tmp_path / "x.spool", LEAST_STORE_BYTES, HELLO)
    head = block_head(3, 1, 0.0), block_head(3, 2, 0.0)
    parts = [scalar_part(name, Level.MICRO_STEP, 1.0) for name in ("a", "b", "c", "d")]
    blocks = [join_block(head[0], parts[::2]), join_block(head[1], parts[1::2])]
    for seq, jotted in ((1, [head[0], parts[0]]), (2, [head[1], parts[1]]), (1, parts[2:3]), (2, parts[3:])):
        assert spool.jot(seq, jotted)
    spool.append(1, number_item(blocks[0], 1), None)
    spool.close(delivered=False)
    left = Spool.open(tmp_path / "x.spool")
    assert [left.read(entry) for entry in left.entries] == [number_item(raw, n) for n, raw in enumerate(blocks, 1)]
    left.close(delivered=True)
