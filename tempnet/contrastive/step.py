"""Compute the losses of one batch and the gradients of this rank's rows, without autograd.

    1. Pass 1 over the tiles of similarities of this rank's images with all texts gives ℓ; the sums of the columns are
       completed by communication between the ranks.
    2. Every rank computes the losses of all anchors and the sums of their weights (`normalisers`), which is O(B).
    3. Pass 2 computes the gradients; those of the texts are summed over the ranks, and each rank takes its own rows.

The negatives of anchor i have the weights w_ij = exp(h_ij/τ_i − c_i)/(2B). The positive's contribution to the gradient
is known without a tile: its weight is −Σ_j w_ij, and pass 1 gives Σ_j w_ij = exp(ℓ_i − c_i)/(2B). Several losses that
differ in their temperatures, in ρ or in their state share the similarities.

Shapes: K losses, W ranks, B pairs in the global batch, b = B/W pairs on this rank, d dimensions of an embedding. Values
of both modalities are (2, B), where index 0 is the image and 1 the text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.normalisers import Normalised, Repeats, in_batch, moving_average
from tempnet.contrastive.state import World
from tempnet.contrastive.tiles import (
    LogSums,
    PositivePairs,
    SimilarityTiles,
    Weighting,
    artanh_slope,
    clamp_cosines,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredBatch:
    """What a rank knows about the global batch: its own images, and the texts and ids of all ranks."""

    image: Tensor
    """Embeddings of this rank's images: (b, d)."""
    text: Tensor
    """Embeddings of all texts: (B, d)."""
    cosines: Tensor
    """Similarities of the positive pairs: (B,)."""
    ids: Tensor
    """Sample ids: (B,)."""
    pairs: PositivePairs
    """Entries that are not negatives."""
    part: slice
    """Part of the B pairs that belongs to this rank."""


class BatchLoss(NamedTuple):
    """One of the losses that are computed of a batch, with what is its own."""

    config: ContrastiveLossConfig
    """Which loss."""
    tau: Tensor
    """Temperatures: (2, B)."""
    gamma: float
    """γ of the moving average, in (0, 1]."""
    stored: dict[str, Tensor]
    """Columns of the per-sample state before this batch, each (2, B); `log_u` may be predicted, or −b of the sigmoid loss."""

    def normalise(self, log_sums: Tensor, batch: GatheredBatch) -> Normalised:
        """Compute the losses of all anchors from ℓ (2, B)."""
        num_negatives, kind = batch.pairs.num_negatives, self.config.kind
        if kind.normaliser == "in_batch":
            return in_batch(log_sums, self.tau, num_negatives > 0)
        return moving_average(
            log_sums,
            self.tau,
            num_negatives,
            self.stored["log_u"].to(log_sums.dtype),
            Repeats(batch.ids),
            gamma=self.gamma,
            rho=self.config.rho if kind.uses_rho else 0.0,
            form="predicted" if kind.normaliser == "predicted" else "unscaled" if kind.is_unscaled else "global",
        )


class Needs(NamedTuple):
    """Which gradients are to be computed; it must be the same on every rank."""

    image: bool
    text: bool
    tau: bool


@dataclass(slots=True, kw_only=True)
class StepResult:
    """The loss and its exact gradients; gradients that were not requested are None."""

    loss: Tensor
    """Loss of the batch, a scalar."""
    log_u: Tensor | None
    """Logarithms of the normaliser estimates, including this batch: (2, B); None for in-batch losses."""
    image_grad: Tensor | None = None
    """Gradient of this rank's images: (b, d)."""
    text_grad: Tensor | None = None
    """Gradient of this rank's texts: (b, d)."""
    dual_gradient: Tensor | None = None
    """2B·∂loss/∂τ, which for a robust loss is G (see `ContrastiveOutput`): (2, B)."""
    prediction_gradient: Tensor | None = None
    """2B times the gradient in the predicted log u, or in −b of the sigmoid loss: (2, B); None without one."""


