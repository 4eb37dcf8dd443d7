"""A wire between two interfaces of this namespace that delays, loses and cuts: a process of its own, see `tests.netns`.

    python wire.py LEFT RIGHT DELAY LOSS

It carries whole Ethernet frames, so what runs over it is the kernel's real TCP. Standard input: `cut` and `join`, a
line each; the end of it ends the wire. (The kernel's own netem does the same, but many kernels come without it.)
"""

from __future__ import annotations

import random
import select
import socket
import sys
import time
from collections import deque

ETH_P_ALL = 3
PACKET_OUTGOING = 4


def carry(left: socket.socket, right: socket.socket, delay: float, loss: float) -> None:
    chance = random.Random(1)
    due: deque[tuple[float, socket.socket, bytes]] = deque()
    whole, carried, lost = True, 0, 0
    commands = sys.stdin.buffer.raw  # type: ignore[union-attr]
    print("carrying", flush=True)
    while True:
        pause = max(0.0, due[0][0] - time.monotonic()) if due else None
        ready, _, _ = select.select([left, right, commands], [], [], pause)
        if commands in ready:
            said = commands.read(4_096)
            if not said:
                print(f"{carried} frames carried, {lost} lost", flush=True)
                return
            whole = said.split()[-1] == b"join"
            print("joined" if whole else "cut", flush=True)
        for one, other in ((left, right), (right, left)):
            if one in ready:
                frame, (_, _, kind, *_) = one.recvfrom(65_535)
                if kind == PACKET_OUTGOING:
                    continue
                if whole and chance.random() >= loss:
                    carried += 1
                    due.append((time.monotonic() + delay, other, frame))
                else:
                    lost += 1
        while due and due[0][0] <= time.monotonic():
            _, to, frame = due.popleft()
            to.send(frame)


def interface(name: str) -> socket.socket:
    it = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    it.bind((name, ETH_P_ALL))
    return it


if __name__ == "__main__":
    carry(interface(sys.argv[1]), interface(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
