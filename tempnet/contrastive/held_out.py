"""The loss of held-out pairs at given temperatures: that of the training, with all of them as one batch.

Shapes: B pairs, d embedding; modalities 0 = image, 1 = text come first, (2, B).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.pairs import PositivePairs
from tempnet.contrastive.step import GatheredBatch, normalise
from tempnet.contrastive.tiles import SimilarityTiles


def held_out_losses(
    image: Tensor, text: Tensor, image_ids: Tensor, config: ContrastiveLossConfig
) -> Callable[[Tensor], Tensor]:
    """A function from temperatures τ (2, B) to the losses (2, B) of all anchors, in float64.

    With h_ij = ⟨x_i, y_j⟩ − ⟨x_i, y_i⟩ and N(i) the n_i pairs whose image is another one than that of pair i, an anchor costs

        in batch   log(1 + Σ_{j∈N(i)} exp(h_ij/τ_i))                          the cross-entropy
        global     τ_i·(log( (1/n_i) Σ_{j∈N(i)} exp(h_ij/τ_i) ) + ρ)          the robust loss (TempNet Eq. 2 and 8)

    of which the latter has the exact mean over the held-out pairs in the place of the moving average that training keeps.
    ρ means KL from n_i contrasts, so where it is not below log n_i the lowest τ is the best.

    Args:
        image, text: (B, d) unit rows.
        image_ids: (B,) integers; pairs with the same one are no negatives of each other.
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
        stored={"log_u": cosines.new_full((2, len(image)), -torch.inf)},  # no visit before
    )
    tiles = SimilarityTiles(image, text, batch.pairs, tile_size=config.tile_size)

    def losses(tau: Tensor) -> Tensor:
        tau = tau.double()
        image_scale, text_scale = tau.reciprocal()
        log_sums = torch.stack(tiles.logsumexp(image_scale, text_scale)) - cosines / tau
        return normalise(log_sums, tau, batch, config, gamma=1.0).losses

    return losses
