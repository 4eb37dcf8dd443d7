"""Whether a profile can be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankd.collector.protocol.errors import ProfilerError
from rankd.profiler_ctl.checks import StepTime, check_output, new_directory

STEPS = [StepTime(5, 1_000.0, 1_001.0), StepTime(6, 1_001.5, 1_002.0)]


def profile(folder: Path, *starts: float, **files: str | bytes) -> Path:
    """A directory with a trace of events that start then (seconds), and more files."""
    events = [{"ph": "M", "name": "process_name"}]
    trace = [*events, *({"ph": "X", "name": "MatMul", "ts": f"{start * 1e6:.3f}", "dur": "1"} for start in starts)]
    (folder / "trace_view.json").write_text(json.dumps(trace))
    for name, content in files.items():
        path = folder / name.replace("_dot_", ".")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_a_profile_that_is_whole(tmp_path: Path) -> None:
    """Its size, when it was written, and that each step has events."""
    folder = profile(tmp_path, 1_000.5, 1_001.7, op_dot_csv="a,b\n1,2\n", x_dot_db=b"SQLite format 3\0...")
    checked = check_output(folder, STEPS)
    assert checked.bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert checked.written == max(path.stat().st_mtime for path in folder.iterdir())
    assert checked.covered is True


def test_a_step_without_events_is_named(tmp_path: Path) -> None:
    """The window was not covered."""
    with pytest.raises(ProfilerError, match="holds no event of step 6"):
        check_output(profile(tmp_path, 1_000.5), STEPS)


def test_a_step_whose_operators_ran_behind_it_is_no_failure(tmp_path: Path) -> None:
    """They began after its end; but it is not said that each step has events of its own."""
    assert check_output(profile(tmp_path, 1_000.5, 1_002.5), STEPS).covered is False


@pytest.mark.parametrize("starts", [(), (3.0, 4.0)])
def test_a_trace_of_another_clock_is_not_judged(starts: tuple[float, ...], tmp_path: Path) -> None:
    """Nothing is said of what cannot be seen."""
    assert check_output(profile(tmp_path, *starts), STEPS).covered is None


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("more_dot_json", "{", "is not JSON"),
        ("op_dot_csv", "a,b,c\n1,2,3\n4,", "is cut off"),
        ("op_dot_csv", b"a,b\n\xff\xfe,2\n", "is not CSV"),
        ("x_dot_db", "SQL", "is no SQLite database"),
    ],
)
def test_a_file_that_is_not_what_it_claims_is_named(name: str, content: str | bytes, said: str, tmp_path: Path) -> None:
    """Whatever it is beside the trace."""
    with pytest.raises(ProfilerError, match=said):
        check_output(profile(tmp_path, 1_000.5, 1_001.7, **{name: content}), STEPS)


def test_the_newest_directory_is_the_sessions(tmp_path: Path) -> None:
    """What was there before is not."""
    (tmp_path / "host_1_2026_ascend_ms").mkdir()
    before = frozenset(tmp_path.iterdir())
    with pytest.raises(ProfilerError, match="wrote nothing"):
        new_directory(tmp_path, before)
    (tmp_path / "host_1_2027_ascend_ms").mkdir()
    assert new_directory(tmp_path, before).name == "host_1_2027_ascend_ms"
