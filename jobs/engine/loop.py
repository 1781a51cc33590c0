"""The training loop that every worker runs: restore, read data, step, log, validate, save, export.

It trains one run, or several side by side: runs that share data and a frozen base, each with networks of its own. Losses,
validations, exports and MLflow runs are one per run; steps, data and checkpoints are common. A run whose loss or gradient is
not finite fails; beside others it fails alone, and the others go on.

What is trained is defined by the task, and which worker this is by `WorkerContext`. In every step there is one all-reduce of
five integers on the host. Losses stay on the device until they are checked: every `run.log_every` steps, and before anything
is validated or saved.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from torch import Tensor

from jobs.engine.checkpoint import RunState, check_checkpoint, load_checkpoint, read_state, save_checkpoint
from jobs.engine.console import Progress, place_of
from jobs.engine.deepspeed_engine import gradient_norms, start_engine
from jobs.engine.hardware import num_threads_per_worker, peak_flops_per_second, peak_memory_gib
from jobs.engine.metrics import MetricLogger, SystemMetrics
from jobs.engine.resumption import FatalTrainingError, naming_full_disk
from jobs.engine.task import Statistics, Task
from jobs.engine.worker import Validation, WorkerContext, WorkerJob
from pipelines.storage import compute_digest, exists
from pipelines.store_errors import RETRIES, RetryLog
from pipelines.stream import Batch


@dataclass(slots=True)
class Throughput:
    """Sums over steps: units (tokens, pairs), seconds, and the seconds of these spent waiting for data."""

    seconds: float = 0.0
    seconds_waiting: float = 0.0
    num_units: int = 0

    def add(self, seconds: float, seconds_waiting: float, num_units: int) -> None:
        self.seconds += seconds
        self.seconds_waiting += seconds_waiting
        self.num_units += num_units

    @property
    def units_per_second(self) -> float:
        return self.num_units / self.seconds

    @property
    def data_wait_share(self) -> float:
        return self.seconds_waiting / self.seconds


def prefetch_first(items: Iterator[Batch]) -> Iterator[Batch]:
    """Start to fetch the first item in the background at once; return the items."""
    pool = ThreadPoolExecutor(1)
    first = pool.submit(next, items)
    pool.shutdown(wait=False)
    return itertools.chain((future.result() for future in [first]), items)


@dataclass(slots=True)
class TrainedRun:
    """A run that the loop trains, alone or beside others."""

    task: Task
    metrics: MetricLogger | None = None
    """None on all ranks but the first, and if the run is not logged."""
    validations: list[Validation] = field(default_factory=list)
    best_rating: float | None = None
    """Rating of the model exported so far, if any."""
    failure: str = ""
    """Why the run has failed; empty if it has not."""
    last_loss: float = math.nan

    @property
    def name(self) -> str:
        return self.task.config.run.name

    def log(self, kind: str, values: Mapping[str, float], step: int) -> None:
        """Log metrics whose names begin with a kind, such as `train`."""
        if self.metrics:
            self.metrics.log({f"{kind}/{key}": value for key, value in values.items()}, step)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the run alone: fields of `RunState`."""
        return {
            "validations": [(validation.step, dict(validation.scores)) for validation in self.validations],
            "best_rating": self.best_rating,
            "unsent_metrics": self.metrics.unsent() if self.metrics else [],
            "failure": self.failure,
        }


