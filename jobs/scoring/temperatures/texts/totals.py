"""Totals of τ that can be added over parts (counts, sums and a fine histogram), and the figures computed from them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from tempnet.statistics import histogram_quantile

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
NUM_BINS = 10_000


def quantile_name(share: float) -> str:
    """Returns the name of a quantile's column, such as tau_q05."""
    return f"tau_q{round(100 * share):02d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over the tokens of a group of documents."""

    num_documents: int
    num_tokens: int
    tau: float
    tau_squared: float
    entropy: float | None
    """Sum of the entropies, in nats; None if they were not predicted."""
    bins: dict[int, int]
    """Bin of τ → number of tokens, for NUM_BINS equal bins over the range of τ; empty bins are left out."""

    @classmethod
    def of(
        cls, tau: np.ndarray, entropy: np.ndarray | None, *, num_documents: int, tau_range: tuple[float, float]
    ) -> Totals:
        """Returns the totals of temperatures (N,) and entropies (N,)."""
        low, high = tau_range
        places = np.clip((tau.astype(np.float64) - low) / (high - low) * NUM_BINS, 0, NUM_BINS - 1).astype(np.int64)
        bins, counts = np.unique(places, return_counts=True)
        return cls(
            num_documents=num_documents,
            num_tokens=len(tau),
            tau=float(tau.sum(dtype=np.float64)),
            tau_squared=float(np.square(tau, dtype=np.float64).sum()),
            entropy=None if entropy is None else float(entropy.sum(dtype=np.float64)),
            bins=dict(zip(bins.tolist(), counts.tolist(), strict=True)),
        )

    @classmethod
    def sum(cls, parts: list[Totals]) -> Totals:
        """Returns the sum of the totals of at least one part."""
        bins: dict[int, int] = {}
        for part in parts:
            for place, count in part.bins.items():
                bins[place] = bins.get(place, 0) + count
        entropies = [part.entropy for part in parts]
        return cls(
            num_documents=sum(part.num_documents for part in parts),
            num_tokens=sum(part.num_tokens for part in parts),
            tau=math.fsum(part.tau for part in parts),
            tau_squared=math.fsum(part.tau_squared for part in parts),
            entropy=None if None in entropies else math.fsum(value for value in entropies if value is not None),
            bins=dict(sorted(bins.items())),
        )

    def figures(self, tau_range: tuple[float, float]) -> dict[str, Any]:
        """Returns mean, standard deviation and quantiles of τ, and the mean entropy; without tokens they are None.

        Quantiles are exact to within one bin, which is the range of τ / NUM_BINS.
        """
        count = self.num_tokens
        mean = self.tau / count if count else None
        histogram = torch.zeros(NUM_BINS, dtype=torch.float64)
        histogram[list(self.bins)] = torch.tensor(list(self.bins.values()), dtype=torch.float64)
        return {
            "tau_mean": mean,
            "tau_std": math.sqrt(max(self.tau_squared / count - mean**2, 0.0)) if mean is not None else None,
            **{
                quantile_name(share): histogram_quantile(histogram, share, *tau_range) if count else None
                for share in QUANTILES
            },
            "entropy_mean": self.entropy / count if count and self.entropy is not None else None,
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the totals as JSON values, the inverse of `from_json`."""
        return asdict(self) | {"bins": [list(item) for item in self.bins.items()]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Totals:
        """Returns the totals that `to_json` has converted."""
        return cls(**{**values, "bins": dict(values["bins"])})
