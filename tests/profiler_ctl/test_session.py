"""The rank's side of a profiling session, on a scripted profiler.

The scripted profiler stands for what is not ours, MindSpore's profiler: it can fail in ways the real one cannot be
brought to. The real one is in tests/e2e/test_profiler_mindspore.py.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from rankd.profiler_ctl.plan import State, Window
from rankd.profiler_ctl.session import ProfilerOptions, ProfilerSession

TRACE = json.dumps([{"name": "MatMul", "ph": "X"}])


class ScriptedProfiler:
    """Writes `trace` when stopped, and raises in the calls that `fails` names."""

    def __init__(self, fails: str = "", trace: str | None = TRACE, slow: int = 0) -> None:
        self.fails = fails
        self.trace = trace
        self.slow = slow  # so many looks until the output is complete
        self.calls: list[str] = []
        self.output = Path()
        self.options: ProfilerOptions | None = None

    def __call__(self, options: ProfilerOptions, rank_dir: Path, steps: int) -> ScriptedProfiler:
        self.options = options
        self.output = rank_dir / f"host_1_{len(list(rank_dir.iterdir()))}_ascend_ms"
        self._call(f"start {steps}")
        return self

    def step(self) -> None:
        self._call("step")

    def stop(self) -> None:
        self._call("stop")
        if self.trace is not None:
            results = self.output / "ASCEND_PROFILER_OUTPUT"
            results.mkdir(parents=True)
            (results / "trace_view.json").write_text(self.trace)

    def wait(self, seconds: float) -> bool:
        self._call(f"wait {seconds:g}")
        self.slow -= 1
        return self.slow < 0

    def abandon(self) -> None:
        self._call("abandon")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fails and name.startswith(self.fails):
            raise OSError(f"no luck in {name}")


def train(session: ProfilerSession, first: int, last: int) -> None:
    for step in range(first, last + 1):
        session.step_begin(step)
        session.step_end(step)


def test_a_window_is_recorded_and_its_output_checked(tmp_path: Path) -> None:
    """The profiler hears of exactly the window's steps; the report has the path and the size."""
    profiler = ScriptedProfiler()
    options = ProfilerOptions(level=2, memory=True)
    session = ProfilerSession(Window(5, 7), options, tmp_path / "rank_1", profiler)
    assert session.report.state is State.PLANNED
    train(session, 1, 9)
    assert profiler.calls == ["start 3", "step", "step", "step", "stop", "wait 0"]
    assert profiler.options is options
    report = session.report
    assert (report.state, report.steps, report.bytes) == (State.DONE, (5, 6, 7), len(TRACE))
    assert report.path == tmp_path / "rank_1" / "host_1_0_ascend_ms"
    assert report.reason is None


def test_a_second_session_reports_its_own_output(tmp_path: Path) -> None:
    """What lay in the directory before is not taken for this session's."""
    for number in range(2):
        session = ProfilerSession(Window(1, 1), ProfilerOptions(), tmp_path, ScriptedProfiler())
        train(session, 1, 2)
        assert session.report.path == tmp_path / f"host_1_{number}_ascend_ms"


def test_the_output_is_looked_for_without_waiting_until_training_is_over(tmp_path: Path) -> None:
    """Each step looks; only `close` waits, for as long as it is told."""
    profiler = ScriptedProfiler(slow=3)
    session = ProfilerSession(Window(1, 1), ProfilerOptions(), tmp_path, profiler)
    train(session, 1, 2)
    before = session.report
    assert before.state is State.EXPORTING
    session.step_begin(3)
    session.close(5)
    assert profiler.calls[3:] == ["wait 0", "wait 0", "wait 0", "wait 5"]
    assert session.report.state is State.DONE


def test_training_that_ends_inside_the_window_still_gives_its_output(tmp_path: Path) -> None:
    """`close` stops the recording, waits and checks; the report says what is missing."""
    profiler = ScriptedProfiler()
    session = ProfilerSession(Window(5, 7), ProfilerOptions(), tmp_path, profiler)
    train(session, 5, 5)
    session.close(5)
    assert profiler.calls == ["start 3", "step", "stop", "wait 5"]
    assert session.report.state is State.DONE
    assert session.report.reason == "of the window 5-7, these steps were trained here: 5"


