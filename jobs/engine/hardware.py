"""The threads and the peak memory of a run, and the peak speed of its devices."""

from __future__ import annotations

import os

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

    A run that is alone on the machine uses all cores. A run that shares the machine with others uses what Ray reserves
    for it, because the threads of several runs, waiting for one another on the same cores, make them slower than
    running one after the other. How a sum is divided among threads changes its last digits, so a continued run keeps
    its number.
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


def peak_memory_gib() -> float:
    """Return the peak memory of this process in GiB: device memory if there is a GPU, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
