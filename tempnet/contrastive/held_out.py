"""Compute the training loss of held-out pairs at given temperatures, with all pairs as one batch.

Shapes: B pairs, d dimensions of an embedding. Values of both modalities are (2, B), where index 0 is the image and 1
the text.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.pairs import PositivePairs
from tempnet.contrastive.step import GatheredBatch, Member, normalise
from tempnet.contrastive.tiles import SimilarityTiles


def held_out_losses(
    image: Tensor, text: Tensor, image_ids: Tensor, config: ContrastiveLossConfig
) -> Callable[[Tensor], Tensor]:
    """Return a function from temperatures τ (2, B) to the losses (2, B) of all anchors, in float64.

    With h_ij = ⟨x_i, y_j⟩ − ⟨x_i, y_i⟩ and N(i) the n_i pairs with a different image than pair i, the loss of anchor
    i is

        in batch   log(1 + Σ_{j∈N(i)} exp(h_ij/τ_i))                          the cross-entropy
        global     τ_i·(log( (1/n_i) Σ_{j∈N(i)} exp(h_ij/τ_i) ) + ρ)          the robust loss (TempNet Eq. 2 and 8)

    The global loss uses the exact mean over the held-out pairs instead of the moving average of the training. ρ
    bounds the KL divergence of weights on n_i contrasts, so if it is not below log n_i, the lowest τ is the best.

    Args:
        image, text: (B, d) unit vectors.
        image_ids: (B,) integers; pairs with the same one are not negatives of each other.
        config: a loss with temperatures (not `temperature_free`).
    """
    image, text = image.double(), text.double()
    cosines, ids = (image * text).sum(-1), torch.arange(len(image), device=image.device)
    part = slice(0, len(image))
    batch = GatheredBatch(
        image=image,
        text=text,
        cosines=cosines,
        ids=ids,
        pairs=PositivePairs.find(image_ids, part),
        part=part,
    )
    stored = {"log_u": cosines.new_full((2, len(image)), -torch.inf)}  # −inf: there is no earlier estimate.
    tiles = SimilarityTiles(image, text, batch.pairs, tile_size=config.tile_size)

    def losses(tau: Tensor) -> Tensor:
        tau = tau.double()
        scales = tau.reciprocal()
        sums = zip(tiles.logsumexp(scales[:1], scales[1:]), scales.split(1), strict=True)
        log_sums = torch.cat([own.relative_to(cosines, scale) for own, scale in sums])
        return normalise(log_sums, Member(config=config, tau=tau, gamma=1.0, stored=stored), batch).losses

    return losses
