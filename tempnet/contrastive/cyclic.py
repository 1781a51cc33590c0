"""Compute CyCLIP's two consistency terms (arXiv 2205.14459, Eq. 3 and 4) exactly, without a B × B matrix.

    in-modal      λ₁/B Σ_jk (⟨I_j, I_k⟩ − ⟨T_j, T_k⟩)²  =  λ₁/B ‖IIᵀ − TTᵀ‖²  =  λ₁/B (‖A‖² − 2‖M‖² + ‖C‖²)
    cross-modal   λ₂/B Σ_jk (⟨I_j, T_k⟩ − ⟨I_k, T_j⟩)²  =  λ₂/B ‖ITᵀ − TIᵀ‖²  =  λ₂/B (2⟨A, C⟩ − 2⟨M, Mᵀ⟩)

with the d × d Gram matrices A = IᵀI, C = TᵀT and M = TᵀI, because tr(IIᵀTTᵀ) = ‖TᵀI‖² and so on. The cost is O(B·d²)
instead of O(B²·d). The ranks exchange three d × d sums instead of features, and each rank has the gradient of its own
rows in closed form:

    ∂/∂I = 4/B [ I(λ₁A + λ₂C) − T(λ₁M + λ₂Mᵀ) ]        ∂/∂T = 4/B [ T(λ₁C + λ₂A) − I(λ₁Mᵀ + λ₂M) ]

All computations are in float64, because the terms of the sums nearly cancel where images and texts agree.

Shapes: B pairs in the global batch, b pairs on this rank, d dimensions of an embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tempnet.contrastive.world import World


@dataclass(frozen=True, slots=True)
class CyclicTerms:
    """Sum of the two terms and its gradients, in float64."""

    value: Tensor
    """Sum of both terms, a scalar that is the same on every rank."""
    image_grad: Tensor
    """Gradient of this rank's image rows: (b, d)."""
    text_grad: Tensor
    """Gradient of this rank's text rows: (b, d)."""


@torch.no_grad()
def cyclic_terms(image: Tensor, text: Tensor, in_modal: float, cross_modal: float, world: World) -> CyclicTerms:
    """Compute both terms from local image and text rows (b, d), with λ₁ = in_modal and λ₂ = cross_modal."""
    image, text = image.double(), text.double()
    a, c, m = world.sum(torch.stack([image.T @ image, text.T @ text, text.T @ image]))
    num_pairs = world.size * len(image)
    value = in_modal * (a.square() - 2 * m.square() + c.square()).sum() + cross_modal * 2 * (a * c - m * m.T).sum()
    image_grad = image @ (in_modal * a + cross_modal * c) - text @ (in_modal * m + cross_modal * m.T)
    text_grad = text @ (in_modal * c + cross_modal * a) - image @ (in_modal * m.T + cross_modal * m)
    return CyclicTerms(value / num_pairs, image_grad.mul_(4 / num_pairs), text_grad.mul_(4 / num_pairs))
