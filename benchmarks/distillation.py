"""What a small language model learns from a larger one, whose predictions have one entropy, one temperature, or none.

    .venv/bin/python -m benchmarks.distillation --teacher runs/gpt2-scratch-small/export [--num-steps 300] [--seeds 0 1 2]

The student has half the hidden size of `gpt2-scratch-small` and two layers; all arms see the same batches. They are:
cross-entropy alone; the teacher's predictions as they are; at a constant τ; and at the τ*(H₀) of every context that gives
all predictions the same entropy. τ and H₀ are chosen by the validation of the first seed, and judged by the other seeds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from tempnet.statistics import mean_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to train."""

    teacher: str
    """Directory of the teacher."""
    num_steps: int = 300
    """Number of steps of every student."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    """Seeds; the first one chooses τ and H₀."""
    taus: tuple[float, ...] = (0.7, 1.4)
    """Constant temperatures to choose from, beside 1."""
    entropies: tuple[float, ...] = (2.0, 3.0, 4.0)
    """Entropies in nats to choose from."""


def train(name: str, options: list[str], seed: int, arguments: Arguments, storage: Path) -> float:
    """Train a student and return its cross-entropy at τ = 1 on the validation text."""
    command = [
        sys.executable, "-m", "jobs.train_lm", "gpt2-scratch-small", f"--run.storage={storage}", f"--run.name={name}-{seed}",
        f"--run.seed={seed}", f"--run.num-steps={arguments.num_steps}", "--run.checkpoint-every=1000000",
        f"--validation.every={arguments.num_steps}", "--model.hidden-size=96", "--model.num-layers=2", "--model.num-heads=4",
        "--tracking.no-enabled", *options,
    ]  # fmt: skip
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    outcome = json.loads((storage / f"{name}-{seed}" / "outcome.json").read_text())
    return float(outcome["validation"]["cross_entropy"])


def main() -> None:
    """Choose on the first seed, and print the cross-entropies of the others and their differences from plain training."""
    arguments = tyro.cli(Arguments, description=__doc__)
    # All arms have the teacher's tokenizer.
    teacher = ["--temperature.loss=distil", f"--distillation.teacher={arguments.teacher}", "--data.tokenizer="]
    constant = {f"tau{tau:g}": [*teacher, "--distillation.keep=temperature", f"--temperature.tau={tau:g}"]
                for tau in (1.0, *arguments.taus)}  # fmt: skip
    entropy = {
        f"entropy{value:g}": [*teacher, f"--temperature.target-entropy={value:g}"] for value in arguments.entropies
    }
    with tempfile.TemporaryDirectory(prefix="distillation-") as directory:
        storage = Path(directory)
        first, *others = arguments.seeds
        chosen = {}
        for kind in (constant, entropy):
            scores = {name: train(name, options, first, arguments, storage) for name, options in kind.items()}
            best = min(scores, key=lambda name: scores[name])
            chosen[best] = kind[best]
            print(f"seed {first}: " + ", ".join(f"{name} {score:.4f}" for name, score in scores.items()), flush=True)
        plain = ["--temperature.loss=ce", f"--data.tokenizer={arguments.teacher}"]
        arms = {"ce": plain, "tau1": constant["tau1"], **chosen}
        results = {
            name: [train(name, options, seed, arguments, storage) for seed in others] for name, options in arms.items()
        }
    for name, values in results.items():
        gain, half = mean_interval([plain - value for plain, value in zip(results["ce"], values, strict=True)])
        print(
            f"{name:<12} cross-entropy {statistics.mean(values):.4f}; {1000 * gain:+.1f} ± {1000 * (half or 0.0):.1f} mnat "
            f"against ce (seeds {' '.join(map(str, others))})",
            flush=True,
        )


if __name__ == "__main__":
    main()
