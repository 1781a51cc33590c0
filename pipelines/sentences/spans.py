"""DeCLUTR's spans (arXiv 2006.03659 §3.1): anchors of a document and the positives around them, as numbers alone.

    l_anchor   = ⌊β (l_max − l_min) + l_min⌋, β ~ Beta(4, 2)       anchors are long,
    l_positive = ⌊β (l_max − l_min) + l_min⌋, β ~ Beta(2, 4)       positives short

The starts of the A anchors are uniform over all placements inside the document whose starts are ≥ 2·l_max apart, or, where
a shorter document was allowed and leaves no such placement, ≥ l_max apart. With an anchor [a, b) a positive starts uniformly

    any         in [a − l_p, b]: overlapping, adjacent or inside
    subsuming   in [a, b − l_p], with l_p at most the anchor's length
    adjacent    at a − l_p or at b

within the document. An adjacent positive that fits on neither side is cut to the longer one.

Everything is a pure function of (seed, epoch, document key): each number is a hash of these and of its own place, so that it
depends neither on the batch a document is read in nor on who reads it. Beta(a, b) with whole a and b is the a-th smallest of
a + b − 1 uniform numbers.

Shapes: n documents, A anchors, P positives an anchor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

Strategy = Literal["any", "subsuming", "adjacent"]

# Of a span: the uniform numbers of its length, and one for its start.
_NUM_FOR_LENGTH = 5
_NUM_DRAWS = _NUM_FOR_LENGTH + 1
_RANK_ANCHOR = 3  # Beta(4, 2): the 4th smallest of 5
_RANK_POSITIVE = 1  # Beta(2, 4): the 2nd smallest of 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanConfig:
    """How spans are drawn.

    Raises:
        ValueError: naming the field.
    """

    num_anchors: int = 2
    """A."""
    num_positives: int = 2
    """P."""
    min_length: int = 32
    """l_min, tokens."""
    max_length: int = 512
    """l_max, tokens."""
    strategy: Strategy = "any"
    """Where positives lie."""
    min_num_tokens: int = 0
    """Documents with fewer tokens are skipped. 0: 2·A·l_max, as in the paper; at least (A + 1)·l_max."""

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
        """Tokens that a document must have."""
        return self.min_num_tokens or 2 * self.num_anchors * self.max_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Half-open token ranges [start, start + length) inside their documents."""

    anchor_start: np.ndarray
    """(n, A), ascending."""
    anchor_length: np.ndarray
    """(n, A)."""
    positive_start: np.ndarray
    """(n, A, P)."""
    positive_length: np.ndarray
    """(n, A, P)."""
    is_crowded: np.ndarray
    """(n,) bool: the anchors' starts are ≥ l_max apart only, for want of room."""


def sample_spans(num_tokens: np.ndarray, keys: np.ndarray, *, seed: int, epoch: int, config: SpanConfig) -> Spans:
    """Spans of n documents.

    Args:
        num_tokens: (n,) lengths, each at least `config.least_num_tokens`.
        keys: (n,) whole numbers that name the documents.
        seed: of the run.
        epoch: of the data; every epoch has spans of its own.
        config: how spans are drawn.

    Raises:
        ValueError: if a document is too short.
    """
    num_tokens = np.asarray(num_tokens, dtype=np.int64)
    if len(num_tokens) and num_tokens.min() < config.least_num_tokens:
        short = int(num_tokens.argmin())
        raise ValueError(
            f"document {int(keys[short])} has {int(num_tokens[short])} tokens, and spans need {config.least_num_tokens}"
        )
    anchors, positives = config.num_anchors, config.num_positives
    draws = _uniform(np.asarray(keys), seed, epoch, anchors * (1 + positives) * _NUM_DRAWS)
    draws = draws.reshape(len(num_tokens), anchors, 1 + positives, _NUM_DRAWS)

    length = _lengths(draws[:, :, 0], _RANK_ANCHOR, config)
    wide = 2 * config.max_length
    room = num_tokens - length[:, -1]
    is_crowded = room < (anchors - 1) * wide
    gap = np.where(is_crowded, config.max_length, wide)
    slack = room - (anchors - 1) * gap
    start = _sorted_multisets(draws[:, :, 0, -1], slack) + gap[:, None] * np.arange(anchors)

    positive_length = _lengths(draws[:, :, 1:], _RANK_POSITIVE, config)
    place = draws[:, :, 1:, -1]
    first, end, last = start[..., None], (start + length)[..., None], num_tokens[:, None, None]
    if config.strategy == "subsuming":
        positive_length = np.minimum(positive_length, length[..., None])
        positive_start = _between(place, first, end - positive_length)
    elif config.strategy == "adjacent":
        positive_length = np.minimum(positive_length, np.maximum(first, last - end))
        fits_before, fits_behind = first >= positive_length, last - end >= positive_length
        is_before = np.where(fits_before & fits_behind, place < 0.5, fits_before)
        positive_start = np.where(is_before, first - positive_length, end)
    else:
        low, high = np.maximum(first - positive_length, 0), np.minimum(end, last - positive_length)
        positive_start = _between(place, low, high)
    return Spans(
        anchor_start=start,
        anchor_length=length,
        positive_start=positive_start,
        positive_length=positive_length,
        is_crowded=is_crowded,
    )


def gather_spans(
    tokens: np.ndarray, start: np.ndarray, length: np.ndarray, *, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of spans as rows padded to the longest, and their mask (1 token, 0 padding).

    Args:
        tokens: (total,) documents end to end.
        start: (…) places in `tokens`, of any shape; the rows are in the order of its flattening.
        length: of the same shape, positive.
        pad_id: fills the rest of a row.

    Returns:
        Two arrays (spans, longest) of int64.
    """
    start, length = start.reshape(-1, 1), length.reshape(-1, 1)
    column = np.arange(int(length.max(initial=0)))
    is_token = column < length
    rows = tokens[np.where(is_token, start + column, 0)].astype(np.int64)
    rows[~is_token] = pad_id
    return rows, is_token.astype(np.int64)


def _lengths(draws: np.ndarray, rank: int, config: SpanConfig) -> np.ndarray:
    beta = np.sort(draws[..., :_NUM_FOR_LENGTH], axis=-1)[..., rank]
    return (beta * (config.max_length - config.min_length) + config.min_length).astype(np.int64)


def _between(draws: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Whole numbers in [low, high]."""
    return low + (draws * (high - low + 1)).astype(np.int64)


def _sorted_multisets(draws: np.ndarray, slack: np.ndarray) -> np.ndarray:
    """(n, A) ascending whole numbers in [0, slack], every multiset with the same probability.

    They are the A-subsets of slack + A numbers, less each one's rank; Floyd's algorithm draws a subset without rejection.
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


def _uniform(keys: np.ndarray, seed: int, epoch: int, num_draws: int) -> np.ndarray:
    """(n, num_draws) numbers in [0, 1) of 53 bits: hashes of (seed, epoch, key, place)."""
    stream = _mix(_mix(np.array([seed], dtype=np.int64).astype(np.uint64)) ^ np.uint64(epoch))
    place = np.arange(num_draws, dtype=np.uint64)
    hashed = _mix(_mix(keys.astype(np.int64).astype(np.uint64) ^ stream)[:, None] + place * _GOLDEN)
    return (hashed >> np.uint64(11)) * 2.0**-53


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's step: a bijection of 64-bit words whose outputs look independent (Steele et al. 2014)."""
    x = x + _GOLDEN  # wraps around, as it is meant to
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
