"""Everything that rankd raises on purpose.

::

    RankdError
     ├── ConfigError            a key, type or value of the configuration; names the dotted path
     ├── IdentityError          the rank or world size of this process is not certain
     ├── RecordError            a record, frame, name or position that cannot exist
     ├── SpecLogError           a line of a text log that is not in the spec format
     ├── ProtocolError          bytes from a peer (or a file) that are not the protocol; the peer's fault
     │    ├── LimitError        well-formed, but larger than the protocol allows
     │    ├── UnknownTableError a block that refers to a name table which was never defined
     │    └── VersionError      another version of the protocol
     ├── RefusedError           the collector told this agent no, and why
     ├── JournalError           the journal on disk cannot be read or written
     ├── ProfilerError          a profiling session that cannot go on, or that wrote nothing one could read
     └── AnomalyError           the user asked the agent to stop the training on an anomaly (agent/anomaly.py)

An error's text says what was found, what is allowed, and what to do. None but AnomalyError reaches
a training loop: the agent turns the others into one warning.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "IdentityError",
    "JournalError",
    "LimitError",
    "ProfilerError",
    "ProtocolError",
    "RankdError",
    "RecordError",
    "RefusedError",
    "SpecLogError",
    "UnknownTableError",
    "VersionError",
]


class RankdError(Exception):
    """Base of all errors that rankd raises on purpose."""


class ConfigError(RankdError, ValueError):
    """The configuration is wrong; nothing has been started."""


class IdentityError(RankdError):
    """The rank of this process cannot be told for certain; a wrong rank is worse than none."""


class RecordError(RankdError, ValueError):
    """A record, frame, name or position that cannot exist."""


class SpecLogError(RankdError, ValueError):
    """A line that is not in the spec format; the message carries the line's number and text."""


class ProtocolError(RankdError):
    """What a peer sent, or a file holds, is not the protocol."""


class LimitError(ProtocolError):
    """What a peer sent is larger than the protocol allows."""


class UnknownTableError(ProtocolError):
    """A block refers to a name table that its process has not defined."""


class VersionError(ProtocolError):
    """The peer speaks another version of the protocol."""


class RefusedError(RankdError):
    """The collector refused this agent."""


class JournalError(RankdError):
    """The journal cannot be read or written."""


class ProfilerError(RankdError):
    """A profiling session cannot go on, or what it wrote cannot be read."""
