"""TempNet's formula written out, and the error by which tensors are compared with a reference in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tempnet import TempNet


def relative_error(value: Tensor | None, reference: Tensor | None) -> float:
    assert value is not None
    assert reference is not None
    return ((value.double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-12)).item()


def temperatures(network: TempNet, x: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Return τ (...,) of a network with parametric pooling in float64, for logits or embeddings and hidden states."""
    config, product = network.config, torch.zeros(())
    if hidden is not None:
        state = hidden.detach()
        state = state / state.norm(dim=-1, keepdim=True) if config.normalize_input else state
        product = state @ network.state_weight.T
    if config.kind != "hidden":
        x = x.detach() if config.stop_gradient else x
        offset = {"none": 0.0, "mean": x.sum(-1, keepdim=True) / x.shape[-1], "max": x.sort(-1).values[..., -1:]}
        x = x - offset[config.input_shift]
        x = x / x.norm(dim=-1, keepdim=True) if config.normalize_input else x
        product = product + x @ network.first_layer.weight.T
    v, w2 = 1 / (1 + torch.exp(-(product + network.first_layer.bias))), network.projection
    assert w2 is not None
    u = v @ (w2 / w2.norm(dim=0)) if config.kind == "embeddings" else v @ w2.T
    attention = torch.softmax(u / network.log_phi.exp(), dim=-1) - 1 / u.shape[-1]
    score = ((attention * network.pool_weight * u).sum(-1) - network.pool_bias) / config.rho
    return (config.tau_max - config.tau_min) * torch.sigmoid(score) + config.tau_min
