"""collector/config.py: the `rankd:` section."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankd.collector.config import JournalConfig, RankdConfig, SpoolConfig
from rankd.collector.protocol.errors import ConfigError
from rankd.collector.settings import MIB


def test_defaults() -> None:
    """The defaults are the documented ones."""
    assert RankdConfig.from_mapping(None).to_mapping() == {
        "output": "rankd-output",
        "endpoint": None,
        "listen": None,
        "start_collector": True,
        "local_norm_kind": "increment",
        "beat_interval": 1.0,
        "lost_after": 60.0,
        "max_hold": 300.0,
        "linger": 10.0,
        "exit_timeout": 5.0,
        "spool": {"directory": None, "size": 64 * MIB},
        "journal": {"segment_size": 64 * MIB, "durability": "process", "keep": None},
        "profile": {"sessions": 50, "size": None},
        "outputs": [],
    }


def test_a_section_is_read() -> None:
    """Nested sections and sizes with units are read."""
    read = RankdConfig.from_mapping(
        {"output": "/logs", "spool": {"size": "256MiB", "directory": "/dev/shm"}, "journal": {"durability": "disk"}}
    )
    assert read == RankdConfig(
        output=Path("/logs"),
        spool=SpoolConfig(directory=Path("/dev/shm"), size=256 * MIB),
        journal=JournalConfig(durability="disk"),
    )


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("tcp://10.0.0.1:5555", "tcp://10.0.0.1:5555"),
        ("tcp://[::1]:5555", "tcp://[::1]:5555"),
        ("tcp://[fe80::1%eth0]:5555", "tcp://[fe80::1%eth0]:5555"),
        ("tcp://node-7.cluster.local:1", "tcp://node-7.cluster.local:1"),
        ("tcp://my_host:65535", "tcp://my_host:65535"),
        ("tcp://localhost:*", "tcp://localhost:*"),
        ("tcp://localhost:0", "tcp://localhost:*"),
        ("tcp://127.0.0.1:05555", "tcp://127.0.0.1:5555"),
    ],
)
def test_endpoints(written: str, read: str) -> None:
    """Names, IPv4 and bracketed IPv6 with a port, `*` or 0 for any free one."""
    assert RankdConfig.from_mapping({"endpoint": written}).endpoint == read


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        ("10.0.0.1:5555", "it starts with tcp://"),
        ("ipc://x", "only tcp:// is spoken, not ipc://"),
        ("tcp://host", "the port is missing"),
        ("tcp://host:", "allowed: null, or text"),
        ("tcp://host:70000", "there is no port 70000"),
        ("tcp://host:5555/x", "allowed: null, or text"),
        ("tcp://::1:5555", "an IPv6 address stands in brackets"),
        ("tcp://[::g]:5555", "no address"),
        ("tcp://300.1.1.1:5555", "no address"),
        ("tcp://-x:5555", "not a host name"),
        ("tcp://a b:5555", "not a host name"),
        ("tcp://:5555", "must name one host"),
        ("tcp://*:5555", "must name one host"),
        ("tcp://0.0.0.0:5555", "must name one host"),
        ("tcp://[::]:5555", "must name one host"),
        ("tcp://host:5555\n", "allowed: null, or text"),
        (5555, "found 5555 (int)"),
    ],
)
def test_bad_endpoints(endpoint: object, text: str) -> None:
    """An endpoint that nobody could connect to is refused, with what is wrong about it."""
    with pytest.raises(ConfigError) as caught:
        RankdConfig.from_mapping({"endpoint": endpoint})
    assert str(caught.value).startswith("rankd.endpoint: found ")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("section", "where", "text"),
    [
        ({"lost_after": 2}, "rankd.lost_after", "allowed: more than twice beat_interval (1.0)"),
        ({"beat_interval": 40}, "rankd.lost_after", "found 60.0"),
        ({"beat_interval": 0.5, "max_hold": 1}, "rankd.max_hold", "more than twice beat_interval (0.5)"),
        ({"local_norm_kind": "micro-batch"}, "rankd.local_norm_kind", "did you mean `micro_batch`?"),
        ({"spool": {"size": 100}}, "rankd.spool.size", "a size from 65536 bytes"),
        ({"spool": {"sise": 100}}, "rankd.spool.sise", "did you mean `size`?"),
        ({"journal": {"durability": True}}, "rankd.journal.durability", "process | disk"),
        ({"segment_size": 1}, "rankd.segment_size", "did you mean `journal.segment_size`?"),
        ({"start_collector": "no"}, "rankd.start_collector", "leave out the quotes"),
        ([], "rankd", "a section with the keys output, endpoint"),
    ],
)
def test_wrong_values(section: object, where: str, text: str) -> None:
    """Each wrong value names the dotted path and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        RankdConfig.from_mapping(section)
    assert str(caught.value).startswith(f"{where}: ")
    assert text in str(caught.value)


def test_the_path_can_be_another() -> None:
    """Where the section stands is the caller's to say."""
    with pytest.raises(ConfigError, match=r"^config\.json\.linger: "):
        RankdConfig.from_mapping({"linger": -1}, "config.json")


_TIMES = st.floats(min_value=0.01, max_value=100.0)
_PATHS = st.text(min_size=1).filter(lambda text: "\0" not in text and not text.startswith("~")).map(Path)
_CONFIGS: st.SearchStrategy[RankdConfig] = st.builds(
    RankdConfig,
    output=_PATHS,
    endpoint=st.none() | st.sampled_from(["tcp://[::1]:5555", "tcp://h:*"]),
    start_collector=st.booleans(),
    local_norm_kind=st.sampled_from(["increment", "micro_batch"]),
    beat_interval=_TIMES,
    lost_after=st.floats(min_value=201.0, max_value=2e6),
    max_hold=st.floats(min_value=201.0, max_value=2e6),
    linger=st.just(0.0) | _TIMES,
    exit_timeout=_TIMES,
    spool=st.builds(SpoolConfig, directory=st.none() | _PATHS, size=st.integers(2**16, 2**40)),
    journal=st.builds(
        JournalConfig, segment_size=st.integers(2**12, 2**40), durability=st.sampled_from(["process", "disk"])
    ),
)


@given(_CONFIGS)
def test_to_mapping_reads_back_equal(config: RankdConfig) -> None:
    """The agent hands the section to the collector as JSON; what arrives is what was sent."""
    assert RankdConfig.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
_GARBAGE = st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(_SCALARS, inner), max_leaves=10)


@given(_GARBAGE | st.dictionaries(st.sampled_from(list(RankdConfig().to_mapping())), _GARBAGE))
def test_garbage_is_a_config_error(section: Any) -> None:
    """Whatever stands in the section, it is read or it is a ConfigError."""
    with contextlib.suppress(ConfigError):
        assert isinstance(RankdConfig.from_mapping(section), RankdConfig)
