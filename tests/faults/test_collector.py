"""What can happen to the collector while ranks train, in real processes: nothing is lost and nothing doubled."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.faults.conftest import Site
from tests.faults.proxy import Proxy
from tests.support import wait_for

from rankd.collector.cli import main
from rankd.collector.entries import Checkpoint, decode_entry
from rankd.collector.journal import read_segment

# A clock that runs ahead, for everything in the process.
AHEAD = "import sys, time; t = time.time; time.time = lambda: t() + 11; from rankd.collector.cli import main; main()"

pytestmark = pytest.mark.slow


def remount(where: Path, how: str) -> None:
    """Change a mounted file system to `ro` or `rw`."""
    subprocess.run(["mount", "-o", f"remount,{how}", where], check=True)


def test_sigkill_again_and_again(site: Site) -> None:
    """Killed three times while two ranks push: every start goes on, and the end is as if nothing had happened."""
    collector = site.collector()
    ranks = site.job.start(range(2), 2, last=10_000)
    for _ in range(3):
        before = site.lines()
        wait_for(lambda before=before: site.lines() > before + 20)  # type: ignore[misc]
        collector.kill()
        collector.start()
    site.job.finish()
    ranks.ended()
    collector.ends(0)
    assert site.whole().notes == []


def test_restart_by_hand(site: Site) -> None:
    """SIGTERM, a while without a collector, and a start: what was pushed meanwhile is there."""
    collector = site.collector()
    ranks = site.job.start(range(2), 2, last=10_000)
    wait_for(lambda: site.lines() > 20)
    collector.process.send_signal(signal.SIGTERM)
    assert collector.ended()[0] == 128 + signal.SIGTERM
    alone_since = ranks.pushed()
    wait_for(lambda: ranks.pushed() > alone_since + 20)
    collector.start()
    site.job.finish()
    ranks.ended()
    collector.ends(0)
    site.whole()


@pytest.mark.parametrize("lost_after", [60.0, 1.0], ids=["shorter", "longer"])
def test_sigstop_and_cont(site: Site, lost_after: float) -> None:
    """Stopped for shorter and for longer than `lost_after`: the ranks were not silent, it was deaf; none is lost."""
    collector = site.collector(lost_after=lost_after)
    ranks = site.job.start(range(2), 2, last=10_000)
    wait_for(lambda: site.lines() > 20)
    collector.process.send_signal(signal.SIGSTOP)
    over, pushed = time.monotonic() + 2.5, ranks.pushed()
    wait_for(lambda: time.monotonic() > over and ranks.pushed() > pushed + 20)
    collector.process.send_signal(signal.SIGCONT)
    site.job.finish()
    ranks.ended()
    collector.ends(0)
    assert not site.has("# rank_lost")
    assert site.whole().summary()[-1].endswith(" 0 blocks late")


def test_disk_full_and_freed(site: Site, small_disk: Path) -> None:
    """COMPLAINTS 23: training goes on, the warning names the place; once there is room the log goes on, whole."""
    ballast = small_disk / "ballast"
    collector = site.collector(lost_after=1.0)
    ranks = site.job.start(range(2), 2, last=10_000)
    wait_for(lambda: site.lines() > 20)
    room = os.statvfs(small_disk)
    ballast.write_bytes(bytes(max(0, room.f_bavail * room.f_frsize - 50_000)))
    wait_for(lambda: "cannot be written" in collector.said())
    assert f"in {site.output} cannot be written (No space left on device; " in collector.said()
    full_since, over = ranks.pushed(), time.monotonic() + 2
    wait_for(lambda: ranks.pushed() > full_since + 20 and time.monotonic() > over)
    ballast.unlink()
    wait_for(lambda: "can be written again; going on" in collector.said())
    site.job.finish()
    ranks.ended()
    assert collector.ended()[0] == 0, collector.said()
    assert not site.has("# rank_lost")
    site.whole()


def test_disk_full_from_the_start(site: Site, small_disk: Path) -> None:
    """One error that names the place; once there is room it starts, and has what the ranks have pushed meanwhile."""
    ballast = small_disk / "ballast"
    room = os.statvfs(small_disk)
    ballast.write_bytes(bytes(room.f_bavail * room.f_frsize))
    collector = site.collector()
    ranks = site.job.start(range(2), 2, last=20)
    status, said = collector.ended()
    assert status == 2
    assert "Traceback" not in said
    assert f"{site.output}" in said
    assert "No space left on device" in said
    ballast.unlink()
    collector.start()
    ranks.ended()
    collector.ends(0)
    site.whole()


def test_disk_full_while_it_recovers(site: Site, small_disk: Path) -> None:
    """Started again on a full disk with a log to complete: it waits for room, and then has everything."""
    ballast = small_disk / "ballast"
    collector = site.collector()
    ranks = site.job.start(range(2), 2, last=400)
    wait_for(lambda: site.lines() > 200)
    collector.kill()
    os.truncate(site.merged, 0)
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4_096)):
            pass
    # Each file's last page is room.
    os.truncate(site.merged, 0)
    collector.launch()
    wait_for(lambda: "cannot be written" in collector.said())
    assert collector.process.poll() is None, collector.said()
    ballast.unlink()
    ranks.ended()
    assert collector.ended()[0] == 0, collector.said()
    site.whole()


def test_read_only_directory(site: Site, small_disk: Path) -> None:
    """One error that names the place; once it can be written the collector starts and misses nothing."""
    remount(small_disk, "ro")
    collector = site.collector()
    ranks = site.job.start(range(2), 2, last=20)
    status, said = collector.ended()
    assert status == 2
    assert f"the output directory {site.output} cannot be used: Read-only file system; check rankd.output" in said
    remount(small_disk, "rw")
    collector.start()
    ranks.ended()
    collector.ends(0)
    site.whole()


def test_torn_tails_of_journal_and_logs(site: Site) -> None:
    """COMPLAINTS 22: what a kill in the middle of each write leaves is cut and written again."""
    collector = site.collector()
    ranks = site.job.start(range(2), 2, last=10_000)
    wait_for(lambda: site.lines() > 20)
    collector.kill()
    (segment,) = (site.output / ".rankd" / "journal").iterdir()
    with segment.open("ab") as file:
        file.write(segment.read_bytes()[16:40])  # the head of an entry, and not all of its payload
    for log in (site.merged, site.output / "rank_0" / "monitor.log"):
        os.truncate(log, log.stat().st_size - 7)
    collector.start()
    site.job.finish()
    ranks.ended()
    collector.ends(0)
    assert site.whole().notes == []


def test_a_log_cut_behind_the_newest_checkpoint(site: Site) -> None:
    """Old segments are deleted, and a log lacks what the newest checkpoint counts on: it is made again."""
    collector = site.collector(journal={"segment_size": "16KiB", "keep": 0})
    ranks = site.job.start(range(2), 2, last=10_000)
    wait_for(lambda: min(journal_of(site).glob("*.journal")).stem > "00000003")
    collector.kill()
    newest = sorted(journal_of(site).glob("*.journal"))[-1]
    checkpoint = decode_entry(next(payload for _, payload in read_segment(newest)))
    assert isinstance(checkpoint, Checkpoint)
    os.truncate(site.merged, checkpoint.sizes["merged.log"] - 7)
    collector.start()
    site.job.finish()
    ranks.ended()
    assert collector.ended()[0] == 0, collector.said()
    site.whole()


def test_a_log_that_stood_still_is_cut_behind_many_checkpoints(site: Site) -> None:
    """A rank is stopped, so the last checkpoints all say one size, and none of them helps: an older one is kept."""
    collector = site.collector(journal={"segment_size": "16KiB", "keep": 0})
    ranks = [site.job.start([rank], 2, last=10_000) for rank in range(2)]
    wait_for(lambda: newest_segment(site) > 3)
    ranks[1].stop()
    wait_for(lambda: standing_still(site) > 2)
    collector.kill()
    os.truncate(site.merged, site.merged.stat().st_size - 7)
    collector.start()
    ranks[1].go_on()
    site.job.finish()
    for each in ranks:
        each.ended()
    collector.ends()
    site.whole()


def newest_segment(site: Site) -> int:
    """Its number."""
    return max((int(path.stem) for path in journal_of(site).glob("*.journal")), default=0)


def standing_still(site: Site) -> int:
    """How many checkpoints say that merged.log has the size that it has now."""
    entries = [next(read_segment(path), None) for path in journal_of(site).glob("*.journal")]
    checkpoints = [decode_entry(entry[1]) for entry in entries if entry is not None]
    size = site.merged.stat().st_size
    return sum(isinstance(c, Checkpoint) and c.sizes.get("merged.log") == size for c in checkpoints)


def test_a_log_that_was_emptied_and_cannot_be_made_again(site: Site) -> None:
    """Its segments are deleted: the collector says how much is missing, and goes on."""
    collector = site.collector(journal={"segment_size": "16KiB", "keep": 0})
    ranks = site.job.start(range(2), 2, last=10_000)
    wait_for(lambda: min(journal_of(site).glob("*.journal")).stem > "00000001")
    collector.kill()
    os.truncate(site.merged, 0)
    collector.start()
    site.job.finish()
    ranks.ended()
    assert collector.ended()[0] == 0, collector.said()
    assert "of the log cannot be found (`rankd rebuild` makes it again)" in collector.said()


def journal_of(site: Site) -> Path:
    return site.output / ".rankd" / "journal"


def test_port_taken(site: Site) -> None:
    """COMPLAINTS 12: a stranger has the port: one error that names the setting; later it starts and misses nothing."""
    with socket.create_server(("127.0.0.1", site.port)):
        collector = site.collector()
        ranks = site.job.start(range(2), 2, last=20)
        status, said = collector.ended()
        assert status == 2
        assert f"cannot listen on {site.endpoint}: Address already in use" in said
        assert "check rankd.endpoint" in said
        wait_for(lambda: ranks.pushed() > 10)
    collector.start()
    ranks.ended()
    collector.ends(0)
    site.whole()


def test_clock_ahead(site: Site) -> None:
    """The collector's clock is 11 s ahead: nothing depends on it."""
    collector = site.collector(command=("-c", AHEAD), lost_after=1.0)
    ranks = site.job.start(range(2), 2, last=30)
    ranks.ended()
    collector.ends(0)
    assert not site.has("# rank_lost")
    assert site.whole().summary()[-1].endswith(" 0 blocks late")


