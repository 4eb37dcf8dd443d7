"""Where a rank's spool file lies; and memory where there can be none."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from rankd.agent.identity import Identity, introduction
from rankd.agent.spool import Spool, find_spools, owner, remove_unfinished
from rankd.agent.spools import ABOUT_OUTPUT, ABOUT_SPOOL, open_store, tidy, what_is_left
from rankd.agent.store import MemoryStore
from rankd.collector.config import RankdConfig, SpoolConfig

HELLO = introduction(Identity(3, 8, "test"), None, {"local_norm_kind": "increment"})


def config(tmp_path: Path, size: int = 2**17) -> RankdConfig:
    return RankdConfig(output=tmp_path / "out", spool=SpoolConfig(directory=tmp_path / "local", size=size))


def in_memory(caplog: pytest.LogCaptureFixture, it: RankdConfig) -> str:
    """There is no spool file: the store is memory of the same size; the one warning."""
    store, hello = open_store(it, HELLO)
    assert isinstance(store, MemoryStore)
    assert store.room() == it.spool.size
    assert hello == HELLO
    (record,) = caplog.records
    said = record.getMessage()
    assert f"no spool file of {it.spool.size} bytes in {it.spool.place(it.output)}" in said
    assert "lost if this process is killed" in said
    return said


def test_the_hello_says_where_the_spool_lies_and_the_spool_whose_it_is(tmp_path: Path) -> None:
    """Named after rank, process and session; below the configured directory; both carry the same hello."""
    store, hello = open_store(config(tmp_path), HELLO)
    assert isinstance(store, Spool)
    path = store.path
    assert path.parent == config(tmp_path).spool.place(tmp_path / "out")
    assert path.is_relative_to(tmp_path / "local")
    assert path.name == f"rank_3.{os.getpid()}.{HELLO.session[:4].hex()}.spool"
    assert hello.about == {**HELLO.about, ABOUT_SPOOL: str(path), ABOUT_OUTPUT: str(tmp_path / "out")}
    assert owner(path) == hello
    store.close(delivered=True)


def test_only_this_user_gets_into_the_directory(tmp_path: Path) -> None:
    """Mode 0700, also where it was there before with another one."""
    place = config(tmp_path).spool.place(tmp_path / "out")
    place.parent.mkdir(parents=True, mode=0o777)
    place.parent.chmod(0o777)
    store, _ = open_store(config(tmp_path), HELLO)
    for each in (place, place.parent):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    store.close(delivered=True)


def test_the_place_is_a_runs_own_however_its_output_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative, absolute or through a link: one place; another output: another place."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    spool = SpoolConfig()
    places = {spool.place(Path(path)) for path in ("out", "./x/../out", "link", tmp_path / "out")}
    assert len(places) == 1
    assert spool.place(Path("other")) not in places


@pytest.mark.parametrize("level", ["of the user", "of the run"])
def test_a_link_in_the_way_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture, level: str) -> None:
    """In a directory that all may write, somebody else could have it lead anywhere: nothing is written there."""
    place = config(tmp_path).spool.place(tmp_path / "out")
    link = place if level == "of the run" else place.parent
    link.parent.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    link.symlink_to(elsewhere)
    assert "a link to one" in in_memory(caplog, config(tmp_path))
    assert not list(elsewhere.iterdir())
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_another_user_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its owner could read and replace what lies there."""
    place = config(tmp_path).spool.place(tmp_path / "out")
    place.parent.mkdir(parents=True, mode=0o777)
    os.chown(place.parent, 12_345, 12_345)
    assert "belongs to user 12345" in in_memory(caplog, config(tmp_path))


def test_no_room_or_no_directory_means_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """COMPLAINTS 23: more than the disk has, and a file in the way: one warning each, with place, size and reason."""
    if os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize >= 2**40:
        pytest.skip("this disk has room for any spool")
    assert "No space left" in in_memory(caplog, config(tmp_path, 2**40))
    assert find_spools(config(tmp_path).spool.place(tmp_path / "out")) == []
    caplog.clear()
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    other = RankdConfig(output=tmp_path / "out", spool=SpoolConfig(directory=in_the_way))
    assert str(in_the_way) in in_memory(caplog, other)


def test_a_path_that_no_hello_can_carry_means_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A training with a directory of thousands of characters still starts."""
    deep = tmp_path.joinpath(*["x" * 200] * 6)
    in_memory(caplog, RankdConfig(output=tmp_path / "out", spool=SpoolConfig(directory=deep)))


def test_a_spool_in_the_making_is_nobodys_leftover(tmp_path: Path) -> None:
    """Killed while making it: not found as a spool; removed once it is certain that nobody is at it."""
    half = tmp_path / "rank_0.1.aa.spool.unfinished"
    half.write_bytes(b"rankd")
    assert find_spools(tmp_path) == []
    remove_unfinished(tmp_path)
    assert half.exists()
    hour_ago = time.time() - 3_600
    os.utime(half, (hour_ago, hour_ago))
    remove_unfinished(tmp_path)
    assert not half.exists()


def test_the_last_one_tidies_up(tmp_path: Path) -> None:
    """The run's directory goes with its last spool; one that is still there keeps it."""
    (first, hello), (second, _) = (
        open_store(config(tmp_path), introduction(Identity(r, 2, "test"), None, {})) for r in (0, 1)
    )
    path = hello.about[ABOUT_SPOOL]
    first.close(delivered=True)
    tidy(path)
    assert Path(path).parent.exists()
    second.close(delivered=True)
    tidy(path)
    assert not Path(path).parent.exists()
    tidy(path)
    tidy(None)


def test_what_is_left_says_how_to_get_it() -> None:
    """The command to copy, or that it is lost."""
    assert "`rankd recover /a/b.spool`" in what_is_left("/a/b.spool")
    assert "are lost" in what_is_left(None)
