"""The robust loss, its derivatives, the oracle and calibration against float64 autograd, SciPy and the papers' identities."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from scipy.optimize import brentq, minimize_scalar

from tempnet import TempNet, TempNetConfig
from tempnet.calibration import CalibrationError, Share, calibrate_rho, share_of_range, tau_max_for_mean
from tempnet.dro import robust_loss, temperature_derivatives
from tempnet.oracle import best_constant_temperature, optimal_temperature, temperature_curve
from tempnet.rho import check_rho, rho_from_target_entropy, target_entropy_from_rho

TAU_MIN, TAU_MAX = 0.001, 2.0


def formula(logits: torch.Tensor, targets: torch.Tensor, tau: torch.Tensor, rho: float) -> torch.Tensor:
    """Return the robust loss as the formula reads, without care for range, for float64 and moderate logits."""
    positive = logits.gather(-1, targets[:, None])
    mean = torch.exp((logits - positive) / tau[:, None]).mean(-1)
    return tau * torch.log(mean) + tau * rho


def entropy(logits: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
    log_p = torch.log_softmax(logits.double() / tau.double()[:, None], -1)
    return -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("num_contrasts", [2, 301])
def test_loss_and_gradients_equal_the_formula(dtype: torch.dtype, tolerance: float, num_contrasts: int) -> None:
    generator = torch.Generator().manual_seed(num_contrasts)
    logits = 3 * torch.randn(40, num_contrasts, generator=generator, dtype=torch.float64)
    targets = torch.randint(num_contrasts, (40,), generator=generator)
    tau = 0.2 + 1.5 * torch.rand(40, generator=generator, dtype=torch.float64)
    rho = 0.4 * math.log(num_contrasts)
    expected_inputs = [logits.clone().requires_grad_(), tau.clone().requires_grad_()]
    expected = formula(expected_inputs[0], targets, expected_inputs[1], rho)
    expected_gradients = torch.autograd.grad(expected.sum(), expected_inputs)
    inputs = [logits.to(dtype).requires_grad_(), tau.to(dtype).requires_grad_()]
    loss = robust_loss(inputs[0], targets, inputs[1], rho)
    gradients = torch.autograd.grad(loss.sum(), inputs)
    assert loss.dtype == dtype
    for value, reference in zip((loss, *gradients), (expected, *expected_gradients), strict=True):
        assert ((value.double() - reference).norm() / reference.norm()).item() < tolerance
    first, second = temperature_derivatives(logits, tau, rho)
    torch.testing.assert_close(first, expected_gradients[1], rtol=1e-10, atol=1e-12)
    once = torch.autograd.grad(
        formula(logits, targets, expected_inputs[1], rho).sum(), expected_inputs[1], create_graph=True
    )
    twice = torch.autograd.grad(once[0].sum(), expected_inputs[1])
    torch.testing.assert_close(second, twice[0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_loss_is_finite_and_shift_invariant_at_the_lowest_temperature(scale: float) -> None:
    logits = scale * torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(20)
    tau = torch.full((20,), TAU_MIN, requires_grad=True)
    loss = robust_loss(logits, targets, tau, 1.0)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(tau.grad).all()
    shifted = robust_loss(logits.double() + 123.0, targets, tau.double(), 1.0)
    torch.testing.assert_close(shifted, robust_loss(logits.double(), targets, tau.double(), 1.0), rtol=1e-9, atol=1e-9)


def adversarial_rows(num_rows: int, num_contrasts: int, generator: torch.Generator) -> torch.Tensor:
    """Draw rows of many scales, and shapes that break solvers: flat, one-hot, ties, huge, alternating."""
    rows = torch.randn(num_rows, num_contrasts, generator=generator)
    rows *= torch.logspace(-4, 4, num_rows)[torch.randperm(num_rows, generator=generator), None]
    rows[0] = 0.0
    rows[1] = 1e4
    rows[2] = -1e4
    rows[3] = torch.nn.functional.one_hot(torch.tensor(0), num_contrasts) * 1e4
    rows[4] = torch.nn.functional.one_hot(torch.tensor(num_contrasts - 1), num_contrasts) * 1e-4
    rows[5] = torch.where(torch.arange(num_contrasts) % 2 == 0, 1e4, -1e4)
    rows[6] = torch.linspace(-1e4, 1e4, num_contrasts)
    rows[7] = torch.where(torch.arange(num_contrasts) < num_contrasts // 2, 3.0, 0.0)
    return rows


@pytest.mark.parametrize(
    ("num_rows", "num_contrasts", "share"),
    [(4000, 2, 0.05), (4000, 2, 0.95), (2000, 5, 0.5), (1000, 128, 0.05), (300, 2048, 0.95), (20, 50304, 0.5)],
    ids=str,
)
def test_oracle_meets_the_optimality_conditions(num_rows: int, num_contrasts: int, share: float) -> None:
    rho = share * math.log(num_contrasts)
    logits = adversarial_rows(num_rows, num_contrasts, torch.Generator().manual_seed(num_contrasts))
    tau = optimal_temperature(logits, rho, TAU_MIN, TAU_MAX)
    assert not tau.isnan().any()
    assert bool(((tau >= TAU_MIN) & (tau <= TAU_MAX)).all())
    residual = entropy(logits, tau) - math.log(num_contrasts) + rho
    is_inside = (tau > TAU_MIN) & (tau < TAU_MAX)
    assert is_inside.any()
    assert residual[is_inside].abs().max().item() <= 1e-4
    assert bool((residual[tau == TAU_MIN] >= -1e-5).all())
    assert bool((residual[tau == TAU_MAX] <= 1e-5).all())


def test_best_constant_temperature_equals_a_scan() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(300, 64, generator=generator) * (0.5 + 4 * torch.rand(300, 1, generator=generator))
    targets = torch.randint(64, (300,), generator=generator)
    rho = 1.8
    taus = torch.logspace(-0.5, math.log10(TAU_MAX), 600)
    losses = [robust_loss(logits, targets, float(tau), rho).mean().item() for tau in taus]
    best = best_constant_temperature(logits, rho)
    assert robust_loss(logits, targets, best, rho).mean().item() <= min(losses) + 1e-6
    assert best == pytest.approx(taus[losses.index(min(losses))].item(), rel=0.01)
    assert best_constant_temperature(torch.zeros(5, 64), rho) == TAU_MIN
    assert best_constant_temperature(100 * torch.eye(64), rho) == TAU_MAX


def test_rho_and_entropy_are_inverse_and_refused_when_impossible() -> None:
    assert rho_from_target_entropy(4.5, 2048) == pytest.approx(math.log(2048) - 4.5)
    assert target_entropy_from_rho(rho_from_target_entropy(2.0, 99), 99) == pytest.approx(2.0)
    check_rho(0.0, 2)
    for rho in (10.0, math.log(2048), -0.1, math.nan):
        with pytest.raises(ValueError, match=r"rho = .* is outside \[0, log K\).*target_entropy"):
            check_rho(rho, 2048)
    with pytest.raises(ValueError, match="rho = 10"):
        optimal_temperature(torch.zeros(1, 8000), 10.0)
    with pytest.raises(ValueError, match="target_entropy = 9 nats is impossible"):
        rho_from_target_entropy(9.0, 2048)
    with pytest.raises(ValueError, match="not an interval"):
        optimal_temperature(torch.zeros(1, 8), 1.0, 2.0, 1.0)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1.0), (torch.float32, 1e3), (torch.float64, 1e-2)], ids=str
)
def test_a_logit_of_minus_infinity_is_no_contrast(dtype: torch.dtype, scale: float) -> None:
    """All results equal those of the rows without the −inf entries, of which every row has equally many."""
    generator = torch.Generator().manual_seed(0)
    num_rows, num_kept, num_all, rho = 60, 31, 47, 1.2
    kept = (scale * torch.randn(num_rows, num_kept, generator=generator, dtype=torch.float64)).to(dtype)
    places = torch.stack([torch.randperm(num_all, generator=generator)[:num_kept].sort().values for _ in kept])
    rows = torch.full((num_rows, num_all), -math.inf, dtype=dtype).scatter(-1, places, kept)
    tolerances = {"rtol": 1e-4 if dtype == torch.float32 else 1e-9, "atol": 1e-6}
    tau = optimal_temperature(rows, rho, TAU_MIN, TAU_MAX)
    torch.testing.assert_close(tau, optimal_temperature(kept, rho, TAU_MIN, TAU_MAX), **tolerances)
    assert best_constant_temperature(rows, rho) == pytest.approx(best_constant_temperature(kept, rho), rel=1e-4)
    curve, expected_curve = (temperature_curve(value, [rho], TAU_MIN, TAU_MAX) for value in (rows, kept))
    assert curve.tau_mean == pytest.approx(expected_curve.tau_mean, rel=1e-4)
    assert curve.target_entropy == pytest.approx(expected_curve.target_entropy)
    targets = torch.randint(num_kept, (num_rows,), generator=generator)
    results = []
    for logits, of_logits in ((rows, places.gather(-1, targets[:, None]).squeeze(-1)), (kept, targets)):
        leaves = [logits.clone().requires_grad_(), torch.full((num_rows,), 0.3, dtype=dtype).requires_grad_()]
        loss = robust_loss(leaves[0], of_logits, leaves[1], rho)
        gradient, slope = torch.autograd.grad(loss.sum(), leaves)
        first, second = temperature_derivatives(logits, 0.3, rho)
        gradient = gradient.gather(-1, places) if logits is rows else gradient
        results.append([loss, gradient, slope, first, second])
    for value, reference in zip(*results, strict=True):
        torch.testing.assert_close(value, reference, **tolerances)
    impossible = robust_loss(rows, rows.argmin(-1), 0.3, rho)
    assert bool((impossible == math.inf).all())


def test_rows_may_have_different_numbers_of_contrasts() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 40, generator=generator, dtype=torch.float64)
    alone = []
    for index, row in enumerate(rows):
        row[40 - 3 * index :] = -math.inf
        alone.append(optimal_temperature(row[: 40 - 3 * index], 0.5))
    torch.testing.assert_close(optimal_temperature(rows.view(2, 4, 40), 0.5).flatten(), torch.stack(alone))
    rows[3, 2:] = -math.inf
    with pytest.raises(ValueError, match=r"rho = 0\.9 is outside .* for K = 2 contrasts"):
        optimal_temperature(rows, 0.9)


@pytest.mark.parametrize(
    ("value", "message"), [(math.nan, "holds NaN"), (math.inf, r"holds \+inf"), (None, "holds nothing but −inf")]
)
def test_a_row_that_no_temperature_is_optimal_for_is_named(
    value: float | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.randn(9, 5)
    rows[7] = -math.inf
    if value is not None:
        rows[7] = torch.tensor([0.0, 1.0, value, 2.0, -math.inf])
    monkeypatch.setattr("tempnet.oracle._MAX_LOGITS_PER_SLICE", 15)
    with pytest.raises(ValueError, match=rf"row 7 of the logits {message}"):
        optimal_temperature(rows, 0.5)
    with pytest.raises(ValueError, match=rf"row 7 of the logits {message}"):
        best_constant_temperature(rows, 0.5)


K = 40


def sample_logits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    spread = 0.5 + 3 * torch.rand(60, 1, generator=generator)
    return spread * torch.randn(60, K, generator=generator)


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


@pytest.mark.parametrize("tau", [0.5, 1.6])
def test_the_calibrated_rho_is_the_root_that_scipy_finds(tau: float) -> None:
    logits = sample_logits()
    found = calibrate_rho(lambda: parts(logits), K, tau=tau)
    assert found.tau_mean == pytest.approx(tau, abs=1e-3)
    assert found.num_contexts == 60
    assert found.target_entropy == pytest.approx(math.log(K) - found.rho)
    few = logits[:12]
    expected = brentq(lambda rho: mean_by_scipy(few, rho) - tau, 0.02, 0.99 * math.log(K), xtol=1e-3)
    assert calibrate_rho(lambda: parts(few), K, tau=tau).rho == pytest.approx(expected, abs=0.02)
    assert list(found.curve.tau_mean) == sorted(found.curve.tau_mean, reverse=True)
    with pytest.raises(CalibrationError, match=r"no rho brings the mean temperature of this model to 1\.9999"):
        calibrate_rho(lambda: parts(logits), K, tau=1.9999)


def test_tau_max_for_given_contexts_is_exact() -> None:
    logits = sample_logits()
    torch.manual_seed(0)
    network = TempNet(TempNetConfig.for_logits(K, rho=1.0)).eval()
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
    for _ in range(300):
        levels = 0.3 + 0.1 * torch.randn(60, generator=generator)
        lengths = torch.randint(5, 40, (60,), generator=generator).tolist()
        found = Share.of([level.repeat(length) for level, length in zip(levels, lengths, strict=True)])
        num_covered += abs(found.mean - 0.3) < 1.96 * found.standard_error
    assert 0.91 < num_covered / 300 < 0.98
