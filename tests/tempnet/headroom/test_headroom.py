"""The headroom test on data whose answer is known: calibrated predictions, and a temperature that was planted.

Profiles are tested against softmaxes of the logits themselves, in float64, at temperatures between the nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tempnet.headroom.features import FEATURE_SETS, Moments, Tokens
from tempnet.headroom.gains import expected_calibration_error
from tempnet.headroom.profile import NODES, Profiles
from tempnet.headroom.run import CONSTANT, ONE, HeadroomTest, NormalEquations, fit, run_headroom_test
from tempnet.intervals import mean_interval

NUM_TOKENS, NUM_DOCUMENTS, NUM_FOLDS, VOCAB_SIZE, HIDDEN_SIZE = 6000, 60, 5, 50, 6
LEVEL, SLOPE = 0.2, 0.3
"""Planted log β = LEVEL + SLOPE·h₀ for hidden states h that are standard normal."""


@cache
def world(planted: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logits, targets, hidden states and documents; targets are drawn at τ = 1 or at the planted temperature."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator, dtype=torch.float64)
    logits = hidden @ torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator, dtype=torch.float64).T
    log_beta = LEVEL + SLOPE * hidden[:, 0] if planted else torch.zeros(NUM_TOKENS, dtype=torch.float64)
    probabilities = (logits * log_beta.exp().unsqueeze(-1)).softmax(-1)
    targets = torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
    documents = torch.randint(NUM_DOCUMENTS, (NUM_TOKENS,), generator=generator).sort().values
    return logits, targets, hidden, documents


def tokens_of(logits: Tensor, targets: Tensor, hidden: Tensor) -> Tokens:
    top = logits.topk(2).values
    return Tokens(Profiles.of_logits(logits, targets), top[:, 0] - top[:, 1], top[:, 0], hidden)


@cache
def result(planted: bool) -> HeadroomTest:
    logits, targets, hidden, documents = world(planted)

    def batches() -> Iterator[tuple[Tokens, Tensor]]:
        for part in torch.arange(NUM_TOKENS).split(1000):
            yield tokens_of(logits[part], targets[part], hidden[part]), documents[part]

    return run_headroom_test(batches, NUM_DOCUMENTS, num_folds=NUM_FOLDS)


def test_streamed_sums_give_the_dense_solution() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.cat([torch.ones(400, 1), torch.randn(400, 7, generator=generator)], dim=1).double()
    g = torch.randn(400, generator=generator, dtype=torch.float64)
    v = torch.rand(400, generator=generator, dtype=torch.float64)
    equations = NormalEquations.zeros(8)
    for part in torch.arange(400).split(37):
        equations.add(features[part], g[part], v[part])
    # Weighted least squares of g/v with weights v, as one dense problem with rows for the penalty.
    weight = (features * v.unsqueeze(-1).sqrt()).square().sum(0)[1:].mean()
    ridge = torch.diag(torch.full((8,), 0.3, dtype=torch.float64).mul(weight).sqrt())
    ridge[0, 0] = 0.0
    matrix = torch.cat([features * v.sqrt().unsqueeze(-1), ridge])
    wanted = torch.cat([g / v.sqrt(), torch.zeros(8, dtype=torch.float64)])
    dense = torch.linalg.lstsq(matrix, wanted.unsqueeze(-1)).solution.squeeze(-1)
    theta = equations.solve(0.3)
    torch.testing.assert_close(theta, dense, rtol=1e-6, atol=1e-8)
    delta = features @ theta
    assert equations.gain(theta) == pytest.approx((g * delta - 0.5 * v * delta.square()).sum().item())


def test_coefficients_are_fitted_without_their_fold() -> None:
    logits, targets, hidden, documents = world(planted=True)
    changed = targets.clone()
    changed[documents % NUM_FOLDS == 2] = 0
    coefficients = []
    for wanted in (targets, changed):
        tokens, folds = tokens_of(logits, wanted, hidden), documents % NUM_FOLDS
        moments = Moments(0.1)
        moments.add(tokens)
        design = moments.design()
        features, (g, v) = design.features(tokens), tokens.profiles.score(0.1)
        equations = [NormalEquations.zeros(features.shape[1]) for _ in range(NUM_FOLDS)]
        for fold, part in enumerate(equations):
            part.add(features[folds == fold], g[folds == fold], v[folds == fold])
        coefficients.append(fit(equations, design.columns("hidden")).theta)
    theta, theta_changed = coefficients
    assert theta[2].equal(theta_changed[2])
    assert not theta[1].allclose(theta_changed[1])


def test_calibrated_predictions_have_no_headroom() -> None:
    test = result(planted=False)
    assert test.tau == pytest.approx(1.0, abs=0.05)
    for name in FEATURE_SETS:
        gain = test.sums.gain(name, CONSTANT)
        assert abs(gain.mean) <= max(2 * gain.half_width, 3e-4), name


def test_a_planted_temperature_is_found_and_its_gain_is_the_true_one() -> None:
    logits, targets, hidden, _ = world(planted=True)
    sums = result(planted=True).sums
    true = (logits * (LEVEL + SLOPE * hidden[:, 0]).exp().unsqueeze(-1), targets)
    constant = logits / result(planted=True).tau
    available = (F.cross_entropy(constant, targets) - F.cross_entropy(*true)).item()
    for name in ("hidden", "both"):
        gain = sums.gain(name, CONSTANT)
        assert gain.low > 0
        assert gain.mean == pytest.approx(available, rel=0.15), name
        assert sums.gain(f"{name}/mean", CONSTANT).mean < 0.1 * gain.mean
        assert sums.gain(f"{name}/shuffled", CONSTANT).mean < 0
    assert sums.mean_tau("hidden") == pytest.approx((-LEVEL - SLOPE * hidden[:, 0]).exp().mean().item(), rel=0.05)


def test_gains_are_those_of_the_logits_and_their_interval_is_that_of_rivals() -> None:
    logits, targets, _, documents = world(planted=True)
    sums = result(planted=True).sums
    sums.add_constant("some", 0.7)
    values = F.cross_entropy(logits, targets, reduction="none") - F.cross_entropy(
        logits / 0.7, targets, reduction="none"
    )
    gain = sums.gain("some", ONE)
    assert gain.mean == pytest.approx(values.mean().item(), abs=1e-5)
    assert gain.half_width == pytest.approx(mean_interval(values, documents).half_width, rel=1e-3)


def test_the_calibration_error_is_that_of_a_loop_over_tokens() -> None:
    logits, targets, _, _ = world(planted=True)
    confidence, predicted = logits.softmax(-1).max(-1)
    error = 0.0
    for low in torch.linspace(0, 1, 16)[:-1].tolist():
        inside = (confidence >= low) & (confidence < low + 1 / 15)
        if inside.any():
            accuracy = (predicted == targets)[inside].double().mean()
            error += inside.double().mean().item() * abs(accuracy - confidence[inside].mean()).item()
    sums = result(planted=True).sums
    assert sums.calibration_error(ONE).mean == pytest.approx(error, abs=1e-4)
    assert expected_calibration_error(sums.bins[ONE].sum(0)).item() == pytest.approx(error, abs=1e-4)
    assert sums.calibration_gain("hidden", ONE).low > 0


def rows(scale: float, *, num_rows: int = 60) -> tuple[Tensor, Tensor]:
    """Return logits of a given spread, with rows from flat to nearly certain, and targets drawn from their softmax."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, 300, generator=generator, dtype=torch.float64) * scale
    logits[: num_rows // 4, 7] += 12.0
    return logits, torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


@pytest.mark.parametrize("scale", [0.1, 3.0, 10.0])
def test_the_loss_and_its_score_agree_with_the_logits(scale: float) -> None:
    logits, targets = rows(scale)
    low, high = NODES[0].item(), NODES[-1].item()
    log_beta = low + (high - low) * torch.rand(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    log_beta.requires_grad_()
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
    # Nothing is interpolated at τ = 1.
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
    brute_force = min(torch.linspace(-0.2, 0.2, 161).tolist(), key=loss)
    assert found == pytest.approx(brute_force, abs=0.01)


def test_logits_far_below_the_maximum_and_minus_infinity_are_harmless() -> None:
    logits, targets = rows(1.0, num_rows=4)
    logits[:, 100:200] = -math.inf
    targets[:] = 3
    profiles = Profiles.of_logits(logits.float(), targets)
    assert profiles.values.isfinite().all()
    expected = F.cross_entropy(logits * math.exp(0.4), targets, reduction="none")
    torch.testing.assert_close(profiles.cross_entropy(0.4).double(), expected, atol=3e-4, rtol=0.0)
