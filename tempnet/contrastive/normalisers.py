"""Normalise the loss of an anchor by its negatives in the batch, or by a moving average that is stored per sample.

From ℓ_i = log Σ_{j∈N(i)} exp(h_ij/τ_i), where h_ij = S_ij − S_ii and the anchor has n_i = |N(i)| negatives, the
functions compute the loss of every anchor:

    in batch   loss = log(1 + exp ℓ_i)                                         cross-entropy
    global     log g_i = ℓ_i − log n_i
               log u_i ← log((1−γ)·u_i + γ·g_i), on the first visit log g_i     in log space, as h/τ may reach thousands
               loss = τ_i·(log u_i + ρ)                                        the robust loss at the estimate u

For both, the gradients are

    ∂loss_i/∂S_ij = exp(h_ij/τ_i − c_i)
    ∂loss_i/∂τ_i  = e_i − Σ_j exp(h_ij/τ_i − c_i)·h_ij/τ_i

with

    in batch   c_i = loss_i + log τ_i        e_i = 0
    global     c_i = log(n_i·u_i)            e_i = log u_i + ρ                  u under stop-gradient

The sum of the weights exp(h_ij/τ_i − c_i) is W_i = exp(ℓ_i − c_i). At small τ both ℓ and c may be hundreds and nearly
equal, so the functions return log W_i and e_i − c_i·W_i, each computed without such a difference, instead of c_i and e_i.

An anchor without negatives has loss 0, W = 0 and e − c·W = 0. An id that occurs several times in a batch is updated
once, with the mean of g over its occurrences, and all of its occurrences use the same u.

Shapes: B pairs in the global batch. Values of both modalities are (2, B), where index 0 is the image and 1 the text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Normalised:
    """Losses of all anchors, and the quantities that the gradients need, each (2, B)."""

    losses: Tensor
    """Loss of every anchor."""
    log_weight: Tensor
    """log W, as defined in the docstring of this module."""
    tau_slope: Tensor
    """e − c·W, as defined in the docstring of this module."""
    log_u: Tensor | None = None
    """New estimates log u (the old ones for anchors without negatives); None for the in-batch normaliser."""


class Repeats:
    """Groups the entries of a batch that have the same id (B,), to average over them."""

    def __init__(self, ids: Tensor) -> None:
        unique, self.inverse = torch.unique(ids, return_inverse=True)
        self.num_unique = len(unique)

    def mean(self, values: Tensor, counts: Tensor) -> Tensor:
        """Replace each of the values (2, B) by the mean over those entries of its id that `counts` (B,) includes.

        The result is 0 for an id none of whose entries is included.
        """
        sums = self._sum_by_id(torch.where(counts, values, 0.0))
        return (sums / self._sum_by_id(counts.to(values.dtype).expand_as(values)).clamp(min=1.0))[:, self.inverse]

    def log_mean_exp(self, values: Tensor, counts: Tensor) -> Tensor:
        """Replace values by log(mean(exp(values))), as :meth:`mean` does by the mean; −inf where no entry is included."""
        index = self.inverse.expand_as(values)
        lowest = values.new_full((len(values), self.num_unique), -torch.inf)
        top = lowest.scatter_reduce(1, index, torch.where(counts, values, -torch.inf), "amax")[:, self.inverse]
        return top + self.mean((values - top).exp(), counts).log()

    def _sum_by_id(self, values: Tensor) -> Tensor:
        return values.new_zeros(len(values), self.num_unique).index_add_(1, self.inverse, values)


def in_batch(log_sums: Tensor, tau: Tensor, has_negatives: Tensor) -> Normalised:
    """Normalise in batch, from ℓ and τ, (2, B) each, and which anchors have a negative, (B,) bool."""
    losses = torch.logaddexp(log_sums, torch.zeros_like(log_sums))
    log_weight = torch.nn.functional.logsigmoid(log_sums) - tau.log()
    return _mask_normalised(has_negatives, losses, log_weight, -(losses + tau.log()) * log_weight.exp())


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
    """Normalise by the moving averages u, and update these.

    Args:
        log_sums, tau: (2, B) ℓ and τ.
        num_negatives: (B,) n.
        log_u: (2, B) log u before this batch, −inf for a sample on its first visit.
        repeats: the entries of the batch, grouped by id.
        gamma, rho: γ, in (0, 1], and ρ in nats.
    """
    has_negatives = num_negatives > 0
    log_num = num_negatives.clamp(min=1).to(log_sums.dtype).log()
    own_log_g = log_sums - log_num
    log_g = repeats.log_mean_exp(own_log_g, has_negatives)
    log_keep = math.log1p(-gamma) if gamma < 1.0 else -math.inf
    # log(u/g) of the new u
    log_ratio = torch.logaddexp(log_keep + (log_u - log_g), torch.full_like(log_g, math.log(gamma)))
    log_ratio = torch.where(torch.isneginf(log_u), 0.0, log_ratio)
    new, log_weight = log_g + log_ratio, (own_log_g - log_g) - log_ratio
    # log u + ρ − (log n + log u)·W
    slope = rho - log_num * log_weight.exp() - new * torch.expm1(log_weight)
    log_u = torch.where(has_negatives, new, log_u)
    return _mask_normalised(has_negatives, tau * (new + rho), log_weight, slope, log_u)


def _mask_normalised(
    has_negatives: Tensor, losses: Tensor, log_weight: Tensor, tau_slope: Tensor, log_u: Tensor | None = None
) -> Normalised:
    return Normalised(
        torch.where(has_negatives, losses, 0.0),
        torch.where(has_negatives, log_weight, -torch.inf),
        torch.where(has_negatives, tau_slope, 0.0),
        log_u,
    )
