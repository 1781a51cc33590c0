"""Compute losses and gradients of tokens, one chunk of tokens at a time: the arithmetic of `tempnet.softmax.linear`.

For a chunk's logits L (c, V) at temperature τ, with p = softmax(L/τ), y the target and K = V:

    cross-entropy   log Σ exp(L/τ) − L_y/τ              ∂/∂L = (p − onehot(y))/τ      ∂/∂τ = (L_y − E_p[L])/τ²
    robust          τ·(cross-entropy + ρ − log K)       ∂/∂L = p − onehot(y)          ∂/∂τ = H(p) + ρ − log K

The logits are overwritten in place, first by (L − max L)/τ and then by the gradient.

Shapes: N tokens, c tokens in a chunk, d hidden size, V effective vocabulary, d1 width of TempNet's first layer.
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

# A matrix product in another dtype than the sum it is added to is computed in parts of this many values (1 MiB in
# bfloat16), which fit in the cache, but of at least this many rows, because products of few rows are slow.
_NUM_VALUES_AT_A_TIME = 1 << 19
_MIN_NUM_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSettings:
    """Settings that all chunks of a call share."""

    config: TemperatureLossConfig
    """Configuration of the loss."""
    vocab_size: int
    """Effective vocabulary V; rows of the output weight beyond it are padding."""
    tempnet: TempNet | None
    """The temperature network; None for losses without one."""
    soft_cap: float | None
    """Logits become soft_cap·tanh(logits/soft_cap); None for no cap."""
    fold: FoldCache | None
    """Cache of the folded matrices; None if W1 is applied to the chunk's logits instead."""
    chunk_size: int
    """Number of tokens per chunk."""
    matmul_dtype: torch.dtype | None
    """Dtype of the products with the output weight; None for that of the inputs."""
    with_values: bool
    """Whether to compute the values of `tempnet.statistics.TokenValues`."""
    with_gradients: bool
    """Whether autograd is on. `ctx.needs_input_grad` does not tell, because it stays true under no_grad."""


class ChunkSums:
    """Losses, temperatures and gradients, accumulated over the chunks of a batch.

    Args:
        hidden, weight, bias: arguments of `linear_language_model_loss`.
        settings: settings of the call.
        parameters: parameters of the TempNet.
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
        # Sums are in float32 at least, because bfloat16 would lose small gradients over many chunks.
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
            # The first chunk writes the gradient and the others add to it, which saves setting a large matrix to zero.
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
            # All parameters but the first layer's weight, whose gradient is computed separately.
            self.tail = [parameter for parameter in parameters if parameter is not self.first.weight]
            if settings.fold is not None:
                self.is_centred = self.tempnet.config.input_shift == "mean"
                folded = settings.fold.first(
                    self.first.weight, self.weight, centred=self.is_centred, matmul_dtype=matmul_dtype
                )
                self.folded = folded.to(self.exact)
                self.folded_grad = torch.zeros_like(self.folded) if self.needs_network_grad else None

    def add(self, targets: Tensor, row_weights: Tensor | None = None) -> None:
        """Process all tokens.

        Args:
            targets: (N,) int64 targets.
            row_weights: (N,) weights; gradients are those of Σ row_weights·loss. By default all weights are 1.
        """
        for start in range(0, len(self.hidden), self.settings.chunk_size):
            part = slice(start, start + self.settings.chunk_size)
            self._add_chunk(part, targets[part], None if row_weights is None else row_weights[part].to(self.exact))

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, weight, bias and the parameters of the TempNet; None for those not needed."""
        if self.folded_grad is not None:
            # No other term contributes to this gradient, so it is written and not added. The product has the same
            # dtype as the others with the output weight; under autocast the gradient of W1 is as precise as that of
            # other matrices.
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
            slope = 1 - logits.square()  # The derivative of the cap, for the chain rule.
            logits.mul_(self.settings.soft_cap)
        is_valid = targets != IGNORE_INDEX
        safe_targets = targets.where(is_valid, 0).unsqueeze(-1)
        tau, network = self._temperatures(hidden, logits)
        self.tau[part] = tau

        # The maximum is subtracted before the division, because L/τ would lose the digits of small differences at
        # small τ.
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
        """Return the chunk's logits (c, V), and working memory of the same size.

        Both buffers are reused for the next chunk, because new memory would cause page faults.
        """
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
        """Store losses and their derivatives in τ, computed from the cross-entropy and the entropy H(p) at τ.

        Returns:
            (c,) factors of p − onehot(y) in the gradient of the logits, and (c,) ∂loss/∂τ, both including the row
            weights.
        """
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
        """Return τ (c,) and, if a TempNet predicts it, the autograd graph of the prediction.

        The logits may be shifted in place, by one constant per row.
        """
        source, config = self.config.kind.temperature, self.config
        if source == "oracle":
            return optimal_temperature(logits, config.rho, config.tau_min, config.tau_max), None
        if self.tempnet is None:
            return logits.new_full(logits.shape[:1], config.tau if source == "given" else 1.0), None
        if (offset := self.tempnet.input_offset(logits)) is not None:
            logits.sub_(offset)  # This does not change the softmax.
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
        """Return τ (c,) for W1 x (`product`), with the autograd graph from W1 x to τ."""
        assert self.tempnet is not None
        grad = torch.set_grad_enabled(self.needs_network_grad)
        with grad, torch.autocast(product.device.type, enabled=False):
            product = product.to(self.first.weight.dtype).detach().requires_grad_()
            tau = self.tempnet.from_first_product(product)
        return tau.detach().to(self.exact), NetworkGraph(product, tau, inverse_norm, unit)

    def _add_network_grad(self, hidden: Tensor, network: NetworkGraph, tau_grad: Tensor) -> None:
        """Add the gradients of the TempNet's parameters that follow from ∂loss/∂τ (c,)."""
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
    """Return cross-entropy (c,), entropy (c,) and probabilities p (c, V).

    The largest p is 1/Σ exp(s), which gives the partition function without another pass. On CPUs, a product in place
    and its sum is several times faster than `vecdot`.

    Args:
        scores: (c, V) scores s whose row maxima are 0; they are overwritten.
        targets: (c, 1) targets.
        out: (c, V) memory for p.
    """
    positive = scores.gather(-1, targets).squeeze(-1)
    weights = torch.softmax(scores, dim=-1, out=out)
    log_partition = -weights.amax(-1).log()
    mean = scores.mul_(weights).sum(-1)
    return log_partition - positive, log_partition - mean, weights


def _matmul_into(total: Tensor, left: Tensor, right: Tensor, *, add: bool = False) -> None:
    """Write the matrix product left·right to `total`, or add it: (m, k)·(k, n) → (m, n).

    If the product has another dtype than `total`, it is computed in blocks of rows in one small buffer, because
    copying a matrix as large as the output weight for every chunk would cost more than the product.
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
    """Autograd graph from W1 x to τ of one chunk, and the quantities that W1 x was computed from."""

    product: Tensor
    """W1 x, a leaf of the graph: (c, d1)."""
    tau: Tensor
    """τ with its graph: (c,)."""
    inverse_norm: Tensor
    """1/‖L‖, or 1 if the input is not normalised: (c,)."""
    unit: Tensor | None
    """L/‖L‖ if the fold is not used, else None: (c, V)."""
