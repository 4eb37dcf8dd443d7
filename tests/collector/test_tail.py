"""`rankd tail` as its users call it: processes, pipes, a terminal, a collector that is killed."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankd.collector.protocol.records import Frame, NameTable, Position, RankBlock
from rankd.collector.protocol.wire import Data
from rankd.collector.sinks.speclog import MERGED_LOG, SpecLogSink

from ..support import PATIENCE, CollectorProcess, Peer, wait_for
from .releases import begin, steps, write_logs
from .streams import training


def command(output: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "rankd.collector", "tail", str(output), *options]


def tail(output: Path, *options: str) -> str:
    """What the command prints."""
    done = subprocess.run(command(output, *options), capture_output=True, timeout=PATIENCE, check=True)
    assert done.stderr == b""
    return done.stdout.decode()


class Follower:
    """`rankd tail -f`, and what it has printed so far."""

    def __init__(self, output: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            command(output, "-f", *options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            # Where the tests run in the background, a shell has told them, and so their children, to ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.seen = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while data := self.process.stdout.read(65_536):
            self.seen += data

    def end(self) -> tuple[int, bytes]:
        """Ctrl-C; its exit status and what it said on standard error."""
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(PATIENCE)
        self._reader.join()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        said = self.process.stderr.read()
        self.process.stdout.close()
        self.process.stderr.close()
        return status, said


def same(follower: Follower, everything: bytearray) -> bool:
    return follower.seen == everything


@pytest.fixture
def follow() -> Iterator[Callable[..., Follower]]:
    """Makes followers that are ended after the test, without a word."""
    made: list[Follower] = []

    def make(output: Path, *options: str) -> Follower:
        made.append(Follower(output, *options))
        return made[-1]

    yield make
    for each in made:
        assert each.end() == (130, b"")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """The logs of a small run."""
    write_logs(tmp_path, [*begin(1), *steps(1, 9)])
    return tmp_path


@pytest.mark.slow
def test_the_last_lines_as_they_are(output: Path) -> None:
    """Ten lines unless told otherwise, without colours in a pipe, and with none asked for none."""
    lines = (output / MERGED_LOG).read_text().splitlines(keepends=True)
    assert tail(output) == "".join(lines[-10:])
    assert tail(output, "-n", "3") == "".join(lines[-3:])
    assert tail(output, "-n", "0") == ""
    assert tail(output, "-n", "100000") == "".join(lines)


def test_a_range_of_steps_is_given_whole(output: Path) -> None:
    """With --step and no -n, all of it."""
    lines = tail(output, "--step", "4:5", "--rank", "1", "--metric", "loss,mine").splitlines()
    assert lines == [
        '[rank_1] { "step": 4 }',
        "[rank_1] { step:[    4/    9], loss:   2.000000, lr: 1.000000e-03 }",
        '[rank_1] { "mine": 0.5 }',
        '[rank_1] { "step": 5 }',
        "[rank_1] { step:[    5/    9], loss:   2.500000, lr: 1.000000e-03 }",
        '[rank_1] { "mine": 0.5 }',
    ]


def test_json_has_a_strict_object_for_each_record(output: Path) -> None:
    """Only the records that were asked for, each with its position, values as printed."""
    found = [json.loads(line) for line in tail(output, "--json", "--step", "9", "--metric", "lr").splitlines()]
    assert found == [{"attempt": 1, "step": 9, "rank": rank, "metric": "lr", "value": 0.001} for rank in range(3)]
    first = json.loads(tail(output, "--json", "-n", "1000").splitlines()[0])
    assert first == {"comment": "attempt", "text": "1 world_size 3"}


def test_any_text_whatever_the_locale_is(output: Path) -> None:
    """A name in Chinese is found and printed as UTF-8 where the locale knows ASCII only."""
    options = ("--name", "层", "-n", "1")
    done = subprocess.run(
        command(output, *options), capture_output=True, timeout=PATIENCE, check=True, env={**os.environ, "LC_ALL": "C"}
    )
    assert done.stdout.decode().splitlines() == [
        '[rank_2] { "step": 9, "micro_step": 2 }',
        '[rank_2] { "local_norm": 层.权重:  11.250000 }',
    ]


def test_the_last_lines_of_a_metric_say_where_they_belong(output: Path) -> None:
    """-n cuts within a block: then the header of the first line comes before it."""
    lines = tail(output, "--rank", "1", "--metric", "loss,mine", "-n", "1").splitlines()
    assert lines == ['[rank_1] { "step": 9 }', '[rank_1] { "mine": 0.5 }']
    whole = tail(output, "--rank", "1", "--metric", "loss,mine", "-n", "3").splitlines()
    assert whole[:1] + whole[2:] == lines
    assert len(tail(output, "--rank", "1", "-n", "1").splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "hint"),
    [(("--metric", "los"), "; did you mean loss for los?"), (("--step", "99"), ""), (("--json", "--rank", "7"), "")],
)
def test_nothing_is_a_word_on_standard_error(output: Path, options: tuple[str, ...], hint: str) -> None:
    """A selection that leaves nothing is said, with the metric that was probably meant."""
    done = subprocess.run(command(output, *options), capture_output=True, timeout=PATIENCE, check=True, text=True)
    assert done.stdout == ""
    assert done.stderr == f"note: nothing that was recorded is what was asked for{hint}\n"


def test_without_a_log_it_says_where_it_looked(tmp_path: Path) -> None:
    """A wrong directory is an error for a person, with status 2."""
    done = subprocess.run(command(tmp_path), capture_output=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert b"merged.log is not there" in done.stderr


def test_wrong_options_are_errors_a_person_can_act_on(output: Path) -> None:
    """A list of ranks that is none: what was found and what is allowed."""
    done = subprocess.run(command(output, "--rank", "3-1"), capture_output=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert b"such as 0,2-3" in done.stderr


def test_it_follows_from_before_the_first_line_on(tmp_path: Path, follow: Callable[..., Follower]) -> None:
    """Started before the run, it waits for the log and then gives every line once."""
    follower = follow(tmp_path / "out", "-n", "1000000")
    write_logs(tmp_path / "out", [*begin(1), *steps(1, 30)], each=3)
    text = (tmp_path / "out" / MERGED_LOG).read_bytes()
    wait_for(lambda: follower.seen == text)


def test_following_goes_on_where_history_ended(output: Path, follow: Callable[..., Follower]) -> None:
    """History and what comes are one sequence, filtered alike."""
    follower = follow(output, "-n", "2", "--metric", "mine", "--rank", "1")
    wait_for(lambda: follower.seen.count(b"mine") == 1)
    write_logs(output, steps(10, 40))
    wait_for(lambda: follower.seen.count(b"mine") == 32)
    numbers = [int(line.split(b":")[1].rstrip(b" }\n")) for line in follower.seen.splitlines() if b'"step"' in line]
    assert numbers == list(range(9, 41))


def test_rotation_while_it_runs(output: Path, follow: Callable[..., Follower]) -> None:
    """Renamed and made anew, and copied and truncated, as log rotation does: nothing lost, nothing doubled."""
    log = output / MERGED_LOG
    everything = bytearray(log.read_bytes())
    follower = follow(output, "-n", "1000000")
    for number in range(6):
        wait_for(functools.partial(same, follower, everything))
        if number % 2:
            log.rename(output / f"merged.log.{number}")
        else:
            log.write_bytes(b"")
        sink = SpecLogSink(output)
        sink.write(steps(10 + number, 10 + number))
        sink.close()
        everything += log.read_bytes()
    wait_for(functools.partial(same, follower, everything))


def test_a_reader_that_goes_away_ends_it(output: Path) -> None:
    """`rankd tail -f … | head -1`: it ends by itself, with status 0 and without a word, also when no line comes."""
    process = subprocess.Popen(command(output, "-f"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(PATIENCE) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_reader_that_goes_away_in_the_middle_of_history(output: Path) -> None:
    """More than a pipe holds, and nobody there: status 0, not a traceback."""
    write_logs(output, steps(10, 400))
    process = subprocess.Popen(command(output, "-n", "1000000"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(PATIENCE) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


def read_terminal(fd: int) -> bytes:
    """All that was written to a terminal whose other end is closed."""
    shown = b""
    with contextlib.suppress(OSError):  # EIO is how Linux says that the other end has gone
        while data := os.read(fd, 65_536):
            shown += data
    return shown


@pytest.mark.parametrize("no_color", ["", "1"])
def test_colours_on_a_terminal(output: Path, no_color: str) -> None:
    """On a terminal the prefix is coloured by rank, unless NO_COLOR says no; the text stays the same."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "NO_COLOR": no_color}
    process = subprocess.Popen(command(output, "-n", "40"), stdout=theirs, env=environment)
    os.close(theirs)
    shown = read_terminal(ours)
    assert process.wait(PATIENCE) == 0
    os.close(ours)
    plain = tail(output, "-n", "40").encode().replace(b"\n", b"\r\n")
    if no_color:
        assert shown == plain
    else:
        colours = {line[: line.index(b"m") + 1] for line in shown.splitlines()}
        assert len(colours) == 3
        assert re.sub(rb"\x1b\[[0-9;]*m", b"", shown) == plain


