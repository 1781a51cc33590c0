"""Time and memory of the language-model losses, forward and backward from hidden states, beside other implementations.

    .venv/bin/python -m benchmarks.softmax_loss [--num-tokens 2048 16384] [--num-hidden 384] [--vocab-size 32000]

The `eager` forms materialise the logits (N, V) and let autograd differentiate; the `chunked` ones are
`tempnet.softmax.linear`. The peers, which have no temperature, are torch's `linear_cross_entropy` and, if it is
installed, Cut Cross-Entropy's torch path (`make bench` installs it; Liger runs on CUDA only:
`benchmarks.softmax_kernels`). Every round times each form once, in turn; ratios are medians over rounds. Memory is the
growth of the peak resident size over that at the start of the step, with each form in its own process.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from benchmarks.memory import measure_peak_growth
from tempnet import TempNet, TempNetConfig
from tempnet.softmax.linear import linear_language_model_loss
from tempnet.softmax.reference import TemperatureLossConfig, language_model_loss

RHO_SHARE = 0.6
EAGER, CHUNKED = "eager cross-entropy", "chunked cross-entropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The sizes, and what to measure."""

    num_tokens: tuple[int, ...] = (2048,)
    """Numbers of tokens N; one table is printed for each."""
    num_hidden: int = 384
    vocab_size: int = 32_000
    num_threads: int = 2
    num_rounds: int = 7
    peers: bool = True
    """Whether to measure the peers, too."""
    time: bool = True
    """Whether to measure time; off: memory only."""
    memory_of: str = ""
    """Internal: measure the memory of one form in this process."""


def make_forms(arguments: Arguments, num_tokens: int) -> dict[str, Callable[[], None]]:
    """Return form → function that does one forward and backward pass."""
    torch.manual_seed(0)
    d, v = arguments.num_hidden, arguments.vocab_size
    hidden = torch.randn(num_tokens, d, requires_grad=True)
    weight = (torch.randn(v, d) * 0.02).requires_grad_()
    targets = torch.randint(v, (num_tokens,))
    rho = RHO_SHARE * float(torch.log(torch.tensor(float(v))))
    network = TempNet(TempNetConfig.for_logits(v, rho=rho))
    dro, ce = (TemperatureLossConfig(name=name, rho=rho) for name in ("dro", "ce"))

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            for leaf in (hidden, weight, *network.parameters()):
                leaf.grad = None
            loss().backward()

        return run

    forms = {
        EAGER: step(lambda: F.cross_entropy(hidden @ weight.T, targets)),
        "eager robust loss + TempNet": step(lambda: language_model_loss(hidden @ weight.T, targets, dro, network)[0]),
        CHUNKED: step(lambda: linear_language_model_loss(hidden, weight, targets, ce).loss),
        "chunked robust loss + TempNet": step(
            lambda: linear_language_model_loss(hidden, weight, targets, dro, network).loss
        ),
    }
    if arguments.peers:
        forms["torch linear_cross_entropy"] = step(lambda: F.linear_cross_entropy(hidden, weight, targets))
        if importlib.util.find_spec("cut_cross_entropy"):
            from cut_cross_entropy import linear_cross_entropy

            forms["Cut Cross-Entropy, torch path"] = step(
                lambda: linear_cross_entropy(hidden, weight, targets, impl="torch_compile")
            )
    return forms


def measure_memory(name: str, arguments: Arguments, num_tokens: int) -> float:
    """Return the memory of one form in MiB, measured in its own process."""
    command = [sys.executable, "-m", "benchmarks.softmax_loss", "--memory-of", name, "--num-tokens", str(num_tokens)]
    for field in ("num_hidden", "vocab_size", "num_threads"):
        command += [f"--{field.replace('_', '-')}", str(getattr(arguments, field))]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024


def print_table(arguments: Arguments, num_tokens: int) -> None:
    """Measure one number of tokens and print its table."""
    forms = make_forms(arguments, num_tokens)
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(arguments.num_rounds + 1 if arguments.time else 0):
        for name, run in forms.items():
            started = time.perf_counter()
            run()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
    names = list(forms)
    forms.clear()  # free their tensors before the memory of others is measured
    memory = {name: measure_memory(name, arguments, num_tokens) for name in names}

    def ratio(name: str, base: str) -> str:
        if not arguments.time:
            return ""
        return f"{statistics.median(value / of for value, of in zip(seconds[name], seconds[base], strict=True)):.3f}"

    print(f"\nN = {num_tokens}\n{'':<32}{'seconds':>9}{'/ eager':>9}{'/ chunked':>11}{'MiB':>8}{'/ eager':>9}")
    for name, values in seconds.items():
        middle = f"{statistics.median(values):.3f}" if values else ""
        print(
            f"{name:<32}{middle:>9}{ratio(name, EAGER):>9}{ratio(name, CHUNKED):>11}{memory[name]:>8.0f}"
            f"{memory[name] / memory[EAGER]:>9.2f}",
            flush=True,
        )


def main(arguments: Arguments) -> None:
    """Run the benchmark and print the results."""
    torch.set_num_threads(arguments.num_threads)
    if arguments.memory_of:
        run = make_forms(arguments, arguments.num_tokens[0])[arguments.memory_of]
        if arguments.memory_of.startswith("Cut"):
            run()  # the first call compiles, which is not to be measured
        print(json.dumps(measure_peak_growth(run)))
        return
    versions = [f"torch {torch.__version__}"]
    if importlib.util.find_spec("cut_cross_entropy"):
        versions.append(f"cut-cross-entropy {importlib.metadata.version('cut-cross-entropy')}")
    print(
        f"d {arguments.num_hidden}, V {arguments.vocab_size}, float32, {arguments.num_threads} threads, "
        f"{arguments.num_rounds} rounds, {', '.join(versions)}"
    )
    for num_tokens in arguments.num_tokens:
        print_table(arguments, num_tokens)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
