"""Questions, reports and ranks that make no sense, at the real parts: an error says so, and all goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.profiler_ctl.test_part import Now

from rankd.collector.entries import Decided, decode_entry, encode_entry
from rankd.collector.protocol.checks import MAX_STEP
from rankd.collector.protocol.errors import RankdError
from rankd.collector.protocol.keys import RunKey
from rankd.collector.protocol.messages import Answer, Ask, Command, Fact, Facts, Report
from rankd.collector.protocol.steering import SAMPLE, STACKS, Decide, Move, Part
from rankd.collector.protocol.wire import decode_message, encode_message
from rankd.collector.sampler import Sampler
from rankd.collector.stacks import StackRequests
from rankd.collector.steering import Steering
from rankd.profiler_ctl.asked import KIND, Asked
from rankd.profiler_ctl.choosing import Choice
from rankd.profiler_ctl.coordinator import Limits
from rankd.profiler_ctl.part import ProfilingPart

KEY = RunKey("k" * 32)
WORDS = (
    "number", "first", "last", "late", "session", "state", "serial", "step", "micro_step", "reason", "refused", "bytes",
    "count", "path", "seconds", "covered", "text", "ranks", "steps", "at", "level", "mstx", "memory", "cpu", "stack",
    "interval", "step_interval", "print_interval", "for_steps", "threads", "slowest", "pp_stage", "one_per_node",
)  # fmt: skip
STATES = (
    "",
    "proposed",
    "armed",
    "recording",
    "exporting",
    "done",
    "failed",
    "missed",
    "refused",
    "aborted",
    "unknown",
)
integers = st.sampled_from((0, 1, 2, 3, 12, -1, MAX_STEP, MAX_STEP - 1, -MAX_STEP)) | st.integers(-MAX_STEP, MAX_STEP)
texts = st.sampled_from(("all", "0", "0-2", "0-65535", "p1", "p2", "static", "\x1b[2J\n", "🦀" * 4_096, *STATES))
values: st.SearchStrategy[Fact] = (
    integers | texts | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False)
)
nonsense = st.dictionaries(st.sampled_from(WORDS) | st.text(min_size=1, max_size=3), values, max_size=12).filter(
    lambda facts: all(name.isprintable() for name in facts)
)
START: dict[str, Fact] = {**Choice("0-2").body(), **Asked(2).body()}
kinds = st.sampled_from((
    "sample", "sample.status", "sample.x", "stacks", "stacks.found", "stacks.x", "profile.start", "profile.stop",
    "profile.status", "profile", "x", ".", "log.x",
))  # fmt: skip
questions = st.tuples(kinds, nonsense) | st.one_of(
    st.tuples(st.just("profile.start"), nonsense.map(lambda facts: {**START, **facts})),
    st.tuples(st.just("profile.start"), st.just(START)),
    st.tuples(st.just("profile.stop"), st.sampled_from(({}, {"session": "p1"}))),
    st.tuples(st.just("sample"), st.fixed_dictionaries({"interval": integers}, optional={"for_steps": integers})),
)
likely = st.fixed_dictionaries(
    {"session": st.sampled_from(("p1", "p2")), "state": st.sampled_from(STATES), "serial": st.integers(1, 9)},
    optional={"bytes": values, "count": values, "step": values, "reason": values, "path": values, "refused": values},
)
numbered = st.fixed_dictionaries({"number": st.integers(0, 4), "late": st.booleans()}, optional={"text": texts})
reports = st.tuples(
    st.integers(0, 2), st.sampled_from((SAMPLE, STACKS, KIND, KIND + ".x")), nonsense | likely | numbered
)
paces = st.sampled_from((None, 0.5, 0.0, 5e-324, 1e-300, 1e-9, 1e300, math.inf, math.nan))
events = st.one_of(
    st.tuples(st.just("ask"), questions),
    st.tuples(st.just("report"), reports),
    st.tuples(st.just("join"), st.integers(0, 3), st.dictionaries(st.sampled_from(("profiler", "pp")), texts)),
    st.tuples(st.just("step"), st.integers(0, 2), integers.map(abs)),
    st.tuples(st.just("wait"), st.sampled_from((0.0, 0.3, 1.0, 20.0, 200.0)), paces),
    st.tuples(st.just("restart")),
)


class Rig:
    """The real parts, and what the collector's shell does with their moves."""

    def __init__(self) -> None:
        self.ranks = Now({0: 10, 1: 10, 2: 10})
        self.decided: dict[str, dict[str, Facts]] = {}
        self.start()

    def start(self) -> None:
        profiling = ProfilingPart(Limits(), 1.0)
        parts: dict[str, Part] = {SAMPLE: Sampler(), STACKS: StackRequests(), KIND: profiling}
        self.steering = Steering(parts, lambda: self.ranks)  # type: ignore[arg-type, return-value]
        self.steering.restore(self.decided)
        self.profiling = profiling
        for rank in self.ranks.steps:
            self.make(self.steering.joined(rank))

    def make(self, moves: Sequence[Move]) -> None:
        for move in moves:
            if isinstance(move, Decide):
                entry = decode_entry(encode_entry(Decided(move.kind, move.key, move.facts, move.text)))
                assert isinstance(entry, Decided)
                self.decided.setdefault(entry.kind, {}).pop(entry.key, None)
                self.decided[entry.kind][entry.key] = entry.facts
            else:
                decode_message(encode_message(Command.proved(KEY, bytes(16), move.kind, move.facts)))

    def ask(self, kind: str, facts: Facts) -> Mapping[str, Any] | None:
        try:
            moves, content = self.steering.asked(Ask.proved(KEY, 1, kind, facts))
        except RankdError as e:
            self.refused(Answer(1, False, str(e).encode()))
            return None
        self.make(moves)
        found = json.loads(encode_message(Answer(1, True, content)) and content)
        assert isinstance(found, dict)
        return found

    def refused(self, answer: Answer) -> None:
        assert b"failed at that" not in answer.content, answer

    def on(self, event: tuple[Any, ...]) -> None:
        match event:
            case ("ask", (kind, facts)):
                self.ask(kind, facts)
            case ("report", (rank, kind, facts)):
                self.make(self.steering.reported(rank, Report(kind, facts)))
            case ("join", rank, _):
                self.make(self.steering.joined(rank))
            case ("step", rank, step):
                self.ranks.steps[rank] = step
            case ("wait", seconds, pace):
                self.ranks.now += seconds
                self.ranks.seconds_per_step = pace
            case ("restart",):
                self.start()
        self.make(self.steering.tick())
        json.dumps(self.profiling.status(), allow_nan=False)


@settings(max_examples=100, deadline=None)
@given(st.lists(events, max_size=25))
def test_nothing_but_our_errors_comes_out_and_the_parts_go_on(told: list[tuple[Any, ...]]) -> None:
    """Whatever came before, a proper question has a proper answer."""
    rig = Rig()
    for event in told:
        rig.on(event)
    assert not rig.steering._told, rig.steering._told
    rig.ranks.steps, rig.ranks.seconds_per_step = dict.fromkeys(range(3), 10), 0.5
    assert rig.ask("sample", {"interval": 1, "for_steps": 3}) is not None
    assert rig.ask("stacks", {}) is not None
    assert rig.ask("profile.stop", {}) is not None
    assert rig.ask("profile.status", {}) is not None
