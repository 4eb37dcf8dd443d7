"""collector/config.py: the `rankd:` section."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankd.collector.config import AlertConfig, JournalConfig, LogsConfig, RankdConfig, SpoolConfig
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
        "logs": {
            "rotate_size": None,
            "rotate_every": None,
            "compress": "gzip",
            "keep_parts": None,
            "keep_size": None,
            "keep_for": None,
        },
        "outputs": [],
        "alerts": [],
        "on_anomaly": "log",
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
        ({"logs": {"rotate_size": "1KiB"}}, "rankd.logs.rotate_size", "a size from 65536 bytes"),
        ({"logs": {"rotate_every": "1 month"}}, "rankd.logs.rotate_every", "units: s, min, h, d, w"),
        ({"logs": {"rotate_every": 10}}, "rankd.logs.rotate_every", "a span of 60 seconds to 10 years"),
        ({"logs": {"rotate_every": True}}, "rankd.logs.rotate_every", "found True (bool)"),
        ({"logs": {"keep_parts": 0, "rotate_size": 2**20}}, "rankd.logs.keep_parts", "a positive integer"),
        ({"logs": {"keep_for": "9999999d", "rotate_size": 2**20}}, "rankd.logs.keep_for", "to 10 years"),
        ({"logs": {"compress": "zstd"}}, "rankd.logs.compress", "gzip | none"),
        ({"logs": {"keep_size": "1GiB"}}, "rankd.logs.keep_size", "neither rotate_size nor rotate_every is set"),
        ([], "rankd", "a section with the keys output, endpoint"),
        ({"on_anomaly": "halt"}, "rankd.on_anomaly", "found 'halt', allowed: log | stop"),
        ({"alerts": {"metric": "loss"}}, "rankd.alerts", "a list, each of it a section of keys"),
        ({"alerts": [{"above": 1}]}, "rankd.alerts[0].metric", "the key is missing, allowed: local_loss | local_norm"),
        ({"alerts": [{"metric": "grad_nrom", "above": 1}]}, "rankd.alerts[0].metric", "did you mean `grad_norm`?"),
        ({"alerts": [{"metric": "loss"}]}, "rankd.alerts[0]", "found none of them, allowed: exactly one of above"),
        ({"alerts": [{"metric": "loss", "above": 1, "times": 3}]}, "rankd.alerts[0]", "found above and times"),
        (
            {"alerts": [{"metric": "loss", "above": math.nan}]},
            "rankd.alerts[0].above",
            "found nan, allowed: a number",
        ),
        ({"alerts": [{"metric": "loss", "above": "1e3"}]}, "rankd.alerts[0].above", "write 1.0e+3, without quotes"),
        ({"alerts": [{"metric": "loss", "times": 1}]}, "rankd.alerts[0].times", "allowed: a number above 1"),
        ({"alerts": [{"metric": "loss", "times": 3, "window": 0}]}, "rankd.alerts[0].window", "from 1 to 10000"),
        ({"alerts": [{"metric": "loss", "above": 3, "window": 9}]}, "rankd.alerts[0].window", "with `times` only"),
        ({"alerts": [{"metric": "loss", "abov": 3}]}, "rankd.alerts[0].abov", "did you mean `above`?"),
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


def test_rotation_is_read() -> None:
    """Sizes and spans of time with their units; any of the two rotates."""
    read = LogsConfig.from_mapping(
        {"rotate_size": "1GiB", "rotate_every": "1d", "keep_size": "20GiB", "keep_for": "4w"}
    )
    assert read == LogsConfig(rotate_size=2**30, rotate_every=86_400, keep_size=20 * 2**30, keep_for=28 * 86_400)
    assert read.rotates
    assert LogsConfig.from_mapping({"rotate_every": 3_600}).rotates
    assert not LogsConfig().rotates


_TIMES = st.floats(min_value=0.01, max_value=100.0)
_PATHS = st.text(min_size=1).filter(lambda text: "\0" not in text and not text.startswith("~")).map(Path)
_NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
_METRICS = st.sampled_from(["loss", "local_norm"])
_ALERTS: st.SearchStrategy[AlertConfig] = st.one_of(
    st.builds(AlertConfig, metric=_METRICS, above=_NUMBERS),
    st.builds(AlertConfig, metric=_METRICS, below=_NUMBERS),
    st.builds(AlertConfig, metric=_METRICS, times=st.floats(1.5, 100.0), window=st.integers(1, 10_000)),
)
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
    logs=st.builds(
        LogsConfig,
        rotate_size=st.integers(2**16, 2**40),
        rotate_every=st.none() | st.integers(60, 86_400),
        keep_size=st.none() | st.integers(0, 2**40),
    ),
    alerts=st.lists(_ALERTS, max_size=2).map(tuple),
    on_anomaly=st.sampled_from(["log", "stop"]),
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
