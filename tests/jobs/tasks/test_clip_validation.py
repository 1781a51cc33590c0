"""Tests that held-out pairs are scored at the model's own temperature, whichever loss it was trained with."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from jobs.tasks.dual_encoder.scores import one_temperature
from jobs.tasks.dual_encoder.validation import HeldOut
from tempnet.contrastive.config import LOSS_KINDS, ContrastiveLossConfig


@pytest.mark.parametrize("name", [name for name, kind in LOSS_KINDS.items() if kind.temperature != "tempnet"])
def test_every_loss_has_a_cross_entropy_at_its_own_temperature(name: str) -> None:
    config = ContrastiveLossConfig.for_name(name)
    has_own = config.kind.temperature in ("learned", "per_sample", "given")
    scores = {"tau_mean": 0.03} if has_own else {}
    tau = 0.03 if has_own else config.tau
    rng = torch.Generator().manual_seed(0)
    image, text = (F.normalize(torch.randn(20, 8, generator=rng, dtype=torch.float64), dim=-1) for _ in range(2))
    cosines = image @ text.T
    logits = torch.log((1 + cosines) / (1 - cosines)) if config.kind.temperature == "free" else cosines / tau
    target = torch.arange(20)
    expected = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    held_out = HeldOut(image=image, text=text, image_of_text=target.numpy())
    found = held_out.scores(one_temperature(config, scores))
    assert found["cross_entropy_tau"] == pytest.approx(float(expected), rel=1e-9)
