"""Statistics of a training step: crowded documents, the MLM loss, and the temperatures of anchors and positives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.statistics import PairStatistics
from tempnet.models.temperature_sentence_encoder import SpanOutput

_SCALARS = ("num_ranks", "num_documents", "num_crowded", "mlm_loss")
_MEMBERS = ("anchor", "positive")


@dataclass(frozen=True, slots=True)
class SpanStatistics:
    """Statistics of a step, as sums that add up over ranks."""

    sums: Tensor
    """float64 vector: the values of `_SCALARS`, then the sums of `PairStatistics` if the contrastive loss is used."""
    config: ContrastiveLossConfig
    """The contrastive loss."""
    has_mlm: bool
    """Whether the MLM loss is used."""

    @classmethod
    def of(
        cls, output: SpanOutput, config: ContrastiveLossConfig, *, num_documents: int, num_crowded: int
    ) -> SpanStatistics:
        """Return the statistics of one rank's part of a batch.

        Args:
            output: output of the module.
            config: the contrastive loss.
            num_documents: number of documents in this part.
            num_crowded: number of documents that are too short for their anchors to start at least 2·l_max apart.
        """
        mlm_loss = output["mlm_loss"]
        own = torch.tensor([1.0, num_documents, num_crowded, 0.0], dtype=torch.float64, device=output["loss"].device)
        if mlm_loss is not None:
            own[-1] = mlm_loss  # has the same value on every rank
        pairs = []
        if (contrastive := output["contrastive"]) is not None:
            pairs.append(PairStatistics.of(contrastive, config).sums)
        return cls(torch.cat([own, *pairs]), config, mlm_loss is not None)

    def summary(self) -> dict[str, float]:
        """Return means and shares; metrics of a loss that is not used are left out."""
        raw = dict(zip(_SCALARS, self.sums.tolist(), strict=False))
        summary = {"share_crowded": raw["num_crowded"] / raw["num_documents"]}
        if self.has_mlm:
            summary["mlm_loss"] = raw["mlm_loss"] / raw["num_ranks"]
        if len(self.sums) > len(_SCALARS):
            pairs = self.sums[len(_SCALARS) :]
            summary |= PairStatistics(pairs, self.config, _MEMBERS).summary()
        return summary
