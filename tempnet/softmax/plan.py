"""What a call of the logits-free loss computes: what is asked of it, its plan, and the tensors that it reads.

Shapes: N tokens, d hidden size, V effective vocabulary, d1 width of TempNet's first layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tempnet.network import TempNet
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.fold import FoldCache


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLayer:
    """What turns hidden states into logits: L = h Wᵀ (+ bias), then soft-capped."""

    weight: Tensor
    """Output weight: (V or more, d)."""
    vocab_size: int | None = None
    """Effective vocabulary V; rows of the weight beyond it are padding. None: all rows are used."""
    bias: Tensor | None = None
    """Output bias with as many entries as the weight has rows, or None."""
    soft_cap: float | None = None
    """Logits become soft_cap·tanh(logits/soft_cap); None for no cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions:
    """How a call is to be computed; none of this changes the loss by more than rounding."""

    matmul_dtype: torch.dtype | None = None
    """Dtype of the products with the output weight; None: that of the hidden states."""
    fold: bool | None = None
    """Whether to use W1·W instead of the chunk's logits; None: the possible way with fewer FLOPs."""
    fold_cache: FoldCache | None = None
    """Cache that keeps W1·W between calls; None: W1·W is computed in every call."""
    chunk_size: int | None = None
    """Number of tokens per chunk; None: such that a chunk has about 8 million logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPlan:
    """Everything that determines what a call computes, apart from the tensors that it reads."""

    config: TemperatureLossConfig
    """Configuration of the loss."""
    vocab_size: int
    """Effective vocabulary V; rows of the output weight beyond it are padding."""
    tempnet: TempNet | None
    """The temperature network; None for losses without one."""
    soft_cap: float | None
    """Logits become soft_cap·tanh(logits/soft_cap); None for no cap."""
    fold: FoldCache | None
    """Cache of the folded matrices; None if W1 is applied to the chunk's logits instead."""
    cache: FoldCache
    """Cache of matrices that follow from the weights; the one of `fold` if there is a fold."""
    chunk_size: int
    """Number of tokens per chunk."""
    matmul_dtype: torch.dtype
    """Dtype of the products with the output weight."""
    sum_dtype: torch.dtype
    """Dtype of losses and sums: float32 at least, because bfloat16 would lose small gradients over many chunks."""
    with_values: bool
    """Whether to compute the values of `tempnet.statistics.TokenValues`."""
    with_gradients: bool
    """Whether autograd is on. `ctx.needs_input_grad` does not tell, because it stays true under no_grad."""

    @property
    def is_centred(self) -> bool:
        """Whether the network reads L − mean L, for which the fold uses centred matrices."""
        return self.tempnet is not None and self.tempnet.config.input_shift == "mean"

    @property
    def is_free_of_shifts(self) -> bool:
        """Whether a constant may be added to all logits of a token, as far as softmax and TempNet are concerned."""
        reads_them = self.tempnet is None or (
            self.tempnet.config.reads_logits and self.tempnet.config.input_shift == "none"
        )
        return self.soft_cap is None and not reads_them


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Tensors that a call reads, apart from the targets, in the dtype of its matrix products."""

    hidden: Tensor
    """Hidden states: (N, d)."""
    weight: Tensor
    """Output weight W without padding, which may be centred (`FoldCache.centre`): (V, d)."""
    bias: Tensor | None
    """Output bias without padding, (V,), or None."""
    parameters: tuple[Tensor, ...]
    """Parameters of the TempNet, W1 first; empty without a TempNet."""
    state_place: int
    """Place among the parameters of the weight that reads hidden states; 0 if there is none, or if it is W1."""
    folded: Tensor | None
    """W1·W, (d1, d) in the dtype of sums; None if the fold is not used."""

    @classmethod
    def prepare(
        cls, plan: LossPlan, hidden: Tensor, weight: Tensor, bias: Tensor | None, parameters: tuple[Tensor, ...]
    ) -> LossInputs:
        """Convert tensors to the dtype of the products, remove the padding of the vocabulary, and compute the fold."""
        weight = weight[: plan.vocab_size]
        if plan.is_free_of_shifts:
            weight = plan.cache.centre(weight, plan.matmul_dtype)
        weight = weight.to(plan.matmul_dtype)
        folded = None
        if plan.fold is not None:
            folded = plan.fold.first(parameters[0], weight, centred=plan.is_centred, matmul_dtype=plan.matmul_dtype).to(
                plan.sum_dtype
            )
        return cls(
            hidden=hidden.to(plan.matmul_dtype),
            weight=weight,
            bias=None if bias is None else bias[: plan.vocab_size].to(plan.matmul_dtype),
            parameters=parameters,
            state_place=0 if plan.tempnet is None else state_place(plan.tempnet),
            folded=folded,
        )


def network_parameters(tempnet: TempNet) -> tuple[Tensor, ...]:
    """Return the network's parameters, W1 first and the others in the order of `parameters()`.

    Each is read as an attribute of its module, because under ZeRO-3 this makes DeepSpeed gather it.
    """
    first = tempnet.first_layer.weight
    parameters = (
        getattr(module, name) for module in tempnet.modules() for name, _ in module.named_parameters(recurse=False)
    )
    return first, *(parameter for parameter in parameters if parameter is not first)


def state_place(tempnet: TempNet) -> int:
    """Return the place among :func:`network_parameters` of the weight that reads hidden states beside W1, or else 0."""
    if tempnet.state_layer is None:
        return 0
    wanted = tempnet.state_layer.weight
    return next(place for place, parameter in enumerate(network_parameters(tempnet)) if parameter is wanted)
