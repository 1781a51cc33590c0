"""One batch: its loss and the finished gradients of this rank's rows, without autograd.

    1. pass 1 over the tiles of this rank's images with all texts; the columns' sums are completed over the ranks
    2. losses of all anchors and the shifts of their weights, on every rank (`normalisers`): O(B)
    3. pass 2: the gradients; the texts' are summed over the ranks, each of which takes its own rows

Of an anchor with the weights w_ij = exp((S_ij − s_i)/τ_i) over its negatives, 1/(2B) included, the positive's share is known
without a tile: −Σ_j w_ij on its own pair, and Σ_j w_ij = exp(ℓ_i − c_i) from the first pass.

Shapes: W ranks, B global batch, b = B/W local, d embedding; modalities 0 = image, 1 = text come first, (2, B).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.cyclic import cyclic_terms
from tempnet.contrastive.normalisers import Normalised, Repeats, in_batch, moving_average
from tempnet.contrastive.pairs import PositivePairs
from tempnet.contrastive.tiles import SimilarityTiles, artanh_slope, clamp_cosines
from tempnet.contrastive.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredBatch:
    """What a rank knows of a batch: its own images, everybody's texts, everybody's numbers."""

    image: Tensor
    """(b, d)."""
    text: Tensor
    """(B, d)."""
    cosines: Tensor
    """(B,) of the positive pairs."""
    ids: Tensor
    """(B,)."""
    pairs: PositivePairs
    part: slice
    """Which of the B are this rank's."""
    stored: dict[str, Tensor]
    """The columns of the state, each (2, B), as they were before this batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Which gradients are wanted, the same on every rank."""

    image: bool
    text: bool
    tau: bool


@dataclass(slots=True, kw_only=True)
class StepResult:
    """The loss, and exactly its gradients; None where not wanted."""

    loss: Tensor
    log_u: Tensor | None
    """(2, B), this batch included."""
    image_grad: Tensor | None = None
    """(b, d)."""
    text_grad: Tensor | None = None
    """(b, d)."""
    dual_gradient: Tensor | None = None
    """(2, B): 2B·∂loss/∂τ, which of a robust loss is G."""


@torch.no_grad()
def compute(
    batch: GatheredBatch, tau: Tensor, config: ContrastiveLossConfig, world: World, needs: Needs, gamma: float
) -> StepResult:
    """The loss that `config` names at the temperatures τ (2, B)."""
    part, num_pairs, is_artanh = batch.part, len(batch.ids), config.kind.temperature == "free"
    positives = 2.0 * clamp_cosines(batch.cosines).atanh() if is_artanh else batch.cosines
    tiles = SimilarityTiles(batch.image, batch.text, batch.pairs, tile_size=config.tile_size, is_artanh=is_artanh)
    scale = tau.reciprocal()
    partial = tau.new_full((1, 2, num_pairs), -torch.inf)
    partial[0, 0, part], partial[0, 1] = tiles.logsumexp(scale[0, part], scale[1])
    log_sums = world.gather(partial).logsumexp(0) - positives * scale  # ℓ

    normalised = normalise(log_sums, tau, batch, config, gamma)
    result = StepResult(loss=normalised.losses.sum() / (2 * num_pairs), log_u=normalised.log_u)
    if needs.image or needs.text or needs.tau:
        log_scale = normalised.log_scale + math.log(2 * num_pairs)  # c
        weight_sums = (log_sums - log_scale).exp()
        shift = positives + tau * log_scale  # s
        sums = tiles.gradients(
            scale[0, part],
            scale[1],
            shift[0, part],
            shift[1],
            with_image=needs.image,
            with_text=needs.text,
            with_products=needs.tau,
        )
        own = weight_sums.sum(0)
        if is_artanh:
            own *= artanh_slope(batch.cosines)
        own = own[part, None]
        if sums.image is not None:
            result.image_grad = sums.image.addcmul_(own, batch.text[part], value=-1.0)
        if sums.text is not None:
            result.text_grad = world.sum_part(sums.text).addcmul_(own, batch.image, value=-1.0)
        if sums.row_products is not None and sums.column_products is not None:
            products = torch.zeros_like(tau)
            products[0, part], products[1] = sums.row_products, sums.column_products
            mean_h = (world.sum(products) - positives * weight_sums) * (2 * num_pairs)
            result.dual_gradient = normalised.tau_slope - mean_h * scale
    if config.kind.is_cyclic:
        _add_cyclic(result, batch, config, world)
    return result


def normalise(
    log_sums: Tensor, tau: Tensor, batch: GatheredBatch, config: ContrastiveLossConfig, gamma: float
) -> Normalised:
    """The losses of all anchors from ℓ and τ, each (2, B), with the normaliser that `config` names."""
    num_negatives = batch.pairs.num_negatives
    if config.kind.normaliser == "in_batch":
        return in_batch(log_sums, tau, num_negatives > 0)
    rho = config.rho if config.kind.uses_rho else 0.0
    log_u = batch.stored["log_u"].to(log_sums.dtype)
    return moving_average(log_sums, tau, num_negatives, log_u, Repeats(batch.ids), gamma=gamma, rho=rho)


def _add_cyclic(result: StepResult, batch: GatheredBatch, config: ContrastiveLossConfig, world: World) -> None:
    terms = cyclic_terms(batch.image, batch.text[batch.part], config.cyclic_in_modal, config.cyclic_cross_modal, world)
    result.loss += terms.value
    if result.image_grad is not None:
        result.image_grad += terms.image_grad
    if result.text_grad is not None:
        result.text_grad += terms.text_grad


class AttachGradients(torch.autograd.Function):
    """A loss to which gradients are attached that were computed with it; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: float, *leaves_and_grads: Tensor | None) -> Tensor:
        """The loss; `leaves_and_grads` are n tensors, then their n gradients (or None), which are multiplied by `factor`."""
        ctx.save_for_backward(*leaves_and_grads[len(leaves_and_grads) // 2 :])
        ctx.factor = factor
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """∂/∂leaves."""
        factor, saved = grad * ctx.factor, ctx.saved_tensors
        return None, None, *(None if part is None else part * factor for part in saved), *(None for _ in saved)
