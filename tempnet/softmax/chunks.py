"""Losses and gradients of tokens, a chunk at a time: the arithmetic behind `tempnet.softmax.linear`.

Of a chunk's logits L (c, V) at temperature τ, with p = softmax(L/τ), y the target and K = V:

    cross-entropy   log Σ exp(L/τ) − L_y/τ              ∂/∂L = (p − onehot(y))/τ      ∂/∂τ = (L_y − E_p[L])/τ²
    robust          τ·(cross-entropy + ρ − log K)       ∂/∂L = p − onehot(y)          ∂/∂τ = H(p) + ρ − log K

The logits are overwritten in place, first by (L − max L)/τ, then by the gradient.

Shapes: N tokens, c tokens of a chunk, d hidden size, V effective vocabulary, d1 TempNet's first layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tempnet.dro import optimal_temperature
from tempnet.network import TempNet
from tempnet.softmax.fold import FoldCache
from tempnet.softmax.reference import IGNORE_INDEX, TemperatureLossConfig

# A product that is not in its total's dtype is made so many values at a time, 1 MiB in bfloat16, which stay in the cache;
# but of no fewer rows, as products of a few rows are slow.
_NUM_VALUES_AT_A_TIME = 1 << 19
_MIN_NUM_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSettings:
    """What all chunks of a call share."""

    config: TemperatureLossConfig
    vocab_size: int
    """V; rows of the weight beyond it are padding."""
    tempnet: TempNet | None
    """None for the losses without one."""
    soft_cap: float | None
    fold: FoldCache | None
    """None: W1 is applied to the chunk's logits."""
    chunk_size: int
    matmul_dtype: torch.dtype | None
    with_values: bool
    with_gradients: bool
    """False where autograd is off: `ctx.needs_input_grad` only says what the tensors are, and stays true under no_grad."""


