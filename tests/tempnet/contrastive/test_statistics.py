"""Statistics of a contrastive step: two halves of a batch add up to the whole, and the figures are those of the values."""

from __future__ import annotations

import pytest
import torch

from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.losses import ContrastiveOutput
from tempnet.contrastive.statistics import PairStatistics

CONFIG = ContrastiveLossConfig(name="tempnet")
TAU_RANGE = (CONFIG.tau_min, CONFIG.tau_max)


def output_of(tau: torch.Tensor, log_u: torch.Tensor | None, gradient: torch.Tensor | None) -> ContrastiveOutput:
    return {"loss": torch.zeros(()), "tau": tau, "log_u": log_u, "dual_gradient": gradient}


def test_halves_add_up_and_figures_are_those_of_the_values() -> None:
    torch.manual_seed(0)
    tau = torch.empty(2, 40).uniform_(*TAU_RANGE)
    tau[0, :4], tau[1, :2] = TAU_RANGE
    log_u, gradient = torch.randn(2, 40), torch.randn(2, 40)
    log_u[0, 3] = -torch.inf  # never had a negative
    whole = PairStatistics.of(output_of(tau, log_u, gradient), CONFIG)
    first, second = (
        PairStatistics.of(output_of(tau[:, part], log_u[:, part], gradient[:, part]), CONFIG)
        for part in (slice(0, 13), slice(13, 40))
    )
    torch.testing.assert_close(first.sums + second.sums, whole.sums)
    summary = whole.summary()
    known = log_u[log_u.isfinite()].double()
    expected = {
        "tau_mean": tau.double().mean(),
        "tau_std": tau.double().std(unbiased=False),
        "tau_mean_image": tau[0].double().mean(),
        "tau_mean_text": tau[1].double().mean(),
        "tau_share_lower_bound": (tau <= 0.001 + 0.01 * 0.049).double().mean(),
        "tau_share_upper_bound": (tau >= 0.05 - 0.01 * 0.049).double().mean(),
        "log_u_mean": known.mean(),
        "log_u_std": known.std(unbiased=False),
        "dual_gradient_mean": gradient.double().mean(),
        "dual_gradient_absolute": gradient.double().abs().mean(),
    }
    for name, value in expected.items():
        assert summary[name] == pytest.approx(float(value), rel=1e-6), name
    for share in (5, 50, 95):
        quantile = tau.double().flatten().quantile(share / 100)
        assert summary[f"tau_q{share:02d}"] == pytest.approx(float(quantile), abs=0.001)


def test_what_a_loss_does_not_have_is_left_out() -> None:
    summary = PairStatistics.of(output_of(torch.full((2, 4), 0.01), None, None), CONFIG).summary()
    assert summary["tau_std"] == pytest.approx(0.0, abs=1e-9)
    assert not {"log_u_mean", "dual_gradient_mean"} & set(summary)


def test_no_figure_speaks_of_a_temperature_where_there_is_none() -> None:
    free = ContrastiveLossConfig.for_name("temperature_free")
    assert PairStatistics.of(output_of(torch.ones(2, 4), None, None), free).summary() == {}
