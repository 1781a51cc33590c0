"""The forward pass of the language-model losses with and without autograd, which is what validation saves.

    .venv/bin/python -m benchmarks.validation [--num-rounds 8]

A scalar loss computes its gradients in the forward pass; under `torch.no_grad()` it does not. Both are timed in turn in
every round, in float32, with the values that the statistics need. Ratios are medians over rounds.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import tyro

from tempnet.network import TempNet
from tempnet.network_config import TempNetConfig
from tempnet.softmax.linear import linear_language_model_loss
from tempnet.softmax.reference import TemperatureLossConfig

SHAPES = ((2048, 384, 32_000), (1024, 768, 50_257), (2048, 128, 2048))
"""Tokens N, hidden size d and vocabulary V of the cases; the last one is the shape of the small presets."""
_RHO = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Number of rounds and threads."""

    num_rounds: int = 8
    """Number of timed rounds; the smallest shape gets five times as many."""
    num_threads: int = 2
    """Number of threads that torch uses."""


def time_forward(shape: tuple[int, int, int], loss: str, num_rounds: int) -> dict[bool, list[float]]:
    """Return the seconds of every round, by whether autograd was on; the first round warms up and is left out."""
    num_tokens, hidden_size, vocab_size = shape
    network = TempNet(TempNetConfig.for_logits(vocab_size, rho=_RHO)) if loss == "dro" else None
    hidden = torch.randn(num_tokens, hidden_size, requires_grad=True)
    weight = (torch.randn(vocab_size, hidden_size) * 0.05).requires_grad_()
    targets = torch.randint(vocab_size, (num_tokens,))
    config = TemperatureLossConfig(name=loss, rho=_RHO)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(num_rounds + 1):
        for has_autograd in seconds:
            with torch.set_grad_enabled(has_autograd):
                started = time.perf_counter()
                linear_language_model_loss(hidden, weight, targets, config, network, with_values=True)
                if number:
                    seconds[has_autograd].append(time.perf_counter() - started)
    return seconds


def main(arguments: Arguments) -> None:
    """Measure and print."""
    torch.set_num_threads(arguments.num_threads)
    torch.manual_seed(0)
    print(f"float32, {arguments.num_threads} threads, torch {torch.__version__}")
    for shape in SHAPES:
        for loss in ("dro", "ce"):
            is_small = shape == SHAPES[-1]
            seconds = time_forward(shape, loss, arguments.num_rounds * (5 if is_small else 1))
            ratios = [slow / fast for slow, fast in zip(seconds[True], seconds[False], strict=True)]
            print(
                "N {}, d {}, V {}".format(*shape)
                + f", {loss:<3}  with autograd {statistics.median(seconds[True]):.4f} s, "
                f"without {statistics.median(seconds[False]):.4f} s: {statistics.median(ratios):.2f} times as fast "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
