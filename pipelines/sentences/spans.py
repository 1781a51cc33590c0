"""Sample DeCLUTR's spans (arXiv 2006.03659 §3.1): the positions of anchors in a document and of positives around them.

Lengths in tokens are drawn from

    l_anchor   = ⌊β (l_max − l_min) + l_min⌋, β ~ Beta(4, 2)       (anchors are mostly long)
    l_positive = ⌊β (l_max − l_min) + l_min⌋, β ~ Beta(2, 4)       (positives are mostly short)

The starts of the A anchors are uniform over all placements inside the document whose starts are ≥ 2·l_max apart, or
≥ l_max if it is too short for that. A positive of length l_p for the anchor [a, b) starts uniformly, within the document,

    any         in [a − l_p, b]: overlapping, adjacent or inside
    subsuming   in [a, b − l_p], with l_p at most the anchor's length
    adjacent    at a − l_p or at b; if it fits on neither side, it is shortened to the longer of the two

All randomness is a pure function of (seed, epoch, document key): each random number is a hash of these and of its own
index. For integers a and b, a Beta(a, b) variable is the a-th smallest of a + b − 1 uniform numbers.

In training arrays (`SpanSource`), a span is a row `[opening] tokens [closing]`, with the special tokens that the tokenizer
adds to a single text, and anchors are masked for the MLM objective.

Shapes: n documents, A anchors per document, P positives per anchor, t = l_max + number of special tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from pipelines.stream import Batch, row_digests
from pipelines.text.blocks import TextSource
from pipelines.text.manifest import Manifest
from pipelines.text.packing import IGNORE_INDEX, DocumentConfig
from pipelines.text.tokenization import SpecialTokens

Strategy = Literal["any", "subsuming", "adjacent"]

# Uniform random numbers per span: five for its length, and one for its start.
_NUM_FOR_LENGTH = 5
_NUM_DRAWS = _NUM_FOR_LENGTH + 1
_RANK_ANCHOR = 3  # Beta(4, 2): the 4th smallest of 5
_RANK_POSITIVE = 1  # Beta(2, 4): the 2nd smallest of 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanConfig:
    """Distribution of spans."""

    num_anchors: int = 2
    """A, the number of anchors per document."""
    num_positives: int = 2
    """P, the number of positives per anchor."""
    min_length: int = 32
    """l_min, the minimum number of tokens of a span."""
    max_length: int = 512
    """l_max, the maximum number of tokens of a span, not counting the tokenizer's special tokens."""
    strategy: Strategy = "any"
    """Position of a positive relative to its anchor: any (overlapping, adjacent or inside), subsuming (only inside) or
    adjacent (only adjacent)."""
    min_num_tokens: int = 0
    """Minimum number of tokens of a document, at least (A + 1)·l_max; shorter documents are counted and left out. 0:
    2·A·l_max, as in the paper."""

    def __post_init__(self) -> None:
        for name in ("num_anchors", "num_positives", "min_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be positive")
        if self.max_length < self.min_length:
            raise ValueError(f"max_length = {self.max_length} is below min_length = {self.min_length}")
        if self.strategy not in get_args(Strategy):
            raise ValueError(f"strategy = {self.strategy!r}: choose one of {', '.join(get_args(Strategy))}")
        least = (self.num_anchors + 1) * self.max_length
        if self.min_num_tokens and self.min_num_tokens < least:
            raise ValueError(
                f"min_num_tokens = {self.min_num_tokens} is below (num_anchors + 1)·max_length = {least}: "
                "the spans would have no room"
            )

    @property
    def least_num_tokens(self) -> int:
        """Number of tokens that a document must have, with the default of `min_num_tokens` resolved."""
        return self.min_num_tokens or 2 * self.num_anchors * self.max_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Spans as half-open token ranges [start, start + length) inside their documents."""

    anchor_start: np.ndarray
    """Start of every anchor, ascending per document: (n, A)."""
    anchor_length: np.ndarray
    """Length of every anchor: (n, A)."""
    positive_start: np.ndarray
    """Start of every positive: (n, A, P)."""
    positive_length: np.ndarray
    """Length of every positive: (n, A, P)."""
    is_crowded: np.ndarray
    """Whether the document is so short that the anchors' starts are only ≥ l_max apart: (n,) bool."""


