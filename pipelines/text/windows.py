"""Windows: how documents are read where they are judged, so that every token is predicted exactly once.

A document of n tokens t1 … tn is the stream [bos] t1 … tn. Reading stream positions 0 … n−1 gives the predictions of t1
… tn, position n that of the document's end; position i predicts t(i+1). With a context of C positions and a stride of S,
window k reads positions k·S … k·S + C − 1, and contributes the predictions that no earlier window has made: all C of the
first window, the last S of every other. So every token but the first C is predicted from at least C − S + 1 preceding
tokens, and a truncated document gets the same predictions up to its end.

The blocks of training cut documents every T tokens of the whole text instead; validation reads windows (`WindowConfig`),
which gives each document the predictions that the headroom test gives it. Only a document's first window starts with bos.

Shapes: n blocks of T positions each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from pipelines.text.packing import IGNORE_INDEX, PackingConfig, flat_values, list_values, token_type


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingWindow:
    """Stream positions start … stop − 1 of a document; the positions from `first` on make new predictions."""

    document: int
    start: int
    first: int
    stop: int

    @property
    def num_positions(self) -> int:
        """Number of positions that the model reads."""
        return self.stop - self.start


def windows_of(document: int, num_tokens: int, *, context_length: int, stride: int) -> list[ReadingWindow]:
    """Returns the windows of one document, in order; a document without tokens has none."""
    if not 1 <= stride <= context_length:
        raise ValueError(f"stride = {stride} must lie in 1 … {context_length}, the context length")
    windows: list[ReadingWindow] = []
    num_predicted = 0
    while num_predicted < num_tokens:
        start = len(windows) * stride
        stop = min(start + context_length, num_tokens)
        windows.append(ReadingWindow(document=document, start=start, first=num_predicted, stop=stop))
        num_predicted = stop
    return windows


def default_stride(context_length: int) -> int:
    """Returns the stride that is used where none is given: half of the context."""
    return max(1, context_length // 2)


def batches(windows: Sequence[ReadingWindow], batch_size: int) -> list[list[ReadingWindow]]:
    """Returns the windows in batches of similar length, longest first, so that batches contain little padding."""
    ordered = sorted(windows, key=lambda window: -window.num_positions)
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowConfig(PackingConfig):
    """Layout of blocks that hold whole windows of documents, one after another, and padding (see `Manifest.layout`)."""

    kind: ClassVar[str] = "windows"

    stride: int
    """S, the tokens between the starts of a long document's windows, 1 … T."""
    num_windows: int = 0
    """Largest number of windows in a block; 0: as many as there is room for."""

    @property
    def label(self) -> str:
        """Part of the prepared directory's name that describes the layout."""
        return f"{self.context_length}-windows"

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of a shard, which has one row per block."""
        token = token_type(self.vocab_size)
        return pa.schema(
            {
                "tokens": pa.list_(token, self.context_length),
                "starts": pa.list_(pa.int32()),  # Positions at which windows start.
                "skipped": pa.list_(
                    pa.int32()
                ),  # Of every window, the positions whose predictions an earlier one makes.
                "following": pa.list_(token),  # Of every window, the target of its last position.
                "documents": pa.list_(pa.int64()),  # Of every window, the number of its document within the part.
                "num_tokens": pa.int32(),  # Positions that are no padding.
                "document": pa.int64(),  # The first of `documents`.
            }
        )

    def _rows(self, documents: Iterable[np.ndarray]) -> Iterator[tuple[Any, ...]]:
        for block in self._blocks(documents):
            starts = np.cumsum([0, *(window.num_positions for window, _ in block)]).tolist()
            tokens = np.full(self.context_length, self.eos_id, dtype=token_type(self.vocab_size).to_pandas_dtype())
            for start, stop, (window, stream) in zip(starts, starts[1:], block, strict=False):
                tokens[start:stop] = stream[window.start : window.stop]
            skipped = [window.first - window.start for window, _ in block]
            following = [int(stream[window.stop]) for window, stream in block]
            numbers = [window.document for window, _ in block]
            yield tokens, starts[:-1], skipped, following, numbers, starts[-1], numbers[0]

    def _blocks(self, documents: Iterable[np.ndarray]) -> Iterator[list[tuple[ReadingWindow, np.ndarray]]]:
        """Yield the windows of every block, each with the stream of its document."""
        block: list[tuple[ReadingWindow, np.ndarray]] = []
        room = self.context_length
        for number, ids in enumerate(documents):
            stream = np.concatenate([[self.bos_id], ids, [self.eos_id]])
            # The end is a prediction, too; a reader may ignore it.
            windows = windows_of(number, len(ids) + 1, context_length=self.context_length, stride=self.stride)
            for window in windows:
                if window.num_positions > room or (self.num_windows and len(block) == self.num_windows):
                    yield block
                    block, room = [], self.context_length
                block.append((window, stream))
                room -= window.num_positions
        if block:
            yield block

    def unpack(self, blocks: pa.RecordBatch | pa.Table) -> dict[str, np.ndarray]:
        """Convert stored blocks to arrays, as `PackingConfig.unpack` does; positions restart with every window."""
        size, num_blocks = self.context_length, blocks.num_rows
        input_ids = flat_values(blocks.column("tokens")).reshape(num_blocks, size).astype(np.int64)
        lengths, starts = list_values(blocks.column("starts"))
        skipped, following, documents = (
            list_values(blocks.column(name))[1] for name in ("skipped", "following", "documents")
        )
        row = np.repeat(np.arange(num_blocks), lengths)
        num_tokens = np.asarray(blocks.column("num_tokens").to_numpy(), dtype=np.int64)
        is_last = np.append(row[1:] != row[:-1], True)[: len(row)]
        stops = np.where(is_last, num_tokens[row], np.append(starts[1:], 0)[: len(row)])

        def spread(values: np.ndarray) -> np.ndarray:
            """Give every position the value of its window; padding has that of the last one."""
            marks = np.zeros((num_blocks, size), dtype=np.int64)
            marks[row, starts] = np.arange(len(row))
            return values[np.maximum.accumulate(marks, axis=1)]

        position_ids = np.arange(size) - spread(starts)
        targets = np.concatenate([input_ids[:, 1:], input_ids[:, :1]], axis=1)
        targets[row, stops - 1] = following
        is_padding = np.arange(size) >= num_tokens[:, None]
        targets[is_padding | (position_ids < spread(skipped))] = IGNORE_INDEX
        return {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "targets": targets,
            "documents": spread(documents),
        }

    def describe(self, num_rows: int, num_documents: int) -> str:
        """Describe what is stored of `num_documents` documents, for a human reader."""
        return f"{PackingConfig.describe(self, num_rows, num_documents)}, uncut up to that length"
