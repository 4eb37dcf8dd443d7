"""agent/moe.py: `monitor.moe_monitor`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rankd.agent.moe import Iterations, MoeMonitor, discover, expert_layer
from rankd.collector.protocol.records import ExpertLayer

from .training import Expert, Log, Model, run, run_step, values

DENSE = object()


def config(interval: int | None = 1, target: object = None) -> dict[str, object]:
    return {"monitor": {"moe_monitor": {"save_tokens_per_expert_interval": interval, "target_layers": target}}}


def names(model: object, target: int | tuple[int, ...] | None = None) -> list[str]:
    return [layer.name for layer, _ in discover(model, target)]


@pytest.mark.parametrize("prefix", ["", "model.", "network.network.model.", "chunk_1."])
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("decoder.layers.0.mlp", ExpertLayer("decoder", 0)),
        ("decoder.layers.61.mlp", ExpertLayer("decoder", 61)),
        ("mtp.layers.1.transformer_layer.mlp", ExpertLayer("mtp", 0, mtp_idx=1)),
        ("mtp.layers.1.mtp_model_layer.layers.2.mlp", ExpertLayer("mtp", 2, mtp_idx=1)),
    ],
)
def test_which_layer_a_name_is(prefix: str, name: str, layer: ExpertLayer) -> None:
    """「block: decoder 或 mtp」「mtp_idx 标识 MTP 子层」: each form of name, whatever stands before it."""
    assert expert_layer(prefix + name) == layer


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "mlp",
            "decoder.layers.mlp",
            "decoder.layers.x.mlp",
            "decoder.layers.0.mlp.experts",
            "decoder.layers.0.moe",
        ),
        *("encoder_decoder.layers.0.mlp", "mtp.layers.0.mlp", "mtp.layers.00.transformer_layer.mlp"),
        *("mtp.layers.0.mtp_model_layer.layers.mlp", "decoder.layers.-1.mlp", "decoder.layers.0.mlp\n"),
    ],
)
def test_other_names_are_no_layer(name: str) -> None:
    """A name that merely looks similar is none of the forms."""
    assert expert_layer(name) is None


def test_target_layers_none_finds_every_moe_module() -> None:
    """「None 表示自动发现模型中所有含 tokens_per_expert 的 MoE 模块」: of all chunks, in order."""
    first = Model({"decoder.layers.3.mlp": Expert(), "decoder.layers.0.mlp": DENSE, "decoder.layers.1.mlp": Expert()})
    second = Model(
        {
            "mtp.layers.1.transformer_layer.mlp": Expert(),
            "mtp.layers.0.mtp_model_layer.layers.1.mlp": Expert(),
            "mtp.layers.0.mtp_model_layer.layers.0.mlp": Expert(),
            "decoder.layers.2.mlp": Expert(),
        }
    )
    assert names([first, second]) == ["decoder.1", "decoder.2", "decoder.3", "mtp.0.0", "mtp.0.1", "mtp.1.0"]


@pytest.mark.parametrize(
    ("target", "found", "warned"),
    [
        pytest.param(3, ["decoder.1", "decoder.2"], [0], id="int 展开为 range(3)"),
        pytest.param((1, 4), ["decoder.1"], [4], id="list[int] 精确匹配这些层 id"),
        pytest.param((2,), ["decoder.2"], [], id="仅匹配 decoder 层"),
    ],
)
def test_target_layers(
    target: int | tuple[int, ...], found: list[str], warned: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """「若指定的某层 id 实际不是 MoE 层，框架会打印告警 decoder.layers.X is not a MoE layer」: once for each."""
    cells = {f"decoder.layers.{n}.mlp": Expert() for n in (1, 2)}
    model = Model({"decoder.layers.0.mlp": DENSE, **cells, "mtp.layers.2.transformer_layer.mlp": Expert()})
    assert names(model, target) == found
    told = [record.getMessage() for record in caplog.records]
    assert [line.split(" (")[0] for line in told] == [f"decoder.layers.{n} is not a MoE layer" for n in warned]
    assert all(("no layer of that number" in line) == (line.startswith("decoder.layers.4")) for line in told)


def test_the_warning_comes_once_in_a_training(caplog: pytest.LogCaptureFixture) -> None:
    """`target_layers`: steps go on, the warning does not."""
    run(config(1, [0, 1]), Model({"decoder.layers.0.mlp": Expert(), "decoder.layers.1.mlp": DENSE}))
    assert [r.getMessage() for r in caplog.records] == ["decoder.layers.1 is not a MoE layer"]


def test_what_is_not_recorded_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A counter under a name that says no layer, no counter at all, and one layer twice are each a warning."""
    assert names(Model({"blocks.0.moe": Expert()})) == []
    assert names(Model({"decoder.layers.0.mlp": DENSE})) == []
    assert names([Model({"decoder.layers.0.mlp": Expert()})] * 2) == ["decoder.0"]
    assert len(caplog.records) == 2
    assert names([Model({"decoder.layers.0.mlp": Expert()}), Model({"decoder.layers.0.mlp": Expert()})]) == [
        "decoder.0"
    ]
    told = [record.getMessage() for record in caplog.records]
    assert "blocks.0.moe" in told[0]
    assert "no module" in told[1]
    assert "two modules are decoder.0" in told[2]


