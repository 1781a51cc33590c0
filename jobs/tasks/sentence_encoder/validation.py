"""Validation: whether an anchor of a held-out document is nearest to its own positive, the MLM loss, and temperatures.

Every rank encodes its part; what it finds is gathered, so the scores are the same on all ranks and for any number of them.

Shapes: n documents, A anchors a document, d width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from pipelines.stream import Batch
from pipelines.text.manifest import Manifest
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.held_out import held_out_losses
from tempnet.contrastive.retrieval import recall
from tempnet.models.temperature_sentence_encoder import IGNORE_INDEX, TemperatureSentenceEncoder
from tempnet.rivals import compare_with_constants
from torch import Tensor

from jobs.tasks.sentence_encoder.batches import span_tensors
from jobs.tasks.sentence_encoder.config import SentenceConfig
from jobs.tasks.sentence_encoder.data import VALIDATION_SEED, read_documents, span_source

# Anchors on which predicted temperatures are compared with constants: every loss there looks at all pairs of spans.
_MAX_PAIRS_COMPARED = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSet:
    """This rank's part of the held-out documents, with the spans and masks of all validations."""

    batches: list[Batch]
    num_documents: int
    """Of all ranks."""
    num_padding: int
    """Documents of this rank that only fill its part up: they are encoded and dropped."""

    @classmethod
    def read(cls, manifest: Manifest, config: SentenceConfig, *, rank: int, world_size: int) -> SpanSet:
        """The first `validation.num_documents` documents (0: all), divided."""
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
    """Scores; τ (2, n·A) of anchors and positives where a TempNet predicts them; their unit vectors (2, n·A, d) where
    sentences are compared. All ranks must call it."""
    module.eval()
    world = module.world
    sentences: list[Tensor] = []
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # masked tokens, their losses, how many are right
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
            found = module.encoder(tensors["positive_ids"].flatten(0, 2), tensors["positive_mask"].flatten(0, 2))
            positives = found.unflatten(0, (len(anchors), -1)).mean(1)
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
    """Predicted temperatures beside constants, on the first held-out anchors (at most 2 048) with their positives.

    Args:
        sentences: (2, n·A, d) unit vectors of anchors and positives, the A anchors of a document after one another.
        tau: (2, n·A).
        config: the loss of the training.

    Returns:
        The figures of :func:`tempnet.rivals.compare_with_constants` by the loss of
        :func:`tempnet.contrastive.held_out.held_out_losses`, under `robust/` or `cross_entropy/` (`objective` of the loss);
        all spans of a document are one group. And `num_pairs`.
    """
    anchors, positives = sentences[:, :_MAX_PAIRS_COMPARED]
    pairs = torch.arange(len(anchors))
    # As in training: each row meets every vector but itself (`tempnet.contrastive.unimodal`).
    both = held_out_losses(torch.cat([anchors, positives]), torch.cat([positives, anchors]), pairs.repeat(2), config)
    figures = compare_with_constants(
        lambda temperatures: both(temperatures.expand(2, -1))[0],
        tau[:, :_MAX_PAIRS_COMPARED].flatten(),
        (pairs // num_anchors).repeat(2),
        tau_min=config.tau_min,
        tau_max=config.tau_max,
    )
    found = {f"{config.kind.objective}/{name}": value for name, value in figures.items()}
    return {"num_pairs": float(len(pairs)), **found}


def _without_padding(gathered: Tensor, held_out: SpanSet, world_size: int) -> Tensor:
    """Rows of all ranks, those dropped that only fill up: every rank's part is of the same size, so they are the last."""
    num_anchors = len(gathered) // (world_size * -(-held_out.num_documents // world_size))
    return gathered[: held_out.num_documents * num_anchors]
