"""Text logs as records: rankd's own, and those of MindFormers, as its two versions write them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rankd.collector.foreign import is_prefixed, rank_of_path
from rankd.collector.parsing import records_of_log
from rankd.collector.protocol.errors import RankdError, SpecLogError
from rankd.collector.protocol.records import Position, Record
from rankd.collector.protocol.speclog import parse
from rankd.collector.sinks.speclog import MERGED_LOG, rank_log

from ..support import PATIENCE
from .releases import begin, late, steps, write_logs

STDOUT = (
    "2026-01-02 03:04:05,678 - mindformers./output/log[mindformers/pynative/callback/loss_callback.py:337] - INFO - "
)
FILE = "[INFO] 2026-01-02 03:04:05,678 [mindformers/pynative/tools/monitor.py:99] flush_pending: "

# One step of 2.1's PyNative trainer, in its order.
STEP_2_1 = """\
{ step:[    4/  100], consumed_samples: 32, global_batch_size: 8, loss:   4.864965, per_step_time:    843ms, \
lr: 1.000000e-03, grad_norm:   1.166702, throughput:  12.50T }
step:[    4/  100] max_attention_logit/decoder.layers.0.core_attention.max_logits_val: [0.01289, 0.01189]
step:[    4/  100] max_attention_logit/mean: 0.01239
{"step": 4, "micro_step": 1, "local_loss": 2.4324}
{"step": 4, "micro_step": 2, "local_loss": NaN}
{"step": 4, "micro_step": 2, "device_loss": 4.8649}
{ "step": 4, "micro_step": 1 }
{ "local_norm": decoder.layers.0.weight:   0.000381 }
{ "step": 4, "micro_step": 2 }
{ "local_norm": decoder.layers.0.weight:        nan }
{ "step": 4 }
{ "device_norm": decoder.layers.0.weight:   0.000402 }
"""


def found(records: list[Record]) -> list[tuple[str, str | None, object, int, int | None]]:
    return [(r.metric, r.name, r.value, r.position.step, r.position.micro_step) for r in records]


@pytest.mark.parametrize("prefix", [STDOUT, FILE])
def test_a_step_of_version_2_1(tmp_path: Path, prefix: str) -> None:
    """Summary, logits, losses and norms of a step, each where it belongs, under both prefixes."""
    path = tmp_path / "rank_3" / "info.log"
    path.parent.mkdir()
    noise = ["Traceback of somebody else\n", f"{prefix}Start training ... {{ not ours }}\n", "\n"]
    path.write_text("".join([*noise, *(prefix + line + "\n" for line in STEP_2_1.splitlines())]))
    records = list(records_of_log(path))
    assert {(r.rank, r.position.attempt) for r in records} == {(3, 1)}
    assert all(r.time is not None for r in records)
    assert [repr(each) for each in found(records)] == [
        repr(each)
        for each in (
            ("consumed_samples", None, 32.0, 4, None),
            ("global_batch_size", None, 8.0, 4, None),
            ("loss", None, 4.864965, 4, None),
            ("step_time_ms", None, 843.0, 4, None),
            ("lr", None, 1e-3, 4, None),
            ("grad_norm", None, 1.166702, 4, None),
            ("throughput", None, 12.5, 4, None),
            ("max_attention_logit", "decoder.layers.0.core_attention.max_logits_val", (0.01289, 0.01189), 4, None),
            ("local_loss", None, 2.4324, 4, 1),
            ("local_loss", None, float("nan"), 4, 2),
            ("device_loss", None, 4.8649, 4, None),
            ("local_norm", "decoder.layers.0.weight", 0.000381, 4, 1),
            ("local_norm", "decoder.layers.0.weight", float("nan"), 4, 2),
            ("device_norm", "decoder.layers.0.weight", 0.000402, 4, None),
        )
    ]


def test_the_step_line_of_version_2_0(tmp_path: Path) -> None:
    """Epoch and step within it give the global step; both forms of the loss; words are no values."""
    tail = "per_step_time: 843ms, lr: 1e-05, overflow cond: False, loss_scale: None, global_norm: [1.5]"
    lines = [
        "{ Epoch:[  1/  2], step:[    9/   10], loss: 4.864965, " + tail + ", train_throughput_per_npu: 3.250T\n",
        "{ Epoch:[  2/  2], step:[    1/   10], loss:[4.500000/4.600000], " + tail + " }\n",
        "   55.0% |█████     | 1.20000 samples/s/p  0:00:05 }\n",
    ]
    path = tmp_path / "worker_0.log"
    path.write_text("".join(STDOUT + line for line in lines), encoding="utf-8")
    records = list(records_of_log(path))
    assert {r.position for r in records} == {Position(1, 9), Position(1, 11)}
    assert found(records)[-4:] == [
        ("loss", None, 4.5, 11, None),
        ("step_time_ms", None, 843.0, 11, None),
        ("lr", None, 1e-5, 11, None),
        ("grad_norm", None, 1.5, 11, None),
    ]


def test_training_that_goes_back_is_another_attempt(tmp_path: Path) -> None:
    """A resume at an earlier step is told by the step line; the losses after it belong to it."""
    text = "{ step:[    %d/   9], loss: 1.0, per_step_time: 1ms }\n"
    lines = [text % 4, text % 5, text % 4, '{"step": 4, "micro_step": 1, "local_loss": 2.0}\n']
    path = tmp_path / "rank_0.log"
    path.write_text("".join(FILE + line for line in lines))
    losses = [r for r in records_of_log(path) if r.metric in ("loss", "local_loss")]
    assert [r.position.attempt for r in losses] == [1, 1, 2, 2]


def test_logs_of_rankd_are_read_as_they_are(tmp_path: Path) -> None:
    """The merged log, and a rank's own, give what the strict reader gives."""
    write_logs(tmp_path, [*begin(1), *steps(1, 4), late(2, 1)])
    for name, rank in ((MERGED_LOG, None), (rank_log(1), 1)):
        lines = (tmp_path / name).read_bytes().splitlines(keepends=True)
        expected = [r for r in parse(lines, rank=rank) if isinstance(r, Record)]
        assert list(records_of_log(tmp_path / name)) == expected != []


