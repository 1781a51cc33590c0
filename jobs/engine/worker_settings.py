"""The workers of a run: how many there are, and how they use devices and memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from jobs.engine.checks import check_not_negative, check_positive
from jobs.engine.fields import FREE_TO_CHANGE, stands_for

_RANGE = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersSection:
    """Worker processes, and how they use devices and memory."""

    num_workers: int | str = field(default=1, metadata=FREE_TO_CHANGE)
    """Number of Ray Train workers. MIN:MAX: as many as the cluster has room for; the run goes on with fewer when a node is
    lost, and with more when one comes. Numbers between the two that do not divide the batch are left out."""
    use_gpu: bool = False
    """Whether every worker uses one GPU; otherwise workers compute on CPUs."""
    cpus_per_worker: float = field(default=1.0, metadata=FREE_TO_CHANGE)
    """Logical CPUs that Ray reserves for each worker. Reading data takes further CPUs."""
    num_threads: int = 0
    """PyTorch threads of each worker. 0: an equal share of the machine's cores, or `cpus_per_worker` threads in trials
    that run side by side. The number chosen at the first start is kept while the number of workers stays the same,
    because the rounding of sums depends on it."""
    placement: Literal["pack", "spread"] = field(default="pack", metadata=FREE_TO_CHANGE)
    """pack: workers on as few nodes as possible, which exchange gradients fastest. spread: on as many as possible."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """Stage of DeepSpeed ZeRO: 0 partitions nothing, 1 the optimizer state, 2 also the gradients, 3 also the weights."""
    precision: Literal["auto", "fp32", "bf16"] = field(default="auto", metadata=stands_for("resolved_precision"))
    """fp32: everything in float32. bf16: matrix products of the base model in bfloat16 by autocast, a frozen base model
    stored in bfloat16, everything else in float32. auto: bf16 on GPUs and on CPUs with instructions for it, else fp32."""
    activation_checkpointing: bool = False
    """Save memory by recomputing the base model's activations in the backward pass."""
    compile: Literal["auto", "on", "off"] = field(default="auto", metadata=FREE_TO_CHANGE)
    """on: the base's transformer blocks are compiled by torch.compile in the first step, which takes one to two minutes; the
    result is kept in `compiled` beside the prepared data. Losses differ by rounding. auto: on for GPUs, unless ZeRO 3 divides
    the base; off for CPUs."""
    offload_optimizer: bool = False
    """Keep the optimizer state in CPU memory. Needs ZeRO stage 1, 2 or 3."""
    memory_gib: float | None = field(default=None, metadata=FREE_TO_CHANGE)
    """Memory that a worker may take, in GiB: that of its GPU, else of its process. A run that needs more by the arithmetic
    of `jobs.engine.memory` is refused. None: unlimited."""

    def __post_init__(self) -> None:
        if isinstance(self.num_workers, int):
            check_positive("workers", self, "num_workers")
        elif not (match := _RANGE.fullmatch(self.num_workers)) or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(
                f"workers.num_workers = {self.num_workers!r} must be a number, or MIN:MAX with 1 <= MIN <= MAX, such as 2:8"
            )
        check_positive("workers", self, "cpus_per_worker")
        check_not_negative("workers", self, "num_threads")
        if self.memory_gib is not None:
            check_positive("workers", self, "memory_gib")
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("workers.offload_optimizer = True needs workers.zero_stage 1, 2 or 3, not 0")

        if self.compile == "on" and self.zero_stage == 3:
            raise ValueError(
                "workers.compile = 'on' needs workers.zero_stage 0, 1 or 2: ZeRO 3 gathers the weights of every layer by "
                "hooks, which break the graph"
            )

    @property
    def compiles(self) -> bool:
        """Whether the base's transformer blocks are compiled."""
        return self.compile == "on" or (self.compile == "auto" and self.use_gpu and self.zero_stage != 3)

    @property
    def min_workers(self) -> int:
        """The smallest number of workers with which the run trains."""
        return int(str(self.num_workers).partition(":")[0])

    @property
    def max_workers(self) -> int:
        """The largest number of workers, with which the run trains if the cluster has room for them."""
        return int(str(self.num_workers).rpartition(":")[2])

    @property
    def resolved_precision(self) -> Literal["fp32", "bf16"]:
        """The precision, which `auto` leaves to the machine that starts the run."""
        return choose_precision(use_gpu=self.use_gpu) if self.precision == "auto" else self.precision


def choose_precision(*, use_gpu: bool) -> Literal["fp32", "bf16"]:
    """Return bf16 for GPUs and for CPUs with instructions for bfloat16, else fp32.

    A CPU without them (neither AVX-512 BF16 nor AMX) computes bfloat16 products by way of float32, which takes three to
    four times as long as float32 itself (measured: a step of `gpt2-scratch-small` takes 3.7 s instead of .8 to 1.2 s).
    """
    if use_gpu:
        return "bf16"
    from torch import cpu  # here, because configurations are read before torch is needed

    return "bf16" if cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported() else "fp32"