@pytest.mark.parametrize("fails", ["start", "step", "stop", "wait"])
def test_a_failing_profiler_costs_the_session_and_one_warning(
    fails: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing reaches training; the profiler is let go of and not called again."""
    profiler = ScriptedProfiler(fails=fails)
    session = ProfilerSession(Window(2, 3), ProfilerOptions(), tmp_path, profiler)
    train(session, 1, 6)
    session.close(5)
    report = session.report
    assert report.state is State.FAILED
    assert report.reason is not None
    assert report.reason.startswith(f"OSError: no luck in {fails}")
    assert profiler.calls[-1] == ("start 2" if fails == "start" else "abandon")
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "profiling of steps 2-3 stopped, training goes on" in caplog.text


def test_a_profiler_that_also_fails_when_let_go_of_is_still_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first failure is the one that is told."""

    class Hopeless(ScriptedProfiler):
        def abandon(self) -> None:
            raise RuntimeError("not even that")

    session = ProfilerSession(Window(1, 2), ProfilerOptions(), tmp_path, Hopeless(fails="step"))
    train(session, 1, 3)
    assert session.report.reason == "OSError: no luck in step"
    assert len(caplog.records) == 1


def test_output_that_does_not_come_in_time_is_a_failure_and_is_let_go_of(tmp_path: Path) -> None:
    """The job's exit does not hang on the analysis."""
    profiler = ScriptedProfiler(slow=99)
    session = ProfilerSession(Window(1, 1), ProfilerOptions(), tmp_path, profiler)
    train(session, 1, 1)
    session.close(3)
    assert session.report.state is State.FAILED
    assert session.report.reason == "ProfilerError: the profiler had not written its output after 3 s"
    assert profiler.calls[-1] == "abandon"


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (None, "wrote nothing to"),
        ("", "holds no data"),
        ('[{"name": "MatM', "is not JSON"),
        ("[]", "holds no events"),
        ("[" + "0," * (3 * 2**20), "is cut off"),
    ],
    ids=["no directory", "empty", "torn", "no events", "large and torn"],
)
def test_output_that_cannot_be_used_is_a_failure_that_says_so(trace: str | None, said: str, tmp_path: Path) -> None:
    """MindSpore's profiler swallows its own errors: what it wrote is the only proof that it worked."""
    session = ProfilerSession(Window(1, 1), ProfilerOptions(), tmp_path, ScriptedProfiler(trace=trace))
    train(session, 1, 2)
    assert session.report.state is State.FAILED
    assert said in str(session.report.reason)
    assert session.report.path is None


def test_a_large_whole_trace_is_accepted_without_parsing_it(tmp_path: Path) -> None:
    """Only its ends are looked at, so that training is not held up."""
    trace = "[" + "0," * (3 * 2**20) + "0]\n"
    session = ProfilerSession(Window(1, 1), ProfilerOptions(), tmp_path, ScriptedProfiler(trace=trace))
    train(session, 1, 2)
    assert (session.report.state, session.report.bytes) == (State.DONE, len(trace))


def test_a_directory_that_cannot_be_made_is_a_failure_before_the_profiler_is(tmp_path: Path) -> None:
    """A file stands where the directory should."""
    (tmp_path / "file").write_text("")
    profiler = ScriptedProfiler()
    session = ProfilerSession(Window(1, 1), ProfilerOptions(), tmp_path / "file" / "rank_0", profiler)
    train(session, 1, 2)
    assert session.report.state is State.FAILED
    assert "NotADirectoryError" in str(session.report.reason)
    assert profiler.calls == []


def test_a_rank_that_is_not_chosen_neither_makes_nor_imports_the_profiler(tmp_path: Path) -> None:
    """Nor the directory; the report says why."""
    code = f"""
import sys
from pathlib import Path
from rankd.profiler_ctl.plan import Window
from rankd.profiler_ctl.session import ProfilerOptions, ProfilerSession
session = ProfilerSession(Window(1, 2), ProfilerOptions(), Path({str(tmp_path)!r}) / "rank_2", skip="not chosen")
for step in range(1, 5):
    session.step_begin(step)
    session.step_end(step)
session.close()
assert not [name for name in sys.modules if "mindspore" in name], "imported"
print(session.report.state.value, session.report.reason)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "skipped not chosen\n"
    assert list(tmp_path.iterdir()) == []
