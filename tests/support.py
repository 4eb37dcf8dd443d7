"""What the tests with real processes share: a collector, a scripted peer, and waiting for conditions."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import resource
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import zmq

from rankd.collector.protocol.records import Comment, Record
from rankd.collector.protocol.speclog import parse
from rankd.collector.protocol.wire import Ack, Hello, Message, Welcome, decode_message, encode_message
from rankd.collector.verify import Verification

# How long a condition may take to come true: far longer than it takes on a busy machine.
PATIENCE = 120.0
# For collectors that end with ranks missing: nobody comes after that.
SOON = 0.5


class CollectorProcess:
    """`rankd collect` for one output directory, started again as often as a test wants."""

    def __init__(
        self, output: Path, *options: str, command: Sequence[str] = ("-m", "rankd.collector"), **section: object
    ) -> None:
        self.output = output
        self._command = command
        # A file, not a pipe: a collector that nobody reads must not stop.
        self._said = output.parent / f"{output.name}.said"
        # A rank that is started again may take its time on a busy machine; where none is, tests say `linger=SOON`.
        self.settings = json.dumps({"output": str(output), "beat_interval": 0.2, "linger": PATIENCE / 2, **section})
        self._options = options
        self.process = self.start()

    def start(self) -> subprocess.Popen[str]:
        """Start it and wait until it can be connected to."""
        self.launch()
        wait_for(self.is_up_or_gone)
        return self.process

    def launch(self) -> subprocess.Popen[str]:
        """Start it, and do not wait."""
        with self._said.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, *self._command, "collect", "--settings", "-", *self._options],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                text=True,
                # Where the ranks of `script` have their spools.
                env={**os.environ, "TMPDIR": str(self.output.parent)},
            )
        assert self.process.stdin is not None
        self.process.stdin.write(self.settings)
        self.process.stdin.close()
        return self.process

    def is_up_or_gone(self) -> bool:
        """It can be connected to, or it has ended."""
        return self.connection().get("pid") == self.process.pid or self.process.poll() is not None

    def said(self) -> str:
        """All that it has printed since its latest start."""
        return self._said.read_text()

    def connection(self) -> dict[str, object]:
        """What the connection file says; empty where there is none."""
        try:
            facts: dict[str, object] = json.loads((self.output / ".rankd" / "connection.json").read_text())
        except FileNotFoundError:
            return {}
        return facts

    def ended(self) -> tuple[int, str]:
        """Its exit status and all it printed."""
        return self.process.wait(PATIENCE), self.said()

    def ends(self, status: int = 0) -> None:
        """It ends by itself, with this status; if not, what it said is told."""
        got, said = self.ended()
        assert got == status, f"the collector ended with status {got}, not {status}: {said}"

    def kill(self) -> None:
        """SIGKILL, and gone."""
        self.process.kill()
        self.process.wait()


class Peer:
    """A scripted agent: says what a test wants, on a socket of its own."""

    def __init__(self, collector: CollectorProcess) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(str(collector.connection()["endpoint"]))

    def say(self, message: Message) -> None:
        self._socket.send(encode_message(message))

    def say_raw(self, *parts: bytes) -> None:
        self._socket.send_multipart(parts)

    def hear(self) -> Message:
        assert self._socket.poll(int(PATIENCE * 1000)), "the collector says nothing"
        return decode_message(self._socket.recv())

    def welcome(self, who: Hello) -> Welcome:
        """Say hello and be welcomed."""
        self.say(who)
        answer = self.hear()
        assert isinstance(answer, Welcome), answer
        return answer

    def acknowledged(self, seq: int) -> None:
        """Hear acknowledgements until `seq` is among them."""
        while (answer := self.hear()) != Ack(seq):
            assert isinstance(answer, Ack)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Until `condition` holds, at most so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def records_of(output: Path) -> list[Record]:
    """The records of merged.log."""
    lines = (output / "merged.log").read_bytes().splitlines(keepends=True)
    return [r for r in parse(lines) if isinstance(r, Record)]


def check_logs(output: Path, world_size: int) -> None:
    """SPEC section 3: each rank's lines of merged.log, prefix removed, are its own log."""
    merged = (output / "merged.log").read_bytes().splitlines(keepends=True)
    for rank in range(world_size):
        prefix = b"[rank_%d] " % rank
        own = b"".join(line[len(prefix) :] for line in merged if line.startswith(prefix))
        assert own == (output / f"rank_{rank}" / "monitor.log").read_bytes()


def verified(output: Path) -> Verification:
    """`rankd verify`: nothing is found."""
    check = Verification(output)
    check.run()
    findings = [str(finding) for finding in check.findings]
    assert not findings, "\n".join(findings)
    return check


def free_port() -> int:
    """A port that nobody uses now, and that the system gives to no outgoing connection while a collector is away."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    # Not by pytest's own random numbers: several tests run at once.
    choose = random.SystemRandom()
    for _ in range(1_000):
        port = choose.randrange(10_000, lowest)
        with socket.socket() as one, suppress(OSError):
            one.bind(("", port))
            return port
    raise AssertionError(f"no free port from 10000 to {lowest}")


# A training without a framework: four micro-steps a step, gradients that are known.
LOOP = """
import os, sys, time
import numpy as np
from rankd.agent import Agent

