"""Cost of the serving processor for one step of a batch, beside the step's own sampling and the arithmetic of a model.

    .venv/bin/python -m benchmarks.serving [--batch-size 256] [--vocab-size 32000] [--num-parameters 7e9]

Times `BatchTemperatures.divide` on all rows, and softmax with one draw per row, which every step does at least. The
share of a decoding step is computed, not measured: 2·parameters products per row of the model against 2·V·d1 + 2·d1·d2
of the TempNet, and bytes of weights and of the logits that are read.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro

from benchmarks.measure import print_setting, ratios, spread, time_in_turn
from tempnet import TempNet, TempNetConfig
from tempnet.serving.batch import BatchTemperatures


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The sizes, and the number of rounds."""

    batch_size: int = 256
    vocab_size: int = 32_000
    num_parameters: float = 7e9
    """Parameters of the served model, for the arithmetic; its weights have 2 bytes each."""
    num_threads: int = 2
    num_rounds: int = 15


def main(arguments: Arguments) -> None:
    """Run the benchmark and print the results."""
    torch.set_num_threads(arguments.num_threads)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = TempNet(TempNetConfig.for_logits(arguments.vocab_size))
    temperatures = BatchTemperatures(network, device)
    logits = torch.randn(arguments.batch_size, arguments.vocab_size, device=device)
    tau_max = torch.full((arguments.batch_size,), 2.0, device=device)

    forms: dict[str, Callable[[], object]] = {
        "divide": lambda: temperatures.divide(logits, tau_max),
        "softmax and draw": lambda: torch.multinomial(torch.softmax(logits, dim=-1), 1),
    }
    seconds = time_in_turn(forms, arguments.num_rounds)
    config = network.config
    products = arguments.vocab_size * config.hidden_size + config.hidden_size * config.num_prototypes
    of_network = 4 * (products + 5 * arguments.batch_size * arguments.vocab_size)  # five passes over float32 logits
    print_setting(arguments, "torch")
    times = ", ".join(f"{name} {1e3 * statistics.median(values):.2f} ms" for name, values in seconds.items())
    print(f"{device}: {times}, ratio {spread(ratios(*seconds.values()))}")
    print(f"share of the products of a step: {products / arguments.num_parameters:.4%}")
    print(
        f"share of the bytes of a step without its key-value cache: {of_network / (2 * arguments.num_parameters):.4%}"
    )


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
