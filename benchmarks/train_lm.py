"""Training throughput of the main job with one worker, compared with a bare PyTorch loop.

    .venv/bin/python -m benchmarks.train_lm [--num-steps 100] [--num-rounds 3]

All variants have the same model, batch, dtype and number of threads. Every round runs, one after the other, (a) a bare
single-process loop, (b) the same loop with the job's statistics at the same steps, (c) the same with DeepSpeed instead
of a bare optimizer, (d) the job: Ray Data, Ray Train, DeepSpeed, MLflow. Speeds are medians over intervals of
`log_every` steps, without the first interval; ratios are taken within a round.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro

from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.presets.language_models import PRESETS


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to measure."""

    num_steps: int = 100
    num_rounds: int = 3
    num_threads: int = 2
    variant: str = ""
    """Internal: run one variant in this process and print its speed as JSON."""
    storage: str = ""
    """Internal: storage directory of one variant."""


def make_config(arguments: Arguments) -> LanguageModelConfig:
    """Return the configuration of gpt2-scratch-small with one worker and all threads."""
    config = PRESETS["gpt2-scratch-small"]()
    return replace(
        config,
        run=replace(
            config.run,
            name=f"benchmark-{time.time_ns()}",
            storage=arguments.storage,
            num_steps=arguments.num_steps,
            log_every=20,
            checkpoint_every=10 * arguments.num_steps,
        ),
        workers=replace(config.workers, num_workers=1, num_threads=arguments.num_threads),
        validation=replace(config.validation, every=10 * arguments.num_steps, num_blocks=16, num_oracle_tokens=256),
    )


def run_job(config: LanguageModelConfig) -> dict[str, float]:
    """Run the job itself, and return the speed from its own log."""
    from jobs.engine.launch import train
    from jobs.engine.metrics import metric_history
    from jobs.engine.tracking import TrackedRun
    from jobs.tasks.language_model.plan import make_plan

    outcome = train(make_plan(config))
    history = metric_history(
        TrackedRun(uri=outcome["tracking_uri"], run_id=outcome["mlflow_run_id"]), "train/tokens_per_second"
    )
    speeds = [history[step] for step in sorted(history)][1:]
    return {"tokens_per_second": statistics.median(speeds), "data_wait_share": outcome["data_wait_share"]}


def run_loop(config: LanguageModelConfig, variant: str) -> dict[str, float]:
    """Run a loop in a single process; the blocks are read into memory beforehand."""
    import torch.distributed as dist

    from jobs.engine.deepspeed_engine import start_engine
    from jobs.engine.schedules import decay_with_warmup
    from jobs.engine.task import with_and_without_decay
    from jobs.tasks.base import base_and_tempnet_groups
    from jobs.tasks.language_model.models import build_model
    from jobs.tasks.language_model.validation import to_tensors
    from pipelines.text.blocks import read_range
    from pipelines.text.manifest import Manifest
    from pipelines.text.tokenization import load_tokenizer

    torch.set_num_threads(config.workers.num_threads)
    prepared = next((Path(config.run.storage) / "prepared").glob("train-*"))
    size = config.optimizer.batch_size
    blocks = read_range(Manifest.load(str(prepared)), 0, config.run.num_steps * size)
    module = build_model(config, load_tokenizer(config.tokenizer))
    groups = base_and_tempnet_groups([module.base], [module.tempnet], config.optimizer)
    if variant.startswith("DeepSpeed"):
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29571", rank=0, world_size=1)
        engine = start_engine(module, groups, config)
    else:
        optimizer = torch.optim.AdamW(with_and_without_decay(groups, config.optimizer.weight_decay), betas=(0.9, 0.95))
        factor = decay_with_warmup(config.run.num_steps, warmup_share=config.optimizer.warmup_share)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [factor] * len(optimizer.param_groups))
    speeds = []
    started = time.perf_counter()
    for step in range(1, config.run.num_steps + 1):
        batch = {name: value[(step - 1) * size : step * size] for name, value in blocks.items()}
        tensors = to_tensors(batch, torch.device("cpu"))
        with_statistics = "statistics" in variant and step % config.run.log_every == 0
        if variant.startswith("DeepSpeed"):
            output = engine(**tensors, with_statistics=with_statistics)
            engine.backward(output["loss"])
            engine.step()
        else:
            output = module(**tensors, with_statistics=with_statistics)
            output["loss"].backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), config.optimizer.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % config.run.log_every == 0:
            seconds = time.perf_counter() - started
            speeds.append(config.run.log_every * size * config.data.context_length / seconds)
            started = time.perf_counter()
    return {"tokens_per_second": statistics.median(speeds[1:])}


def main(arguments: Arguments) -> None:
    """Run all rounds and print the results, or run one variant in this process."""
    if arguments.variant:
        config = make_config(arguments)
        result = run_job(config) if arguments.variant == "job" else run_loop(config, arguments.variant)
        print(json.dumps(result))
        return
    variants = ("bare", "bare + statistics", "DeepSpeed + statistics", "job")
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, {arguments.num_threads} threads, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as storage:
        config = make_config(replace(arguments, storage=storage))
        print(
            f"GPT-2 {config.model.num_layers} layers, width {config.model.hidden_size}, V 2048, "
            f"{config.optimizer.batch_size} × {config.data.context_length} tokens, {config.workers.resolved_precision}, "
            f"{arguments.num_steps} steps"
        )
        _measure(
            "job", replace(arguments, num_steps=40), storage
        )  # prepares the data and compiles what is compiled only once
        rounds: list[dict[str, dict[str, float]]] = []
        for number in range(arguments.num_rounds):
            rounds.append({variant: _measure(variant, arguments, storage) for variant in variants})
            print(
                f"round {number + 1}: " + ", ".join(f"{v} {r['tokens_per_second']:,.0f}" for v, r in rounds[-1].items())
            )
    for variant in variants:
        ratios = [entry[variant]["tokens_per_second"] / entry["bare"]["tokens_per_second"] for entry in rounds]
        print(f"{variant:<24} {statistics.median(ratios):.3f} of bare  ({min(ratios):.3f} to {max(ratios):.3f})")
    waits = [entry["job"]["data_wait_share"] for entry in rounds]
    print(f"job: data-wait share {statistics.median(waits):.2%}")


def _measure(variant: str, arguments: Arguments, storage: str) -> dict[str, float]:
    """Run one variant in its own process, and return its speed."""
    command = [sys.executable, "-m", "benchmarks.train_lm", "--variant", variant, "--storage", storage]
    command += ["--num-steps", str(arguments.num_steps), "--num-threads", str(arguments.num_threads)]
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "LOCAL_RANK": "0",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{variant} failed:\n{done.stdout}\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
