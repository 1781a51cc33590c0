"""Time of a training step of GPT-2 125M with a TempNet, compared with plain cross-entropy, in one process.

    .venv/bin/python -m benchmarks.train_step [--batch-size 8] [--sequence-length 256] [--precision bf16]

The shape is that of `train_lm gpt2-scratch` (12 layers, width 768, 50 257 tokens padded to 50 304, d1 = d2 = 256), with
random weights and tokens. A step is forward, backward, clipping and AdamW. The `materialized` forms compute all logits,
as the papers' code does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import tyro
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.measure import print_setting, print_table, ratios, spread
from jobs.studies.reproduction.direct import time_in_turn, training_step
from tempnet import TempNet, TempNetConfig
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.softmax.config import TemperatureLossConfig

VOCAB_SIZE, NUM_LOGITS = 50_257, 50_304
FORMS = {
    "ce": ("ce", False),
    "dro + TempNet": ("dro", False),
    "ce, materialized": ("ce", True),
    "dro + TempNet, materialized": ("dro", True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The sizes, and what to measure."""

    batch_size: int = 8
    sequence_length: int = 256
    num_layers: int = 12
    precision: Literal["fp32", "bf16"] = "bf16"
    attention: Literal["sdpa", "eager"] = "sdpa"
    num_threads: int = 2
    num_rounds: int = 5
    rho: float = 7.0
    forms: tuple[str, ...] = ("ce", "dro + TempNet")
    """Forms to measure: ce; dro + TempNet; and either with `, materialized`."""


def make_step(name: str, arguments: Arguments) -> Callable[[], None]:
    """Return a function that does one optimizer step of a form."""
    torch.manual_seed(0)
    loss, materialize = FORMS[name]
    config = AutoConfig.for_model(
        "gpt2", vocab_size=NUM_LOGITS, num_hidden_layers=arguments.num_layers, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    network = TempNet(TempNetConfig.for_logits(VOCAB_SIZE, rho=arguments.rho)) if loss == "dro" else None
    module = TemperatureCausalLM(
        AutoModelForCausalLM.from_config(config, attn_implementation=arguments.attention),
        network,
        TemperatureLossConfig(name=loss, rho=arguments.rho),
        vocab_size=VOCAB_SIZE,
        autocast_dtype=torch.bfloat16 if arguments.precision == "bf16" else None,
        materialize=materialize,
    )
    shape = (arguments.batch_size, arguments.sequence_length)
    ids, targets = torch.randint(VOCAB_SIZE, (2, *shape))
    positions = torch.arange(arguments.sequence_length).expand(shape)
    return training_step(module, ids, positions, targets)


def main(arguments: Arguments) -> None:
    """Run the benchmark and print the results."""
    torch.set_num_threads(arguments.num_threads)
    print_setting(arguments, "torch", "transformers")
    seconds = time_in_turn({name: make_step(name, arguments) for name in arguments.forms}, arguments.num_rounds)
    first = seconds[arguments.forms[0]]
    rows = [
        [name, f"{statistics.median(values):.2f}", spread(ratios(values, first))] for name, values in seconds.items()
    ]
    print_table([f"width 768, V {VOCAB_SIZE}", "s", f"of {arguments.forms[0]}"], rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
