"""Losses and gradients of tokens in chunks: only the logits of one chunk of tokens exist at a time.

The logits L (c, V) of a chunk are overwritten in place, first by (L − max L)/τ and then by their gradient. The two
buffers of that size are reused for the next chunk, because new memory would cause page faults.

Shapes: N tokens, c tokens in a chunk, d hidden size, V effective vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tempnet.softmax.gradients import GradientSums, add_logits_gradient, add_network_gradient
from tempnet.softmax.objectives import SoftmaxTerms, TokenResults, evaluate_objective
from tempnet.softmax.plan import LossInputs, LossPlan
from tempnet.softmax.reference import IGNORE_INDEX
from tempnet.softmax.temperatures import temperatures_from_logits


def add_tokens_in_chunks(
    plan: LossPlan,
    inputs: LossInputs,
    targets: Tensor,
    row_weights: Tensor | None,
    results: TokenResults,
    sums: GradientSums,
) -> None:
    """Write the results of all tokens to `results`, and add their gradients to `sums`.

    Args:
        plan: plan of the call.
        inputs: tensors of the call.
        targets: (N,) int64 targets.
        row_weights: (N,) weights; gradients are those of Σ row_weights·loss. None stands for 1.
        results: results of the tokens, which are overwritten.
        sums: sums of gradients, to which those of the tokens are added.
    """
    num_tokens = len(inputs.hidden)
    buffers = results.losses.new_empty(2, min(plan.chunk_size, num_tokens), plan.vocab_size)
    for start in range(0, num_tokens, plan.chunk_size):
        part = slice(start, min(start + plan.chunk_size, num_tokens))
        _add_chunk(plan, inputs, part, targets[part], row_weights, buffers[:, : part.stop - start], results, sums)


def _add_chunk(
    plan: LossPlan,
    inputs: LossInputs,
    part: slice,
    targets: Tensor,
    row_weights: Tensor | None,
    buffers: Tensor,
    results: TokenResults,
    sums: GradientSums,
) -> None:
    """Process the tokens in `part`, whose targets (c,) and working memory (2, c, V) are given."""
    hidden, (logits, work) = inputs.hidden[part], buffers
    compute_logits(inputs, hidden, out=logits)
    cap_slope = None
    if plan.soft_cap is not None:
        logits.div_(plan.soft_cap).tanh_()
        cap_slope = 1 - logits.square()  # The derivative of the cap, for the chain rule.
        logits.mul_(plan.soft_cap)
    is_valid = targets != IGNORE_INDEX
    safe_targets = targets.where(is_valid, 0).unsqueeze(-1)
    tau, graph = temperatures_from_logits(plan, inputs, hidden, logits, with_graph=sums.need_network)

    # The maximum is subtracted before the division, because L/τ would lose the digits of small differences at
    # small τ.
    shifted = logits.sub_(logits.amax(-1, keepdim=True))
    at_one = compute_softmax(shifted.clone(), safe_targets, work) if plan.with_values else None
    at_tau = compute_softmax(shifted.div_(tau.unsqueeze(-1)), safe_targets, work)
    weights = None if row_weights is None else row_weights[part].to(plan.sum_dtype)
    terms = evaluate_objective(plan, targets, tau, at_tau, weights)
    results.write(part, targets, tau, terms, at_tau, at_one)
    if graph is not None and sums.need_network:
        add_network_gradient(sums, inputs, hidden, graph, terms.tau_grad)
    if sums.need_logits:
        gradient = work  # The probabilities p.
        if not bool((terms.logits_scale == 1).all()):
            gradient.mul_(terms.logits_scale.unsqueeze(-1))
        gradient.scatter_add_(-1, safe_targets, -terms.logits_scale.unsqueeze(-1))
        if cap_slope is not None:
            gradient.mul_(cap_slope)
        add_logits_gradient(sums, inputs, part, gradient)


def compute_logits(inputs: LossInputs, hidden: Tensor, out: Tensor) -> None:
    """Write h Wᵀ + bias (c, V) of hidden states (c, d) to `out`."""
    if hidden.dtype == out.dtype and inputs.bias is None:
        torch.mm(hidden, inputs.weight.T, out=out)
    else:
        out.copy_(F.linear(hidden, inputs.weight, inputs.bias))


def compute_softmax(scores: Tensor, targets: Tensor, out: Tensor) -> SoftmaxTerms:
    """Write the probabilities p (c, V) to `out`, and return their cross-entropy, entropy and its excess.

    The largest p is 1/Σ exp(s), which gives the partition function without another pass. On CPUs, a product in place
    and its sum is several times faster than `vecdot`.

    Args:
        scores: (c, V) scores s whose row maxima are 0; they are overwritten.
        targets: (c, 1) targets.
        out: (c, V) memory for p.
    """
    positive = scores.gather(-1, targets).squeeze(-1)
    torch.softmax(scores, dim=-1, out=out)
    log_partition = -out.amax(-1).log()
    mean = scores.mul_(out).sum(-1)
    return SoftmaxTerms(log_partition - positive, log_partition - mean, positive - mean)
