"""agent/monitor.py: several monitors as one."""

from __future__ import annotations

from rankd.agent.monitor import Measured, MicroBatch, Monitor, Monitors, Pending, Remark, StepEnd
from rankd.collector.protocol.records import Frame


class Says(Monitor):
    """Records its name wherever it can."""

    def __init__(self, name: str, ready: bool = True) -> None:
        self.frame = Frame.scalar(name, 1.0)
        self.ready = ready

    def micro_step(self, batch: MicroBatch, /) -> Pending:
        return Pending(lambda: Measured([self.frame], [Remark("note", str(batch.micro_step))]), self.ready)

    def end_step(self, end: StepEnd, /) -> Measured:
        return Measured([self.frame])

    def reset(self) -> Measured:
        return Measured((), (), [(1, [self.frame])])


class Fails(Monitor):
    """Raises wherever it can."""

    def begin_step(self, step: int, /) -> None:
        raise ValueError(f"begin {step}")

    def micro_step(self, batch: MicroBatch, /) -> Pending:
        def collect() -> Measured:
            raise ValueError("fetch")

        if batch.micro_step > 1:
            raise ValueError("micro_step")
        return Pending(collect)

    def end_step(self, end: StepEnd, /) -> Measured:
        raise ValueError("end_step")

    def reset(self) -> Measured:
        raise ValueError("reset")


def test_what_all_have_measured_is_together() -> None:
    """Frames and remarks come in the order of the monitors; one that has nothing adds nothing."""
    both = Monitors([Says("a"), Monitor(), Says("b")], lambda *_: None)
    measured = both.micro_step(MicroBatch(1, 2)).fetch()
    assert [frame.metric for frame in measured.frames] == ["a", "b"]
    assert [remark.text for remark in measured.remarks] == ["2", "2"]
    assert [frame.metric for frame in both.end_step(StepEnd()).frames] == ["a", "b"]
    assert [step for step, _ in both.reset().earlier] == [1, 1]


def test_one_that_waits_for_a_device_makes_all_wait() -> None:
    """A micro-step is ready when all of its parts are."""
    assert Monitors([Says("a"), Says("b")], lambda *_: None).micro_step(MicroBatch(1, 1)).ready
    assert not Monitors([Says("a"), Says("b", ready=False)], lambda *_: None).micro_step(MicroBatch(1, 1)).ready
    assert Monitors([], lambda *_: None).micro_step(MicroBatch(1, 1)).ready


def test_an_error_costs_its_own_values_only() -> None:
    """Each method of a failing monitor is reported with its name, and the others' values are there."""
    told: list[tuple[str, str]] = []
    monitors = Monitors([Fails(), Says("a")], lambda where, error: told.append((where, str(error))))
    monitors.begin_step(7)
    for micro_step in (1, 2):
        assert [f.metric for f in monitors.micro_step(MicroBatch(7, micro_step)).fetch().frames] == ["a"]
    assert [frame.metric for frame in monitors.end_step(StepEnd()).frames] == ["a"]
    assert len(monitors.reset().earlier) == 1
    assert told == [
        ("Fails.begin_step", "begin 7"),
        ("Fails.micro_step", "fetch"),
        ("Fails.micro_step", "micro_step"),
        ("Fails.end_step", "end_step"),
        ("Fails.reset", "reset"),
    ]
