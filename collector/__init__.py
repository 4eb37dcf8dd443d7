"""The rank-0 daemon: takes what the agents push, orders it, journals it and writes the logs.

`read` gives a run's records, at full precision, to whoever looks at them in Python.
"""

from __future__ import annotations

from typing import Any

__all__ = ["read"]


def __getattr__(name: str) -> Any:
    # When it is asked for: the agent imports this package in a training process, which reads no journal.
    if name == "read":
        from .reading import read

        return read
    raise AttributeError(name)
