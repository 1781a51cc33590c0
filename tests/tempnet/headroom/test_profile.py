"""Test profiles against softmaxes of the logits themselves, in float64, at temperatures between the nodes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tempnet.headroom.profile import NODES, Profiles


def rows(scale: float, *, num_rows: int = 60, vocab_size: int = 300) -> tuple[Tensor, Tensor]:
    """Return logits of a given spread, with rows from flat to nearly certain, and targets drawn from their softmax."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=generator, dtype=torch.float64) * scale
    logits[: num_rows // 4, 7] += 12.0
    return logits, torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def between_the_nodes(num_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    low, high = NODES[0].item(), NODES[-1].item()
    return low + (high - low) * torch.rand(num_rows, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0, 10.0])
def test_the_loss_and_its_score_agree_with_the_logits(scale: float) -> None:
    logits, targets = rows(scale)
    log_beta = between_the_nodes(len(logits)).requires_grad_()
    scores = logits * log_beta.exp().unsqueeze(-1)
    losses = F.cross_entropy(scores, targets, reduction="none")
    (slope,) = torch.autograd.grad(losses.sum(), log_beta)
    probabilities = scores.softmax(-1)
    mean = (probabilities * scores).sum(-1)
    variance = (probabilities * (scores - mean.unsqueeze(-1)).square()).sum(-1)
    profiles = Profiles.of_logits(logits, targets)
    g, v = profiles.score(log_beta.detach())
    torch.testing.assert_close(profiles.cross_entropy(log_beta.detach()), losses.detach(), atol=3e-4, rtol=0.0)
    torch.testing.assert_close(g, -slope, atol=4e-3, rtol=0.0)
    torch.testing.assert_close(v, variance.detach(), atol=5e-2, rtol=1e-2)


def test_nothing_is_interpolated_at_tau_one() -> None:
    logits, targets = rows(2.0)
    profiles = Profiles.of_logits(logits, targets)
    torch.testing.assert_close(profiles.cross_entropy(0.0), F.cross_entropy(logits, targets, reduction="none"))
    assert (profiles.target == 0).equal(logits.argmax(-1) == targets)


def test_the_sum_of_profiles_is_the_profile_of_the_sum_and_has_its_minimum() -> None:
    logits, targets = rows(3.0, num_rows=400)
    total = Profiles.of_logits(logits, targets).sum()

    def loss(log_beta: float) -> float:
        return F.cross_entropy(logits * math.exp(log_beta), targets, reduction="sum").item()

    for log_beta in (-1.2, 0.3, 0.9):
        assert total.cross_entropy(log_beta).item() == pytest.approx(loss(log_beta), abs=0.02)
    found = total.best_constant()
    brute_force = min(torch.linspace(-0.5, 0.5, 401).tolist(), key=loss)
    assert found == pytest.approx(brute_force, abs=0.01)


def test_logits_far_below_the_maximum_and_minus_infinity_are_harmless() -> None:
    logits, targets = rows(1.0, num_rows=4)
    logits[:, 100:200] = -math.inf
    targets[:] = 3
    profiles = Profiles.of_logits(logits.float(), targets)
    assert profiles.values.isfinite().all()
    expected = F.cross_entropy(logits * math.exp(0.4), targets, reduction="none")
    torch.testing.assert_close(profiles.cross_entropy(0.4).double(), expected, atol=3e-4, rtol=0.0)
