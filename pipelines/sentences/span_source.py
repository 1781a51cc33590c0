"""Documents as training arrays: DeCLUTR's spans, drawn anew in every epoch, with masked anchors for the MLM objective.

A span becomes a row `[opening] tokens [closing]`, with the tokenizer's own special tokens of one text. Everything random
is a pure function of (seed, epoch, document id).

Shapes: n documents of a batch, A anchors, P positives an anchor, t = l_max and the special tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipelines.sentences.spans import SpanConfig, gather_spans, sample_spans
from pipelines.stream import Batch
from pipelines.text.documents import DocumentConfig
from pipelines.text.manifest import Manifest, read_rows
from pipelines.text.tokenization import SpecialTokens

IGNORE_INDEX = -100

# Of the masked tokens (BERT, arXiv 1810.04805 §3.1): so many become the mask token, so many a random one, the rest stays.
_SHARE_MASK, _SHARE_RANDOM = 0.8, 0.1
_MASK_STREAM = 0x6D61736B


@dataclass(frozen=True, kw_only=True)
class SpanSource:
    """The documents of a prepared text; see `pipelines.stream.Source`. It can be pickled."""

    manifest: Manifest
    spans: SpanConfig
    special_tokens: SpecialTokens
    seed: int = 0
    mask_share: float = 0.15
    """Share of an anchor's tokens that are to be predicted. 0: none."""

    def __post_init__(self) -> None:
        layout = self.manifest.layout
        assert isinstance(layout, DocumentConfig)
        if layout.least_num_tokens < self.spans.least_num_tokens:
            raise ValueError(
                f"{self.manifest.directory} holds documents from {layout.least_num_tokens} tokens on, and the spans need "
                f"{self.spans.least_num_tokens}: prepare it again"
            )

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def first_rows(self) -> np.ndarray:
        """(shards + 1,) the dense id of every shard's first document, and the number of documents."""
        return np.concatenate([[0], np.cumsum(self.manifest.shard_sizes)]).astype(np.int64)

    @property
    def width(self) -> int:
        """t."""
        return self.spans.max_length + self.special_tokens.num_added

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        """The spans of documents.

        Args:
            shards, rows: (n,) which documents: the shard's number in the manifest, and the row in it.
            epoch: which spans of them.

        Returns:
            `anchor_ids` (n, A, t), `positive_ids` (n, A, P, t), token ids, padded, and `anchor_lengths` (n, A),
            `positive_lengths` (n, A, P), special tokens included; `mlm_labels` (n, A, t), the tokens that were masked and
            -100 elsewhere; `ids` (n,) dense numbers of the documents; `is_crowded` (n,) bool (`Spans`); `digest` (n,).
        """
        shards, rows = np.asarray(shards), np.asarray(rows)
        ids = self.first_rows[shards] + rows
        documents = self._documents(shards, rows)
        lengths = np.array([len(tokens) for tokens in documents])
        spans = sample_spans(lengths, ids, seed=self.seed, epoch=epoch, config=self.spans)
        tokens = np.concatenate(documents)
        first = np.cumsum(lengths) - lengths
        anchors, anchor_lengths = self._rows(tokens, first[:, None] + spans.anchor_start, spans.anchor_length)
        positives, positive_lengths = self._rows(
            tokens, first[:, None, None] + spans.positive_start, spans.positive_length
        )
        labels = np.full_like(anchors, IGNORE_INDEX)
        if self.mask_share:
            for place, document in enumerate(ids):
                rng = np.random.default_rng([self.seed, _MASK_STREAM, epoch, int(document)])
                anchors[place], labels[place] = self._masked(anchors[place], anchor_lengths[place], rng)
        digest = [
            int.from_bytes(hashlib.blake2b(one.tobytes() + many.tobytes(), digest_size=6).digest(), "little")
            for one, many in zip(anchors, positives, strict=True)
        ]
        return {
            "anchor_ids": anchors,
            "anchor_lengths": anchor_lengths,
            "mlm_labels": labels,
            "positive_ids": positives,
            "positive_lengths": positive_lengths,
            "ids": ids,
            "is_crowded": spans.is_crowded,
            "digest": np.array(digest, dtype=np.int64),
        }

    def name(self, shard: int, row: int) -> str:
        """What a person finds the document by."""
        entry = self.manifest.shards[shard]
        document = read_rows(self.manifest, entry, [row]).column("document")[0].as_py()
        return f"document {document} of {entry.archive} ({entry.file}:{row})"

    def _documents(self, shards: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        """The tokens of every document."""
        documents: list[np.ndarray] = [np.empty(0)] * len(rows)
        for shard in np.unique(shards):
            chosen = np.flatnonzero(shards == shard)
            table = read_rows(self.manifest, self.manifest.shards[shard], rows[chosen])
            for place, tokens in zip(chosen, table.column("tokens"), strict=True):
                documents[place] = tokens.values.to_numpy()
        return documents

    def _rows(self, tokens: np.ndarray, start: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Spans between special tokens, padded to t: (…, t) int32, and their lengths (…)."""
        special = self.special_tokens
        found, is_token = gather_spans(tokens, start, length, pad_id=special.pad_id)
        result = np.full((len(found), self.width), special.pad_id, dtype=np.int32)
        opening, closing = len(special.opening), len(special.closing)
        result[:, :opening] = special.opening
        result[:, opening : opening + found.shape[1]][is_token == 1] = found[is_token == 1]
        flat = length.reshape(-1)
        for place, token in enumerate(special.closing):
            result[np.arange(len(found)), opening + flat + place] = token
        return result.reshape(*length.shape, self.width), length + opening + closing

    def _masked(self, rows: np.ndarray, lengths: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Rows (A, t) with some of their tokens, never the special ones, masked, and what they were."""
        special = self.special_tokens
        choice, kind = rng.random((2, *rows.shape))
        random_tokens = rng.integers(special.vocab_size, size=rows.shape)
        column = np.arange(rows.shape[1])
        is_inside = (column >= len(special.opening)) & (column < (lengths - len(special.closing))[:, None])
        is_masked = is_inside & (choice < self.mask_share)
        labels = np.where(is_masked, rows, IGNORE_INDEX).astype(rows.dtype)
        replaced = np.where(
            kind < _SHARE_MASK,
            special.mask_id,
            np.where(kind < _SHARE_MASK + _SHARE_RANDOM, random_tokens, rows),
        )
        return np.where(is_masked, replaced, rows).astype(rows.dtype), labels
