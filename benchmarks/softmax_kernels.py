"""Time and memory of the loss on a GPU, forward and backward from hidden states: our kernels beside public ones.

    .venv/bin/python -m benchmarks.softmax_kernels [--num-tokens 8192] [--hidden-size 2048] [--vocab-size 128256]

All forms compute the mean cross-entropy at a temperature for every token, and its gradients for hidden states, weight and
temperatures, in bfloat16; our kernels optionally have the statistics at τ = 1, too. The peers, of which those are measured
that are installed, take hidden states divided by the temperatures (`benchmarks.softmax_loss.fused_losses`). Memory is the
growth of the allocator's peak over its value at the start of the step, gradients included.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from benchmarks.measure import print_setting, print_table, ratios
from benchmarks.softmax_loss import fused_losses
from jobs.engine.command_line import fail
from tempnet.softmax.kernels import is_available, softmax_gradients, softmax_statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The sizes, and the number of rounds."""

    num_tokens: int = 8192
    hidden_size: int = 2048
    vocab_size: int = 128_256
    num_rounds: int = 10


def make_forms(arguments: Arguments, device: str) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Return form → function of one forward and backward pass, which returns the loss and the gradients.

    The gradients are those of the hidden states, the weight and the temperatures.
    """
    generator = torch.Generator(device).manual_seed(0)
    n, d, v = arguments.num_tokens, arguments.hidden_size, arguments.vocab_size
    hidden = torch.randn(n, d, device=device, dtype=torch.bfloat16, generator=generator).requires_grad_()
    weight = torch.randn(v, d, device=device, dtype=torch.bfloat16, generator=generator).mul_(d**-0.5).requires_grad_()
    targets = torch.randint(v, (n,), device=device, generator=generator)
    tau = torch.empty(n, device=device).uniform_(0.5, 1.5, generator=generator).requires_grad_()

    def differentiate(loss: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            value = loss()
            return value.detach(), *torch.autograd.grad(value, (hidden, weight, tau))

        return run

    def kernels(with_unit: bool) -> Callable[[], tuple[Tensor, ...]]:
        @torch.no_grad()
        def run() -> tuple[Tensor, ...]:
            statistics_of_tokens = softmax_statistics(hidden, weight, targets, tau, with_unit=with_unit)
            hidden_grad, weight_grad, _ = softmax_gradients(
                hidden, weight, targets, tau, statistics_of_tokens, 1 / (n * tau)
            )
            assert hidden_grad is not None
            assert weight_grad is not None
            terms = statistics_of_tokens.at_tau
            return terms.cross_entropy.mean(), hidden_grad, weight_grad, terms.excess / (n * tau)

        return run

    def scaled() -> Tensor:
        return (hidden / tau.unsqueeze(-1)).to(hidden.dtype)

    forms = {
        "eager": differentiate(lambda: F.cross_entropy((hidden @ weight.T).float() / tau.unsqueeze(-1), targets)),
        "eager, bfloat16 softmax": differentiate(lambda: F.cross_entropy(scaled() @ weight.T, targets)),
        "kernels": kernels(with_unit=False),
        "kernels, and at τ = 1": kernels(with_unit=True),
    }
    for name, fused in fused_losses(device).items():
        forms[name] = differentiate(partial(lambda fused: fused(scaled(), weight, targets), fused))
    return forms


def check(forms: dict[str, Callable[[], tuple[Tensor, ...]]]) -> None:
    """Compile and warm up every form, and check that all compute the same as the first one."""
    expected = [value.float() for value in next(iter(forms.values()))()]
    for name, run in forms.items():
        for value, reference in zip(run(), expected, strict=True):
            error = ((value.float() - reference).norm() / reference.norm()).item()
            if not error < 0.05:
                fail(f"{name} is off by {error:.1%} of the eager result")


def measure(run: Callable[[], tuple[Tensor, ...]]) -> tuple[float, float]:
    """Return the time in milliseconds, and the growth of the peak memory in MiB."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started.record()
    run()
    ended.record()
    torch.cuda.synchronize()
    return started.elapsed_time(ended), (torch.cuda.max_memory_allocated() - before) / 2**20


def main(arguments: Arguments) -> None:
    """Run the benchmark and print the results."""
    if not torch.cuda.is_available():
        fail("this benchmark needs an NVIDIA GPU, and torch finds none")
    if not is_available(torch.zeros(1, device="cuda")):
        fail("the kernels need Triton and compute capability 8.0")
    print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, bfloat16")
    print_setting(arguments, "torch", "triton", "liger-kernel", "cut-cross-entropy", "quack-kernels")
    forms = make_forms(arguments, "cuda")
    check(forms)
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for _ in range(arguments.num_rounds):
        for name, run in forms.items():
            figures[name].append(measure(run))
    milliseconds = {name: [time for time, _ in values] for name, values in figures.items()}
    rows = []
    for name, values in milliseconds.items():
        ratio = statistics.median(ratios(values, milliseconds["eager"]))
        memory = max(growth for _, growth in figures[name])
        rows.append([name, f"{statistics.median(values):.2f}", f"{ratio:.2f}", f"{memory:.0f}"])
    print_table(["", "ms", "ratio", "MiB"], rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
