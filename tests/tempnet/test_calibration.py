"""Calibration of ρ against SciPy on the same logits, and of τ_max against the network itself."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from scipy.optimize import brentq, minimize_scalar

from tempnet import TempNet, TempNetConfig, robust_loss
from tempnet.calibration import CalibrationError, Share, calibrate_rho, share_of_range, tau_max_for_mean

VOCABULARY = 40


def sample() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    spread = 0.5 + 3 * torch.rand(60, 1, generator=generator)
    return spread * torch.randn(60, VOCABULARY, generator=generator)


def parts(logits: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from logits.split(17)


def mean_by_scipy(logits: torch.Tensor, rho: float) -> float:
    """Return the mean of argmin f over [0.001, 2], where SciPy minimises each row in float64."""
    target = torch.zeros(1, dtype=torch.int64)

    def loss(row: torch.Tensor, log_tau: float) -> float:
        return robust_loss(row[None].double(), target, math.exp(log_tau), rho).item()

    found = [
        minimize_scalar(lambda x, row=row: loss(row, x), bounds=(math.log(0.001), math.log(2.0)), method="bounded")
        for row in logits
    ]
    return sum(math.exp(result.x) for result in found) / len(found)


@pytest.mark.parametrize("tau", [0.5, 0.85, 1.6])
def test_the_calibrated_rho_is_the_root_that_scipy_finds(tau: float) -> None:
    logits = sample()
    found = calibrate_rho(lambda: parts(logits), VOCABULARY, tau=tau)
    assert found.tau_mean == pytest.approx(tau, abs=1e-3)
    assert found.num_contexts == 60
    assert found.target_entropy == pytest.approx(math.log(VOCABULARY) - found.rho)
    few = logits[:12]
    expected = brentq(lambda rho: mean_by_scipy(few, rho) - tau, 0.02, 0.99 * math.log(VOCABULARY), xtol=1e-3)
    assert calibrate_rho(lambda: parts(few), VOCABULARY, tau=tau).rho == pytest.approx(expected, abs=0.02)
    assert list(found.curve.tau_mean) == sorted(found.curve.tau_mean, reverse=True)


def test_a_mean_that_no_rho_has_is_refused_with_the_range() -> None:
    logits = sample()
    with pytest.raises(CalibrationError, match=r"no rho brings the mean temperature of this model to 1\.9999"):
        calibrate_rho(lambda: parts(logits), VOCABULARY, tau=1.9999)


def test_tau_max_for_given_contexts_is_exact() -> None:
    logits = sample()
    torch.manual_seed(0)
    network = TempNet(TempNetConfig.for_logits(VOCABULARY, rho=1.0)).eval()
    for wanted in (0.7, 0.4, 1.7):
        share = Share.of([share_of_range(network(logits), network.config)])
        network.set_tau_max_eval(tau_max_for_mean(network.config, share.mean, wanted=wanted))
        assert network(logits).mean().item() == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(CalibrationError, match="not above tau_min"):
        tau_max_for_mean(network.config, 0.5, wanted=0.0005)


def test_the_standard_error_of_a_share_covers_the_truth() -> None:
    """Texts have unequal lengths and levels; about 95 % of the means lie within 1.96 standard errors."""
    generator = torch.Generator().manual_seed(1)
    num_covered = 0
    for _ in range(400):
        levels = 0.3 + 0.1 * torch.randn(60, generator=generator)
        lengths = torch.randint(5, 40, (60,), generator=generator).tolist()
        found = Share.of([level.repeat(length) for level, length in zip(levels, lengths, strict=True)])
        num_covered += abs(found.mean - 0.3) < 1.96 * found.standard_error
    assert 0.91 < num_covered / 400 < 0.98
