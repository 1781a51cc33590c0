"""A text encoder with mean pooling, and its directory format, which the library sentence-transformers can read too.

The directory contains:

    config.json, model.safetensors, the tokenizer       a Transformers model
    modules.json, sentence_bert_config.json, 1_Pooling/config.json
                                                        configuration of mean pooling for sentence-transformers

:class:`TemperatureSentenceEncoder` is the encoder trained on spans by a contrastive loss and masked-token prediction
(DeCLUTR, arXiv 2006.03659 §3):

    L = a·ℓ(z_anchor, z_positive) + b·CE(masked tokens of the anchors)

z_anchor is the normalised mean over the tokens of an anchor, and z_positive the normalised mean of the embeddings of its P
positives. Anchors pass through the encoder once, with masked tokens if there is an MLM objective, as in the authors' code;
positives are not masked. The MLM head is computed only for the masked positions, 15 % of the tokens.

Shapes: n sentences, or documents on this rank, A anchors per document, P positives per anchor, t tokens, m masked tokens, d
width of the encoder, V vocabulary.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tempnet.contrastive.losses import ContrastiveOutput
from tempnet.contrastive.state import World
from tempnet.contrastive.unimodal import UnimodalLoss
from tempnet.models.towers import load_tower
from tempnet.network import check_embeddings
from tempnet.network_config import read_json
from tempnet.softmax.reference import IGNORE_INDEX

# Models that number the positions of tokens from pad_token_id + 1 on.
_OFFSET_POSITIONS = (
    "camembert", "data2vec-text", "ibert", "lilt", "longformer", "luke", "markuplm", "mpnet", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
_SETTINGS_FILE = "sentence_bert_config.json"
_MODULES = (("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"))


def saved_num_tokens(directory: str | Path) -> int | None:
    """Return the number of tokens that a saved sentence encoder truncates sentences to, or None if it is not given."""
    file = Path(directory, _SETTINGS_FILE)
    return int(json.loads(file.read_text())["max_seq_length"]) if file.is_file() else None


def num_positions(config: PreTrainedConfig) -> int | None:
    """Return the maximum number of tokens that an encoder accepts, or None if the configuration gives no limit."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions and config.model_type in _OFFSET_POSITIONS:
        return int(positions) - int(config.pad_token_id) - 1
    return int(positions) if positions else None


