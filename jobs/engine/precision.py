"""The precision of a run that leaves it to the machine."""

from __future__ import annotations

from typing import Literal


def choose_precision(*, use_gpu: bool) -> Literal["fp32", "bf16"]:
    """Return bf16 for GPUs and for CPUs with instructions for bfloat16, else fp32.

    A CPU without them (neither AVX-512 BF16 nor AMX) computes bfloat16 products by way of float32, which takes three to
    four times as long as float32 itself (measured: a step of `gpt2-scratch-small` takes 3.7 s instead of .8 to 1.2 s).
    """
    if use_gpu:
        return "bf16"
    from torch import cpu  # here, because configurations are read before torch is needed

    return "bf16" if cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported() else "fp32"
