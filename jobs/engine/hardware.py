"""What a run takes of its machines: devices, threads and memory, and the peak speed of a device."""

from __future__ import annotations

import os
from collections.abc import Mapping

import psutil
import torch

from jobs.engine.config import WorkersSection

# Peak bf16 FLOP/s without sparsity, from the vendors' data sheets; a device is recognised by a part of its name.
PEAK_FLOPS_PER_SECOND = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "MI300X": 1307e12}


def worker_device(workers: WorkersSection) -> torch.device:
    """Return the device of a worker: the CPU, or PyTorch's current GPU, which is the one that Ray Train has given to it."""
    return torch.device("cuda", torch.cuda.current_device()) if workers.use_gpu else torch.device("cpu")


def num_threads_per_worker(
    workers: WorkersSection, *, num_local_workers: int, shares_cores: bool, num_kept: int
) -> int:
    """Return the number of PyTorch threads of a worker that computes on CPUs; `workers.num_threads` has precedence.

    A run that is alone on the machine uses all cores, one that shares it with others what Ray reserves for it: threads of
    several runs that wait for one another are slow. A continued run keeps its number, on which last digits depend.
    """
    if workers.num_threads or num_kept:
        return workers.num_threads or num_kept
    if shares_cores:
        return max(1, int(workers.cpus_per_worker))
    return max(1, (os.cpu_count() or 1) // num_local_workers)


def peak_flops_per_second(device: torch.device) -> float | None:
    """Return the device's peak bf16 FLOP/s, or None if it is unknown (a CPU or an unlisted GPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS_PER_SECOND.items() if part in name), None)


def free_memory(workers: WorkersSection, *, num_local_workers: int) -> int:
    """Return the bytes that are free for a worker now: of its GPU, else its share of the machine's."""
    if workers.use_gpu:
        return torch.cuda.mem_get_info()[0]
    return int(psutil.virtual_memory().available) // num_local_workers


def peak_memory_gib(*, use_gpu: bool) -> float:
    """Return the peak memory of this process in GiB: device memory if it uses a GPU, else resident memory."""
    if use_gpu:
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


GIB = 2**30
PROCESS_BYTES = {False: round(0.72 * GIB), True: round(0.9 * GIB)}
"""Whether a worker uses a GPU → bytes of its process without data."""
_BUCKET_BYTES = 4.0 * 500_000_000  # DeepSpeed's `reduce_bucket_size`, in float32
_MAX_NUM_GATHERED = 1_000_000_000  # DeepSpeed's `stage3_max_live_parameters`
_REMEDIES = {
    "weights": "workers.zero_stage 3 and more workers, or a frozen base with stored features (model.features)",
    "gradients": "workers.zero_stage 2 or 3 and more workers, or for a small model on a GPU workers.zero_stage 0",
    "optimizer": "workers.offload_optimizer, or workers.zero_stage 1 or more and more workers",
    "activations": "a smaller optimizer.micro_batch_size, or workers.activation_checkpointing",
    "loss": "a smaller optimizer.micro_batch_size",
}


def training_memory(
    workers: WorkersSection,
    *,
    num_trained: int,
    num_frozen: int = 0,
    accumulates: bool = False,
    activations: float = 0.0,
    loss: float = 0.0,
    validation: float = 0.0,
) -> dict[str, float]:
    """Return item → bytes of a worker at its peak, within about 20 % of real runs.

    For P trained and F frozen parameters and W workers:

        weights      4 P + 4 F, or 2 F with bf16; ZeRO 3 divides them by W and gathers up to 10⁹ parameters
        gradients    4 P; under ZeRO 4 P / W (all of them under ZeRO 1 with gradient accumulation), and what is larger of
                     DeepSpeed's buckets and the copy that a step makes
        optimizer    AdamW: 8 P; under ZeRO 12 P / W with its copy of the weights; 0 if it is offloaded
        overhead     on CPUs .3 of the above, activations and loss, which the heap loses in holes; at least what the last
                     validation needs, on GPUs beyond what a step has freed
        process      Python, PyTorch, Ray and DeepSpeed, or the context and the libraries of a CUDA device
    """
    stage, share, whole = workers.zero_stage, 1 / workers.min_workers, 4.0 * num_trained
    weights = whole + (2 if workers.resolved_precision == "bf16" else 4) * num_frozen
    if stage == 3:
        weights *= share + min(1.0, _MAX_NUM_GATHERED / max(1, num_trained + num_frozen))
    gradients, optimizer = whole, 2 * whole
    if stage > 0:
        # On a GPU a bucket has its size however small the model is; on CPUs only what is written takes memory.
        buckets = _BUCKET_BYTES * (2 if stage == 2 else 1)
        buckets = buckets if workers.use_gpu else min(buckets, whole)
        copies = buckets + min(_BUCKET_BYTES, whole) if stage == 3 else max(buckets, share * whole)
        gradients = copies + (whole if stage == 1 and accumulates else share * whole)
        optimizer = 0.0 if workers.offload_optimizer else 3 * share * whole
    items = {
        "weights": weights, "gradients": gradients, "optimizer": optimizer, "activations": activations, "loss": loss,
    }  # fmt: skip
    if workers.use_gpu:
        overhead = validation - activations - loss - (gradients if stage < 3 else 0.0)
    else:
        overhead = max(validation, 0.3 * sum(items.values()))
    return {**items, "overhead": max(0.0, overhead), "process": PROCESS_BYTES[workers.use_gpu]}


def describe_memory(items: Mapping[str, float]) -> str:
    """Return the sum and its items in GiB."""
    parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in items.items() if value)
    return f"{sum(items.values()) / GIB:.2f} GiB a worker: {parts}"


def check_fits(items: Mapping[str, float], workers: WorkersSection) -> None:
    """Raise ValueError if a worker needs more than `workers.memory_gib`; it names the items and what would help most."""
    if workers.memory_gib is not None and sum(items.values()) > workers.memory_gib * GIB:
        remedy = _REMEDIES[max(_REMEDIES, key=lambda name: items[name])]
        limit = f"more than workers.memory_gib = {workers.memory_gib:g}"
        raise ValueError(f"the run needs {describe_memory(items)}, {limit}. What would help most: {remedy}")