class Parameter:
    def __init__(self, name):
        self.name = name

class Model:
    def trainable_params(self):
        return [Parameter("decoder.layers.0.weight"), Parameter("decoder.layers.0.bias"), Parameter("output.weight")]

def train(agent, steps=3, micro_steps=4, before_micro_step=lambda step, micro_step: None):
    for step in range(1, steps + 1):
        with agent.step(step):
            accumulated = [np.zeros(4, np.float32), np.zeros(2, np.float32), np.zeros(3, np.float32)]
            for micro_step in range(1, micro_steps + 1):
                before_micro_step(step, micro_step)
                for gradient in accumulated:
                    gradient += step
                agent.micro_step(loss=step + micro_step / 10, grads=accumulated)
            agent.end_step(loss=float(step), lr=1e-3, grad_norm=0.5)
"""

YAML = """
monitor:
  train_state:
    local_norm: [weight]
    device_norm: "layers.0"
    local_loss: True
    device_loss: True
rankd:
  output: out
"""


def script(
    tmp_path: Path,
    body: str,
    *,
    yaml: str = YAML,
    stdin: int | None = None,
    command: list[str] | None = None,
    launcher: Sequence[str] = (),
    **environ: str,
) -> subprocess.Popen[str]:
    """Start a training script in tmp_path; `command`: what Python runs instead of LOOP and `body`;
    `launcher`: what starts Python.
    """
    (tmp_path / "train.yaml").write_text(yaml)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "MS_"))}
    return subprocess.Popen(
        [*launcher, sys.executable, "-W", "error", *(command or ["-c", LOOP + textwrap.dedent(body)])],
        cwd=tmp_path,
        env={**clean, "TMPDIR": str(tmp_path), **environ},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its status and what it said on stderr."""
    _, said = process.communicate(timeout=PATIENCE)
    return process.returncode, said


def collected(tmp_path: Path) -> list[Record | Comment]:
    """Wait for the collector's end; the content of merged.log."""
    log = tmp_path / "out" / "merged.log"
    deadline = time.monotonic() + PATIENCE
    while not (log.exists() and b"[collector] # end" in log.read_bytes()):
        assert time.monotonic() < deadline, (tmp_path / "out" / ".rankd" / "collector.log").read_text()
        time.sleep(0.01)
    return list(parse(log.read_bytes().splitlines(keepends=True)))


def values(content: list[Record | Comment], metric: str, rank: int = 0) -> dict[tuple[int, int | None], object]:
    """The values of a scalar metric of a rank by (step, micro_step)."""
    records = [r for r in content if isinstance(r, Record) and r.metric == metric and r.rank == rank]
    return {(r.position.step, r.position.micro_step): r.value for r in records}


def contents(tmp_path: Path) -> list[Record | Comment]:
    """What merged.log holds now."""
    return list(parse((tmp_path / "out" / "merged.log").read_bytes().splitlines(keepends=True)))


def comments(content: list[Record | Comment]) -> dict[str, list[str]]:
    """The texts of the comments by kind."""
    told: dict[str, list[str]] = {}
    for c in content:
        if isinstance(c, Comment):
            told.setdefault(c.kind, []).append(c.text)
    return told


def read_until(process: subprocess.Popen[str], line: str) -> None:
    """Read what a script prints until it prints this line."""
    assert process.stdout is not None
    for said in process.stdout:
        if said.strip() == line:
            return
    raise AssertionError(f"it ended without saying {line!r}: {process.communicate()}")


def rest(process: subprocess.Popen[str]) -> str:
    """What a script still prints, until it has ended; after `read_until`, in place of `communicate`.

    What it says on stderr is shown where the test fails.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        out = process.stdout.read()
        print(f"process {process.pid}: {process.stderr.read()}")
        process.wait(PATIENCE)
    return out


def recover(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`rankd recover`, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "rankd.collector", "recover", *arguments],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def whole_log(log: Path) -> bytes:
    """All that is there of a log that may be rotated, part after part; a plain part counts before a compressed one."""
    while True:
        before = _files_of(log)
        try:
            parts: dict[str, bytes] = {}
            for path in sorted(before):
                name = path.name.removesuffix(".gz")
                if path != log and name not in parts:  # the plain form comes first
                    raw = path.read_bytes()
                    parts[name] = raw if path.name == name else gzip.decompress(raw)
            text = b"".join(parts[name] for name in sorted(parts)) + (log.read_bytes() if before[log] else b"")
        except FileNotFoundError:
            continue
        if _files_of(log) == before:
            return text


def _files_of(log: Path) -> dict[Path, int]:
    """The log's files and their inodes."""
    with contextlib.suppress(FileNotFoundError):
        found = {path: path.stat().st_ino for path in log.parent.glob(f"{log.name}.*-*")}
        return {**found, log: log.stat().st_ino if log.exists() else 0}
    return _files_of(log)


@contextmanager
def limit(which: int, soft: int) -> Iterator[None]:
    """A resource limit of this process and those that it starts, for a while."""
    before = resource.getrlimit(which)
    resource.setrlimit(which, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)
