"""What a process says about itself, and what becomes of it beside the logs."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from tests.support import collected, finish, script

from rankd.agent.about import effective, facts, version_of
from rankd.agent.config import AgentConfig
from rankd.agent.identity import Identity
from rankd.collector.protocol.about import CONFIGURATION, unpack_text
from rankd.collector.protocol.records import Comment
from rankd.collector.protocol.wire import Hello

CONFIG = AgentConfig.from_mapping({"monitor": {"train_state": {"local_norm": ["attention"]}}})


def test_rank_0_tells_the_configuration_and_the_others_its_digest() -> None:
    """The configuration as used, defaults filled in, comes from rank 0; a digest from each rank shows a difference."""
    first, second = (facts(CONFIG, Identity(rank, 2, "argument")) for rank in (0, 1))
    assert json.loads(unpack_text(CONFIGURATION, first) or "") == effective(CONFIG)
    assert effective(CONFIG)["monitor"]["train_state"] == {
        "local_norm": ["attention"],
        "local_loss": False,
        "device_norm": False,
        "device_loss": False,
    }
    assert unpack_text(CONFIGURATION, second) is None
    assert first["configuration_digest"] == second["configuration_digest"]
    assert first["configuration_digest"] != facts(AgentConfig(), Identity(0, 2, "argument"))["configuration_digest"]


@pytest.mark.parametrize("more", [{"x" * 2_000: "y" * 5_000}, {str(n): n for n in range(500)}, {"": "\udc80", "a": 1}])
def test_what_is_added_cannot_keep_the_agent_from_starting(more: dict[str, object]) -> None:
    """Facts of the user's are clipped to what a hello can carry."""
    told = facts(CONFIG, Identity(0, 1, "argument"), more)
    assert Hello(bytes(16), "", 0, 1, 1, "host", 1, 0.0, None, told).about["identity"] == "argument"


def test_a_version_that_is_not_there_is_none() -> None:
    """Versions are read from the installed distributions; one that is missing is left out."""
    assert version_of("msgpack")
    assert version_of("no-such-distribution") is None


@pytest.mark.slow
def test_a_description_stands_beside_the_logs(tmp_path: Path) -> None:
    """A real run leaves run.json and RUN.md: who ran where, with which configuration, and how far it was to go."""
    body = 'with Agent.from_yaml("train.yaml", model=Model(), total_steps=3, about={"tp": 0}) as a: train(a)'
    assert finish(script(tmp_path, body)) == (0, "")
    collected(tmp_path)
    description = json.loads((tmp_path / "out" / "run.json").read_text())
    assert description["expected_steps"] == 3
    assert description["configuration"]["monitor"]["train_state"]["local_norm"] == ["weight"]
    assert description["ranks"][0]["host"] == socket.gethostname()
    assert description["ranks"][0]["coordinates"] == {"tp": "0"}
    assert "| steps expected | 3 |" in (tmp_path / "out" / "RUN.md").read_text()


@pytest.mark.slow
def test_an_exception_that_the_agent_did_not_see_is_told_at_exit(tmp_path: Path) -> None:
    """A trainer that calls the agent from callbacks ends by an exception: it stands in the log all the same."""
    body = """
    agent = Agent.from_yaml("train.yaml", model=Model())
    step = agent.step(7)
    step.__enter__()
    agent.micro_step(loss=1.0)
    raise RuntimeError("the device is gone")
    """
    status, said = finish(script(tmp_path, body))
    assert status == 1
    assert "the device is gone" in said
    comments = [c for c in collected(tmp_path) if isinstance(c, Comment)]
    assert ("exception", "RuntimeError: the device is gone") in [(c.kind, c.text) for c in comments]
    assert ("first_failure", "rank 0: RuntimeError: the device is gone") in [(c.kind, c.text) for c in comments]
