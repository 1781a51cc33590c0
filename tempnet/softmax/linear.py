"""Language-model losses from hidden states, computed with the logits of only a few tokens at a time.

`linear_language_model_loss(h, W, …)` equals `language_model_loss(h Wᵀ, …)`, including gradients, but takes memory
O(N·d + V·d). The gradients are computed in the forward pass, while a chunk's logits exist, so that nothing is computed twice.
The fold (`fold.py`) makes the cost of TempNet almost negligible; whether it is used is decided by a count of FLOPs, and the
results with and without it agree up to rounding. `linear_language_model_losses` computes the losses of several TempNets on a
frozen base, with the logits of a chunk computed once.

Shapes: N tokens, d hidden size, V effective vocabulary, d1 width of TempNet's first layer, K networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tempnet.network import TempNet
from tempnet.rho import check_rho
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.fold import FoldCache, can_fold_network, fold_pays
from tempnet.softmax.reference import IGNORE_INDEX
from tempnet.softmax.tokens import (
    LossPlan,
    TokenLoss,
    add_tokens_by_kernels,
    add_tokens_in_chunks,
    can_fuse,
    network_parameters,
)
from tempnet.statistics import TokenValues

# Number of logits in a chunk (32 MiB in float32), unless these are fewer tokens than the minimum below.
_NUM_LOGITS_PER_CHUNK = 1 << 23
# Once a chunk, a product lays the output weight out anew, and the weight's gradient is read and written: for a few dozen
# tokens that costs as much as the product itself.
_MIN_NUM_TOKENS_PER_CHUNK = 512


def default_chunk_size(vocab_size: int) -> int:
    """Return the number of tokens whose logits exist at a time: about 8 million logits, and at least 512 tokens."""
    return max(_MIN_NUM_TOKENS_PER_CHUNK, _NUM_LOGITS_PER_CHUNK // vocab_size)


class LinearLoss(NamedTuple):
    """Result of :func:`linear_language_model_loss`."""

    loss: Tensor
    """Loss, a scalar in float32 at least."""
    tau: Tensor
    """Temperature of every token, without an autograd graph: (N,)."""
    values: TokenValues | None
    """Cross-entropies at τ = 1 and at τ, and entropies at τ = 1, of every token; None if they were not requested."""
    slopes: Tensor
    """∂loss/∂τ of every token, without an autograd graph; for a robust loss it is H(p) − log V + ρ: (N,)."""


@dataclass(frozen=True, slots=True)
class NetworkLoss:
    """One of several networks on a frozen base, with the loss that trains it."""

    config: TemperatureLossConfig
    """Configuration of the loss."""
    tempnet: TempNet | None
    """The network; None for a loss without one."""
    fold_cache: FoldCache | None = None
    """Cache that keeps W1·W between calls; its owner must clear it when the weights change. None: W1·W is computed in every
    call."""


def linear_language_model_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    config: TemperatureLossConfig,
    tempnet: TempNet | None = None,
    *,
    fold_cache: FoldCache | None = None,
    **options: Any,
) -> LinearLoss:
    """Compute the loss of a batch of tokens from their hidden states, and the temperature of each token.

    It has gradients for hidden, weight, bias and every parameter of the TempNet. Arguments and errors are those of
    :class:`NetworkLoss` and :func:`linear_language_model_losses`.
    """
    [found] = linear_language_model_losses(
        hidden, weight, targets, [NetworkLoss(config, tempnet, fold_cache)], **options
    )
    return found


def linear_language_model_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    networks: Sequence[NetworkLoss],
    *,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
    num_targets: Tensor | float | None = None,
    with_values: bool = False,
    matmul_dtype: torch.dtype | None = None,
    fold: bool | None = None,
    chunk_size: int | None = None,
) -> list[LinearLoss]:
    """Compute the losses of K networks, which share the logits, their norms and their maxima.

    Each result is that of the network alone, but hidden states and output weight get no gradients from several.

    Args:
        hidden: (N, d) hidden states in float32, bfloat16 or float64. Sums are computed in float32 at least.
        weight: (V or more, d) output weight.
        targets: (N,) int64; IGNORE_INDEX marks tokens that are not counted.
        networks: losses and TempNets. These must have a transform layer and detach their input (the other ablations of
            Tables 18 and 20 need `language_model_loss`).
        vocab_size: effective vocabulary V; rows of the weight beyond it are padding and are ignored. By default all
            rows are used.
        bias: output bias with as many entries as the weight has rows, or None.
        soft_cap: logits become soft_cap·tanh(logits/soft_cap); None for no cap.
        num_targets: divisor of the sum over tokens; by default the number of valid targets of this call.
        with_values: whether to return the values that `tempnet.statistics` needs, which takes one more pass over a
            chunk.
        matmul_dtype: dtype of the products with the output weight, as for autocast; by default that of the inputs.
        fold: True to use W1·W, False to use the chunk's logits, None to choose the possible way with fewer FLOPs.
        chunk_size: number of tokens per chunk; by default :func:`default_chunk_size`.

    Raises:
        ValueError: if vocab_size is not in 1 … rows of the weight or not that of a TempNet, chunk_size is below 1, ρ is
            infeasible, a TempNet is not supported (see :func:`supports`), networks read the logits with different shifts,
            or `fold` is True although a bias, a soft-cap or the input shift `max` makes it impossible.
    """
    vocab_size = len(weight) if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= len(weight):
        raise ValueError(f"vocab_size = {vocab_size} must lie in 1 … {len(weight)}, the rows of the output weight")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size = {chunk_size} must be at least 1 token, or None for the default")
    settings = [network.tempnet.config for network in networks if network.tempnet]
    shifts = {config.input_shift for config in settings if config.reads_logits}
    if len(shifts) > 1:
        raise ValueError(
            f"networks that share logits must read them with one input_shift, not {', '.join(sorted(shifts))}"
        )
    if len(networks) > 1:
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    plans, parameters = [], list[Tensor]()
    for network in networks:
        tempnet = _check_network(network, vocab_size)
        own = () if tempnet is None else network_parameters(tempnet)
        parameters += own
        plans.append(
            LossPlan(
                config=network.config,
                vocab_size=vocab_size,
                tempnet=tempnet,
                soft_cap=soft_cap,
                folds=tempnet is not None
                and _folds(tempnet, hidden, fold, network.fold_cache, is_product=bias is None and soft_cap is None),
                cache=network.fold_cache or FoldCache(),
                chunk_size=chunk_size or default_chunk_size(vocab_size),
                matmul_dtype=matmul_dtype or hidden.dtype,
                sum_dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32,
                with_values=with_values,
                with_gradients=torch.is_grad_enabled(),
            )
        )
    if num_targets is None:
        num_targets = (targets != IGNORE_INDEX).sum().clamp(min=1)
    with torch.autocast(hidden.device.type, enabled=False):
        outputs = _LossSums.apply(hidden, weight, bias, targets, plans, *parameters)
    size = len(outputs) // len(plans)
    return [
        LinearLoss(loss=loss / num_targets, tau=tau, slopes=slopes, values=TokenValues(*values) if values else None)
        for loss, tau, slopes, *values in (outputs[at : at + size] for at in range(0, len(outputs), size))
    ]


def supports(tempnet: TempNet) -> bool:
    """Return whether a TempNet can be computed from W1 x alone: it must have a transform layer and detach its input."""
    return tempnet.transform is not None and tempnet.config.stop_gradient


def _check_network(network: NetworkLoss, vocab_size: int) -> TempNet | None:
    """Return the TempNet that a loss uses, if any, after the checks of ρ and of the network."""
    config, tempnet = network.config, network.tempnet
    if config.kind.objective == "robust":
        check_rho(config.rho, vocab_size)
    if config.kind.temperature != "tempnet":
        return None
    assert tempnet is not None, f"the loss {config.name!r} needs a TempNet"
    if not supports(tempnet):
        raise ValueError("this TempNet has no transform layer, or lets gradients through its input")
    if tempnet.config.input_size != vocab_size:
        raise ValueError(
            f"vocab_size = {vocab_size}, but the TempNet was built for a vocabulary of {tempnet.config.input_size}"
        )
    return tempnet


def _folds(tempnet: TempNet, hidden: Tensor, fold: bool | None, cache: FoldCache | None, *, is_product: bool) -> bool:
    """Return whether a TempNet reads W1·W; `is_product` says whether the logits are W h."""
    if not tempnet.config.reads_logits:
        return False
    can_fold = is_product and can_fold_network(tempnet)
    if fold and not can_fold:
        raise ValueError(
            "fold = True is impossible with an output bias, a soft-cap or input_shift = 'max': what the TempNet reads is "
            "then not linear in h"
        )
    if fold is not None:
        return fold
    return can_fold and fold_pays(
        len(hidden),
        hidden.shape[1],
        tempnet.config.input_size,
        tempnet.config.hidden_size,
        num_uses=1 if cache is None else cache.num_uses,
        trains=any(parameter.requires_grad for parameter in tempnet.parameters()),
    )


class _LossSums(torch.autograd.Function):
    """Sums of the token losses of every plan, from hidden, weight, bias, targets, plans and the TempNets' parameters.

    Gradients are computed in the forward pass and scaled in place in the backward pass; with several plans there are only
    those of the parameters.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        hidden, weight, bias, targets, plans, *parameters = inputs
        needs = [needed and plans[0].with_gradients for needed in ctx.needs_input_grad]
        assert len(plans) == 1 or not any(needs[:3])
        losses, at = [], 0
        for plan in plans:
            end = at + (0 if plan.tempnet is None else sum(1 for _ in plan.tempnet.parameters()))
            own = tuple(parameters[at:end]), [*needs[:5], *needs[5 + at : 5 + end]]
            losses.append(TokenLoss(plan, hidden, weight, bias, *own))
            at = end
        if len(plans) == 1 and can_fuse(plans[0], hidden):
            add_tokens_by_kernels(losses[0], targets)
        else:
            add_tokens_in_chunks(losses, targets)
        ctx.gradients = [loss.gradients(weight.dtype) for loss in losses]
        outputs = [(loss.losses.sum(), loss.tau, loss.slopes, *loss.values) for loss in losses]
        ctx.mark_non_differentiable(*(value for own in outputs for value in own[1:]))
        return tuple(value for own in outputs for value in own)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the loss was differentiated before, and its gradients are gone: compute it again")
        gradients, ctx.gradients = ctx.gradients, None
        for own, factor in zip(gradients, grad_outputs[:: len(grad_outputs) // len(gradients)], strict=True):
            for gradient in own:
                if gradient is not None:
                    gradient.mul_(factor)
        return *gradients[0][:3], None, None, *(gradient for own in gradients for gradient in own[3:])
