"""Store whole documents as rows, for training on spans that are drawn anew in every epoch.

A row holds the tokens of one document without special tokens. Documents with too few tokens are left out; their
number is the difference between the manifest's number of documents and its number of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentConfig:
    """Layout that stores one document per row (see `pipelines.text.manifest.Layout`).

    Raises:
        ValueError: if `least_num_tokens` is not positive.
    """

    kind: ClassVar[str] = "documents"
    """Name of the layout in a manifest."""

    least_num_tokens: int
    """Minimum number of tokens of a document; shorter documents are left out."""
    vocab_size: int
    """Size of the vocabulary; it determines whether tokens are stored as 16-bit or 32-bit integers."""

    def __post_init__(self) -> None:
        if self.least_num_tokens < 1:
            raise ValueError(f"least_num_tokens = {self.least_num_tokens} must be positive")

    @property
    def label(self) -> str:
        """Part of the prepared directory's name that describes the layout."""
        return f"documents-{self.least_num_tokens}"

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of a shard, which has one row per document."""
        token = pa.uint16() if self.vocab_size <= 1 << 16 else pa.uint32()
        return pa.schema(
            {
                "tokens": pa.list_(token),
                "num_tokens": pa.int32(),
                "document": pa.int64(),  # Number of the document within its archive, from 0.
            }
        )

    def rows(self, documents: Iterable[np.ndarray], *, num_documents_per_batch: int = 256) -> Iterator[pa.RecordBatch]:
        """Convert token arrays of documents to record batches of those that are long enough, in the same order."""
        kept = ((number, tokens) for number, tokens in enumerate(documents) if len(tokens) >= self.least_num_tokens)
        dtype = self.schema.field("tokens").type.value_type.to_pandas_dtype()
        while chunk := list(itertools.islice(kept, num_documents_per_batch)):
            lengths = np.array([len(tokens) for _, tokens in chunk])
            values = pa.array(np.concatenate([tokens for _, tokens in chunk]).astype(dtype))
            offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
            yield pa.RecordBatch.from_arrays(
                [
                    pa.ListArray.from_arrays(offsets, values),
                    pa.array(lengths, pa.int32()),
                    pa.array([number for number, _ in chunk], pa.int64()),
                ],
                schema=self.schema,
            )

    def describe(self, num_rows: int, num_documents: int) -> str:
        """Describe what is stored of `num_documents` documents, for a human reader."""
        return f"{num_rows} with {self.least_num_tokens} tokens or more ({num_documents - num_rows} are shorter)"
