"""The language-model loss on a GPU without its logits: statistics of softmax(L/τ) and its gradients, tile by tile in Triton.

    L = h Wᵀ (+ bias, then soft_cap·tanh(L/soft_cap)),   p = softmax(L/τ) with a temperature for every token

`softmax_statistics` reads the vocabulary once and keeps sums by running maximum. A program takes a block of tokens and
one split of the vocabulary; the few partial sums are merged afterwards, in a fixed order.

`softmax_gradients` is a hybrid: a kernel recomputes the logits of a stretch of the vocabulary and writes dL to a bounded
scratch buffer in the inputs' precision, then cuBLAS multiplies it out. Against one fused kernel this needs neither atomics
nor a second recomputation: four products of N·V·d in all (eager: three), and the same bits every time. The buffer holds all
tokens and a stretch of the vocabulary, rather than the reverse: dW of a stretch is then finished at once, and what is
carried from stretch to stretch in float32 is dh (N, d), which is smaller than dW (V, d) wherever N < V.

No gradient is filtered away, however small: skipping small p, as Cut Cross-Entropy may, turns ∂loss/∂τ into noise.

Triton is imported on first use: this file can be imported where there is none. Under TRITON_INTERPRET=1 (set before that
first use) everything here runs on the CPU, for tests.

Shapes: N tokens, d hidden size, V effective vocabulary.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tempnet.softmax.reference import IGNORE_INDEX

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Programs of the statistics kernel: several a multiprocessor on any card. A constant, so that sums do not depend on the card.
_NUM_PROGRAMS = 1024
# Row blocks that run side by side.
_GROUP = 8
_SCRATCH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What a program computes at a time; every size is a power of two ≥ 16."""

    num_tokens: int
    """Rows of the tile of logits."""
    num_vocab: int
    """Its columns."""
    num_hidden: int
    """Terms of the inner product that are loaded at a time."""
    num_warps: int
    """Warps a program."""
    num_stages: int
    """Loads in flight."""

    @classmethod
    def for_dtype(cls, dtype: torch.dtype) -> Tile:
        """Sizes whose accumulator fits the registers, and whose loads fit the shared memory of compute capability ≥ 8.0."""
        if dtype == torch.float32:
            return cls(num_tokens=64, num_vocab=64, num_hidden=32, num_warps=4, num_stages=3)
        return cls(num_tokens=128, num_vocab=128, num_hidden=64, num_warps=8, num_stages=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxStatistics:
    """What the losses need of every token's softmax; all (N,) in float32, without a graph."""

    maximum: Tensor
    """max L."""
    log_sum: Tensor
    """log Σ exp((L − maximum)/τ). It and the maximum are kept apart: logsumexp(L/τ) = maximum/τ + log_sum is a large number
    at small τ, and differences from it lose |L|/τ·10⁻⁷."""
    positive: Tensor
    """L at the target; 0 where the target is ignored."""
    entropy: Tensor
    """H(p) = log_sum − E_p[L − maximum]/τ."""
    cross_entropy: Tensor
    """log_sum + (maximum − positive)/τ; of no meaning where the target is ignored."""
    entropy_unit: Tensor | None
    """The entropy at τ = 1, with `with_unit`."""
    cross_entropy_unit: Tensor | None
    """The cross-entropy at τ = 1, with `with_unit`."""


def is_available(tensor: Tensor) -> bool:
    """Whether the kernels take a tensor: of 16 or 32 bits, on an NVIDIA GPU that Triton supports (capability ≥ 8.0).

    Under Triton's interpreter, tensors on the CPU as well. AMD's cards have too little shared memory for these tiles.
    """
    if tensor.dtype not in _DTYPES or importlib.util.find_spec("triton") is None:
        return False
    if tensor.is_cuda:
        return torch.version.cuda is not None and torch.cuda.get_device_capability(tensor.device) >= (8, 0)
    return tensor.device.type == "cpu" and _is_interpreted()


@torch.no_grad()
def softmax_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    tau: Tensor,
    *,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
    with_unit: bool = False,
    tile: Tile | None = None,
) -> SoftmaxStatistics:
    """Entropy, cross-entropy and what the gradients need of every token, in one pass over the vocabulary.

    Args:
        hidden: (N, d) in float32, bfloat16 or float16. Products are summed in float32; float32 inputs are multiplied as
            `torch.backends.cuda.matmul.fp32_precision` says.
        weight: (V, d), in the same dtype.
        targets: (N,) int64; IGNORE_INDEX matches no column.
        tau: (N,), positive.
        bias: (V,) or None.
        soft_cap: as in L above, or None.
        with_unit: also the two figures at τ = 1, at the cost of a second exponential a logit.
        tile: block sizes. Default: by dtype.

    Returns:
        The statistics. Memory beyond them: at most 24 bytes a token and split, below 1 MiB + 24·N bytes.
    """
    import triton

    from tempnet.softmax.triton_kernels import statistics_kernel

    tile = tile or Tile.for_dtype(hidden.dtype)
    inputs = _Inputs.of(hidden, weight, bias, soft_cap, tau)
    num_tokens, vocab_size = len(hidden), len(weight)
    num_row_blocks, num_tiles = triton.cdiv(num_tokens, tile.num_tokens), triton.cdiv(vocab_size, tile.num_vocab)
    num_tiles_per_split = triton.cdiv(num_tiles, triton.cdiv(_NUM_PROGRAMS, num_row_blocks))
    num_splits = triton.cdiv(num_tiles, num_tiles_per_split)  # none of them empty
    partials = inputs.tau.new_empty(6 if with_unit else 4, num_splits, num_tokens)
    with torch.cuda.device_of(hidden):
        statistics_kernel[(num_row_blocks * num_splits,)](
            inputs.hidden,
            inputs.weight,
            inputs.bias,
            inputs.soft_cap,
            targets.contiguous(),
            inputs.tau,
            partials,
            num_tokens,
            vocab_size,
            hidden.shape[1],
            num_splits,
            num_tiles_per_split,
            WITH_UNIT=with_unit,
            **_launch_options(tile, hidden),
        )
    return _merge(partials, inputs.tau)


