"""The features of a token that a temperature could be a function of, and the sums that standardise them.

Shapes: N tokens, K folds, p features, d hidden size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tempnet.headroom.profile import Profiles

FEATURE_SETS = ("scalars", "hidden", "both")
NUM_SCALARS = 5
_PAIRS = tuple(itertools.combinations_with_replacement(range(NUM_SCALARS), 2))
_NUM_FIRST = 1 + NUM_SCALARS + len(_PAIRS)  # The constant, the scalars and their products.
# Number of random features of the hidden state. With them the regression finds what a TempNet of one hidden layer does,
# within the intervals (benchmarks/promise.py); without them, half of it.
_NUM_RANDOM = 512
# A standardised feature is clipped to this many standard deviations, so that one odd token cannot decide a coefficient.
_MAX_DEVIATION = 3.0


class Tokens(NamedTuple):
    """What is known of N tokens of held-out text, or of N other predictions: images that look for their captions."""

    profiles: Profiles
    margin: Tensor
    """Largest minus second largest logit: (N,)."""
    maximum: Tensor
    """Largest logit: (N,)."""
    hidden: Tensor
    """Hidden states, or embeddings of what looks for its candidate: (N, d)."""

    @classmethod
    def of_logits(cls, logits: Tensor, targets: Tensor, hidden: Tensor) -> Tokens:
        """Return what is known of tokens with logits (N, V), targets (N,) and hidden states (N, d), on the CPU."""
        profiles = Profiles.of_logits(logits, targets)
        top = logits.topk(2, dim=-1).values
        return cls(
            Profiles(profiles.values.cpu(), profiles.target.cpu()),
            (top[:, 0] - top[:, 1]).cpu(),
            top[:, 0].cpu(),
            hidden.float().cpu(),
        )

    @classmethod
    def join(cls, parts: Sequence[Tokens], order: Tensor) -> Tokens:
        """Return the tokens of all parts, one after another, and of these the ones at the places `order` (N,)."""

        def joined(tensors: Iterable[Tensor]) -> Tensor:
            return torch.cat(list(tensors))[order]

        return cls(
            Profiles(joined(part.profiles.values for part in parts), joined(part.profiles.target for part in parts)),
            joined(part.margin for part in parts),
            joined(part.maximum for part in parts),
            joined(part.hidden for part in parts),
        )

    def raw_features(self, log_beta: float) -> Tensor:
        """Return the scalars of the logits at u = `log_beta`, and the hidden state: (N, 5 + d) in float64."""
        f, mean, second = (value.double() for value in self.profiles.partition(log_beta))
        log_variance = (second - mean).clamp(min=1e-6).log()
        scalars = torch.stack([f - mean, -f, self.margin.double(), log_variance, self.maximum.double()], dim=-1)
        return torch.cat([scalars, self.hidden.double()], dim=-1)


@dataclass(slots=True)
class Moments:
    """Sums from which features are standardised, at u = log β of the best constant: the second pass over the data."""

    log_beta: float
    count: int = 0
    sums: Tensor | None = None
    """Sums of the raw features and of their squares: (2, 5 + d)."""

    def add(self, tokens: Tokens) -> None:
        """Add tokens."""
        raw = tokens.raw_features(self.log_beta)
        sums = torch.stack([raw.sum(0), raw.square().sum(0)])
        self.count += len(raw)
        self.sums = sums if self.sums is None else self.sums + sums

    def design(self) -> Design:
        """Return the map from tokens to standardised features."""
        assert self.sums is not None
        mean = self.sums[0] / self.count
        deviation = (self.sums[1] / self.count - mean.square()).clamp(min=0.0).sqrt()
        return Design(self.log_beta, mean, deviation.where(deviation > 1e-9 * (1.0 + mean.abs()), torch.inf))


def best_constant(batches: Iterable[Tokens]) -> float:
    """Return the u = log β at which the cross-entropy of all tokens is smallest: the first pass over the data."""
    parts = [tokens.profiles.sum() for tokens in batches]
    return Profiles(
        torch.cat([part.values for part in parts]), torch.cat([part.target for part in parts])
    ).best_constant()


@dataclass(frozen=True, slots=True)
class Design:
    """Map from tokens to features (N, p): a constant, the scalars, their products, and the hidden state, all standardised.

    To the standardised hidden state h come `_NUM_RANDOM` random features relu(h·w/√d + b), w and b standard normal, so that a
    linear regression can follow what a network of one hidden layer would (Rahimi and Recht, 2008, "Weighted Sums of Random
    Kitchen Sinks").
    """

    log_beta: float
    mean: Tensor
    deviation: Tensor

    def features(self, tokens: Tokens) -> Tensor:
        """Return the features (N, p) in float64."""
        raw = ((tokens.raw_features(self.log_beta) - self.mean) / self.deviation).clamp(-_MAX_DEVIATION, _MAX_DEVIATION)
        scalars = raw[:, :NUM_SCALARS]
        first, second = (scalars[:, [pair[side] for pair in _PAIRS]] for side in range(2))
        hidden = raw[:, NUM_SCALARS:]
        weight, bias = _random_layer(hidden.shape[-1])
        random = torch.relu(hidden @ weight + bias)
        return torch.cat([torch.ones_like(raw[:, :1]), scalars, first * second, hidden, random], dim=-1)

    def columns(self, name: str) -> Tensor:
        """Return the indices of the features that belong to a feature set; the constant, 0, is always among them."""
        num_all = _NUM_FIRST + len(self.mean) - NUM_SCALARS + _NUM_RANDOM
        if name == "scalars":
            return torch.arange(_NUM_FIRST)
        hidden = torch.arange(_NUM_FIRST, num_all)
        return torch.cat([torch.zeros(1, dtype=torch.long), hidden]) if name == "hidden" else torch.arange(num_all)


@functools.lru_cache(maxsize=1)
def _random_layer(size: int) -> tuple[Tensor, Tensor]:
    """Return the weight (d, m) and bias (m,) of the random features of hidden states of a size d."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size, _NUM_RANDOM, generator=generator, dtype=torch.float64) / size**0.5
    return weight, torch.randn(_NUM_RANDOM, generator=generator, dtype=torch.float64)