class ChunkSums:
    """Losses, temperatures and gradients, added up over the chunks of a batch.

    Args:
        hidden, weight, bias, parameters: as of `linear_language_model_loss`; `parameters` are the TempNet's.
        needs: which of (hidden, weight, bias, _, _, *parameters) need a gradient.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: ChunkSettings,
        parameters: tuple[Tensor, ...],
        needs: Sequence[bool],
    ) -> None:
        # Sums in float32 at least: bf16 would lose small gradients over many chunks.
        self.exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.settings, self.config, self.tempnet = settings, settings.config, settings.tempnet
        self.dtypes = hidden.dtype, weight.dtype
        matmul_dtype = settings.matmul_dtype or hidden.dtype
        vocabulary = slice(0, settings.vocab_size)
        self.hidden, self.weight = hidden.to(matmul_dtype), weight[vocabulary].to(matmul_dtype)
        self.bias = None if bias is None else bias[vocabulary].to(matmul_dtype)
        self.losses = hidden.new_zeros(len(hidden), dtype=self.exact)
        self.tau, self.slopes = torch.zeros_like(self.losses), torch.zeros_like(self.losses)
        self.values = [torch.zeros_like(self.losses) for _ in range(3)] if settings.with_values else []
        self.hidden_grad = torch.empty_like(hidden) if needs[0] else None
        self.weight_grad = torch.empty_like(weight, dtype=self.exact) if needs[1] else None
        if self.weight_grad is not None:
            # The first chunk writes, the others add: a pass over a large matrix less.
            self.weight_grad[settings.vocab_size if len(hidden) else 0 :] = 0.0
        self.bias_grad = torch.zeros_like(bias, dtype=self.exact) if bias is not None and needs[2] else None
        self.needs_logits_grad = any(needs[:3])
        self.needs_network_grad = any(needs[5:])
        self.parameters = parameters
        written = self.tempnet.first_layer.weight if self.tempnet is not None and settings.fold is not None else None
        self.parameter_grads = (
            [
                torch.empty_like(parameter) if parameter is written else torch.zeros_like(parameter)
                for parameter in parameters
            ]
            if self.needs_network_grad
            else []
        )
        self.buffers: Tensor | None = None
        self.folded: Tensor | None = None
        self.folded_grad: Tensor | None = None
        if self.tempnet is not None:
            self.first = self.tempnet.first_layer
            # The other parameters, in their order: the first layer's weight has a path of its own.
            self.tail = [parameter for parameter in parameters if parameter is not self.first.weight]
            if settings.fold is not None:
                self.is_centred = self.tempnet.config.input_shift == "mean"
                folded = settings.fold.first(
                    self.first.weight, self.weight, centred=self.is_centred, matmul_dtype=matmul_dtype
                )
                self.folded = folded.to(self.exact)
                self.folded_grad = torch.zeros_like(self.folded) if self.needs_network_grad else None

    def add(self, targets: Tensor, row_weights: Tensor | None = None) -> None:
        """All tokens; the gradients become those of Σ row_weights·loss (default: weights 1)."""
        for start in range(0, len(self.hidden), self.settings.chunk_size):
            part = slice(start, start + self.settings.chunk_size)
            self._add_chunk(part, targets[part], None if row_weights is None else row_weights[part].to(self.exact))

    def gradients(self) -> tuple[Tensor | None, ...]:
        """For hidden, weight, bias and the parameters of the TempNet."""
        if self.folded_grad is not None:
            # Nothing else has a part in this gradient: it is written, not added. The product runs in the dtype of the
            # others with the output weight: under autocast the gradient of W1 is as precise as that of any other matrix.
            total = self._first_weight_grad()
            _matmul_into(total, self.folded_grad.to(self.weight.dtype), self.weight.T)
            if self.is_centred:
                total.sub_(total.mean(-1, keepdim=True))
        weight_grad = None if self.weight_grad is None else self.weight_grad.to(self.dtypes[1])
        bias_grad = None if self.bias_grad is None else self.bias_grad.to(self.dtypes[1])
        parameter_grads = self.parameter_grads if self.needs_network_grad else [None] * len(self.parameters)
        return self.hidden_grad, weight_grad, bias_grad, *parameter_grads

    def _add_chunk(self, part: slice, targets: Tensor, row_weights: Tensor | None) -> None:
        hidden = self.hidden[part]
        logits, work = self._logits(hidden)
        slope = None
        if self.settings.soft_cap is not None:
            logits.div_(self.settings.soft_cap).tanh_()
            slope = 1 - logits.square()  # of the cap, for the chain rule
            logits.mul_(self.settings.soft_cap)
        is_valid = targets != IGNORE_INDEX
        safe_targets = targets.where(is_valid, 0).unsqueeze(-1)
        tau, network = self._temperatures(hidden, logits)
        self.tau[part] = tau

        # The maximum goes first: L/τ alone would lose the digits of small differences at small τ.
        shifted = logits.sub_(logits.amax(-1, keepdim=True))
        if self.settings.with_values:
            cross_entropy, entropy, _ = _softmax(shifted.clone(), safe_targets, work)
            self.values[0][part] = cross_entropy.where(is_valid, 0.0)
            self.values[2][part] = entropy
        cross_entropy, entropy, weights = _softmax(shifted.div_(tau.unsqueeze(-1)), safe_targets, work)
        logits_scale, tau_grad = self._finish(part, targets, tau, cross_entropy, entropy, row_weights)
        if network is not None and self.needs_network_grad:
            self._add_network_grad(hidden, network, tau_grad)
        if self.needs_logits_grad:
            if not bool((logits_scale == 1).all()):
                weights.mul_(logits_scale.unsqueeze(-1))
            gradient = weights.scatter_add_(-1, safe_targets, -logits_scale.unsqueeze(-1))
            if slope is not None:
                gradient.mul_(slope)
            self._add_logits_grad(part, hidden, gradient)

    def _logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The chunk's logits (c, V), and room for as many numbers. Both are used again for the next chunk: fresh memory costs
        page faults."""
        if self.buffers is None:
            size = min(self.settings.chunk_size, len(self.hidden))
            self.buffers = self.losses.new_empty(2, size, self.settings.vocab_size)
        logits, work = self.buffers[:, : len(hidden)]
        if hidden.dtype == self.exact and self.bias is None:
            torch.mm(hidden, self.weight.T, out=logits)
        else:
            logits.copy_(F.linear(hidden, self.weight, self.bias))
        return logits, work

    def _finish(
        self,
        part: slice,
        targets: Tensor,
        tau: Tensor,
        cross_entropy: Tensor,
        entropy: Tensor,
        row_weights: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Record losses and their slopes in τ from the cross-entropy and H(p), both at τ; returns the factors of p − onehot
        and ∂loss/∂τ, (c,)."""
        is_valid = targets != IGNORE_INDEX
        scale = is_valid.to(self.exact) if row_weights is None else row_weights.where(is_valid, 0.0)
        if self.settings.with_values:
            self.values[1][part] = cross_entropy.where(is_valid, 0.0)
        if self.config.kind.objective == "robust":
            offset = self.config.rho - math.log(self.settings.vocab_size)
            losses, slopes = tau * (cross_entropy + offset), entropy + offset
        else:
            losses, slopes = cross_entropy, (entropy - cross_entropy) / tau
        self.losses[part] = losses.where(is_valid, 0.0)
        self.slopes[part] = slopes.where(is_valid, 0.0)
        logits_scale = scale if self.config.kind.objective == "robust" else scale / tau
        return logits_scale, (slopes * scale).where(is_valid, 0.0)

    def _add_logits_grad(self, part: slice, hidden: Tensor, gradient: Tensor) -> None:
        if self.bias_grad is not None:
            self.bias_grad[: self.settings.vocab_size] += gradient.sum(0)
        gradient = gradient.to(hidden.dtype)
        if self.hidden_grad is not None:
            _matmul_into(self.hidden_grad[part], gradient, self.weight)
        if self.weight_grad is not None:
            total = self.weight_grad[: self.settings.vocab_size]
            _matmul_into(total, gradient.T, hidden, add=part.start > 0)

    def _temperatures(self, hidden: Tensor, logits: Tensor) -> tuple[Tensor, NetworkGraph | None]:
        """τ (c,), and where a TempNet predicts it, the small graph behind it; the logits may be shifted, each row as one."""
        source, config = self.config.kind.temperature, self.config
        if source == "oracle":
            return optimal_temperature(logits, config.rho, config.tau_min, config.tau_max), None
        if self.tempnet is None:
            return logits.new_full(logits.shape[:1], config.tau if source == "given" else 1.0), None
        if (offset := self.tempnet.input_offset(logits)) is not None:
            logits.sub_(offset)  # which the softmax does not see
        inverse_norm = torch.ones_like(logits[:, 0])
        if self.tempnet.config.normalize_input:
            inverse_norm = 1.0 / torch.linalg.vector_norm(logits, dim=-1).clamp(min=1e-12)
        unit: Tensor | None = None
        if self.folded is not None:
            product = (hidden.to(self.exact) @ self.folded.T) * inverse_norm.unsqueeze(-1)
        else:
            unit = logits * inverse_norm.unsqueeze(-1)
            product = unit @ self.first.weight.to(self.exact).T
        return self._network_graph(product, inverse_norm, unit)

    def _network_graph(self, product: Tensor, inverse_norm: Tensor, unit: Tensor | None) -> tuple[Tensor, NetworkGraph]:
        """τ (c,) from W1 x, with the graph from there."""
        assert self.tempnet is not None
        grad = torch.set_grad_enabled(self.needs_network_grad)
        with grad, torch.autocast(product.device.type, enabled=False):
            product = product.to(self.first.weight.dtype).detach().requires_grad_()
            tau = self.tempnet.from_first_product(product)
        return tau.detach().to(self.exact), NetworkGraph(product, tau, inverse_norm, unit)

    def _add_network_grad(self, hidden: Tensor, network: NetworkGraph, tau_grad: Tensor) -> None:
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


def _softmax(scores: Tensor, targets: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of scores (c, V) whose row maxima are 0, and targets (c, 1): cross-entropy, entropy (c,), and p in `out` (c, V).

    The scores are overwritten. The largest p is 1/Σ exp(s): the partition, without another pass. A product in place and its
    sum is several times faster than `vecdot` on CPUs.
    """
    positive = scores.gather(-1, targets).squeeze(-1)
    weights = torch.softmax(scores, dim=-1, out=out)
    log_partition = -weights.amax(-1).log()
    mean = scores.mul_(weights).sum(-1)
    return log_partition - positive, log_partition - mean, weights


def _matmul_into(total: Tensor, left: Tensor, right: Tensor, *, add: bool = False) -> None:
    """Write left·right to `total`, or add it: (m, k)·(k, n) → (m, n).

    A product in another dtype than the total's goes some rows at a time through one small buffer: a copy of a matrix as large
    as the output weight, made for every chunk, would cost more than the product.
    """
    if left.dtype == total.dtype:
        total.addmm_(left, right, beta=1.0 if add else 0.0)
        return
    num_rows = max(_MIN_NUM_ROWS, _NUM_VALUES_AT_A_TIME // total.shape[1])
    product = left.new_empty(min(num_rows, len(total)), total.shape[1])
    for rows, some in zip(total.split(num_rows), left.split(num_rows), strict=True):
        part = torch.mm(some, right, out=product[: len(rows)])
        if add:
            rows.add_(part)
        else:
            rows.copy_(part)


@dataclass(frozen=True, slots=True)
class NetworkGraph:
    """The graph from W1 x to τ of one chunk, and what leads from there to the hidden states."""

    product: Tensor
    tau: Tensor
    inverse_norm: Tensor
    unit: Tensor | None
    """L/‖L‖, where the fold is not used."""
