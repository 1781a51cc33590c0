"""Statistics of token temperatures for logging: sums that are additive over micro-batches and ranks, and summaries.

The sums form one flat float64 vector, so that the statistics of a whole step need only a single all-reduce.

Shapes: N tokens, V effective vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tempnet.dro import robust_loss
from tempnet.oracle import Oracle, optimal_temperature
from tempnet.softmax.reference import IGNORE_INDEX

NUM_HISTOGRAM_BINS = 200
QUANTILES = (0.05, 0.5, 0.95)
# A temperature counts as "at the bound" if its distance from the bound is at most this fraction of the range.
BOUND_SHARE = 0.01

_SCALARS = (
    "num_tokens",
    "cross_entropy",  # The cross-entropy at τ = 1.
    "cross_entropy_tau",
    "entropy",  # The entropy at τ = 1.
    "robust_loss",
    "tau",
    "tau_squared",
    "num_at_lower_bound",
    "num_at_upper_bound",
    "rank_correlation",  # The rank correlation within each micro-batch, multiplied by its number of tokens.
    "num_oracle_tokens",
    "regret",
    "tau_oracle",
)


@dataclass(slots=True, eq=False)
class TemperatureStatistics:
    """Sums over tokens. `sums` may be added to that of another object, or all-reduced in place."""

    sums: Tensor
    """Scalars in the order of _SCALARS, followed by the histogram of τ over [τ₀, τ_max], in one float64 vector."""
    tau_min: float
    tau_max: float

    @classmethod
    def zeros(cls, tau_min: float, tau_max: float, device: torch.device | str = "cpu") -> TemperatureStatistics:
        """Return statistics of no tokens."""
        size = len(_SCALARS) + NUM_HISTOGRAM_BINS
        return cls(torch.zeros(size, dtype=torch.float64, device=device), tau_min, tau_max)

    @property
    def histogram(self) -> Tensor:
        """Histogram of τ: counts in NUM_HISTOGRAM_BINS equal bins over [τ₀, τ_max]."""
        return self.sums[len(_SCALARS) :]

    def summary(self) -> dict[str, float]:
        """Return means, standard deviation, quantiles and shares by name; a value is NaN if it has no tokens."""
        raw = dict(zip(_SCALARS, self.sums.tolist(), strict=False))
        count, num_oracle = raw["num_tokens"] or math.nan, raw["num_oracle_tokens"] or math.nan
        return {
            "cross_entropy": raw["cross_entropy"] / count,
            "cross_entropy_tau": raw["cross_entropy_tau"] / count,
            "entropy": raw["entropy"] / count,
            "robust_loss": raw["robust_loss"] / count,
            **summarise_tau(raw, count, self.histogram, self.tau_min, self.tau_max),
            "tau_entropy_spearman": raw["rank_correlation"] / count,
            "regret": raw["regret"] / num_oracle,
            "tau_oracle_mean": raw["tau_oracle"] / num_oracle,
        }


class TokenValues(NamedTuple):
    """Values per token (N,) that the statistics are computed from; they are by-products of computing the loss."""

    cross_entropy: Tensor
    """Cross-entropy at τ = 1, in nats; 0 where the target is ignored."""
    cross_entropy_tau: Tensor
    """Cross-entropy at the token's τ, in nats; 0 where the target is ignored."""
    entropy: Tensor
    """Entropy of the prediction at τ = 1, in nats."""

    @classmethod
    @torch.no_grad()
    def from_logits(cls, logits: Tensor, targets: Tensor, tau: Tensor) -> TokenValues:
        """Compute the values from logits (N, V), targets (N,) and τ (N,)."""
        logits, tau = logits.detach().float(), tau.detach().float()
        log_probs = F.log_softmax(logits, dim=-1)
        return cls(
            cross_entropy=F.nll_loss(log_probs, targets, ignore_index=IGNORE_INDEX, reduction="none"),
            cross_entropy_tau=F.cross_entropy(
                logits / tau.unsqueeze(-1), targets, ignore_index=IGNORE_INDEX, reduction="none"
            ),
            entropy=-(log_probs.exp() * log_probs).sum(-1),
        )


