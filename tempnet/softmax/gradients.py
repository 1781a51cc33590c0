"""Sums of gradients over the tokens of a call.

The memory of the sums is allocated once, and every chunk adds to it in place: memory taken anew for every chunk would
cost page faults. The functions here change nothing but the sums.

Shapes: N tokens, c tokens in a chunk, d hidden size, V effective vocabulary, d1 width of TempNet's first layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tempnet.softmax.plan import LossInputs, LossPlan
from tempnet.softmax.temperatures import NetworkGraph

# A matrix product in another dtype than the sum it is added to is computed in parts of this many values (1 MiB in
# bfloat16), which fit in the cache, but of at least this many rows, because products of few rows are slow.
_NUM_VALUES_AT_A_TIME = 1 << 19
_MIN_NUM_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSums:
    """Gradients of the tokens that were processed so far; None, or nothing, for gradients that are not needed."""

    hidden: Tensor | None
    """Gradient of the hidden states, in their dtype: (N, d)."""
    weight: Tensor | None
    """Gradient of the output weight, in the dtype of sums: (rows of the weight, d)."""
    bias: Tensor | None
    """Gradient of the output bias, in the dtype of sums: (rows of the weight,)."""
    parameters: tuple[Tensor, ...]
    """Gradients of the TempNet's parameters, that of W1 first; with a fold, that of W1 is written at the end."""
    folded: Tensor | None
    """Gradient of the folded matrix W1·W: (d1, d)."""

    @property
    def need_logits(self) -> bool:
        """Whether the gradient of the logits is needed."""
        return not (self.hidden is None and self.weight is None and self.bias is None)

    @property
    def need_network(self) -> bool:
        """Whether the gradients of the TempNet are needed."""
        return bool(self.parameters)


def allocate_gradients(
    plan: LossPlan,
    inputs: LossInputs,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs: Sequence[bool],
) -> GradientSums:
    """Create the sums, with no token processed.

    Args:
        plan: plan of the call.
        inputs: tensors of the call.
        hidden, weight, bias: arguments of `linear_language_model_loss`.
        needs: which of (hidden, weight, bias, _, _, *parameters) need a gradient.
    """
    weight_grad = torch.empty_like(weight, dtype=plan.sum_dtype) if needs[1] else None
    if weight_grad is not None:
        # The first chunk writes the gradient and the others add to it, which saves setting a large matrix to zero.
        weight_grad[plan.vocab_size if len(hidden) else 0 :] = 0.0
    parameters = inputs.parameters if any(needs[5:]) else ()
    return GradientSums(
        hidden=torch.empty_like(hidden) if needs[0] else None,
        weight=weight_grad,
        bias=torch.zeros_like(bias, dtype=plan.sum_dtype) if bias is not None and needs[2] else None,
        parameters=tuple(
            torch.empty_like(parameter) if number == 0 and plan.fold is not None else torch.zeros_like(parameter)
            for number, parameter in enumerate(parameters)
        ),
        folded=torch.zeros_like(inputs.folded) if parameters and inputs.folded is not None else None,
    )


def add_logits_gradient(sums: GradientSums, inputs: LossInputs, part: slice, gradient: Tensor) -> None:
    """Add what follows from ∂loss/∂L (c, V) of the tokens in `part`, the first of which is token 0 in the first call."""
    hidden, vocab_size = inputs.hidden[part], len(inputs.weight)
    if sums.bias is not None:
        sums.bias[:vocab_size] += gradient.sum(0)
    gradient = gradient.to(hidden.dtype)
    if sums.hidden is not None:
        _multiply_into(sums.hidden[part], gradient, inputs.weight)
    if sums.weight is not None:
        _multiply_into(sums.weight[:vocab_size], gradient.T, hidden, add=part.start > 0)


def add_network_gradient(
    sums: GradientSums, inputs: LossInputs, hidden: Tensor, graph: NetworkGraph, tau_grad: Tensor
) -> None:
    """Add what follows from ∂loss/∂τ (c,) of tokens whose hidden states (c, d) are given."""
    product_grad, *gradients = torch.autograd.grad(
        graph.tau, [graph.product, *inputs.parameters[1:]], tau_grad.to(graph.tau.dtype), allow_unused=True
    )
    for total, gradient in zip(sums.parameters[1:], gradients, strict=True):
        if gradient is not None:
            total += gradient
    if graph.state is not None:
        sums.parameters[inputs.state_place].add_(product_grad.T @ graph.state.to(product_grad.dtype))
    if sums.folded is not None:
        scaled = product_grad.to(sums.folded.dtype) * graph.inverse_norm.unsqueeze(-1)
        sums.folded.addmm_(scaled.T, hidden.to(sums.folded.dtype))
    elif graph.unit is not None:
        sums.parameters[0].add_(product_grad.T @ graph.unit.to(product_grad.dtype))


def finish_gradients(
    sums: GradientSums, plan: LossPlan, inputs: LossInputs, dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    """Return the gradients of hidden, weight, bias (the latter two in `dtype`) and all parameters; None if not needed."""
    if sums.folded is not None:
        # No other term contributes to this gradient, so it is written and not added. The product has the same
        # dtype as the others with the output weight; under autocast the gradient of W1 is as precise as that of
        # other matrices.
        first = sums.parameters[0]
        _multiply_into(first, sums.folded.to(inputs.weight.dtype), inputs.weight.T)
        if plan.is_centred:
            first.sub_(first.mean(-1, keepdim=True))
    weight = None if sums.weight is None else sums.weight.to(dtype)
    bias = None if sums.bias is None else sums.bias.to(dtype)
    return sums.hidden, weight, bias, *(sums.parameters or [None] * len(inputs.parameters))


def _multiply_into(total: Tensor, left: Tensor, right: Tensor, *, add: bool = False) -> None:
    """Write the matrix product left·right to `total`, or add it: (m, k)·(k, n) → (m, n).

    If the product has another dtype than `total`, it is computed in blocks of rows in one small buffer, because
    copying a matrix as large as the output weight for every chunk would cost more than the product.
    """
    if left.dtype == total.dtype:
        total.addmm_(left, right, beta=1.0 if add else 0.0)
        return
    num_rows = max(_MIN_NUM_ROWS, _NUM_VALUES_AT_A_TIME // total.shape[1])
    product = left.new_empty(min(num_rows, len(total)), total.shape[1])
    for total_rows, left_rows in zip(total.split(num_rows), left.split(num_rows), strict=True):
        part = torch.mm(left_rows, right, out=product[: len(total_rows)])
        if add:
            total_rows.add_(part)
        else:
            total_rows.copy_(part)
