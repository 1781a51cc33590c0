"""Time per token of generation with a TempNet, compared with sampling from the same model without one.

    .venv/bin/python -m benchmarks.decoding [--batch-size 8] [--num-new-tokens 32] [--num-rounds 7]

The model has the shape of GPT-2 (125 M parameters) and random weights. Every round times each form once, in turn;
ratios are medians over rounds. The form `plain` computes τ from the logits (V·d1 products per token), `fold` from the
hidden state ((d + d1)·d products); the fold's own W1·W and WᵀW are computed once, beforehand.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
import tyro
from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessor

from tempnet import TempNet, TempNetConfig
from tempnet.inference import CachedFold, TemperatureLogitsProcessor, attach


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The sizes, and the number of rounds."""

    num_layers: int = 12
    num_hidden: int = 768
    vocab_size: int = 50_257
    batch_size: int = 8
    num_prompt_tokens: int = 16
    num_new_tokens: int = 32
    num_threads: int = 2
    num_rounds: int = 7


def make_forms(arguments: Arguments) -> dict[str, Callable[[], None]]:
    """Return form → function that does one generation."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=arguments.vocab_size,
        n_embd=arguments.num_hidden,
        n_layer=arguments.num_layers,
        n_head=arguments.num_hidden // 64,
        bos_token_id=None,
        eos_token_id=None,  # every text has the full length
    )
    base = GPT2LMHeadModel(config).eval()
    network = TempNet(TempNetConfig.for_logits(arguments.vocab_size))
    fold = CachedFold.of(base, network)
    prompts = torch.randint(arguments.vocab_size, (arguments.batch_size, arguments.num_prompt_tokens))

    def generate(processors: list[LogitsProcessor]) -> None:
        base.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=arguments.num_new_tokens,
            do_sample=True,
            top_k=0,
            logits_processor=processors,
            pad_token_id=0,
        )

    def with_fold() -> None:
        with attach(base, network, fold) as attached:
            generate([attached.processor()])

    return {
        "base": lambda: generate([]),
        "plain": lambda: generate([TemperatureLogitsProcessor(network)]),
        "fold": with_fold,
    }


def main(arguments: Arguments) -> None:
    """Run the benchmark and print the results."""
    torch.set_num_threads(arguments.num_threads)
    forms = make_forms(arguments)
    print(
        f"GPT-2 shape: {arguments.num_layers} layers, d {arguments.num_hidden}, V {arguments.vocab_size}, float32; batch "
        f"{arguments.batch_size}, {arguments.num_prompt_tokens} + {arguments.num_new_tokens} tokens, {arguments.num_threads} "
        f"threads, torch {torch.__version__}, transformers {transformers.__version__}, {arguments.num_rounds} rounds"
    )
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    order = list(forms)
    for number in range(arguments.num_rounds + 1):
        for name in order[number % 3 :] + order[: number % 3]:  # rotated, so that no form always comes first
            started = time.perf_counter()
            forms[name]()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
    print(f"{'':<8}{'ms a step':>10}{'ratio':>8}{'from':>8}{'to':>8}")
    for name, values in seconds.items():
        ratios = [value / base for value, base in zip(values, seconds["base"], strict=True)]
        step = 1000 * statistics.median(values) / arguments.num_new_tokens
        print(f"{name:<8}{step:>10.2f}{statistics.median(ratios):>8.3f}{min(ratios):>8.3f}{max(ratios):>8.3f}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
