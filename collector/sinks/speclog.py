"""The text logs as files: OUTPUT/rank_N/monitor.log for each rank, and OUTPUT/merged.log (SPEC.md section 3)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ..protocol.records import Comment, RankBlock
from ..protocol.speclog import Renderer, merged_parts
from .files import Buffer, LogFiles
from .keeper import Keeper
from .merged_index import MERGED_INDEX, IndexWriter
from .parts import log_of_part
from .retention import Retention, Rotation

__all__ = [
    "MERGED_LOG",
    "SpecLogSink",
    "cut_batches",
    "is_log",
    "log_parts",
    "log_texts",
    "rank_log",
    "rank_logs_in",
]

MERGED_LOG = "merged.log"

# Rendered and written before the next, in bytes of columns; a norm's 8 become some 160 of text. What is rendered shall
# still be in the processor's cache when it is written.
_BATCH_BYTES = 2**15

_RANK_LOG = re.compile(r"rank_(0|[1-9][0-9]*)/monitor\.log")


def is_log(name: str) -> bool:
    """Whether this relative path is that of a text log."""
    return name == MERGED_LOG or _RANK_LOG.fullmatch(name) is not None


def rank_log(rank: int) -> str:
    """The log of `rank`, relative to the output directory."""
    return f"rank_{rank}/monitor.log"


def rank_logs_in(output: Path) -> set[str]:
    """The ranks' logs that are there, in whatever parts, relative to the output directory."""
    found = {log_of_part(path) or path for path in output.glob("rank_*/monitor.log*")}
    return {name for path in found if _RANK_LOG.fullmatch(name := path.relative_to(output).as_posix())}


def log_texts(renderer: Renderer, released: Iterable[RankBlock | Comment]) -> dict[str, bytes]:
    """What these add to each log, by its path below the output directory; merged.log comes last."""
    return {name: b"".join(parts) for name, parts in log_parts(renderer, released).items()}


def log_parts(
    renderer: Renderer, released: Iterable[RankBlock | Comment], index: IndexWriter | None = None
) -> dict[str, list[Buffer]]:
    """`log_texts`, as buffers to be written one after the other; with `index`, what that adds to its file too."""
    logs: dict[str, list[Buffer]] = {}
    merged: list[Buffer] = []
    entries: list[Buffer] = []
    for each, text in _texts(renderer, released):
        if not text:
            continue
        if each.rank is not None:
            logs.setdefault(rank_log(each.rank), []).append(text)
        parts = merged_parts(each.rank, text)
        merged += parts
        if index is not None and (entry := index.take(each, sum(map(len, parts)))):
            entries.append(entry)
    if not merged:
        return {}
    # The index last: a reader finds in the log what the index names.
    return {**logs, MERGED_LOG: merged, MERGED_INDEX: entries} if entries else {**logs, MERGED_LOG: merged}


def _texts(renderer: Renderer, released: Iterable[RankBlock | Comment]) -> Iterator[tuple[RankBlock | Comment, bytes]]:
    """Each with its text; rendered in batches, whose parts are still in the processor's cache when they are joined."""
    for batch in cut_batches(released):
        yield from zip(batch, renderer.texts(batch), strict=True)


def cut_batches(
    released: Iterable[RankBlock | Comment], size: int = _BATCH_BYTES, most: int | None = None
) -> Iterator[list[RankBlock | Comment]]:
    """Cut where about `size` bytes of columns are together, or `most` blocks and comments."""
    batch: list[RankBlock | Comment] = []
    together = 0
    for each in released:
        batch.append(each)
        together += sum([len(frame.column) for frame in each.frames]) if isinstance(each, RankBlock) else 0
        if together >= size or len(batch) == most:
            yield batch
            batch, together = [], 0
    if batch:
        yield batch


def _of_logs(sizes: Mapping[str, int]) -> dict[str, int]:
    """What a checkpoint says of the text logs."""
    return {name: size for name, size in sizes.items() if is_log(name.partition(":")[0])}


