"""profiler_ctl/config.py: the `profiler:` section (SPEC.md section 5)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankd.collector.protocol.errors import ConfigError
from rankd.profiler_ctl.config import Level, ProfilerConfig


def test_defaults() -> None:
    """The ten keys and their defaults, as the seed's table in section 二 lists them."""
    assert ProfilerConfig.from_mapping({}).to_mapping() == {
        "enable_profiling": False,
        "start_step": 1,
        "end_step": 1,
        "output_path": None,
        "profiler_rank": None,
        "profiler_level": 0,
        "mstx": False,
        "profile_memory": False,
        "profile_cpu": True,
        "with_stack": True,
    }


def test_the_seeds_scenario_a() -> None:
    """「start_step: 5 # 跳过前 4 步预热, end_step: 7 # 采集 3 步」: three steps, rank 0 only, Level 0."""
    config = ProfilerConfig.from_mapping(
        {
            "enable_profiling": True,
            "start_step": 5,
            "end_step": 7,
            "profiler_rank": [0],
            "profiler_level": 0,
            "profile_memory": False,
            "profile_cpu": False,
            "with_stack": False,
            "output_path": "./output/profile",
        }
    )
    assert config.step_count == 3
    assert [rank for rank in range(8) if config.chooses(rank)] == [0]
    assert config.level is Level.LEVEL0
    assert config.directory(0, Path("/run")) == Path("/run/output/profile/rank_0")


def test_step_count() -> None:
    """「采集 step 数 = end_step - start_step + 1」: 5 to 14 is ten steps."""
    assert ProfilerConfig(start_step=5, end_step=14).step_count == 10


@pytest.mark.parametrize(
    ("section", "lines"),
    [
        (
            {"start_step": 5},
            ["profiler.start_step: found 5, allowed: at most end_step; end_step is 1, its default: set end_step too"],
        ),
        (
            {"start_step": 5, "end_step": 4},
            ["profiler.start_step: found 5, allowed: at most end_step; end_step is 4"],
        ),
        (
            {"start_step": 0, "end_step": -1},
            [
                "profiler.start_step: found 0, allowed: a positive integer",
                "profiler.end_step: found -1, allowed: a positive integer",
            ],
        ),
        (
            {"profiler_level": "2"},
            ["profiler.profiler_level: found '2' (str), allowed: an integer; leave out the quotes"],
        ),
        ({"profiler_level": 1.0}, ["profiler.profiler_level: found 1.0 (float), allowed: an integer"]),
        ({"profiler_rank": 0}, ["profiler.profiler_rank: found 0 (int), allowed: a list, each of it an integer"]),
        ({"profiler_rank": [0, 1.5]}, ["profiler.profiler_rank[1]: found 1.5 (float), allowed: an integer"]),
        ({"mstx": 1}, ["profiler.mstx: found 1 (int), allowed: true or false"]),
        ({"output_path": 1}, ["profiler.output_path: found 1 (int), allowed: a path"]),
    ],
    ids=[
        "如果设置了非默认的 start_step，务必同时设置 end_step",
        "end_step 须 ≥ start_step",
        "须为正整数",
        "level is no text",
        "level is no float",
        "ranks are a list",
        "ranks are integers",
        "flags are flags",
        "paths are paths",
    ],
)
def test_wrong_sections(section: dict[str, object], lines: list[str]) -> None:
    """Each wrong key, type and value is an error that names the dotted path."""
    with pytest.raises(ConfigError) as caught:
        ProfilerConfig.from_mapping(section)
    assert str(caught.value).splitlines() == lines


@pytest.mark.parametrize("key", ["start_step", "end_step", "profiler_level"])
def test_a_bool_is_no_integer(key: str) -> None:
    """`True` is not step 1 and not level 1."""
    with pytest.raises(TypeError, match=rf"profiler\.{key}: found True \(bool\)"):
        ProfilerConfig.from_mapping({key: True})


@pytest.mark.parametrize(
    ("key", "meant"),
    [("profile_rank", "profiler_rank"), ("enable_profile", "enable_profiling"), ("stop_step", "start_step")],
)
def test_misspelt_keys(key: str, meant: str) -> None:
    """A misspelt key names the key that was probably meant."""
    with pytest.raises(ConfigError, match=rf"^profiler\.{key}: unknown key; did you mean `{meant}`\?"):
        ProfilerConfig.from_mapping({key: 1})


@pytest.mark.parametrize(
    ("number", "level"),
    [(0, "Level0"), (1, "Level1"), (2, "Level2"), (3, "LevelNone"), (-1, "LevelNone")],
)
def test_levels(number: int, level: str) -> None:
    """「映射到 ProfilerLevel.Level0/1/2，非法值回退 LevelNone」: with a warning where it falls back."""
    config = ProfilerConfig(enable_profiling=True, profiler_level=number)
    assert config.level.value == level
    warned = [f"profiler.profiler_level: found {number}, allowed: 0, 1 or 2; LevelNone is used"]
    assert config.warnings(1) == (warned if level == "LevelNone" else [])


@pytest.mark.parametrize(
    ("ranks", "chosen", "warnings"),
    [
        (None, [0, 1, 2, 3], []),
        ([0], [0], []),
        ([0, 3], [0, 3], []),
        ([], [], ["profiler.profiler_rank: found [], so no rank profiles; leave it out for all ranks"]),
        ([1, 4], [1], ["profiler.profiler_rank: rank 4 is not in this job of 4 ranks (0-3); ignored"]),
        ([-1, 8], [], ["profiler.profiler_rank: ranks -1, 8 are not in this job of 4 ranks (0-3); ignored"]),
    ],
    ids=["None 表示所有 rank 均采集", "单机调优一般只采 [0]", "two", "none", "one outside", "all outside"],
)
def test_ranks(ranks: list[int] | None, chosen: list[int], warnings: list[str]) -> None:
    """`profiler_rank` chooses exactly its ranks; [] and ids outside the world are warned about by name."""
    config = ProfilerConfig.from_mapping({"enable_profiling": True, "profiler_rank": ranks})
    assert [rank for rank in range(4) if config.chooses(rank)] == chosen
    assert config.warnings(4) == warnings


def test_off_is_off() -> None:
    """「采集仅在 enable_profiling: True 且当前 rank 命中 profiler_rank 时生效」: off means off."""
    config = ProfilerConfig(profiler_rank=(0, 99), profiler_level=7)
    assert not config.chooses(0)
    assert config.warnings(1) == []


@pytest.mark.parametrize(
    ("output", "directory"),
    [(None, "/run/profile/rank_3"), ("out", "/run/out/rank_3"), ("/abs", "/abs/rank_3")],
    ids=["None 时回退到 当前工作目录/profile/rank_x", "relative", "absolute"],
)
def test_directories(output: str | None, directory: str) -> None:
    """「按 rank 分目录保存为 output_path/rank_x」, relative to where training was started."""
    assert ProfilerConfig.from_mapping({"output_path": output}).directory(3, Path("/run")) == Path(directory)


@given(
    st.builds(
        ProfilerConfig,
        enable_profiling=st.booleans(),
        start_step=st.integers(1, 100),
        end_step=st.integers(100, 2**40),
        output_path=st.none() | st.just(Path("a/b")),
        profiler_rank=st.none() | st.lists(st.integers()).map(tuple),
        profiler_level=st.integers(),
    )
)
def test_to_mapping_reads_back_equal(config: ProfilerConfig) -> None:
    """The section written out and read again is the same section."""
    assert ProfilerConfig.from_mapping(config.to_mapping()) == config
