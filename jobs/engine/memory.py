"""The arithmetic of a worker's memory: what a training run holds at its peak, item by item, before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from jobs.engine.worker_settings import WorkersSection

GIB = 2**30
# Python, PyTorch, Ray and DeepSpeed of a worker on CPUs; the context and the libraries of a CUDA device.
PROCESS_BYTES = {False: round(0.72 * GIB), True: round(0.9 * GIB)}
# DeepSpeed's buckets, in numbers: `reduce_bucket_size` and `allgather_bucket_size` have this default.
_BUCKET_SIZE = 500_000_000
# ZeRO 3 gathers the weights of the layers that are run, and of the next ones, up to this number of them (DeepSpeed's
# `stage3_max_live_parameters`).
_MOST_GATHERED = 1_000_000_000
# ZeRO 3 updates the weights in groups of this number of them (DeepSpeed's `sub_group_size`).
_SUB_GROUP_SIZE = 1_000_000_000
# On CPUs, what the C library holds in holes of its heap, as a share of what is in use. It was fitted to runs of other sizes
# (288 × 4 layers, 480 × 6 and 624 × 8) than those of `benchmarks.memory_arithmetic`. Workers do not give memory back
# between steps, which would cost more time than all else (`jobs.engine.cluster.CPU_ENVIRONMENT`).
_SHARE_OF_HOLES = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one worker at the peak of a step."""

    weights: float
    """Weights, trained and frozen; ZeRO 3 divides them, and gathers those of a few layers at a time."""
    gradients: float
    """Gradients in float32, of which ZeRO keeps a part, and the buckets in which they are reduced. What the activations leave
    free when it is needed is not counted twice."""
    optimizer: float
    """AdamW's moments, and under ZeRO a copy of the weights; ZeRO 1, 2 and 3 divide them. 0 if they are offloaded."""
    activations: float
    """What the backward pass of the base needs of its forward pass, or the largest layer of a frozen one."""
    loss: float
    """Logits of a chunk of tokens, and the gradients that the loss computes in the forward pass."""
    state: float = 0.0
    """State per sample of losses that are normalised over all data."""
    overhead: float = 0.0
    """What is freed and cannot be used again, or what the last validation needs beyond it, whichever is larger."""
    process: float
    """The process itself, without data."""

    @property
    def total(self) -> float:
        """Sum of all items."""
        return sum(value for _, value in self._items())

    def _items(self) -> Iterator[tuple[str, float]]:
        for item in fields(self):
            yield item.name, getattr(self, item.name)

    def describe(self) -> str:
        """Return the sum and its items in GiB."""
        items = ", ".join(f"{name} {value / GIB:.2f}" for name, value in self._items() if value)
        return f"{self.total / GIB:.2f} GiB a worker: {items}"


def training_memory(
    workers: WorkersSection,
    *,
    num_trained: int,
    num_frozen: int,
    saved: float = 0.0,
    activations: float,
    loss: float,
    state: float = 0.0,
    validation: float = 0.0,
    accumulates: bool = False,
) -> Memory:
    """Return the memory of a worker.

    Args:
        workers: the workers of the run.
        num_trained: number of trained parameters, in float32.
        num_frozen: number of frozen parameters, in bfloat16 with the precision bf16, else in float32.
        saved: bytes by which frozen parameters in eight bits are smaller.
        activations, loss, state: bytes of these items.
        validation: bytes that the last validation needs when those of activations and loss are free again, on GPUs those of
            gradients, too. On CPUs they are taken anew, because its tensors do not fit into the holes of the heap.
        accumulates: whether the gradients of a micro-batch wait for those of the next one.
    """
    stage, count = workers.zero_stage, workers.min_workers
    share = [1.0 if stage < least else 1.0 / count for least in (1, 3)]
    optimizer = 0.0 if workers.offload_optimizer else (12 if stage else 8) * num_trained * share[0]
    # A GPU's allocator uses memory again for what comes later; on CPUs it lies in holes of the heap.
    reused = activations + loss if workers.use_gpu else 0.0
    gradients = _gradients(workers, num_trained, reused=reused, accumulates=accumulates)
    frozen = 2 if workers.resolved_precision == "bf16" else 4
    held = 4 * num_trained + frozen * num_frozen - saved
    gathered = 0.0
    if stage == 3:
        gathered = held * min(1.0, _MOST_GATHERED / max(1, num_trained + num_frozen))
    weights = held * share[1] + gathered
    in_use = weights + gradients + optimizer + activations + loss + state
    holes = 0.0 if workers.use_gpu else _SHARE_OF_HOLES * in_use
    # ZeRO 3 keeps its bucket and the worker's part of the gradients between steps.
    freed = reused + (gradients if workers.use_gpu and stage < 3 else 0.0)
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        loss=loss,
        state=state,
        overhead=max(holes, validation - freed),
        process=PROCESS_BYTES[workers.use_gpu],
    )


