"""Time and memory of the language-model losses, forward and backward, from hidden states.

    .venv/bin/python -m benchmarks.softmax_loss [--num-tokens 2048] [--num-hidden 384] [--vocab-size 32000]

`eager` forms materialise the logits (N, V) and let autograd differentiate; `chunked` ones are
`tempnet.softmax.linear`. Every round times each form once, in turn; ratios are medians over rounds. Memory is the
growth of the peak resident size over the start of the step, each form in a process of its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from tempnet import TempNet, TempNetConfig
from tempnet.softmax.linear import linear_language_model_loss
from tempnet.softmax.reference import TemperatureLossConfig, language_model_loss

RHO_SHARE = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Sizes."""

    num_tokens: int = 2048
    num_hidden: int = 384
    vocab_size: int = 32_000
    num_threads: int = 2
    num_rounds: int = 7
    memory_of: str = ""
    """Internal: measure the memory of one form in this process."""


def make_forms(arguments: Arguments) -> dict[str, Callable[[], None]]:
    """Form → one forward and backward pass."""
    torch.manual_seed(0)
    n, d, v = arguments.num_tokens, arguments.num_hidden, arguments.vocab_size
    hidden = torch.randn(n, d, requires_grad=True)
    weight = (torch.randn(v, d) * 0.02).requires_grad_()
    targets = torch.randint(v, (n,))
    rho = RHO_SHARE * float(torch.log(torch.tensor(float(v))))
    network = TempNet(TempNetConfig.for_logits(v, rho=rho))
    dro, ce = (TemperatureLossConfig(name=name, rho=rho) for name in ("dro", "ce"))

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            for leaf in (hidden, weight, *network.parameters()):
                leaf.grad = None
            loss().backward()

        return run

    return {
        "eager cross-entropy": step(lambda: F.cross_entropy(hidden @ weight.T, targets)),
        "eager robust loss + TempNet": step(lambda: language_model_loss(hidden @ weight.T, targets, dro, network)[0]),
        "chunked cross-entropy": step(lambda: linear_language_model_loss(hidden, weight, targets, ce)[0]),
        "chunked robust loss + TempNet": step(
            lambda: linear_language_model_loss(hidden, weight, targets, dro, network)[0]
        ),
    }


def _kib(field: str) -> int:
    """A field of /proc/self/status: VmRSS, the resident size, or VmHWM, its peak."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field)))


def main(arguments: Arguments) -> None:
    """Measure and print."""
    torch.set_num_threads(arguments.num_threads)
    forms = make_forms(arguments)
    if arguments.memory_of:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew (Linux)
        before = _kib("VmRSS")
        forms[arguments.memory_of]()
        print(json.dumps(_kib("VmHWM") - before))
        return
    print(
        f"N {arguments.num_tokens}, d {arguments.num_hidden}, V {arguments.vocab_size}, float32, "
        f"{arguments.num_threads} threads, torch {torch.__version__}, {arguments.num_rounds} rounds"
    )
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(arguments.num_rounds + 1):
        for name, run in forms.items():
            started = time.perf_counter()
            run()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
    first = next(iter(forms))
    print(f"{'':<32}{'seconds':>9}{'ratio':>8}{'MiB':>8}")
    for name, values in seconds.items():
        ratio = statistics.median(value / base for value, base in zip(values, seconds[first], strict=True))
        command = [sys.executable, "-m", "benchmarks.softmax_loss", "--memory-of", name]
        for field in ("num_tokens", "num_hidden", "vocab_size", "num_threads"):
            command += [f"--{field.replace('_', '-')}", str(getattr(arguments, field))]
        memory = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024
        print(f"{name:<32}{statistics.median(values):>9.3f}{ratio:>8.2f}{memory:>8.0f}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
