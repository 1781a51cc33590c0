"""Labelled sentences as training arrays, which are tokenised once and kept in memory.

Shapes: N sentences in total, n sentences in a batch, t tokens in the longest sentence.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipelines.sentences.senteval import Examples
from pipelines.stream import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledSource:
    """Source of labelled sentences or sentence pairs, all in one shard (see `pipelines.stream.Source`).

    It can be pickled.
    """

    token_ids: np.ndarray
    """Token ids, padded and including special tokens: (N, t) int32."""
    token_types: np.ndarray | None
    """Token types, 1 in the second sentence of a pair: (N, t) int8; None if the model does not use them."""
    lengths: np.ndarray
    """Number of tokens of each example, including special tokens: (N,) int64."""
    labels: np.ndarray
    """Class of each example: (N,) int64."""
    num_cut: int
    """Number of examples that were truncated to t tokens."""

    @classmethod
    def of(cls, examples: Examples, tokenizer: PreTrainedTokenizerFast, *, num_tokens: int) -> LabelledSource:
        """Tokenise examples.

        Args:
            examples: sentences or sentence pairs with their classes.
            tokenizer: the tokenizer of the model.
            num_tokens: maximum number of tokens; longer examples are truncated, pairs by shortening the longer
                sentence.
        """
        pairs = [examples.first] if examples.second is None else [examples.first, examples.second]
        whole = tokenizer(*pairs, verbose=False)
        encoded = tokenizer(*pairs, truncation=True, max_length=num_tokens, return_token_type_ids=True)
        rows, types = encoded["input_ids"], encoded["token_type_ids"]
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        token_ids = np.full((len(rows), lengths.max()), tokenizer.pad_token_id, dtype=np.int32)
        has_types = "token_type_ids" in tokenizer.model_input_names
        token_types = np.zeros_like(token_ids, dtype=np.int8)
        for place, (row, kinds) in enumerate(zip(rows, types, strict=True)):
            token_ids[place, : len(row)] = row
            token_types[place, : len(row)] = kinds
        return cls(
            token_ids=token_ids,
            token_types=token_types if has_types else None,
            lengths=lengths,
            labels=examples.labels,
            num_cut=sum(len(long) > len(row) for long, row in zip(whole["input_ids"], rows, strict=True)),
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: np.ndarray) -> LabelledSource:
        """Return a source of the examples in some rows."""
        return LabelledSource(
            token_ids=self.token_ids[rows],
            token_types=None if self.token_types is None else self.token_types[rows],
            lengths=self.lengths[rows],
            labels=self.labels[rows],
            num_cut=self.num_cut,
        )

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        """Return n examples by row number; they are the same in every epoch.

        Returns:
            `input_ids` (n, t); `token_type_ids` (n, t), if the model uses them; `lengths`, `labels`, `ids` (the row
            numbers) and `digest` (a 48-bit hash of tokens and label), each (n,).
        """
        rows = np.asarray(rows)
        digest = [
            int.from_bytes(hashlib.blake2b(tokens.tobytes() + bytes([label]), digest_size=6).digest(), "little")
            for tokens, label in zip(self.token_ids[rows], self.labels[rows] % 256, strict=True)
        ]
        types = {} if self.token_types is None else {"token_type_ids": self.token_types[rows]}
        return types | {
            "input_ids": self.token_ids[rows],
            "lengths": self.lengths[rows],
            "labels": self.labels[rows],
            "ids": rows.astype(np.int64),
            "digest": np.array(digest, dtype=np.int64),
        }

    def name(self, shard: int, row: int) -> str:
        """Return the row number and the class of an example, for messages."""
        return f"training sentence {row} of class {self.labels[row]}"