@torch.no_grad()
def softmax_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    tau: Tensor,
    statistics: SoftmaxStatistics,
    row_scale: Tensor,
    *,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
    tile: Tile | None = None,
    scratch_bytes: int = _SCRATCH_BYTES,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias for dL = row_scale·(softmax(L/τ) − onehot(target)), times the cap's slope.

    Args:
        hidden, weight, targets, tau, bias, soft_cap, tile: as in `softmax_statistics`.
        statistics: from there.
        row_scale: (N,), 1 for the robust loss f(z, τ), 1/τ for the cross-entropy of L/τ; that of an ignored target counts
            as 0. With float16 inputs divide the gradients by the number of tokens, not the scale: small p would underflow.
        needs: which of the three to compute; without a bias its entry is ignored.
        scratch_bytes: bound of the buffer for dL; at least one tile of every token is taken.

    Returns:
        dh = dL W, dW = dLᵀ h and Σ dL over tokens, each in the dtype of its tensor, or None. All sums run in float32; dL,
        and the part of dh from one stretch of the vocabulary, are rounded to the inputs' dtype in between.
    """
    import triton

    from tempnet.softmax.triton_kernels import logits_gradient_kernel

    tile = tile or Tile.for_dtype(hidden.dtype)
    inputs = _Inputs.of(hidden, weight, bias, soft_cap, tau)
    num_tokens, vocab_size = len(hidden), len(weight)
    row_scale = row_scale.float().where(targets != IGNORE_INDEX, 0.0)
    hidden_grad = torch.zeros_like(inputs.hidden, dtype=torch.float32) if needs[0] else None
    weight_grad = torch.empty_like(inputs.weight) if needs[1] else None
    bias_grad = torch.empty_like(inputs.bias) if inputs.bias is not None and needs[2] else None

    # Stretches of equal width, so that the last is no sliver, and whole tiles, so that every row of the buffer is aligned.
    num_fitting = scratch_bytes // (num_tokens * hidden.element_size())
    num_stretches = triton.cdiv(vocab_size, max(num_fitting // tile.num_vocab, 1) * tile.num_vocab)
    width = triton.cdiv(triton.cdiv(vocab_size, num_stretches), tile.num_vocab) * tile.num_vocab
    # Zeros: a bfloat16 product on a CPU with AMX multiplies what lies beyond the columns, too, and a NaN there stays one.
    scratch = hidden.new_zeros(num_tokens, width)
    for start in range(0, vocab_size, width):
        part = slice(start, start + width)
        part_weight = inputs.weight[part]
        gradient = scratch[:, : len(part_weight)]
        with torch.cuda.device_of(hidden):
            logits_gradient_kernel[
                (triton.cdiv(num_tokens, tile.num_tokens) * triton.cdiv(len(part_weight), tile.num_vocab),)
            ](
                inputs.hidden,
                part_weight,
                None if inputs.bias is None else inputs.bias[part],
                inputs.soft_cap,
                targets - start,
                inputs.tau,
                statistics.maximum,
                statistics.log_sum,
                row_scale,
                gradient,
                num_tokens,
                len(part_weight),
                hidden.shape[1],
                width,
                **_launch_options(tile, hidden),
            )
        if hidden_grad is not None:
            hidden_grad += gradient @ part_weight
        if weight_grad is not None:
            torch.mm(gradient.T, inputs.hidden, out=weight_grad[part])
        if bias_grad is not None:
            bias_grad[part] = gradient.sum(0, dtype=torch.float32)
    return None if hidden_grad is None else hidden_grad.to(hidden.dtype), weight_grad, bias_grad


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """The tensors in the layout and dtype that the kernels read."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    soft_cap: float | None
    tau: Tensor

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, soft_cap: float | None, tau: Tensor) -> _Inputs:
        assert hidden.dtype == weight.dtype, f"hidden is {hidden.dtype}, weight {weight.dtype}"
        return cls(
            hidden=hidden.contiguous(),
            weight=weight.contiguous(),
            bias=None if bias is None else bias.contiguous(),
            soft_cap=soft_cap,
            tau=tau.float().contiguous(),
        )


