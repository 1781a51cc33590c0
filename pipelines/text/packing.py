"""Layouts of text: documents packed into blocks of a fixed number of tokens, or whole documents as rows.

In blocks, every document is stored as `[bos] t1 … tn` and has the targets `t1 … tn [eos]`, so that each of its tokens, and
its end, is a target exactly once. Documents are concatenated and cut every T tokens; only the last block of an archive is
padded. A block is stored as its T tokens, the one token that follows, and the positions at which documents start.

A row of whole documents (`DocumentConfig`) holds the tokens of one without special tokens, for spans that are drawn anew in
every epoch. Documents with too few tokens are left out.

Shapes: n blocks of T tokens each.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa

from pipelines.text.tokenization import document_start_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

IGNORE_INDEX = -100
# One document in so many is held out where no other text is given.
_ONE_IN = 5
NUM_ROWS_PER_BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingConfig:
    """Layout that packs documents into blocks (see `pipelines.text.manifest.Layout`)."""

    kind: ClassVar[str] = "blocks"

    context_length: int
    """Number T of tokens per block."""
    bos_id: int
    """Id of the token that is put before each document."""
    eos_id: int
    """Id of the token that is the target at the end of each document."""
    vocab_size: int
    """Size of the vocabulary; it determines whether tokens are stored as 16-bit or 32-bit integers."""
    documents: Literal["all", "held_out", "others"] = "all"
    """Which documents are packed: all, a fifth that is held out, or the others. A hash of its tokens decides on which side a
    document is, so that equal documents are on the same one."""

    def __post_init__(self) -> None:
        if self.context_length < 2:
            raise ValueError(f"context_length = {self.context_length} must be at least 2 tokens")

    @classmethod
    def for_tokenizer(cls, tokenizer: PreTrainedTokenizerFast, context_length: int) -> PackingConfig:
        """Return the configuration for a tokenizer, which must have an end-of-text token."""
        return cls(
            context_length=context_length,
            bos_id=document_start_id(tokenizer),
            eos_id=int(tokenizer.eos_token_id),
            vocab_size=len(tokenizer),
        )

    @property
    def label(self) -> str:
        """Part of the prepared directory's name that describes the layout."""
        return str(self.context_length) if self.documents == "all" else f"{self.context_length}-{self.documents}"

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of a shard, which has one row per block."""
        return pa.schema(
            {
                "tokens": pa.list_(token_type(self.vocab_size), self.context_length + 1),
                # Positions 0 … T at which documents start. A document also ends at each position > 0, so the list
                # contains T if a document ends with the block, and num_tokens if the archive's last document ends
                # there.
                "starts": pa.list_(pa.int32()),
                "num_tokens": pa.int32(),  # Less than T only in the last block of an archive.
                "document": pa.int64(),  # Number, within its part, of the document that the first token belongs to.
            }
        )

    def rows(self, documents: Iterable[np.ndarray], *, num_rows: int = NUM_ROWS_PER_BATCH) -> Iterator[pa.RecordBatch]:
        """Convert token arrays of documents to record batches of blocks, in the same order; no token is dropped."""
        return record_batches(self._rows(self.choose(documents)), self.schema, num_rows)

    def choose(self, documents: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the documents that are packed."""
        for ids in documents:
            if self.documents == "all" or (_hash(ids) % _ONE_IN == 0) == (self.documents == "held_out"):
                yield ids

    def _rows(self, documents: Iterable[np.ndarray]) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of the stored schema."""
        size, dtype = self.context_length, token_type(self.vocab_size).to_pandas_dtype()
        buffer = np.empty(0, dtype=np.int64)  # The tokens that no block has yet.
        starts: list[tuple[int, int]] = []  # (offset in the buffer, number of the document that starts there)
        document_before = 0  # The document that the buffer's first token belongs to, if no document starts there.

        def cut(num_tokens: int, at_end: Sequence[int]) -> tuple[Any, ...]:
            nonlocal buffer, starts, document_before
            tokens = np.full(size + 1, self.eos_id, dtype=dtype)
            taken = buffer[: size + 1]
            tokens[: len(taken)] = taken
            inside = [(at, number) for at, number in starts if at <= size]
            first = inside[0][1] if inside and inside[0][0] == 0 else document_before
            document_before = max([first] + [number for at, number in inside if at < size])
            buffer, starts = buffer[num_tokens:], [(at - size, number) for at, number in starts if at >= size]
            return tokens, [at for at, _ in inside] + [*at_end], num_tokens, first

        for number, ids in enumerate(documents):
            starts.append((len(buffer), number))
            buffer = np.concatenate([buffer, [self.bos_id], ids])
            while len(buffer) > size:  # A block is cut only when the token after it is known, or the archive ends.
                yield cut(size, ())
        if num_left := len(buffer):
            yield cut(num_left, (num_left,))  # The archive's last document ends here.

    def unpack(self, blocks: pa.RecordBatch | pa.Table) -> dict[str, np.ndarray]:
        """Convert stored blocks to `input_ids`, `position_ids`, `targets` and `documents`, each (n, T) int64.

        Positions restart at 0 with every document and with every block. Targets are IGNORE_INDEX on padding. Documents are
        numbered within their part of an archive.
        """
        size, num_blocks = self.context_length, blocks.num_rows
        tokens = flat_values(blocks.column("tokens")).reshape(num_blocks, size + 1).astype(np.int64)
        num_starts, start = list_values(blocks.column("starts"))
        start_block = np.repeat(np.arange(num_blocks), num_starts)

        input_ids, targets = tokens[:, :size].copy(), tokens[:, 1:].copy()
        ends = start > 0
        targets[start_block[ends], start[ends] - 1] = self.eos_id
        column = np.arange(size)
        num_tokens = np.asarray(blocks.column("num_tokens").to_numpy(), dtype=np.int64)
        targets[column >= num_tokens[:, None]] = IGNORE_INDEX

        last_start = np.zeros((num_blocks, size), dtype=np.int64)
        inside = start < size
        last_start[start_block[inside], start[inside]] = start[inside]
        position_ids = column - np.maximum.accumulate(last_start, axis=1)
        first = np.asarray(blocks.column("document").to_numpy(), dtype=np.int64)
        documents = first[:, None] + np.cumsum(last_start > 0, axis=1)
        return {"input_ids": input_ids, "position_ids": position_ids, "targets": targets, "documents": documents}

    def describe(self, num_rows: int, num_documents: int) -> str:
        """Describe what is stored of `num_documents` documents, for a human reader."""
        kept = {"all": "all", "held_out": "a fifth", "others": "four fifths"}[self.documents]
        return f"{kept} in {num_rows} blocks of {self.context_length}"


def _hash(tokens: np.ndarray, seed: int | None = None) -> int:
    """Return a number of 64 bits that is a function of a document's tokens, and of the seed if there is one."""
    key = b"" if seed is None else str(seed).encode()
    return int.from_bytes(hashlib.blake2b(tokens.astype(np.int64).tobytes(), digest_size=8, key=key).digest(), "little")