def test_damage_in_a_log_of_ours_is_an_error(tmp_path: Path) -> None:
    """A line that rankd does not write cannot pass for data; the error has its number."""
    (tmp_path / MERGED_LOG).write_text('[rank_0] { "step": 1 }\n[rank_0] { "lr": zero }\n')
    with pytest.raises(SpecLogError, match="line 2"):
        list(records_of_log(tmp_path / MERGED_LOG))


def test_whose_log_it_is_must_be_known(tmp_path: Path) -> None:
    """No rank in the path: an error that says how to tell; or the argument."""
    path = tmp_path / "info.log"
    path.write_text(FILE + '{"step": 4, "micro_step": 1, "local_loss": 2.0}\n')
    with pytest.raises(RankdError, match="--of-rank"):
        list(records_of_log(path))
    assert [r.rank for r in records_of_log(path, 7)] == [7]


@pytest.mark.parametrize(
    ("path", "rank"),
    [
        ("log/rank_3/info.log", 3),
        ("msrun_log/worker_12.log", 12),
        ("rank_1/rank_2.log", 2),
        ("info.log", None),
        ("ranking/info.log", None),
    ],
)
def test_the_rank_stands_in_the_path(path: str, rank: int | None) -> None:
    """As MindFormers and msrun name their files and folders; the innermost name counts."""
    assert rank_of_path(Path(path)) == rank


def test_prefixes() -> None:
    """Both of MindFormers' prefixes are known, and nothing else."""
    assert is_prefixed(STDOUT + "x")
    assert is_prefixed(FILE + "x")
    assert not is_prefixed("[WARNING] DEVICE(1,ffff,python): something")


def test_the_command(tmp_path: Path) -> None:
    """Several ranks' files become one stream of strict JSON, filtered as everywhere."""
    for rank in (0, 1):
        (tmp_path / f"rank_{rank}").mkdir()
        text = "".join(FILE + line + "\n" for line in STEP_2_1.splitlines())
        (tmp_path / f"rank_{rank}" / "info.log").write_text(text)
    command = [sys.executable, "-m", "rankd.collector", "parse", *map(str, tmp_path.glob("rank_*/info.log"))]
    done = subprocess.run([*command, "--metric", "local_loss"], capture_output=True, text=True, timeout=PATIENCE)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(r["rank"], r["micro_step"], r["value"]) for r in records} == {
        (0, 1, 2.4324), (0, 2, "NaN"), (1, 1, 2.4324), (1, 2, "NaN")
    }  # fmt: skip
    assert "4 records of 2 logs" in done.stderr
    assert done.returncode == 0
    named = subprocess.run(
        [*command, "--metric", "local_loss", "-o", "-"], capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path
    )
    assert (named.stdout, named.returncode) == (done.stdout, 0)
    assert not (tmp_path / "-").exists()
