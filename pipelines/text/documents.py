"""Whole documents as rows: for training on spans that are drawn anew in every epoch.

A row is the tokens of a document as they stand, without special tokens; documents that have fewer than are needed are left
out, and their number is what the manifest's two counts differ by.
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
    """Which documents are stored; a layout of `pipelines.text.manifest`."""

    kind: ClassVar[str] = "documents"

    least_num_tokens: int
    """Documents with fewer are left out."""
    vocab_size: int
    """Decides the width in which tokens are stored."""

    def __post_init__(self) -> None:
        if self.least_num_tokens < 1:
            raise ValueError(f"least_num_tokens = {self.least_num_tokens} must be positive")

    @property
    def label(self) -> str:
        """Part of a prepared directory's name."""
        return f"documents-{self.least_num_tokens}"

    @property
    def schema(self) -> pa.Schema:
        """One row a document."""
        token = pa.uint16() if self.vocab_size <= 1 << 16 else pa.uint32()
        return pa.schema(
            {
                "tokens": pa.list_(token),
                "num_tokens": pa.int32(),
                "document": pa.int64(),  # its ordinal in its archive
            }
        )

    def rows(self, documents: Iterable[np.ndarray], *, num_documents_per_batch: int = 256) -> Iterator[pa.RecordBatch]:
        """Token arrays of documents, in order → record batches of those that are long enough, in order."""
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
        """What is stored of so many documents, for a person."""
        return f"{num_rows} with {self.least_num_tokens} tokens or more ({num_documents - num_rows} are shorter)"
