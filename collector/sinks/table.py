"""Records as one growing file: OUTPUT/records.jsonl and OUTPUT/records.csv, at full precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..protocol.csvtext import CSV_HEAD, block_rows
from ..protocol.errors import RankdError
from ..protocol.jsonl import block_lines
from ..protocol.records import Comment, RankBlock
from .files import LogFiles

__all__ = ["FileSink", "csv_sink", "jsonl_sink"]

# Waits in memory while the disk is full. When it is the logs' own disk, the collector itself stops taking data long
# before; another disk must not be able to hold its memory.
_MAX_WAITING = 64 * 2**20


class FileSink:
    """Writes what `render` makes of each block to one file below `output`; a `Sink` that resumes exactly.

    The exception: records that were released while this output was not configured, or was off, are not in the file.

    Args:
        name: of the file, relative.
        render: the bytes of a block.
        head: the file's first bytes.
    """

    def __init__(self, output: Path, name: str, render: Callable[[RankBlock], bytes], head: bytes = b"") -> None:
        self._name = name
        self._render = render
        self._head = head
        self._files = LogFiles(output)

    def write(self, released: Sequence[RankBlock | Comment]) -> None:
        """Append the records of these.

        Raises:
            OSError: what could not be written waits.
            RankdError: more waits than memory is given for.
        """
        text = b"".join([self._render(each) for each in released if isinstance(each, RankBlock)])
        if text:
            start = [] if self._files.size(self._name) else [self._head]
            self._files.take(self._name, [*start, text])
        try:
            self._files.push()
        except OSError as e:
            if self._files.unwritten > _MAX_WAITING:
                raise RankdError(f"{self._files.unwritten} bytes wait, and {e}") from e
            raise

    def retry(self) -> None:
        self._files.push()

    def sizes(self) -> Mapping[str, int]:
        return self._files.sizes()

    def files(self) -> Mapping[Path, int]:
        return self._files.files()

    def checkpointed(self, sizes: Mapping[str, int]) -> None:
        pass

    def reaches(self, sizes: Mapping[str, int]) -> bool:
        return self._files.reaches({name: size for name, size in sizes.items() if name == self._name})

    def resume(self, sizes: Mapping[str, int]) -> None:
        """Go on from a checkpoint; from one that does not know this file, append to what is there."""
        if not sizes or self._name in sizes:
            self._files.resume({self._name: sizes.get(self._name, 0)})

    def settle(self) -> None:
        self._files.settle()

    def close(self) -> None:
        self._files.close()


def jsonl_sink(output: Path) -> FileSink:
    """OUTPUT/records.jsonl: one strict JSON object a record (SPEC.md section 3)."""
    return FileSink(output, "records.jsonl", block_lines)


def csv_sink(output: Path) -> FileSink:
    """OUTPUT/records.csv: one row a record."""
    return FileSink(output, "records.csv", block_rows, CSV_HEAD)
