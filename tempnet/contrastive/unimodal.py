"""The contrastive losses on one space of embeddings: NT-Xent (arXiv 2002.05709) and its kin with any temperature policy.

n anchors a_i and their positives p_i are 2n vectors z. Each has the other of its pair as its positive and the 2n − 2
vectors of the other pairs as negatives; with a fixed τ and the in-batch normaliser this is NT-Xent,

    −(1/2n) Σ_v log exp(⟨z_v, z_v'⟩/τ) / Σ_{w≠v} exp(⟨z_v, z_w⟩/τ),      v' the other of v's pair.

It is the bimodal loss of the rows [a; p] against the rows [p; a] with both members of a pair marked as one image: row v
meets every z_w once, its own z_v stands at the place of v' and is no negative. Columns repeat what rows say, so the mean
of the two sides is the loss. Nothing of tiles, states, ranks or temperatures is written a second time.

Shapes: W ranks, n pairs on this rank, d embedding; members 0 = anchor, 1 = positive come first, (2, n).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.losses import ContrastiveLoss, ContrastiveOutput
from tempnet.contrastive.state import SampleState
from tempnet.contrastive.world import World
from tempnet.network import TempNet


class UnimodalLoss(nn.Module):
    """See `tempnet.contrastive.losses.ContrastiveLoss`; one TempNet serves both members of a pair.

    Args:
        config: which loss; not cyclip, whose cyclic terms compare two modalities.
        tempnet: for the losses with a TempNet, and only for those.
        state: for the losses that keep anything per sample; a sample is a document, whatever number of its spans meet.
        world: the ranks that share a batch; default: this process alone.

    Raises:
        ValueError: for cyclip, and if network or state are missing or superfluous.
    """

    def __init__(
        self,
        config: ContrastiveLossConfig,
        *,
        tempnet: TempNet | None = None,
        state: SampleState | None = None,
        world: World | None = None,
    ) -> None:
        super().__init__()
        if config.kind.is_cyclic:
            raise ValueError(f"the loss {config.name} compares two modalities, and there is one")
        self.bimodal = ContrastiveLoss(config, image_tempnet=tempnet, text_tempnet=tempnet, state=state, world=world)

    @property
    def tempnet(self) -> TempNet | None:
        """That of both members of a pair."""
        return self.bimodal.image_tempnet

    def forward(self, anchors: Tensor, positives: Tensor, ids: Tensor, *, gamma: float) -> ContrastiveOutput:
        """The loss of a batch. In training mode it also moves the per-sample state on.

        Args:
            anchors, positives: (n, d) unit rows, as many on every rank.
            ids: (n,) int64 sample numbers; pairs of the same one are negatives of each other all the same.
            gamma: γ of the moving average, in (0, 1].
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