def sample_spans(num_tokens: np.ndarray, keys: np.ndarray, *, seed: int, epoch: int, config: SpanConfig) -> Spans:
    """Sample the spans of n documents, given their lengths in tokens and integer keys, each (n,)."""
    num_tokens = np.asarray(num_tokens, dtype=np.int64)
    if len(num_tokens) and num_tokens.min() < config.least_num_tokens:
        short = int(num_tokens.argmin())
        raise ValueError(
            f"document {int(keys[short])} has {int(num_tokens[short])} tokens, and spans need {config.least_num_tokens}"
        )
    anchors, positives = config.num_anchors, config.num_positives
    draws = _draw_uniform(np.asarray(keys), seed, epoch, anchors * (1 + positives) * _NUM_DRAWS)
    draws = draws.reshape(len(num_tokens), anchors, 1 + positives, _NUM_DRAWS)

    length = _draw_lengths(draws[:, :, 0], _RANK_ANCHOR, config)
    wide = 2 * config.max_length
    room = num_tokens - length[:, -1]
    is_crowded = room < (anchors - 1) * wide
    gap = np.where(is_crowded, config.max_length, wide)
    slack = room - (anchors - 1) * gap
    start = _draw_multisets(draws[:, :, 0, -1], slack) + gap[:, None] * np.arange(anchors)

    positive_length = _draw_lengths(draws[:, :, 1:], _RANK_POSITIVE, config)
    draw = draws[:, :, 1:, -1]
    first, end, last = start[..., None], (start + length)[..., None], num_tokens[:, None, None]
    if config.strategy == "subsuming":
        positive_length = np.minimum(positive_length, length[..., None])
        positive_start = _scale_to_range(draw, first, end - positive_length)
    elif config.strategy == "adjacent":
        positive_length = np.minimum(positive_length, np.maximum(first, last - end))
        fits_before, fits_behind = first >= positive_length, last - end >= positive_length
        is_before = np.where(fits_before & fits_behind, draw < 0.5, fits_before)
        positive_start = np.where(is_before, first - positive_length, end)
    else:
        low, high = np.maximum(first - positive_length, 0), np.minimum(end, last - positive_length)
        positive_start = _scale_to_range(draw, low, high)
    return Spans(
        anchor_start=start,
        anchor_length=length,
        positive_start=positive_start,
        positive_length=positive_length,
        is_crowded=is_crowded,
    )


def _draw_lengths(draws: np.ndarray, rank: int, config: SpanConfig) -> np.ndarray:
    beta = np.sort(draws[..., :_NUM_FOR_LENGTH], axis=-1)[..., rank]
    return (beta * (config.max_length - config.min_length) + config.min_length).astype(np.int64)


