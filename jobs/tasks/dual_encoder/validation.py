"""Validation: mean recall of held-out images and captions, and the cross-entropy of retrieving them.

Every rank encodes its part, and the embeddings are gathered, so the scores are the same on all ranks and do not depend
on their number.

Shapes: n images, m captions, d the width of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.tasks.dual_encoder.config import ClipConfig
from pipelines.images.pairs import PairSource
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.held_out import held_out_losses
from tempnet.contrastive.retrieval import cross_entropy, recall
from tempnet.contrastive.world import World
from tempnet.models.dual_encoder import DualEncoder
from tempnet.rivals import compare_with_constants

# Number of pairs on which predicted temperatures are compared with constants; the cost is quadratic in this number.
_MAX_PAIRS_COMPARED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalSet:
    """The held-out images and all their captions."""

    source: PairSource
    """Source that reads the images and tokenises the captions."""
    captions: tuple[str, ...]
    """All m captions."""
    image_of_text: np.ndarray
    """(m,) number of the image that each caption belongs to."""
    num_images: int
    """n, the number of images."""
    batch_size: int
    """Number of images or captions that a worker encodes at a time."""

    @classmethod
    def read(cls, source: PairSource, config: ClipConfig) -> RetrievalSet:
        """Read the captions of the first `validation.num_images` images (0: all)."""
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
        """Return all embeddings of the images (n, d) and captions (m, d), on the CPU. All ranks must call this."""

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
        """Encode this rank's share of the items 0 … count − 1, and gather the embeddings of all ranks."""
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
    """Return recalls, mean recall, mean cosine of the pairs, and the cross-entropy at the temperatures.

    Args:
        image: (n, d) unit embeddings of the images.
        text: (m, d) unit embeddings of the captions.
        image_of_text: (m,) number of the image that each caption belongs to.
        tau: temperatures of the images and of the texts; None for the temperature-free loss.
    """
    owners = torch.from_numpy(image_of_text)
    scores = recall(image, text, owners)
    scores["positive_cosine"] = float((image[owners] * text).sum(-1).mean())
    scores["cross_entropy_tau"] = cross_entropy(image, text, owners, tau)
    return scores


def one_temperature(config: ContrastiveLossConfig, scores: Mapping[str, float]) -> tuple[Tensor, Tensor] | None:
    """Return the τ of the images and the τ of the texts for a loss whose temperatures are not predicted.

    It is the single temperature of the loss or the mean of the training samples' own temperatures (`tau_mean`); None
    for the temperature-free loss.
    """
    if config.kind.temperature == "free":
        return None
    tau = torch.tensor([scores.get("tau_mean", config.tau)], dtype=torch.float64)
    return tau, tau


def rivals(
    image: Tensor, text: Tensor, image_of_text: np.ndarray, tau: tuple[Tensor, Tensor], config: ContrastiveLossConfig
) -> dict[str, float]:
    """Compare predicted with constant temperatures on the first held-out pairs (at most 4 096), taken as one batch.

    Args:
        image: (n, d) unit embeddings of the images.
        text: (m, d) unit embeddings of the captions.
        image_of_text: (m,) number of the image that each caption belongs to.
        tau: predicted temperatures of the images (n,) and of the texts (m,).
        config: the training loss.

    Returns:
        The figures of :func:`tempnet.rivals.compare_with_constants` for the loss of
        :func:`tempnet.contrastive.held_out.held_out_losses`, with the prefix `robust/` or `cross_entropy/` (the
        `objective` of the training loss), and `num_pairs`. An image and all its captions form one group.
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
