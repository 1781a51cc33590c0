"""Statistics of softmax(L/τ) and its gradients on a GPU without storing the logits L, computed tile by tile in Triton.

    L = h Wᵀ (+ bias, then soft_cap·tanh(L/soft_cap)),   p = softmax(L/τ) with a temperature for every token

`softmax_statistics` reads the vocabulary once and accumulates sums relative to a running maximum. A program processes
a block of tokens and one split of the vocabulary; the few partial sums are merged afterwards, in a fixed order.

`softmax_gradients` is a hybrid: a kernel recomputes the logits of one section of the vocabulary and writes dL to a
scratch buffer, in the precision of the inputs; then cuBLAS computes the products with it. Compared with one fused kernel,
this needs neither atomics nor a second recomputation: it takes four products of N·V·d in total (eager: three), and its
results are bitwise reproducible. The buffer holds all tokens and a section of the vocabulary, rather than the reverse: the
dW of a section is then complete at once, and only dh (N, d) is accumulated in float32.

No gradient is skipped, however small: skipping small p, as Cut Cross-Entropy may, turns ∂loss/∂τ into noise.

Triton is imported on first use, so that this file can be imported without it. With TRITON_INTERPRET=1 (set before that
first use) everything here runs on the CPU, for tests.

Shapes: N tokens, d hidden size, V effective vocabulary.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tempnet.softmax.reference import IGNORE_INDEX

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Number of row blocks that run at the same time.
_GROUP = 8
# Approximate number of programs of the statistics kernel: several per multiprocessor on any GPU. It is a constant, so
# that the sums do not depend on the GPU.
_NUM_PROGRAMS = 1024
_SCRATCH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Block of logits that a program computes at a time; its first three sizes are powers of two ≥ 16.

    `num_hidden` terms of the inner product are loaded at a time, with `num_stages` loads in flight.
    """

    num_tokens: int
    num_vocab: int
    num_hidden: int
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, dtype: torch.dtype, capability: tuple[int, int], *, is_plain: bool) -> Tile:
        """Return sizes for inputs of this dtype on a GPU of this compute capability, which is at least 8.0.

        `is_plain` says that there is neither a bias nor a soft cap, which need registers.
        """
        if dtype == torch.float32:
            return cls(num_tokens=64, num_vocab=64, num_hidden=32, num_warps=4, num_stages=3)
        # Capabilities 9.0 to 11 have 227 KiB of shared memory, those before and after them as little as 99.
        num_vocab = 256 if is_plain and (9, 0) <= capability < (12, 0) else 128
        return cls(num_tokens=128, num_vocab=num_vocab, num_hidden=64, num_warps=8, num_stages=3)

    def launch_options(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the compile-time arguments that both kernels share, for inputs of this dtype."""
        return {
            "GROUP": _GROUP,
            "BLOCK_TOKENS": self.num_tokens,
            "BLOCK_VOCAB": self.num_vocab,
            "BLOCK_HIDDEN": self.num_hidden,
            "PRECISION": "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee",
            # The interpreter multiplies bfloat16 values as if they were integers (triton-lang/triton#11584).
            "WIDEN": _is_interpreted() and dtype != torch.float32,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,  # This is the default of Triton 3.9; Triton 3.10 will turn it off.
        }


def is_available(tensor: Tensor) -> bool:
    """Return whether the kernels accept a tensor: 16- or 32-bit floats, on an NVIDIA GPU of compute capability ≥ 8.0.

    Triton's interpreter accepts tensors on the CPU too. AMD GPUs have too little shared memory for these tiles.
    """
    if tensor.dtype not in _DTYPES or importlib.util.find_spec("triton") is None:
        return False
    if tensor.is_cuda:
        return torch.version.cuda is not None and _capability(tensor) >= (8, 0)
    return tensor.device.type == "cpu" and _is_interpreted()


def _capability(tensor: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (8, 0)


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


class SoftmaxTerms(NamedTuple):
    """Terms of a softmax that all losses are computed from, each (N,) in nats."""

    cross_entropy: Tensor
    """Cross-entropy; without meaning where the target is ignored."""
    entropy: Tensor
    """Entropy H(p)."""
    excess: Tensor
    """H(p) − cross-entropy = (L_y − E_p[L])/τ. For nearly flat logits it is a small difference of the other two, so it is
    computed from the logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxStatistics:
    """Statistics of every token's softmax that the losses need; all are (N,) in float32, without an autograd graph."""

    maximum: Tensor
    """Maximum of the logits, max L."""
    log_sum: Tensor
    """log Σ exp((L − maximum)/τ). It is stored separately from the maximum, because logsumexp(L/τ) = maximum/τ +
    log_sum is a large number at small τ, and differences from it would have an error of |L|/τ·10⁻⁷."""
    at_tau: SoftmaxTerms
    """Terms at the temperatures."""
    at_one: SoftmaxTerms | None
    """Terms at τ = 1; None if they were not requested by `with_unit`."""


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
    """Compute entropy, cross-entropy and what the gradients need for every token, in one pass over the vocabulary.

    The additional memory is at most 24 bytes per token and split, which is below 1 MiB + 24·N bytes.

    Args:
        hidden: (N, d) in float32, bfloat16 or float16. Products are summed in float32; the precision of products of
            float32 inputs is that of `torch.backends.cuda.matmul.fp32_precision`.
        weight: (V, d), in the same dtype.
        targets: (N,) int64; IGNORE_INDEX matches no column.
        tau: (N,), positive.
        bias, soft_cap: (V,) and a number, or None (see the docstring of this module).
        with_unit: whether to compute the terms at τ = 1 too, which takes a second exponential per logit.
        tile: block sizes; by default :meth:`Tile.choose`'s.
    """
    import triton

    from tempnet.softmax.triton_kernels import statistics_kernel

    is_plain = bias is None and soft_cap is None
    tile = tile or Tile.choose(hidden.dtype, _capability(hidden), is_plain=is_plain)
    inputs = _contiguous(hidden, weight, bias, tau)
    num_tokens, vocab_size = len(hidden), len(weight)
    num_row_blocks, num_tiles = triton.cdiv(num_tokens, tile.num_tokens), triton.cdiv(vocab_size, tile.num_vocab)
    num_tiles_per_split = triton.cdiv(num_tiles, triton.cdiv(_NUM_PROGRAMS, num_row_blocks))
    num_splits = triton.cdiv(num_tiles, num_tiles_per_split)  # No split is empty.
    partials = inputs[-1].new_empty(6 if with_unit else 4, num_splits, num_tokens)
    with torch.cuda.device_of(hidden):
        statistics_kernel[(num_row_blocks * num_splits,)](
            *inputs[:3],
            soft_cap,
            targets.contiguous(),
            inputs[-1],
            partials,
            num_tokens,
            vocab_size,
            hidden.shape[1],
            num_splits,
            num_tiles_per_split,
            WITH_UNIT=with_unit,
            **tile.launch_options(hidden.dtype),
        )
    return _merge(partials, inputs[-1])


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
    """Compute gradients of hidden, weight and bias for dL = row_scale·(softmax(L/τ) − onehot(target))·(cap's slope).

    Args:
        hidden, weight, targets, tau, bias, soft_cap, tile: as in `softmax_statistics`, whose result are the `statistics`.
        row_scale: (N,), 1 for the robust loss f(z, τ), 1/τ for the cross-entropy of L/τ; 0 is used for ignored targets.
        needs: which of the three gradients to compute; without a bias its entry is ignored.
        scratch_bytes: maximum size of the buffer for dL, but it holds at least one tile of columns for every token.

    dh = dL W, dW = dLᵀ h and Σ dL over tokens have the dtype of their tensors. All sums are in float32, but dL, and the
    part of dh from one section of the vocabulary, are rounded to the dtype of the inputs.
    """
    import triton

    from tempnet.softmax.triton_kernels import logits_gradient_kernel

    is_plain = bias is None and soft_cap is None
    tile = tile or Tile.choose(hidden.dtype, _capability(hidden), is_plain=is_plain)
    hidden, weight, bias, tau = _contiguous(hidden, weight, bias, tau)
    num_tokens, vocab_size = len(hidden), len(weight)
    row_scale = row_scale.float().where(targets != IGNORE_INDEX, 0.0)
    hidden_grad = torch.zeros_like(hidden, dtype=torch.float32) if needs[0] else None
    weight_grad = torch.empty_like(weight) if needs[1] else None
    bias_grad = torch.empty_like(bias) if bias is not None and needs[2] else None

    width = _section_width(num_tokens, vocab_size, tile, scratch_bytes // hidden.element_size())
    # The buffer is set to zero, because bfloat16 products on a CPU with AMX also read beyond the columns, where
    # uninitialised memory could be NaN and would spread.
    scratch = hidden.new_zeros(num_tokens, width)
    for start in range(0, vocab_size, width):
        part = slice(start, start + width)
        gradient = scratch[:, : len(weight[part])]  # dL of one section, whose rows are contiguous
        num_tiles = triton.cdiv(num_tokens, tile.num_tokens) * triton.cdiv(gradient.shape[1], tile.num_vocab)
        with torch.cuda.device_of(hidden):
            logits_gradient_kernel[(num_tiles,)](
                hidden,
                weight[part],
                None if bias is None else bias[part],
                soft_cap,
                targets - start,
                tau,
                statistics.maximum,
                statistics.log_sum,
                row_scale,
                gradient,
                *gradient.shape,
                hidden.shape[1],
                gradient.stride(0),
                **tile.launch_options(hidden.dtype),
            )
        if hidden_grad is not None:
            hidden_grad += gradient @ weight[part]
        if weight_grad is not None:
            torch.mm(gradient.T, hidden, out=weight_grad[part])
        if bias_grad is not None:
            bias_grad[part] = gradient.sum(0, dtype=torch.float32)
    return None if hidden_grad is None else hidden_grad.to(hidden.dtype), weight_grad, bias_grad


def _contiguous(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tau: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return the inputs in the layout and dtype that the kernels read."""
    assert hidden.dtype == weight.dtype, f"hidden is {hidden.dtype}, weight {weight.dtype}"
    bias = None if bias is None else bias.contiguous()
    return hidden.contiguous(), weight.contiguous(), bias, tau.float().contiguous()


def _section_width(num_tokens: int, vocab_size: int, tile: Tile, num_scratch: int) -> int:
    """Return into how wide sections the vocabulary is cut, for a buffer (num_tokens, width) of at most `num_scratch` numbers.

    They have about equal widths, and consist of whole tiles, so that every row of the buffer is aligned.
    """
    num_tiles_fitting = max(num_scratch // num_tokens // tile.num_vocab, 1)
    num_sections = -(-vocab_size // (num_tiles_fitting * tile.num_vocab))
    return -(-vocab_size // (num_sections * tile.num_vocab)) * tile.num_vocab


def _merge(partials: Tensor, tau: Tensor) -> SoftmaxStatistics:
    """Merge the partial sums (4 or 6, num_splits, N) of the splits of the vocabulary (see `statistics_kernel`)."""
    split_maximum, partition, moment, positive, *unit = partials
    maximum, positive = split_maximum.amax(0), positive.sum(0)
    shift = split_maximum - maximum

    def at(temperature: Tensor | float, partition: Tensor, moment: Tensor) -> tuple[Tensor, SoftmaxTerms]:
        """Return log Σ exp((L − max L)/τ) and the terms at τ, each (N,)."""
        decay = torch.exp(shift / temperature)
        total = (decay * partition).sum(0)
        log_sum, mean = total.log(), (decay * (moment + shift * partition)).sum(0) / total  # mean: E_p[L] − max L
        return log_sum, SoftmaxTerms(
            cross_entropy=log_sum + (maximum - positive) / temperature,
            entropy=log_sum - mean / temperature,
            excess=((positive - maximum) - mean) / temperature,
        )

    log_sum, at_tau = at(tau, partition, moment)
    return SoftmaxStatistics(
        maximum=maximum,
        log_sum=log_sum,
        at_tau=at_tau,
        at_one=at(1.0, *unit)[1] if unit else None,
    )
