"""Language-model losses from hidden states, computed with the logits of only a few tokens at a time.

`linear_language_model_loss(h, W, …)` equals `language_model_loss(h Wᵀ, …)`, including gradients, but takes memory
O(N·d + V·d). The gradients of a scalar loss are computed in the forward pass, while a chunk's logits exist, so that
nothing is computed twice. Losses per token (`reduction="none"`) are differentiated in a second pass, when their
upstream gradients are known.

On a GPU, the Triton kernels of `kernels.py` do the same without chunks (`fused.py`).

The fold (`fold.py`) makes the cost of TempNet almost negligible. Whether it is used is decided by a count of FLOPs;
the results with and without it agree up to rounding.

Shapes: N tokens, d hidden size, V effective vocabulary, d1 width of TempNet's first layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tempnet.network import TempNet
from tempnet.softmax.chunks import add_tokens_in_chunks
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.fold import FoldCache
from tempnet.softmax.fused import add_tokens_by_kernels, can_fuse
from tempnet.softmax.gradients import allocate_gradients, finish_gradients
from tempnet.softmax.objectives import TokenResults
from tempnet.softmax.plan import ComputeOptions, LossInputs, LossPlan, OutputLayer
from tempnet.softmax.planning import plan_loss
from tempnet.softmax.reference import IGNORE_INDEX
from tempnet.statistics import TokenValues


class LinearLoss(NamedTuple):
    """Result of :func:`linear_language_model_loss`."""

    loss: Tensor
    """Loss, in float32 at least: a scalar, or (N,) for `reduction="none"`, with 0 for ignored targets."""
    tau: Tensor
    """Temperature of every token, without an autograd graph: (N,)."""
    values: TokenValues | None
    """Cross-entropies at τ = 1 and at τ, and entropies at τ = 1, of every token; None if they were not requested."""
    slopes: Tensor
    """∂loss/∂τ of every token, without an autograd graph; for a robust loss it is H(p) − log V + ρ: (N,)."""


def linear_language_model_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    config: TemperatureLossConfig,
    tempnet: TempNet | None = None,
    *,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
    num_targets: Tensor | float | None = None,
    reduction: Literal["mean", "none"] = "mean",
    with_values: bool = False,
    matmul_dtype: torch.dtype | None = None,
    fold: bool | None = None,
    fold_cache: FoldCache | None = None,
    chunk_size: int | None = None,
) -> LinearLoss:
    """Compute the loss of a batch of tokens from their hidden states, and the temperature of each token.

    Args:
        hidden: (N, d) hidden states in float32, bfloat16 or float64. Sums are computed in float32 at least.
        weight: (V or more, d) output weight.
        targets: (N,) int64; IGNORE_INDEX marks tokens that are not counted.
        config: configuration of the loss.
        tempnet: the temperature network, for the losses that have one. It must have a transform layer and detach its input
            (the other ablations of Tables 18 and 20 need `language_model_loss`).
        vocab_size: effective vocabulary V; rows of the weight beyond it are padding and are ignored. By default all
            rows are used.
        bias: output bias with as many entries as the weight has rows, or None.
        soft_cap: logits become soft_cap·tanh(logits/soft_cap); None for no cap.
        num_targets: divisor of the sum over tokens; by default the number of valid targets of this call.
        reduction: `mean` divides the sum by `num_targets`; `none` returns the loss of every token.
        with_values: whether to return the values that `tempnet.statistics` needs, which takes one more pass over a
            chunk.
        matmul_dtype: dtype of the products with the output weight, as for autocast; by default that of the inputs.
        fold: True to use W1·W, False to use the chunk's logits, None to choose the possible way with fewer FLOPs.
        fold_cache: cache that keeps W1·W between calls; its owner must clear it when the weights change. By default
            W1·W is computed in every call.
        chunk_size: number of tokens per chunk; by default such that a chunk has about 8 million logits.

    Returns:
        The loss with gradients for hidden, weight, bias and every parameter of the TempNet; τ; the values; and the
        slopes.

    Raises:
        ValueError: if vocab_size is not in 1 … rows of the weight or not that of the TempNet, chunk_size is below 1,
            ρ is infeasible, the TempNet is not supported (see :func:`supports`), or `fold` is True although a bias, a
            soft-cap or the input shift `max` makes it impossible.
    """
    layer = OutputLayer(weight=weight, vocab_size=vocab_size, bias=bias, soft_cap=soft_cap)
    options = ComputeOptions(matmul_dtype=matmul_dtype, fold=fold, fold_cache=fold_cache, chunk_size=chunk_size)
    plan, parameters = plan_loss(hidden, layer, config, tempnet, options, with_values=with_values)
    return _evaluate(plan, hidden, weight, bias, targets, parameters, num_targets, reduction)


def _evaluate(
    plan: LossPlan,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    parameters: tuple[Tensor, ...],
    num_targets: Tensor | float | None,
    reduction: Literal["mean", "none"],
) -> LinearLoss:
    """Carry out a plan, and return its results; autograd can differentiate the loss.

    Args:
        plan, parameters: plan of the call, and parameters of the TempNet, from `plan_loss`.
        hidden, weight, bias, targets, num_targets, reduction: arguments of :func:`linear_language_model_loss`.
    """
    if num_targets is None:
        num_targets = (targets != IGNORE_INDEX).sum().clamp(min=1)
    function = _TokenLosses if reduction == "none" else _LossSum
    with torch.autocast(hidden.device.type, enabled=False):
        loss, tau, slopes, *values = function.apply(hidden, weight, bias, targets, plan, *parameters)
    return LinearLoss(
        loss=loss if reduction == "none" else loss / num_targets,
        tau=tau,
        values=TokenValues(*values) if plan.with_values else None,
        slopes=slopes,
    )


def compute_tokens(
    plan: LossPlan,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    parameters: tuple[Tensor, ...],
    needs: Sequence[bool],
    row_weights: Tensor | None = None,
) -> tuple[TokenResults, tuple[Tensor | None, ...]]:
    """Compute the results of all tokens and their gradients: with Triton kernels where they can be used, else in chunks.

    Args:
        plan: plan of the call.
        hidden, weight, bias, targets: arguments of :func:`linear_language_model_loss`.
        parameters: parameters of the TempNet, W1 first.
        needs: which of (hidden, weight, bias, _, _, *parameters) need a gradient.
        row_weights: (N,) weights; gradients are those of Σ row_weights·loss. None stands for 1.

    Returns:
        The results, and the gradients of hidden, weight, bias and the parameters; None for those not needed.
    """
    inputs = LossInputs.prepare(plan, hidden, weight, bias, parameters)
    results = TokenResults.allocate(plan, hidden)
    sums = allocate_gradients(plan, inputs, hidden, weight, bias, needs)
    add_tokens = add_tokens_by_kernels if can_fuse(plan, hidden) else add_tokens_in_chunks
    add_tokens(plan, inputs, targets, row_weights, results, sums)
    return results, finish_gradients(sums, plan, inputs, weight.dtype)


class _LossSum(torch.autograd.Function):
    """Sum of the token losses; gradients are computed in the forward pass and scaled in place in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        plan: LossPlan,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        needs = [needed and plan.with_gradients for needed in ctx.needs_input_grad]
        results, ctx.gradients = compute_tokens(plan, hidden, weight, bias, targets, parameters, needs)
        outputs = (results.losses.sum(), results.tau, results.slopes, *results.values)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the loss was differentiated before, and its gradients are gone: compute it again, or use reduction='none', "
                "which can be differentiated any number of times"
            )
        gradients, ctx.gradients = ctx.gradients, None
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(grad_outputs[0])
        hidden, weight, bias, *parameters = gradients
        return hidden, weight, bias, None, None, *parameters


class _TokenLosses(torch.autograd.Function):
    """Token losses; the backward pass processes all chunks again, with the upstream gradients as weights of rows."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        plan: LossPlan,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        needs = (False,) * len(ctx.needs_input_grad)
        results, _ = compute_tokens(plan, hidden, weight, bias, targets, parameters, needs)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.plan, ctx.parameters = plan, parameters
        outputs = (results.losses, results.tau, results.slopes, *results.values)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            _, gradients = compute_tokens(
                ctx.plan, hidden, weight, bias, targets, ctx.parameters, ctx.needs_input_grad, grad_outputs[0]
            )
        hidden_grad, weight_grad, bias_grad, *parameter_grads = gradients
        return hidden_grad, weight_grad, bias_grad, None, None, *parameter_grads
