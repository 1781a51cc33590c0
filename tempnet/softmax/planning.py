"""Makes the plan of a call of the logits-free loss: checks the arguments, and decides on the fold and the chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tempnet.network import TempNet
from tempnet.rho import check_rho
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.fold import FoldCache, can_fold_network, fold_pays
from tempnet.softmax.plan import ComputeOptions, LossPlan, OutputLayer, network_parameters

# Number of logits in a chunk (32 MiB in float32). With fewer, the output weight's gradient is read and written too
# often; with more, the logits do not stay in the cache.
NUM_LOGITS_PER_CHUNK = 1 << 23


def plan_loss(
    hidden: Tensor,
    layer: OutputLayer,
    config: TemperatureLossConfig,
    tempnet: TempNet | None,
    options: ComputeOptions,
    *,
    with_values: bool,
) -> tuple[LossPlan, tuple[Tensor, ...]]:
    """Check the arguments of :func:`linear_language_model_loss`; return the plan of the call and TempNet's parameters.

    Raises:
        ValueError: see there.
    """
    num_rows = len(layer.weight)
    vocab_size = num_rows if layer.vocab_size is None else layer.vocab_size
    if not 1 <= vocab_size <= num_rows:
        raise ValueError(f"vocab_size = {vocab_size} must lie in 1 … {num_rows}, the rows of the output weight")
    chunk_size = options.chunk_size
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size = {chunk_size} must be at least 1 token, or None for about 8 million logits")
    if config.kind.objective == "robust":
        check_rho(config.rho, vocab_size)
    if config.kind.temperature == "tempnet":
        assert tempnet is not None, f"the loss {config.name!r} needs a TempNet"
        _check_network(tempnet, vocab_size)
    else:
        tempnet = None
    parameters = () if tempnet is None else network_parameters(tempnet)
    fold = _choose_fold(hidden, layer, vocab_size, tempnet, parameters, options)
    cache = options.fold_cache or FoldCache()
    plan = LossPlan(
        config=config,
        vocab_size=vocab_size,
        tempnet=tempnet,
        soft_cap=layer.soft_cap,
        fold=cache if fold and tempnet is not None else None,
        cache=cache,
        chunk_size=chunk_size or max(1, NUM_LOGITS_PER_CHUNK // vocab_size),
        matmul_dtype=options.matmul_dtype or hidden.dtype,
        sum_dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32,
        with_values=with_values,
        with_gradients=torch.is_grad_enabled(),
    )
    return plan, parameters


def _choose_fold(
    hidden: Tensor,
    layer: OutputLayer,
    vocab_size: int,
    tempnet: TempNet | None,
    parameters: Sequence[Tensor],
    options: ComputeOptions,
) -> bool:
    """Return whether to fold: as the options say or, if they leave it open, where it is possible and takes fewer FLOPs.

    Raises:
        ValueError: if the options ask for a fold that is impossible.
    """
    if tempnet is not None and not tempnet.config.reads_logits:
        return False
    is_possible = can_fold(layer, tempnet)
    if options.fold and not is_possible:
        raise ValueError(
            "fold = True is impossible with an output bias, a soft-cap or input_shift = 'max': what the TempNet reads is "
            "then not linear in h"
        )
    if options.fold is not None:
        return options.fold
    return is_possible and fold_pays(
        len(hidden),
        hidden.shape[1],
        vocab_size,
        1 if tempnet is None else tempnet.config.hidden_size,
        num_uses=1 if options.fold_cache is None else options.fold_cache.num_uses,
        trains=any(parameter.requires_grad for parameter in parameters),
    )


def can_fold(layer: OutputLayer, tempnet: TempNet | None) -> bool:
    """Return whether what the TempNet reads is linear in the hidden states, apart from its norm, and is the logits."""
    if tempnet is not None and not (tempnet.config.reads_logits and can_fold_network(tempnet)):
        return False
    return layer.bias is None and layer.soft_cap is None


def _check_network(tempnet: TempNet, vocab_size: int) -> None:
    """Raise ValueError if the loss cannot be computed with this TempNet and vocabulary."""
    if not supports(tempnet):
        raise ValueError("this TempNet has no transform layer, or lets gradients through its input")
    if tempnet.config.input_size != vocab_size:
        raise ValueError(
            f"vocab_size = {vocab_size}, but the TempNet was built for a vocabulary of {tempnet.config.input_size}"
        )


def supports(tempnet: TempNet) -> bool:
    """Return whether a TempNet can be computed from W1 x alone: it must have a transform layer and detach its input."""
    return tempnet.transform is not None and tempnet.config.stop_gradient
