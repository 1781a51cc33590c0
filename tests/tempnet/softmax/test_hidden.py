"""Test TempNets that read hidden states, in float64: the logits-free loss and the fold against autograd on the formula."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tempnet import TempNet, TempNetConfig
from tempnet.inference import CachedFold
from tempnet.softmax.linear import linear_language_model_loss
from tempnet.softmax.reference import IGNORE_INDEX, TemperatureLossConfig, token_losses

NUM_TOKENS, NUM_HIDDEN, VOCABULARY, RHO = 17, 6, 23, 0.4


def make_network(*, with_logits: bool, **switches: Any) -> TempNet:
    torch.manual_seed(0)
    config = TempNetConfig.for_hidden(
        VOCABULARY, NUM_HIDDEN, with_logits=with_logits, rho=RHO, hidden_size=7, num_prototypes=5, **switches
    )
    network = TempNet(config).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return network


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(NUM_TOKENS, NUM_HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(VOCABULARY, NUM_HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(VOCABULARY, (NUM_TOKENS,), generator=generator)
    targets[3] = IGNORE_INDEX
    return hidden, weight, targets


def temperatures(network: TempNet, logits: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Compute the network's formula, written out."""
    state = hidden.detach()
    state = state / state.norm(dim=-1, keepdim=True) if network.config.normalize_input else state
    product = state @ network.state_weight.T
    if network.config.kind == "both":
        x = logits.detach()
        x = x - x.mean(-1, keepdim=True) if network.config.input_shift == "mean" else x
        x = x / x.norm(dim=-1, keepdim=True) if network.config.normalize_input else x
        product = product + x @ network.first_layer.weight.T
    u = torch.sigmoid(product + network.first_layer.bias) @ network.projection.T
    attention = torch.softmax(u / network.log_phi.exp(), dim=-1) - 1 / u.shape[-1]
    score = ((attention * network.pool_weight * u).sum(-1) - network.pool_bias) / RHO
    return (network.config.tau_max - network.config.tau_min) * torch.sigmoid(score) + network.config.tau_min


CASES = [
    {"with_logits": False},
    {"with_logits": False, "normalize_input": False},
    {"with_logits": True},
    {"with_logits": True, "input_shift": "mean"},
    {"with_logits": True, "normalize_input": False},
]


@pytest.mark.parametrize("switches", CASES, ids=str)
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("name", ["dro", "proper"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_loss_and_gradients_are_those_of_the_formula(
    switches: dict[str, Any], fold: bool, name: str, reduction: Any
) -> None:
    hidden, weight, targets = tensors()
    network = make_network(**switches)
    exact = copy.deepcopy(network)
    config = TemperatureLossConfig(name=name, rho=RHO)
    ours = linear_language_model_loss(
        hidden, weight, targets, config, network, reduction=reduction, fold=fold, chunk_size=5
    )
    gradients = torch.autograd.grad(ours.loss.sum(), [hidden, weight, *network.parameters()])

    logits = hidden @ weight.T
    tau = temperatures(exact, logits, hidden)
    losses = token_losses(logits, targets, tau, config)
    divisor = (targets != IGNORE_INDEX).sum() if reduction == "mean" else 1
    expected = torch.autograd.grad(losses.sum() / divisor, [hidden, weight, *exact.parameters()])
    torch.testing.assert_close(ours.tau, tau.detach())
    torch.testing.assert_close(ours.loss, losses if reduction == "none" else losses.sum() / divisor)
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("switches", CASES, ids=str)
def test_the_network_and_the_fold_of_generation_predict_the_same(switches: dict[str, Any]) -> None:
    hidden, weight, _ = tensors()
    network = make_network(**switches)
    with torch.no_grad():
        logits = hidden @ weight.T
        expected = temperatures(network, logits, hidden)
        torch.testing.assert_close(network(logits, hidden), expected)
        network.float()
        fold = CachedFold(weight.detach().float(), network)
        torch.testing.assert_close(fold.temperatures(hidden).double(), expected, atol=1e-4, rtol=1e-4)


def test_it_survives_saving_and_says_what_it_reads(tmp_path: Any) -> None:
    network = make_network(with_logits=True).float().eval()
    network.save_pretrained(tmp_path)
    again = TempNet.from_pretrained(tmp_path)
    logits, hidden = torch.randn(3, VOCABULARY), torch.randn(3, NUM_HIDDEN)
    torch.testing.assert_close(again(logits, hidden), network(logits, hidden))
    with pytest.raises(ValueError, match=r"reads hidden states \(kind = 'both'\), and only logits are known here"):
        again(logits)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "hidden"}, "state_size = 0 must be the dimension of the hidden state"),
        ({"kind": "logits", "state_size": 4}, "state_size = 4 must be"),
        ({"kind": "hidden", "state_size": 4, "transform": False}, "needs transform = True"),
        ({"kind": "both", "state_size": 4, "stop_gradient": False}, "needs transform = True and stop_gradient = True"),
        ({"kind": "hidden", "state_size": 4, "input_shift": "mean"}, "a network on hidden takes 'none' only"),
    ],
)
def test_impossible_configurations_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TempNetConfig(input_size=50, rho=1.0, tau_max=2.0, **fields)
