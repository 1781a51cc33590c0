"""Temperatures that are not a network's: one learned scalar, and one per sample with momentum steps.

Shapes: B global batch; the two modalities come first, (2, B).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tempnet.contrastive.config import ContrastiveLossConfig

_LARGEST_GRADIENT = 5.0


class LearnedTemperature(nn.Module):
    """One τ in [τ_min, τ_max], learned as its logarithm.

    A parameter that an optimizer has pushed out of the range counts as the bound, and only the gradient that leads further
    out is withheld: a plain clamp would hold it there for good.
    """

    def __init__(self, config: ContrastiveLossConfig) -> None:
        super().__init__()
        # A vector of one: DeepSpeed cannot broadcast parameters without a dimension.
        self.log_tau = nn.Parameter(torch.full((1,), math.log(config.tau)))
        self.bounds = math.log(config.tau_min), math.log(config.tau_max)

    def forward(self) -> Tensor:
        """τ, (1,)."""
        return _ClampReturning.apply(self.log_tau, *self.bounds).exp()


class _ClampReturning(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bounds = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,), (low, high) = ctx.saved_tensors, ctx.bounds
        leads_out = ((x <= low) & (grad > 0)) | ((x >= high) & (grad < 0))  # descent goes against the gradient
        return torch.where(leads_out, 0.0, grad), None, None


def momentum_step(
    tau: Tensor, momentum: Tensor, gradient: Tensor, config: ContrastiveLossConfig
) -> tuple[Tensor, Tensor]:
    """isogclr's step: m ← (1−β)m + β·clip(G, ±5), τ ← Π[τ − η·m]; all (2, B). Returns τ and m."""
    beta = config.tau_momentum
    clipped = gradient.clamp(-_LARGEST_GRADIENT, _LARGEST_GRADIENT)
    momentum = (1.0 - beta) * momentum + beta * clipped
    return (tau - config.tau_step * momentum).clamp(config.tau_min, config.tau_max), momentum
