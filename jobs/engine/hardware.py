"""What a run asks of the machine, memory for its state, and what the machine can do at most."""

from __future__ import annotations

import os

import torch

from jobs.engine.config import WorkersSection

# Dense bf16 FLOP/s without sparsity, from the vendors' data sheets; a device is recognised by a part of its name.
PEAK_FLOPS_PER_SECOND = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "MI300X": 1307e12}


def state_bytes_per_worker(num_trained: int, num_frozen: int, workers: WorkersSection) -> float:
    """Bytes that a worker holds for weights, gradients and AdamW; activations and logits come on top.

    A trained parameter has 4 bytes of weight, 4 of gradient and 12 for the optimizer (two moments, and ZeRO's own copy of
    the weight); ZeRO 1 divides the last among the workers, 2 the gradients too, 3 the weights too.
    """
    share = [1.0 if workers.zero_stage < stage else 1.0 / workers.num_workers for stage in (1, 2, 3)]
    optimizer = 0.0 if workers.offload_optimizer else (12 if workers.zero_stage else 8) * share[0]
    frozen = (2 if workers.precision == "bf16" else 4) * share[2]
    return num_trained * (optimizer + 4 * share[1] + 4 * share[2]) + num_frozen * frozen


def num_threads_per_worker(
    workers: WorkersSection, *, num_local_workers: int, shares_cores: bool, num_kept: int
) -> int:
    """PyTorch threads of a worker that computes on CPUs, unless `workers.num_threads` says it.

    Alone a run has all cores of the machine. Beside others it has what Ray reserves for it: threads of several runs that
    wait for one another on the same cores make all of them slower than one after the other. How a sum is divided among
    threads changes its last digits, so that a run which goes on keeps the number that it began with.

    Args:
        num_local_workers: workers of the run on this machine.
        shares_cores: other runs go on beside this one.
        num_kept: the number that the run began with; 0 if it begins now.
    """
    if workers.num_threads or num_kept:
        return workers.num_threads or num_kept
    if shares_cores:
        return max(1, int(workers.cpus_per_worker))
    return max(1, (os.cpu_count() or 1) // num_local_workers)


def peak_flops_per_second(device: torch.device) -> float | None:
    """The device's peak in bf16, or None where it is not known (a CPU, an unlisted GPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS_PER_SECOND.items() if part in name), None)
