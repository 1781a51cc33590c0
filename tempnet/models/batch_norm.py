"""Batch norm over the batch of all ranks: W ranks with B/W rows each compute the same as one rank with B rows.

    y = weight·(x − mean)·r + bias,  r = 1/√(var + ε)              mean, var over all rows and positions of the global batch
    ∂x = weight·r·(∂y − (Σ∂y + x̂·Σ(∂y·x̂))/n),  x̂ = (x − mean)·r     both sums over the global batch

torch's SyncBatchNorm does not accept CPU tensors. This one needs an all-reduce of 2C + 1 numbers forward and of 2C backward.
Statistics are in float32 at least, and their sums over ranks in float64.

Shapes: n values per channel (rows times positions of all ranks), C channels, W ranks; x is (rows, C, …).
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
    """Replace every batch norm inside a module by a synchronised one, and return the module, or its own replacement.

    Parameters, buffers and their names do not change, so state dicts stay compatible.
    """
    if isinstance(module, _BatchNorm):
        return SynchronizedBatchNorm.like(module)
    for name, child in module.named_children():
        setattr(module, name, synchronize_batch_norm(child))
    return module


class SynchronizedBatchNorm(_BatchNorm):
    """nn.BatchNorm1d/2d/3d over the default process group.

    Without a process group, with one rank, or in eval mode, it is identical to those classes. The ranks may have
    different numbers of rows. Parameter gradients are those of this rank's rows; summing or averaging them over ranks
    is left to the code that does so for all parameters.
    """

    @classmethod
    def like(cls, other: _BatchNorm) -> SynchronizedBatchNorm:
        """Create a batch norm that shares parameters and buffers with `other`."""
        norm = cls(other.num_features, other.eps, other.momentum, other.affine, other.track_running_stats)
        norm._parameters, norm._buffers = other._parameters, other._buffers
        return norm.train(other.training)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm needs an input of (rows, channels, …), not of shape {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise an input of shape (rows, C, …); the result has the same shape and dtype."""
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
    """Autograd function (x, weight, bias, ε) → y and, without gradients, the global mean, biased variance and n."""

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
        # The fused kernel for given statistics computes weight·r·∂y, and Σ(∂y·x̂) and Σ∂y over this rank, in one pass.
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
        # The contribution of the statistics, x̂·Σ(∂y·x̂) + Σ∂y, is an affine function of x in every channel.
        sums = sums * (scale / num_values.to(scale))
        slope = sums[0] * rstd
        offset = sums[1] - slope * mean
        grad_x = grad_x - torch.addcmul(_per_channel(offset, x), x, _per_channel(slope, x)).to(grad_x.dtype)
        return grad_x, None if weight is None else grad_weight, None if weight is None else grad_bias, None


def _global_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean (C,), biased variance (C,) and number of values per channel (scalar, float64) over all ranks.

    Each rank computes its variance about its own mean; the sums over ranks are about 0, and therefore in float64.
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
    """Reshape values (C,) to (1, C, 1, …), so that they broadcast against x."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