@torch.no_grad()
def compute(batch: GatheredBatch, losses: Sequence[BatchLoss], world: World, needs: Needs) -> list[StepResult]:
    """Compute K losses of a batch and the gradients in `needs`.

    Either all or none of them are without a temperature, and either all or none without a normaliser.
    """
    part, num_pairs, first = batch.part, len(batch.ids), losses[0].config
    is_artanh, is_sigmoid = first.kind.temperature == "free", first.kind.normaliser == "none"
    assert all((loss.config.kind.temperature == "free") == is_artanh for loss in losses)
    assert all((loss.config.kind.normaliser == "none") == is_sigmoid for loss in losses)
    if is_sigmoid:
        return [sigmoid(batch, loss, world, needs) for loss in losses]
    positives = 2.0 * clamp_cosines(batch.cosines).atanh() if is_artanh else batch.cosines
    tiles = SimilarityTiles(batch.image, batch.text, batch.pairs, tile_size=first.tile_size, is_artanh=is_artanh)
    tau = torch.stack([loss.tau for loss in losses])  # (K, 2, B)
    scale = tau.reciprocal()
    log_sums = _gather_log_sums(tiles.logsumexp(scale[:, 0, part], scale[:, 1]), scale, part, world)
    normalised = [
        loss.normalise(own, batch) for own, loss in zip(log_sums.relative_to(positives, scale), losses, strict=True)
    ]
    results = [
        StepResult(loss=own.losses.sum() / (2 * num_pairs), log_u=own.log_u, prediction_gradient=own.prediction_slope)
        for own in normalised
    ]
    if any(needs):
        log_weights = torch.stack([own.log_weight for own in normalised])
        offset = log_sums.rest - log_weights + math.log(2 * num_pairs)  # o, with 1/(2B)
        weight_sums = log_weights.exp()
        images, texts, row_products, column_products = tiles.gradients(
            Weighting(scale[:, 0, part], log_sums.top[0, part], offset[:, 0, part]),
            Weighting(scale[:, 1], log_sums.top[1], offset[:, 1]),
            with_image=needs.image,
            with_text=needs.text,
            with_products=needs.tau,
        )
        # The gradients of the embeddings are those of the negatives; the positives' own contribution completes them.
        own_weights = (weight_sums / (2 * num_pairs)).sum(1)
        if is_artanh:
            own_weights *= artanh_slope(batch.cosines)
        own_weights = own_weights[:, part, None]
        for number, result in enumerate(results):
            if images is not None:
                result.image_grad = images[number].addcmul_(own_weights[number], batch.text[part], value=-1.0)
            if texts is not None:
                result.text_grad = world.sum_part(texts[number]).addcmul_(own_weights[number], batch.image, value=-1.0)
        if row_products is not None and column_products is not None:
            products = torch.zeros_like(tau)
            products[:, 0, part], products[:, 1] = row_products, column_products
            # h/τ = (S − m)/τ + log Σw + c − rest, see `normalisers`; c is in the slope already.
            subtrahend = world.sum(products) * (2 * num_pairs) * scale
            subtrahend += torch.where(weight_sums > 0.0, (log_weights - log_sums.rest) * weight_sums, 0.0)
            for result, own, part_of_slope in zip(results, normalised, subtrahend, strict=True):
                result.dual_gradient = own.tau_slope - part_of_slope
    for result, loss in zip(results, losses, strict=True):
        if loss.config.kind.is_cyclic:
            weights = loss.config.cyclic_in_modal, loss.config.cyclic_cross_modal
            value, image_grad, text_grad = cyclic_terms(batch.image, batch.text[part], *weights, world)
            result.loss += value
            if result.image_grad is not None:
                result.image_grad += image_grad
            if result.text_grad is not None:
                result.text_grad += text_grad
    return results


def _gather_log_sums(own: tuple[LogSums, LogSums], scale: Tensor, part: slice, world: World) -> LogSums:
    """Return the sums of all anchors, m (2, B) and the rest (K, 2, B), from those of this rank's rows and columns.

    The arguments are what pass 1 returns, 1/τ (K, 2, B), and this rank's part of the B pairs.
    """
    rows, columns = own
    partial = scale.new_full((1, len(scale) + 1, *scale.shape[1:]), -torch.inf)
    partial[0, 0, 0, part], partial[0, 0, 1] = rows.top, columns.top
    partial[0, 1:, 0, part], partial[0, 1:, 1] = rows.rest, columns.rest
    tops, rests = world.gather(partial).split([1, len(scale)], dim=1)
    top = tops.amax(0)
    return LogSums(top[0], (rests + (tops - top) * scale).logsumexp(0))


