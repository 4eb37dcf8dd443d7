"""Logs that several processes print: the same bytes as one prints, and what happens when a process or disk fails."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.support import PATIENCE, limit, wait_for

from rankd.collector import printers
from rankd.collector.entries import Entry, HeldOut, Opened, Stored
from rankd.collector.protocol.errors import JournalError, RankdError
from rankd.collector.protocol.records import Frame, NameTable
from rankd.collector.protocol.wire import Block, Goodbye, Table, encode_item
from rankd.collector.rebuild import rebuild
from rankd.collector.replay import show_nothing

from .streams import NAMES, Training, hello, training
from .written import entries_of, write_run

OTHERS = NameTable(("decoder.0", "层.权重", "mtp.0.weight", "back\\slash"))
EXPERTS = NameTable(("decoder.1", "decoder.0", "mtp.0.1"))


def sparse(rank: int, world_size: int) -> Training:
    """Blocks with every kind of frame; of some names only."""
    items = [
        encode_item(Table(1, 1, OTHERS)),
        encode_item(Table(2, 2, EXPERTS)),
        encode_item(Table(3, 3, NAMES)),
    ]
    ids = {OTHERS: 1, EXPERTS: 2, NAMES: 3}
    for step in (2, 3):
        frames = (
            Frame.named("local_norm", OTHERS, [float(step), float("nan")], present=[0, step]),
            Frame.lists("tpe", EXPERTS, [[1, 2], [3], [4, 5]], iteration=step),
            Frame.scalar("mine", 1e-9 * rank),
        )
        items.append(encode_item(Block(len(items) + 1, step, 1, complete=True, time=1.0, frames=frames), ids))
        of_step = (Frame.lists("max_attention_logit", NAMES, [[0.5], [], [7.0, rank]]), Frame.scalar("loss", 2.0))
        items.append(encode_item(Block(len(items) + 1, step, None, complete=True, time=1.0, frames=of_step), ids))
    items.append(encode_item(Goodbye(len(items) + 1, "done", 14, {}, 0.0)))
    return Training(hello(rank, world_size, process=2, total_steps=9), tuple(items))


def eventful(ranks: int) -> list[Entry]:
    """Two attempts; a rank that is given up and comes late, one that fails, lines about the run."""
    first = [training(rank, ranks, goodbye=None) for rank in range(ranks)]
    first[1] = training(1, ranks, goodbye="it failed", exception="a\nb\x1b")
    second = [sparse(rank, ranks) for rank in range(ranks)]
    *of_first, _ = entries_of(first)
    of_last = [entry for entry in of_first if isinstance(entry, Stored) and entry.session == ranks - 1]
    in_time = [entry for entry in of_first if entry not in of_last]
    of_second = [replace(e, session=e.session + ranks) if isinstance(e, Stored) else e for e in entries_of(second)]
    return [*in_time, HeldOut(ranks - 1, 3.0), *of_last, *of_second]


def logs(output: Path) -> dict[str, bytes]:
    """What the logs hold."""
    return {path.relative_to(output).as_posix(): path.read_bytes() for path in output.rglob("*.log")}


def printing(process: psutil.Process) -> list[psutil.Process]:
    """The processes that it has started, and that print."""
    found = []
    for child in process.children():
        try:
            if "rankd.collector.printer" in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            pass
    return found


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Many for a small run; and whatever a test does, no process is left."""
    monkeypatch.setattr(printers, "_BATCH_MOST", 7)
    yield
    assert printing(psutil.Process()) == []


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A run of some thousand blocks, 1,200 entries and several segments."""
    write_run(tmp_path / "out", entries_of([training(r, 3, steps=range(1, 400)) for r in range(3)]), segment_size=2**15)
    return tmp_path / "out"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_logs_are_the_collectors_own(tmp_path: Path, count: int) -> None:
    """Comments, late blocks, two attempts, tables with gaps: byte for byte what the collector and one process write."""
    write_run(tmp_path / "out", eventful(5), segment_size=2_000)
    rebuild(tmp_path / "out", tmp_path / "alone", show_nothing, 0)
    rebuild(tmp_path / "out", tmp_path / "again", show_nothing, count)
    written = logs(tmp_path / "out")
    assert logs(tmp_path / "again") == logs(tmp_path / "alone") == written
    for told in (
        b"# late attempt 1",
        b"# attempt 2",
        b"# rank_ended",
        b"# exception",
        b"# rank_held_out",
        b'"tpe": [[',
    ):
        assert told in written["merged.log"]


@pytest.mark.slow
def test_more_ranks_than_a_process_may_open_files(tmp_path: Path) -> None:
    """1,200 ranks with 200 open files at most."""
    entries = eventful(1_200)
    write_run(tmp_path / "out", entries, segment_size=2**17)
    with limit(resource.RLIMIT_NOFILE, 200):
        rebuild(tmp_path / "out", tmp_path / "again", show_nothing, 2)
    assert len(logs(tmp_path / "again")) == 1_201
    assert logs(tmp_path / "again") == logs(tmp_path / "out")


def test_a_run_in_which_nothing_was_released(tmp_path: Path) -> None:
    """As in one process there is a merged.log, and nothing in it."""
    write_run(tmp_path / "out", [Opened(hello(0, 2))])
    rebuild(tmp_path / "out", tmp_path / "alone", show_nothing, 0)
    rebuild(tmp_path / "out", tmp_path / "again", show_nothing, 2)
    assert logs(tmp_path / "again") == logs(tmp_path / "alone") == {"merged.log": b""}


def test_blocks_larger_than_all_pipes(tmp_path: Path) -> None:
    """A batch that fits no pipe is handed over in pieces, while answers come."""
    names = NameTable(tuple(f"layers.{i}" for i in range(40_000)))
    large = [training(rank, 2, steps=(1, 2), names=names) for rank in range(2)]
    write_run(tmp_path / "out", entries_of(large), segment_size=2**24)
    rebuild(tmp_path / "out", tmp_path / "again", show_nothing, 2)
    assert logs(tmp_path / "again") == logs(tmp_path / "out")


def test_no_other_process_can_be_started(output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then this one does all."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    rebuild(output, tmp_path / "again", show_nothing, 2)
    assert logs(tmp_path / "again") == logs(output)


# -- failures ---------------------------------------------------------------------------------------------------------


def check_whole(into: Path, written: dict[str, bytes]) -> None:
    """All logs end at the same place of the run, and up to there nothing is missing."""
    found = logs(into)
    assert found["merged.log"]
    assert len(found["merged.log"]) < len(written["merged.log"])
    for name, text in found.items():
        assert written[name].startswith(text)
        if name != "merged.log":
            prefix = f"[{name.partition('/')[0]}] ".encode()
            lines = [line for line in found["merged.log"].splitlines(keepends=True) if line.startswith(prefix)]
            assert text == b"".join(line.removeprefix(prefix) for line in lines)


def once(call: Callable[[], object]) -> Callable[[int, int], None]:
    """A progress that calls this at half of the way, once."""
    called: list[object] = []

    def progress(done: int, total: int) -> None:
        if 2 * done > total and not called:
            called.append(call())

    return progress


def test_a_killed_process_is_an_error(output: Path, tmp_path: Path) -> None:
    """SIGKILL, as of the system that is short of memory: it is said, and what is left of the logs is whole."""

    def kill() -> None:
        wait_for(lambda: logs(tmp_path / "again").get("merged.log"))
        printing(psutil.Process())[0].kill()

    with pytest.raises(RankdError, match=r"was ended by signal 9 \(SIGKILL; is the system short of memory\?\)"):
        rebuild(output, tmp_path / "again", once(kill), 2)
    check_whole(tmp_path / "again", logs(output))


def test_a_process_that_ends_by_itself_is_an_error(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It cannot even start: what it says about it is seen."""
    monkeypatch.setenv("PYTHONHOME", str(tmp_path / "nothing"))
    with pytest.raises(RankdError, match="a process that prints the logs ended with status 1"):
        rebuild(output, tmp_path / "again", show_nothing, 2)
    assert "encodings" in capfd.readouterr().err


