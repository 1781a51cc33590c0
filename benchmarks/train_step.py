"""Time of a training step of GPT-2 125M with a TempNet, compared with plain cross-entropy, in one process.

    .venv/bin/python -m benchmarks.train_step [--batch-size 8] [--sequence-length 256] [--precision bf16]

The shape is that of `train_lm gpt2-scratch` (12 layers, width 768, 50 257 tokens padded to 50 304, d1 = d2 = 256), with
random weights and tokens. A step is forward, backward, clipping and AdamW. In bf16 the base's products run under autocast;
another form has DeepSpeed hold all weights, the TempNet's too, in bfloat16 with float32 masters.

    .venv/bin/python -m benchmarks.train_step --gpu-check      (`make gpu-check`)

measures the step of one GPU at the preset's 32 × 1 024 tokens, in packed documents: transformer blocks eager and compiled,
documents kept apart by a dense mask and by FlexAttention, plain cross-entropy and the robust loss with its TempNet. The rows
of a loss begin with the same weights and tokens, so that their first losses must agree. Without a GPU it says so and ends.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import tyro
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import is_flash_attn_2_available

from benchmarks.measure import print_setting, print_table, ratios, spread
from jobs.engine.deepspeed_engine import deepspeed
from jobs.engine.hardware import peak_flops_per_second
from jobs.studies.reproduction.direct import time_in_turn, training_step
from tempnet import TempNet, TempNetConfig
from tempnet.models.causal_lm import TemperatureCausalLM, compile_blocks
from tempnet.models.packing import FLASH, FLEX
from tempnet.softmax.config import TemperatureLossConfig

VOCAB_SIZE, NUM_LOGITS = 50_257, 50_304
BF16_WEIGHTS = "dro + TempNet, bfloat16 weights"
FORMS = {"ce": "ce", "dro + TempNet": "dro", BF16_WEIGHTS: "dro"}
"""Name of a form → loss."""


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
    gpu_check: bool = False
    """Measure both losses on a GPU at 32 × 1 024 tokens, eager and compiled, with a dense mask and with FlexAttention."""


def make_module(
    name: str, arguments: Arguments, attention: str
) -> tuple[TemperatureCausalLM, tuple[Tensor, Tensor, Tensor]]:
    """Return the model of a form, and a batch: tokens, positions and targets (B, T)."""
    torch.manual_seed(0)
    loss = FORMS[name]
    config = AutoConfig.for_model(
        "gpt2", vocab_size=NUM_LOGITS, num_hidden_layers=arguments.num_layers, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    network = TempNet(TempNetConfig.for_logits(VOCAB_SIZE, rho=arguments.rho)) if loss == "dro" else None
    module = TemperatureCausalLM(
        AutoModelForCausalLM.from_config(config, attn_implementation=attention),
        network,
        TemperatureLossConfig(name=loss, rho=arguments.rho),
        vocab_size=VOCAB_SIZE,
        autocast_dtype=torch.bfloat16 if arguments.precision == "bf16" and name != BF16_WEIGHTS else None,
    )
    shape = (arguments.batch_size, arguments.sequence_length)
    ids, targets = torch.randint(VOCAB_SIZE, (2, *shape))
    places = torch.arange(arguments.sequence_length).expand(shape)
    if not arguments.gpu_check:
        return module, (ids, places, targets)
    # A document begins at every 300th token or so, in other places in every row.
    starts = (torch.rand(shape) < 1 / 300).long() * places
    return module, (ids, places - starts.cummax(-1).values, targets)


def make_step(name: str, module: TemperatureCausalLM, batch: Sequence[Tensor]) -> Callable[[], None]:
    """Return the step of a form, forward, backward, clipping and AdamW, always with the same batch."""
    if name != BF16_WEIGHTS:
        return training_step(module, *batch)
    if not dist.is_initialized():
        os.environ |= {"LOCAL_RANK": "0"}  # DeepSpeed reads it
        dist.init_process_group("nccl" if batch[0].is_cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True),
        config={
            "train_micro_batch_size_per_gpu": len(batch[0]),
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 1.0,
            "steps_per_print": 1 << 60,
        },
        dist_init_required=False,
    )

    def step() -> None:
        engine.backward(engine(*batch)["loss"])
        engine.step()

    return step


def gpu_check(arguments: Arguments) -> None:
    """Measure the steps on the GPU and print the card and, by form, tokens/s, their share of its peak, and the ratios."""
    if not torch.cuda.is_available():
        print("gpu-check: PyTorch finds no GPU on this machine, so that there is nothing to measure")
        return
    device = torch.device("cuda")
    peak = peak_flops_per_second(device)
    print(f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}")
    print_setting(arguments, "torch", "transformers", "triton")
    rows = []
    masks = {"dense": "sdpa", "flex": FLEX} | ({"flash": FLASH[0]} if is_flash_attn_2_available() else {})
    for mask, compiled in itertools.product(masks, (False, True)):
        attention, kinds = masks[mask], [mask, "compiled" if compiled else "eager"]
        rows += measure_forms(arguments, attention, kinds, device, peak)
        torch.cuda.empty_cache()
    print_table(["loss", "mask", "blocks", "tokens/s", "MFU at 6N", "of ce", "first loss"], rows)


def measure_forms(
    arguments: Arguments, attention: str, kinds: list[str], device: torch.device, peak: float | None
) -> list[list[str]]:
    """Return a row of the table for every form, measured in turn with one kind of mask and of blocks."""
    losses: dict[str, float] = {}
    steps = {}
    for name in FORMS:
        module, batch = make_module(name, arguments, attention)
        module.to(device)
        if "compiled" in kinds:
            compile_blocks(module.base)
        num_base = sum(weights.numel() for weights in module.base.parameters())
        on_device = [tensor.to(device) for tensor in batch]
        steps[name] = make_step(name, module, on_device)
        with torch.no_grad():
            losses[name] = float(module(*on_device)["loss"])
    seconds = time_in_turn(steps, arguments.num_rounds)
    rows = []
    for name, values in seconds.items():
        speed = arguments.batch_size * arguments.sequence_length / statistics.median(values)
        used = f"{6 * num_base * speed / peak:.1%}" if peak else "unknown"
        ratio = spread(ratios(values, seconds["ce"]))
        rows.append([name, *kinds, f"{speed:,.0f}", used, ratio, f"{losses[name]:.4f}"])
    return rows


def main(arguments: Arguments) -> None:
    """Run the benchmark and print the results."""
    if arguments.gpu_check:
        gpu_check(dataclasses.replace(arguments, batch_size=32, sequence_length=1024, precision="bf16"))
        return
    torch.set_num_threads(arguments.num_threads)
    print_setting(arguments, "torch", "transformers")
    steps = {}
    for name in FORMS:
        if name == BF16_WEIGHTS and arguments.precision == "fp32":
            continue
        module, batch = make_module(name, arguments, arguments.attention)
        steps[name] = make_step(name, module, batch)
    seconds = time_in_turn(steps, arguments.num_rounds)
    rows = [[name, f"{statistics.median(of):.2f}", spread(ratios(of, seconds["ce"]))] for name, of in seconds.items()]
    print_table([f"width 768, V {VOCAB_SIZE}", "s", "of ce"], rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