def _scale_to_range(draws: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Map uniform numbers in [0, 1) to uniform integers in [low, high]."""
    return low + (draws * (high - low + 1)).astype(np.int64)


def _draw_multisets(draws: np.ndarray, slack: np.ndarray) -> np.ndarray:
    """Draw, for each of n documents, A ascending integers in [0, slack (n,)] such that every multiset is equally probable.

    Subtracting its rank (0 … A−1) from each element of an A-subset of slack + A numbers gives a multiset, and this is a
    bijection. The subset is drawn by Floyd's algorithm, which needs no rejection, from uniform numbers (n, A).
    """
    num_documents, size = draws.shape
    chosen = np.empty((num_documents, size), dtype=np.int64)
    for k in range(size):
        largest = slack + k
        drawn = (draws[:, k] * (largest + 1)).astype(np.int64)
        is_taken = (chosen[:, :k] == drawn[:, None]).any(axis=1)
        chosen[:, k] = np.where(is_taken, largest, drawn)
    chosen.sort(axis=1)
    return chosen - np.arange(size)


def _draw_uniform(keys: np.ndarray, seed: int, epoch: int, num_draws: int) -> np.ndarray:
    """Return (n, num_draws) uniform numbers in [0, 1) with 53 bits: hashes of (seed, epoch, key, index of the draw)."""
    stream = _mix(_mix(np.array([seed], dtype=np.int64).astype(np.uint64)) ^ np.uint64(epoch))
    draw = np.arange(num_draws, dtype=np.uint64)
    hashed = _mix(_mix(keys.astype(np.int64).astype(np.uint64) ^ stream)[:, None] + draw * _GOLDEN)
    return (hashed >> np.uint64(11)) * 2.0**-53


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply a step of SplitMix64, a bijection of 64-bit words whose outputs look independent (Steele et al. 2014)."""
    x = x + _GOLDEN  # The overflow is intended.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# Shares of the tokens chosen for prediction that become the mask token and a random token; the rest stay unchanged
# (BERT, arXiv 1810.04805 §3.1).
_SHARE_MASK, _SHARE_RANDOM = 0.8, 0.1
_MASK_STREAM = 0x6D61736B


@dataclass(frozen=True, kw_only=True)
class SpanSource(TextSource):
    """Source of spans of the whole documents of a prepared text (see `pipelines.stream.Source`); it can be pickled."""

    spans: SpanConfig
    special_tokens: SpecialTokens
    seed: int = 0
    """Seed of the spans and of the masking."""
    mask_share: float = 0.15
    """Probability with which each token of an anchor is chosen for prediction; 0 disables masking."""

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
        """Return the spans of n documents, given their shards and rows in them, each (n,), drawn for an epoch.

        `anchor_ids` (n, A, t) and `positive_ids` (n, A, P, t), padded token ids; `anchor_lengths` (n, A) and
        `positive_lengths` (n, A, P), their numbers of tokens with special ones; `mlm_labels` (n, A, t), the original tokens
        at masked positions and -100 elsewhere; `ids` (n,), the numbers of the documents in the data set, or −1 while it
        grows; `is_crowded` (n,) bool (see `Spans`); `digest` (n,), a 48-bit hash of anchors and positives.
        """
        shards, rows = np.asarray(shards), np.asarray(rows)
        keys = self.manifest.row_keys(shards, rows)
        documents = [tokens.values.to_numpy() for tokens in self.gather(shards, rows).column("tokens")]
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
        return {
            "anchor_ids": anchors,
            "anchor_lengths": anchor_lengths,
            "mlm_labels": labels,
            "positive_ids": positives,
            "positive_lengths": positive_lengths,
            "ids": self._ids(shards, rows),
            "is_crowded": spans.is_crowded,
            "digest": row_digests(a.tobytes() + p.tobytes() for a, p in zip(anchors, positives, strict=True)),
        }

    def _ids(self, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the number of each document among all documents, (n,) int64; −1 while the data grow."""
        if not isinstance(self.manifest, Manifest):
            return np.full(len(rows), -1)
        return self.first_rows[shards] + rows

    def _rows(self, tokens: np.ndarray, start: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return spans surrounded by special tokens and padded to t, (…, t) int32, and their lengths, (…)."""
        special, flat = self.special_tokens, length.reshape(-1, 1)
        opening, column = len(special.opening), np.arange(self.spans.max_length)
        result = np.full((len(flat), self.width), special.pad_id, dtype=np.int32)
        result[:, :opening] = special.opening
        is_token = column < flat
        result[:, opening : opening + len(column)][is_token] = tokens[(start.reshape(-1, 1) + column)[is_token]]
        for place, token in enumerate(special.closing):
            result[np.arange(len(flat)), opening + flat[:, 0] + place] = token
        return result.reshape(*length.shape, self.width), length + special.num_added

    def _masked(self, rows: np.ndarray, lengths: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Mask some tokens of rows (A, t), but never special tokens; return the rows and the labels (A, t)."""
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
