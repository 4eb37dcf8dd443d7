"""Profiling sessions with MindSpore's own profiler (the CPU build), each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.mindspore

# Four micro-batches a step, each with one Tanh: so a capture of n steps holds 4·n of them.
PRELUDE = """
    import json, sys
    from pathlib import Path
    import numpy as np
    import mindspore as ms
    from mindspore import Tensor, nn, ops
    from rankd.profiler_ctl.plan import Window
    from rankd.profiler_ctl.session import ProfilerOptions, ProfilerSession

    out = Path(sys.argv[1])
    net = nn.Dense(8, 8)
    grad_fn = ms.value_and_grad(lambda x: ops.tanh(net(x)).sum(), None, net.trainable_params())
    batch = Tensor(np.ones((4, 8), np.float32))
    trained = []

    def train(session, first, last, tanh_per_step=4):
        for step in range(first, last + 1):
            session.step_begin(step)
            for _ in range(tanh_per_step):
                grad_fn(batch)
            trained.append(step)
            session.step_end(step)

    def tanh_count(report):
        (trace,) = report.path.rglob("trace_view.json")
        return sum(event.get("name") == "Tanh" for event in json.loads(trace.read_text()))

    def facts(report):
        path = None if report.path is None else str(report.path.relative_to(out))
        return {"state": report.state.value, "steps": report.steps, "path": path, "bytes": report.bytes,
                "reason": report.reason}
"""


def run(program: str, out: Path, blocking: bool = True) -> Any:
    """Run `program` after the prelude with the output directory `out`; what it prints last, as JSON."""
    env = {**os.environ, "MS_DEV_LAUNCH_BLOCKING": "1" if blocking else "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PRELUDE) + textwrap.dedent(program), str(out)],
        env=env,
        cwd=out if out.is_dir() else None,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("first", "recorded"), [(1, list(range(5, 15))), (13, [13, 14])], ids=["from the start", "resumed"]
)
def test_exactly_the_steps_of_the_window_are_recorded(first: int, recorded: list[int], tmp_path: Path) -> None:
    """Counted by the operators in the trace: the ten of 5-14, or what a resume leaves of them (Ascend/pytorch 167)."""
    seen = run(
        f"""
        session = ProfilerSession(Window(5, 14), ProfilerOptions(), out / "rank_1")
        train(session, {first}, 16)
        session.close(60)
        print(json.dumps([facts(session.report), tanh_count(session.report)]))
        """,
        tmp_path,
    )
    report, count = seen
    assert (report["state"], report["steps"]) == ("done", recorded)
    assert count == 4 * len(recorded)
    assert report["path"].startswith("rank_1/")
    assert report["bytes"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["rank_1"]


def test_operators_of_the_step_before_that_still_run_are_not_in_the_window(tmp_path: Path) -> None:
    """Operators are launched ahead of their execution; the window starts where those of earlier steps are done."""
    seen = run(
        """
        wide = Tensor(np.ones((700, 700), np.float32))
        session = ProfilerSession(Window(3, 4), ProfilerOptions(stack=False), out / "rank_0")
        for step in range(1, 6):
            session.step_begin(step)
            x = wide
            for _ in range(10):
                x = ops.tanh(ops.matmul(x, wide))
            session.step_end(step)
        session.close(60)
        print(json.dumps([facts(session.report), tanh_count(session.report)]))
        """,
        tmp_path,
        blocking=False,
    )
    report, count = seen
    assert (report["state"], report["steps"], count) == ("done", [3, 4], 20)


def test_training_that_ends_inside_the_window_leaves_what_was_recorded(tmp_path: Path) -> None:
    """The recording is stopped early, analysed and checked."""
    seen = run(
        """
        session = ProfilerSession(Window(3, 9), ProfilerOptions(), out / "rank_0")
        train(session, 1, 4)
        session.close(60)
        print(json.dumps([facts(session.report), tanh_count(session.report)]))
        """,
        tmp_path,
    )
    report, count = seen
    assert (report["state"], report["steps"], count) == ("done", [3, 4], 8)
    assert "3-4" in report["reason"]


@pytest.mark.parametrize("kind", ["unwritable", "removed"])
def test_output_that_cannot_be_written_does_not_stop_training(kind: str, tmp_path: Path) -> None:
    """A path under a file, and a directory that goes away before MindSpore writes: training goes on, and it is told."""
    (tmp_path / "file").write_text("")
    seen = run(
        f"""
        import shutil
        unwritable = {kind!r} == "unwritable"
        rank_dir = out / ("file" if unwritable else "gone") / "rank_0"
        session = ProfilerSession(Window(2, 3), ProfilerOptions(), rank_dir)
        train(session, 1, 2)
        if not unwritable:
            shutil.rmtree(rank_dir)
            rank_dir.parent.rmdir()
            rank_dir.parent.write_text("")
        train(session, 3, 5)
        session.close(60)
        print(json.dumps([facts(session.report), trained]))
        """,
        tmp_path,
    )
    report, trained = seen
    assert trained == [1, 2, 3, 4, 5]
    assert report["state"] == "failed"
    assert "rank_0" in report["reason"]


def test_only_the_cpu_off_gives_no_trace_on_a_cpu_and_says_so(tmp_path: Path) -> None:
    """profile_cpu False leaves nothing to see where there is no device."""
    seen = run(
        """
        session = ProfilerSession(Window(1, 1), ProfilerOptions(cpu=False), out / "rank_0")
        train(session, 1, 2)
        session.close(60)
        print(json.dumps(facts(session.report)))
        """,
        tmp_path,
    )
    assert seen["state"] == "failed"
    assert "profile_cpu" in seen["reason"]
