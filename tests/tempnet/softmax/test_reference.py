"""The language-model losses against float64 autograd on the formulas, through base logits, TempNet and τ."""

from __future__ import annotations

import math

import pytest
import torch

from tempnet import TempNet, TempNetConfig, optimal_temperature
from tempnet.softmax.config import LOSS_KINDS, TemperatureLossConfig
from tempnet.softmax.reference import IGNORE_INDEX, language_model_loss
from tests.tempnet.formula import relative_error, temperatures

VOCABULARY, NUM_TOKENS, RHO = 50, 24, 1.2


def written_out(name: str, logits: torch.Tensor, targets: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over valid tokens, written out with probabilities instead of logsumexp."""
    total = torch.zeros((), dtype=logits.dtype)
    num_valid = 0
    for row, target, temperature in zip(logits, targets.tolist(), tau, strict=True):
        if target == IGNORE_INDEX:
            continue
        num_valid += 1
        weights = torch.exp(row / temperature)
        if name in ("ce", "fixed", "ts_ce"):
            total = total - torch.log(weights[target] / weights.sum())
        elif name == "proper":
            # The robust loss with the token's own ρ has the value 0, and is reported as the cross-entropy.
            level = -torch.log(weights[target] / weights.sum()).detach()
            rho = math.log(VOCABULARY) - level
            total = total + temperature * torch.log(weights.mean()) - row[target] + temperature * rho + level
        else:
            total = total + temperature * torch.log(weights.mean()) - row[target] + temperature * RHO
    return total / num_valid


@pytest.mark.parametrize("name", list(LOSS_KINDS))
@pytest.mark.parametrize(
    ("dtype", "tolerance", "stop_gradient"),
    [(torch.float64, 1e-6, True), (torch.float64, 1e-6, False), (torch.float32, 1e-5, True)],
)
def test_loss_and_all_gradients_equal_autograd_on_the_formula(
    name: str, dtype: torch.dtype, tolerance: float, stop_gradient: bool
) -> None:
    torch.manual_seed(7)
    logits = 2 * torch.randn(NUM_TOKENS, VOCABULARY, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (NUM_TOKENS,))
    targets[[3, 11]] = IGNORE_INDEX
    network = TempNet(
        TempNetConfig.for_logits(VOCABULARY, rho=RHO, hidden_size=16, num_prototypes=8, stop_gradient=stop_gradient)
    )
    config = TemperatureLossConfig(name=name, rho=RHO, tau=0.7)
    uses_network = LOSS_KINDS[name].temperature == "tempnet"

    network.to(dtype)
    ours = logits.to(dtype).detach().requires_grad_()
    loss, tau = language_model_loss(ours, targets, config, network)
    loss.backward()
    our_network_gradients = [parameter.grad for parameter in network.parameters()]

    theirs = logits.clone().requires_grad_()
    reference_network = TempNet(network.config)
    reference_network.double().load_state_dict(network.state_dict())
    reference_tau = {
        "one": lambda: torch.ones(NUM_TOKENS, dtype=torch.float64),
        "given": lambda: torch.full((NUM_TOKENS,), 0.7, dtype=torch.float64),
        "oracle": lambda: optimal_temperature(logits, RHO, tolerance=1e-13),
        "tempnet": lambda: temperatures(reference_network, theirs),
    }[LOSS_KINDS[name].temperature]()
    expected = written_out(name, theirs, targets, reference_tau)
    expected.backward()

    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    assert relative_error(tau, reference_tau) < tolerance
    assert relative_error(ours.grad, theirs.grad) < tolerance
    for gradient, parameter in zip(our_network_gradients, reference_network.parameters(), strict=True):
        assert (gradient is not None) == uses_network
        if gradient is not None:
            assert relative_error(gradient, parameter.grad) < tolerance


def test_divisor_is_the_global_number_of_targets_and_nothing_to_predict_is_a_zero_loss() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(10, 20, requires_grad=True), torch.randint(20, (10,))
    targets[4] = IGNORE_INDEX
    config = TemperatureLossConfig(name="dro", rho=1.0)
    network = TempNet(TempNetConfig.for_logits(20, rho=1.0))
    whole, _ = language_model_loss(logits, targets, config, network)
    parts = (slice(0, 3), slice(3, 10))
    losses = [language_model_loss(logits[part], targets[part], config, network, num_targets=9)[0] for part in parts]
    assert sum(losses).item() == pytest.approx(whole.item(), rel=1e-6)
    loss, tau = language_model_loss(logits, torch.full((10,), IGNORE_INDEX), config, network)
    loss.backward()
    assert loss.item() == 0.0
    assert tau.shape == (10,)
    assert logits.grad.abs().sum().item() == 0.0


def test_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match="loss = 'drro' is unknown: choose one of ce, fixed"):
        TemperatureLossConfig(name="drro", rho=1.0)
    with pytest.raises(ValueError, match="tau = 0"):
        TemperatureLossConfig(name="fixed", rho=1.0, tau=0.0)
    with pytest.raises(ValueError, match="rho = 10"):
        language_model_loss(
            torch.zeros(1, 20), torch.zeros(1).long(), TemperatureLossConfig(name="fixed_robust", rho=10.0)
        )
    assert math.isfinite(
        language_model_loss(torch.zeros(1, 20), torch.zeros(1).long(), TemperatureLossConfig(name="ce", rho=10.0))[0]
    )
