"""Time per token of generation with a TempNet, compared with sampling from the same model without one.

    .venv/bin/python -m benchmarks.decoding [--batch-size 8] [--num-new-tokens 32] [--num-rounds 7]

The model has the shape of GPT-2 (125 M parameters) and random weights. The form `plain` computes τ from the logits (V·d1
products per token), `fold` from the hidden state ((d + d1)·d products); the fold's own W1·W and WᵀW are computed once,
beforehand.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro
from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessor

from benchmarks.measure import print_setting, print_table, ratios, spread
from jobs.studies.reproduction.direct import time_in_turn
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
    print_setting(arguments, "torch", "transformers")
    seconds = time_in_turn(make_forms(arguments), arguments.num_rounds)
    rows = [
        [
            name,
            f"{1000 * statistics.median(values) / arguments.num_new_tokens:.2f}",
            spread(ratios(values, seconds["base"])),
        ]
        for name, values in seconds.items()
    ]
    print_table(["float32", "ms a step", "ratio"], rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
