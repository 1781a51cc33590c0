"""The logged statistics against direct computation, and their additivity."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import spearmanr

from tempnet import optimal_temperature, robust_loss
from tempnet.statistics import TemperatureStatistics, TokenValues, spearman, token_statistics

RHO = 1.5


def sample(num_tokens: int = 500, vocabulary: int = 60) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(num_tokens, vocabulary, generator=generator)
    targets = torch.randint(vocabulary, (num_tokens,), generator=generator)
    tau = 0.001 + 1.999 * torch.rand(num_tokens, generator=generator)
    return logits, targets, tau


def statistics_of(logits: torch.Tensor, targets: torch.Tensor, tau: torch.Tensor) -> TemperatureStatistics:
    values = TokenValues.from_logits(logits, targets, tau)
    oracle_logits = logits[targets != -100]
    return token_statistics(
        values,
        targets,
        tau,
        vocab_size=logits.shape[-1],
        rho=RHO,
        tau_min=0.001,
        tau_max=2.0,
        oracle_logits=oracle_logits,
    )


def test_summary_equals_direct_computation() -> None:
    logits, targets, tau = sample()
    targets[:17] = -100
    summary = statistics_of(logits, targets, tau).summary()
    logits, targets, tau = logits[17:].double(), targets[17:], tau[17:].double()
    cross_entropy = torch.nn.functional.cross_entropy
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


def test_sums_add_up_over_micro_batches() -> None:
    logits, targets, tau = sample()
    whole = statistics_of(logits, targets, tau).summary()
    parts = TemperatureStatistics.zeros(0.001, 2.0)
    for part in (slice(0, 123), slice(123, 400), slice(400, 500)):
        parts.sums += statistics_of(logits[part], targets[part], tau[part]).sums
    for name, value in parts.summary().items():
        if name != "tau_entropy_spearman":  # a mean over micro-batches by definition
            assert value == pytest.approx(whole[name], rel=1e-6), name


def test_no_valid_token_and_constant_temperature() -> None:
    logits, targets, tau = sample()
    empty = statistics_of(logits, torch.full_like(targets, -100), tau)
    assert empty.sums.sum() == 0
    assert math.isnan(empty.summary()["tau_mean"])
    constant = statistics_of(logits, targets, torch.full_like(tau, 1.0)).summary()
    assert constant["tau_entropy_spearman"] == 0.0
    assert constant["tau_std"] == pytest.approx(0.0, abs=1e-6)


def test_spearman_equals_scipy_with_ties() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(0, 6, (2, 200), generator=generator).float()
    assert spearman(x, y + x).item() == pytest.approx(spearmanr(x, y + x).statistic, rel=1e-9)
