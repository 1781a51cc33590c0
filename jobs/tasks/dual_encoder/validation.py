"""The held-out images and captions of a run: their embeddings, mean recall, and the cross-entropy of retrieving them.

Every rank encodes its part, and the embeddings are gathered, so the scores are the same on all ranks and do not depend
on their number. Embeddings that are stored are read by every rank.

Shapes: n images, m captions, d the width of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.tasks.dual_encoder.config import ClipConfig
from pipelines.features import PairEmbeddings
from pipelines.images.pairs import PairSource
from tempnet.contrastive.retrieval import cross_entropy, recall
from tempnet.contrastive.state import World
from tempnet.models.dual_encoder import DualEncoder


@dataclass(frozen=True, kw_only=True)  # without slots, which leave no place for a cached property
class HeldOut:
    """The embeddings of the held-out images and of all their captions."""

    image: Tensor
    """(n, d) unit vectors."""
    text: Tensor
    """(m, d) unit vectors."""
    image_of_text: np.ndarray
    """(m,) number of the image that each caption belongs to."""

    @cached_property
    def recalls(self) -> dict[str, float]:
        """Recalls, mean recall and mean cosine of the pairs, which no temperature changes."""
        owners = torch.from_numpy(self.image_of_text)
        cosine = float((self.image[owners] * self.text).sum(-1).mean())
        return recall(self.image, self.text, owners) | {"positive_cosine": cosine}

    def scores(self, tau: tuple[Tensor, Tensor] | None) -> dict[str, float]:
        """Return :attr:`recalls` and the cross-entropy at the temperatures.

        Args:
            tau: temperatures of the images and of the texts; None for the temperature-free loss.
        """
        owners = torch.from_numpy(self.image_of_text)
        return self.recalls | {"cross_entropy_tau": cross_entropy(self.image, self.text, owners, tau)}


class HeldOutSet(Protocol):
    """The held-out images and all their captions, whose embeddings are computed or were stored."""

    def embeddings(self, encoder: DualEncoder | None, world: World, device: torch.device) -> HeldOut:
        """Return all embeddings, on the CPU. All ranks must call this."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSet:
    """Held-out images and captions whose embeddings are stored."""

    stored: PairEmbeddings
    """The stored embeddings."""
    num_images: int
    """Number n of images that are scored, counted from the first; 0: all."""

    def embeddings(self, encoder: DualEncoder | None, world: World, device: torch.device) -> HeldOut:
        """Read all embeddings; every rank reads all of them."""
        total = self.stored.pairs.num_images
        image, text, image_of_text = self.stored.read_held_out(min(self.num_images or total, total))
        return HeldOut(image=torch.from_numpy(image), text=torch.from_numpy(text), image_of_text=image_of_text)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalSet:
    """Held-out images and captions that an encoder is run over."""

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

    def embeddings(self, encoder: DualEncoder | None, world: World, device: torch.device) -> HeldOut:
        """Return all embeddings, of which every rank computes its part. All ranks must call this."""
        assert encoder is not None

        def encode_images(numbers: np.ndarray) -> Tensor:
            return encoder.encode_images(torch.from_numpy(self.source.read_images(numbers)).to(device))

        def encode_texts(numbers: np.ndarray) -> Tensor:
            tokens = self.source.encoder.encode([self.captions[number] for number in numbers])
            return encoder.encode_texts(
                *(torch.from_numpy(tokens[name]).to(device) for name in ("input_ids", "attention_mask"))
            )

        return HeldOut(
            image=self._encode_all(encode_images, self.num_images, world, device),
            text=self._encode_all(encode_texts, len(self.captions), world, device),
            image_of_text=self.image_of_text,
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