@torch.no_grad()
def sigmoid(batch: GatheredBatch, loss: BatchLoss, world: World, needs: Needs) -> StepResult:
    """Compute the sigmoid loss of SigLIP (arXiv 2303.15343), in which every pair counts by itself.

        (1/B) Σ_i [softplus(−x_ii) + Σ_{j∈N(i)} softplus(x_ij)],     x_ij = S_ij/τ + b,     softplus(−x) = −log σ(x)

    Rows and columns are the same sum, and the ranks exchange no sums but those of the text gradients. −b has the place of a
    log-normaliser that all anchors share.
    """
    part, num_pairs = batch.part, len(batch.ids)
    scale, offset, cosines = loss.tau[0, part].reciprocal(), loss.stored["log_u"][0, part], batch.cosines[part]
    tiles = SimilarityTiles(batch.image, batch.text, batch.pairs, tile_size=loss.config.tile_size)
    losses, weights, products, images, texts = tiles.sigmoid(
        scale, offset, with_image=needs.image, with_text=needs.text
    )
    positives = cosines * scale - offset
    missed = (-positives).sigmoid()
    total = losses.sum() + torch.logaddexp(-positives, torch.zeros_like(positives)).sum()
    slopes = scale.new_zeros(2, *loss.tau.shape)  # in τ and in −b, both of rows only
    slopes[0, 0, part] = -2.0 * scale.square() * (products - missed * cosines)
    slopes[1, 0, part] = -2.0 * (weights - missed)
    result = StepResult(
        loss=world.sum(total) / num_pairs, log_u=None, dual_gradient=slopes[0], prediction_gradient=slopes[1]
    )
    own = (missed * scale)[:, None]
    if images is not None:
        result.image_grad = images.addcmul_(own, batch.text[part], value=-1.0).div_(num_pairs)
    if texts is not None:
        result.text_grad = world.sum_part(texts).addcmul_(own, batch.image, value=-1.0).div_(num_pairs)
    return result


@torch.no_grad()
def cyclic_terms(
    image: Tensor, text: Tensor, in_modal: float, cross_modal: float, world: World
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute CyCLIP's two consistency terms (arXiv 2205.14459, Eq. 3 and 4) exactly, without a B × B matrix.

        in-modal      λ₁/B Σ_jk (⟨I_j, I_k⟩ − ⟨T_j, T_k⟩)²  =  λ₁/B ‖IIᵀ − TTᵀ‖²  =  λ₁/B (‖A‖² − 2‖M‖² + ‖C‖²)
        cross-modal   λ₂/B Σ_jk (⟨I_j, T_k⟩ − ⟨I_k, T_j⟩)²  =  λ₂/B ‖ITᵀ − TIᵀ‖²  =  λ₂/B (2⟨A, C⟩ − 2⟨M, Mᵀ⟩)

    with the d × d Gram matrices A = IᵀI, C = TᵀT and M = TᵀI, because tr(IIᵀTTᵀ) = ‖TᵀI‖² and so on. The cost is O(B·d²)
    instead of O(B²·d). The ranks exchange three d × d sums, and each has the gradient of its own rows:

        ∂/∂I = 4/B [ I(λ₁A + λ₂C) − T(λ₁M + λ₂Mᵀ) ]        ∂/∂T = 4/B [ T(λ₁C + λ₂A) − I(λ₁Mᵀ + λ₂M) ]

    All is in float64, because the terms of the sums nearly cancel where images and texts agree. From this rank's
    rows (b, d) it returns the sum of both terms, the same on every rank, and the gradients (b, d) of these rows.
    """
    image, text = image.double(), text.double()
    a, c, m = world.sum(torch.stack([image.T @ image, text.T @ text, text.T @ image]))
    num_pairs = world.size * len(image)
    value = in_modal * (a.square() - 2 * m.square() + c.square()).sum() + cross_modal * 2 * (a * c - m * m.T).sum()
    image_grad = image @ (in_modal * a + cross_modal * c) - text @ (in_modal * m + cross_modal * m.T)
    text_grad = text @ (in_modal * c + cross_modal * a) - image @ (in_modal * m.T + cross_modal * m)
    return value / num_pairs, image_grad.mul_(4 / num_pairs), text_grad.mul_(4 / num_pairs)


class AttachGradients(torch.autograd.Function):
    """Autograd node of a loss, a factor, n tensors, and their n gradients (or None), which its backward only scales."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: float, *leaves_and_grads: Tensor | None) -> Tensor:
        ctx.save_for_backward(*leaves_and_grads[len(leaves_and_grads) // 2 :])
        ctx.factor = factor
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factor, saved = grad * ctx.factor, ctx.saved_tensors
        return None, None, *(None if part is None else part * factor for part in saved), *(None for _ in saved)
