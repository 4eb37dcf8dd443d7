"""Compressed parts: gzip for everybody, and readable from anywhere for us."""

from __future__ import annotations

import gzip
import os
import random
import subprocess
from pathlib import Path

import pytest

from rankd.collector.sinks.gzipped import MEMBER_BYTES, DamagedPartError, GzipReader, compress

TEXT = b"".join(b'[rank_%d] { "local_loss": %r }\n' % (i % 8, random.Random(i).random()) for i in range(60_000))
SIZE = len(TEXT)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """TEXT, compressed by us."""
    assert SIZE > 2 * MEMBER_BYTES
    return pack(tmp_path)


def pack(folder: Path) -> Path:
    (folder / "plain").write_bytes(TEXT)
    source = os.open(folder / "plain", os.O_RDONLY)
    target = os.open(folder / "plain.gz", os.O_WRONLY | os.O_CREAT)
    assert compress(source, target, SIZE)
    os.close(source)
    os.close(target)
    return folder / "plain.gz"


def test_it_is_a_gzip_file_for_everybody(packed: Path) -> None:
    """Python's reader and the system's `gzip` give the text back; it is much smaller."""
    assert gzip.decompress(packed.read_bytes()) == TEXT
    assert subprocess.run(["gzip", "-dc", packed], capture_output=True, check=True).stdout == TEXT
    assert packed.stat().st_size < SIZE // 2


def test_any_piece_is_read_without_what_is_before_it(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From anywhere, across members, over the end; only the members that hold it are decompressed."""
    reader = GzipReader(packed)
    choose = random.Random(1)
    places = [(choose.randrange(SIZE), choose.randrange(2 * MEMBER_BYTES)) for _ in range(30)]
    for offset, count in [(0, 1), (0, SIZE), (SIZE - 1, 5), (SIZE, 5), (MEMBER_BYTES - 1, 2), *places]:
        assert reader.read(offset, count) == TEXT[offset : offset + count]
    taken: list[int] = []
    text_of = GzipReader._text

    def counted(self: GzipReader, number: int) -> bytes:
        taken.append(number)
        return text_of(self, number)

    monkeypatch.setattr(GzipReader, "_text", counted)
    reader.read(2 * MEMBER_BYTES + 5, 100)
    reader.close()
    assert set(taken) == {2}


def test_what_others_have_compressed_is_read_too(tmp_path: Path) -> None:
    """One member, as `gzip` makes it."""
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(TEXT))
    reader = GzipReader(path)
    assert reader.read(SIZE // 2, 1_000) == TEXT[SIZE // 2 :][:1_000]
    assert reader.read(0, 10) == TEXT[:10]
    assert reader.read(SIZE, 10) == b""
    reader.close()


@pytest.mark.parametrize("where", [0, 3, 20, 5_000, -3], ids=str)
def test_damage_is_told_with_the_file(packed: Path, where: int) -> None:
    """A byte that is another one: an error that names the file, never other text."""
    raw = bytearray(packed.read_bytes())
    raw[where] ^= 0x55
    packed.write_bytes(raw)
    reader = GzipReader(packed)
    with pytest.raises(DamagedPartError) as error:
        reader.read(0, SIZE)
    reader.close()
    assert error.value.filename == str(packed)


def test_a_stop_is_obeyed_between_two_members(tmp_path: Path) -> None:
    """A collector that ends does not wait for a gibibyte."""
    (tmp_path / "plain").write_bytes(TEXT)
    with (tmp_path / "plain").open("rb") as source, (tmp_path / "out").open("wb") as target:
        answers = iter([False, True])
        assert not compress(source.fileno(), target.fileno(), SIZE, lambda: next(answers))
    assert gzip.decompress((tmp_path / "out").read_bytes()) == TEXT[:MEMBER_BYTES]
