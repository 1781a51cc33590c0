"""What an anchor's negatives are measured against: the batch itself, or a moving average kept per sample.

From ℓ_i = log Σ_{j∈N(i)} exp(h_ij/τ_i), h_ij = S_ij − S_ii, n_i = |N(i)|, every anchor gets a loss and the gradients' data:

    in batch   loss = log(1 + exp ℓ_i)                                         cross-entropy
    global     log g_i = ℓ_i − log n_i
               log u_i ← log((1−γ)·u_i + γ·g_i), on the first visit log g_i     in log space: h/τ may reach thousands
               loss = τ_i·(log u_i + ρ)                                        the robust loss at the estimate u

In both, ∂loss_i/∂S_ij = exp(h_ij/τ_i − c_i) and ∂loss_i/∂τ_i = e_i − Σ_j exp(h_ij/τ_i − c_i)·h_ij/τ_i, with

    in batch   c_i = loss_i + log τ_i        e_i = 0
    global     c_i = log(n_i·u_i)            e_i = log u_i + ρ                  u under stop-gradient

An anchor without negatives has loss 0, c = +inf, e = 0. An id that occurs several times in a batch is updated once, with the
mean of its occurrences' g, and all of them use the same u.

Shapes: B global batch; the two modalities come first, (2, B).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Normalised:
    """Each (2, B)."""

    losses: Tensor
    log_scale: Tensor
    """c."""
    tau_slope: Tensor
    """e."""
    log_u: Tensor | None = None
    """The new estimate; the old one of anchors without negatives. None in batch."""


class Repeats:
    """Which entries of a batch are occurrences of the same id.

    Args:
        ids: (B,).
    """

    def __init__(self, ids: Tensor) -> None:
        unique, self.inverse = torch.unique(ids, return_inverse=True)
        self.num_unique = len(unique)

    def mean(self, values: Tensor, counts: Tensor) -> Tensor:
        """(2, B) → (2, B): of each id the mean over its occurrences that count, (B,) bool; 0 where none does."""
        sums = self._sums(torch.where(counts, values, 0.0))
        return (sums / self._sums(counts.to(values.dtype).expand_as(values)).clamp(min=1.0))[:, self.inverse]

    def log_mean_exp(self, values: Tensor, counts: Tensor) -> Tensor:
        """Likewise in log space; values that count are finite."""
        index = self.inverse.expand_as(values)
        lowest = values.new_full((len(values), self.num_unique), -torch.inf)
        top = lowest.scatter_reduce(1, index, torch.where(counts, values, -torch.inf), "amax")[:, self.inverse]
        return top + self.mean((values - top).exp(), counts).log()

    def _sums(self, values: Tensor) -> Tensor:
        return values.new_zeros(len(values), self.num_unique).index_add_(1, self.inverse, values)


def in_batch(log_sums: Tensor, tau: Tensor, has_negatives: Tensor) -> Normalised:
    """From ℓ and τ, (2, B), and which anchors have a negative, (B,) bool."""
    losses = torch.logaddexp(log_sums, torch.zeros_like(log_sums))
    return _only(has_negatives, losses, losses + tau.log(), torch.zeros_like(losses))


def moving_average(
    log_sums: Tensor,
    tau: Tensor,
    num_negatives: Tensor,
    log_u: Tensor,
    repeats: Repeats,
    *,
    gamma: float,
    rho: float,
) -> Normalised:
    """From ℓ and τ, (2, B), n (B,), and the log u before this batch, (2, B) with −inf for a first visit."""
    has_negatives = num_negatives > 0
    log_num = num_negatives.clamp(min=1).to(log_sums.dtype).log()
    log_g = repeats.log_mean_exp(log_sums - log_num, has_negatives)
    log_keep = math.log1p(-gamma) if gamma < 1.0 else -math.inf
    averaged = torch.logaddexp(log_keep + log_u, math.log(gamma) + log_g)
    new = torch.where(torch.isneginf(log_u), log_g, averaged)
    slope = new + rho
    return _only(has_negatives, tau * slope, log_num + new, slope, torch.where(has_negatives, new, log_u))


def _only(
    has_negatives: Tensor, losses: Tensor, log_scale: Tensor, tau_slope: Tensor, log_u: Tensor | None = None
) -> Normalised:
    return Normalised(
        torch.where(has_negatives, losses, 0.0),
        torch.where(has_negatives, log_scale, torch.inf),
        torch.where(has_negatives, tau_slope, 0.0),
        log_u,
    )