@pytest.mark.slow
def test_a_collector_that_is_killed_and_started_again(tmp_path: Path, follow: Callable[..., Follower]) -> None:
    """Through SIGKILL and restart of the collector the follower sees merged.log, every byte once."""
    collector = CollectorProcess(tmp_path / "out", journal={"segment_size": 8192})
    log = tmp_path / "out" / MERGED_LOG
    follower = follow(tmp_path / "out", "-n", "1000000")
    ranks = [training(rank, 2, steps=range(1, 60)) for rank in range(2)]
    made: list[Peer] = []
    for round_ in range(3):
        for one in ranks:
            made.append(Peer(collector))
            acked = made[-1].welcome(one.hello).acked
            made[-1].say(Data(one.items[acked : len(one.items) * (round_ + 1) // 3]))
        if round_ < 2:
            wait_for(lambda: follower.seen and follower.seen == log.read_bytes())
            collector.kill()
            collector.start()
    collector.ends(0)
    wait_for(lambda: follower.seen == log.read_bytes())
    for peer in made:
        peer.close()


def test_long_lines_of_many_ranks_stay_whole(tmp_path: Path, follow: Callable[..., Follower]) -> None:
    """Lines of 8 kB of 8 ranks, all at once: each comes whole, with its rank."""
    tokens = Frame.lists("tpe", NameTable(("decoder.0",)), [[1_000_000] * 1_000], 1)
    blocks = [RankBlock(rank, Position(1, step, 1), (tokens,)) for step in range(1, 40) for rank in range(8)]
    follower = follow(tmp_path, "-n", "1000000", "--metric", "tpe")
    write_logs(tmp_path, blocks, each=8)
    text = (tmp_path / MERGED_LOG).read_bytes()
    wait_for(lambda: len(follower.seen) == len(text))
    assert follower.seen == text
    assert max(map(len, text.splitlines())) > 8_000
