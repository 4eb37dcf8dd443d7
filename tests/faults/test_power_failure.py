"""The collector's node loses power while ranks train: files lack what was not on the disk; nothing else is lost."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.faults.conftest import Site
from tests.faults.job import RankProcess, Told
from tests.support import SOON, CollectorProcess, check_logs, verified, wait_for, whole_log

from rankd.collector.cli import main
from rankd.collector.journal import MAGIC, read_segment, segments
from rankd.collector.place import JOURNAL
from rankd.collector.sinks.speclog import rank_logs_in
from rankd.collector.verify import Verification

pytestmark = pytest.mark.slow

_LOSS = re.compile(r'^\[rank_(\d+)\] \{ "micro_step": \d+, "local_loss": (\S+) \}\n', re.MULTILINE)
_GAP = re.compile(r"^\[rank_(\d+)\] # gap (\d+) records .* are missing \(journal_lost\)$", re.MULTILINE)


def cut_journal(output: Path, share: float, *, torn: int = 0) -> None:
    """Leave so much of its entries, and so many bytes of the next one."""
    ends = [(path, end) for path in segments(output / JOURNAL) for end, _ in read_segment(path)]
    kept = math.ceil(len(ends) * share)
    path, end = ends[kept - 1] if kept else (ends[0][0], len(MAGIC))
    assert kept < len(ends)
    for later in segments(output / JOURNAL):
        if later > path:
            later.unlink()
    os.truncate(path, end + torn)


def cut_logs(output: Path) -> None:
    """Of the logs any part may be on the disk: here half of one, nothing of another; the merged log as it was.

    Where nothing is left of the journal, which is written before them, nothing is of the logs.
    """
    if not any(True for path in segments(output / JOURNAL) for _ in read_segment(path)):
        for name in ("merged.log", *rank_logs_in(output)):
            (output / name).unlink()
        return
    first, *others = sorted(output / name for name in rank_logs_in(output))
    os.truncate(first, first.stat().st_size // 2)
    for log in others[:1]:
        shutil.rmtree(log.parent)


def whole_but_for_a_hole(site: Site, processes: Sequence[RankProcess]) -> Verification:
    """Logs, journal and accounts agree; each rank has a beginning and an end of what it pushed, and a line between."""
    check = verified(site.output)
    text = whole_log(site.merged).decode()
    logged: dict[int, list[float]] = {}
    for found in _LOSS.finditer(text):
        logged.setdefault(int(found[1]), []).append(float(found[2]))
    gaps = {int(found[1]): int(found[2]) for found in _GAP.finditer(text)}
    for each in processes:
        for rank in each.orders.ranks:
            told = Told.read(Path(each.orders.told), rank, each.orders.tag)
            there = set(logged[rank])
            missing = [place for place, value in enumerate(told.begun) if value not in there]
            assert logged[rank] == [value for value in told.begun if value in there]
            assert missing == list(range(missing[0], missing[0] + len(missing))), f"rank {rank}: several holes"
            # Each micro-step has a loss and five norms, each step one record more.
            assert 6 * len(missing) <= gaps[rank] <= 7 * len(missing) + 1
            assert missing[-1] < len(told.begun) - 1, f"rank {rank}: nothing after the hole"
    into = site.root / "again"
    assert main(["rebuild", str(site.output), "--into", str(into)]) == 0
    for name in ("merged.log", *rank_logs_in(site.output)):
        assert (into / name).read_bytes() == (site.output / name).read_bytes()
    check_logs(site.output, len(logged))
    return check


def go_on(site: Site, collector: CollectorProcess, processes: Sequence[RankProcess]) -> None:
    """The node is back: all ranks are taken on again, and end."""
    collector.start()
    wait_for(lambda: all(p.said().count("had acknowledged") == len(p.orders.ranks) for p in processes))
    lines = site.lines()
    wait_for(lambda: site.lines() > lines + 50)
    site.job.finish()
    for each in processes:
        each.ended()
    collector.ends(0)
    assert not any("refuses this rank" in each.said() for each in processes)


@pytest.mark.parametrize(
    ("share", "torn"), [(0.5, 0), (0.5, 11), (0.9, 100), (0.02, 0), (0.0, 0)], ids=["", "torn", "late", "hello", "all"]
)
def test_living_ranks_are_taken_on_again(
    site: Site, share: float, torn: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The journal ends earlier, at an entry or within one, perhaps before the ranks' hellos: a line says what is
    missing, status and verify count it as lost, and everything from there on is recorded.
    """
    collector = site.collector(lost_after=5.0)
    ranks = site.job.start(range(3), 3, last=10_000)
    wait_for(lambda: site.lines() > 500)
    collector.kill()
    cut_journal(site.output, share, torn=torn)
    cut_logs(site.output)
    go_on(site, collector, [ranks])
    check = whole_but_for_a_hole(site, [ranks])
    lost = {row.rank: row.dropped for row in check.rows()}
    assert all(re.fullmatch(r"\d+ journal_lost", told) for told in lost.values()), lost
    assert any("records were acknowledged, and the journal has lost them" in note for note in check.notes)
    assert "journal_lost" in collector.said()
    capsys.readouterr()
    assert main(["status", str(site.output)]) == 0
    assert capsys.readouterr().out.count(" lost") == 3


