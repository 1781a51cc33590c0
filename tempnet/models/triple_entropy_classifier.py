"""A sentence classifier that learns by cross-entropy and, on every token, by SoftTriple (TripleEntropy).

    L = β·CE(sentence) + (1 − β)·(ℓ(tokens) + weight·R)          β = 1: plain fine-tuning

CE is that of the model's own head; ℓ reads the last hidden states of all tokens of a sentence, each with the sentence's label
(`tempnet.soft_triple`). Both are means over the whole batch, whatever part of it a rank holds.

Shapes: b sentences of this rank, t tokens, C classes.
"""

from __future__ import annotations

from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from tempnet.contrastive.world import World
from tempnet.models.bodies import last_hidden_states
from tempnet.soft_triple import IGNORE_INDEX, SoftTriple, token_labels


class ClassifierOutput(TypedDict):
    """Of one batch; all but the loss are detached."""

    loss: Tensor
    """Scalar; its average over ranks has the gradient of L."""
    cross_entropy: Tensor
    """Scalar, of this rank's part: the sum over ranks is that of the batch."""
    soft_triple: Tensor | None
    """Likewise; None for plain fine-tuning."""
    logits: Tensor
    """(b, C) of the head."""


class TripleEntropyClassifier(nn.Module):
    """A Transformers `…ForSequenceClassification`, and the centres of SoftTriple.

    Args:
        model: body and head.
        soft_triple: None for plain fine-tuning.
        with_padding: SoftTriple counts padding too, as the authors' code does.
        world: the ranks that share a batch.
        autocast_dtype: the dtype of matrix products; the losses are in float32.

    Raises:
        ValueError: if model and centres are made for different classes or widths.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        soft_triple: SoftTriple | None,
        *,
        with_padding: bool = False,
        world: World | None = None,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if soft_triple is not None:
            wanted, found = (model.config.num_labels, model.config.hidden_size), soft_triple.centers.shape[::2]
            if wanted != tuple(found):
                raise ValueError(
                    f"the centres are for {found[0]} classes of width {found[1]}, the model's are {wanted}"
                )
        self.model, self.soft_triple, self.with_padding = model, soft_triple, with_padding
        self.world, self.autocast_dtype = world or World.alone(), autocast_dtype

    def logits(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """The head's logits (b, C), float32, of tokens, mask and, for models that know them, token types (b, t)."""
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        autocast = self.autocast_dtype
        with torch.autocast(input_ids.device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            found: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, **types)["logits"]
        return found.float()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, token_type_ids: Tensor | None = None
    ) -> ClassifierOutput:
        """Tokens and mask (b, t) (1 token, 0 padding), int64 labels (b,), token types as :meth:`logits`."""
        with last_hidden_states(self.model) as seen:
            logits = self.logits(input_ids, attention_mask, token_type_ids)
        of_tokens = token_labels(labels, attention_mask, with_padding=self.with_padding)
        own = torch.tensor([len(labels), int((of_tokens != IGNORE_INDEX).sum())], device=labels.device)
        shares = own / self.world.sum(own.clone())  # a rank's means count by what it holds
        cross_entropy = shares[0] * F.cross_entropy(logits, labels)
        loss, soft = cross_entropy, None
        if self.soft_triple is not None:
            settings = self.soft_triple.config
            soft = shares[1] * self.soft_triple.token_loss(seen[0], of_tokens)
            if settings.regularizer:
                soft = soft + self.soft_triple.regularization() / self.world.size
            loss = settings.beta * cross_entropy + (1.0 - settings.beta) * soft
        return {
            "loss": self.world.size * loss,
            "cross_entropy": cross_entropy.detach(),
            "soft_triple": None if soft is None else soft.detach(),
            "logits": logits.detach(),
        }
