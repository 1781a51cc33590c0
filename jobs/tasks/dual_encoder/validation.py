"""Validation: mean recall of held-out images and captions, and the cross-entropy of finding them.

Every rank encodes its part; embeddings are gathered, so the scores are the same on all ranks and for any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from pipelines.images.pairs import PairSource
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.held_out import held_out_losses
from tempnet.contrastive.retrieval import cross_entropy, recall
from tempnet.contrastive.world import World
from tempnet.models.dual_encoder import DualEncoder
from tempnet.rivals import compare_with_constants
from torch import Tensor

from jobs.tasks.dual_encoder.config import ClipConfig

# Pairs on which predicted temperatures are compared with constants: every loss there looks at all pairs of them.
_MAX_PAIRS_COMPARED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalSet:
    """Held-out images and all their captions."""

    source: PairSource
    captions: tuple[str, ...]
    image_of_text: np.ndarray
    """(m,) the image that each caption belongs to."""
    num_images: int
    batch_size: int

    @classmethod
    def read(cls, source: PairSource, config: ClipConfig) -> RetrievalSet:
        """The first `validation.num_images` images (0: all)."""
        captions, image_of_text = source.captions()
        num_images = min(config.validation.num_images or source.manifest.num_images, source.manifest.num_images)
        chosen = np.flatnonzero(image_of_text < num_images)
        return cls(
            source=source,
            captions=tuple(captions[index] for index in chosen),
            image_of_text=image_of_text[chosen],
            num_images=num_images,
            batch_size=config.validation.batch_size,
        )

    def embeddings(self, encoder: DualEncoder, world: World, device: torch.device) -> tuple[Tensor, Tensor]:
        """(n, d) of the images and (m, d) of the captions, whole on every rank, on the CPU; all ranks must call it."""

        def encode_images(numbers: np.ndarray) -> Tensor:
            return encoder.encode_images(torch.from_numpy(self.source.read_images(numbers)).to(device))

        def encode_texts(numbers: np.ndarray) -> Tensor:
            tokens = self.source.encoder.encode([self.captions[number] for number in numbers])
            return encoder.encode_texts(
                *(torch.from_numpy(tokens[name]).to(device) for name in ("input_ids", "attention_mask"))
            )

        return (
            self._encode_all(encode_images, self.num_images, world, device),
            self._encode_all(encode_texts, len(self.captions), world, device),
        )

    def _encode_all(
        self, encode: Callable[[np.ndarray], Tensor], count: int, world: World, device: torch.device
    ) -> Tensor:
        """This rank's share of 0 … count−1, completed by those of the others."""
        size = -(-count // world.size)
        share = np.arange(min(world.rank * size, count), min((world.rank + 1) * size, count))
        parts = [encode(part) for part in self._batches(share if len(share) else np.arange(1))]
        local = torch.cat(parts)[: len(share)].to(device)
        return world.gather(F.pad(local, (0, 0, 0, size - len(local))))[:count].cpu()

    def _batches(self, numbers: np.ndarray) -> Iterator[np.ndarray]:
        for at in range(0, len(numbers), self.batch_size):
            yield numbers[at : at + self.batch_size]


def retrieval_scores(
    image: Tensor, text: Tensor, image_of_text: np.ndarray, tau: tuple[Tensor, Tensor] | None
) -> dict[str, float]:
    """Recalls, mean recall, mean cosine, and the cross-entropy at the temperatures of the images and of the texts."""
    owners = torch.from_numpy(image_of_text)
    scores = recall(image, text, owners)
    scores["positive_cosine"] = float((image[owners] * text).sum(-1).mean())
    scores["cross_entropy_tau"] = cross_entropy(image, text, owners, tau)
    return scores


def one_temperature(config: ContrastiveLossConfig, scores: Mapping[str, float]) -> tuple[Tensor, Tensor] | None:
    """τ of all held-out images and of all texts, where none is predicted: the one there is, or the mean of the training
    samples' own (`tau_mean`); None for the temperature-free loss."""
    if config.kind.temperature == "free":
        return None
    tau = torch.tensor([scores.get("tau_mean", config.tau)], dtype=torch.float64)
    return tau, tau


def rivals(
    image: Tensor, text: Tensor, image_of_text: np.ndarray, tau: tuple[Tensor, Tensor], config: ContrastiveLossConfig
) -> dict[str, float]:
    """Predicted temperatures beside constants, on the first held-out pairs (at most 4 096) as one batch.

    Args:
        tau: of the images (n,) and of the texts (m,).
        config: the loss of the training.

    Returns:
        The figures of :func:`tempnet.rivals.compare_with_constants` by the loss of
        :func:`tempnet.contrastive.held_out.held_out_losses`, under `robust/` or `cross_entropy/` (`objective` of the loss);
        both anchors of a pair and all captions of an image are one group. And `num_pairs`.
    """
    owner = torch.from_numpy(image_of_text)[:_MAX_PAIRS_COMPARED]
    kept = len(owner)
    figures = compare_with_constants(
        held_out_losses(image[owner], text[:kept], owner, config),
        torch.stack([tau[0][owner], tau[1][:kept]]),
        owner.expand(2, -1),
        tau_min=config.tau_min,
        tau_max=config.tau_max,
    )
    return {"num_pairs": float(kept), **{f"{config.kind.objective}/{name}": value for name, value in figures.items()}}