def test_connections_cut(site: Site) -> None:
    """All connections break, again and again: the agents come back and send again what was on its way."""
    collector = site.collector()
    proxy = Proxy(site.port)
    ranks = site.job.start(range(3), 3, last=10_000, section={"endpoint": proxy.endpoint})
    for _ in range(5):
        before = site.lines()
        wait_for(lambda before=before: site.lines() > before + 20)  # type: ignore[misc]
        proxy.cut()
    site.job.finish()
    ranks.ended()
    collector.ends(0)
    proxy.close()
    site.whole()


@pytest.mark.parametrize("deaf", ["collector", "agent"])
def test_connections_half_open(site: Site, deaf: str) -> None:
    """One direction falls silent and no end is seen: noticed within seconds, and nothing is lost or doubled."""
    collector = site.collector()
    proxy = Proxy(site.port)
    ranks = site.job.start(range(2), 2, last=10_000, pace=0.05, section={"endpoint": proxy.endpoint})
    wait_for(lambda: site.lines() > 20)
    before = proxy.connections
    proxy.silence(to_collector=deaf == "collector", to_agent=deaf == "agent")
    wait_for(lambda: proxy.connections >= before + 2)
    lines = site.lines()
    wait_for(lambda: site.lines() > lines + 20)
    site.job.finish()
    ranks.ended()
    collector.ends(0)
    proxy.close()
    site.whole()


def test_verify_and_rebuild_beside_a_live_collector(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Both only read: the collector goes on, verify says what is not checked yet, the rebuilt log is a beginning."""
    collector = site.collector()
    ranks = site.job.start(range(2), 2, last=10_000)
    for attempt in range(5):
        lines = site.lines()
        wait_for(lambda lines=lines: site.lines() > lines + 20)  # type: ignore[misc]
        assert main(["verify", str(site.output)]) == 0, capsys.readouterr().out
        into = site.root / f"again{attempt}"
        assert main(["rebuild", str(site.output), "--into", str(into)]) == 0
        made = (into / "merged.log").read_bytes()
        wait_for(lambda made=made: site.merged.stat().st_size >= len(made))  # type: ignore[misc]
        assert site.merged.read_bytes().startswith(made)
    site.job.finish()
    ranks.ended()
    collector.ends(0)
    site.whole()