class TrainingLoop:
    """The training loop of one worker, with its state."""

    def __init__(self, job: WorkerJob, context: WorkerContext, directory: Path | None) -> None:
        self.context = context
        self.rank, self.world_size = context.rank, context.world_size
        self.task: Task = job.create_task(self.rank, self.world_size)
        self.config = config = self.task.config
        # Counters are reduced on the host (gloo), so that no step waits for the device.
        self.host_group = dist.new_group(backend="gloo") if config.workers.use_gpu else dist.group.WORLD
        state = RunState()
        if directory:
            check_checkpoint(directory, rank=self.rank, world_size=self.world_size, group=self.host_group)
            state = read_state(directory, config, self.task.stream.plan)
        self.num_threads = self._set_num_threads(state, shares_cores=job.shares_cores)
        self.first_step = self.step = state.step
        self.num_units, self.seconds_before = state.num_units, state.seconds_trained
        self.contact = Contact(context, lambda: self.step)
        self.must_save = self.must_stop = False
        # Reading data starts before the model is built, so that the first step does not wait for data.
        size = config.optimizer.batch_size
        if not job.exported:
            start, stop = self.step * size, config.run.num_steps * size
            self.batches = prefetch_first(self.task.stream.batches(start, stop, in_this_process=context.reads_data))
        self.task.build(is_fresh=directory is None)
        self.flops_per_unit = self.task.flops_per_unit()
        self.runs = [TrainedRun(task) for task in self.task.members]
        self.is_alone = len(self.runs) == 1
        parts = [(task.parameter_groups(), task.config) for task in self.task.members]
        self.engine: DeepSpeedEngine = start_engine(self.task.module, parts, config)
        if directory:
            load_checkpoint(self.engine, directory, self._load_more, num_writers=state.world_size)
        self.is_first = self.rank == 0
        self.progress: Progress | None = None
        self.system_metrics: SystemMetrics | None = None
        if self.is_first:
            unit, with_lines = self.task.unit, not job.with_bar
            self.progress = Progress(context, config.run, first_step=self.step, unit=unit, with_lines=with_lines)
        for run, kept in zip(self.runs, state.of_runs(len(self.runs)), strict=True):
            run.validations = [Validation(step=step, scores=scores) for step, scores in kept["validations"]]
            run.best_rating, run.failure = kept["best_rating"], kept["failure"]
            if self.progress and (tracked := job.tracked_runs.get(run.name)):
                run.metrics = MetricLogger(tracked, warn=self.progress.say)
                run.metrics.resend(kept["unsent_metrics"])
                if self.is_alone and config.tracking.system_metrics:
                    self.system_metrics = SystemMetrics(run.metrics, lambda: self.step)
        self.retry_log = RetryLog(self.progress.say if self.progress else lambda _: None, state.store_retries)
        self.saves_validated = job.saves_validated
        self.metrics_to_report: dict[str, float] = {}
        self.losses: list[Tensor] = []
        self.batches_digest = state.batches_digest
        self.data_identity = {**state.data_identity, **self.task.stream.plan.identity}
        self.total, self.since_report = Throughput(), Throughput()
        gc.set_threshold(10_000)  # cycles that steps leave may hold memory

    def run(self) -> dict[str, Any]:
        """Run the remaining steps, the final validation and the export; return the outcome on rank 0, else `{}`.

        Of several runs it is `members` (name → outcome) and `failed` (name → reason), if asked to stop `interrupted` (step).
        """
        config = self.config
        while self.step < config.run.num_steps:
            started = time.perf_counter()
            batch = next(self.batches)
            waited = time.perf_counter() - started
            is_logged = (self.step + 1) % config.run.log_every == 0
            num_units_before = self.num_units
            statistics = self._train_step(batch, with_statistics=is_logged)
            self.step += 1
            for throughput in (self.total, self.since_report):
                throughput.add(time.perf_counter() - started, waited, self.num_units - num_units_before)
            if self.progress and self.task.is_compiled and self.step == self.first_step + 1:
                self.progress.say(
                    f"the first step took {self.total.seconds:.0f} s, most of it to compile the base's blocks"
                )
            is_last = self.step == config.run.num_steps
            is_validated = not is_last and self.step % config.validation.every == 0
            is_due = self.step % config.run.checkpoint_every == 0 or (is_validated and self.saves_validated)
            is_saved = is_last or self.must_save or is_due
            # DeepSpeed leaves out a step whose gradient is not finite, without a word.
            if is_logged or is_saved or is_validated or not self.engine.was_step_applied():
                self._report_steps(statistics)
            if is_validated:
                self._validate(with_details=False)
            if is_saved:
                self._save()
            elif is_validated:
                self.context.report(self._take_metrics(), None, step=self.step)
            if self.must_stop and not is_last:
                return {"interrupted": self.step}
        validated = self._validate(with_details=True)
        self.context.report(self._take_metrics(), None, step=self.step)
        common = {
            "num_steps": self.step,
            "resumed_from_step": self.first_step,
            f"num_{self.task.unit}": self.num_units,
            "seconds_trained": self.seconds_before + self.total.seconds,
            f"{self.task.unit}_per_second": self.total.units_per_second if self.total.seconds else None,
            "data_wait_share": self.total.data_wait_share if self.total.seconds else None,
            "store_retries": self._collect_retries(),
            "batches_digest": self.batches_digest,
            "peak_memory_gib": peak_memory_gib(use_gpu=config.workers.use_gpu),
            "world_size": self.world_size,
        }
        if not self.is_first:
            return {}
        outcomes = {
            run.name: validated[run.name]
            | {
                **common,
                "train_loss": run.last_loss if math.isfinite(run.last_loss) else None,
                "validations": [asdict(validation) for validation in run.validations],
            }
            for run in self.runs
            if not run.failure
        }
        if self.is_alone:
            return outcomes[self.runs[0].name]
        return {"members": outcomes, "failed": {run.name: run.failure for run in self.runs if run.failure}}

    def close(self) -> dict[str, list[list[Any]]]:
        """Send the remaining metrics to MLflow; return run → those that could not be sent (`MetricLogger.unsent`)."""
        self.contact.close()
        if self.progress:
            self.progress.close()
        if self.system_metrics:
            self.system_metrics.close()
        loggers = {run.name: run.metrics for run in self.runs if run.metrics}
        for logger in loggers.values():
            logger.close()
        return {name: logger.unsent() for name, logger in loggers.items()}

    def _set_num_threads(self, state: RunState, *, shares_cores: bool) -> int:
        """Set the number of PyTorch threads to the minimum over all workers and return it; 0 if PyTorch decides."""
        workers = self.config.workers
        if workers.use_gpu and not workers.num_threads:
            return 0
        # With another number of workers, the batch is divided and summed differently in any case.
        num_kept = state.num_threads if state.world_size == self.world_size else 0
        num_local = self.context.local_world_size
        own = num_threads_per_worker(workers, num_local_workers=num_local, shares_cores=shares_cores, num_kept=num_kept)
        fewest = torch.tensor(own)
        dist.all_reduce(fewest, op=dist.ReduceOp.MIN, group=self.host_group)
        torch.set_num_threads(int(fewest))
        return int(fewest)

    def _train_step(self, batch: Batch, *, with_statistics: bool) -> list[Statistics]:
        """Count the units of a global batch and train on this rank's part of it."""
        requests = self.contact.read()
        counts = torch.tensor([self.task.num_units(batch), int(batch["digest"].sum()), *map(int, requests)])
        dist.all_reduce(counts, group=self.host_group)
        self.must_save, self.must_stop = self.contact.answer(counts[2:])
        num_units = int(counts[0])
        self.num_units += num_units
        self.batches_digest = compute_digest([self.batches_digest, int(counts[1])])
        # This makes dropout different on every rank and in every step, but the same after a restart.
        torch.manual_seed(seed_of(self.config.run.seed, self.step, self.rank))
        result = self.task.train_step(
            self.engine, batch, step=self.step, num_units=num_units, with_statistics=with_statistics
        )
        self.losses.append(result.loss.reshape(-1))
        found = result.statistics
        return found if isinstance(found, list) else [] if found is None else [found]

    def _report_steps(self, statistics: list[Statistics]) -> None:
        """Read the losses since the last report and the last gradient's norm, and log the metrics.

        Raises:
            FatalTrainingError: if one of them is not finite, which only beside other runs fails the run alone.
        """
        self._collect_retries()
        losses = torch.stack(self.losses).double()  # (steps, runs)
        dist.all_reduce(losses)
        self.losses = []
        values, first = losses.cpu().numpy(), self.step - len(losses) + 1
        summaries: list[dict[str, float]] = [{} for _ in self.runs]
        norms = [float(norm) for norm in gradient_norms(self.engine)]
        for number, run in enumerate(self.runs):
            own = values[:, number]
            run.last_loss = float(own[-1])
            for step, value in enumerate(own, start=first):
                run.log("train", {"loss": float(value)}, step)
            if not np.isfinite(own).all() and not run.failure:
                at = int((~np.isfinite(own)).argmax())
                self._fail(run, first + at, f"the loss of step {first + at} is {own[at]}")
            elif norms and not math.isfinite(norms[number]) and not run.failure:
                self._fail(run, self.step, f"the gradient of step {self.step} has the norm {norms[number]}")
            if statistics and not run.failure:
                dist.all_reduce(statistics[number].sums)
                summaries[number] = statistics[number].summary()
        if not self.is_first:
            return
        speed = self._speed()
        for number, (run, summary) in enumerate(zip(self.runs, summaries, strict=True)):
            groups = [group for group in self.engine.optimizer.param_groups if group.get("run", 0) == number]
            figures = summary | speed
            figures |= {f"learning_rate/{group['name']}": group["lr"] for group in groups if "name" in group}
            if norms:
                figures["gradient_norm"] = norms[number]
            run.log("train", figures, self.step)
        if self.progress:
            tau = [summary["tau_mean"] for summary in summaries if "tau_mean" in summary]
            mean = float(np.mean(tau)) if tau else None
            self.progress.show(self.step, float(np.nanmean(values[-1])), mean, self.since_report.units_per_second)
        self.since_report = Throughput()

    def _speed(self) -> dict[str, float]:
        """Return the metrics of the steps since the last report that do not depend on the task."""
        units = self.task.unit
        speed = {
            f"{units}_per_second": self.since_report.units_per_second,
            "data_wait_share": self.since_report.data_wait_share,
            units: float(self.num_units),
        }
        if self.retry_log.total:
            speed["store_retries"] = float(self.retry_log.total)
        peak = peak_flops_per_second(self.engine.device)
        if peak and self.flops_per_unit:
            used = self.since_report.units_per_second * self.flops_per_unit
            speed["model_flops_utilization"] = used / (peak * self.world_size)
        return speed

    def _collect_retries(self) -> int:
        """Add what all ranks have counted of repeated requests since the last call, and return the number of the run."""
        taken = torch.tensor(RETRIES.take())
        dist.all_reduce(taken, group=self.host_group)
        self.retry_log.add(int(taken))
        return self.retry_log.total

    def _fail(self, run: TrainedRun, step: int, cause: str) -> None:
        """Note that a run among others has failed by its loss or gradient of a step; FatalTrainingError if it is alone."""
        if self.is_alone:
            size = self.config.optimizer.batch_size
            names = self.task.stream.names(range((step - 1) * size, step * size))
            raise FatalTrainingError(
                f"{cause}; the last checkpoint, from before it, is intact. "
                f"What its batch held: {'; '.join(names)}. Lower optimizer.learning_rate_base or "
                "optimizer.learning_rate_tempnet, or look at these data"
            )
        run.failure = f"{cause}: lower optimizer.learning_rate_tempnet"
        if self.progress:
            self.progress.say(f"{run.name}: {run.failure}; the others go on")

    def _validate(self, *, with_details: bool) -> dict[str, dict[str, Any]]:
        """Validate every run, log its scores, and export its model if it is the best so far; return name → results.

        The last one (`with_details`) is exported if models are not rated, or the best is not where the run exports to now.
        """
        runs = [run for run in self.runs if not run.failure]
        self.engine.eval()
        with torch.no_grad():
            found = self.task.validate_members([run.task for run in runs], self.engine, with_details=with_details)
        self.engine.train()
        results = {}
        for run, (scores, details) in zip(runs, found, strict=True):
            run.validations.append(Validation(step=self.step, scores=scores))
            run.log("validation", scores, self.step)
            if self.progress:
                of_run = "" if self.is_alone else f" of {run.name}"
                self.progress.say(f"validation{of_run} at step {self.step}: {self.task.describe(scores)}")
            rating = run.task.rating(scores)
            if self.is_alone:
                self.metrics_to_report = {"loss": run.last_loss, **scores}
                if rating is not None:
                    self.metrics_to_report["rating"] = rating
            is_better = rating is not None and (run.best_rating is None or rating > run.best_rating)
            place = run.task.config.run.export_directory
            if is_better or (with_details and (rating is None or not self.context.agree(exists(place)))):
                run.best_rating = rating
                with naming_full_disk(place):
                    run.task.export()
            results[run.name] = {"validation": scores, "best_rating": run.best_rating, **(details or {})}
        return results

    def _take_metrics(self) -> dict[str, float]:
        """Return the training loss and the scores of the validation after this step, once; empty if there was none."""
        metrics, self.metrics_to_report = self.metrics_to_report, {}
        return metrics

    def _places(self, directory: Path) -> Iterator[tuple[Task, Path]]:
        """Yield every run's task, and the directory in a checkpoint for what the engine does not hold of it."""
        for number, run in enumerate(self.runs):
            yield run.task, directory if self.is_alone else directory / f"member-{number:03d}"

    def _save_more(self, directory: Path) -> None:
        for task, place in self._places(directory):
            place.mkdir(exist_ok=True)
            task.save(place)

    def _load_more(self, directory: Path, num_writers: int) -> None:
        for task, place in self._places(directory):
            task.load(place, num_writers)

    def _save(self) -> None:
        states = [run.state() for run in self.runs]
        state = RunState(
            step=self.step,
            world_size=self.world_size,
            seconds_trained=self.seconds_before + self.total.seconds,
            num_units=self.num_units,
            num_threads=self.num_threads,
            order_version=self.task.stream.plan.order_version,
            data_identity=self.data_identity,
            store_retries=self.retry_log.total,
            batches_digest=self.batches_digest,
            **(states[0] if self.is_alone else {"best_rating": None, "unsent_metrics": [], "members": states}),
        )
        save_checkpoint(self.engine, state, self._save_more, self.context, self._take_metrics())