def test_each_record_is_the_difference_of_its_micro_batch() -> None:
    """`tpe`: 「该 micro-batch 内各专家分到的 token 数列表（按专家差分得到的增量）」, whatever the number of experts."""
    decoder, mtp = Expert(3), Expert(2)
    model = Model({"decoder.layers.5.mlp": decoder, "mtp.layers.1.transformer_layer.mlp": mtp})

    def forward(step: int, micro: int) -> None:
        decoder.receive(step, micro, 0)
        mtp.receive(10 * micro, 1)

    log = run(config(), model, (1, 2), micro_steps=2, forward=forward)
    assert values(log, "tpe") == {
        (s, m): {"decoder.5": [s, m, 0], "mtp.1.0": [10 * m, 1]} for s in (1, 2) for m in (1, 2)
    }
    assert [frame.iteration for _, _, frame in log.frames if frame.metric == "tpe"] == [1, 2, 3, 4]
    assert log.errors == []


@pytest.mark.parametrize("zero", [Expert.zero, Expert.replace])
def test_counts_that_are_zeroed_between_steps(zero: Callable[[Expert], None]) -> None:
    """Zeroed before a step's first forward pass, in place or with another tensor: nothing is negative."""
    expert = Expert()

    def forward(step: int, micro: int) -> None:
        if micro == 1:
            zero(expert)
        expert.receive(step, micro, 7)

    log = run(config(), Model({"decoder.layers.0.mlp": expert}), forward=forward)
    assert values(log, "tpe") == {(s, m): {"decoder.0": [s, m, 7]} for s in (1, 2, 3) for m in (1, 2, 3, 4)}


def test_counts_that_are_zeroed_before_the_step_begins() -> None:
    """Zeroed by the framework's callback: the next step's first record starts from there, also with more tokens."""
    expert, log = Expert(), Log()
    monitor = MoeMonitor([(ExpertLayer("decoder", 0), expert)], 1)
    run_step(monitor, log, 1, 1, forward=lambda *_: expert.receive(1, 2, 3))
    expert.replace()
    run_step(monitor, log, 2, 1, forward=lambda *_: expert.receive(10, 20, 30))
    assert list(values(log, "tpe").values()) == [{"decoder.0": [1, 2, 3]}, {"decoder.0": [10, 20, 30]}]


def test_counts_that_are_zeroed_in_the_middle_of_a_step() -> None:
    """A count below the last reading was reset since: what it shows is this micro-batch's."""
    expert = Expert()

    def forward(step: int, micro: int) -> None:
        if micro == 3:
            expert.zero()
        expert.receive(step, 5, micro)

    log = run(config(), Model({"decoder.layers.0.mlp": expert}), forward=forward)
    assert values(log, "tpe") == {(s, m): {"decoder.0": [s, 5, m]} for s in (1, 2, 3) for m in (1, 2, 3, 4)}


def test_the_interval_is_on_the_global_micro_step_count() -> None:
    """`save_tokens_per_expert_interval`: 「打印 tokens-per-expert 记录的 micro-step 间隔」: every 3rd."""
    expert = Expert()
    model = Model({"decoder.layers.0.mlp": expert})
    log = run(config(3), model, forward=lambda step, micro: expert.receive(step, micro, 1))
    assert [(s, m, f.iteration) for s, m, f in log.frames if f.metric == "tpe"] == [
        (1, 3, 3),
        (2, 2, 6),
        (3, 1, 9),
        (3, 4, 12),
    ]
    assert values(log, "tpe")[3, 1] == {"decoder.0": [3, 1, 1]}


def test_counts_are_read_around_the_written_micro_steps_only() -> None:
    """Every 10th micro-step is written: the count is read twice for it, and not at all for the nine others."""
    expert = Expert()
    model = Model({"decoder.layers.0.mlp": expert})
    readings = []
    run(config(10), model, range(1, 6), forward=lambda step, micro: readings.append(expert.readings))
    # One look when it was found, and two for each of the two records.
    assert expert.readings == 1 + 2 * 2
    assert model.asked == {"cells_and_names": 1}


def test_off_costs_nothing() -> None:
    """「moe_monitor 在 save_tokens_per_expert_interval 为正整数时激活」: otherwise no walk, no reading, no hook."""
    expert = Expert()
    model = Model({"decoder.layers.0.mlp": expert})
    log = run(config(None, 4), model, loss=lambda *_: 1.0)
    assert model.asked == {}
    assert expert.readings == 0
    assert {frame.metric for _, _, frame in log.frames} == {"step_time_ms"}


