"""Compare the logits-free losses with the reference form in float64."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Random inputs of a loss; the tensors to differentiate are leaves."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    upstream: torch.Tensor
    """Upstream gradients of the losses per token, in float64."""
    targets: torch.Tensor
    network: TempNet

    @classmethod
    def draw(
        cls,
        *,
        num_tokens: int,
        num_hidden: int,
        vocabulary: int,
        num_padding: int,
        num_ignored: int,
        bias: bool,
        dtype: torch.dtype,
        seed: int,
        **switches: object,
    ) -> Case:
        """Draw inputs in a dtype; the network is in float64 or float32, and `switches` are fields of its configuration."""
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
        return cls(hidden=hidden, weight=weight, bias=offset, upstream=upstream, targets=targets, network=network)

    @property
    def leaves(self) -> list[torch.Tensor]:
        """Hidden states, weight and, if there is one, bias."""
        return [value for value in (self.hidden, self.weight, self.bias) if value is not None]

    def objective(self, loss: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the scalar whose gradients are compared: a multiple of a mean loss, a weighted sum of token losses."""
        return (self.upstream * loss).sum() if reduction == "none" else 3.0 * loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the reference form gives for a case, in float64."""

    loss: torch.Tensor
    tau: torch.Tensor
    slopes: torch.Tensor
    values: TokenValues
    gradients: tuple[torch.Tensor, ...]
    """Gradients of hidden states, weight, bias (if there is one) and the network's parameters (if the loss has one)."""

    @classmethod
    def compute(cls, case: Case, config: TemperatureLossConfig, soft_cap: float | None, reduction: str) -> Reference:
        """Compute all logits, and differentiate the losses with autograd."""
        exact = [value.detach().double().requires_grad_() for value in case.leaves]
        network = TempNet(case.network.config).double()
        network.load_state_dict(case.network.state_dict())
        logits = exact[0] @ exact[1].T + (exact[2] if case.bias is not None else 0.0)
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        logits = logits[:, : network.config.input_size]
        loss, tau = language_model_loss(logits, case.targets, config, network)
        free_tau = tau.detach().requires_grad_()
        (slopes,) = torch.autograd.grad(token_losses(logits, case.targets, free_tau, config).sum(), free_tau)
        torch.testing.assert_close(token_slopes(logits, case.targets, tau, config), slopes)
        if reduction == "none":
            loss = token_losses(logits, case.targets, tau, config)
        parameters = list(network.parameters()) if has_network(config) else []
        return cls(
            loss=loss,
            tau=tau,
            slopes=slopes,
            values=TokenValues.from_logits(logits, case.targets, tau),
            gradients=torch.autograd.grad(case.objective(loss, reduction), [*exact, *parameters]),
        )


def has_network(config: TemperatureLossConfig) -> bool:
    """Return whether the loss trains a TempNet."""
    return LOSS_KINDS[config.name].temperature == "tempnet"


def check_values(values: TokenValues, expected: TokenValues, tolerance: float) -> None:
    """Check the values of the tokens, up to a relative error."""
    for label, value, reference in zip(values._fields, values, expected, strict=True):
        # from_logits is float32, and the difference of terms of size 1: a small value has few digits in it.
        scale = reference.norm().clamp(min=len(reference) ** 0.5).item()
        assert (value.double() - reference.double()).norm().item() < tolerance * scale, label


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
    case = Case.draw(
        num_tokens=num_tokens, num_hidden=num_hidden, vocabulary=vocabulary, num_padding=num_padding,
        num_ignored=num_ignored, bias=bias, dtype=dtype, seed=seed, **switches,
    )  # fmt: skip
    config = TemperatureLossConfig(name=name, rho=RHO, tau=0.7)
    parameters = list(case.network.parameters()) if has_network(config) else []
    loss, tau, values, slopes = linear_language_model_loss(
        case.hidden,
        case.weight,
        case.targets,
        config,
        case.network,
        vocab_size=vocabulary,
        bias=case.bias,
        soft_cap=soft_cap,
        fold=fold and not (bias or soft_cap or switches.get("input_shift") == "max"),
        chunk_size=chunk_size,
        reduction=reduction,
        matmul_dtype=matmul_dtype,
        with_values=True,
    )
    gradients = torch.autograd.grad(case.objective(loss, reduction), [*case.leaves, *parameters])
    expected = Reference.compute(case, config, soft_cap, reduction)
    check_values(values, expected.values, 1e-2 if torch.bfloat16 in (dtype, matmul_dtype) else 1e-5)
    errors = {"loss": relative_error(loss, expected.loss), "tau": relative_error(tau, expected.tau)}
    # At the oracle's τ the slope is what rounding leaves of terms of size 1.
    is_rest = name == "dro_newton"
    difference = (slopes - expected.slopes).abs().max().item()
    errors["slopes"] = difference if is_rest else relative_error(slopes, expected.slopes)
    labels = ["hidden", "weight", "bias"][: len(case.leaves)] + [name for name, _ in case.network.named_parameters()]
    for label, value, reference in zip(labels, gradients, expected.gradients, strict=False):
        assert value.dtype == (
            dtype if label in ("hidden", "weight", "bias") else next(case.network.parameters()).dtype
        )
        errors[label] = relative_error(value, reference)
    return errors
