"""The lnav format reads what rankd writes. lnav itself is asked where it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from rankd.collector.protocol.jsonl import block_lines
from rankd.collector.protocol.records import ExpertLayer, Frame, NameTable, Position, RankBlock

FORMAT = Path(__file__).parents[2] / "deploy" / "lnav" / "rankd.json"


def test_every_key_of_a_record_is_a_field() -> None:
    """A key that records have and the format does not know would be shown as noise."""
    fields = json.loads(FORMAT.read_text(encoding="utf-8"))["rankd_records"]
    table = NameTable((ExpertLayer("mtp", 0, 0).name,))
    frames = (Frame.scalar("local_loss", 1.0), Frame.lists("tpe", table, [[1]], 1))
    keys = {
        key for line in block_lines(RankBlock(0, Position(1, 1, 1), frames)).splitlines() for key in json.loads(line)
    }
    assert keys - {fields["timestamp-field"]} <= set(fields["value"])


LNAV = shutil.which("lnav")


@pytest.mark.skipif(LNAV is None, reason="lnav is not installed")
def test_lnav_reads_records(tmp_path: Path) -> None:
    """A real lnav takes the format, and gives the columns to SQL."""
    place = tmp_path / "config" / "formats" / "rankd"
    place.mkdir(parents=True)
    shutil.copy(FORMAT, place)
    log = tmp_path / "records.jsonl"
    log.write_bytes(block_lines(RankBlock(3, Position(1, 4, 2), (Frame.scalar("local_loss", 0.5),), time=1.7e9)))
    query = ";SELECT rank, step, value FROM rankd_records"
    command = [str(LNAV), "-n", "-I", str(tmp_path / "config"), "-c", query, "-c", ":write-csv-to -", str(log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"HOME": str(tmp_path)})
    assert "3,4,0.5" in done.stdout, done.stderr
