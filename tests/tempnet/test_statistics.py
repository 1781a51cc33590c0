"""Logged statistics, rank correlations and rival constants against direct computation, scans and textbook intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from scipy.stats import t as student
from torch import Tensor
from torch.nn.functional import cross_entropy

from tempnet import best_constant_temperature, optimal_temperature, robust_loss
from tempnet.baselines import compare_with_constants
from tempnet.intervals import mean_interval, spearman_interval
from tempnet.statistics import TemperatureStatistics, TokenValues, spearman, token_statistics

RHO, TAU_MIN, TAU_MAX = 1.5, 0.001, 2.0


def sample() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(500, 60, generator=generator)
    targets = torch.randint(60, (500,), generator=generator)
    return logits, targets, TAU_MIN + (TAU_MAX - TAU_MIN) * torch.rand(500, generator=generator)


def statistics_of(logits: Tensor, targets: Tensor, tau: Tensor) -> TemperatureStatistics:
    return token_statistics(
        TokenValues.from_logits(logits, targets, tau), targets, tau, vocab_size=60, rho=RHO, tau_min=TAU_MIN,
        tau_max=TAU_MAX, oracle_rows=targets != -100, oracle_logits=logits[targets != -100],
    )  # fmt: skip


def test_summary_equals_direct_computation() -> None:
    logits, targets, tau = sample()
    targets[:17] = -100
    summary = statistics_of(logits, targets, tau).summary()
    logits, targets, tau = logits[17:].double(), targets[17:], tau[17:].double()
    log_p = torch.log_softmax(logits, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    losses = robust_loss(logits, targets, tau, RHO)
    best = robust_loss(logits, targets, optimal_temperature(logits, RHO), RHO)
    expected = {
        "cross_entropy": cross_entropy(logits, targets),
        "cross_entropy_tau": cross_entropy(logits / tau[:, None], targets),
        "entropy": entropy.mean(),
        "robust_loss": losses.mean(),
        "tau_mean": tau.mean(),
        "tau_std": tau.std(unbiased=False),
        "regret": (losses - best).mean(),
        "tau_entropy_spearman": spearmanr(tau, entropy).statistic,
        "tau_share_lower_bound": (tau <= 0.001 + 0.01 * 1.999).double().mean(),
        "tau_share_upper_bound": (tau >= 2.0 - 0.01 * 1.999).double().mean(),
    }
    for name, value in expected.items():
        assert summary[name] == pytest.approx(float(value), rel=1e-4, abs=1e-6), name
    for name, share in (("tau_q05", 0.05), ("tau_q50", 0.5), ("tau_q95", 0.95)):
        assert summary[name] == pytest.approx(tau.quantile(share).item(), abs=0.02), name


def test_sums_add_up_over_micro_batches_and_extremes_are_no_errors() -> None:
    logits, targets, tau = sample()
    whole = statistics_of(logits, targets, tau).summary()
    parts = TemperatureStatistics.zeros(TAU_MIN, TAU_MAX)
    for part in (slice(0, 123), slice(123, 400), slice(400, 500)):
        parts.sums += statistics_of(logits[part], targets[part], tau[part]).sums
    for name, value in parts.summary().items():
        if name != "tau_entropy_spearman":  # a mean over micro-batches by definition
            assert value == pytest.approx(whole[name], rel=1e-6), name
    empty = statistics_of(logits, torch.full_like(targets, -100), tau)
    assert empty.sums.sum() == 0
    assert math.isnan(empty.summary()["tau_mean"])
    constant = statistics_of(logits, targets, torch.full_like(tau, 1.0)).summary()
    assert constant["tau_entropy_spearman"] == 0.0
    assert constant["tau_std"] == pytest.approx(0.0, abs=1e-6)


def test_rank_correlations_are_scipys_and_their_intervals_hold_the_true_one_in_95_of_100_samples() -> None:
    x, y = torch.randint(0, 6, (2, 200), generator=torch.Generator().manual_seed(1)).float()
    assert spearman(x, y + x).item() == pytest.approx(spearmanr(x, y + x).statistic, rel=1e-9)  # with ties
    rng, covered = np.random.default_rng(0), []
    population = np.array([[1.0, 0.6], [0.6, 1.0]])
    true = 6 / np.pi * np.arcsin(0.6 / 2)  # Spearman's correlation of a normal distribution
    for _ in range(300):
        x, y = torch.from_numpy(rng.multivariate_normal([0, 0], population, size=80).T.copy())
        r, half = spearman_interval(x, y)
        assert r == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
        covered.append(abs(r - true) <= half)
    assert 0.93 <= np.mean(covered) <= 0.99
    r, half = spearman_interval(torch.arange(9.0), torch.arange(9.0))
    assert r == pytest.approx(1.0)
    assert 0 <= half < 1e-3
    assert spearman_interval(torch.ones(9), torch.arange(9.0))[0] == 0.0
    with pytest.raises(ValueError, match="needs 4 values, not 3"):
        spearman_interval(torch.arange(3.0), torch.arange(3.0))


NUM_ROWS = 400


def rows() -> tuple[Tensor, Tensor]:
    """Return float64 logits of very different spread, and a target for each row."""
    generator = torch.Generator().manual_seed(4)
    spread = 0.5 + 4 * torch.rand(NUM_ROWS, 1, generator=generator, dtype=torch.float64)
    logits = spread * torch.randn(NUM_ROWS, 64, generator=generator, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def compare(tau: Tensor, *, rho: float | None = 1.8) -> dict[str, float]:
    """Compare temperatures with constants by the robust loss, or without ρ by the cross-entropy."""
    logits, targets = rows()

    def losses(temperature: Tensor) -> Tensor:
        if rho is not None:
            return robust_loss(logits, targets, temperature, rho)
        return cross_entropy(logits / temperature[:, None], targets, reduction="none")

    return compare_with_constants(losses, tau, torch.arange(NUM_ROWS) // 10, tau_min=TAU_MIN, tau_max=TAU_MAX)


def test_the_best_constant_is_that_of_the_oracle_or_of_a_scan_and_may_lie_at_an_end() -> None:
    logits, targets = rows()
    ones = torch.ones(NUM_ROWS, dtype=torch.float64)
    expected = best_constant_temperature(logits, 1.8)
    found = compare(ones)
    assert found["best_constant_tau"] == pytest.approx(expected, rel=2e-3)
    least = robust_loss(logits, targets, expected, 1.8).mean().item()
    assert found["best_constant_loss"] == pytest.approx(least, abs=1e-6)
    scan = [cross_entropy(logits / tau, targets).item() for tau in torch.logspace(-0.2, 0.2, 400)]
    assert compare(ones, rho=None)["best_constant_loss"] == pytest.approx(min(scan), abs=1e-6)
    for rho, end in ((0.0, TAU_MAX), (math.log(64) - 1e-9, TAU_MIN)):
        assert compare(ones, rho=rho)["best_constant_tau"] == pytest.approx(end)


def test_half_width_is_the_textbook_interval_and_copies_within_a_group_add_nothing() -> None:
    values = np.random.default_rng(0).normal(size=30)
    expected = student.ppf(0.975, 29) * values.std(ddof=1) / math.sqrt(30)
    each = torch.arange(30)
    plain = mean_interval(torch.from_numpy(values))
    assert plain == pytest.approx((values.mean(), expected))
    assert mean_interval(torch.from_numpy(values), each) == pytest.approx(plain)
    copied = torch.from_numpy(values).repeat_interleave(7).view(2, -1)
    assert mean_interval(copied, each.repeat_interleave(7).view(2, -1)) == pytest.approx(plain)
    assert math.isnan(mean_interval(torch.from_numpy(values), torch.zeros(30)).half_width)
