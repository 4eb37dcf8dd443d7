"""Rotated logs and what can happen to them, in real processes: nothing is lost and nothing doubled."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.collector.streams import training
from tests.faults.conftest import Site
from tests.support import PATIENCE, CollectorProcess, Peer, verified, wait_for, whole_log

from rankd.collector.cli import main
from rankd.collector.protocol.records import NameTable
from rankd.collector.protocol.wire import Data
from rankd.collector.sinks.keeper import deleted_of
from rankd.collector.sinks.parts import parts_of

pytestmark = pytest.mark.slow

LOGS = {"rotate_size": "64KiB"}
NAMES = NameTable(tuple(f"decoder.layers.{i}.self_attention.linear_qkv.weight" for i in range(40)))


class Reader:
    """A command that follows a log, and what it has printed so far."""

    def __init__(self, command: Sequence[str | Path]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
        self.seen = bytearray()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while data := self.process.stdout.read(2**16):
            self.seen += data

    def close(self) -> str:
        """What it said on standard error."""
        self.process.terminate()
        self.process.wait(PATIENCE)
        self._thread.join()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        with self.process.stdout, self.process.stderr:
            return self.process.stderr.read().decode()


def following(log: Path) -> list[Reader]:
    """Both that a person would use, from the first line on."""
    ours: list[str | Path] = [sys.executable, "-m", "rankd.collector", "tail", log.parent, "-f", "-n", "1000000"]
    return [Reader(["tail", "-n", "+1", "-F", log]), Reader(ours)]


def have_seen(readers: list[Reader], text: bytes) -> bool:
    """All of them have printed it, not long ago."""
    return all(text in reader.seen[-100_000:] for reader in readers)


def test_tail_through_rotation_compression_and_kills(tmp_path: Path) -> None:
    """COMPLAINTS 21: `tail -F` and `rankd tail -f` run through a dozen rotations and two kills of the collector."""
    output = tmp_path / "out"
    collector = CollectorProcess(output, journal={"segment_size": "16KiB"}, logs=LOGS)
    log = output / "merged.log"
    ranks = [training(rank, 2, steps=range(1, 81), names=NAMES) for rank in range(2)]
    peers: list[Peer] = []
    rounds = 20
    for number in range(rounds):
        if number in (7, 14):
            collector.kill()
            collector.start()
        if number in (0, 7, 14):
            peers += (anew := [Peer(collector) for _ in ranks])
            for peer, one in zip(anew, ranks, strict=True):
                peer.welcome(one.hello)
        for peer, one in zip(anew, ranks, strict=True):
            first, last = (len(one.items) * n // rounds for n in (number, number + 1))
            peer.say(Data(one.items[first:last]))
        if number == 0:
            wait_for(log.exists)  # otherwise tail(1) looks once in some seconds only, also later on
            readers = following(log)
        # tail(1) sees each part if it has the time to: it knows names, not bytes.
        wait_for(functools.partial(have_seen, readers, b'"step": %d }' % (4 * number + 3)))
    assert collector.ended()[0] == 0, collector.said()
    parts = parts_of(log)
    assert len(parts) >= 10
    assert sum(part.compressed for part in parts) >= 5
    text = whole_log(log)
    wait_for(lambda: all(len(reader.seen) >= len(text) for reader in readers))
    for reader in readers:
        said = reader.close()
        assert reader.seen == text, said
    assert "note:" not in said
    for peer in peers:
        peer.close()
    verified(output)


def test_killed_around_rotations_and_compression(site: Site) -> None:
    """Killed as soon as a part is closed, and as soon as one is being compressed: the logs are those of the journal."""
    collector = site.collector(journal={"segment_size": "32KiB"}, logs=LOGS)
    ranks = site.job.start(range(3), 3, last=10_000, params=50)

    def closed() -> int:
        return len(parts_of(site.merged))

    def begun() -> int:
        return len([*site.output.rglob("*.gz"), *site.output.rglob(".*.gz.unfinished")])

    for seen in (closed, begun, closed):
        before = seen()
        wait_for(lambda seen=seen, before=before: seen() > before)  # type: ignore[misc]
        collector.kill()
        assert whole_log(site.merged).startswith(b"[collector] # attempt 1 ")
        collector.start()
    site.job.finish()
    ranks.ended()
    assert collector.ended()[0] == 0, collector.said()
    assert "differs from the journal" not in collector.said()
    assert site.whole().notes == []
    assert main(["rebuild", str(site.output), "--into", str(site.root / "again")]) == 0
    for name in ("merged.log", "rank_0/monitor.log", "rank_1/monitor.log", "rank_2/monitor.log"):
        assert (site.root / "again" / name).read_bytes() == whole_log(site.output / name)


def test_a_disk_that_rotation_and_retention_keep_from_filling(site: Site, small_disk: Path) -> None:
    """Two megabytes hold a run that writes more; full and freed again in the middle, it goes on."""
    logs = {**LOGS, "keep_parts": 1}
    collector = site.collector(lost_after=5.0, journal={"segment_size": "64KiB", "keep": 0}, logs=logs)
    ranks = site.job.start(range(2), 2, last=10_000, params=50)

    def written() -> int:
        parts = parts_of(site.merged)
        return parts[-1].end if parts else 0

    wait_for(lambda: written() > 1_000_000)
    ballast = small_disk / "ballast"
    room = os.statvfs(small_disk)
    ballast.write_bytes(bytes(max(0, room.f_bavail * room.f_frsize - 20_000)))
    wait_for(lambda: "cannot be written" in collector.said())
    ballast.unlink()
    wait_for(lambda: "can be written again; going on" in collector.said())
    before = written()
    wait_for(lambda: written() > before + 1_500_000)
    site.job.finish()
    ranks.ended()
    assert collector.ended()[0] == 0, collector.said()
    check = verified(site.output)
    assert any("deleted as rankd.logs says" in note for note in check.notes)
    assert deleted_of(site.output)["merged.log"] > 1_000_000
    assert not site.has("# rank_lost")


def test_reading_beside_a_collector_that_rotates(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """`rankd verify`, `tail` and `parse` while parts are closed and compressed: no finding, and no line twice."""
    collector = site.collector(journal={"segment_size": "64KiB"}, logs=LOGS)
    ranks = site.job.start(range(2), 2, last=10_000, params=50)
    for number in range(1, 5):
        wait_for(lambda number=number: len(parts_of(site.merged)) >= 3 * number)  # type: ignore[misc]
        assert main(["verify", str(site.output)]) == 0, capsys.readouterr().out
        assert main(["parse", str(site.merged), "--metric", "local_loss", "-o", str(site.root / "losses")]) == 0
        losses = (site.root / "losses").read_text().splitlines()
        assert len(set(losses)) == len(losses)
    site.job.finish()
    ranks.ended()
    assert collector.ended()[0] == 0, collector.said()
    assert site.whole().notes == []