@torch.no_grad()
def token_statistics(
    values: TokenValues,
    targets: Tensor,
    tau: Tensor,
    *,
    vocab_size: int,
    rho: float,
    tau_min: float,
    tau_max: float,
    oracle_rows: Tensor | None = None,
    oracle_logits: Tensor | None = None,
    oracle: Oracle = optimal_temperature,
) -> TemperatureStatistics:
    """Compute the statistics of a micro-batch of N tokens, without those whose target is ignored.

    Args:
        values: (N,) each, cross-entropies and entropies of the tokens.
        targets: (N,) int64, IGNORE_INDEX for tokens that are not counted.
        tau: (N,) temperatures of the tokens.
        vocab_size, rho: V, and ρ of the robust loss in nats.
        tau_min, tau_max: range of the histogram and of the oracle.
        oracle_rows: (N,) bool, n valid tokens for which the optimal temperature τ* and the regret f(z, τ) − f(z, τ*) are
            computed too, from their logits, `oracle_logits` (n, V), by `oracle`; None: none.
    """
    statistics = TemperatureStatistics.zeros(tau_min, tau_max, tau.device)
    is_valid = targets != IGNORE_INDEX
    of_oracle = torch.zeros_like(is_valid) if oracle_rows is None else oracle_rows
    oracle_targets, tau_learned = targets[of_oracle], tau[of_oracle].float()
    targets, tau = targets[is_valid], tau[is_valid].float()
    if targets.numel() == 0:
        return statistics
    cross_entropy, cross_entropy_tau, entropy = (value[is_valid] for value in values)
    robust = tau * (cross_entropy_tau - math.log(vocab_size) + rho)
    regret = tau_oracle = tau.new_zeros(0)
    if oracle_logits is not None:
        tau_oracle = oracle(oracle_logits, rho, tau_min, tau_max)
        least, own = (robust_loss(oracle_logits, oracle_targets, value, rho) for value in (tau_oracle, tau_learned))
        regret = own - least
    sums = sum_tau(tau, tau_min, tau_max) | {
        "num_tokens": torch.tensor(targets.numel()),
        "cross_entropy": cross_entropy.double().sum(),
        "cross_entropy_tau": cross_entropy_tau.double().sum(),
        "entropy": entropy.double().sum(),
        "robust_loss": robust.double().sum(),
        "rank_correlation": spearman(tau, entropy) * targets.numel(),
        "num_oracle_tokens": torch.tensor(regret.numel()),
        "regret": regret.double().sum(),
        "tau_oracle": tau_oracle.double().sum(),
    }
    statistics.sums[: len(_SCALARS)] = torch.stack([sums[name].double().to(tau.device) for name in _SCALARS])
    statistics.histogram.copy_(histogram_of(tau, tau_min, tau_max))
    return statistics


def sum_tau(tau: Tensor, tau_min: float, tau_max: float) -> dict[str, Tensor]:
    """Return the sums of τ (of any shape) that :func:`summarise_tau` reads, by name."""
    margin = BOUND_SHARE * (tau_max - tau_min)
    return {
        "tau": tau.double().sum(),
        "tau_squared": tau.double().square().sum(),
        "num_at_lower_bound": (tau <= tau_min + margin).sum(),
        "num_at_upper_bound": (tau >= tau_max - margin).sum(),
    }


def summarise_tau(
    sums: Mapping[str, float], count: float, histogram: Tensor, tau_min: float, tau_max: float
) -> dict[str, float]:
    """Return mean, standard deviation, quantiles and shares at the bounds of `count` temperatures, by name."""
    mean = sums["tau"] / count
    return {
        "tau_mean": mean,
        "tau_std": standard_deviation(sums["tau_squared"] / count, mean),
        **{f"tau_q{round(100 * s):02d}": histogram_quantile(histogram, s, tau_min, tau_max) for s in QUANTILES},
        "tau_share_lower_bound": sums["num_at_lower_bound"] / count,
        "tau_share_upper_bound": sums["num_at_upper_bound"] / count,
    }


def standard_deviation(mean_square: float, mean: float) -> float:
    """Return the standard deviation of numbers with these means; NaN where there are none."""
    return math.sqrt(max(mean_square - mean**2, 0.0)) if mean == mean else math.nan


def histogram_of(tau: Tensor, tau_min: float, tau_max: float) -> Tensor:
    """Count τ (of any shape) in NUM_HISTOGRAM_BINS equal bins over [τ₀, τ_max]; the outer ones hold what is beyond."""
    bins = ((tau - tau_min) / (tau_max - tau_min) * NUM_HISTOGRAM_BINS).long().clamp(0, NUM_HISTOGRAM_BINS - 1)
    return torch.bincount(bins.flatten(), minlength=NUM_HISTOGRAM_BINS)


def histogram_quantile(histogram: Tensor, share: float, tau_min: float, tau_max: float) -> float:
    """Return the τ below which a share of a histogram's counts lies, interpolated within the bin; NaN if it is empty."""
    cumulative = histogram.cumsum(0)
    if cumulative[-1] == 0:
        return math.nan
    rank = share * cumulative[-1]
    index = int(torch.searchsorted(cumulative, rank).clamp(max=len(histogram) - 1))
    within = (rank - (cumulative[index] - histogram[index])) / histogram[index].clamp(min=1)
    width = (tau_max - tau_min) / len(histogram)
    return tau_min + width * (index + float(within.clamp(0, 1)))


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Return Spearman's rank correlation of two samples (N,), with mean ranks for ties; it is 0 if one is constant."""
    ranks = torch.stack([_mean_ranks(x), _mean_ranks(y)])
    ranks -= ranks.mean(-1, keepdim=True)
    norms = ranks.norm(dim=-1)
    return (ranks[0] @ ranks[1]) / (norms[0] * norms[1]) if bool((norms > 0).all()) else ranks.new_zeros(())


def _mean_ranks(x: Tensor) -> Tensor:
    """Return ranks 0 … N−1 in float64; equal values have the mean of their ranks."""
    _, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() + 1) / 2)[inverse]