def test_a_resumed_training_goes_on_counting() -> None:
    """`iter` 「全局 micro-step 计数」: with the micro-steps of a step given, a run resumed at step 6 begins with 21."""
    iterations = Iterations(per_step=4)
    iterations.begin_step(6)
    iterations.micro_step()
    assert iterations.current == 21


def test_a_resumed_training_that_was_not_told_learns_it_in_its_first_step(caplog: pytest.LogCaptureFixture) -> None:
    """Without `micro_steps` a resumed run has no `iter` in its first step, says so once, and is right afterwards."""
    expert = Expert()
    model = Model({"decoder.layers.0.mlp": expert})
    log = run(config(), model, (6, 7, 8), forward=lambda step, micro: expert.receive(step, micro, 0))
    assert [frame.iteration for _, _, frame in log.frames if frame.metric == "tpe"] == list(range(25, 33))
    assert values(log, "tpe")[7, 1] == {"decoder.0": [7, 1, 0]}
    assert [record.getMessage()[:45] for record in caplog.records] == ["moe_monitor: training resumes at step 6 and `"]


def counted(iterations: Iterations, steps: list[tuple[int, int]]) -> list[int | None]:
    """`iter` at the end of each (step, micro_steps)."""
    out = []
    for step, micro_steps in steps:
        iterations.begin_step(step)
        for _ in range(micro_steps):
            iterations.micro_step()
        out.append(iterations.current)
    return out


@pytest.mark.parametrize(
    ("per_step", "steps", "expected"),
    [
        pytest.param(None, [(1, 2), (2, 2), (3, 2)], [2, 4, 6], id="from the start"),
        pytest.param(None, [(1, 2), (2, 3), (3, 4)], [2, 5, 9], id="a number that changes is counted"),
        pytest.param(4, [(1, 2), (2, 3)], [2, 5], id="counted is better than told"),
        pytest.param(None, [(1, 4), (2, 4), (2, 4), (3, 4)], [4, 8, 8, 12], id="a step once more"),
        pytest.param(None, [(1, 4), (2, 4), (3, 4), (2, 4)], [4, 8, 12, 8], id="back to an earlier step"),
        pytest.param(None, [(1, 4), (5, 4)], [4, 20], id="steps left out"),
        pytest.param(None, [(9, 4), (10, 4), (1, 4)], [None, 40, 4], id="from the beginning again"),
        pytest.param(2, [(9, 2), (10, 2)], [18, 20], id="resumed, told"),
    ],
)
def test_iterations(per_step: int | None, steps: list[tuple[int, int]], expected: list[int | None]) -> None:
    """`iter` goes with the global step: it survives a resume, a repeated step, and a way back."""
    assert counted(Iterations(per_step), steps) == expected


def test_an_abandoned_step_is_no_measure() -> None:
    """A step that ended after 1 of 4 micro-steps does not stand for the others when training goes back."""
    iterations = Iterations()
    counted(iterations, [(1, 4), (2, 1)])
    iterations.abandon()
    assert counted(iterations, [(5, 4)]) == [20]


def test_an_abandoned_step_leaves_no_reading_behind() -> None:
    """After an exception the step is tried again: its first record starts at its own beginning."""
    expert, log = Expert(), Log()
    monitor = MoeMonitor([(ExpertLayer("decoder", 0), expert)], 1)
    run_step(monitor, log, 1, 4, forward=lambda *_: expert.receive(1, 1, 1), fails_after=2)
    run_step(monitor, log, 1, 4, forward=lambda *_: expert.receive(2, 2, 2))
    assert values(log, "tpe")[1, 1] == {"decoder.0": [2, 2, 2]}
    assert [frame.iteration for _, _, frame in log.frames] == [1, 2, 1, 2, 3, 4]


def test_what_is_no_count_is_an_error_that_names_the_layer() -> None:
    """A counter that was never initialised holds anything: the record is left out, the rest of the step is there."""
    expert = Expert()
    model = Model({"decoder.layers.0.mlp": expert})

    def forward(_step: int, micro: int) -> None:
        expert.receive(float("nan") if micro == 2 else 1, 1, 1)

    yaml = {**config()["monitor"], "train_state": {"local_loss": True}}  # type: ignore[dict-item]
    log = run({"monitor": yaml}, model, (1,), micro_steps=2, forward=forward, loss=lambda *_: 0.5)
    assert list(values(log, "tpe")) == [(1, 1)]
    assert list(values(log, "local_loss")) == [(1, 1), (1, 2)]
    ((where, error),) = log.errors
    assert where == "MoeMonitor.micro_step"
    assert "tokens_per_expert of decoder.0 holds" in error


def test_counts_above_what_a_fraction_of_a_float_can_show() -> None:
    """Running counts in float32 and int64 give whole numbers."""
    expert = Expert()
    model = Model({"decoder.layers.0.mlp": expert})
    expert.receive(2**24 - 8, 0, 0)
    log = run(config(), model, (1,), micro_steps=2, forward=lambda *_: expert.receive(3, 1, 0))
    assert values(log, "tpe")[1, 2] == {"decoder.0": [3, 1, 0]}
