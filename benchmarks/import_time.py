"""Time to import the library, beside that of a model class of Transformers, each in a new process.

    .venv/bin/python -m benchmarks.import_time [--num-rounds 5]

`tempnet` is what `import tempnet` brings; `generation` adds what generation and loading need. The reference imports
the class GPT2LMHeadModel. Every round takes each once, in turn; ratios are medians over rounds.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import tyro

IMPORTS = {
    "reference": "from transformers import GPT2LMHeadModel",
    "tempnet": "import tempnet",
    "generation": "import tempnet.inference, tempnet.loading",
    "vllm": "import tempnet.serving.vllm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The number of rounds."""

    num_rounds: int = 5


def main(arguments: Arguments) -> None:
    """Run the benchmark and print the results."""
    seconds: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for number in range(arguments.num_rounds + 1):
        for name, statement in IMPORTS.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, "-W", "ignore", "-c", statement], check=True, stderr=subprocess.DEVNULL)
            if number:  # the first round brings the files into memory
                seconds[name].append(time.perf_counter() - started)
    for name, values in seconds.items():
        ratios = [value / other for value, other in zip(values, seconds["reference"], strict=True)]
        print(f"{name:<12}{statistics.median(values):>7.2f} s  ratio {statistics.median(ratios):.3f} "
              f"({min(ratios):.3f} to {max(ratios):.3f})")  # fmt: skip


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
