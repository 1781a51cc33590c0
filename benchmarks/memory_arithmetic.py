"""Compare the memory that a plan predicts with the peak of real runs, and print the tables of docs/memory.md.

python -m jobs.sample_data
python -m benchmarks.memory_arithmetic --measure
python -m benchmarks.memory_arithmetic --tables
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from jobs.engine.memory import GIB, Memory
from jobs.engine.worker_settings import WorkersSection
from jobs.tasks.base import count_parameters
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.memory import estimate_memory
from jobs.tasks.presets.language_models import gpt2_scratch, gpt2_scratch_small

MODELS = {
    "7B": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008},
    "13B": {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "intermediate_size": 13824},
    "70B": {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "intermediate_size": 28672,
        "num_key_value_heads": 8,
    },
}
"""Shapes of LLaMA-2."""
VOCABULARY, TEMPNET = 32_000, 32_000 * 256 + 256 * 256
MEASURED = ("192x4", "384x6", "768x8")
"""Hidden size × number of layers of the runs that are measured."""


def shapes_of(model: str) -> PreTrainedModel:
    """Return a LLaMA without weights."""
    with torch.device("meta"):
        base: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("llama", vocab_size=VOCABULARY, max_position_embeddings=4096, **MODELS[model]),
            attn_implementation="sdpa",
        )
    return base


def table(machine: str, workers: WorkersSection) -> str:
    """Return the rows of a table for the given workers."""
    rows = []
    for name in MODELS:
        base = shapes_of(name)
        num_base = count_parameters(base)
        kinds: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
            ("all weights", {"freeze": False}, {"activation_checkpointing": True}),
            ("TempNet, frozen base", {"freeze": True}, {}),
            ("TempNet, stored features", {"freeze": True, "features": True}, {}),
        )
        for title, model, changes in kinds:
            config = gpt2_scratch()
            config = dataclasses.replace(
                config,
                model=dataclasses.replace(config.model, path="model", **model),
                workers=dataclasses.replace(workers, **changes),
                optimizer=dataclasses.replace(config.optimizer, batch_size=8 * workers.max_workers, micro_batch_size=1),
                data=dataclasses.replace(config.data, context_length=1024),
            )
            held = VOCABULARY * base.config.hidden_size if config.model.features else num_base
            memory = estimate_memory(config, base, num_base=held, num_tempnet=TEMPNET, vocab_size=VOCABULARY)
            rows.append(_row(name, title, memory, float(machine.split(" × ")[1].split()[0])))
    return "\n".join(rows)


def _row(name: str, title: str, memory: Memory, capacity: float) -> str:
    items = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.loss, memory.overhead)
    cells = " | ".join(f"{value / GIB:.1f}" for value in (*items, memory.total))
    fits = "yes" if memory.total * 1.0 <= capacity * 1e9 else "no"
    return f"| {name} | {title} | {cells} | {fits} |"


def print_tables() -> None:
    """Print the tables of docs/memory.md."""
    for machine, workers in (
        ("8 × 80 GB", WorkersSection(num_workers=8, use_gpu=True, zero_stage=3)),
        ("1 × 24 GB", WorkersSection(num_workers=1, use_gpu=True, zero_stage=0)),
    ):
        print(f"\n{machine}\n")
        print(
            "| model | trained | weights | gradients | optimizer | activations | loss | overhead | sum (GiB) | fits |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
        print(table(machine, workers))


def measure(sizes: Sequence[str], workers: Mapping[str, Any]) -> None:
    """Train models of some sizes for a few steps, and compare their peaks with the prediction.

    Args:
        sizes: hidden size × number of layers of each model.
        workers: settings of the workers.
    """
    from jobs.engine.cluster import start_ray
    from jobs.engine.launch import train
    from jobs.tasks.language_model.plan import make_plan

    start_ray()
    with tempfile.TemporaryDirectory(prefix="memory-") as name:
        for size in sizes:
            config = _measured(Path(name), size, workers)
            plan = make_plan(config)
            peak = train(plan, with_progress=False)["peak_memory_gib"]
            predicted = plan.memory.total / GIB
            print(
                f"hidden size x layers {size}: predicted {predicted:.3f} GiB, measured {peak:.3f} GiB: "
                f"{predicted / peak - 1:+.1%} (target: within 15 %)\n  {plan.memory.describe()}",
                flush=True,
            )


def _measured(home: Path, size: str, workers: Mapping[str, Any]) -> LanguageModelConfig:
    small = gpt2_scratch_small()
    hidden_size, num_layers = map(int, size.split("x"))
    return dataclasses.replace(
        small,
        run=dataclasses.replace(
            small.run, name=size, storage=str(home), num_steps=3, log_every=1, checkpoint_every=100
        ),
        model=dataclasses.replace(small.model, hidden_size=hidden_size, num_layers=num_layers),
        workers=dataclasses.replace(small.workers, cpus_per_worker=0.5, **workers),
        tracking=dataclasses.replace(small.tracking, enabled=False),
    )


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="compare predictions with the peaks of real runs")
    parser.add_argument("--tables", action="store_true", help="print the tables of docs/memory.md")
    parser.add_argument("--sizes", nargs="+", default=MEASURED, help="hidden size x number of layers of each model")
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--zero-stage", type=int, default=0)
    parser.add_argument("--precision", default="fp32")
    arguments = parser.parse_args()
    if arguments.measure:
        names = ("num_workers", "zero_stage", "precision")
        measure(arguments.sizes, {name: getattr(arguments, name) for name in names})
    if arguments.tables:
        print_tables()


if __name__ == "__main__":
    main()
