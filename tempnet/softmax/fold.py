"""The fold: TempNet's whole input is two small matrices away from the hidden state (method §3).

With logits L = W h,

    W1 L = (W1 W) h                 (d1, d) in place of V·d1 products a token
    ‖L‖² = hᵀ (WᵀW) h               (d, d) in place of the logits

WᵀW is built in float32 whatever the dtype of the weights: a norm is what is left of large terms. So is W1·W, except under
autocast, where the logits themselves are products in bfloat16: there τ from a W1·W in bfloat16 has the error of τ from those
logits (docs/log.md). An output bias or a soft-cap makes L something else: no fold then.

A network that reads L − mean L reads (C W) h, where C = 1 − 11ᵀ/V centres the rows of W. C is symmetric, so that
W1 (C W) = (W1 C) W: it is the smaller W1 whose rows are centred, and the rows of its gradient. The maximum of a row is not
linear in h: a network that reads L − max L does not fold.

Shapes: N tokens, d hidden size, V effective vocabulary, d1 TempNet's first layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tempnet.network import TempNet


class FoldCache:
    """W1·W and WᵀW, each made when first asked for and kept until it is told that the weights have changed.

    The owner of the weights calls :meth:`clear` after every optimizer step; version counters of tensors would not do,
    as DeepSpeed writes to parameters behind autograd's back.
    """

    def __init__(self, num_uses: int = 1) -> None:
        """`num_uses`: how many calls share what is kept (micro-batches of a step); it tips the choice of `fold_pays`."""
        self.num_uses = num_uses
        self._first: Tensor | None = None
        self._gram: Tensor | None = None

    def first(
        self, first_weight: Tensor, weight: Tensor, *, centred: bool, matmul_dtype: torch.dtype | None = None
    ) -> Tensor:
        """W1·W (d1, d) from W1 (d1, V) and W (V, d), or W1·C·W if centred, in float32 at least.

        It is multiplied in `matmul_dtype`; default: float32, float64 for float64.
        """
        if self._first is None:
            first_weight = _exact(first_weight)
            first_weight = first_weight - first_weight.mean(-1, keepdim=True) if centred else first_weight
            self._first = _product(first_weight, weight, matmul_dtype)
        return self._first

    def gram(self, weight: Tensor, *, centred: bool) -> Tensor:
        """WᵀW (d, d) from W (V, d), or WᵀC·W if centred, in float32 at least."""
        if self._gram is None:
            weight = _exact(weight)
            # Centred before the product: WᵀW less the part of the mean would cancel where all logits share a large one.
            weight = weight - weight.mean(0) if centred else weight
            self._gram = _product(weight.T, weight)
        return self._gram

    def clear(self, *, keep_gram: bool = False) -> None:
        """Forget: after a step of the optimizer; a frozen W keeps its WᵀW."""
        self._first = None
        if not keep_gram:
            self._gram = None


def fold_pays(
    num_tokens: int, num_hidden: int, vocab_size: int, num_first: int, *, num_uses: int = 1, trains: bool = True
) -> bool:
    """Whether the fold needs fewer FLOPs than W1 on the logits.

    Multiply-adds: the fold builds W1·W once for `num_uses` calls and, where TempNet `trains`, leads its gradient back
    once a call, V·d1·d each, and spends d·d1 a token and direction; without it a token costs V·d1 and direction.
    """
    build = vocab_size * num_first * num_hidden
    directions = 2 if trains else 1
    folded = build / num_uses + (build if trains else 0) + directions * num_tokens * num_hidden * num_first
    return folded < directions * num_tokens * vocab_size * num_first


def folds(tempnet: TempNet) -> bool:
    """Whether a network's input is linear in the hidden state, up to its norm."""
    return tempnet.transform is not None and tempnet.config.input_shift != "max"


def _exact(matrix: Tensor) -> Tensor:
    return matrix.detach().to(torch.float64 if matrix.dtype == torch.float64 else torch.float32)


@torch.no_grad()
def _product(left: Tensor, right: Tensor, matmul_dtype: torch.dtype | None = None) -> Tensor:
    dtype = matmul_dtype or left.dtype
    with torch.autocast(left.device.type, enabled=False):
        return (left.to(dtype) @ right.to(dtype)).to(left.dtype)
