"""The training loop that every Ray Train worker runs: restore, stream, step, log, validate, save, export.

Per step it makes one host all-reduce of two integers (valid targets, digest of the batch); losses stay on the device and
are read and checked every `run.log_every` steps, and before anything is saved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import ray.train
import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from torch import Tensor

from jobs.console import Progress
from jobs.training.checkpoint import FRESH_STATE, RunState, load_checkpoint, read_state, save_checkpoint
from jobs.training.engine import start_engine
from jobs.training.export import export_model
from jobs.training.hardware import flops_per_token, peak_flops_per_second
from jobs.training.job import FatalTrainingError, WorkerJob
from jobs.training.models import build_model
from jobs.training.tracking import MetricLogger
from jobs.training.validation import ValidationPart, to_tensors, validate
from pipelines.manifest import Manifest
from pipelines.packing import IGNORE_INDEX
from pipelines.plan import StreamPlan
from pipelines.stream import Batch, RankStream
from pipelines.tokenization import load_tokenizer
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.softmax.fold import FoldCache
from tempnet.statistics import TemperatureStatistics

_DIGEST_MODULUS = 1 << 48


def train_worker(job: WorkerJob) -> dict[str, Any]:
    """Train to the end; rank 0's return value is the outcome, `{"fatal": message}` if the run must not be restarted."""
    loop = TrainingLoop(job)
    try:
        return loop.run()
    except FatalTrainingError as error:
        return {"fatal": str(error)}
    finally:
        loop.close()


