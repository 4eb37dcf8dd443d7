"""`rankd export`: the records of a run at full precision, as JSON Lines, CSV or Parquet, from its journal."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from .protocol.csvtext import CSV_HEAD, block_rows
from .protocol.errors import RankdError
from .protocol.jsonl import block_lines
from .protocol.records import RankBlock
from .protocol.wording import counted
from .reading import chosen_blocks, missing_from
from .rebuild import progress_line
from .selection import Selection, selection_of
from .selection import add_arguments as add_selection
from .tail import drop_output

__all__ = ["add_arguments", "export", "run"]

# Rows of a Parquet row group: some 50 MB in memory, and what a reader can skip at once.
_ROW_GROUP = 500_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("output", type=Path, help="the run's output directory; it is only read")
    parser.add_argument("--format", required=True, choices=_WRITERS, help="parquet needs pip install 'rankd[export]'")
    parser.add_argument("-o", "--to", required=True, metavar="FILE", help="where to; - is standard output")
    add_selection(parser)
    parser.add_argument(
        "--latest", action="store_true", help="of steps that were trained again (a resume), only the newest attempt's"
    )


def run(args: argparse.Namespace) -> int:
    """Export and say how much; 0: done, 1: the journal is damaged, and what comes before that was exported."""
    missing = missing_from(args.output)
    if missing is not None:
        print(f"note: {missing}", file=sys.stderr)
    selection = selection_of(args)
    damages: list[str] = []
    try:
        with progress_line("exporting") as show:
            count = export(args.output, selection, args.format, args.to, show, damages.append)
    except BrokenPipeError:
        drop_output()
        return 0
    if not count:
        print(f"note: {selection.nothing(whole=missing is None and not damages)}", file=sys.stderr)
    if args.to != "-":
        print(f"{counted(count, 'record')}: {args.to}")
    for damage in damages:
        print(f"rankd export: {damage}", file=sys.stderr)
    return int(bool(damages))


def export(
    output: Path,
    selection: Selection,
    form: str,
    to: str,
    progress: Callable[[int, int], None] = lambda *_: None,
    told: Callable[[str], None] = lambda _: None,
) -> int:
    """Write the wanted records of a run to a file, which is there when it is complete; returns how many.

    Args:
        told: called with what is damaged at the end of the journal and was not read.

    Raises:
        RankdError: there is no journal, or it is damaged, or the file cannot be written; says why.
    """
    blocks = chosen_blocks(output, selection, progress, told)
    if to == "-":
        return _write(form, sys.stdout.buffer, blocks)
    unfinished = Path(f"{to}.{os.getpid()}.unfinished")
    try:
        try:
            with unfinished.open("wb") as file:
                count = _write(form, file, blocks)
            unfinished.rename(to)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as e:
        raise RankdError(f"{to} cannot be written: {e.strerror}") from e
    return count


def _write(form: str, file: BinaryIO, blocks: Iterator[RankBlock]) -> int:
    writer = _WRITERS[form](file)
    count = 0
    for block in blocks:
        writer.write(block)
        count += sum(frame.record_count for frame in block.frames)
    writer.end()
    return count


class _Writer(Protocol):
    def write(self, block: RankBlock) -> None: ...

    def end(self) -> None: ...


class _Text:
    def __init__(self, file: BinaryIO, render: Callable[[RankBlock], bytes], head: bytes = b"") -> None:
        self._file = file
        self._render = render
        self._file.write(head)

    def write(self, block: RankBlock) -> None:
        self._file.write(self._render(block))

    def end(self) -> None:
        self._file.flush()


class _Parquet:
    """Columns gathered frame by frame; lists of values stand in a column of their own."""

    def __init__(self, file: BinaryIO) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as e:
            raise RankdError(f"Parquet needs pyarrow ({e}): pip install 'rankd[export]'") from e
        self._arrow = pa
        word = pa.dictionary(pa.int32(), pa.string())
        self._schema = pa.schema(
            [
                ("attempt", pa.int64()),
                ("step", pa.int64()),
                ("micro_step", pa.int64()),
                ("rank", pa.int32()),
                ("metric", word),
                ("name", word),
                ("value", pa.float64()),
                ("values", pa.list_(pa.float64())),
                ("time", pa.float64()),
                ("iter", pa.int64()),
            ]
        )
        self._writer = pq.ParquetWriter(file, self._schema, compression="zstd")
        self._start()

    def _start(self) -> None:
        self._columns: dict[str, list[Any]] = {field.name: [] for field in self._schema}
        self._rows = 0

    def write(self, block: RankBlock) -> None:
        at = block.position
        for frame in block.frames:
            count = frame.record_count
            single = frame.counts is None
            for name, value in (
                ("attempt", at.attempt), ("step", at.step), ("micro_step", at.micro_step), ("rank", block.rank),
                ("metric", frame.metric), ("time", block.time), ("iter", frame.iteration),
            ):  # fmt: skip
                self._columns[name].extend([value] * count)
            self._columns["name"].extend(frame.names or [None])
            self._columns["value"].extend(frame.values if single else [None] * count)
            self._columns["values"].extend([None] * count if single else frame.groups)
            self._rows += count
        if self._rows >= _ROW_GROUP:
            self._flush()

    def _flush(self) -> None:
        columns = [self._arrow.array(self._columns[field.name], field.type) for field in self._schema]
        self._writer.write_table(self._arrow.Table.from_arrays(columns, schema=self._schema))
        self._start()

    def end(self) -> None:
        if self._rows:
            self._flush()
        self._writer.close()


_WRITERS: dict[str, Callable[[BinaryIO], _Writer]] = {
    "jsonl": lambda file: _Text(file, block_lines),
    "csv": lambda file: _Text(file, block_rows, CSV_HEAD),
    "parquet": _Parquet,
}
