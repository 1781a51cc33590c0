"""Predicted temperatures beside constants: against dense scans, known temperatures and textbook intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import t as student
from torch import Tensor
from torch.nn.functional import cross_entropy

from tempnet.dro import robust_loss
from tempnet.oracle import best_constant_temperature, optimal_temperature
from tempnet.rivals import compare_with_constants, half_width

NUM_ROWS, NUM_TOKENS, RHO, TAU_MIN, TAU_MAX = 400, 64, 1.8, 0.001, 2.0
BLOCKS = torch.arange(NUM_ROWS) // 10


def rows() -> tuple[Tensor, Tensor]:
    """Return float64 logits of very different spread, and a target for each row."""
    generator = torch.Generator().manual_seed(4)
    spread = 0.5 + 4 * torch.rand(NUM_ROWS, 1, generator=generator, dtype=torch.float64)
    logits = spread * torch.randn(NUM_ROWS, NUM_TOKENS, generator=generator, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def compare(tau: Tensor, *, robust: bool = True) -> dict[str, float]:
    logits, targets = rows()

    def losses(temperature: Tensor) -> Tensor:
        if robust:
            return robust_loss(logits, targets, temperature, RHO)
        return cross_entropy(logits / temperature[:, None], targets, reduction="none")

    return compare_with_constants(losses, tau, BLOCKS, tau_min=TAU_MIN, tau_max=TAU_MAX)


def test_the_best_constant_of_the_robust_loss_is_the_root_of_its_derivative() -> None:
    logits, targets = rows()
    expected = best_constant_temperature(logits, RHO)
    found = compare(torch.ones(NUM_ROWS, dtype=torch.float64))
    assert found["best_constant_tau"] == pytest.approx(expected, rel=2e-3)
    least = robust_loss(logits, targets, expected, RHO).mean().item()
    assert found["best_constant_loss"] == pytest.approx(least, abs=1e-6)


def test_the_best_constant_of_the_cross_entropy_equals_a_scan() -> None:
    logits, targets = rows()
    scan = [cross_entropy(logits / tau, targets).item() for tau in torch.logspace(-1, math.log10(TAU_MAX), 2000)]
    found = compare(torch.ones(NUM_ROWS, dtype=torch.float64), robust=False)
    assert found["best_constant_loss"] == pytest.approx(min(scan), abs=1e-6)


@pytest.mark.parametrize(("rho", "expected"), [(0.0, TAU_MAX), (math.log(NUM_TOKENS) - 1e-9, TAU_MIN)])
def test_a_best_constant_at_an_end_is_found(rho: float, expected: float) -> None:
    logits, targets = rows()
    found = compare_with_constants(
        lambda tau: robust_loss(logits, targets, tau, rho), torch.ones(NUM_ROWS, dtype=torch.float64), BLOCKS,
        tau_min=TAU_MIN, tau_max=TAU_MAX,
    )  # fmt: skip
    assert found["best_constant_tau"] == pytest.approx(expected)


def test_the_right_spread_beats_both_constants_and_the_wrong_one_neither() -> None:
    logits, _ = rows()
    oracle = optimal_temperature(logits, RHO, TAU_MIN, TAU_MAX)
    mean = oracle.mean()
    mirrored = (2 * mean - oracle).clamp(min=0.05)
    right, wrong = compare(oracle), compare(mirrored)
    for constant in ("best_constant", "mean_shift"):
        assert right[f"{constant}_gain"] > right[f"{constant}_gain_half_width"]
        assert wrong[f"{constant}_gain"] < -wrong[f"{constant}_gain_half_width"]
    assert wrong["mean_shift_tau"] == pytest.approx(mirrored.mean().item())
    # The level alone is no rival that is beaten by being constant.
    level = compare(torch.full_like(oracle, float(mean)))
    assert level["mean_shift_gain"] == pytest.approx(0.0, abs=1e-12)
    assert level["best_constant_gain"] <= 1e-9


def test_half_width_is_the_textbook_interval_and_copies_within_a_group_add_nothing() -> None:
    values = np.random.default_rng(0).normal(size=30)
    expected = student.ppf(0.975, 29) * values.std(ddof=1) / math.sqrt(30)
    each = torch.arange(30)
    assert half_width(torch.from_numpy(values), each) == pytest.approx(expected)
    copied = torch.from_numpy(values).repeat_interleave(7).view(2, -1)
    assert half_width(copied, each.repeat_interleave(7).view(2, -1)) == pytest.approx(expected)
    assert math.isnan(half_width(torch.from_numpy(values), torch.zeros(30)))
