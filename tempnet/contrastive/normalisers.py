"""Normalise the loss of an anchor by its negatives in the batch, or by a moving average that is stored or predicted.

From ℓ_i = log Σ_{j∈N(i)} exp(h_ij/τ_i), where h_ij = S_ij − S_ii and the anchor has n_i = |N(i)| negatives, the
functions compute the loss of every anchor:

    in batch   loss = log(1 + exp ℓ_i)                                         cross-entropy
    global     log g_i = ℓ_i − log n_i
               log u_i ← log((1−γ)·u_i + γ·g_i), on the first visit log g_i     in log space, as h/τ may reach thousands
               loss = τ_i·(log u_i + ρ)                                        the robust loss at the estimate u
    unscaled   loss = log u_i                                                  FastCLIP v0 (arXiv 2407.01445)
    predicted  u_i ← (1−γ)·exp α_i + γ·g_i, with α_i from a network            nothing is stored per sample
               loss = τ_i·(g_i/u_i + log u_i − 1 + ρ)                          an upper bound of τ_i·(log g_i + ρ)

The bound is log g = min_u g/u + log u − 1. With γ = 0 it is the objective of NeuCLIP (arXiv 2511.08417),
τ·(exp(−α)·g + α − 1 + ρ), which the network minimises in α by τ·(1 − exp(log g − α)); this gradient is clipped to ±5τ, and
does not depend on γ.

The gradients in similarities and temperatures are

    ∂loss_i/∂S_ij = exp(h_ij/τ_i − c_i)
    ∂loss_i/∂τ_i  = e_i − Σ_j exp(h_ij/τ_i − c_i)·h_ij/τ_i

with

    in batch   c_i = loss_i + log τ_i        e_i = 0
    global     c_i = log(n_i·u_i)            e_i = log u_i + ρ                  u under stop-gradient
    unscaled   c_i = log(n_i·u_i) + log τ_i  e_i = 0
    predicted  c_i = log(n_i·u_i)            e_i = g_i/u_i + log u_i − 1 + ρ

The sum of the weights exp(h_ij/τ_i − c_i) is W_i = exp(ℓ_i − c_i). At small τ both ℓ and c may be hundreds and nearly
equal, so the functions return log W_i and e_i − c_i·W_i, each computed without such a difference, instead of c_i and e_i.

An anchor without negatives has loss 0, W = 0 and e − c·W = 0. An id that occurs several times in a batch is updated
once, with the mean of g over its occurrences, and all of its occurrences use the same u.

Shapes: B pairs in the global batch. Values of both modalities are (2, B), where index 0 is the image and 1 the text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tempnet.contrastive.config import ContrastiveLossConfig

LARGEST_GRADIENT = 5.0
"""Bound of gradients in a temperature of a sample, and (in units of τ) in a predicted log-normaliser."""


class NormaliserNet(nn.Module):
    """Network that predicts log mean_j exp(⟨x, y_j⟩/τ) over all contrasts y_j of an anchor x, from x and τ alone.

    It is log mean_k exp(⟨x, q_k⟩/τ) + b with m learned prototypes q_k ∈ R^d, which stand for the contrasts, and begin as some
    of them; it is convex in the q_k. NeuCLIP (arXiv 2511.08417) is the source of the idea and of the objective
    (`moving_average`); this form of a network is ours. There are m·d + 1 parameters.
    """

    def __init__(self, size: int, num_prototypes: int = 256) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(F.normalize(torch.randn(num_prototypes, size), dim=-1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, embeddings: Tensor, tau: Tensor) -> Tensor:
        """Return the log-normalisers (n,) of unit vectors (n, d) at temperatures (n,); no gradient reaches either."""
        scores = embeddings.detach() @ self.prototypes.T / tau.detach()[:, None]
        return scores.logsumexp(-1) - math.log(len(self.prototypes)) + self.bias

    @classmethod
    def for_loss(cls, config: ContrastiveLossConfig, size: int, num_prototypes: int = 256) -> NormaliserNet | None:
        """Return a new network for embeddings of this size, or None for a loss whose normaliser is not predicted."""
        return cls(size, num_prototypes) if config.kind.normaliser == "predicted" else None

    @torch.no_grad()
    def init_prototypes(self, contrasts: Tensor) -> None:
        """Set the prototypes to the first m of these embeddings (m or more, d) of the other modality."""
        self.prototypes.copy_(contrasts[: len(self.prototypes)])


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
    prediction_slope: Tensor | None = None
    """Gradient in the predicted log-normaliser α; None if none is predicted."""


class Repeats:
    """Groups the entries of a batch that have the same id (B,), to average over them."""

    def __init__(self, ids: Tensor) -> None:
        # The number of the group is the place of its first entry in order. `torch.unique` would make the host wait for a GPU.
        self.inverse, self.num_groups = torch.searchsorted(ids.sort().values, ids), len(ids)

    def mean(self, values: Tensor, counts: Tensor) -> Tensor:
        """Replace each of the values (2, B) by the mean over those entries of its id that `counts` (B,) includes.

        The result is 0 for an id none of whose entries is included.
        """
        sums = self._sum_by_id(torch.where(counts, values, 0.0))
        return (sums / self._sum_by_id(counts.to(values.dtype).expand_as(values)).clamp(min=1.0))[:, self.inverse]

    def log_mean_exp(self, values: Tensor, counts: Tensor) -> Tensor:
        """Replace values by log(mean(exp(values))), as :meth:`mean` does by the mean; −inf where no entry is included."""
        index = self.inverse.expand_as(values)
        lowest = values.new_full((len(values), self.num_groups), -torch.inf)
        top = lowest.scatter_reduce(1, index, torch.where(counts, values, -torch.inf), "amax")[:, self.inverse]
        return top + self.mean((values - top).exp(), counts).log()

    def _sum_by_id(self, values: Tensor) -> Tensor:
        return values.new_zeros(len(values), self.num_groups).index_add_(1, self.inverse, values)


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
    form: Literal["global", "unscaled", "predicted"] = "global",
) -> Normalised:
    """Normalise by the moving averages u, and update these.

    Args:
        log_sums, tau: (2, B) ℓ and τ.
        num_negatives: (B,) n.
        log_u: (2, B) log u before this batch, −inf for a sample on its first visit; or the predicted α.
        repeats: the entries of the batch, grouped by id.
        gamma, rho: γ, in (0, 1] (with a prediction [0, 1]), and ρ in nats.
        form: which loss, as defined in the docstring of this module.
    """
    has_negatives = num_negatives > 0
    log_num = num_negatives.clamp(min=1).to(log_sums.dtype).log()
    own_log_g = log_sums - log_num
    log_g = repeats.log_mean_exp(own_log_g, has_negatives)
    log_keep, log_gamma = (math.log(weight) if weight > 0.0 else -math.inf for weight in (1.0 - gamma, gamma))
    # log(u/g) of the new u
    log_ratio = torch.logaddexp(log_keep + (log_u - log_g), torch.full_like(log_g, log_gamma))
    log_ratio = torch.where(torch.isneginf(log_u), 0.0, log_ratio)
    new, log_weight = log_g + log_ratio, (own_log_g - log_g) - log_ratio
    updated = torch.where(has_negatives, new, log_u)
    if form == "unscaled":
        log_weight = log_weight - tau.log()
        slope = -(log_num + new + tau.log()) * log_weight.exp()
        return _mask_normalised(has_negatives, new, log_weight, slope, updated)
    # e − (log n + log u)·W with e = log u + ρ, or log u + ρ + W − 1 for a prediction
    excess = torch.expm1(log_weight)
    is_predicted = form == "predicted"
    slope = rho - log_num * log_weight.exp() - (new - 1.0 if is_predicted else new) * excess
    losses = tau * (new + rho + excess if is_predicted else new + rho)
    normalised = _mask_normalised(has_negatives, losses, log_weight, slope, updated)
    if not is_predicted:
        return normalised
    prediction_slope = -tau * torch.expm1(own_log_g - log_u).clamp(max=LARGEST_GRADIENT)
    return replace(normalised, prediction_slope=torch.where(has_negatives, prediction_slope, 0.0))


def _mask_normalised(
    has_negatives: Tensor, losses: Tensor, log_weight: Tensor, tau_slope: Tensor, log_u: Tensor | None = None
) -> Normalised:
    return Normalised(
        torch.where(has_negatives, losses, 0.0),
        torch.where(has_negatives, log_weight, -torch.inf),
        torch.where(has_negatives, tau_slope, 0.0),
        log_u,
    )
