"""Documents as training arrays: DeCLUTR's spans, drawn anew in every epoch, with masked anchors for the MLM objective.

A span becomes a row `[opening] tokens [closing]`, with the special tokens that the tokenizer adds to a single text. All
randomness is a pure function of (seed, epoch, key of the document), where the key (`Manifest.row_keys`) is known as soon
as the part of the text is prepared that the document belongs to.

Shapes: n documents in a batch, A anchors per document, P positives per anchor, t = l_max + number of special tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipelines.sentences.spans import SpanConfig, gather_spans, sample_spans
from pipelines.stream import Batch
from pipelines.text.blocks import prefetch_shards, read_rows
from pipelines.text.documents import DocumentConfig
from pipelines.text.growing import GrowingManifest
from pipelines.text.manifest import Manifest
from pipelines.text.packing import IGNORE_INDEX
from pipelines.text.tokenization import SpecialTokens

# Shares of the tokens chosen for prediction that become the mask token and a random token; the rest stay unchanged
# (BERT, arXiv 1810.04805 §3.1).
_SHARE_MASK, _SHARE_RANDOM = 0.8, 0.1
_MASK_STREAM = 0x6D61736B


@dataclass(frozen=True, kw_only=True)
class SpanSource:
    """Source of spans of the documents of a prepared text (see `pipelines.stream.Source`).

    It can be pickled.

    Raises:
        ValueError: if the prepared data hold documents that are too short for the spans.
    """

    manifest: Manifest | GrowingManifest
    """Prepared data set of whole documents, which may still be growing."""
    spans: SpanConfig
    """Distribution of spans."""
    special_tokens: SpecialTokens
    """Special tokens of the tokenizer that the data were prepared with."""
    seed: int = 0
    """Seed of the spans and of the masking."""
    mask_share: float = 0.15
    """Probability with which each token of an anchor is chosen for prediction; 0 disables masking."""
    cache_bytes: int = 0
    """Size of the node's cache of remote shards in bytes; 0: none, so that a shard is read anew every time."""

    def __post_init__(self) -> None:
        layout = self.manifest.layout
        assert isinstance(layout, DocumentConfig)
        if layout.least_num_tokens < self.spans.least_num_tokens:
            raise ValueError(
                f"{self.manifest.directory} holds documents of {layout.least_num_tokens} tokens or more, but the spans "
                f"need {self.spans.least_num_tokens}: prepare it again"
            )

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def first_rows(self) -> np.ndarray:
        """Id of every shard's first document, followed by the number of all documents: (shards + 1,) int64."""
        assert isinstance(self.manifest, Manifest)  # What precedes a document is not known while the data grow.
        return np.concatenate([[0], np.cumsum(self.manifest.shard_sizes)]).astype(np.int64)

    @property
    def width(self) -> int:
        """Width t of the rows: maximum length of a span plus the special tokens."""
        return self.spans.max_length + self.special_tokens.num_added

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        """Return the spans of n documents.

        Args:
            shards, rows: (n,) location of each document: the shard's number in the manifest, and the row in the shard.
            epoch: epoch that the spans are drawn for.

        Returns:
            `anchor_ids` (n, A, t) and `positive_ids` (n, A, P, t), padded token ids; `anchor_lengths` (n, A) and
            `positive_lengths` (n, A, P), their numbers of tokens including special tokens; `mlm_labels` (n, A, t),
            the original tokens at masked positions and -100 elsewhere; `ids` (n,), the numbers of the documents in
            the data set, or −1 while it grows; `is_crowded` (n,) bool (see `Spans`); `digest` (n,), a 48-bit hash of
            anchors and positives.
        """
        shards, rows = np.asarray(shards), np.asarray(rows)
        keys = self.manifest.row_keys(shards, rows)
        documents = self._documents(shards, rows)
        lengths = np.array([len(tokens) for tokens in documents])
        spans = sample_spans(lengths, keys, seed=self.seed, epoch=epoch, config=self.spans)
        tokens = np.concatenate(documents)
        first = np.cumsum(lengths) - lengths
        anchors, anchor_lengths = self._rows(tokens, first[:, None] + spans.anchor_start, spans.anchor_length)
        positives, positive_lengths = self._rows(
            tokens, first[:, None, None] + spans.positive_start, spans.positive_length
        )
        labels = np.full_like(anchors, IGNORE_INDEX)
        if self.mask_share:
            for place, key in enumerate(keys):
                rng = np.random.default_rng([self.seed, _MASK_STREAM, epoch, int(key)])
                anchors[place], labels[place] = self._masked(anchors[place], anchor_lengths[place], rng)
        digest = [
            int.from_bytes(hashlib.blake2b(anchor.tobytes() + positive.tobytes(), digest_size=6).digest(), "little")
            for anchor, positive in zip(anchors, positives, strict=True)
        ]
        return {
            "anchor_ids": anchors,
            "anchor_lengths": anchor_lengths,
            "mlm_labels": labels,
            "positive_ids": positives,
            "positive_lengths": positive_lengths,
            "ids": self._ids(shards, rows),
            "is_crowded": spans.is_crowded,
            "digest": np.array(digest, dtype=np.int64),
        }

    def prefetch(self, now: Sequence[int], later: Sequence[int] = (), before: Sequence[int] = ()) -> None:
        """Fetch remote shards into the node's cache in the background (see `pipelines.stream.RemoteSource`)."""
        prefetch_shards(self.manifest, self.cache_bytes, now, later, before)

    def name(self, shard: int, row: int) -> str:
        """Return the archive of a document and its number in it, with shard file and row, for messages."""
        entry = self.manifest.shards[shard]
        document = read_rows(self.manifest, entry, [row], self.cache_bytes).column("document")[0].as_py()
        return f"document {document} of {entry.archive} ({entry.file}:{row})"

    def _ids(self, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the number of each document among all documents, (n,) int64; −1 while the data grow."""
        if isinstance(self.manifest, GrowingManifest):
            return np.full(len(rows), -1)
        return self.first_rows[shards] + rows

    def _documents(self, shards: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        """Return the tokens of n documents, given their shards and rows, each (n,)."""
        documents: list[np.ndarray] = [np.empty(0)] * len(rows)
        for shard in np.unique(shards):
            chosen = np.flatnonzero(shards == shard)
            table = read_rows(self.manifest, self.manifest.shards[shard], rows[chosen], self.cache_bytes)
            for place, tokens in zip(chosen, table.column("tokens"), strict=True):
                documents[place] = tokens.values.to_numpy()
        return documents

    def _rows(self, tokens: np.ndarray, start: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return spans surrounded by special tokens and padded to t, (…, t) int32, and their lengths, (…)."""
        special = self.special_tokens
        spans, is_token = gather_spans(tokens, start, length, pad_id=special.pad_id)
        result = np.full((len(spans), self.width), special.pad_id, dtype=np.int32)
        opening, closing = len(special.opening), len(special.closing)
        result[:, :opening] = special.opening
        result[:, opening : opening + spans.shape[1]][is_token == 1] = spans[is_token == 1]
        flat = length.reshape(-1)
        for place, token in enumerate(special.closing):
            result[np.arange(len(spans)), opening + flat + place] = token
        return result.reshape(*length.shape, self.width), length + opening + closing

    def _masked(self, rows: np.ndarray, lengths: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Mask some tokens of rows (A, t), but never special tokens.

        Returns:
            The masked rows (A, t), and the labels (A, t): the original tokens where masked, and IGNORE_INDEX elsewhere.
        """
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
