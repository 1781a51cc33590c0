"""Training throughput of the main job with one worker, compared with bare loops and Hugging Face's Trainer.

    .venv/bin/python -m benchmarks.train_lm [--num-steps 100] [--num-rounds 3]

All variants have the same model, batch, dtype and number of threads. Every round runs, one after the other, a bare
single-process loop, the job (Ray Data, Ray Train, DeepSpeed, MLflow), and two peers that train the same GPT-2 on the same
blocks by cross-entropy, without a TempNet and without keeping documents apart: a loop as nanoGPT's, and Transformers'
Trainer. Speeds are medians over intervals of `log_every` steps, without the first interval.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import tyro

from benchmarks.measure import in_new_process, print_setting, print_table, run_train_lm, spread, tokens_per_second
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.presets.language_models import PRESETS

LOG_EVERY = 20
PEERS = ("nanoGPT's loop, cross-entropy", "Transformers' Trainer, cross-entropy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to measure."""

    num_steps: int = 100
    num_rounds: int = 3
    num_threads: int = 2

    def __post_init__(self) -> None:
        if self.num_steps < 2 * LOG_EVERY:
            raise ValueError(
                f"num_steps = {self.num_steps} must be at least {2 * LOG_EVERY}: the first {LOG_EVERY} do not count"
            )


def run_job(arguments: Arguments, storage: Path, name: str) -> float:
    """Run the job itself, and return its tokens a second."""
    outcome = run_train_lm(
        storage, name, f"--run.num-steps={arguments.num_steps}", f"--run.log-every={LOG_EVERY}",
        "--run.checkpoint-every=1000000", "--workers.num-workers=1", f"--workers.num-threads={arguments.num_threads}",
        "--validation.every=1000000", "--validation.num-blocks=16", "--validation.num-oracle-tokens=256",
    )  # fmt: skip
    return tokens_per_second(outcome)


def make_config(arguments: Arguments, storage: Path) -> LanguageModelConfig:
    """Return the configuration of the loops, which is that of the job where both have a field."""
    config = PRESETS["gpt2-scratch-small"]()
    return replace(
        config,
        run=replace(config.run, storage=str(storage), num_steps=arguments.num_steps, log_every=LOG_EVERY),
        workers=replace(config.workers, num_workers=1, num_threads=arguments.num_threads),
    )


class Pace:
    """Tokens a second over every interval of LOG_EVERY steps."""

    def __init__(self, config: LanguageModelConfig) -> None:
        self.num_tokens = LOG_EVERY * config.optimizer.batch_size * config.data.context_length
        self.speeds: list[float] = []
        self.started = time.perf_counter()

    def count(self, step: int) -> None:
        """Note that a step, counted from 1, has ended."""
        if step % LOG_EVERY == 0:
            self.speeds.append(self.num_tokens / (time.perf_counter() - self.started))
            self.started = time.perf_counter()

    def median(self) -> float:
        """Return the median without the first interval, in which data and code are loaded."""
        return statistics.median(self.speeds[1:])


def read_blocks(config: LanguageModelConfig) -> dict[str, np.ndarray]:
    """Return the blocks of all steps, as they lie in the prepared text."""
    from pipelines.text.blocks import read_range
    from pipelines.text.manifest import Manifest

    prepared = next((Path(config.run.storage) / "prepared").glob("train-*"))
    return read_range(Manifest.load(str(prepared)), 0, config.run.num_steps * config.optimizer.batch_size)


def run_peer(config: LanguageModelConfig, name: str) -> float:
    """Return the tokens a second of a peer in this process."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from jobs.engine.deepspeed_engine import decay_with_warmup
    from jobs.tasks.language_model.models import build_base
    from jobs.tasks.language_model.validation import to_tensors
    from pipelines.text.tokenization import load_tokenizer
    from tempnet.models.causal_lm import compile_blocks

    torch.set_num_threads(config.workers.num_threads)
    settings, num_steps = config.optimizer, config.run.num_steps
    is_half = config.workers.resolved_precision == "bf16"
    base = build_base(config, load_tokenizer(config.tokenizer)).train()
    if config.workers.compiles:
        compile_blocks(base)
    ids = to_tensors(read_blocks(config), torch.device("cpu"))["input_ids"]
    optimizer = torch.optim.AdamW(base.parameters(), settings.learning_rate_base, (0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, decay_with_warmup(num_steps, warmup_share=settings.warmup_share)
    )
    pace = Pace(config)
    if name.startswith("nanoGPT"):
        for step, rows in enumerate(ids.split(settings.batch_size), start=1):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
                logits = base(input_ids=rows[:, :-1], use_cache=False).logits
                loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(base.parameters(), settings.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            pace.count(step)
        return pace.median()

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            pace.count(state.global_step)

    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory, max_steps=num_steps, per_device_train_batch_size=settings.batch_size, bf16=is_half, use_cpu=True,
            max_grad_norm=settings.max_grad_norm, logging_steps=LOG_EVERY, save_strategy="no", report_to=[],
            disable_tqdm=True,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in ids]
        Trainer(base, arguments, train_dataset=rows, callbacks=[Watch()], optimizers=(optimizer, schedule)).train()
    return pace.median()


def run_loop(config: LanguageModelConfig) -> float:
    """Return the tokens a second of a bare loop in this process; the blocks are read into memory beforehand."""
    from jobs.engine.deepspeed_engine import decay_with_warmup
    from jobs.engine.task import with_and_without_decay
    from jobs.tasks.base import base_and_tempnet_groups
    from jobs.tasks.language_model.models import build_model
    from jobs.tasks.language_model.validation import to_tensors
    from pipelines.text.tokenization import load_tokenizer

    torch.set_num_threads(config.workers.num_threads)
    size, blocks = config.optimizer.batch_size, read_blocks(config)
    module = build_model(config, load_tokenizer(config.tokenizer))
    groups = base_and_tempnet_groups([module.base], [module.tempnet], config.optimizer)
    optimizer = torch.optim.AdamW(with_and_without_decay(groups, config.optimizer.weight_decay), betas=(0.9, 0.95))
    factor = decay_with_warmup(config.run.num_steps, warmup_share=config.optimizer.warmup_share)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [factor] * len(optimizer.param_groups))
    pace = Pace(config)
    for step in range(1, config.run.num_steps + 1):
        batch = {name: value[(step - 1) * size : step * size] for name, value in blocks.items()}
        module(**to_tensors(batch, torch.device("cpu")))["loss"].backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), config.optimizer.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        pace.count(step)
    return pace.median()


def main(arguments: Arguments) -> None:
    """Run all rounds and print the results."""
    print_setting(arguments, "torch", "ray", "deepspeed")
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as directory:
        storage = Path(directory)
        # This prepares the data, and compiles what is compiled only once.
        run_job(replace(arguments, num_steps=2 * LOG_EVERY), storage, "first")
        config = make_config(arguments, storage)
        for number in range(arguments.num_rounds):
            speeds = {
                "bare": in_new_process(run_loop, config, environment={"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"})
            }
            speeds["job"] = run_job(arguments, storage, f"round-{number}")
            speeds |= {name: in_new_process(run_peer, config, name) for name in PEERS}
            rounds.append(speeds)
            print(
                f"round {number + 1}:", ", ".join(f"{name} {speed:,.0f}" for name, speed in speeds.items()), flush=True
            )
    rows = [[name, spread([speeds[name] / speeds["bare"] for speeds in rounds])] for name in rounds[0]]
    print_table(["tokens a second", "of bare"], rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