def _launch_options(tile: Tile, hidden: Tensor) -> dict[str, Any]:
    """The compile-time arguments that both kernels share."""
    return {
        "GROUP": _GROUP,
        "BLOCK_TOKENS": tile.num_tokens,
        "BLOCK_VOCAB": tile.num_vocab,
        "BLOCK_HIDDEN": tile.num_hidden,
        "PRECISION": "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee",
        # The interpreter multiplies bfloat16 as if it were integers (triton-lang/triton#11584).
        "WIDEN": _is_interpreted() and hidden.dtype != torch.float32,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,  # Triton 3.9's default, which 3.10 will turn off
    }


def _merge(partials: Tensor, tau: Tensor) -> SoftmaxStatistics:
    """One set of sums from those of the splits of the vocabulary (4 or 6, num_splits, N): see `statistics_kernel`."""
    split_maximum, partition, moment, positive, *unit = partials
    maximum = split_maximum.amax(0)
    shift = split_maximum - maximum
    positive = positive.sum(0)

    def at(temperature: Tensor | float, partition: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
        """log Σ exp((L − max L)/τ) and E_p[L] − max L."""
        decay = torch.exp(shift / temperature)
        total = (decay * partition).sum(0)
        return total.log(), (decay * (moment + shift * partition)).sum(0) / total

    log_sum, mean = at(tau, partition, moment)
    log_sum_unit, mean_unit = at(1.0, *unit) if unit else (None, None)
    return SoftmaxStatistics(
        maximum=maximum,
        log_sum=log_sum,
        positive=positive,
        entropy=log_sum - mean / tau,
        cross_entropy=log_sum + (maximum - positive) / tau,
        entropy_unit=None if log_sum_unit is None or mean_unit is None else log_sum_unit - mean_unit,
        cross_entropy_unit=None if log_sum_unit is None else log_sum_unit + (maximum - positive),
    )


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