def token_type(vocab_size: int) -> pa.DataType:
    return pa.uint16() if vocab_size <= 1 << 16 else pa.uint32()


def record_batches(rows: Iterator[tuple[Any, ...]], schema: pa.Schema, num_rows: int) -> Iterator[pa.RecordBatch]:
    """Convert rows, which have a value for every column, to record batches of at most `num_rows`."""
    while chunk := list(itertools.islice(rows, num_rows)):
        columns = zip(zip(*chunk, strict=True), schema, strict=True)
        yield pa.RecordBatch.from_arrays([pa.array(values, field.type) for values, field in columns], schema=schema)


def list_values(column: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths (n,) of a list column's values, and all their elements one after another."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array.value_lengths().to_numpy(zero_copy_only=False), flat_values(array)


def flat_values(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return the flattened values of a fixed-size-list column; if the column is a slice, only the slice's values."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array.flatten().to_numpy(zero_copy_only=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentConfig:
    """Layout that stores one document per row (see `pipelines.text.manifest.Layout`)."""

    kind: ClassVar[str] = "documents"

    least_num_tokens: int
    """Minimum number of tokens of a document; shorter documents are left out."""
    vocab_size: int
    """Size of the vocabulary; it determines whether tokens are stored as 16-bit or 32-bit integers."""
    share: float = 1.0
    """Share of these documents that is kept. A hash of its tokens and `share_seed` decides, so that a larger share holds a
    smaller one."""
    share_seed: int = 0

    def __post_init__(self) -> None:
        if self.least_num_tokens < 1:
            raise ValueError(f"least_num_tokens = {self.least_num_tokens} must be positive")

    @property
    def label(self) -> str:
        """Part of the prepared directory's name that describes the layout."""
        return f"documents-{self.least_num_tokens}" + (f"-{self.share:g}-{self.share_seed}" if self.share < 1.0 else "")

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of a shard, which has one row per document."""
        return pa.schema(
            {
                "tokens": pa.list_(token_type(self.vocab_size)),
                "num_tokens": pa.int32(),
                "document": pa.int64(),  # Number of the document within its part of an archive, from 0.
            }
        )

    def rows(self, documents: Iterable[np.ndarray], *, num_rows: int = NUM_ROWS_PER_BATCH) -> Iterator[pa.RecordBatch]:
        """Convert token arrays of documents to record batches of those that are long enough, in the same order."""
        dtype = token_type(self.vocab_size).to_pandas_dtype()
        kept = ((number, tokens) for number, tokens in enumerate(documents) if self._keeps(tokens))
        rows = ((tokens.astype(dtype), len(tokens), number) for number, tokens in kept)
        return record_batches(rows, self.schema, num_rows)

    def describe(self, num_rows: int, num_documents: int) -> str:
        """Describe what is stored of `num_documents` documents, for a human reader."""
        others = "are shorter" + " or not in the share" * (self.share < 1.0)
        return f"{num_rows} with {self.least_num_tokens} tokens or more ({num_documents - num_rows} {others})"

    def _keeps(self, tokens: np.ndarray) -> bool:
        if len(tokens) < self.least_num_tokens or self.share == 1.0:
            return len(tokens) >= self.least_num_tokens
        return _hash(tokens, self.share_seed) < self.share * 2.0**64