def test_more_than_once_and_with_many_segments(site: Site) -> None:
    """Each time there is a line; the sum is what the accounts say. Checkpoints keep what is known of it."""
    collector = site.collector(journal={"segment_size": "16KiB"})
    ranks = site.job.start(range(2), 2, last=10_000)
    for share in (0.7, 0.8):
        newest = len(segments(site.output / JOURNAL))
        wait_for(lambda newest=newest: len(segments(site.output / JOURNAL)) > newest + 4)  # type: ignore[misc]
        collector.kill()
        cut_journal(site.output, share)
        collector.start()
        wait_for(lambda share=share: ranks.said().count("had acknowledged") == (2 if share == 0.7 else 4))  # type: ignore[misc]
    newest = len(segments(site.output / JOURNAL))
    wait_for(lambda: len(segments(site.output / JOURNAL)) > newest + 3)
    collector.kill()
    collector.start()
    site.job.finish()
    ranks.ended()
    collector.ends(0)
    check = verified(site.output)
    gaps = [(int(found[1]), int(found[2])) for found in _GAP.finditer(whole_log(site.merged).decode())]
    assert [rank for rank, _ in gaps].count(0) == [rank for rank, _ in gaps].count(1) == 2
    told = {rank: sum(count for of, count in gaps if of == rank) for rank in (0, 1)}
    assert {row.rank: row.dropped for row in check.rows()} == {r: f"{n} journal_lost" for r, n in told.items()}


@pytest.mark.parametrize("newest", [b"", bytes(4_096), MAGIC], ids=["empty", "zeros", "magic"])
def test_segments_reach_the_disk_in_any_order(site: Site, newest: bytes) -> None:
    """An earlier segment lacks its end, later ones are there, and of the newest there is a name, perhaps a size: the
    journal ends at the first that is not whole.
    """
    collector = site.collector(journal={"segment_size": "16KiB"}, lost_after=5.0)
    ranks = site.job.start(range(2), 2, last=10_000)
    wait_for(lambda: len(segments(site.output / JOURNAL)) > 5)
    collector.kill()
    there = segments(site.output / JOURNAL)
    there[-1].write_bytes(newest)
    os.truncate(there[-3], there[-3].stat().st_size - 3_000)
    go_on(site, collector, [ranks])
    whole_but_for_a_hole(site, [ranks])
    aside = sorted(path.name for path in (site.output / JOURNAL).glob("*.cut"))
    assert aside == [f"{path.name}.cut" for path in there[-2:]]


def test_with_durability_disk_nothing_is_lost(site: Site) -> None:
    """What is acknowledged is on the disk, so all that a power failure can take from the journal is not."""
    collector = site.collector(journal={"durability": "disk"})
    ranks = site.job.start(range(2), 2, last=10_000)
    wait_for(lambda: site.lines() > 200)
    collector.kill()
    cut_logs(site.output)
    collector.start()
    site.job.finish()
    ranks.ended()
    collector.ends(0)
    assert not site.has("# gap")
    assert site.whole().notes == []


def test_a_rank_that_died_meanwhile_is_delivered_from_its_spool(site: Site) -> None:
    """The power failure ended it too, or it went down while the collector was away: its name tables lie beside its
    spool, so all that it still had is recorded.
    """
    collector = site.collector(lost_after=5.0, linger=SOON)
    ranks = site.job.start(range(2), 2, last=10_000)
    wait_for(lambda: site.lines() > 500)
    collector.kill()
    pushed = ranks.pushed()
    wait_for(lambda: ranks.pushed() > pushed + 20)
    ranks.kill()
    cut_journal(site.output, 0.01)
    collector.start()
    collector.ends(1)
    check = verified(site.output)
    text = whole_log(site.merged).decode()
    told = Told.read(Path(ranks.orders.told), 0, ranks.orders.tag)
    own = [float(found[2]) for found in _LOSS.finditer(text) if found[1] == "0"]
    assert own[-20:] == [v for v in told.begun if v in set(own)][-20:]
    assert set(told.pushed[pushed:]) <= set(own)
    assert text.rfind('"local_norm"') > text.rfind("# gap") > 0
    assert text.count("an unknown number of records") == 2
    assert {row.dropped for row in check.rows()} == {"0 or more journal_lost"}
    assert not list(site.job.spools.rglob("*.spool*"))
