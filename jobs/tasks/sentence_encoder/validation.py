"""Validation: whether an anchor of a held-out document is nearest to its own positive, the MLM loss, and temperatures.

Every rank encodes its part of the documents, and the results are gathered, so the scores are the same on all ranks and
do not depend on their number.

Shapes: n documents, A anchors per document, d the width of an embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.tasks.sentence_encoder.config import SentenceConfig
from jobs.tasks.sentence_encoder.data import VALIDATION_SEED, read_documents, span_source
from pipelines.stream import Batch
from pipelines.text.manifest import Manifest
from tempnet.baselines import compare_with_constants
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.losses import held_out_losses
from tempnet.contrastive.retrieval import recall
from tempnet.models.temperature_sentence_encoder import IGNORE_INDEX, TemperatureSentenceEncoder

# Number of anchors on which predicted temperatures are compared with constants; the cost is quadratic in this number.
_MAX_PAIRS_COMPARED = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSet:
    """This rank's part of the held-out documents, with the spans and masks that all validations use."""

    batches: list[Batch]
    """Batches of documents, as arrays."""
    num_documents: int
    """Number of documents of all ranks together."""
    num_padding: int
    """Number of documents of this rank that only pad its part; their results are dropped."""

    @classmethod
    def read(cls, manifest: Manifest, config: SentenceConfig, *, rank: int, world_size: int) -> SpanSet:
        """Read this rank's part of the first `validation.num_documents` documents (0: all)."""
        settings = config.validation
        total = min(settings.num_documents or manifest.num_rows, manifest.num_rows)
        size = -(-total // world_size)
        numbers = np.arange(rank * size, (rank + 1) * size)
        num_padding = int((numbers >= total).sum())
        source = span_source(config, manifest, seed=VALIDATION_SEED)
        parts = np.array_split(np.minimum(numbers, total - 1), max(1, -(-size // settings.batch_size)))
        batches = [read_documents(source, part) for part in parts]
        return cls(batches=batches, num_documents=total, num_padding=num_padding)


@torch.no_grad()
def validate(
    module: TemperatureSentenceEncoder, held_out: SpanSet, device: torch.device
) -> tuple[dict[str, float], Tensor | None, Tensor | None]:
    """Score the held-out documents. All ranks must call this.

    Returns:
        The scores; τ (2, n·A) of anchors and positives, or None without a TempNet; the unit vectors (2, n·A, d) of
        anchors and positives, or None without a contrastive loss.
    """
    module.eval()
    world = module.world
    sentences: list[Tensor] = []
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # masked tokens, their losses, correct predictions
    num_left = sum(len(batch["ids"]) for batch in held_out.batches) - held_out.num_padding
    for batch in held_out.batches:
        tensors = span_tensors(batch, device)
        num_anchors = tensors["anchor_ids"].shape[1]
        ids, mask = tensors["anchor_ids"].flatten(0, 1), tensors["anchor_mask"].flatten(0, 1)
        labels = tensors["mlm_labels"].flatten(0, 1)
        labels[max(num_left, 0) * num_anchors :] = IGNORE_INDEX
        if module.mlm_weight:
            anchors, logits = module.masked_tokens(ids, mask, labels != IGNORE_INDEX)
            wanted = labels[labels != IGNORE_INDEX]
            losses = F.cross_entropy(logits.float(), wanted, reduction="sum")
            sums += torch.stack([wanted.new_tensor(len(wanted)), losses, (logits.argmax(-1) == wanted).sum()])
        else:
            anchors = module.encoder(ids, mask)
        if module.loss is not None:
            embeddings = module.encoder(tensors["positive_ids"].flatten(0, 2), tensors["positive_mask"].flatten(0, 2))
            positives = embeddings.unflatten(0, (len(anchors), -1)).mean(1)
            sentences.append(F.normalize(torch.stack([anchors, positives], dim=1), dim=-1))
        num_left -= len(batch["ids"])
    module.train()
    scores: dict[str, float] = {}
    if module.mlm_weight:
        count, total, right = world.sum(sums).tolist()
        scores |= {"mlm_loss": total / max(count, 1.0), "mlm_accuracy": right / max(count, 1.0)}
    if module.loss is None:
        return scores, None, None
    gathered = world.gather(torch.cat(sentences))
    kept = _without_padding(gathered, held_out, world.size)
    anchors, positives = kept.unbind(1)
    found_at = recall(anchors, positives, torch.arange(len(kept), device=device))
    scores["span_recall@1"] = (found_at["text_recall@1"] + found_at["image_recall@1"]) / 2
    scores["positive_cosine"] = float((anchors * positives).sum(-1).mean())
    tau = None
    if module.loss.tempnet is not None:
        tau = torch.stack([module.loss.tempnet(part) for part in (anchors, positives)]).cpu()
        scores |= {"tau_mean": float(tau.double().mean()), "tau_std": float(tau.double().std())}
    return scores, tau, torch.stack([anchors, positives]).cpu()


def rivals(sentences: Tensor, tau: Tensor, config: ContrastiveLossConfig, *, num_anchors: int) -> dict[str, float]:
    """Compare predicted with constant temperatures on the first held-out anchors (at most 2 048) and their positives.

    Args:
        sentences: (2, n·A, d) unit vectors of anchors and positives, with the A anchors of a document in sequence.
        tau: (2, n·A) predicted temperatures.
        config: the training loss.
        num_anchors: A.

    Returns:
        The figures of :func:`tempnet.baselines.compare_with_constants` for the loss of
        :func:`tempnet.contrastive.losses.held_out_losses`, with the prefix `robust/` or `cross_entropy/` (the
        `objective` of the training loss), and `num_pairs`. All spans of a document form one group.
    """
    anchors, positives = sentences[:, :_MAX_PAIRS_COMPARED]
    pairs = torch.arange(len(anchors))
    # As in training, each row is compared with every vector except itself (`tempnet.contrastive.unimodal`).
    both = held_out_losses(torch.cat([anchors, positives]), torch.cat([positives, anchors]), pairs.repeat(2), config)
    figures = compare_with_constants(
        lambda temperatures: both(temperatures.expand(2, -1))[0],
        tau[:, :_MAX_PAIRS_COMPARED].flatten(),
        (pairs // num_anchors).repeat(2),
        tau_min=config.tau_min,
        tau_max=config.tau_max,
    )
    named = {f"{config.kind.objective}/{name}": value for name, value in figures.items()}
    return {"num_pairs": float(len(pairs)), **named}


def _without_padding(gathered: Tensor, held_out: SpanSet, world_size: int) -> Tensor:
    """Drop the padding from the rows of all ranks: it comes last, because all ranks' parts have the same size."""
    num_anchors = len(gathered) // (world_size * -(-held_out.num_documents // world_size))
    return gathered[: held_out.num_documents * num_anchors]


def span_tensors(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """Convert a batch into the arguments of `TemperatureSentenceEncoder`, except γ."""
    tensors = {"ids": torch.from_numpy(batch["ids"]).to(device)}
    for name in ("anchor", "positive"):
        lengths = batch[f"{name}_lengths"]
        width = int(lengths.max())
        mask = np.arange(width) < lengths[..., None]
        tensors[f"{name}_ids"] = _tensor(batch[f"{name}_ids"][..., :width], device)
        tensors[f"{name}_mask"] = _tensor(mask, device)
        if name == "anchor":
            tensors["mlm_labels"] = _tensor(batch["mlm_labels"][..., :width], device)
    return tensors


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(device)
