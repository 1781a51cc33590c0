"""The losses and gradients of several TempNets that read the same hidden states, with the logits of a chunk computed once.

On a frozen base, only the temperatures of the networks differ: the logits, their norms and their maxima are shared. The
softmax at the temperatures of all networks is computed for a few rows at a time, which stay in the processor's cache.
Each result equals that of `linear_language_model_loss` for the network alone, up to rounding.

Micro-batches and workers add up the gradients of W1·W (d1, d), where W1 is folded, and only the total is carried back to
W1 (d1, V), which is larger by V/d.

Shapes: K networks, N tokens, c tokens in a chunk, d hidden size, V effective vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tempnet.network import TempNet
from tempnet.softmax.chunks import compute_logits, compute_softmax
from tempnet.softmax.fold import FoldCache
from tempnet.softmax.gradients import GradientSums, add_network_gradient, allocate_gradients, finish_gradients
from tempnet.softmax.linear import LinearLoss
from tempnet.softmax.objectives import SoftmaxTerms, TokenResults, evaluate_objective
from tempnet.softmax.plan import ComputeOptions, LossInputs, LossPlan, OutputLayer
from tempnet.softmax.planning import can_fold, plan_loss
from tempnet.softmax.reference import IGNORE_INDEX, TemperatureLossConfig
from tempnet.softmax.temperatures import NetworkGraph, shift_logits, temperatures_from_shifted
from tempnet.statistics import TokenValues

# Number of logits at the temperatures of all networks that are computed at a time (1 MiB in float32).
_NUM_LOGITS_AT_A_TIME = 1 << 18
# Shifts can be applied one after the other to the same logits in this order: each replaces the one before.
_SHIFTS = ("none", "mean", "max")


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


class MemberGradients:
    """The gradients of all members for the tokens of a call."""

    def __init__(self, works: Sequence[_Work], dtype: torch.dtype) -> None:
        self._works, self._dtype = works, dtype

    def tensors(self) -> list[Tensor]:
        """Return the sums over tokens, to be added up in place over workers, before `write` is called."""
        found: list[Tensor] = []
        for work in self._works:
            folded, (first, *others) = work.sums.folded, work.sums.parameters
            found += [first if folded is None else folded, *others]
        return found

    def add(self, other: MemberGradients) -> None:
        """Add the gradients of another call with the same members and weights."""
        for total, part in zip(self.tensors(), other.tensors(), strict=True):
            total.add_(part)

    @torch.no_grad()
    def write(self, num_targets: Tensor | float) -> None:
        """Divide the sums by the number of targets, and add them to `grad` of the networks' parameters."""
        for total in self.tensors():
            total.div_(num_targets)
        for work in self._works:
            _, _, _, *gradients = finish_gradients(work.sums, work.plan, work.inputs, self._dtype)
            for parameter, gradient in zip(work.parameters, gradients, strict=True):
                if gradient is not None and parameter.requires_grad:
                    gradient = gradient.to(parameter.dtype)
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