def mean_pooling(tokens: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the means (n, d) in float32 of token vectors (n, t, d) whose mask (n, t) is 1; without tokens it is 0."""
    weights = attention_mask.unsqueeze(-1).float()
    return (tokens.float() * weights).sum(1) / weights.sum(1).clamp(min=1.0)


class SentenceEncoder(nn.Module):
    """Any Transformers text encoder whose output contains `last_hidden_state`, with mean pooling.

    `autocast_dtype` is the dtype of its matrix products; parameters and embeddings stay in float32.
    """

    def __init__(self, encoder: PreTrainedModel, *, autocast_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.encoder, self.autocast_dtype = encoder, autocast_dtype

    @property
    def embedding_size(self) -> int:
        """Dimension d of the embeddings."""
        return int(self.encoder.config.hidden_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return embeddings (n, d) in float32 of tokens (n, t) and their mask; they are not normalised."""
        autocast = self.autocast_dtype
        with torch.autocast(input_ids.device.type, dtype=autocast, enabled=autocast is not None):
            tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask)["last_hidden_state"]
        return mean_pooling(tokens, attention_mask)

    @torch.no_grad()
    def encode(
        self,
        texts: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_tokens: int | None = None,
        batch_size: int = 64,
    ) -> Tensor:
        """Return embeddings (n, d) of n texts, in float32 on the CPU, computed in eval mode, `batch_size` texts at a time.

        Texts are truncated to `num_tokens`, by default the tokenizer's own maximum.
        """
        was_training = self.training
        self.eval()
        device = next(self.parameters()).device
        tokens = tokenizer(list(texts), truncation=True, max_length=num_tokens)["input_ids"] if texts else []
        rows = torch.empty(len(texts), self.embedding_size)
        order = sorted(range(len(texts)), key=lambda number: len(tokens[number]))
        for at in range(0, len(order), batch_size):
            few = order[at : at + batch_size]
            padded = tokenizer.pad({"input_ids": [tokens[number] for number in few]}, return_tensors="pt")
            rows[few] = self(padded["input_ids"].to(device), padded["attention_mask"].to(device)).cpu()
        self.train(was_training)
        return rows

    def save_pretrained(self, directory: str | Path, tokenizer: PreTrainedTokenizerBase, *, num_tokens: int) -> None:
        """Save encoder and tokenizer in this module's layout; once loaded, sentences are truncated to `num_tokens`."""
        directory = Path(directory)
        self.encoder.save_pretrained(directory)
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.model_max_length = num_tokens
        tokenizer.save_pretrained(directory)
        modules = [
            {"idx": number, "name": name, "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (name, path, kind) in enumerate(_MODULES)
        ]
        pooling = {"word_embedding_dimension": self.embedding_size, "pooling_mode_mean_tokens": True} | {
            f"pooling_mode_{other}": False for other in ("cls_token", "max_tokens", "mean_sqrt_len_tokens")
        }
        (directory / "1_Pooling").mkdir(exist_ok=True)
        for file, content in (
            ("modules.json", modules),
            (_SETTINGS_FILE, {"max_seq_length": num_tokens, "do_lower_case": False}),
            ("1_Pooling/config.json", pooling),
        ):
            (directory / file).write_text(json.dumps(content, indent=2))

    @classmethod
    def from_pretrained(cls, source: str | Path, *, autocast_dtype: torch.dtype | None = None) -> SentenceEncoder:
        """Load a saved sentence encoder, or any Transformers text encoder, from a directory or hub name.

        A source that is no text encoder raises ValueError, which names it, as does one that is not pooled by the mean.
        """
        if (file := Path(source, "1_Pooling", "config.json")).is_file():
            pooling = read_json(file)  # the older form has a field for every mode
            if pooling.get("pooling_mode", "mean") != "mean" or not pooling.get("pooling_mode_mean_tokens", True):
                raise ValueError(
                    f"{source} does not pool its tokens by their mean ({file}), and nothing else is known here"
                )
        return cls(load_tower(source, "text"), autocast_dtype=autocast_dtype)


@contextmanager
def last_hidden_states(
    model: PreTrainedModel, narrow: Callable[[Tensor], Tensor] | None = None
) -> Iterator[list[Tensor]]:
    """Context in which every forward pass of a model with a head appends the last hidden states of its body to the list.

    `narrow` selects the part of them that the head is computed for.
    """
    states: list[Tensor] = []

    def pass_on(_module: nn.Module, _inputs: object, output: object) -> object:
        hidden: Tensor = output["last_hidden_state"]  # type: ignore[index]
        states.append(hidden)
        if narrow is not None:
            output["last_hidden_state"] = narrow(hidden)  # type: ignore[index]
        return output

    handle = model.base_model.register_forward_hook(pass_on)
    try:
        yield states
    finally:
        handle.remove()


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

    A weight of 0 (a and b, `contrastive_weight` and `mlm_weight`) disables an objective. Both 0, a loss that is missing or
    superfluous, and a TempNet of another size raise ValueError. By default only this process shares a batch.
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
        if loss is not None:
            check_embeddings(loss.tempnet, int(model.config.hidden_size))
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
        masked: Tensor | None = None,
        *,
        gamma: float,
    ) -> SpanOutput:
        """Compute the loss of this rank's documents.

        Tokens of the anchors, some of them masked, and their mask (1 token, 0 padding) are (n, A, t), as are `mlm_labels`,
        the original tokens at masked positions, and -100 elsewhere. Tokens of the positives and their mask are (n, A, P,
        t'), and ids of the documents (n,). `masked` (m,) has the positions of the masked tokens among the n·A·t; None: they
        are found from the labels, for which the host waits. γ is that of `gamma_at`.
        """
        num_anchors = anchor_ids.shape[1]
        flat_ids, flat_mask = anchor_ids.flatten(0, 1), anchor_mask.flatten(0, 1)
        loss: Tensor = torch.zeros((), device=ids.device)
        mlm_loss, contrastive = None, None
        if self.mlm_weight:
            labels = mlm_labels.flatten()
            if masked is None:
                masked = (labels != IGNORE_INDEX).nonzero().squeeze(1)
            anchors, logits = self.masked_tokens(flat_ids, flat_mask, masked)
            total = F.cross_entropy(logits.float(), labels[masked], reduction="sum")
            count = self.world.sum(ids.new_full((1,), len(masked))).clamp(min=1)
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

    def masked_tokens(self, input_ids: Tensor, attention_mask: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embeddings (k, d) of k rows of tokens, and the logits (m, V) at the masked positions in order.

        Tokens and their mask (1 token, 0 padding) are (k, t), and the positions (m,) are among the k·t.
        """
        autocast = self.autocast_dtype
        with (
            last_hidden_states(self.model, lambda hidden: hidden.flatten(0, 1)[masked].unsqueeze(0)) as seen,
            torch.autocast(input_ids.device.type, dtype=autocast, enabled=autocast is not None),
        ):
            logits = self.model(input_ids=input_ids, attention_mask=attention_mask)["logits"]
        return mean_pooling(seen[0], attention_mask), logits.squeeze(0)
