"""The losses of tokens and their derivatives, computed from the cross-entropy and the entropy of softmax(L/τ).

With p = softmax(L/τ), y the target and V the effective vocabulary:

    cross-entropy   log Σ exp(L/τ) − L_y/τ              ∂/∂L = (p − onehot(y))/τ      ∂/∂τ = (L_y − E_p[L])/τ²
    robust          τ·(cross-entropy + ρ − log V)       ∂/∂L = p − onehot(y)          ∂/∂τ = H(p) + ρ − log V
    proper          cross-entropy                       ∂/∂L = p − onehot(y)          ∂/∂τ = H(p) − cross-entropy

The proper score has the value of the cross-entropy, and the gradients of the robust loss with ρ = log V − cross-entropy.

Shapes: N tokens in a call, c of them in a chunk.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from tempnet.softmax.plan import LossPlan
from tempnet.softmax.reference import IGNORE_INDEX


class SoftmaxTerms(NamedTuple):
    """Terms of softmax(L/τ) that all losses are computed from, each (c,) in nats."""

    cross_entropy: Tensor
    """Cross-entropy; without meaning where the target is ignored."""
    entropy: Tensor
    """Entropy H(p)."""
    excess: Tensor
    """H(p) − cross-entropy = (L_y − E_p[L])/τ. For nearly flat logits it is a small difference of the other two, so it is
    computed from the logits."""


class ObjectiveTerms(NamedTuple):
    """Losses of tokens and the factors of their gradients, each (c,); all are 0 where the target is ignored."""

    losses: Tensor
    """Loss."""
    slopes: Tensor
    """∂loss/∂τ."""
    logits_scale: Tensor
    """Factor of p − onehot(y) in the gradient of the logits, including the weight of the row."""
    tau_grad: Tensor
    """Gradient of τ: the slope times the weight of the row."""


def evaluate_objective(
    plan: LossPlan,
    targets: Tensor,
    tau: Tensor,
    softmax: SoftmaxTerms,
    row_weights: Tensor | None,
) -> ObjectiveTerms:
    """Compute the loss of every token and its derivatives.

    Args:
        plan: plan of the call, which names the objective, ρ and V.
        targets: (c,) int64; IGNORE_INDEX marks tokens that are not counted.
        tau: (c,) temperatures.
        softmax: terms of softmax(L/τ) at these temperatures.
        row_weights: (c,) weights; gradients are those of Σ row_weights·loss. None stands for 1.
    """
    is_valid = targets != IGNORE_INDEX
    cross_entropy, entropy, excess = softmax
    scale = is_valid.to(plan.sum_dtype) if row_weights is None else row_weights.where(is_valid, 0.0)
    if plan.config.kind.objective == "robust":
        offset = plan.config.rho - math.log(plan.vocab_size)
        losses, slopes, logits_scale = tau * (cross_entropy + offset), entropy + offset, scale
    elif plan.config.kind.objective == "proper":
        losses, slopes, logits_scale = cross_entropy, excess, scale
    else:
        losses, slopes, logits_scale = cross_entropy, excess / tau, scale / tau
    slopes = slopes.where(is_valid, 0.0)
    return ObjectiveTerms(losses.where(is_valid, 0.0), slopes, logits_scale, slopes * scale)


class TokenResults(NamedTuple):
    """Results for every token, each (N,) in the dtype of sums and without an autograd graph."""

    losses: Tensor
    """Loss; 0 where the target is ignored."""
    tau: Tensor
    """Temperature."""
    slopes: Tensor
    """∂loss/∂τ; 0 where the target is ignored."""
    values: tuple[Tensor, ...]
    """The three fields of `tempnet.statistics.TokenValues`; empty without `LossPlan.with_values`."""

    @classmethod
    def allocate(cls, plan: LossPlan, hidden: Tensor) -> TokenResults:
        """Create results of N tokens, all 0, for chunks to write to."""
        zeros = [hidden.new_zeros(len(hidden), dtype=plan.sum_dtype) for _ in range(6 if plan.with_values else 3)]
        return cls(zeros[0], zeros[1], zeros[2], tuple(zeros[3:]))

    def write(
        self,
        part: slice,
        targets: Tensor,
        tau: Tensor,
        terms: ObjectiveTerms,
        at_tau: SoftmaxTerms,
        at_one: SoftmaxTerms | None,
    ) -> None:
        """Write the results of the tokens in `part`, whose targets, temperatures and terms are given, each (c,).

        `at_tau` and `at_one` are the terms of the softmax at the temperatures and at τ = 1; the latter is needed only
        with `LossPlan.with_values`.
        """
        self.losses[part], self.tau[part], self.slopes[part] = terms.losses, tau, terms.slopes
        if self.values:
            assert at_one is not None
            is_valid = targets != IGNORE_INDEX
            cross_entropy, cross_entropy_tau, entropy = self.values
            cross_entropy[part] = at_one.cross_entropy.where(is_valid, 0.0)
            cross_entropy_tau[part] = at_tau.cross_entropy.where(is_valid, 0.0)
            entropy[part] = at_one.entropy
