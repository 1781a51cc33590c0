"""The features of a token that a temperature could be a function of, and the sums that standardise them.

Shapes: N tokens, K folds, p features, d hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tempnet.headroom.profile import NUM_NODES, Profiles

FEATURE_SETS = ("scalars", "hidden", "both")
NUM_SCALARS = 5
_PAIRS = tuple(itertools.combinations_with_replacement(range(NUM_SCALARS), 2))
_NUM_FIRST = 1 + NUM_SCALARS + len(_PAIRS)  # The constant, the scalars and their products.
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

    def raw_features(self) -> Tensor:
        """Return the scalars of the logits at τ = 1, and the hidden state: (N, 5 + d) in float64."""
        f, mean, second = self.profiles.values[:, NUM_NODES // 2].double().unbind(-1)
        log_variance = (second - mean).clamp(min=1e-6).log()
        scalars = torch.stack([f - mean, -f, self.margin.double(), log_variance, self.maximum.double()], dim=-1)
        return torch.cat([scalars, self.hidden.double()], dim=-1)


@dataclass(slots=True)
class Moments:
    """Sums from which features are standardised and the best constants are found: the first pass over the data."""

    num_folds: int
    count: int = 0
    sums: Tensor | None = None
    """Sums of the raw features and of their squares: (2, 5 + d)."""
    totals: list[Profiles] = field(default_factory=list)
    """Summed profile of each fold."""

    def add(self, tokens: Tokens, folds: Tensor) -> None:
        """Add tokens, whose folds (N,) are given."""
        raw = tokens.raw_features()
        sums = torch.stack([raw.sum(0), raw.square().sum(0)])
        self.count += len(raw)
        self.sums = sums if self.sums is None else self.sums + sums
        parts = [
            Profiles(tokens.profiles.values[folds == fold], tokens.profiles.target[folds == fold]).sum()
            for fold in range(self.num_folds)
        ]
        self.totals = [add_profiles([a, b]) for a, b in zip(self.totals, parts, strict=True)] if self.totals else parts

    def constants(self) -> tuple[float, list[float]]:
        """Return the best u = log β of all tokens, and for each fold that of the other folds."""
        others = [
            add_profiles([total for other, total in enumerate(self.totals) if other != fold])
            for fold in range(self.num_folds)
        ]
        return add_profiles(self.totals).best_constant(), [total.best_constant() for total in others]

    def design(self) -> Design:
        """Return the map from tokens to standardised features."""
        assert self.sums is not None
        mean = self.sums[0] / self.count
        deviation = (self.sums[1] / self.count - mean.square()).clamp(min=0.0).sqrt()
        return Design(mean, deviation.where(deviation > 1e-9 * (1.0 + mean.abs()), torch.inf))


def add_profiles(parts: Sequence[Profiles]) -> Profiles:
    """Return the sum of summed profiles."""
    return Profiles(
        torch.stack([part.values for part in parts]).sum(0), torch.stack([part.target for part in parts]).sum(0)
    )


@dataclass(frozen=True, slots=True)
class Design:
    """Map from tokens to features (N, p): a constant, the scalars, their products, and the hidden state, standardised."""

    mean: Tensor
    deviation: Tensor

    def features(self, tokens: Tokens) -> Tensor:
        """Return the features (N, p) in float64."""
        raw = ((tokens.raw_features() - self.mean) / self.deviation).clamp(-_MAX_DEVIATION, _MAX_DEVIATION)
        scalars = raw[:, :NUM_SCALARS]
        first, second = (scalars[:, [pair[side] for pair in _PAIRS]] for side in range(2))
        return torch.cat([torch.ones_like(raw[:, :1]), scalars, first * second, raw[:, NUM_SCALARS:]], dim=-1)

    def columns(self, name: str) -> Tensor:
        """Return the indices of the features that belong to a feature set; the constant, 0, is always among them."""
        num_all = _NUM_FIRST + len(self.mean) - NUM_SCALARS
        if name == "scalars":
            return torch.arange(_NUM_FIRST)
        hidden = torch.arange(_NUM_FIRST, num_all)
        return torch.cat([torch.zeros(1, dtype=torch.long), hidden]) if name == "hidden" else torch.arange(num_all)
