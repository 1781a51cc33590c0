"""The loss of held-out pairs against the formula, written down row by row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.held_out import held_out_losses

# There are five images with one to three captions each.
IMAGE_IDS = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4])
RHO = 1.2


def expected(cosines: Tensor, tau: Tensor, name: str) -> list[float]:
    found = []
    for i, row in enumerate(cosines):
        h = [(row[j] - row[i]).item() / tau[i].item() for j in range(len(row)) if IMAGE_IDS[j] != IMAGE_IDS[i]]
        total = sum(math.exp(value) for value in h)
        if name == "tempnet":
            found.append(tau[i].item() * (math.log(total / len(h)) + RHO))
        else:
            found.append(math.log1p(total))
    return found


@pytest.mark.parametrize("name", ["tempnet", "tempnet_in_batch"])
@pytest.mark.parametrize("tile_size", [3, None])
def test_every_anchor_costs_what_the_formula_says(name: str, tile_size: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    images = normalize(torch.randn(5, 6, generator=generator, dtype=torch.float64), dim=-1)[IMAGE_IDS]
    texts = normalize(torch.randn(len(IMAGE_IDS), 6, generator=generator, dtype=torch.float64), dim=-1)
    tau = 0.05 + torch.rand(2, len(IMAGE_IDS), generator=generator, dtype=torch.float64)
    config = ContrastiveLossConfig.for_name(name, rho=RHO, tile_size=tile_size)
    found = held_out_losses(images, texts, IMAGE_IDS, config)(tau)
    cosines = images @ texts.T
    assert found[0].tolist() == pytest.approx(expected(cosines, tau[0], name))
    assert found[1].tolist() == pytest.approx(expected(cosines.T, tau[1], name))
