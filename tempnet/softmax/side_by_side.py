"""The losses and gradients of several TempNets that read the same hidden states, with the logits of a chunk computed once.

On a frozen base, only the temperatures of the networks differ: the logits, their norms and their maxima are shared. The
softmax at the temperatures of all networks is computed for a few rows at a time, which stay in the processor's cache.
Each result is that of `linear_language_model_loss` for the network alone, up to rounding.

Shapes: K networks, N tokens, c tokens in a chunk, d hidden size, V effective vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tempnet.network import TempNet
from tempnet.softmax.chunks import compute_logits, compute_softmax
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.fold import FoldCache
from tempnet.softmax.gradients import GradientSums, add_network_gradient, allocate_gradients, finish_gradients
from tempnet.softmax.linear import LinearLoss
from tempnet.softmax.objectives import SoftmaxTerms, TokenResults, evaluate_objective
from tempnet.softmax.plan import ComputeOptions, LossInputs, LossPlan, OutputLayer
from tempnet.softmax.planning import plan_loss
from tempnet.softmax.reference import IGNORE_INDEX
from tempnet.softmax.temperatures import (
    NetworkGraph,
    invert_norms,
    needs_unit,
    predict_temperatures,
    shift_logits,
)
from tempnet.statistics import TokenValues

# Number of logits at the temperatures of all networks that are computed at a time (1 MiB in float32).
_NUM_LOGITS_AT_A_TIME = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One of the networks, with the loss that trains it."""

    config: TemperatureLossConfig
    """Configuration of the loss, `dro` or `ts_ce`."""
    tempnet: TempNet
    """The network."""
    fold_cache: FoldCache | None = None
    """Cache of W1·W between calls; its owner must clear it when the weights change."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What a call computes for one member."""

    plan: LossPlan
    parameters: tuple[Tensor, ...]
    inputs: LossInputs
    results: TokenResults
    sums: GradientSums


@torch.no_grad()
def side_by_side_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    members: Sequence[Member],
    *,
    num_targets: Tensor | float,
    gradient_scale: float | None = None,
    **options: Any,
) -> list[LinearLoss]:
    """Compute the losses of all members, and add the gradients of their networks to `grad` of the parameters.

    The hidden states and the output weight get no gradients.

    Args:
        hidden: (N, d) hidden states.
        weight: (V or more, d) output weight.
        targets: (N,) int64; IGNORE_INDEX marks tokens that are not counted.
        members: the K networks.
        num_targets: divisor of the losses' sums over tokens.
        gradient_scale: factor of the gradients of the sums over tokens; None: no gradients.
        options: vocab_size, bias, soft_cap, with_values, matmul_dtype and chunk_size of `linear_language_model_loss`.

    Returns:
        The loss, τ, values and slopes of every member.

    Raises:
        ValueError: see `linear_language_model_loss`.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        works = [_prepare(hidden, weight, member, gradient_scale is not None, **options) for member in members]
        first = works[0]
        size = min(first.plan.chunk_size, len(hidden))
        logits = first.results.losses.new_empty(size, first.plan.vocab_size)
        groups = _group_by_shift(works)
        for start in range(0, len(hidden), size):
            part = slice(start, min(start + size, len(hidden)))
            _add_chunk(groups, part, targets[part], logits[: part.stop - start])
        if gradient_scale is not None:
            for work in works:
                _write_gradients(work, weight.dtype, gradient_scale)
    return [
        LinearLoss(
            loss=work.results.losses.sum() / num_targets,
            tau=work.results.tau,
            values=TokenValues(*work.results.values) if work.results.values else None,
            slopes=work.results.slopes,
        )
        for work in works
    ]


def _prepare(
    hidden: Tensor,
    weight: Tensor,
    member: Member,
    with_gradients: bool,
    *,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
    with_values: bool = False,
    matmul_dtype: torch.dtype | None = None,
    chunk_size: int | None = None,
) -> _Work:
    layer = OutputLayer(weight=weight, vocab_size=vocab_size, bias=bias, soft_cap=soft_cap)
    options = ComputeOptions(matmul_dtype=matmul_dtype, fold_cache=member.fold_cache, chunk_size=chunk_size)
    with torch.enable_grad() if with_gradients else torch.no_grad():
        plan, parameters = plan_loss(hidden, layer, member.config, member.tempnet, options, with_values=with_values)
    inputs = LossInputs.prepare(plan, hidden, weight, bias, parameters)
    needs = [False] * 5 + [with_gradients] * len(parameters)
    return _Work(
        plan=plan,
        parameters=parameters,
        inputs=inputs,
        results=TokenResults.allocate(plan, hidden),
        sums=allocate_gradients(plan, inputs, hidden, weight, bias, needs),
    )


def _write_gradients(work: _Work, dtype: torch.dtype, scale: float) -> None:
    """Add the gradients of the sum over tokens times `scale` to `grad` of a network's parameters."""
    _, _, _, *gradients = finish_gradients(work.sums, work.plan, work.inputs, dtype)
    for parameter, gradient in zip(work.parameters, gradients, strict=True):
        if gradient is not None and parameter.requires_grad:
            gradient = gradient.mul_(scale).to(parameter.dtype)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _group_by_shift(works: Sequence[_Work]) -> list[list[_Work]]:
    """Return the members in groups whose networks read the logits with the same shift, or do not read them."""
    groups: defaultdict[str, list[_Work]] = defaultdict(list)
    for work in works:
        assert work.plan.tempnet is not None
        config = work.plan.tempnet.config
        groups[config.input_shift if config.reads_logits else "none"].append(work)
    return list(groups.values())


