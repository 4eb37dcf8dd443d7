"""The summary of a session, from files as MindSpore writes them on a CPU and (by its source) on Ascend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankd.collector.cli import main
from rankd.profiler_ctl.cli import is_asked_for
from rankd.profiler_ctl.session import RECEIPT
from rankd.profiler_ctl.summary import find_profiles, read_profile, summary


def profile(folder: Path, rank: int, session: str = "p1", seconds: float = 0.1, **files: str) -> Path:
    """A rank's directory: two steps of so many seconds."""
    path = folder / f"rank_{rank}" / f"host_{rank}_{session}_ascend_ms"
    results = path / "ASCEND_PROFILER_OUTPUT"
    results.mkdir(parents=True)
    steps = [{"step": step, "begin": 100.0 + step, "end": 100.0 + step + seconds} for step in (7, 8)]
    (path / RECEIPT).write_text(json.dumps({"version": 1, "session": session, "steps": steps}))
    for name, content in files.items():
        (results / name.replace("_dot_", ".")).write_text(content)
    return path


def trace(**milliseconds: float) -> str:
    """As on a CPU: operators, and a scope that spans them."""
    scope = {"ph": "X", "name": "Default", "ts": "1", "dur": "999000", "args": {}}
    about = {"ts": "1", "args": {"type": "HostCpuOps"}}
    return json.dumps(
        [
            scope,
            *(
                {"ph": "X", "name": f"Default/{name}-op0", "dur": str(ms * 1_000), **about}
                for name, ms in milliseconds.items()
            ),
        ]
    )


def test_ranks_stand_side_by_side_and_who_comes_last_is_named(tmp_path: Path) -> None:
    """On a CPU: the time in a collective is the time that is waited there."""
    paths = [
        profile(tmp_path, 0, seconds=0.1, trace_view_dot_json=trace(MatMul=30, AllReduce=2)),
        profile(tmp_path, 8, seconds=0.1, trace_view_dot_json=trace(MatMul=10, AllReduce=42, Tanh=1)),
    ]
    lines = summary([read_profile(path, rank) for rank, path in zip((0, 8), paths, strict=True)], most=2)
    assert [" ".join(line.split()) for line in lines] == [
        "session p1",
        "ms rank 0 rank 8",
        "step 7 100.0 100.0",
        "step 8 100.0 100.0",
        "in collectives (a step) 1.0 21.0",
        "rank 0 comes last to the collectives; a step the others wait for it: rank 8 20.0 ms",
        "",
        "slowest operators: ms, calls (trace_view.json) rank 0 rank 8",
        "AllReduce 2.00 ×1 42.00 ×1",
        "MatMul 30.00 ×1 10.00 ×1",
    ]


def test_the_files_of_an_npu_are_read_by_their_columns(tmp_path: Path) -> None:
    """Operators from op_statistic.csv, the parts of a step, and of the collectives the waiting."""
    path = profile(
        tmp_path,
        3,
        trace_view_dot_json=trace(ignored=1),
        op_statistic_dot_csv="Device_id,OP Type,Core Type,Count,Total Time(us),Ratio(%)\n0,MatMul,AI_CORE,4,8000,80\n",
        step_trace_time_dot_csv=(
            "Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free\n"
            "0,4000,1000,0,1000,500\n1,6000,3000,0,3000,500\n"
        ),
        communication_dot_json=json.dumps(
            {
                "step0": {
                    "p2p": {},
                    "collective": {
                        "hcom_allReduce__1_0_1@1": {
                            "Communication Time Info": {"Elapse Time(ms)": 4.0, "Wait Time(ms)": 3.0}
                        },
                        "Total Op Info": {"Communication Time Info": {"Elapse Time(ms)": 4.0}},
                    },
                }
            }
        ),
    )
    read = read_profile(path, 3)
    assert [(each.name, each.count, each.total) for each in read.operators] == [("MatMul", 4, 8.0)]
    assert read.source == "op_statistic.csv"
    assert read.parts == {"Computing": 5.0, "Communication(Not Overlapped)": 2.0, "Overlapped": 0.0, "Free": 0.5}
    assert (read.collectives, read.waits) == (4.0, 3.0)
    lines = [" ".join(line.split()) for line in summary([read])]
    assert "Computing (a step) 5.0" in lines
    assert "of that, waiting (a step) 1.5" in lines


def test_kernels_are_added_where_there_is_no_statistic(tmp_path: Path) -> None:
    """By type."""
    kernels = "Step ID,Name,Type,Duration(us)\n0,a,MatMul,1000\n0,b,MatMul,500\n0,c,Add,100\n"
    read = read_profile(profile(tmp_path, 0, kernel_details_dot_csv=kernels), 0)
    assert [(each.name, each.count, each.total) for each in read.operators] == [("MatMul", 2, 1.5), ("Add", 1, 0.1)]


def test_what_cannot_be_read_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    """A file of another version, a torn one, none at all."""
    path = profile(tmp_path, 0, op_statistic_dot_csv="x,y\n1,2\n", trace_view_dot_json=trace(Add=1))
    lines = summary([read_profile(path, 0)])
    assert "rank 0: not read: op_statistic.csv: KeyError: 'OP Type'" in lines
    assert any(line.startswith("Add ") for line in lines)
    assert read_profile(tmp_path / "nothing", 0).operators == []
    assert summary([]) == []


def test_a_session_that_a_folder_does_not_hold_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With those that it holds; a folder without any is not the one that was meant."""
    for session in ("p1", "p2"):
        profile(tmp_path / "profile", 0, session, trace_view_dot_json=trace(MatMul=1))
    (tmp_path / "empty").mkdir()
    assert main(["profile", "summary", "out", "p9", "--in", str(tmp_path / "profile")]) == 1
    assert capsys.readouterr().out == "no session p9; there are: p1, p2\n"
    assert main(["profile", "summary", "out", "p9", "--in", str(tmp_path / "empty")]) == 1
    assert capsys.readouterr().out.startswith("no profile can be read here; --in DIR")


def test_profiles_are_found_in_a_folder_by_their_receipts(tmp_path: Path) -> None:
    """Copied from other nodes, say."""
    paths = {("p1", 0): profile(tmp_path, 0), ("p2", 0): profile(tmp_path, 0, "p2"), ("p1", 11): profile(tmp_path, 11)}
    (tmp_path / "rank_x" / "y").mkdir(parents=True)
    assert find_profiles(tmp_path) == paths


@pytest.mark.parametrize(
    ("reported", "asked", "fits"),
    [
        ("/data/p/rank_3/h_1_ascend_ms", "/data/p", True),
        ("/mnt/x/p/q/rank_3/h_1_ascend_ms", "p/q", True),
        ("/mnt/x/profile/rank_3/h_1_ascend_ms", None, True),
        ("/data/p/rank_4/h_1_ascend_ms", "/data/p", False),
        ("/etc/rank_3/h_1_ascend_ms", "/data/p", False),
        ("/data/p/../../etc/rank_3/h_1_ascend_ms", "/data/p", False),
        ("/mnt/x/q/rank_3/h_1_ascend_ms", "p/q", False),
        ("rank_3/h_1_ascend_ms", None, False),
        ("/etc", None, False),
    ],
)
def test_only_a_path_that_was_asked_for_is_read(reported: str, asked: str | None, fits: bool) -> None:
    """A rank's report names a path; what it says is not opened because it says so."""
    assert is_asked_for(reported, asked, 3) is fits
