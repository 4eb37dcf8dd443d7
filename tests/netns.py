"""Two nodes on one machine: network namespaces that only a wire joins. Needs root and Debian's iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["ADDRESSES", "ADDRESSES6", "Nodes", "nodes_or_skip", "two_nodes"]

ADDRESSES = ("10.99.0.1", "10.99.0.2")
ADDRESSES6 = ("fd00:99::1", "fd00:99::2")
_WIRE = Path(__file__).with_name("wire.py")
_PATIENCE = 20.0
# Of <linux/ethtool.h>: switch off what a network card would do, so that whole frames with checksums pass the wire.
_ETHTOOL_OFF = """
import fcntl, socket, struct, sys, ctypes
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    for command in (0x17, 0x1f, 0x24, 0x2c):
        value = ctypes.create_string_buffer(struct.pack("II", command, 0))
        try:
            fcntl.ioctl(s, 0x8946, struct.pack("16sP", sys.argv[1].encode(), ctypes.addressof(value)).ljust(40, b"\\0"))
        except OSError as e:
            print(hex(command), e)
"""


class Nodes:
    """Two namespaces; node 0 has the first address of each family, node 1 the second."""

    def __init__(self, names: Sequence[str], wire: subprocess.Popen[str]) -> None:
        self._names = names
        self._wire = wire
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, node: int, command: Sequence[str | Path], cwd: Path, environ: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a process on a node, in a session of its own; `log` gets what it says."""
        with log.open("wb") as said:
            process = subprocess.Popen(
                [_ip(), "netns", "exec", self._names[node], *command],
                cwd=cwd,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def end(self) -> None:
        """End what was started and has not ended."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def move(self, node: int, old: str, new: str) -> None:
        """A node gets another address in place of the one it has; what was connected to that hears nothing more."""
        _run("-n", self._names[node], "addr", "del", f"{old}/24", "dev", "eth0")
        _run("-n", self._names[node], "addr", "add", f"{new}/24", "dev", "eth0")

    def cut(self) -> None:
        """From now on nothing gets through."""
        self._say("cut", "cut")

    def join(self) -> None:
        """Everything gets through again."""
        self._say("join", "joined")

    def _say(self, word: str, answer: str) -> None:
        assert self._wire.stdin is not None
        assert self._wire.stdout is not None
        self._wire.stdin.write(word + "\n")
        self._wire.stdin.flush()
        assert self._wire.stdout.readline().strip() == answer


def nodes_or_skip() -> None:
    """Skip where this machine cannot have two nodes; says what is missing."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip", path=_PATH) is None:
        pytest.skip("network namespaces need `ip` (iproute2)")
    probe = f"rankd-probe-{os.getpid()}"
    made = subprocess.run([_ip(), "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"this machine makes no network namespaces: {made.stderr.strip()}")
    subprocess.run([_ip(), "netns", "del", probe], check=True)


@contextmanager
def two_nodes(delay: float = 0.0, loss: float = 0.0) -> Iterator[Nodes]:
    """Two nodes, as long as the context lasts.

    Args:
        delay: seconds that each frame takes.
        loss: the part of the frames that is lost, each way.
    """
    names = [f"rankd-{os.getpid()}-{part}" for part in ("n0", "n1", "mid")]
    try:
        for name in names:
            _run("netns", "add", name)
            _run("-n", name, "link", "set", "lo", "up")
        for node in (0, 1):
            _plug(names[node], names[2], node)
        wire = subprocess.Popen(
            [_ip(), "netns", "exec", names[2], sys.executable, _WIRE, "m0", "m1", str(delay), str(loss)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert wire.stdout is not None
        assert wire.stdout.readline().strip() == "carrying"
        nodes = Nodes(names, wire)
        try:
            yield nodes
        finally:
            nodes.end()
            print(wire.communicate(timeout=_PATIENCE)[0])
    finally:
        for name in names:
            subprocess.run([_ip(), "netns", "del", name], capture_output=True)


def _plug(node: str, middle: str, number: int) -> None:
    _run("-n", node, "link", "add", "eth0", "type", "veth", "peer", "name", f"m{number}", "netns", middle)
    _run("-n", node, "addr", "add", f"{ADDRESSES[number]}/24", "dev", "eth0")
    _run("-n", node, "-6", "addr", "add", f"{ADDRESSES6[number]}/64", "dev", "eth0", "nodad")
    for where, name in ((node, "eth0"), (middle, f"m{number}")):
        subprocess.run([_ip(), "netns", "exec", where, sys.executable, "-c", _ETHTOOL_OFF, name], check=True)
        _run("-n", where, "link", "set", name, "up")


# Where Debian has it, also for a user whose PATH has not.
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _ip() -> str:
    return shutil.which("ip", path=_PATH) or "ip"


def _run(*arguments: str) -> None:
    subprocess.run([_ip(), *arguments], check=True, capture_output=True, text=True)