def seed_of(*values: int) -> int:
    """Return a 64-bit seed computed from the values, which may be of any size."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little")


_SECONDS_BETWEEN_QUESTIONS, _QUESTIONS_BETWEEN_SIGNS = 0.5, 10


class Contact:
    """What this worker tells the driver from a thread of its own, where it stands, and the requests that it knows of.

    Only the first worker asks the terminal, in which the driver and Ray Train's controller leave requests.
    """

    def __init__(self, context: WorkerContext, step: Callable[[], int]) -> None:
        self._context, self._step = context, step
        self._is_saving, self._is_stopping = threading.Event(), threading.Event()
        self._closed = threading.Event()
        self._is_answered = False
        if context.terminal is not None:
            threading.Thread(target=self._run, args=[threading.get_ident()], name="contact", daemon=True).start()

    def read(self) -> tuple[bool, bool, bool]:
        """Return whether a node of this run is about to be taken away, whether to save, and whether the run is to stop."""
        is_preempted = not self._is_answered and self._context.is_preempted()
        return is_preempted, self._is_saving.is_set(), self._is_stopping.is_set()

    def answer(self, num_requests: Iterable[Any]) -> tuple[bool, bool]:
        """Return whether to save and to stop, from the sums of what all workers read; a notice about a node counts once."""
        is_preempted, is_saving, is_stopping = (bool(number) for number in num_requests)
        self._is_answered |= is_preempted
        if is_saving:
            self._is_saving.clear()
        return is_preempted or is_saving or is_stopping, is_stopping

    def close(self) -> None:
        self._closed.set()

    def _run(self, watched: int) -> None:
        terminal, rank = self._context.terminal, self._context.rank
        num_saves: int | None = None  # requests from before this worker was started were answered by its predecessor
        for turn in itertools.count(1):
            if self._closed.wait(_SECONDS_BETWEEN_QUESTIONS):
                return
            if turn % _QUESTIONS_BETWEEN_SIGNS == 0:
                terminal.sign(rank, self._step(), place_of(watched))
            if rank or (answer := terminal.requests()) is None:
                continue
            must_stop, asked = answer
            if num_saves is not None and asked > num_saves:
                self._is_saving.set()
            num_saves = asked
            if must_stop:
                self._is_stopping.set()
