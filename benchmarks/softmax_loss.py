"""Time and memory of the language-model losses, forward and backward from hidden states, beside other implementations.

    .venv/bin/python -m benchmarks.softmax_loss [--num-tokens 2048 16384] [--num-hidden 384] [--vocab-size 32000]

The `eager` forms materialise the logits (N, V) and let autograd differentiate; the `chunked` ones are
`tempnet.softmax.linear`. The peers are fused linear cross-entropies (:func:`fused_losses`), which compute the mean
cross-entropy at a temperature for every token, and its gradients with respect to hidden states, weight and temperatures.
Memory is the growth of the peak resident size over that at the start of the step, with each form in its own process.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from benchmarks.measure import in_new_process, measure_peak_growth, print_setting, print_table, ratios
from jobs.studies.reproduction.direct import time_in_turn
from tempnet import TempNet, TempNetConfig
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.linear import linear_language_model_loss
from tempnet.softmax.reference import language_model_loss

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


def fused_losses(device: str) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return peer → mean cross-entropy from hidden states (N, d), weight (V, d) and targets (N,), for those that run here.

    No peer has an argument for it, but each takes a temperature for every token: z/τ = (h/τ)·W, so the hidden states are
    divided by τ beforehand. Cut Cross-Entropy's filter is off, because skipped probabilities make the gradient of τ noise.
    """
    options = torch.nn.LinearCrossEntropyOptions()
    found: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "torch, chunked": partial(F.linear_cross_entropy, options=options),
        "torch.compile": torch.compile(lambda hidden, weight, y: F.cross_entropy((hidden @ weight.T).float(), y)),
    }
    is_cuda = device == "cuda"
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        kind = {"filter_eps": None} if is_cuda else {"impl": "torch_compile"}
        found["Cut Cross-Entropy"] = partial(linear_cross_entropy, **kind)
    if is_cuda and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        found["Liger"] = lambda hidden, weight, y: liger(weight, hidden, y)
    if is_cuda and importlib.util.find_spec("quack"):
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        found["Quack"] = chunked_linear_cross_entropy
    return found


def make_forms(arguments: Arguments, num_tokens: int) -> dict[str, Callable[[], None]]:
    """Return form → function that does one forward and backward pass."""
    torch.manual_seed(0)
    d, v = arguments.num_hidden, arguments.vocab_size
    hidden = torch.randn(num_tokens, d, requires_grad=True)
    weight = (torch.randn(v, d) * 0.02).requires_grad_()
    targets = torch.randint(v, (num_tokens,))
    tau = (0.5 + torch.rand(num_tokens)).requires_grad_()
    rho = RHO_SHARE * float(torch.log(torch.tensor(float(v))))
    network = TempNet(TempNetConfig.for_logits(v, rho=rho))
    dro, ce = (TemperatureLossConfig(name=name, rho=rho) for name in ("dro", "ce"))

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            for leaf in (hidden, weight, tau, *network.parameters()):
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
    for name, fused in fused_losses("cpu").items():
        forms[name] = step(partial(lambda fused: fused(hidden / tau.unsqueeze(-1), weight, targets), fused))
    return forms


def memory_of(name: str, arguments: Arguments, num_tokens: int) -> float:
    """Return the memory of one form in MiB."""
    torch.set_num_threads(arguments.num_threads)
    run = make_forms(arguments, num_tokens)[name]
    run()  # the first call of some peers compiles, which is not to be measured
    return measure_peak_growth(run)


def measure(arguments: Arguments, num_tokens: int) -> None:
    """Measure one number of tokens and print its table."""
    forms = make_forms(arguments, num_tokens)
    names = list(forms)
    seconds = time_in_turn(forms, arguments.num_rounds)
    forms.clear()  # free their tensors before the memory of others is measured
    memory = {name: in_new_process(memory_of, name, arguments, num_tokens) for name in names}
    rows = []
    for name in names:
        medians = [statistics.median(ratios(seconds[name], seconds[base])) for base in (EAGER, CHUNKED)]
        times = [f"{value:.3f}" for value in (statistics.median(seconds[name]), *medians)]
        rows.append([name, *times, f"{memory[name]:.0f}", f"{memory[name] / memory[EAGER]:.2f}"])
    print_table([f"N = {num_tokens}", "seconds", "/ eager", "/ chunked", "MiB", "/ eager"], rows)


def main(arguments: Arguments) -> None:
    """Run the benchmark and print the results."""
    torch.set_num_threads(arguments.num_threads)
    print_setting(arguments, "torch", "cut-cross-entropy")  # `make bench` installs it
    for num_tokens in arguments.num_tokens:
        measure(arguments, num_tokens)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
