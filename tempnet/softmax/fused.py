"""Losses and gradients of tokens with the Triton kernels, all tokens at once, on a GPU that can run them.

The fold gives τ of every token before the vocabulary is read, so that one pass yields all sums that the losses need.
"""

from __future__ import annotations

from torch import Tensor

from tempnet.softmax.gradients import GradientSums, add_network_gradient
from tempnet.softmax.kernels import softmax_gradients, softmax_statistics
from tempnet.softmax.launch import is_available
from tempnet.softmax.objectives import SoftmaxTerms, TokenResults, evaluate_objective
from tempnet.softmax.plan import LossInputs, LossPlan
from tempnet.softmax.temperatures import temperatures_from_hidden


def can_fuse(plan: LossPlan, hidden: Tensor) -> bool:
    """Return whether the kernels can process a call: they must run on the device, and τ must not need the logits."""
    reads_logits = plan.tempnet is not None and plan.tempnet.config.reads_logits
    is_known = plan.fold is not None if reads_logits else plan.config.kind.temperature != "oracle"
    return is_known and is_available(hidden.new_empty(0, dtype=plan.matmul_dtype))


def add_tokens_by_kernels(
    plan: LossPlan,
    inputs: LossInputs,
    targets: Tensor,
    row_weights: Tensor | None,
    results: TokenResults,
    sums: GradientSums,
) -> None:
    """Write the results of all tokens to `results`, and their gradients to `sums`.

    The arguments are those of `tempnet.softmax.chunks.add_tokens_in_chunks`.
    """
    if not len(inputs.hidden):
        return  # A kernel cannot be launched on an empty input; all sums are already 0.
    tau, graph = temperatures_from_hidden(plan, inputs, with_graph=sums.need_network)
    statistics = softmax_statistics(
        inputs.hidden,
        inputs.weight,
        targets,
        tau,
        bias=inputs.bias,
        soft_cap=plan.soft_cap,
        with_unit=plan.with_values,
    )
    at_tau = SoftmaxTerms(statistics.cross_entropy, statistics.entropy, statistics.excess)
    at_one = None
    if plan.with_values:
        assert statistics.cross_entropy_unit is not None
        assert statistics.entropy_unit is not None
        excess = statistics.entropy_unit - statistics.cross_entropy_unit
        at_one = SoftmaxTerms(statistics.cross_entropy_unit, statistics.entropy_unit, excess)
    terms = evaluate_objective(plan, targets, tau, at_tau, row_weights)
    results.write(slice(None), targets, tau, terms, at_tau, at_one)
    if graph is not None and sums.need_network:
        add_network_gradient(sums, inputs, inputs.hidden, graph, terms.tau_grad)
    if not sums.need_logits:
        return
    totals = (
        sums.hidden,
        None if sums.weight is None else sums.weight[: plan.vocab_size],
        None if sums.bias is None else sums.bias[: plan.vocab_size],
    )
    gradients = softmax_gradients(
        inputs.hidden,
        inputs.weight,
        targets,
        tau,
        statistics,
        terms.logits_scale,
        bias=inputs.bias,
        soft_cap=plan.soft_cap,
        needs=(sums.hidden is not None, sums.weight is not None, sums.bias is not None),
    )
    for total, gradient in zip(totals, gradients, strict=True):
        if total is not None and gradient is not None:
            total.copy_(gradient)
