"""Training throughput of two workers against one, each with one thread, the data pipeline included.

    .venv/bin/python -m benchmarks.scaling [--num-steps 120] [--num-rounds 3]

`gpt2-scratch-small` on the sample data, with the command that a person types and the same global batch. Every round runs one
worker and then two. Beside it stands what two cores of the machine give at all: the same training step, in plain PyTorch,
in two processes that have nothing to do with each other, each with half of the batch, against one process.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.measure import print_setting, run_train_lm, spread, tokens_per_second
from jobs.studies.reproduction.direct import training_step
from tempnet import TempNet, TempNetConfig
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.softmax.config import TemperatureLossConfig

TARGET = 1.75
VOCAB_SIZE, BATCH_SIZE, CONTEXT_LENGTH = 2048, 16, 128  # those of gpt2-scratch-small on the sample data
SECONDS_OF_STEPS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to measure."""

    num_steps: int = 120
    num_rounds: int = 3


def run(num_workers: int, storage: Path, name: str, arguments: Arguments) -> tuple[float, float]:
    """Train with a number of workers; return tokens a second and the share of the time spent waiting for data."""
    outcome = run_train_lm(
        storage, name, f"--run.num-steps={arguments.num_steps}", "--run.log-every=20", "--run.checkpoint-every=1000000",
        "--validation.every=1000000", f"--workers.num-workers={num_workers}", "--workers.num-threads=1",
        "--workers.precision=fp32",
    )  # fmt: skip
    return tokens_per_second(outcome), outcome["data_wait_share"]


def train_alone(batch_size: int, start: Any, speeds: Any) -> None:
    """Do training steps with one thread, in fp32, and put the tokens a second into a queue."""
    torch.set_num_threads(1)
    base = AutoConfig.for_model(
        "gpt2", vocab_size=VOCAB_SIZE, n_embd=192, n_layer=4, n_head=6, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    module = TemperatureCausalLM(
        AutoModelForCausalLM.from_config(base, attn_implementation="eager"),
        TempNet(TempNetConfig.for_logits(VOCAB_SIZE, rho=3.0)),
        TemperatureLossConfig(name="dro", rho=3.0),
        vocab_size=VOCAB_SIZE,
    )
    ids, targets = torch.randint(VOCAB_SIZE, (2, batch_size, CONTEXT_LENGTH))
    step = training_step(module, ids, torch.arange(CONTEXT_LENGTH).expand_as(ids), targets)
    step()
    start.wait()
    started, num_steps = time.monotonic(), 0
    while time.monotonic() - started < SECONDS_OF_STEPS:
        step()
        num_steps += 1
    speeds.put(num_steps * ids.numel() / (time.monotonic() - started))


def measure_machine() -> float:
    """Return by how much two processes that are independent of each other train faster than one."""
    context = multiprocessing.get_context("spawn")
    totals = []
    for number in (1, 2):
        start, speeds = context.Barrier(number), context.Queue()
        processes = [
            context.Process(target=train_alone, args=(BATCH_SIZE // number, start, speeds)) for _ in range(number)
        ]
        for process in processes:
            process.start()
        totals.append(sum(speeds.get() for _ in processes))
        for process in processes:
            process.join()
    return totals[1] / totals[0]


def main(arguments: Arguments) -> None:
    """Print the speeds of every round, their ratios, and the median ratio beside its target."""
    print_setting(arguments, "torch", "ray")
    of_workers, of_processes = list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="scaling-") as name:
        for number in range(arguments.num_rounds):
            (alone, _), (both, wait) = (
                run(workers, Path(name), f"round-{number}-workers-{workers}", arguments) for workers in (1, 2)
            )
            of_processes.append(measure_machine())
            of_workers.append(both / alone)
            print(
                f"round {number + 1}: one worker {alone:,.0f} tokens/s, two {both:,.0f}, ratio {both / alone:.3f}; two wait "
                f"{wait:.2%} of the time for data; two independent processes {of_processes[-1]:.3f} times one",
                flush=True,
            )
    print(f"two workers / one {spread(of_workers)}, target {TARGET:g}; independent processes {spread(of_processes)}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