class Pace:
    """Tokens and seconds over some steps, and how much of the time went by waiting for data."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.seconds_waiting = 0.0
        self.num_tokens = 0

    def add(self, seconds: float, seconds_waiting: float, num_tokens: int) -> None:
        """Count one step."""
        self.seconds += seconds
        self.seconds_waiting += seconds_waiting
        self.num_tokens += num_tokens

    @property
    def tokens_per_second(self) -> float:
        """Targets of the global batch a second."""
        return self.num_tokens / self.seconds

    @property
    def data_wait_share(self) -> float:
        """Of the time."""
        return self.seconds_waiting / self.seconds


class _Ahead:
    """An iterator whose first item is fetched in the background from the moment it is made."""

    def __init__(self, items: Iterator[Batch]) -> None:
        self._items = items
        self._pool = ThreadPoolExecutor(1)
        self._first: Future[Batch] | None = self._pool.submit(next, items)

    def __next__(self) -> Batch:
        if self._first is None:
            return next(self._items)
        first, self._first = self._first.result(), None
        self._pool.shutdown()
        return first


class TrainingLoop:
    """One worker's state over a run."""

    def __init__(self, job: WorkerJob) -> None:
        context = ray.train.get_context()
        self.config = config = job.config
        self.rank, self.world_size = context.get_world_rank(), context.get_world_size()
        if config.workers.num_threads or not config.workers.use_gpu:
            num_cores = max(1, (os.cpu_count() or 1) // context.get_local_world_size())
            torch.set_num_threads(config.workers.num_threads or num_cores)
        # Counters cross the network on the host, so that no step waits for the device.
        self.host_group = dist.new_group(backend="gloo") if config.workers.use_gpu else dist.group.WORLD
        checkpoint = ray.train.get_checkpoint()
        state = read_state(checkpoint, world_size=self.world_size) if checkpoint else FRESH_STATE
        self.first_step = self.step = state.step
        self.num_tokens, self.seconds_before = state.num_tokens, state.seconds_trained
        manifest = Manifest.load(job.train_directory)
        self.stream = RankStream(
            manifest=manifest,
            plan=StreamPlan(
                shard_sizes=tuple(shard.num_blocks for shard in manifest.shards),
                seed=config.run.seed,
                window_size=config.data.shuffle_window,
            ),
            batch_size=config.optimizer.batch_size,
            rank=self.rank,
            world_size=self.world_size,
        )
        # Reading starts before the model is built, so that the first step does not wait for it.
        self.batches = _Ahead(self._batches())
        self.module: TemperatureCausalLM = build_model(config, load_tokenizer(config.tokenizer))
        self.module.fold_cache = FoldCache(config.num_accumulation_steps)
        self.flops_per_token = flops_per_token(self.module, config)
        self.engine: DeepSpeedEngine = start_engine(self.module, config)
        self.loss_config = self.module.loss_config
        self.validation = ValidationPart.read(
            Manifest.load(job.validation_directory),
            config.validation.num_blocks,
            rank=self.rank,
            world_size=self.world_size,
        )
        # The weights come from run.seed on every rank; dropout must differ between ranks.
        torch.manual_seed(config.run.seed * 1_000_003 + self.rank)
        if checkpoint:
            load_checkpoint(self.engine, checkpoint, rank=self.rank)
        self.is_first = self.rank == 0
        self.progress: Progress | None = None
        self.metrics: MetricLogger | None = None
        if self.is_first:
            self.progress = Progress(
                job.mailbox, num_steps=config.run.num_steps, first_step=self.step, with_lines=not job.with_bar
            )
            if job.tracked_run:
                self.metrics = MetricLogger(job.tracked_run, warn=self.progress.say)
                self.metrics.resend(state.unsent_metrics)
        self.losses: list[Tensor] = []
        self.digests: list[int] = []
        self.total = Pace()
        self.since_report = Pace()

    def run(self) -> dict[str, Any]:
        """All steps that are left, then the final validation and the export."""
        config = self.config
        while self.step < config.run.num_steps:
            started = time.perf_counter()
            batch = next(self.batches)
            waited = time.perf_counter() - started
            is_logged = (self.step + 1) % config.run.log_every == 0
            num_tokens_before = self.num_tokens
            statistics = self._train_step(batch, with_statistics=is_logged)
            self.step += 1
            for pace in (self.total, self.since_report):
                pace.add(time.perf_counter() - started, waited, self.num_tokens - num_tokens_before)
            is_last = self.step == config.run.num_steps
            is_saved = is_last or self.step % config.run.checkpoint_every == 0
            is_validated = not is_last and self.step % config.validation.every == 0
            if is_logged or is_saved or is_validated:
                self._report_steps(statistics)
            if is_validated:
                self._validate(with_details=False)
            if is_saved:
                self._save()
        outcome = self._validate(with_details=True)
        outcome |= {
            "num_steps": self.step,
            "resumed_from_step": self.first_step,
            "num_tokens": self.num_tokens,
            "seconds_trained": self.seconds_before + self.total.seconds,
            "tokens_per_second": self.total.tokens_per_second if self.total.seconds else None,
            "data_wait_share": self.total.data_wait_share if self.total.seconds else None,
            "peak_memory_gib": _peak_memory_gib(),
            "world_size": self.world_size,
        }
        export_model(self.module, config, is_first=self.is_first)
        return outcome if self.is_first else {}

    def close(self) -> None:
        """Send what MLflow has not got yet."""
        if self.metrics:
            self.metrics.close()

    def _batches(self) -> Iterator[Batch]:
        config, size = self.config, self.config.optimizer.batch_size
        return self.stream.batches(self.step * size, config.run.num_steps * size)

    def _train_step(self, batch: Batch, *, with_statistics: bool) -> TemperatureStatistics | None:
        """Forward, backward and update on this rank's part of one global batch."""
        counts = torch.tensor([int((batch["targets"] != IGNORE_INDEX).sum()), int(batch["digest"].sum())])
        dist.all_reduce(counts, group=self.host_group)
        num_targets = int(counts[0])
        self.num_tokens += num_targets
        self.digests.append(int(counts[1]) % _DIGEST_MODULUS)

        # DeepSpeed averages gradients over ranks and micro-batches; the loss is a sum over tokens / tokens of the batch.
        num_parts = self.world_size * self.config.num_accumulation_steps
        micro = self.config.micro_batch_size
        loss_sum = torch.zeros((), device=self.engine.device)
        sums: Tensor | None = None
        for at in range(0, len(batch["targets"]), micro):
            tensors = to_tensors({name: value[at : at + micro] for name, value in batch.items()}, self.engine.device)
            output = self.engine(
                **tensors, num_targets=max(num_targets, 1) / num_parts, with_statistics=with_statistics
            )
            self.engine.backward(output["loss"])
            self.engine.step()
            loss_sum += output["loss"].detach() / num_parts
            if output["statistics"] is not None:
                sums = output["statistics"] if sums is None else sums + output["statistics"]
        assert self.module.fold_cache is not None
        self.module.fold_cache.clear(keep_gram=self.config.model.is_frozen)
        self.losses.append(loss_sum)
        if sums is None:
            return None
        return TemperatureStatistics(sums, self.loss_config.tau_min, self.loss_config.tau_max)

    def _report_steps(self, statistics: TemperatureStatistics | None) -> None:
        """Read the losses since the last report, stop on one that is not finite, and log."""
        losses = torch.stack(self.losses).double()
        dist.all_reduce(losses)
        first = self.step - len(losses) + 1
        values, digests = losses.tolist(), self.digests
        self.losses, self.digests = [], []
        bad_step = next((step for step, value in enumerate(values, start=first) if not np.isfinite(value)), None)
        if self.metrics:
            for step, (value, digest) in enumerate(zip(values, digests, strict=True), start=first):
                self.metrics.log({"train/loss": value, "train/batch_digest": float(digest)}, step)
        if bad_step is not None:
            raise FatalTrainingError(self._describe_bad_step(bad_step, values[bad_step - first]))
        summary: dict[str, float] = {}
        if statistics is not None:
            dist.all_reduce(statistics.sums)
            summary = statistics.summary()
        if not self.is_first:
            return
        speed = {
            "tokens_per_second": self.since_report.tokens_per_second,
            "data_wait_share": self.since_report.data_wait_share,
            "tokens": float(self.num_tokens),
            **{
                f"learning_rate/{group['name']}": group["lr"]
                for group in self.engine.optimizer.param_groups
                if "name" in group
            },
        }
        self.since_report = Pace()
        if peak := peak_flops_per_second(self.engine.device):
            used = speed["tokens_per_second"] * self.flops_per_token
            speed["model_flops_utilization"] = used / (peak * self.world_size)
        norm = self.engine.get_global_grad_norm()
        if norm is not None:
            speed["gradient_norm"] = float(norm)
        if self.metrics:
            self.metrics.log({f"train/{key}": value for key, value in (summary | speed).items()}, self.step)
        if self.progress:
            self.progress.show(self.step, values[-1], summary.get("tau_mean"), speed["tokens_per_second"])

    def _describe_bad_step(self, step: int, value: float) -> str:
        size = self.config.optimizer.batch_size
        keys = self.stream.keys(range((step - 1) * size, step * size))
        return (
            f"the loss of step {step} is {value}; the last checkpoint, from before it, is intact. "
            f"The blocks of its batch: {'; '.join(keys)}. Lower optimizer.learning_rate_base or "
            "optimizer.learning_rate_tempnet, or look at these documents"
        )

    def _validate(self, *, with_details: bool) -> dict[str, Any]:
        settings = self.config.validation
        summary, details = validate(
            self.engine,
            self.validation,
            loss_config=self.loss_config,
            micro_batch_size=self.config.micro_batch_size,
            num_oracle_tokens=settings.num_oracle_tokens if with_details else 256,
            with_details=with_details,
        )
        if self.metrics:
            self.metrics.log({f"validation/{key}": value for key, value in summary.items()}, self.step)
        if self.progress:
            self.progress.say(
                f"validation at step {self.step}: cross-entropy {summary['cross_entropy']:.4f} at τ = 1, "
                f"{summary['cross_entropy_tau']:.4f} at τ; mean τ {summary['tau_mean']:.3f}"
            )
        return {"validation": summary, **(asdict(details) if details else {})}

    def _save(self) -> None:
        state = RunState(
            step=self.step,
            world_size=self.world_size,
            seconds_trained=self.seconds_before + self.total.seconds,
            num_tokens=self.num_tokens,
            unsent_metrics=self.metrics.unsent() if self.metrics else [],
        )
        save_checkpoint(self.engine, state, rank=self.rank, metrics={"step": self.step})


def _peak_memory_gib() -> float:
    """Peak memory of this process: of the device where there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