def _add_chunk(groups: Sequence[Sequence[_Work]], part: slice, targets: Tensor, logits: Tensor) -> None:
    """Process the tokens in `part`, whose targets (c,) and memory for logits (c, V) are given."""
    # A network that reads the logits as they are needs those of the weight as it is, which suit the others too.
    raw = [work for group in groups for work in group if not work.plan.is_free_of_shifts]
    base = raw[0] if raw else groups[0][0]
    plan, inputs = base.plan, base.inputs
    compute_logits(inputs, inputs.hidden[part], out=logits)
    if plan.soft_cap is not None:
        logits.div_(plan.soft_cap).tanh_().mul_(plan.soft_cap)
    for number, works in enumerate(groups, start=1):
        # Shifted logits are rounded anew, so that every group begins with those of the base.
        _add_group(works, part, targets, logits if number == len(groups) else logits.clone())


def _add_group(works: Sequence[_Work], part: slice, targets: Tensor, logits: Tensor) -> None:
    """Process the tokens in `part` for members of one group; their logits (c, V) are overwritten."""
    hidden = works[0].inputs.hidden[part]
    graphs = _predict_all(works, hidden, logits)
    logits.sub_(logits.amax(-1, keepdim=True))
    safe_targets = targets.where(targets != IGNORE_INDEX, 0).unsqueeze(-1)
    with_values = works[0].plan.with_values
    at_one = compute_softmax(logits.clone(), safe_targets, torch.empty_like(logits)) if with_values else None
    terms_at_all = _softmax_at_all(logits, torch.stack([tau for tau, _ in graphs]), safe_targets)
    for number, (work, (tau, graph)) in enumerate(zip(works, graphs, strict=True)):
        at_tau = SoftmaxTerms(*(values[number] for values in terms_at_all))
        terms = evaluate_objective(work.plan, targets, tau, at_tau, None)
        work.results.write(part, targets, tau, terms, at_tau, at_one)
        if work.sums.need_network:
            add_network_gradient(work.sums, work.inputs, hidden, graph, terms.tau_grad)


def _predict_all(works: Sequence[_Work], hidden: Tensor, logits: Tensor) -> list[tuple[Tensor, NetworkGraph]]:
    """Return τ (c,) and its graph for every network of a group; the logits (c, V) are shifted in place."""
    norms: dict[bool, Tensor] = {}
    units: dict[bool, Tensor] = {}
    readers = [work.plan.tempnet for work in works if work.plan.tempnet and work.plan.tempnet.config.reads_logits]
    if readers:
        shift_logits(readers[0], logits)
    graphs = []
    for work in works:
        assert work.plan.tempnet is not None
        config = work.plan.tempnet.config
        kind = config.reads_logits and config.normalize_input
        if kind not in norms:
            norms[kind] = invert_norms(work.plan.tempnet, logits)
        unit: Tensor | None = None
        if needs_unit(work.plan, work.inputs):
            if kind not in units:
                units[kind] = logits * norms[kind].unsqueeze(-1)
            unit = units[kind]
        graphs.append(
            predict_temperatures(work.plan, work.inputs, hidden, norms[kind], unit, with_graph=work.sums.need_network)
        )
    return graphs


def _softmax_at_all(shifted: Tensor, tau: Tensor, targets: Tensor) -> SoftmaxTerms:
    """Return the terms, each (K, c), at the temperatures of all networks.

    Args:
        shifted: (c, V) logits whose row maxima are 0.
        tau: (K, c) temperatures.
        targets: (c, 1) targets.
    """
    num_members, (num_rows, vocab_size) = len(tau), shifted.shape
    size = max(1, _NUM_LOGITS_AT_A_TIME // (num_members * vocab_size))
    scores, work = shifted.new_empty(2, num_members * size, vocab_size)
    found = SoftmaxTerms(*shifted.new_empty(3, num_members, num_rows))
    for start in range(0, num_rows, size):
        rows = slice(start, min(start + size, num_rows))
        count = rows.stop - start
        mine = scores[: num_members * count]
        torch.div(shifted[rows], tau[:, rows].unsqueeze(-1), out=mine.view(num_members, count, vocab_size))
        terms = compute_softmax(mine, targets[rows].repeat(num_members, 1), work[: len(mine)])
        for total, values in zip(found, terms, strict=True):
            total[:, rows] = values.view(num_members, count)
    return found
