"""Contrastive losses on a single modality: NT-Xent (arXiv 2002.05709) and its variants with other temperatures.

n anchors a_i and their positives p_i are 2n vectors z. Each vector has the other one of its pair as its positive, and
the 2n − 2 vectors of the other pairs as negatives. With a fixed τ and the in-batch normaliser this is NT-Xent,

    −(1/2n) Σ_v log exp(⟨z_v, z_v'⟩/τ) / Σ_{w≠v} exp(⟨z_v, z_w⟩/τ),      v' is the other vector of v's pair.

It is the bimodal loss of the rows [a; p] against the rows [p; a], where both members of a pair have the same image id. Row v
then meets every z_w exactly once, and z_v itself is not counted as a negative. The columns contain the same comparisons as
the rows, so the mean of the two sides is the loss.

Shapes: W ranks, n pairs on this rank, d dimensions of an embedding. Values of both members of a pair are (2, n),
where index 0 is the anchor and 1 the positive.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.losses import ContrastiveLoss, ContrastiveOutput
from tempnet.contrastive.normalisers import NormaliserNet
from tempnet.contrastive.state import SampleState, World
from tempnet.network import TempNet


class UnimodalLoss(nn.Module):
    """Contrastive loss between anchors and positives of one modality; both members of a pair share their networks.

    Arguments and errors are those of `ContrastiveLoss`. A sample of the state is a document, no matter how many of its spans
    are in a batch. Cyclip, which compares two modalities, raises ValueError.
    """

    def __init__(
        self,
        config: ContrastiveLossConfig,
        *,
        tempnet: TempNet | None = None,
        normaliser: NormaliserNet | None = None,
        state: SampleState | None = None,
        world: World | None = None,
    ) -> None:
        super().__init__()
        if config.kind.is_cyclic:
            raise ValueError(f"the loss {config.name} compares two modalities, and there is one")
        self.bimodal = ContrastiveLoss(
            config,
            image_tempnet=tempnet,
            text_tempnet=tempnet,
            image_normaliser=normaliser,
            text_normaliser=normaliser,
            state=state,
            world=world,
        )

    @property
    def tempnet(self) -> TempNet | None:
        """TempNet that both members of a pair share, or None."""
        return self.bimodal.image_tempnet

    def forward(self, anchors: Tensor, positives: Tensor, ids: Tensor, *, gamma: float) -> ContrastiveOutput:
        """Compute the loss of a batch; in training mode the per-sample state is updated too.

        Anchors and positives are (n, d) unit vectors, n being the same on every rank, and ids (n,) int64 sample ids:
        different pairs with the same id are still negatives of each other. γ is that of the moving average, in (0, 1].
        """
        num_pairs, rank = len(ids), self.bimodal.world.rank
        pairs = torch.arange(num_pairs, device=ids.device) + rank * num_pairs
        output = self.bimodal(
            torch.cat([anchors, positives]),
            torch.cat([positives, anchors]),
            ids.repeat(2),
            pairs.repeat(2),
            gamma=gamma,
        )

        def members(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[0].view(2, num_pairs)

        return {
            "loss": output["loss"],
            "tau": output["tau"][0].view(2, num_pairs),
            "log_u": members(output["log_u"]),
            "dual_gradient": members(output["dual_gradient"]),
        }