@torch.no_grad()
def side_by_side_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    members: Sequence[Member],
    *,
    num_targets: Tensor | float,
    with_gradients: bool = True,
    **options: Any,
) -> tuple[list[LinearLoss], MemberGradients | None]:
    """Compute the losses of all members, and the gradients of their networks.

    The hidden states and the output weight get no gradients.

    Args:
        hidden: (N, d) hidden states.
        weight: (V or more, d) output weight.
        targets: (N,) int64; IGNORE_INDEX marks tokens that are not counted.
        members: the K networks.
        num_targets: divisor of the losses' sums over tokens.
        with_gradients: whether to compute gradients.
        options: vocab_size, bias, soft_cap, with_values, matmul_dtype and chunk_size of `linear_language_model_loss`.

    Returns:
        The loss, τ, values and slopes of every member, and the gradients of the losses' sums over tokens, if they are
        computed.

    Raises:
        ValueError: see `linear_language_model_loss`.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        works = [_prepare(hidden, weight, member, with_gradients, **options) for member in members]
        first = works[0]
        size = min(first.plan.chunk_size, len(hidden))
        logits = first.results.losses.new_empty(size, first.plan.vocab_size)
        for start in range(0, len(hidden), size):
            part = slice(start, min(start + size, len(hidden)))
            _add_chunk(works, part, targets[part], logits[: part.stop - start])
    losses = [
        LinearLoss(
            loss=work.results.losses.sum() / num_targets,
            tau=work.results.tau,
            values=TokenValues(*work.results.values) if work.results.values else None,
            slopes=work.results.slopes,
        )
        for work in works
    ]
    return losses, MemberGradients(works, weight.dtype) if with_gradients else None


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
    options = ComputeOptions(
        matmul_dtype=matmul_dtype,
        # Always where it is possible, because all calls whose gradients are added must agree.
        fold=can_fold(layer, member.tempnet),
        fold_cache=member.fold_cache,
        chunk_size=chunk_size,
    )
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


def _add_chunk(works: Sequence[_Work], part: slice, targets: Tensor, logits: Tensor) -> None:
    """Process the tokens in `part`, whose targets (c,) and memory for logits (c, V) are given."""
    plan, inputs = works[0].plan, works[0].inputs
    hidden = inputs.hidden[part]
    compute_logits(inputs, hidden, out=logits)
    if plan.soft_cap is not None:
        logits.div_(plan.soft_cap).tanh_().mul_(plan.soft_cap)
    graphs = _predict_all(works, part, logits)
    logits.sub_(logits.amax(-1, keepdim=True))
    safe_targets = targets.where(targets != IGNORE_INDEX, 0).unsqueeze(-1)
    at_one = compute_softmax(logits.clone(), safe_targets, torch.empty_like(logits)) if plan.with_values else None
    cross_entropies, entropies = _softmax_at_all(logits, torch.stack([tau for tau, _ in graphs]), safe_targets)
    for number, (work, (tau, graph)) in enumerate(zip(works, graphs, strict=True)):
        at_tau = SoftmaxTerms(cross_entropies[number], entropies[number])
        terms = evaluate_objective(work.plan, targets, tau, at_tau, None)
        work.results.write(part, targets, tau, terms, at_tau, at_one)
        if work.sums.need_network:
            add_network_gradient(work.sums, work.inputs, hidden, graph, terms.tau_grad)


def _predict_all(works: Sequence[_Work], part: slice, logits: Tensor) -> list[tuple[Tensor, NetworkGraph]]:
    """Return τ (c,) and its graph for every network; the logits (c, V) may be shifted in place."""
    found: dict[int, tuple[Tensor, NetworkGraph]] = {}
    norms: dict[tuple[str, bool, bool], Tensor] = {}

    def shift_of(number: int) -> int:
        tempnet = works[number].plan.tempnet
        assert tempnet is not None
        return _SHIFTS.index(tempnet.config.input_shift)

    for number in sorted(range(len(works)), key=shift_of):
        work = works[number]
        assert work.plan.tempnet is not None
        config = work.plan.tempnet.config
        kind = config.input_shift, config.normalize_input, config.reads_logits
        if kind not in norms:
            norms[kind] = shift_logits(work.plan.tempnet, logits)
        found[number] = temperatures_from_shifted(
            work.plan, work.inputs, work.inputs.hidden[part], logits, norms[kind], with_graph=work.sums.need_network
        )
    return [found[number] for number in range(len(works))]


def _softmax_at_all(shifted: Tensor, tau: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return cross-entropies and entropies, both (K, c), at the temperatures of all networks.

    Args:
        shifted: (c, V) logits whose row maxima are 0.
        tau: (K, c) temperatures.
        targets: (c, 1) targets.
    """
    num_members, (num_rows, vocab_size) = len(tau), shifted.shape
    size = max(1, _NUM_LOGITS_AT_A_TIME // (num_members * vocab_size))
    scores, work = shifted.new_empty(2, num_members * size, vocab_size)
    cross_entropies, entropies = shifted.new_empty(2, num_members, num_rows)
    for start in range(0, num_rows, size):
        rows = slice(start, min(start + size, num_rows))
        count = rows.stop - start
        mine = scores[: num_members * count]
        torch.div(shifted[rows], tau[:, rows].unsqueeze(-1), out=mine.view(num_members, count, vocab_size))
        terms = compute_softmax(mine, targets[rows].repeat(num_members, 1), work[: len(mine)])
        cross_entropies[:, rows] = terms.cross_entropy.view(num_members, count)
        entropies[:, rows] = terms.entropy.view(num_members, count)
    return cross_entropies, entropies