def test_a_full_disk_is_told_as_by_one_process(output: Path, tmp_path: Path) -> None:
    """The same error, which names the log; what is left of the logs is whole."""
    for count in (0, 2):
        into = tmp_path / str(count)
        with limit(resource.RLIMIT_FSIZE, 50_000), pytest.raises(RankdError) as caught:
            rebuild(output, into, show_nothing, count)
        said = rf"the logs cannot be written into {into}: \[Errno 27\] File too large: '{into}/.*\.log'"
        assert re.fullmatch(said, str(caught.value))
        assert logs(into)["merged.log"]
    check_whole(tmp_path / "2", logs(output))


def test_damage_is_told_as_by_one_process(output: Path, tmp_path: Path) -> None:
    """The same error; what comes before is written."""
    damaged = sorted((output / ".rankd" / "journal").iterdir())[3]
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    said = []
    for count in (0, 2):
        with pytest.raises(JournalError) as caught:
            rebuild(output, tmp_path / str(count), show_nothing, count)
        said.append(str(caught.value))
        check_whole(tmp_path / str(count), logs(output))
    assert said[0] == said[1]
    assert re.search(r"00000004\.journal: byte \d+: expected a whole entry", said[0])
    assert (tmp_path / "2" / "merged.log").stat().st_size > logs(output)["merged.log"].find(b'"step": 50')


@contextmanager
def stopped_halfway(output: Path, into: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A rebuild whose printing processes stand still, so that it waits for them."""
    command = [sys.executable, "-m", "rankd.collector", "rebuild", str(output), "--into", str(into), "--printers", "2"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts it in the background would have it ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    parent = psutil.Process(process.pid)
    wait_for(lambda: len(printing(parent)) == 2)
    children = printing(parent)
    for child in children:
        child.suspend()
    wait_for(lambda: parent.status() == psutil.STATUS_SLEEPING)
    try:
        yield process, children
    finally:
        process.kill()
        process.wait()
        for child in children:
            if not gone(child):
                child.kill()


def gone(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_ctrl_c_ends_all_quietly(output: Path, tmp_path: Path) -> None:
    """Also processes that do not answer."""
    with stopped_halfway(output, tmp_path / "again") as (process, children):
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PATIENCE) == ("", "")
        assert process.returncode == 130
        assert all(map(gone, children))


def test_printing_processes_end_with_their_parent(output: Path, tmp_path: Path) -> None:
    """They are not told anything: its end is the end of their input."""
    with stopped_halfway(output, tmp_path / "again") as (process, children):
        process.kill()
        process.wait()
        for child in children:
            child.resume()
        wait_for(lambda: all(map(gone, children)))
        assert process.communicate() == ("", "")
