"""Formats the plan and the results of a training run as aligned lines of text; covers the lines that all tasks share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jobs.engine import baselines
from jobs.engine.config import TrainingConfig, WorkersSection
from jobs.engine.identity import configuration_hash
from jobs.engine.masking import masked

_NAME_WIDTH = 13


def describe_plan(
    config: TrainingConfig,
    *,
    about: Mapping[str, str],
    num_units: int,
    unit: str,
    readers: str = "",
    parameters: str,
    num_trained: int,
    num_frozen: int = 0,
    tracking_uri: str,
    notes: Iterable[str] = (),
    memory: Mapping[str, float] | None = None,
) -> str:
    """Format the plan of a run."""
    run, workers = config.run, config.workers
    state = training_memory(workers, num_trained=num_trained, num_frozen=num_frozen)
    lines = {
        "run": f"{run.name} in {run.directory} (configuration {configuration_hash(config)})",
        **about,
        "steps": f"{run.num_steps} = {run.num_steps * num_units:,} {unit}; checkpoint every {run.checkpoint_every}, "
        f"validation every {config.validation.every}",
        "workers": f"{workers.num_workers} × {'1 GPU' if workers.use_gpu else 'CPU'}, ZeRO {workers.zero_stage}, "
        f"{workers.resolved_precision}{', in this process' if workers.local else readers}",
        "parameters": parameters,
        "memory": describe_memory(memory) if memory else f"{describe_memory(state)}; activations are not counted",
        "MLflow": masked(tracking_uri) or "off",
    }
    rows = [*lines.items(), *(("note", note) for note in notes)]
    return "\n".join(f"{name:<{_NAME_WIDTH}}{line}" for name, line in rows)


def results(rows: Iterable[tuple[str, str]], outcome: Mapping[str, Any], unit: str) -> str:
    """Format the results of a finished run: the given rows, the verdict on its TempNet, then speed, steps and epochs."""
    rows = [*rows, *baselines.rows(outcome)]
    if speed := outcome[f"{unit}_per_second"]:
        rows.append(("training speed", f"{speed:,.0f} {unit}/s"))
        rows.append(("share of the time spent waiting for data", f"{outcome['data_wait_share']:.2%}"))
    if retries := outcome.get("store_retries"):
        rows.append(("repeated requests to object stores", f"{retries}"))
    num_epochs = outcome["num_epochs"]  # None if the run ended before all of its data were prepared
    rows.append(
        ("steps, epochs", f"{outcome['num_steps']}, {'below 1' if num_epochs is None else f'{num_epochs:.2f}'}")
    )
    if reason := outcome.get("stopped"):
        rows.append(("STOPPED", reason))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


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


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table whose columns are also aligned in the source text.

    The first row is the heading. The first column is aligned to the left, and all others hold figures, aligned to the
    right.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        figures = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join([cells[0].ljust(widths[0]), *figures])} |"

    ruler = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(map(line, [rows[0], ruler, *rows[1:]]))
