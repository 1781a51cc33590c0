"""The training loop that every worker runs: restore, read data, step, log, validate, save, export.

The loop does not depend on what is trained; that is defined by the task. Nor does it depend on Ray: `WorkerContext` says
which worker this is, and takes over its checkpoints. In every step it makes one all-reduce of four
integers on the host (number of units, digest of the batch, requests to save and to stop). Losses stay on the device; they
are read and checked every `run.log_every` steps, and before anything is validated or saved.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from torch import Tensor

from jobs.engine.checkpoint import FRESH_STATE, RunState, check_checkpoint, load_checkpoint, read_state, save_checkpoint
from jobs.engine.console import Progress, SignsOfLife
from jobs.engine.deepspeed_engine import start_engine
from jobs.engine.failures import FatalTrainingError, naming_full_disk
from jobs.engine.hardware import num_threads_per_worker, peak_flops_per_second, peak_memory_gib
from jobs.engine.metrics import MetricLogger, SystemMetrics
from jobs.engine.stopping import StopRequests
from jobs.engine.task import Statistics, Task
from jobs.engine.worker import Validation, WorkerContext, WorkerJob
from pipelines.storage import compute_digest
from pipelines.store_errors import RETRIES, RetryLog
from pipelines.stream import Batch


class Throughput:
    """Sums over steps: units (tokens, pairs), seconds, and the seconds of these spent waiting for data."""

    def __init__(self) -> None:
        self.seconds = self.seconds_waiting = 0.0
        self.num_units = 0

    def add(self, seconds: float, seconds_waiting: float, num_units: int) -> None:
        self.seconds += seconds
        self.seconds_waiting += seconds_waiting
        self.num_units += num_units

    @property
    def units_per_second(self) -> float:
        """Units per second, counting the units of the global batch."""
        return self.num_units / self.seconds

    @property
    def data_wait_share(self) -> float:
        """Share of the time that was spent waiting for data."""
        return self.seconds_waiting / self.seconds


def prefetch_first(items: Iterator[Batch]) -> Iterator[Batch]:
    """Start to fetch the first item in the background at once; return the items."""
    pool = ThreadPoolExecutor(1)
    first = pool.submit(next, items)
    pool.shutdown(wait=False)
    return itertools.chain((future.result() for future in [first]), items)


class TrainingLoop:
    """The training loop of one worker, with its state."""

    def __init__(
        self, job: WorkerJob, context: WorkerContext, directory: Path | None, *, reads_data: bool = True
    ) -> None:
        self.context = context
        self.rank, self.world_size = context.rank, context.world_size
        self.task: Task = job.create_task(self.rank, self.world_size)
        self.config = config = self.task.config
        # Counters are reduced on the host (gloo), so that no step waits for the device.
        self.host_group = dist.new_group(backend="gloo") if config.workers.use_gpu else dist.group.WORLD
        state = FRESH_STATE
        if directory:
            check_checkpoint(directory, rank=self.rank, world_size=self.world_size, group=self.host_group)
            version = self.task.stream.plan.order_version
            state = read_state(directory, config, order_version=version)
        self.num_threads = self._set_num_threads(state, shares_cores=job.shares_cores)
        self.first_step = self.step = state.step
        self.num_units, self.seconds_before = state.num_units, state.seconds_trained
        self.best_rating = state.best_rating
        self.validations = [Validation(step=step, scores=scores) for step, scores in state.validations]
        self.early_stopping, self.reason_to_stop = job.early_stopping, ""
        self.stop_requests = StopRequests(context)
        self.signs = SignsOfLife(context.terminal, self.rank, lambda: self.step)
        self.must_save = self.must_stop = False
        # Reading data starts before the model is built, so that the first step does not wait for data.
        size = config.optimizer.batch_size
        if reads_data:
            self.batches = prefetch_first(self.task.stream.batches(self.step * size, config.run.num_steps * size))
        self.task.build(is_fresh=directory is None)
        self.flops_per_unit = self.task.flops_per_unit()
        self.engine: DeepSpeedEngine = self._start_engine()
        if directory:
            load_checkpoint(self.engine, directory, self.task.load, num_writers=state.world_size)
        self.is_first = self.rank == 0
        self.progress: Progress | None = None
        self.metrics: MetricLogger | None = None
        self.system_metrics: SystemMetrics | None = None
        if self.is_first:
            self.progress = Progress(
                context,
                num_steps=config.run.num_steps,
                first_step=self.step,
                unit=self.task.unit,
                with_lines=not job.with_bar,
                directory=config.run.directory,
            )
            if job.tracked_run:
                self.metrics = MetricLogger(job.tracked_run, warn=self.progress.say)
                self.metrics.resend(state.unsent_metrics)
                if config.tracking.system_metrics:
                    self.system_metrics = SystemMetrics(self.metrics, lambda: self.step)
        self.retry_log = RetryLog(self.progress.say if self.progress else lambda _: None, state.store_retries)
        self.saves_validated = job.saves_validated
        self.last_loss = math.nan
        self.metrics_to_report: dict[str, float] = {}
        self.losses: list[Tensor] = []
        self.batches_digest = state.batches_digest
        self.total, self.since_report = Throughput(), Throughput()
        gc.set_threshold(10_000)  # cycles that steps leave may hold memory

    def run(self) -> dict[str, Any]:
        """Run the remaining steps, the final validation and the export; return the outcome on rank 0, else `{}`.

        If the run was asked to stop, every rank returns `{"interrupted": step}` after the checkpoint of that step.
        """
        config = self.config
        if self.validations:
            self._consider_stopping()  # the run may have been killed after it was decided to end it
        while self.step < config.run.num_steps and not self.reason_to_stop:
            started = time.perf_counter()
            batch = next(self.batches)
            waited = time.perf_counter() - started
            is_logged = (self.step + 1) % config.run.log_every == 0
            num_units_before = self.num_units
            statistics = self._train_step(batch, with_statistics=is_logged)
            self.step += 1
            for throughput in (self.total, self.since_report):
                throughput.add(time.perf_counter() - started, waited, self.num_units - num_units_before)
            if self.progress and config.workers.compiles and self.step == self.first_step + 1:
                self.progress.say(
                    f"the first step took {self.total.seconds:.0f} s, most of it to compile the base's blocks"
                )
            is_last = self.step == config.run.num_steps
            is_validated = not is_last and self.step % config.validation.every == 0
            is_due = self.step % config.run.checkpoint_every == 0 or (is_validated and self.saves_validated)
            is_saved = is_last or self.must_save or is_due
            if is_logged or is_saved or is_validated:
                self._report_steps(statistics)
            if is_validated:
                self._validate(with_details=False)
                self._consider_stopping()
            if is_saved or self.reason_to_stop:
                self._save()
            elif is_validated:
                self.context.report(self._take_metrics(), None, step=self.step)
            if self.must_stop and not is_last:
                return {"interrupted": self.step}
        outcome = self._validate(with_details=True)
        self.context.report(self._take_metrics(), None, step=self.step)
        outcome |= {
            "num_steps": self.step,
            "stopped": self.reason_to_stop,
            "train_loss": self.last_loss if math.isfinite(self.last_loss) else None,
            "validations": [asdict(validation) for validation in self.validations],
            "resumed_from_step": self.first_step,
            f"num_{self.task.unit}": self.num_units,
            "seconds_trained": self.seconds_before + self.total.seconds,
            f"{self.task.unit}_per_second": self.total.units_per_second if self.total.seconds else None,
            "data_wait_share": self.total.data_wait_share if self.total.seconds else None,
            "store_retries": self._collect_retries(),
            "batches_digest": self.batches_digest,
            "peak_memory_gib": peak_memory_gib(),
            "world_size": self.world_size,
        }
        return outcome if self.is_first else {}

    def close(self) -> list[list[Any]]:
        """Send the remaining metrics to MLflow and return those that could not be sent (`MetricLogger.unsent`)."""
        self.stop_requests.close()
        self.signs.close()
        if self.progress:
            self.progress.close()
        if self.system_metrics:
            self.system_metrics.close()
        if self.metrics is None:
            return []
        self.metrics.close()
        return self.metrics.unsent()

    def _start_engine(self) -> DeepSpeedEngine:
        return start_engine(self.task.module, self.task.parameter_groups(), self.config)

    def _set_num_threads(self, state: RunState, *, shares_cores: bool) -> int:
        """Set the number of PyTorch threads to the minimum over all workers and return it; 0 if PyTorch decides."""
        workers = self.config.workers
        if workers.use_gpu and not workers.num_threads:
            return 0
        own = num_threads_per_worker(
            workers,
            num_local_workers=self.context.local_world_size,
            shares_cores=shares_cores,
            # With another number of workers, the batch is divided and summed differently in any case.
            num_kept=state.num_threads if state.world_size == self.world_size else 0,
        )
        fewest = torch.tensor(own)
        dist.all_reduce(fewest, op=dist.ReduceOp.MIN, group=self.host_group)
        torch.set_num_threads(int(fewest))
        return int(fewest)

    def _train_step(self, batch: Batch, *, with_statistics: bool) -> Statistics | None:
        """Count the units of a global batch and train on this rank's part of it."""
        requests = self.stop_requests.read()
        counts = torch.tensor([self.task.num_units(batch), int(batch["digest"].sum()), *map(int, requests)])
        dist.all_reduce(counts, group=self.host_group)
        self.must_save, self.must_stop = self.stop_requests.answer(counts[2:])
        num_units = int(counts[0])
        self.num_units += num_units
        self.batches_digest = compute_digest([self.batches_digest, int(counts[1])])
        # This makes dropout different on every rank and in every step, but the same after a restart.
        torch.manual_seed(seed_of(self.config.run.seed, self.step, self.rank))
        result = self.task.train_step(
            self.engine, batch, step=self.step, num_units=num_units, with_statistics=with_statistics
        )
        self.losses.append(result.loss)
        return result.statistics

    def _report_steps(self, statistics: Statistics | None) -> None:
        """Read the losses since the last report, raise FatalTrainingError if one is not finite, and log the metrics."""
        first, losses = self._gather_losses()
        values: list[float] = losses.tolist()
        self.last_loss = values[-1]
        bad_step = next((step for step, value in enumerate(values, start=first) if not np.isfinite(value)), None)
        if self.metrics:
            for step, value in enumerate(values, start=first):
                self.metrics.log({"train/loss": value}, step)
        if bad_step is not None:
            raise FatalTrainingError(self._describe_bad_step(bad_step, values[bad_step - first]))
        summary: dict[str, float] = {}
        if statistics is not None:
            dist.all_reduce(statistics.sums)
            summary = statistics.summary()
        if not self.is_first:
            return
        speed = self._speed()
        groups = (group for group in self.engine.optimizer.param_groups if "name" in group)
        speed |= {f"learning_rate/{group['name']}": group["lr"] for group in groups}
        peak = peak_flops_per_second(self.engine.device)
        if peak and self.flops_per_unit:
            used = self.since_report.units_per_second * self.flops_per_unit
            speed["model_flops_utilization"] = used / (peak * self.world_size)
        norm = self.engine.get_global_grad_norm()
        if norm is not None:
            speed["gradient_norm"] = float(norm)
        if self.metrics:
            self.metrics.log({f"train/{key}": value for key, value in (summary | speed).items()}, self.step)
        if self.progress:
            self.progress.show(self.step, values[-1], summary.get("tau_mean"), self.since_report.units_per_second)
        self.since_report = Throughput()

    def _gather_losses(self) -> tuple[int, Tensor]:
        """Return the step of the first loss since the last report, and all losses, (steps,) or (steps, members)."""
        self._collect_retries()
        losses = torch.stack(self.losses).double()
        dist.all_reduce(losses)
        self.losses = []
        return self.step - len(losses) + 1, losses

    def _speed(self) -> dict[str, float]:
        """Return the metrics of the steps since the last report that do not depend on the task."""
        units = self.task.unit
        return {
            f"{units}_per_second": self.since_report.units_per_second,
            "data_wait_share": self.since_report.data_wait_share,
            units: float(self.num_units),
            **({"store_retries": float(self.retry_log.total)} if self.retry_log.total else {}),
        }

    def _collect_retries(self) -> int:
        """Add what all ranks have counted of repeated requests since the last call, and return the number of the run."""
        taken = torch.tensor(RETRIES.take())
        dist.all_reduce(taken, group=self.host_group)
        self.retry_log.add(int(taken))
        return self.retry_log.total

    def _describe_bad_step(self, step: int, value: float) -> str:
        size = self.config.optimizer.batch_size
        names = self.task.stream.names(range((step - 1) * size, step * size))
        return (
            f"the loss of step {step} is {value}; the last checkpoint, from before it, is intact. "
            f"What its batch held: {'; '.join(names)}. Lower optimizer.learning_rate_base or "
            "optimizer.learning_rate_tempnet, or look at these data"
        )

    def _validate(self, *, with_details: bool) -> dict[str, Any]:
        """Validate the model, log the scores, and export it if it is the best so far.

        If the task does not rate its models, the model is exported at the final validation (`with_details`) instead.
        """
        self.engine.eval()
        with torch.no_grad():
            scores, details = self.task.validate(self.engine, with_details=with_details)
        self.engine.train()
        self.validations.append(Validation(step=self.step, scores=scores))
        if self.metrics:
            self.metrics.log({f"validation/{key}": value for key, value in scores.items()}, self.step)
        if self.progress:
            self.progress.say(f"validation at step {self.step}: {self.task.describe(scores)}")
        rating = self.task.rating(scores)
        self.metrics_to_report = {"loss": self.last_loss, **scores}
        if rating is not None:
            self.metrics_to_report["rating"] = rating
        is_better = rating is not None and (self.best_rating is None or rating > self.best_rating)
        if is_better or (rating is None and with_details):
            self.best_rating = rating
            with naming_full_disk(self.config.run.export_directory):
                self.task.export()
        return {"validation": scores, "best_rating": self.best_rating, **(details or {})}

    def _take_metrics(self) -> dict[str, float]:
        """Return the training loss and the scores of the validation after this step, once; empty if there was none."""
        metrics, self.metrics_to_report = self.metrics_to_report, {}
        return metrics

    def _consider_stopping(self) -> None:
        """Ask on rank 0 whether to end the run here, and tell all ranks."""
        if self.early_stopping is None:
            return
        answer = [self.early_stopping.reason_to_stop(self.validations) if self.is_first else ""]
        dist.broadcast_object_list(answer, group=self.host_group)
        (self.reason_to_stop,) = answer
        if self.reason_to_stop and self.progress:
            self.progress.say(f"stopped at step {self.step}: {self.reason_to_stop}")

    def _save_more(self, directory: Path) -> None:
        """Write this rank's state that the engine does not hold."""
        self.task.save(directory)

    def _save(self) -> None:
        state = RunState(
            step=self.step,
            world_size=self.world_size,
            seconds_trained=self.seconds_before + self.total.seconds,
            num_units=self.num_units,
            best_rating=self.best_rating,
            num_threads=self.num_threads,
            unsent_metrics=self.metrics.unsent() if self.metrics else [],
            validations=[(validation.step, dict(validation.scores)) for validation in self.validations],
            order_version=self.task.stream.plan.order_version,
            store_retries=self.retry_log.total,
            batches_digest=self.batches_digest,
        )
        save_checkpoint(self.engine, state, self._save_more, self.context, self._take_metrics())


def seed_of(*values: int) -> int:
    """Return a 64-bit seed computed from the values, which may be of any size."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little")
