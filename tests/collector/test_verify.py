"""`rankd verify` finds what is wrong, says where, and finds nothing where nothing is."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from rankd.collector.cli import main
from rankd.collector.entries import Opened, Stored
from rankd.collector.journal import read_segment
from rankd.collector.logcheck import Logs, MergedLog
from rankd.collector.protocol.wire import Gap, Goodbye, encode_item
from rankd.collector.protocol.wording import counted
from rankd.collector.verify import Verification

from .streams import hello, training
from .written import entries_of, write_run

RANKS = [training(rank, 2, steps=range(1, 5)) for rank in range(2)]
SEGMENTS = 1_024


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A run of two ranks in several segments."""
    write_run(tmp_path / "out", entries_of(RANKS), segment_size=SEGMENTS)
    return tmp_path / "out"


def found(output: Path) -> list[str]:
    check = Verification(output)
    check.run()
    return [str(finding) for finding in check.findings]


def journal(output: Path) -> list[Path]:
    return sorted((output / ".rankd" / "journal").iterdir())


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def test_a_whole_run_is_verified(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 0, the table, and what was looked at; nothing is changed."""
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    assert main(["verify", str(output)]) == 0
    said = capsys.readouterr().out
    assert "   1        1  1001 on node0  done   step 4              40        0        40  0" in said
    assert f"journal: {len(journal(output))} segments, " in said
    assert "80 records of 2 ranks, 0 blocks late" in said
    assert said.endswith(f"{output}: verified\n")
    assert len(journal(output)) > 2
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


def test_what_is_no_run_cannot_be_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and a reason."""
    assert main(["verify", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no run" in capsys.readouterr().err


@pytest.mark.parametrize("log", ["merged.log", "rank_1/monitor.log"])
def test_a_changed_byte_is_found_with_line_byte_and_both_texts(
    output: Path, log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One digit of one value."""
    path = output / log
    at = path.read_bytes().index(b'"device_loss": 3.0') + len(b'"device_loss": ')
    line = path.read_bytes()[:at].count(b"\n") + 1
    edit(path, lambda raw: raw[:at] + b"8" + raw[at + 1 :])
    assert main(["verify", str(output), "--quiet"]) == 1
    said = capsys.readouterr().out
    assert f"FOUND {path}: line {line}, byte {at}: expected " in said
    assert '"device_loss": 3.0' in said
    assert '"device_loss": 8.0' in said


def test_a_log_that_is_shorter_or_longer_than_the_journal_makes_it(output: Path) -> None:
    """Both are told with the byte, and what to do."""
    merged, own = output / "merged.log", output / "rank_0" / "monitor.log"
    size = merged.stat().st_size
    os.truncate(merged, size - 9)
    edit(own, lambda raw: raw + b"# more\n")
    end = own.stat().st_size - 7
    (output / "rank_7").mkdir()
    (output / "rank_7" / "monitor.log").write_bytes(b"x\n")
    said = found(output)
    rebuild = "(start the collector again, or `rankd rebuild`)"
    not_made = "bytes that the journal does not make"
    assert said[0].startswith(f"{merged}: byte {size - 9}: expected 9 more bytes that the journal has {rebuild}, found")
    assert said[1:3] == [
        f"{own}: byte {end}: expected the end of the file, found 7 {not_made}",
        f"{output}/rank_7/monitor.log: byte 0: expected the end of the file, found 2 {not_made}",
    ]


def test_a_journal_that_ends_before_the_logs_is_explained_once(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a power failure leaves it: however many logs are longer, it says once what starting the collector does."""
    last = journal(output)[-1]
    os.truncate(last, next(end for end, _ in read_segment(last)))
    assert main(["verify", str(output)]) == 1
    said = capsys.readouterr().out
    longer = said.count("expected the end of the file, found ")
    assert longer > 1
    assert said.count(f"note: {longer} logs go on where the journal ends: a power failure") == 1
    assert (
        f"Starting the collector (`rankd collect {output}`) cuts the logs to what the journal makes; copy them" in said
    )


def test_beside_a_live_collector_what_is_unwritten_is_a_note(output: Path) -> None:
    """Whoever holds the lock may still write; without it, the same is a finding."""
    os.truncate(output / "merged.log", 500)
    (output / ".rankd" / "lock").write_text(f"process 4711 on {socket.gethostname()}")
    assert found(output)
    with (output / ".rankd" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        check = Verification(output)
        check.run()
    assert check.findings == []
    (note,) = [note for note in check.notes if note.startswith("merged.log")]
    assert "bytes not written yet (process 4711 on" in note


def test_a_torn_tail_of_the_journal_is_a_note(output: Path) -> None:
    """A crash left the beginning of an entry, or zeros: nobody was told of it."""
    whole = journal(output)[-1].read_bytes()
    for tail in (b"\x07", whole[16:40], bytes(5_000)):
        journal(output)[-1].write_bytes(whole + tail)
        check = Verification(output)
        check.run()
        assert check.findings == []
        assert f"{counted(len(tail), 'byte')} from byte {len(whole)} on: a torn write" in check.notes[0]


def test_damage_in_the_journal_is_found_in_any_segment(output: Path) -> None:
    """A flipped bit in the last segment, and in an earlier one; a segment that is missing in the middle."""
    last, first = journal(output)[-1], journal(output)[0]
    for path, said in ((last, "bytes whose checksum is wrong"), (first, "and later segments follow")):
        whole = path.read_bytes()
        edit(path, lambda raw: raw[:40] + bytes([raw[40] ^ 1]) + raw[41:])
        assert any(f"{path}: byte 16: expected a whole entry, found " in f and said in f for f in found(output))
        path.write_bytes(whole)
    journal(output)[1].unlink()
    assert "expected segment 2 before it, found none" in found(output)[0]


def test_a_hole_in_the_numbers_of_a_process_is_found(tmp_path: Path) -> None:
    """An item whose predecessor is missing in the journal."""
    one = training(0, 1, goodbye=None)
    write_run(tmp_path, [Opened(one.hello), Stored(0, one.items[:2]), Stored(0, one.items[3:])])
    (finding,) = found(tmp_path)
    assert ": expected item 3 of rank 0 (process 1000 on node0), found item 4" in finding


def test_a_goodbye_that_does_not_add_up_is_found(tmp_path: Path) -> None:
    """It says it produced more than arrived, and dropped what no gap tells of."""
    one = training(0, 1, goodbye=None)
    bye = encode_item(Goodbye(len(one.items) + 1, "done", 100, {"spool_full": 3}, 0.0))
    write_run(tmp_path, [Opened(one.hello), Stored(0, (*one.items, bye))])
    who = "rank 0 (process 1000 on node0)"
    assert found(tmp_path) == [
        f"{who}: expected 97 records in the journal, as its goodbye says (100 produced, 3 dropped), found 20",
        f"{who}: expected gaps of 3 spool_full records, as its goodbye says, found 0",
    ]


def test_a_gap_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What an agent had to refuse is counted by cause, and adds up."""
    one = training(0, 1, goodbye=None)
    gap = encode_item(Gap(len(one.items) + 1, "spool_full", 5, (3, 1), (3, 2)))
    bye = encode_item(Goodbye(len(one.items) + 2, "done", 25, {"spool_full": 5}, 0.0))
    write_run(tmp_path, [Opened(one.hello), Stored(0, (*one.items, gap, bye))])
    assert main(["verify", str(tmp_path)]) == 0
    assert "20        0        25  5 spool_full" in capsys.readouterr().out


def test_a_killed_process_is_told_and_its_records_count(tmp_path: Path) -> None:
    """No goodbye: a note; the next process of the rank is told apart from it."""
    killed, again = training(0, 1, goodbye=None), training(0, 1, steps=(2, 3), process=2)
    write_run(tmp_path, entries_of([killed, again], batch=100))
    check = Verification(tmp_path)
    check.run()
    assert check.findings == []
    assert [(r.attempt, r.state, r.written, r.produced) for r in check.rows()] == [
        (1, "killed", 20, "?"),
        (2, "done", 20, "20"),
    ]
    assert check.notes == [
        "without a goodbye, so only what arrived is counted: rank 0 process 1000 on node0 (killed)",
    ]


def test_segments_that_were_deleted_leave_the_rest_to_be_checked(tmp_path: Path) -> None:
    """`rankd.journal.keep`: from the oldest checkpoint on against the journal, before it merged.log by itself."""
    write_run(tmp_path, entries_of(RANKS), segment_size=SEGMENTS, keep=0)
    assert int(journal(tmp_path)[0].stem) > 1
    check = Verification(tmp_path)
    check.run()
    assert check.findings == []
    assert "were deleted (rankd.journal.keep)" in check.notes[0]
    edit(
        tmp_path / "merged.log",
        lambda raw: raw.replace(b'"step": 1, "micro_step": 2', b'"step": 9, "micro_step": 2', 1),
    )
    (first, *_) = found(tmp_path)
    assert "expected a position above attempt 1 step 9 micro_step 2 rank 0, or a line `# late`" in first


def test_a_rank_that_never_came_stands_in_the_table(tmp_path: Path) -> None:
    """Nothing of it is there, and that is told."""
    write_run(tmp_path, [Opened(hello(0, 2))])
    check = Verification(tmp_path)
    check.run()
    assert [(row.rank, row.process, row.state) for row in check.rows()] == [
        (0, "1000 on node0", "live"),
        (1, "-", "never came"),
    ]


# -- the merged log by itself -----------------------------------------------------------------------------------------

START = "[collector] # attempt 1 world_size 2\n"
BLOCK = '[rank_{rank}] {{ "step": {step}, "micro_step": {micro} }}\n[rank_{rank}] {{ "x": 1.0 }}\n'


def of_text(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "merged.log").write_text(text)
    log = MergedLog(Logs(tmp_path))
    log.read(2**40)
    return [f"{finding.expected} | {finding.found}" for finding in log.findings]


@pytest.mark.parametrize(
    ("then", "found"),
    [
        (BLOCK.format(rank=1, step=3, micro=1), None),
        (BLOCK.format(rank=0, step=2, micro=2), "attempt 1 step 2 micro_step 2 rank 0"),
        (BLOCK.format(rank=1, step=2, micro=1), "attempt 1 step 2 micro_step 1 rank 1"),
        ("[rank_0] # late attempt 1 step 1 micro_step 1\n" + BLOCK.format(rank=0, step=1, micro=1), None),
        ("[collector] # attempt 2 world_size 2\n" + BLOCK.format(rank=0, step=1, micro=1), None),
        ("[rank_1] # attempt 2 world_size 2\n", "'# attempt 2 world_size 2'"),
        ("[rank_01] # x\n", "'[rank_01] # x'"),
        ("no prefix\n", "'no prefix'"),
        ('[collector] { "x": 1.0 }\n', "'[collector] { \"x\": 1.0 }'"),
    ],
)
def test_the_text_alone_tells_order_and_doubles(tmp_path: Path, then: str, found: str | None) -> None:
    """After a block at step 2, micro_step 2 of rank 0: what may follow, and what may not."""
    said = of_text(tmp_path, START + BLOCK.format(rank=0, step=2, micro=2) + then)
    assert [one.rpartition(" | ")[2] for one in said] == ([] if found is None else [found])


def test_a_line_in_one_log_and_not_in_the_other_is_found(tmp_path: Path) -> None:
    """merged.log without its prefix is the rank's log, or the first line that differs is named."""
    write_run(tmp_path, entries_of(RANKS))
    own = tmp_path / "rank_1" / "monitor.log"
    edit(own, lambda raw: raw.replace(b'{ "device_loss": 2.0 }\n', b"", 1))
    log = MergedLog(Logs(tmp_path))
    log.read(2**40)
    log.check_rank_logs(None)
    (finding,) = log.findings
    line = own.read_bytes()[: own.read_bytes().index(b"step:[    2/    ?]")].count(b"\n") + 1
    assert finding.where.startswith(f"{own}: line {line}, byte ")
    assert "device_loss" in finding.expected


def test_records_of_the_text_are_counted_as_the_journal_counts_them(output: Path) -> None:
    """Losses, norms and the fields of the summary; derived lines are none."""
    text = (
        "step:[    4/  100] max_attention_logit/a: [1, 2]\n"
        "step:[    4/  100] max_attention_logit/mean: 1.5\n"
        "step:[    4/  100] max_attention_logit/max: 2\n"
        "{ step:[    4/  100], loss:   4.864965, per_step_time:    843ms, lr: 1.000000e-03 }\n"
    )
    lines = "".join(f"[rank_0] {line}\n" for line in text.splitlines())
    (output / "merged.log").write_text(START + lines)
    log = MergedLog(Logs(output))
    log.read(2**40)
    assert log.records == {0: 4}
