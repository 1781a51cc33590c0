"""Scores of the temperatures of a dual encoder on its held-out pairs, for every loss: predicted, learned, stored or fixed.

Shapes: n images, m captions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jobs.tasks.dual_encoder.validation import HeldOut
from tempnet.baselines import compare_with_constants
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.losses import ContrastiveLoss, held_out_losses
from tempnet.models.temperature_dual_encoder import TemperatureDualEncoder
from tempnet.statistics import histogram_of

# Number of pairs on which predicted temperatures are compared with constants; the cost is quadratic in this number.
MAX_PAIRS_COMPARED = 4096


def score(
    module: TemperatureDualEncoder, held_out: HeldOut, device: torch.device, *, with_details: bool
) -> tuple[dict[str, float], dict[str, Any] | None]:
    """Return recalls, cross-entropy and figures of τ. All ranks must call this, in eval mode and without gradients.

    Args:
        module: the module, with the loss and its temperatures.
        held_out: the embeddings of the held-out pairs, on the CPU.
        device: device of the TempNets.
        with_details: whether to return histograms of τ too, and, on rank 0, a comparison with constant temperatures.
    """
    loss, predicted = module.loss, None
    if loss.image_tempnet is not None:
        tau = module.predict_temperatures(held_out.image.to(device), held_out.text.to(device))
        predicted = (tau[0].cpu(), tau[1].cpu())
    scores = _temperature_scores(loss, predicted)
    scores |= held_out.scores(predicted or one_temperature(loss.config, scores))
    if not with_details:
        return scores, None
    details: dict[str, Any] = {"histograms": _histograms(loss, predicted)}
    if predicted and loss.world.rank == 0:
        owner = torch.from_numpy(held_out.image_of_text)[:MAX_PAIRS_COMPARED]
        image, text = held_out.image[owner], held_out.text[: len(owner)]
        of_pairs = torch.stack([predicted[0][owner], predicted[1][: len(owner)]])
        details |= {
            "rivals": rivals(image, text, owner, of_pairs, loss.config),
            "judged_by": loss.config.kind.objective,
        }
    return scores, details


def _temperature_scores(loss: ContrastiveLoss, predicted: tuple[Tensor, Tensor] | None) -> dict[str, float]:
    """Return mean and standard deviation of τ, of both modalities together and of each. All ranks must call this.

    They are taken over the temperatures predicted for the validation set, or over those stored for all training
    samples. For a single learned temperature only the mean is returned, which is its value.
    """
    if loss.learned is not None:
        return {"tau_mean": float(loss.learned())}
    if predicted is not None:
        sums = torch.stack([_sums(part) for part in predicted])
    elif loss.state is not None and "tau" in loss.state.columns:
        sums = loss.world.sum(torch.stack([_sums(part) for part in loss.state.columns["tau"]]))
    else:
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


def _histograms(loss: ContrastiveLoss, predicted: tuple[Tensor, Tensor] | None) -> dict[str, list[float]]:
    """Return histograms (counts) of τ by modality. All ranks must call this.

    They cover the validation set if TempNets predict τ, or all training samples if the state holds their
    temperatures; otherwise there are none.
    """
    ends = loss.config.tau_min, loss.config.tau_max
    if predicted is not None:
        counts = torch.stack([histogram_of(part, *ends) for part in predicted])
    elif loss.state is not None and "tau" in loss.state.columns:
        counts = torch.stack([histogram_of(part, *ends) for part in loss.state.columns["tau"]])
        counts = loss.world.sum(counts.double())
    else:
        return {}
    return {name: part.tolist() for name, part in zip(("image", "text"), counts, strict=True)}


def one_temperature(config: ContrastiveLossConfig, scores: Mapping[str, float]) -> tuple[Tensor, Tensor] | None:
    """Return the τ of the images and the τ of the texts for a loss whose temperatures are not predicted.

    It is the single temperature of the loss or the mean of the training samples' own temperatures (`tau_mean`); None
    for the temperature-free loss.
    """
    if config.kind.temperature == "free":
        return None
    tau = torch.tensor([scores.get("tau_mean", config.tau)], dtype=torch.float64)
    return tau, tau


def rivals(image: Tensor, text: Tensor, owner: Tensor, tau: Tensor, config: ContrastiveLossConfig) -> dict[str, float]:
    """Compare learned with constant temperatures on B pairs, taken as one batch, separately for images and captions.

    Args:
        image, text: (B, d) embeddings, unit vectors.
        owner: (B,) number of the image of each pair; an image and all its captions form one group.
        tau: (2, B) learned temperatures of the images and of the captions.
        config: the training loss.

    Returns:
        The figures of :func:`tempnet.baselines.compare_with_constants` for the loss of
        :func:`tempnet.contrastive.losses.held_out_losses`, with the prefixes `image/` or `text/`, and `robust/` or
        `cross_entropy/` (the `objective` of the training loss); and `num_pairs`.
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
