"""Commands are obeyed with a proof of the run's key, and whatever goes wrong is told and nothing more."""

from __future__ import annotations

import pytest

from rankd.agent.commands import Commands
from rankd.collector.protocol.keys import RunKey
from rankd.collector.protocol.messages import Command, Facts, Report

KEY, OTHER = RunKey.fresh(), RunKey.fresh()
SESSION = b"s" * 16


def commands(key: RunKey | None = KEY) -> tuple[Commands, list[Facts]]:
    """A process that takes commands `note`, and `fail` which fails; what it has noted."""
    noted: list[Facts] = []

    def note(facts: Facts) -> list[Report]:
        noted.append(facts)
        return [Report("note", {"fine": True})]

    def fail(facts: Facts) -> list[Report]:
        raise ValueError(f"no {facts['x']}")

    them = Commands(SESSION, lambda: key)
    them.on("note", note)
    them.on("fail", fail)
    return them, noted


def test_a_command_with_its_proof_is_obeyed() -> None:
    """Whatever order the facts come in."""
    them, noted = commands()
    command = Command.proved(KEY, SESSION, "note", {"b": 1, "a": None})
    turned = Command("note", {"a": None, "b": 1}, command.proof)
    assert them.obey(command) == them.obey(turned) == [Report("note", {"fine": True})]
    assert noted == [{"a": None, "b": 1}] * 2


@pytest.mark.parametrize(
    "command",
    [
        Command("note", {"x": 1}, b""),
        Command.proved(OTHER, SESSION, "note", {"x": 1}),
        Command.proved(KEY, b"t" * 16, "note", {"x": 1}),
        Command("note", {"x": 1}, Command.proved(KEY, SESSION, "note", {"x": 2}).proof),
        Command("note", {"x": 1}, Command.proved(KEY, SESSION, "note", {"x": True}).proof),
        Command("note", {"x": 1}, Command.proved(KEY, SESSION, "fail", {"x": 1}).proof),
    ],
    ids=["none", "another key", "another process", "other facts", "another type", "another kind"],
)
def test_without_a_proof_nothing_is_done(command: Command, caplog: pytest.LogCaptureFixture) -> None:
    """A process on this machine that has got hold of the port cannot steer; it is told so, and the log once."""
    them, noted = commands()
    for _ in range(2):
        (report,) = them.obey(command)
        assert "proof" in str(report.facts["refused"])
    assert noted == []
    assert len(caplog.records) == 1


def test_a_process_without_the_key_takes_no_commands() -> None:
    """It says why."""
    them, noted = commands(None)
    (report,) = them.obey(Command.proved(KEY, SESSION, "note", {}))
    assert "key" in str(report.facts["refused"])
    assert noted == []


def test_what_fails_or_is_unknown_is_told_under_its_own_kind() -> None:
    """A collector of a newer version may know more; a handler that raises costs its command."""
    them, _ = commands()
    (failed,) = them.obey(Command.proved(KEY, SESSION, "fail", {"x": 7}))
    (unknown,) = them.obey(Command.proved(KEY, SESSION, "later", {}))
    assert (failed.kind, failed.facts["x"]) == ("fail", 7)
    assert "no 7" in str(failed.facts["refused"])
    assert unknown.kind == "later"
    assert "knows no 'later'" in str(unknown.facts["refused"])


@pytest.mark.parametrize("kind", ["fail", "nothing"])
def test_a_command_as_full_as_it_may_be_is_answered_too(kind: str) -> None:
    """The refusal has room, and what the error says travels whatever it is."""
    facts: Facts = {f"x{n}": n for n in range(63)} | {"x": "\u00e9"}
    them, _ = commands()
    (report,) = them.obey(Command.proved(KEY, SESSION, kind, facts))
    assert report.facts["refused"]
    them.on("odd", lambda _: (_ for _ in ()).throw(OSError("\udcff")))
    (report,) = them.obey(Command.proved(KEY, SESSION, "odd", facts))
    assert report.facts["refused"] == "OSError: \\udcff"
