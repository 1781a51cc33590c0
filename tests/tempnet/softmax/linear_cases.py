"""Compare the logits-free losses with the reference form in float64."""

from __future__ import annotations

import torch

from tempnet import TempNet, TempNetConfig
from tempnet.softmax.linear import linear_language_model_loss
from tempnet.softmax.reference import (
    IGNORE_INDEX,
    LOSS_KINDS,
    TemperatureLossConfig,
    language_model_loss,
    token_losses,
    token_slopes,
)
from tempnet.statistics import TokenValues

RHO = 0.4


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    scale = reference.norm().clamp(min=1e-12)
    return ((value.double() - reference).norm() / scale).item()


def compare(
    name: str,
    *,
    num_tokens: int,
    num_hidden: int,
    vocabulary: int,
    dtype: torch.dtype = torch.float64,
    fold: bool | None = None,
    chunk_size: int = 5,
    num_ignored: int = 0,
    bias: bool = False,
    soft_cap: float | None = None,
    num_padding: int = 0,
    reduction: str = "mean",
    matmul_dtype: torch.dtype | None = None,
    seed: int = 0,
    **switches: object,
) -> dict[str, float]:
    """Return relative errors of loss, τ and gradients against the float64 reference on the same (rounded) inputs."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int, scale: float) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()

    num_rows = vocabulary + num_padding
    hidden, weight = leaf(num_tokens, num_hidden, scale=1.0), leaf(num_rows, num_hidden, scale=0.7)
    offset = leaf(num_rows, scale=0.5) if bias else None
    upstream = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocabulary, (num_tokens,), generator=generator)
    targets[:num_ignored] = IGNORE_INDEX
    torch.manual_seed(seed)
    network = TempNet(TempNetConfig.for_logits(vocabulary, rho=RHO, hidden_size=7, num_prototypes=5, **switches))
    network.to(torch.float64 if dtype == torch.float64 else torch.float32)
    config = TemperatureLossConfig(name=name, rho=RHO, tau=0.7)
    leaves = [value for value in (hidden, weight, offset) if value is not None]
    parameters = list(network.parameters()) if LOSS_KINDS[name].temperature == "tempnet" else []

    loss, tau, values, slopes = linear_language_model_loss(
        hidden,
        weight,
        targets,
        config,
        network,
        vocab_size=vocabulary,
        bias=offset,
        soft_cap=soft_cap,
        fold=fold and not (bias or soft_cap or switches.get("input_shift") == "max"),
        chunk_size=chunk_size,
        reduction=reduction,
        matmul_dtype=matmul_dtype,
        with_values=True,
    )
    ours = torch.autograd.grad((upstream * loss).sum() if reduction == "none" else 3.0 * loss, [*leaves, *parameters])

    exact = [value.detach().double().requires_grad_() for value in leaves]
    exact_network = TempNet(network.config).double()
    exact_network.load_state_dict(network.state_dict())
    logits = exact[0] @ exact[1].T + (exact[2] if bias else 0.0)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits[:, :vocabulary]
    expected, expected_tau = language_model_loss(logits, targets, config, exact_network)
    free_tau = expected_tau.detach().requires_grad_()
    (expected_slopes,) = torch.autograd.grad(token_losses(logits, targets, free_tau, config).sum(), free_tau)
    objective = 3.0 * expected
    if reduction == "none":
        expected = token_losses(logits, targets, expected_tau, config)
        objective = (upstream * expected).sum()
    exact_parameters = list(exact_network.parameters()) if parameters else []
    theirs = torch.autograd.grad(objective, [*exact, *exact_parameters])
    names = ["hidden", "weight", "bias"][: len(leaves)] + [name for name, _ in network.named_parameters()]
    errors = {"loss": relative_error(loss, expected), "tau": relative_error(tau, expected_tau)}
    # At the oracle's τ the slope is what rounding leaves of terms of size 1.
    is_rest = name == "dro_newton"
    difference = (slopes - expected_slopes).abs().max().item()
    errors["slopes"] = difference if is_rest else relative_error(slopes, expected_slopes)
    torch.testing.assert_close(token_slopes(logits, targets, expected_tau, config), expected_slopes)
    exact_values = TokenValues.from_logits(logits, targets, expected_tau)
    for label, value, reference in zip(values._fields, values, exact_values, strict=True):
        half = torch.bfloat16 in (dtype, matmul_dtype)
        # from_logits is float32, and the difference of terms of size 1: a small value has few digits in it.
        scale = reference.norm().clamp(min=len(reference) ** 0.5).item()
        assert (value.double() - reference.double()).norm().item() < (1e-2 if half else 1e-5) * scale, label
    for label, value, reference in zip(names, ours, theirs, strict=False):
        assert value.dtype == (dtype if label in ("hidden", "weight", "bias") else next(network.parameters()).dtype)
        errors[label] = relative_error(value, reference)
    return errors