def _gradients(workers: WorkersSection, num_trained: int, *, reused: float, accumulates: bool) -> float:
    """Return the bytes of gradients and of the buckets in which DeepSpeed reduces them, beyond `reused` bytes.

    ZeRO copies every gradient into a bucket, which is reduced when it is full or the backward pass ends, and keeps its own
    part. ZeRO 1 and 2 make buckets when the first gradient arrives and drop them after the backward pass, ZeRO 3 makes one
    for the whole run. A bucket is allocated whole, whatever the size of the model, but on CPUs only what is written takes
    memory. Then comes the optimizer's step, which copies the part into one piece (`DeepSpeedZeroOptimizer`'s
    `setup_buckets`, `copy_grads_in_partition` and `step`; `DeepSpeedZeroOptimizer_Stage3`'s `__add_grad_to_ipg_bucket`,
    `__avg_scatter_grads` and `_prepare_fp32_grad_for_sub_group`).
    """
    stage, whole = workers.zero_stage, 4.0 * num_trained
    if stage == 0:
        return whole
    part = whole / workers.min_workers
    num_buckets = 2 if stage == 2 else 1  # ZeRO 2 fills a second one while the first is reduced (`overlap_comm`)
    size = 4.0 * _BUCKET_SIZE
    buckets = num_buckets * size if workers.use_gpu else min(num_buckets * size, whole)
    if stage == 3:
        # Reduced is a copy of the bucket, in which the parts of every worker lie side by side.
        after_backward, step = buckets + min(size, whole) + part, buckets + part + min(part, 4.0 * _SUB_GROUP_SIZE)
    else:
        after_backward, step = buckets + part, 2 * part
    waiting = part if stage == 3 or (accumulates and stage == 2) else whole if accumulates else 0.0
    beside_activations = waiting + (buckets if workers.use_gpu or stage == 3 else 0.0)
    return max(beside_activations, after_backward - reused, step - reused)


def check_fits(memory: Memory, workers: WorkersSection) -> None:
    """Refuse a run that needs more memory than `workers.memory_gib` says that a worker has.

    Raises:
        ValueError: the message gives the items, and what would make the largest of them smaller.
    """
    limit = workers.memory_gib
    if limit is None or memory.total <= limit * GIB:
        return
    remedies = {
        "weights": "workers.zero_stage 3 and more workers, or a frozen base with stored features (model.features)",
        "gradients": "workers.zero_stage 2 or 3 and more workers, or for a small model on a GPU workers.zero_stage 0",
        "optimizer": "workers.offload_optimizer, or workers.zero_stage 1 or more and more workers",
        "activations": "a smaller optimizer.micro_batch_size, or workers.activation_checkpointing",
        "loss": "a smaller optimizer.micro_batch_size",
        "state": "more workers",
    }
    largest = max(remedies, key=lambda name: float(getattr(memory, name)))
    raise ValueError(
        f"the run needs {memory.describe()}, more than workers.memory_gib = {limit:g}. What would help most: "
        f"{remedies[largest]}"
    )
