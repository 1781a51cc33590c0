"""Cost of the serving processor for one step of a batch, beside the products of a model, and by arithmetic.

    .venv/bin/python -m benchmarks.serving [--batch-size 256] [--num-rounds 10]

Times `BatchTemperatures.divide` on all rows for TempNets that read logits, hidden states (recovered from the logits) or
both, in the shape of a model of 7 billion parameters; in the same rounds, the products of one of its 32 layers, 32 times
which a step takes at least, and one softmax with a draw. A GPU is bound by the bytes that a step reads instead: those are
computed, for three models, of weights in bfloat16 without key-value cache, beside TempNet's matrices and passes over
float32 logits.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro
from torch import nn

from benchmarks.measure import print_setting, print_table, ratios, spread
from jobs.studies.reproduction.direct import time_in_turn
from tempnet import TempNet, TempNetConfig
from tempnet.serving.batch import BatchTemperatures
from tempnet.serving.hidden_from_logits import HiddenFromLogits

MODELS = {"7B": (6.7e9, 32_000, 4_096), "8B": (8.0e9, 128_256, 4_096), "70B": (70.6e9, 128_256, 8_192)}
"""Name of a model → number of parameters, V and d."""
_NUM_LAYERS, _WIDTH, _INNER = 32, 4_096, 11_008  # of the one of 7 billion
KINDS = ("logits", "hidden", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The sizes, and the number of rounds."""

    batch_size: int = 256
    num_threads: int = 2
    num_rounds: int = 10


def make_config(kind: str, vocab_size: int, width: int) -> TempNetConfig:
    """Return the configuration of a TempNet with the default sizes."""
    if kind == "logits":
        return TempNetConfig.for_logits(vocab_size)
    return TempNetConfig.for_hidden(vocab_size, width, with_logits=kind == "both")


def bytes_of(kind: str, batch_size: int, vocab_size: int, width: int) -> tuple[int, int]:
    """Return the bytes that a TempNet reads and writes for a step: those of hidden states from logits, and all of them."""
    config = make_config(kind, vocab_size, width)
    first = config.hidden_size * vocab_size
    recovering = 0 if kind == "logits" else first + 2 * width * width + 2 * width * batch_size
    # Masked rows are looked for, the first layer reads, and the division reads and writes; the normalisation writes.
    num_passes = 4 if kind == "hidden" else 6
    rest = (first if config.reads_logits else 0) + config.hidden_size * config.num_prototypes
    return 4 * recovering, 4 * (recovering + rest + num_passes * batch_size * vocab_size)


def make_temperatures(kind: str, vocab_size: int, width: int, device: str) -> BatchTemperatures:
    """Return a processor whose matrices have the right shapes and random values, which takes no solving."""
    network = TempNet(make_config(kind, vocab_size, width))
    temperatures = BatchTemperatures(network, device)
    if network.config.reads_state:
        hidden: HiddenFromLogits = object.__new__(HiddenFromLogits)
        hidden.tempnet, hidden.vocab_size, hidden.soft_cap, hidden.bias = network, vocab_size, None, None
        hidden.matrix = torch.randn(network.config.hidden_size, vocab_size, device=device) / vocab_size
        hidden.stride = max(1, vocab_size // (2 * width))
        hidden.norm_matrix = torch.randn(width, -(-vocab_size // hidden.stride), device=device)
        temperatures.hidden = hidden
    return temperatures


@torch.no_grad()
def main(arguments: Arguments) -> None:
    """Run the benchmark and print the results."""
    torch.set_num_threads(arguments.num_threads)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _, vocab_size, width = MODELS["7B"]
    logits = torch.randn(arguments.batch_size, vocab_size, device=device)
    settings = torch.full((arguments.batch_size,), 2.0, device=device)
    sizes = [(_WIDTH, _WIDTH)] * 4 + [(_WIDTH, _INNER)] * 2 + [(_INNER, _WIDTH)]
    layer = nn.ModuleList([nn.Linear(*size, bias=False, device=device) for size in sizes])
    inputs = [torch.randn(arguments.batch_size, size, device=device) for size, _ in sizes]

    forms: dict[str, Callable[[], object]] = {
        "layer": lambda: [linear(values) for linear, values in zip(layer, inputs, strict=True)],
        "softmax and draw": lambda: torch.multinomial(torch.softmax(logits, dim=-1), 1),
    }
    for kind in KINDS:
        temperatures = make_temperatures(kind, vocab_size, width, device)
        forms[kind] = functools.partial(temperatures.divide, logits, settings)
    seconds = time_in_turn(forms, arguments.num_rounds)
    print_setting(arguments, "torch")
    step = [_NUM_LAYERS * one for one in seconds["layer"]]
    rows = [
        [name, f"{1e3 * statistics.median(values):.1f}", spread([100 * one for one in ratios(values, step)], 2)]
        for name, values in seconds.items()
    ]
    print_table([f"{device}, V {vocab_size}, d {width}", "ms", "% of the products of 32 layers"], rows)
    rows = [
        [
            name,
            kind,
            *(f"{100 * one / (2 * num_parameters):.2f}" for one in bytes_of(kind, arguments.batch_size, *shape)),
        ]
        for name, (num_parameters, *shape) in MODELS.items()
        for kind in KINDS
    ]
    print_table(["model", "kind", "% of its bytes: hidden states from logits", "all of the processor"], rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
