"""Peak memory of a worker that loads a pretrained model under ZeRO 3, divided while it is loaded and whole.

    .venv/bin/python -m benchmarks.partitioned_loading [--world-sizes 2 4]

The model is a random LLaMA in bfloat16 of at least 1 GB, whose largest weight has a sixteenth of its bytes. Peaks are those
of the processes' resident memory until the model is loaded; the constant is the peak of a worker with a model of 1 MB.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cluster"))
from loading_support import run_ranks

ALLOWANCE = 0.15
"""Share of the model's bytes that a worker may hold beside its part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to measure."""

    world_sizes: tuple[int, ...] = (2, 4)
    """Numbers of workers."""


def save_model(directory: Path, *, hidden_size: int, num_layers: int, vocab_size: int) -> int:
    """Save a random model in bfloat16, and return the bytes of its weights."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_hidden_layers=num_layers,
        num_attention_heads=8, num_key_value_heads=8, dtype="bfloat16",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="250MB")
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def main() -> None:
    """Print the peaks beside the targets."""
    arguments = tyro.cli(Arguments, description=__doc__)
    with tempfile.TemporaryDirectory(prefix="loading-") as name:
        small, large = Path(name) / "small", Path(name) / "large"
        save_model(small, hidden_size=64, num_layers=1, vocab_size=1000)
        num_bytes = save_model(large, hidden_size=1536, num_layers=20, vocab_size=24_000)
        print(f"model of {num_bytes / 1e9:.3f} GB in bfloat16; torch {torch.__version__}", flush=True)
        for world_size in arguments.world_sizes:
            constant = max(rank["peak"] for rank in run_ranks(small, "divided", world_size, num_steps=0))
            allowed = (1 / world_size + ALLOWANCE) * num_bytes
            for how in ("divided", "whole"):
                peaks = [rank["peak"] - constant for rank in run_ranks(large, how, world_size, num_steps=0)]
                shares = ", ".join(f"{peak / num_bytes:.3f}" for peak in peaks)
                print(
                    f"W = {world_size}, {how}: {shares} of the model's bytes above {constant / 1e9:.3f} GB; "
                    f"{allowed / num_bytes:.3f} was to be at most",
                    flush=True,
                )


if __name__ == "__main__":
    main()
