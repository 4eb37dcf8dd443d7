"""What stands beside the logs: a pure function of the hellos and of who writes it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from rankd.collector.description import Writer, describe, readable
from rankd.collector.entries import Ended, Opened
from rankd.collector.protocol.about import CONFIGURATION, pack_text
from rankd.collector.protocol.wire import Hello
from rankd.collector.run import Run

from .streams import Core, hello, training

GOLDEN = Path(__file__).parent / "golden"
WRITER = Writer("8d2f", "node0", 4711, 1_764_460_800.0, {"rankd": "0.1.0", "python": "3.11.2"})
CONFIG = {"monitor": {"train_state": {"local_norm": ["weight"], "local_loss": True}}, "rankd": {"output": "out"}}


def full_hello(rank: int, world_size: int, *, process: int = 1, **about: str) -> Hello:
    """A hello as an agent of a training with tensor parallelism sends it."""
    facts = {
        "local_norm_kind": "increment",
        "identity": "mindspore",
        "rankd": "0.1.0",
        "python": "3.11.2",
        "mindspore": "2.10.0",
        "configuration_digest": "c0ffee",
        "dp": str(rank // 2),
        "tp": str(rank % 2),
    }
    chunks = pack_text(CONFIGURATION, json.dumps(CONFIG)) if rank == 0 else {}
    plain = hello(rank, world_size, process=process, total_steps=100)
    return replace(
        plain, host=f"node{rank // 2}", started=1_764_460_801.0 + process, about={**facts, **chunks, **about}
    )


def joined(*hellos: Hello) -> Run:
    """A run that these processes have joined, in this order."""
    core = Core()
    for one in hellos:
        core.apply(Opened(one))
    return core.run


def test_a_run_is_described() -> None:
    """Start, steps, world size, versions, hosts, configuration, and for each rank who it is and where it stands."""
    description = describe(joined(*(full_hello(rank, 4) for rank in range(4))), WRITER)
    assert description["run"] == "8d2f"
    assert description["started"] == "2025-11-30T00:00:02+00:00"
    assert description["expected_steps"] == 100
    assert description["world_size"] == 4
    assert description["local_norm_kind"] == "increment"
    assert description["versions"] == {"rankd": "0.1.0", "python": "3.11.2", "mindspore": "2.10.0"}
    assert description["hosts"] == ["node0", "node1"]
    assert description["configuration"] == CONFIG
    assert description["configuration_differs_on_ranks"] is None
    assert description["attempts"] == [{"attempt": 1, "world_size": 4, "last_step": None}]
    assert description["ranks"][3] == {
        "rank": 3,
        "host": "node1",
        "pid": 1003,
        "started": "2025-11-30T00:00:02+00:00",
        "attempt": 1,
        "identity": "mindspore",
        "coordinates": {"dp": "1", "tp": "1"},
    }
    assert json.loads(json.dumps(description)) == description


def test_the_page_for_a_person() -> None:
    """`RUN.md` says the same on one page, ranks by host and by their place in the layout (golden file)."""
    run = joined(*(full_hello(rank, 4) for rank in range(4)))
    assert readable(describe(run, WRITER)) == (GOLDEN / "RUN.md").read_text()


def test_nothing_of_an_earlier_attempt_is_wiped() -> None:
    """After a restart the attempt, its last step and the earlier process of each rank are still there."""
    core = Core()
    first, second = training(0, 1, goodbye=None), training(0, 1, process=2, steps=(1,))
    core.open(first)
    core.deliver(first)
    core.open(second)
    core.deliver(second)
    core.apply(Ended())
    description = describe(core.run, WRITER)
    assert description["attempts"] == [
        {"attempt": 1, "world_size": 1, "last_step": 2},
        {"attempt": 2, "world_size": 1, "last_step": 1},
    ]
    (rank,) = description["ranks"]
    assert rank["pid"] == 2000
    assert [earlier["pid"] for earlier in rank["earlier_processes"]] == [1000]


def test_ranks_that_differ_are_named() -> None:
    """Another version or configuration on one rank stands out, by rank."""
    odd = full_hello(2, 4, mindspore="2.9.0", configuration_digest="beef")
    run = joined(full_hello(0, 4), full_hello(1, 4), odd, full_hello(3, 4))
    description = describe(run, WRITER)
    assert description["versions"]["mindspore"] == {"2.10.0": "0-1,3", "2.9.0": "2"}
    assert description["configuration_differs_on_ranks"] == "2"
    text = readable(description)
    assert "MindSpore 2.10.0 on ranks 0-1,3; 2.9.0 on rank 2" in text
    assert "**Another configuration is in use on rank 2.**" in text


def test_what_peers_say_stays_in_its_cell() -> None:
    """A host name that holds markup or line ends cannot change the page around it."""
    run = joined(replace(full_hello(0, 1), host="a|b\n# c <script>"))
    assert "| a\\|b # c &lt;script> | 0 |" in readable(describe(run, WRITER))


def test_a_hello_that_says_little_is_described_too() -> None:
    """Without facts, and with a clock beyond reason, there is a description all the same."""
    run = joined(replace(hello(0, 1), started=1e300))
    description = describe(run, WRITER)
    assert description["configuration"] is None
    assert description["started"] is None
    assert description["expected_steps"] is None
    assert "Not told by any rank." in readable(description)


def test_a_configuration_nested_without_end_is_text() -> None:
    """Whether it is too deep to be read or only to be written."""
    for depth in (900, 15_000):
        deep = "[" * depth + "]" * depth
        one = replace(hello(0, 1), about=pack_text(CONFIGURATION, deep))
        description = describe(joined(one), WRITER)
        assert description["configuration"] == deep
        json.dumps(description, indent=1)
        readable(description)