class SpecLogSink:
    """Writes the text logs below `output`; a `Sink`.

    With `resume`, what the logs hold beyond the checkpoint is compared with what is rendered again, and stays where it
    is: somebody who follows a log does not see a line twice. Without `resume`, logs that exist are appended to.

    Args:
        output: the run's output directory.
        index: keep an index of the merged log too (`merged_index`), so that readers start at once. It is one more file
            that grows with the log and is resumed as the logs are.
        rotation: when a log is closed and another file begun; None: never.
        retention: what becomes of the closed parts, where logs are rotated.

    Not for several threads at once.
    """

    def __init__(
        self,
        output: Path,
        *,
        index: bool = False,
        rotation: Rotation | None = None,
        retention: Retention | None = None,
    ) -> None:
        self._output = output
        self._renderer = Renderer()
        wanted = rotation is not None and retention is not None and (retention.compress or retention.deletes)
        self._keeper = Keeper(output, retention) if wanted and retention is not None else None
        self._files = LogFiles(output, lambda name: rotation if is_log(name) else None, self._closed)
        self._with_index = index
        self._index: IndexWriter | None = None
        self._resumed: Mapping[str, int] = {}

    @property
    def unwritten(self) -> int:
        """How many bytes wait for `retry`. While there are any, `sizes` is ahead of the files."""
        return self._files.unwritten

    def write(self, released: Sequence[RankBlock | Comment]) -> None:
        """Append these to the logs that they belong to, with one write a log.

        Raises:
            OSError: of the first log that could not be written; the others are. `retry` writes the rest.
        """
        # A failure keeps what it could not write waiting, and the rest is rendered all the same.
        failure: OSError | None = None
        if self._with_index and self._index is None:
            self._index = self._index_writer({})
        for batch in cut_batches(released):
            for name, parts in log_parts(self._renderer, batch, self._index).items():
                self._files.take(name, parts)
            try:
                self.retry()
            except OSError as e:
                failure = failure or e
        if failure is not None:
            raise failure

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

    def files(self) -> Mapping[Path, int]:
        """The logs and their index, by their size once nothing is `unwritten`."""
        return self._files.files()

    def checkpointed(self, sizes: Mapping[str, int]) -> None:
        """What is before this checkpoint may be compressed and deleted."""
        if self._keeper is not None:
            self._keeper.look((), sizes)

    def _closed(self, name: str) -> None:
        if self._keeper is not None:
            self._keeper.look((name,))

    def reaches(self, sizes: Mapping[str, int]) -> bool:
        """Whether no log is shorter than this checkpoint says, nor lacks something before that."""
        # Not the index: a reader does without it, and no log is worth being rendered again for its sake.
        return self._files.reaches(_of_logs(sizes))

    def resume(self, sizes: Mapping[str, int]) -> None:
        """Go on from a checkpoint: see `Sink`. A log that is shorter than at the checkpoint gets a warning, and is
        appended to; its size counts from then on.

        Raises:
            OSError: the output directory cannot be read.
        """
        known = {name: size for name, size in sizes.items() if is_log(name) or name == MERGED_INDEX}
        names = {MERGED_LOG, *known, *rank_logs_in(self._output)}
        if self._with_index:
            names.add(MERGED_INDEX)
        self._files.resume({**{name: known.get(name, 0) for name in names}, **_of_logs(sizes)})
        self._index = self._index_writer(sizes) if self._with_index else None
        self._resumed = sizes

    def settle(self) -> None:
        """The repeated calls are over: cut from the logs what they did not make.

        Raises:
            OSError: of the first log that could not be cut; call again. What merely waits is left to `retry`.
        """
        self._files.settle()
        if self._keeper is not None:
            # From here on no part is cut, so that the keeper is alone with them.
            self._keeper.start(filter(is_log, self._files.sizes()), self._resumed)

    def close(self) -> None:
        """Let go of all files. What is `unwritten` is gone from here, not from the journal."""
        self._files.close()
        if self._keeper is not None:
            self._keeper.close()

    def _index_writer(self, sizes: Mapping[str, int]) -> IndexWriter:
        if self._files.size(MERGED_INDEX) < sizes.get(MERGED_INDEX, 0):
            sizes = {}  # entries are gone: the next one says that nothing is known of what is before it
        # Where the merged log is, not where the checkpoint says it was: something else may have cut it.
        return IndexWriter.thaw(sizes, self._files.size(MERGED_LOG))
