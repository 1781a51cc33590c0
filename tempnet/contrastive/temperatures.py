"""Temperatures that no network predicts: one learned scalar, or one value per sample with momentum updates.

Shapes: B pairs in the global batch. Values of both modalities are (2, B), where index 0 is the image and 1 the text.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tempnet.contrastive.config import ContrastiveLossConfig

_LARGEST_GRADIENT = 5.0


class LearnedTemperature(nn.Module):
    """One temperature τ in [τ_min, τ_max], whose logarithm is a learned parameter.

    If the optimizer has moved the parameter out of the range, τ is the bound, and only gradients that would move it
    further out are set to 0. A plain clamp would set all gradients to 0 there, and the parameter could never return.
    """

    def __init__(self, config: ContrastiveLossConfig) -> None:
        super().__init__()
        # A one-element vector, because DeepSpeed cannot broadcast zero-dimensional parameters.
        self.log_tau = nn.Parameter(torch.full((1,), math.log(config.tau)))
        self.bounds = math.log(config.tau_min), math.log(config.tau_max)

    def forward(self) -> Tensor:
        """Return τ, (1,)."""
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
        leads_out = ((x <= low) & (grad > 0)) | ((x >= high) & (grad < 0))  # A descent step goes against the gradient.
        return torch.where(leads_out, 0.0, grad), None, None


def momentum_step(
    tau: Tensor, momentum: Tensor, gradient: Tensor, config: ContrastiveLossConfig
) -> tuple[Tensor, Tensor]:
    """Return τ and m after a step of isogclr: m ← (1−β)m + β·clip(G, ±5), then τ ← Π[τ − η·m].

    Args:
        tau: (2, B) temperatures τ.
        momentum: (2, B) momenta m.
        gradient: (2, B) gradients G.
        config: gives the momentum weight β, the step size η and the range [τ₀, τ_max] that Π clamps to.
    """
    beta = config.tau_momentum
    clipped = gradient.clamp(-_LARGEST_GRADIENT, _LARGEST_GRADIENT)
    momentum = (1.0 - beta) * momentum + beta * clipped
    return (tau - config.tau_step * momentum).clamp(config.tau_min, config.tau_max), momentum
