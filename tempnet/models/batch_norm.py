"""Batch norm over the batch of all ranks: W ranks with B/W rows compute what one rank with B rows computes.

    y = weight·(x − mean)·r + bias,  r = 1/√(var + ε)              mean, var over all rows and positions of the global batch
    ∂x = weight·r·(∂y − (Σ∂y + x̂·Σ(∂y·x̂))/n),  x̂ = (x − mean)·r     both sums over the global batch

torch's SyncBatchNorm refuses CPU tensors and gathers the moments of every rank; here one all-reduce of 2C + 1 numbers goes
forward and one of 2C back. Statistics are float32 at least, their sums over ranks float64.

Shapes: n rows times positions of all ranks, C channels, W ranks; x is (rows, C, …).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm


def synchronize_batch_norm(module: nn.Module) -> nn.Module:
    """Replace every batch norm inside the module; parameters, buffers and their names stay, so state dicts do too.

    Returns:
        The module, or its replacement if it is a batch norm itself.
    """
    if isinstance(module, _BatchNorm):
        return SynchronizedBatchNorm.like(module)
    for name, child in module.named_children():
        setattr(module, name, synchronize_batch_norm(child))
    return module


class SynchronizedBatchNorm(_BatchNorm):
    """nn.BatchNorm1d/2d/3d over the default process group; exactly those where there is none, or one rank, or in eval mode.

    The ranks may hold different numbers of rows. Parameter gradients are those of this rank's rows: summing or averaging them
    over ranks is left to whoever does that for all parameters.
    """

    @classmethod
    def like(cls, other: _BatchNorm) -> SynchronizedBatchNorm:
        """One that shares parameters and buffers with `other`."""
        norm = cls(other.num_features, other.eps, other.momentum, other.affine, other.track_running_stats)
        norm._parameters, norm._buffers = other._parameters, other._buffers
        return norm.train(other.training)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm needs an input of (rows, channels, …), not of shape {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """(rows, C, …) → the same shape and dtype."""
        of_the_batch = self.training or self.running_mean is None
        if not (of_the_batch and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, var, num_values = _GlobalBatchNorm.apply(input, self.weight, self.bias, self.eps)
        if self.training and self.running_mean is not None:
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            momentum = self.num_batches_tracked.to(mean).reciprocal() if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean, momentum)
            self.running_var.lerp_(var * (num_values / (num_values - 1.0)).to(var), momentum)
        return output


class _GlobalBatchNorm(torch.autograd.Function):
    """(x, weight, bias, ε) → y, and the global mean, biased variance and n, which carry no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var, num_values = _global_moments(x)
        ctx.save_for_backward(x, weight, mean, var, num_values)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, var, num_values)
        return F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps), mean, var, num_values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, mean, var, num_values = ctx.saved_tensors
        rstd = torch.rsqrt(var + ctx.eps)
        scale = rstd if weight is None else weight * rstd
        # The fused kernel for given statistics: weight·r·∂y, Σ(∂y·x̂) and Σ∂y of this rank in one pass.
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad.contiguous() if grad.stride() != x.stride() else grad,
            x,
            torch.ones_like(mean) if weight is None else weight,
            mean,
            var,
            None,
            None,
            False,
            ctx.eps,
            [True, True, True],
        )
        sums = torch.stack([grad_weight, grad_bias])
        dist.all_reduce(sums)
        # What the statistics contribute is affine in x, channel by channel: x̂·Σ(∂y·x̂) + Σ∂y.
        sums = sums * (scale / num_values.to(scale))
        slope = sums[0] * rstd
        offset = sums[1] - slope * mean
        grad_x = grad_x - torch.addcmul(_per_channel(offset, x), x, _per_channel(slope, x)).to(grad_x.dtype)
        return grad_x, None if weight is None else grad_weight, None if weight is None else grad_bias, None


def _global_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (C,), biased variance (C,) and number of values a channel (scalar, float64) over all ranks.

    Each rank's own moments are taken about its own mean; float64 keeps what their sums about 0 would lose in float32.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    var, mean = torch.var_mean(x.to(dtype), dim=[i for i in range(x.dim()) if i != 1], correction=0)
    count = torch.full((1,), x.numel() // x.shape[1], dtype=torch.float64, device=x.device)
    mean, var = mean.double(), var.double()
    sums = torch.cat([count, count * mean, count * (var + mean.square())])
    dist.all_reduce(sums)
    num_values = sums[0]
    mean, square = (sums[1:] / num_values).chunk(2)
    return mean.to(dtype), (square - mean.square()).clamp(min=0.0).to(dtype), num_values


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """(C,) → (1, C, 1, …), to broadcast against x."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
