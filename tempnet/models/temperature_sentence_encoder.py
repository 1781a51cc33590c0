"""A text encoder trained on spans by a contrastive loss and masked-token prediction (DeCLUTR, arXiv 2006.03659 §3).

    L = a·ℓ(z_anchor, z_positive) + b·CE(masked tokens of the anchors)

z_anchor is the normalised mean over the tokens of an anchor. z_positive is the mean of the embeddings of its P
positives, which is normalised after averaging. Anchors pass through the encoder once, with masked tokens if there is
an MLM objective, as in the authors' code; positives are not masked. The MLM head is computed only for the masked
positions, so that logits of size V exist for 15 % of the tokens only.

Shapes: n documents on this rank, A anchors per document, P positives per anchor, t tokens, m masked tokens, d width
of the encoder, V vocabulary.
"""

from __future__ import annotations

from typing import TypedDict, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from tempnet.contrastive.losses import ContrastiveOutput
from tempnet.contrastive.state import World
from tempnet.contrastive.unimodal import UnimodalLoss
from tempnet.models.sentence_encoder import SentenceEncoder, last_hidden_states, mean_pooling
from tempnet.softmax.reference import IGNORE_INDEX


class SpanOutput(TypedDict):
    """Result for one batch; apart from `loss` and the loss in `contrastive`, all tensors are detached."""

    loss: Tensor
    """Loss of this rank, a scalar; the average of its gradients over the ranks is the gradient of L."""
    mlm_loss: Tensor | None
    """Mean cross-entropy over the masked tokens of all ranks, a scalar; None without the MLM objective."""
    contrastive: ContrastiveOutput | None
    """Output of the contrastive loss, with values (2, n·A) of anchors and positives; None without that objective."""


class TemperatureSentenceEncoder(nn.Module):
    """Encoder with an MLM head (a Transformers `…ForMaskedLM`), and a contrastive loss with its temperatures.

    The weights a and b, `contrastive_weight` and `mlm_weight`, disable an objective if they are 0. Both weights 0, a loss
    that is missing or superfluous, and a TempNet that reads embeddings of another size raise ValueError. By default only
    this process shares a batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        loss: UnimodalLoss | None,
        *,
        contrastive_weight: float = 1.0,
        mlm_weight: float = 1.0,
        world: World | None = None,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not (contrastive_weight or mlm_weight):
            raise ValueError("contrastive_weight and mlm_weight are both 0: nothing is left to learn")
        if (loss is None) == bool(contrastive_weight):
            raise ValueError("a contrastive loss and its weight go together")
        self.model, self.loss = model, loss
        self.contrastive_weight, self.mlm_weight = contrastive_weight, mlm_weight
        self.world, self.autocast_dtype = world or World.alone(), autocast_dtype
        width = int(model.config.hidden_size)
        if loss is not None and (network := loss.tempnet) is not None and network.config.input_size != width:
            raise ValueError(
                f"the TempNet was built for embeddings of {network.config.input_size}, the encoder's have {width}"
            )
        if not mlm_weight:  # The head is not used, so its parameters are not trained.
            body = {id(parameter) for parameter in model.base_model.parameters()}
            for parameter in model.parameters():
                parameter.requires_grad_(id(parameter) in body)

    @property
    def encoder(self) -> SentenceEncoder:
        """Body of the model with mean pooling, which shares the weights; this is the model to export."""
        return SentenceEncoder(cast(PreTrainedModel, self.model.base_model), autocast_dtype=self.autocast_dtype)

    def forward(
        self,
        anchor_ids: Tensor,
        anchor_mask: Tensor,
        mlm_labels: Tensor,
        positive_ids: Tensor,
        positive_mask: Tensor,
        ids: Tensor,
        *,
        gamma: float,
    ) -> SpanOutput:
        """Compute the loss of this rank's documents.

        Tokens of the anchors, some of them masked, and their mask (1 token, 0 padding) are (n, A, t), as are
        `mlm_labels`, the original tokens at masked positions, and -100 elsewhere. Tokens of the positives and their mask
        are (n, A, P, t'), and ids of the documents (n,). γ is that of the moving averages
        (`tempnet.contrastive.config.gamma_at`).
        """
        num_anchors = anchor_ids.shape[1]
        flat_ids, flat_mask = anchor_ids.flatten(0, 1), anchor_mask.flatten(0, 1)
        labels = mlm_labels.flatten(0, 1)
        loss: Tensor = torch.zeros((), device=ids.device)
        mlm_loss, contrastive = None, None
        if self.mlm_weight:
            anchors, logits = self.masked_tokens(flat_ids, flat_mask, labels != IGNORE_INDEX)
            total = F.cross_entropy(logits.float(), labels[labels != IGNORE_INDEX], reduction="sum")
            count = self.world.sum(torch.tensor([len(logits)], device=ids.device)).clamp(min=1)
            loss = loss + self.mlm_weight * self.world.size * total / count.squeeze()
            mlm_loss = self.world.sum(total.detach().clone()) / count.squeeze()
        else:
            anchors = self.encoder(flat_ids, flat_mask)
        if self.loss is not None:
            positives = self.encoder(positive_ids.flatten(0, 2), positive_mask.flatten(0, 2))
            positives = positives.unflatten(0, (len(flat_ids), -1)).mean(1)
            contrastive = self.loss(
                F.normalize(anchors, dim=-1),
                F.normalize(positives, dim=-1),
                ids.repeat_interleave(num_anchors),
                gamma=gamma,
            )
            loss = loss + self.contrastive_weight * contrastive["loss"]
        return {"loss": loss, "mlm_loss": mlm_loss, "contrastive": contrastive}

    def masked_tokens(self, input_ids: Tensor, attention_mask: Tensor, is_masked: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embeddings (k, d) of k rows of tokens, and the logits (m, V) of the masked positions in order.

        Tokens, their mask (1 token, 0 padding) and the masked positions are (k, t).
        """
        autocast = self.autocast_dtype
        with (
            last_hidden_states(self.model, lambda hidden: hidden[is_masked].unsqueeze(0)) as seen,
            torch.autocast(input_ids.device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None),
        ):
            logits = self.model(input_ids=input_ids, attention_mask=attention_mask)["logits"]
        return mean_pooling(seen[0], attention_mask), logits.squeeze(0)

    @torch.no_grad()
    def init_prototypes(self, sentences: Tensor) -> None:
        """Set the TempNet's d2 prototypes from the first d2 of these sentence embeddings (d2 or more, d).

        They are unit vectors, the same on all ranks; fewer than d2 raise ValueError.
        """
        assert self.loss is not None
        assert self.loss.tempnet is not None
        self.loss.tempnet.init_prototypes(sentences)
