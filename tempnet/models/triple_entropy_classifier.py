"""A sentence classifier that is trained by cross-entropy, alone or with one of the losses of `tempnet.soft_triple`.

    L = β·CE(sentence) + (1 − β)·(ℓ(tokens) + weight·R)          TripleEntropy; β = 1 is plain fine-tuning
    L = (1 − λ)·CE(sentence) + λ·ℓ(first tokens)                 supervised contrastive loss (SupCon)

CE is the cross-entropy of the model's own head. SoftTriple's ℓ is computed from the last hidden states of all tokens of a
sentence, each with the sentence's label, SupCon's from those of the first tokens. All are means over the whole batch, no
matter how it is divided among the ranks (for SupCon, equally).

Shapes: b sentences on this rank, t tokens, C classes.
"""

from __future__ import annotations

from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from tempnet.contrastive.state import World
from tempnet.models.sentence_encoder import last_hidden_states
from tempnet.soft_triple import IGNORE_INDEX, SoftTriple, check_contrastive, supervised_contrastive_loss, token_labels


class ClassifierOutput(TypedDict):
    """Result for one batch; all tensors but the loss are detached."""

    loss: Tensor
    """Loss of this rank, a scalar; the average of its gradients over the ranks is the gradient of L."""
    cross_entropy: Tensor
    """Contribution of this rank to the cross-entropy, a scalar; the sum over ranks is the mean over the batch."""
    soft_triple: Tensor | None
    """Contribution of this rank to ℓ + weight·R, a scalar; None without SoftTriple."""
    contrastive: Tensor | None
    """Contribution of this rank to the supervised contrastive loss, a scalar; None without it."""
    logits: Tensor
    """Logits of the head: (b, C)."""


class TripleEntropyClassifier(nn.Module):
    """A Transformers `…ForSequenceClassification` with the SoftTriple loss and its centres; None for plain fine-tuning.

    A positive `contrastive_weight` λ adds the supervised contrastive loss instead, at `contrastive_temperature`. With
    `with_padding` SoftTriple counts padding too, as the authors' code does. `autocast_dtype` is that of matrix
    products; the losses are in float32. A model and centres of different numbers of classes or widths raise ValueError.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        soft_triple: SoftTriple | None,
        *,
        contrastive_weight: float = 0.0,
        contrastive_temperature: float = 0.3,
        with_padding: bool = False,
        world: World | None = None,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_contrastive(contrastive_weight, contrastive_temperature)
        if soft_triple is not None:
            expected, shape = (model.config.num_labels, model.config.hidden_size), soft_triple.centers.shape[::2]
            if expected != tuple(shape):
                raise ValueError(
                    f"the centres are for {shape[0]} classes of width {shape[1]}, the model's are {expected}"
                )
        self.model, self.soft_triple, self.with_padding = model, soft_triple, with_padding
        self.contrastive_weight, self.contrastive_temperature = contrastive_weight, contrastive_temperature
        self.world, self.autocast_dtype = world or World.alone(), autocast_dtype

    def logits(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Return the head's logits (b, C) in float32 for tokens, mask and (if used) token types, each (b, t)."""
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        autocast = self.autocast_dtype
        with torch.autocast(input_ids.device.type, dtype=autocast, enabled=autocast is not None):
            logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, **types)["logits"]
        return logits.float()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        token_type_ids: Tensor | None = None,
        counted: Tensor | None = None,
    ) -> ClassifierOutput:
        """Compute the loss of this rank's sentences, whose classes (b,) are int64.

        Tokens, their mask (1 token, 0 padding) and, if the model uses them, token types are (b, t). `counted` (m,) has the
        positions, among the b·t, of the tokens that count; None: they are found from the mask, for which the host waits.
        """
        with last_hidden_states(self.model) as seen:
            logits = self.logits(input_ids, attention_mask, token_type_ids)
        of_tokens = token_labels(labels, attention_mask, with_padding=self.with_padding)
        if counted is None:
            counted = (of_tokens != IGNORE_INDEX).flatten().nonzero().squeeze(1)
        own = torch.stack([labels.new_full((), len(labels)), labels.new_full((), len(counted))])
        # A rank's means are weighted by its shares of all sentences and of all tokens.
        shares = own / self.world.sum(own.clone())
        cross_entropy = shares[0] * F.cross_entropy(logits, labels)
        loss, soft, contrastive = cross_entropy, None, None
        if self.soft_triple is not None:
            settings = self.soft_triple.config
            soft = shares[1] * self.soft_triple.token_loss(seen[0], of_tokens, counted)
            if settings.regularizer:
                soft = soft + self.soft_triple.regularization() / self.world.size
            loss = settings.beta * cross_entropy + (1.0 - settings.beta) * soft
        elif weight := self.contrastive_weight:
            first = seen[0][:, 0]
            contrastive = supervised_contrastive_loss(first, labels, self.contrastive_temperature, self.world)
            loss = (1.0 - weight) * cross_entropy + weight * contrastive
        return {
            "loss": self.world.size * loss,
            "cross_entropy": cross_entropy.detach(),
            "soft_triple": None if soft is None else soft.detach(),
            "contrastive": None if contrastive is None else contrastive.detach(),
            "logits": logits.detach(),
        }
