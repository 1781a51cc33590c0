"""Cost of the serving processor for one step of a batch, beside the products of a model, and by arithmetic.

    .venv/bin/python -m benchmarks.serving [--batch-size 256] [--num-rounds 10]

Times `BatchTemperatures.divide` for TempNets that read logits, hidden states or both, in the shape of a model of 7 billion
parameters; in the same rounds, the products of one of its 32 layers, and one softmax with a draw. A GPU is bound by the
bytes that a step reads: those are computed for three models, in bfloat16, beside TempNet's matrices and float32 logits.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro
from torch import Tensor, nn

from benchmarks.measure import print_setting, print_table, ratios, spread
from jobs.studies.reproduction.direct import time_in_turn
from tempnet import TempNet, TempNetConfig
from tempnet.serving.batch import BatchTemperatures
from tempnet.serving.hidden_from_logits import HiddenFromLogits, spread_ids

MODELS = {
    "7B": (6.7e9, 32_000, 4_096, 2**19), "8B": (8.0e9, 128_256, 4_096, 2**17), "70B": (70.6e9, 128_256, 8_192, 5 * 2**16),
}  # fmt: skip
"""Name of a model → number of parameters, V, d, and bytes of the key-value cache for a token."""
_CACHED = 512  # tokens of a sequence
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
    """Return the bytes that a step reads and writes for τ, and those that it takes to divide the logits."""
    config = make_config(kind, vocab_size, width)
    num_read = make_index(vocab_size, width).numel()
    readers = width * (config.reads_state + config.reads_logits) + config.num_prototypes
    matrices = 2 * width * num_read + 4 * config.hidden_size * readers
    return matrices + 4 * batch_size * num_read, 2 * 4 * batch_size * vocab_size


def make_index(vocab_size: int, width: int) -> Tensor:
    """Return the ids of the logits that are read at least."""
    return spread_ids(-(-5 * width // 4), vocab_size)


def make_temperatures(kind: str, vocab_size: int, width: int, device: str) -> BatchTemperatures:
    """Return a processor whose matrices have the right shapes and random values, which takes no solving."""
    network = TempNet(make_config(kind, vocab_size, width)).to(device)
    hidden: HiddenFromLogits = object.__new__(HiddenFromLogits)
    hidden.tempnet, hidden.vocab_size, hidden.soft_cap, hidden.bias = network, vocab_size, None, None
    hidden.index, hidden.folds = make_index(vocab_size, width).to(device), network.config.reads_logits
    dtype = torch.float32 if device == "cpu" else torch.float16
    hidden.matrix = (torch.randn(width, hidden.index.numel(), device=device) / width).to(dtype)
    spectra = [None] * network.config.reads_state + [torch.rand(width, device=device)] * hidden.folds
    hidden.readers = [(torch.randn(network.config.hidden_size, width, device=device), one) for one in spectra]
    return BatchTemperatures(network, device, hidden)


@torch.no_grad()
def main(arguments: Arguments) -> None:
    """Run the benchmark and print the results."""
    torch.set_num_threads(arguments.num_threads)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _, vocab_size, width, _ = MODELS["7B"]
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
    rows = []
    for name, (num_parameters, *shape, cached) in MODELS.items():
        for kind in KINDS:
            of_tau, division = bytes_of(kind, arguments.batch_size, *shape)
            weights, cache = 2 * num_parameters, arguments.batch_size * _CACHED * cached
            shares = of_tau / weights, (of_tau + division) / weights, (of_tau + division) / (weights + cache)
            rows.append([name, kind, *(f"{100 * one:.2f}" for one in shares)])
    print_table(["model", "kind", "% of its weights: τ", "with the division", f"beside {_CACHED} cached tokens"], rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
