"""The fold: compute TempNet's first layer from the hidden state with two small matrices, instead of from the logits.

With logits L = W h (see docs/method.md, "How the loss is computed without the logits"),

    W1 L = (W1 W) h                 W1 W is (d1, d), which takes d1·d products per token instead of V·d1
    ‖L‖² = hᵀ (WᵀW) h               WᵀW is (d, d), and the logits are not needed

WᵀW is built in float32 whatever the dtype of the weights, because large terms cancel in the norm. W1·W is built in
float32 too, except under autocast: there the logits themselves are products in bfloat16, and τ is as exact from both
(measured: relative error 5.9e-5 against 5.3e-5). With an output bias or a soft-cap L is not W h, so that there is no fold.

A network that reads L − mean L reads (C W) h, where C = 1 − 11ᵀ/V subtracts the mean row of W from every row. C is
symmetric and C C = C, so that W1 (C W) = (W1 C)(C W): the rows of W1, the smaller matrix, and of its gradient are centred.
Where the mean row is a large part of W, a product with W would round the differences of logits away. Then W is centred too
(`FoldCache.centre`), once per optimizer step. A network that reads L − max L does not fold, because the maximum of a row of
logits is not linear in h.

Shapes: N tokens, d hidden size, V effective vocabulary, d1 width of TempNet's first layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tempnet.dro import at_least_float32
from tempnet.network import TempNet

# Share of ‖W‖² that the mean row may have before it is subtracted. At this share rounding errors are twice as large.
_LARGEST_SHARE = 0.75
# Number of rows of W that are held in float32 at a time.
_NUM_ROWS = 4096


class FoldCache:
    """Cache of W1·W, WᵀW and C·W, which `num_uses` calls (micro-batches of a step) share; each is computed on first use.

    The owner of the weights must call :meth:`clear` after every optimizer step: DeepSpeed writes to parameters in ways that
    autograd's version counters do not see.
    """

    def __init__(self, num_uses: int = 1) -> None:
        self.num_uses = num_uses
        self._first: Tensor | None = None
        self._gram: Tensor | None = None
        self._has_large_mean: bool | None = None
        self._centred: Tensor | None = None

    @torch.no_grad()
    def centre(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return W (V, d) in a dtype, minus its mean row where that is a large part of it."""
        mean = None
        if self._has_large_mean is None:
            wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
            mean = weight.mean(0, dtype=wide)
            square = torch.linalg.vector_norm(weight, dtype=wide).square()
            self._has_large_mean = bool(mean.square().sum() * len(weight) > _LARGEST_SHARE * square)
        if not self._has_large_mean:
            return weight.to(dtype)
        if self._centred is None:
            assert mean is not None
            self._centred = torch.empty_like(weight, dtype=dtype)
            for out, rows in zip(self._centred.split(_NUM_ROWS), weight.split(_NUM_ROWS), strict=True):
                out.copy_(rows - mean)
        return self._centred

    def first(
        self, first_weight: Tensor, weight: Tensor, *, centred: bool, matmul_dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return W1·W (d1, d) from W1 (d1, V) and W (V, d), or W1·C·W if `centred`, in float32 at least.

        `matmul_dtype` is the dtype of the product; by default that of the result.
        """
        if self._first is None:
            first_weight = at_least_float32(first_weight.detach())
            first_weight = first_weight - first_weight.mean(-1, keepdim=True) if centred else first_weight
            self._first = _multiply(first_weight, weight, matmul_dtype)
        return self._first

    def gram(self, weight: Tensor, *, centred: bool) -> Tensor:
        """Return WᵀW (d, d) from W (V, d), or WᵀC·W if `centred`, in float32 at least."""
        if self._gram is None:
            weight = at_least_float32(weight.detach())
            # W is centred before the product, because subtracting the mean's contribution from WᵀW would suffer from
            # cancellation if all logits have a large common mean.
            weight = weight - weight.mean(0) if centred else weight
            self._gram = _multiply(weight.T, weight)
        return self._gram

    def clear(self, *, keep_gram: bool = False) -> None:
        """Delete the cached matrices, after an optimizer step; `keep_gram` keeps WᵀW and C·W, for a frozen W."""
        self._first = None
        if not keep_gram:
            self._gram = self._centred = self._has_large_mean = None


def fold_pays(
    num_tokens: int, num_hidden: int, vocab_size: int, num_first: int, *, num_uses: int = 1, trains: bool = True
) -> bool:
    """Return whether the fold needs fewer FLOPs than applying W1 to the logits, for N, d, V and d1.

    In multiply-adds, the fold builds W1·W once for `num_uses` calls and, if the TempNet is trained, propagates its
    gradient back once per call, V·d1·d each. It then needs d·d1 per token and direction, where else it is V·d1.
    """
    build = vocab_size * num_first * num_hidden
    directions = 2 if trains else 1
    folded = build / num_uses + (build if trains else 0) + directions * num_tokens * num_hidden * num_first
    return folded < directions * num_tokens * vocab_size * num_first


def can_fold_network(tempnet: TempNet) -> bool:
    """Return whether a network can be folded: its input, apart from its norm, must be linear in the hidden state."""
    return tempnet.transform is not None and tempnet.config.input_shift != "max"


@torch.no_grad()
def _multiply(left: Tensor, right: Tensor, matmul_dtype: torch.dtype | None = None) -> Tensor:
    dtype = matmul_dtype or left.dtype
    with torch.autocast(left.device.type, enabled=False):
        return (left.to(dtype) @ right.to(dtype)).to(left.dtype)
