"""The held-out images and captions of a run: their embeddings, mean recall, and scores of the temperatures of every loss.

Every rank encodes its part, and the embeddings are gathered, so the scores are the same on all ranks and do not depend
on their number. Embeddings that are stored are read by every rank.

Shapes: n images, m captions, d the width of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jobs.tasks.base import encode_all
from jobs.tasks.dual_encoder.config import ClipConfig
from pipelines.images.pairs import PairSource
from tempnet.baselines import compare_with_constants
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.losses import ContrastiveLoss, held_out_losses
from tempnet.contrastive.retrieval import cross_entropy, recall
from tempnet.contrastive.state import World
from tempnet.models.dual_encoder import DualEncoder, TemperatureDualEncoder
from tempnet.statistics import histogram_of

# Number of pairs on which predicted temperatures are compared with constants; the cost is quadratic in this number.
MAX_PAIRS_COMPARED = 4096


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
        """Return :attr:`recalls` and the cross-entropy at the temperatures of images and texts; None: temperature-free."""
        owners = torch.from_numpy(self.image_of_text)
        return self.recalls | {"cross_entropy_tau": cross_entropy(self.image, self.text, owners, tau)}


def encode_held_out(
    source: PairSource, config: ClipConfig, encoder: DualEncoder, world: World, device: torch.device
) -> HeldOut:
    """Encode the first `validation.num_images` images (0: all) and their captions; every rank computes its part.

    All ranks must call this; the embeddings are on the CPU.
    """
    total, size = source.manifest.num_images, config.validation.batch_size
    num_images = min(config.validation.num_images or total, total)
    captions, image_of_text = source.captions()
    chosen = np.flatnonzero(image_of_text < num_images)

    def encode_images(numbers: np.ndarray) -> Tensor:
        return encoder.encode_images(torch.from_numpy(source.read_images(numbers)).to(device))

    def encode_texts(numbers: np.ndarray) -> Tensor:
        tokens = source.encoder.encode([captions[number] for number in numbers])
        return encoder.encode_texts(
            *(torch.from_numpy(tokens[name]).to(device) for name in ("input_ids", "attention_mask"))
        )

    return HeldOut(
        image=encode_all(encode_images, np.arange(num_images), world, size).cpu(),
        text=encode_all(encode_texts, chosen, world, size).cpu(),
        image_of_text=image_of_text[chosen],
    )


def score(
    module: TemperatureDualEncoder, held_out: HeldOut, device: torch.device, *, with_details: bool
) -> tuple[dict[str, float], dict[str, Any] | None]:
    """Return recalls, cross-entropy and figures of τ. All ranks must call this, in eval mode and without gradients.

    The details are histograms of τ and, on rank 0, a comparison with constant temperatures.
    """
    loss, predicted = module.loss, None
    if loss.image_tempnet is not None:
        tau = module.predict_temperatures(held_out.image.to(device), held_out.text.to(device))
        predicted = (tau[0].cpu(), tau[1].cpu())
    scores = _temperature_scores(loss, predicted)
    scores |= held_out.scores(predicted or one_temperature(loss.config, scores))
    if not with_details:
        return scores, None
    ends = loss.config.tau_min, loss.config.tau_max
    counts = _of_all(loss, predicted, lambda tau: histogram_of(tau, *ends).double())
    histograms = {} if counts is None else dict(zip(("image", "text"), counts.tolist(), strict=True))
    details: dict[str, Any] = {"histograms": histograms}
    if predicted and loss.world.rank == 0:
        owner = torch.from_numpy(held_out.image_of_text)[:MAX_PAIRS_COMPARED]
        image, text = held_out.image[owner], held_out.text[: len(owner)]
        of_pairs = torch.stack([predicted[0][owner], predicted[1][: len(owner)]])
        figures = rivals(image, text, owner, of_pairs, loss.config)
        details |= {"rivals": figures, "judged_by": loss.config.kind.objective}
    return scores, details


def _temperature_scores(loss: ContrastiveLoss, predicted: tuple[Tensor, Tensor] | None) -> dict[str, float]:
    """Return mean and standard deviation of τ, of both modalities together and of each; for a single learned temperature
    its value. All ranks must call this.
    """
    if loss.learned is not None:
        return {"tau_mean": float(loss.learned())}
    if (sums := _of_all(loss, predicted, _sums)) is None:
        return {}
    scores = {}
    for prefix, (count, total, squares) in zip(("", "image_", "text_"), (sums.sum(0), *sums), strict=True):
        mean = total / count
        scores[f"{prefix}tau_mean"] = mean.item()
        scores[f"{prefix}tau_std"] = (squares / count - mean.square()).clamp(min=0.0).sqrt().item()
    return scores


def _sums(tau: Tensor) -> Tensor:
    """Return number, sum and sum of squares of temperatures."""
    tau = tau.double()
    return torch.stack([tau.new_tensor(tau.numel()), tau.sum(), tau.square().sum()])


def _of_all(
    loss: ContrastiveLoss, predicted: tuple[Tensor, Tensor] | None, measure: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Return a measure, which adds up over ranks, of the temperatures of images and of texts that are predicted for the
    validation set or stored for all training samples; None if there are none.
    """
    if predicted is not None:
        return torch.stack([measure(part) for part in predicted])
    if loss.state is not None and "tau" in loss.state.columns:
        return loss.world.sum(torch.stack([measure(part) for part in loss.state.columns["tau"]]))
    return None


def one_temperature(config: ContrastiveLossConfig, scores: Mapping[str, float]) -> tuple[Tensor, Tensor] | None:
    """Return the τ of images and of texts for a loss that predicts none: its single temperature, or the mean of the training
    samples' own (`tau_mean`); None for the temperature-free loss.
    """
    if config.kind.temperature == "free":
        return None
    tau = torch.tensor([scores.get("tau_mean", config.tau)], dtype=torch.float64)
    return tau, tau


def rivals(image: Tensor, text: Tensor, owner: Tensor, tau: Tensor, config: ContrastiveLossConfig) -> dict[str, float]:
    """Compare learned with constant temperatures on B pairs, taken as one batch, separately for images and captions.

    Embeddings are (B, d) unit vectors, `owner` (B,) numbers the images of the pairs, and `tau` is (2, B). Returned are
    `num_pairs` and, as `image/<objective>/…` and `text/<objective>/…`, the figures of
    :func:`tempnet.baselines.compare_with_constants` for :func:`tempnet.contrastive.losses.held_out_losses`.
    """
    losses = held_out_losses(image, text, owner, config)
    found = {"num_pairs": float(len(owner))}
    for number, name in enumerate(("image", "text")):

        def losses_of_one(tau: Tensor, number: int = number) -> Tensor:
            return losses(tau.expand(2, -1))[number]

        figures = compare_with_constants(
            losses_of_one, tau[number], owner, tau_min=config.tau_min, tau_max=config.tau_max
        )
        found |= {f"{name}/{config.kind.objective}/{key}": value for key, value in figures.items()}
    return found
