"""The rules of CUDA's autocast for tensors that are not on a GPU, to count what a run on a GPU would hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

# Operations that CUDA's autocast computes in float32, and that of the CPU in the dtype of their input, without losses and
# distances, which are not part of a base (PyTorch's "Automatic Mixed Precision package", "CUDA Ops that can autocast to
# float32").
_IN_FLOAT32 = frozenset([
    "acos", "asin", "cosh", "sinh", "tan", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "pow", "rpow",
    "rdiv", "rtruediv", "reciprocal", "rsqrt", "softplus", "cumprod", "cumsum", "prod", "sum", "norm", "normalize", "renorm",
    "layer_norm", "group_norm", "softmax", "softmin", "log_softmax", "cosine_similarity",
])  # fmt: skip


class CudaAutocastRules(TorchFunctionMode):
    """Within this context, operations get their inputs in float32 if autocast on a CUDA device would convert them.

    Matrix products are left to `torch.autocast`, whose rules for them are the same on CPUs.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "").strip("_") in _IN_FLOAT32:
            args, kwargs = tree_map_only(Tensor, _widen, (tuple(args), dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
