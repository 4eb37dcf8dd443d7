"""A collector in a process of its own, and peers that a test scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support import CollectorProcess, Peer


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[CollectorProcess]:
    """A collector that is gone after the test."""
    it = CollectorProcess(tmp_path / "out")
    yield it
    if it.process.poll() is None:
        it.kill()


@pytest.fixture
def peers(collector: CollectorProcess) -> Iterator[Callable[[], Peer]]:
    """Makes peers that are closed after the test."""
    made: list[Peer] = []

    def make() -> Peer:
        made.append(Peer(collector))
        return made[-1]

    yield make
    for peer in made:
        peer.close()
