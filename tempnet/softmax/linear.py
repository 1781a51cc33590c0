"""The language-model losses from hidden states: the logits of a few tokens at a time, never all of them.

`linear_language_model_loss(h, W, …)` equals `language_model_loss(h Wᵀ, …)` with its gradients, in memory O(N·d + V·d).
Tokens are taken in chunks whose logits fit the cache; loss, τ and all gradients of a chunk are computed while its logits
are there, so nothing is recomputed in the backward pass.

What makes TempNet nearly free (method §3): its first layer reads L/‖L‖ with L = W h, so

    W1 L/‖L‖ = (W1 W) h/‖L‖          the fold: a (d1, d) matrix, built once a call, instead of V·d1 products a token
    dW1 = (Σ δ hᵀ/‖L‖) Wᵀ            δ the gradient at the first layer's output; the sum is (d1, d)

The fold pays once there are more tokens than hidden dimensions; with fewer, or where an output bias or a soft-cap breaks
it, the chunk's logits go through W1 as they are. Both paths agree to rounding.

Shapes: N tokens, d hidden size, V effective vocabulary, d1 TempNet's first layer, c tokens a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tempnet.dro import check_rho, optimal_temperature
from tempnet.network import TempNet
from tempnet.softmax.reference import IGNORE_INDEX, TemperatureLossConfig

# Logits of a chunk: 16 MiB in float32, so that the few passes over them stay near the cache.
_NUM_LOGITS_PER_CHUNK = 1 << 22


def linear_language_model_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    config: TemperatureLossConfig,
    tempnet: TempNet | None = None,
    *,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
    num_targets: Tensor | float | None = None,
    fold: bool | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of a batch of tokens from their hidden states, and the temperature of each.

    Args:
        hidden: (N, d), in float32, bfloat16 or float64. Sums run in float32 at least.
        weight: (V, d) output weight; rows beyond the effective vocabulary must be cut off by the caller.
        targets: (N,) int64; IGNORE_INDEX marks tokens that count for nothing.
        config: which of the losses.
        tempnet: the network, for `ts_ce` and `dro`; its input must be under stop-gradient and have a transform layer
            (the other ablations of Tables 18 and 20 need `language_model_loss`).
        bias: (V,) output bias, or None.
        soft_cap: logits become soft_cap·tanh(logits/soft_cap), or None.
        num_targets: what the sum over tokens is divided by. Default: the valid targets of this call.
        fold: use W1·W (True), the chunk's logits (False), or whichever needs fewer FLOPs (None).
        chunk_size: tokens a chunk. Default: about 4 million logits.

    Returns:
        The scalar loss with gradients for hidden, weight, bias and every parameter of the TempNet, and τ (N,), which
        carries none.

    Raises:
        ValueError: for an infeasible ρ, a TempNet that this path cannot take, or a fold that a bias or cap forbids.
    """
    vocab_size, num_hidden = weight.shape
    if config.kind.objective == "robust":
        check_rho(config.rho, vocab_size)
    uses_network = config.kind.temperature == "tempnet"
    if uses_network:
        assert tempnet is not None, f"the loss {config.name!r} needs a TempNet"
        if not supports(tempnet):
            raise ValueError("this TempNet has no transform layer, or lets gradients through its input")
    breaks_fold = bias is not None or soft_cap is not None
    if fold and breaks_fold:
        raise ValueError("fold = True is impossible with an output bias or a soft-cap: L is then not W h")
    if fold is None:
        fold = not breaks_fold and len(hidden) > num_hidden
    if num_targets is None:
        num_targets = (targets != IGNORE_INDEX).sum().clamp(min=1)
    settings = _Settings(
        config=config,
        tempnet=tempnet if uses_network else None,
        soft_cap=soft_cap,
        fold=fold,
        chunk_size=chunk_size or max(1, _NUM_LOGITS_PER_CHUNK // vocab_size),
    )
    parameters = tuple(tempnet.parameters()) if uses_network and tempnet is not None else ()
    loss_sum, tau = _LinearLoss.apply(hidden, weight, bias, targets, settings, *parameters)
    return loss_sum / num_targets, tau


def supports(tempnet: TempNet) -> bool:
    """Whether a TempNet can be computed from its first layer's output: a transform, under stop-gradient."""
    return tempnet.transform is not None and tempnet.config.stop_gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    config: TemperatureLossConfig
    tempnet: TempNet | None
    soft_cap: float | None
    fold: bool
    chunk_size: int


class _LinearLoss(torch.autograd.Function):
    """Sum of the token losses; the gradients are made in the forward pass and scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        settings: _Settings,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        needs = ctx.needs_input_grad
        accumulator = _Accumulator(hidden, weight, bias, settings, parameters, needs)
        for start in range(0, len(hidden), settings.chunk_size):
            part = slice(start, start + settings.chunk_size)
            accumulator.add_chunk(part, hidden[part], targets[part])
        gradients = accumulator.gradients()
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(accumulator.tau)
        return accumulator.loss_sum, accumulator.tau

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad_outputs[0]
        hidden, weight, bias, *parameters = (
            None if gradient is None else gradient * scale.to(gradient.dtype) for gradient in ctx.saved_tensors
        )
        return hidden, weight, bias, None, None, *parameters


class _Accumulator:
    """Losses and gradients, chunk by chunk."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: _Settings,
        parameters: tuple[Tensor, ...],
        needs: tuple[bool, ...],
    ) -> None:
        # Sums in float32 at least: bf16 would lose small gradients over many chunks.
        self.exact: Literal[torch.float32, torch.float64] = (  # type: ignore[valid-type]
            torch.float64 if hidden.dtype == torch.float64 else torch.float32
        )
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.settings, self.config, self.tempnet = settings, settings.config, settings.tempnet
        self.loss_sum = hidden.new_zeros((), dtype=self.exact)
        self.tau = hidden.new_zeros(len(hidden), dtype=self.exact)
        self.hidden_grad = torch.empty_like(hidden) if needs[0] else None
        self.weight_grad = torch.zeros_like(weight, dtype=self.exact) if needs[1] else None
        self.bias_grad = torch.zeros_like(bias, dtype=self.exact) if bias is not None and needs[2] else None
        self.needs_logits_grad = any(needs[:3])
        self.needs_network_grad = any(needs[5:])
        self.parameters = parameters
        self.parameter_grads = [torch.zeros_like(parameter) for parameter in parameters]
        self.folded: Tensor | None = None
        self.folded_grad: Tensor | None = None
        if self.tempnet is not None:
            self.first = self.tempnet.first_layer
            # The other parameters, in their order: the first layer's weight has a path of its own.
            self.tail = [parameter for parameter in parameters if parameter is not self.first.weight]
            if settings.fold:
                self.folded = self.first.weight.to(self.exact) @ weight.to(self.exact)
                self.folded_grad = torch.zeros_like(self.folded)

    def add_chunk(self, part: slice, hidden: Tensor, targets: Tensor) -> None:
        """Loss, τ and gradients of some tokens."""
        logits = F.linear(hidden, self.weight, self.bias).to(self.exact)
        slope = None
        if self.settings.soft_cap is not None:
            capped = torch.tanh(logits / self.settings.soft_cap)
            slope = 1 - capped.square()  # of the cap, for the chain rule
            logits = capped * self.settings.soft_cap
        is_valid = targets != IGNORE_INDEX
        safe_targets = targets.where(is_valid, 0).unsqueeze(-1)
        tau, network = self._temperatures(hidden, logits)
        self.tau[part] = tau

        # From here the chunk's logits are overwritten: first by (L − max L)/τ, then by the gradient.
        positive = logits.gather(-1, safe_targets).squeeze(-1)
        maximum = logits.amax(-1)
        column = tau.unsqueeze(-1)
        scaled = logits.sub_(maximum.unsqueeze(-1)).div_(column)
        weights = torch.exp(scaled)
        partition = weights.sum(-1)
        log_partition = partition.log()
        mean = torch.linalg.vecdot(weights, scaled) / partition
        positive_scaled = (positive - maximum) / tau
        cross_entropy = log_partition - positive_scaled
        if self.config.kind.objective == "robust":
            offset = self.config.rho - torch.log(torch.tensor(float(self.weight.shape[0]), dtype=self.exact))
            losses = tau * (cross_entropy + offset)
            tau_grad = log_partition - mean + offset
            logits_scale = is_valid.to(self.exact)
        else:
            losses = cross_entropy
            tau_grad = (positive_scaled - mean) / tau
            logits_scale = is_valid.to(self.exact) / tau
        self.loss_sum += losses.where(is_valid, 0.0).sum()
        if network is not None and self.needs_network_grad:
            self._add_network_grad(hidden, network, tau_grad.where(is_valid, 0.0))
        if self.needs_logits_grad:
            gradient = weights.mul_((logits_scale / partition).unsqueeze(-1))
            gradient.scatter_add_(-1, safe_targets, -logits_scale.unsqueeze(-1))
            if slope is not None:
                gradient.mul_(slope)
            if self.bias_grad is not None:
                self.bias_grad += gradient.sum(0)
            gradient = gradient.to(hidden.dtype)
            if self.hidden_grad is not None:
                torch.mm(gradient, self.weight, out=self.hidden_grad[part])
            if self.weight_grad is not None:
                if gradient.dtype == self.weight_grad.dtype:
                    self.weight_grad.addmm_(gradient.T, hidden)
                else:
                    self.weight_grad += gradient.T @ hidden

    def gradients(self) -> tuple[Tensor | None, ...]:
        """For hidden, weight, bias and the parameters of the TempNet, before the upstream factor."""
        if self.folded_grad is not None and self.needs_network_grad:
            self._first_weight_grad().add_(
                (self.folded_grad @ self.weight.to(self.exact).T).to(self.first.weight.dtype)
            )
        weight_grad = None if self.weight_grad is None else self.weight_grad.to(self.weight.dtype)
        bias_grad = None if self.bias_grad is None or self.bias is None else self.bias_grad.to(self.bias.dtype)
        parameter_grads = self.parameter_grads if self.needs_network_grad else [None] * len(self.parameters)
        return self.hidden_grad, weight_grad, bias_grad, *parameter_grads

    def _temperatures(self, hidden: Tensor, logits: Tensor) -> tuple[Tensor, _NetworkGraph | None]:
        """τ (c,), and where a TempNet predicts it, the small graph behind it."""
        source, config = self.config.kind.temperature, self.config
        if source == "oracle":
            return optimal_temperature(logits, config.rho, config.tau_min, config.tau_max), None
        if self.tempnet is None:
            return logits.new_full(logits.shape[:1], config.tau if source == "given" else 1.0), None
        inverse_norm = torch.ones_like(logits[:, 0])
        if self.tempnet.config.normalize_input:
            inverse_norm = 1.0 / torch.linalg.vector_norm(logits, dim=-1).clamp(min=1e-12)
        unit: Tensor | None = None
        if self.folded is not None:
            product = (hidden.to(self.exact) @ self.folded.T) * inverse_norm.unsqueeze(-1)
        else:
            unit = logits * inverse_norm.unsqueeze(-1)
            product = unit @ self.first.weight.to(self.exact).T
        with torch.enable_grad(), torch.autocast(logits.device.type, enabled=False):
            product = product.to(self.first.weight.dtype).detach().requires_grad_()
            tau = self.tempnet.from_first_product(product)
        return tau.detach().to(self.exact), _NetworkGraph(product, tau, inverse_norm, unit)

    def _add_network_grad(self, hidden: Tensor, network: _NetworkGraph, tau_grad: Tensor) -> None:
        """Add the gradients of the TempNet's parameters for ∂loss/∂τ (c,)."""
        delta, *tail = torch.autograd.grad(
            network.tau, [network.product, *self.tail], tau_grad.to(network.tau.dtype), allow_unused=True
        )
        rest = iter(tail)
        for parameter, total in zip(self.parameters, self.parameter_grads, strict=True):
            if parameter is not self.first.weight and (gradient := next(rest)) is not None:
                total += gradient
        if self.folded_grad is not None:
            scaled = delta.to(self.exact) * network.inverse_norm.unsqueeze(-1)
            self.folded_grad.addmm_(scaled.T, hidden.to(self.exact))
        else:
            assert network.unit is not None
            self._first_weight_grad().add_(delta.T @ network.unit.to(delta.dtype))

    def _first_weight_grad(self) -> Tensor:
        index = next(i for i, parameter in enumerate(self.parameters) if parameter is self.first.weight)
        return self.parameter_grads[index]


@dataclass(frozen=True, slots=True)
class _NetworkGraph:
    """The graph from W1 x to τ of one chunk, and what leads from there to the hidden states."""

    product: Tensor
    tau: Tensor
    inverse_norm: Tensor
    unit: Tensor | None
    """L/‖L‖, where the fold is not used."""
