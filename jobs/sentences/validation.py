"""Validation: whether an anchor of a held-out document is nearest to its own positive, the MLM loss, and temperatures.

Every rank encodes its part; what it finds is gathered, so the scores are the same on all ranks and for any number of them.

Shapes: n documents, A anchors a document, d width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.sentences.batches import span_tensors
from jobs.sentences.config import SentenceConfig
from jobs.sentences.data import VALIDATION_SEED, read_documents, span_source
from pipelines.manifest import Manifest
from pipelines.stream import Batch
from tempnet.contrastive.retrieval import recall
from tempnet.models.temperature_sentence_encoder import IGNORE_INDEX, TemperatureSentenceEncoder


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
) -> tuple[dict[str, float], Tensor | None]:
    """Scores, and τ (2, n·A) of anchors and positives where a TempNet predicts them; all ranks must call it."""
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
        return scores, None
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
    return scores, tau


def _without_padding(gathered: Tensor, held_out: SpanSet, world_size: int) -> Tensor:
    """Rows of all ranks, those dropped that only fill up: every rank's part is of the same size, so they are the last."""
    num_anchors = len(gathered) // (world_size * -(-held_out.num_documents // world_size))
    return gathered[: held_out.num_documents * num_anchors]
