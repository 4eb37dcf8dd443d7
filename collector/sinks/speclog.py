"""The text logs as files: OUTPUT/rank_N/monitor.log for each rank, and OUTPUT/merged.log (SPEC.md section 3)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..protocol.records import Comment, RankBlock
from ..protocol.speclog import Renderer, merged_text
from .files import LogFiles
from .merged_index import MERGED_INDEX, IndexWriter

__all__ = ["MERGED_LOG", "SpecLogSink", "rank_log"]

MERGED_LOG = "merged.log"

_RANK_LOG = re.compile(r"rank_(0|[1-9][0-9]*)/monitor\.log")


def _is_log(name: str) -> bool:
    return name in (MERGED_LOG, MERGED_INDEX) or _RANK_LOG.fullmatch(name) is not None


def rank_log(rank: int) -> str:
    """The log of `rank`, relative to the output directory."""
    return f"rank_{rank}/monitor.log"


class SpecLogSink:
    """Writes the text logs below `output`; a `Sink`.

    With `resume`, what the logs hold beyond the checkpoint is compared with what is rendered again, and stays where it
    is: somebody who follows a log does not see a line twice. Without `resume`, logs that exist are appended to.

    Args:
        output: the run's output directory.
        index: keep an index of the merged log too (`merged_index`), so that readers start at once. It is one more file
            that grows with the log and is resumed as the logs are.

    Not for several threads at once.
    """

    def __init__(self, output: Path, *, index: bool = False) -> None:
        self._output = output
        self._renderer = Renderer()
        self._files = LogFiles(output)
        self._with_index = index
        self._index: IndexWriter | None = None

    @property
    def unwritten(self) -> int:
        """How many bytes wait for `retry`. While there are any, `sizes` is ahead of the files."""
        return self._files.unwritten

    def write(self, released: Sequence[RankBlock | Comment]) -> None:
        """Append these to the logs that they belong to, with one write a log.

        Raises:
            OSError: of the first log that could not be written; the others are. `retry` writes the rest.
        """
        texts: dict[int, list[bytes]] = {}
        merged = []
        # Rendered as a whole before the first byte is written: if that fails, no log has a part of it.
        for each in released:
            text = self._renderer.block(each) if isinstance(each, RankBlock) else self._renderer.comment(each)
            if text and each.rank is not None:
                texts.setdefault(each.rank, []).append(text)
            merged.append(merged_text(each.rank, text))
        entries = self._index_entries(released, merged)
        for rank, parts in texts.items():
            self._files.take(rank_log(rank), parts)
        self._files.take(MERGED_LOG, merged)
        self._files.take(MERGED_INDEX, entries)  # last: a reader finds in the log what the index names
        self.retry()

    def retry(self) -> None:
        """Write what waits, of each log from the byte where it stopped; does nothing when nothing waits.

        Raises:
            OSError: of the first log that could not be written.
        """
        self._files.push()

    def sizes(self) -> Mapping[str, int]:
        """Per log: its size once nothing is `unwritten`; and where the index is."""
        state = {} if self._index is None else self._index.freeze()
        return {**self._files.sizes(), **state}

    def reaches(self, sizes: Mapping[str, int]) -> bool:
        """Whether no log is shorter than this checkpoint says."""
        # Not the index: a reader does without it, and no log is worth being rendered again for its sake.
        return self._files.reaches({n: size for n, size in sizes.items() if _is_log(n) and n != MERGED_INDEX})

    def resume(self, sizes: Mapping[str, int]) -> None:
        """Go on from a checkpoint: see `Sink`. A log that is shorter than at the checkpoint gets a warning, and is
        appended to; its size counts from then on.

        Raises:
            OSError: the output directory cannot be read.
        """
        known = {name: size for name, size in sizes.items() if _is_log(name)}
        found = {str(path.relative_to(self._output)) for path in self._output.glob("rank_*/monitor.log")}
        names = {MERGED_LOG, *known, *filter(_RANK_LOG.fullmatch, found)}
        if self._with_index:
            names.add(MERGED_INDEX)
        self._files.resume({name: known.get(name, 0) for name in names})
        self._index = self._index_writer(sizes) if self._with_index else None

    def settle(self) -> None:
        """The repeated calls are over: cut from the logs what they did not make.

        Raises:
            OSError: of the first log that could not be cut; call again. What merely waits is left to `retry`.
        """
        self._files.settle()

    def close(self) -> None:
        """Let go of all files. What is `unwritten` is gone from here, not from the journal."""
        self._files.close()

    def _index_entries(self, released: Sequence[RankBlock | Comment], merged: Sequence[bytes]) -> list[bytes]:
        if not self._with_index:
            return []
        if self._index is None:
            self._index = self._index_writer({})
        return [self._index.take(each, len(text)) for each, text in zip(released, merged, strict=True)]

    def _index_writer(self, sizes: Mapping[str, int]) -> IndexWriter:
        if self._files.size(MERGED_INDEX) < sizes.get(MERGED_INDEX, 0):
            sizes = {}  # entries are gone: the next one says that nothing is known of what is before it
        # Where the merged log is, not where the checkpoint says it was: something else may have cut it.
        return IndexWriter.thaw(sizes, self._files.size(MERGED_LOG))
