"""The memory and threads that a run uses, and the peak speed of its devices."""

from __future__ import annotations

import os

import torch

from jobs.engine.worker_settings import WorkersSection

# Peak bf16 FLOP/s without sparsity, from the vendors' data sheets; a device is recognised by a part of its name.
PEAK_FLOPS_PER_SECOND = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "MI300X": 1307e12}


def worker_device(workers: WorkersSection) -> torch.device:
    """Return the device of a worker: the CPU, or PyTorch's current GPU, which is the one that Ray Train has given to it."""
    return torch.device("cuda", torch.cuda.current_device()) if workers.use_gpu else torch.device("cpu")


def state_bytes_per_worker(num_trained: int, num_frozen: int, workers: WorkersSection) -> float:
    """Return the bytes that a worker holds for weights, gradients and AdamW; activations and logits need more.

    A trained parameter has 4 bytes of weight, 4 of gradient and 12 of optimizer state (two moments, and a copy of the
    weight, which ZeRO 0 does not have). ZeRO 1 divides the optimizer state among the workers, ZeRO 2 also the
    gradients, ZeRO 3 also the weights. Optimizer state that is offloaded to CPU memory is not counted.

    Args:
        num_trained: number of trained parameters.
        num_frozen: number of frozen parameters.
        workers: the workers of the run.
    """
    share = [1.0 if workers.zero_stage < stage else 1.0 / workers.min_workers for stage in (1, 2, 3)]
    optimizer = 0.0 if workers.offload_optimizer else (12 if workers.zero_stage else 8) * share[0]
    frozen = (2 if workers.resolved_precision == "bf16" else 4) * share[2]
    return num_trained * (optimizer + 4 * share[1] + 4 * share[2]) + num_frozen * frozen


def num_threads_per_worker(
    workers: WorkersSection, *, num_local_workers: int, shares_cores: bool, num_kept: int
) -> int:
    """Return the number of PyTorch threads of a worker that computes on CPUs; `workers.num_threads` has precedence.

    A run that is alone on the machine uses all cores. A run that shares the machine with others uses what Ray reserves
    for it, because the threads of several runs, waiting for one another on the same cores, make them slower than
    running one after the other. How a sum is divided among threads changes its last digits, so a continued run keeps
    its number.

    Args:
        workers: the workers of the run.
        num_local_workers: number of this run's workers on this machine.
        shares_cores: whether other runs train at the same time on this machine.
        num_kept: the number of threads that the run started with; 0 if it starts now.
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


def peak_memory_gib() -> float:
    """Return the peak memory of this process in GiB: device memory if there is a GPU, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
