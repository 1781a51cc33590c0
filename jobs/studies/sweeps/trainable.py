"""A training run as a trial of Ray Tune: its hyperparameters are fields of a configuration, by their names.

    trainable = make_trainable(PRESETS["gpt2-scratch-small"]())
    tune.Tuner(trainable, param_space={"temperature.rho": tune.uniform(2, 3)}, …).fit().get_dataframe()

A trial is an ordinary run with a directory of its own, in that of the configuration's run. It reports the step, the loss
and the scores of every validation, and writes a checkpoint after each. A trial that Tune ends early, or that is killed, goes
on from there if a trial with the same values is run again; one that is finished only reports again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ray import tune
from ray.train import Checkpoint
from ray.tune.integration.ray_train import TuneReportCallback

from jobs.engine.cluster import start_ray
from jobs.engine.config import TrainingConfig
from jobs.engine.launch import find_outcome, train
from jobs.engine.lease import RunIsTakenError
from jobs.engine.ray_private import reporting_checkpoints
from jobs.engine.tracking import origin_tags
from jobs.scoring.mlflow_models import record_models
from jobs.studies.sweeps.config import name_of, place_trial, with_values
from jobs.studies.trials import DRIVER_CPUS, make_plan_in_outage

HYPERPARAMETERS = ("temperature.rho", "optimizer.learning_rate_base", "optimizer.learning_rate_tempnet", "run.seed")
"""Fields that every trial of a sweep shows in Tune's tables, whether the sweep varies them or not."""
_POINTER_FILE = "start.json"


def make_trainable(
    base: TrainingConfig,
    *,
    named: Collection[str] = (),
    num_at_once: int = 1,
    parent_run_id: str = "",
    num_shared: int = 0,
) -> Any:
    """Return a trainable for `ray.tune.Tuner`, whose `param_space` holds fields of the configuration by name.

    Ray is started if it is not running. Limit the number of concurrent trials so that workers and readers of data fit:
    `TuneConfig(max_concurrent_trials=…)`, or `BasicVariantGenerator(max_concurrent=…)`.

    Args:
        base: the configuration of all trials; their directories lie in `base.run.directory`.
        named: the fields whose values make the name of a trial's run; none: all that `param_space` holds.
        num_at_once: number of trials that run at the same time on a machine, which share its cores.
        parent_run_id: ID of the MLflow run that the trials' runs are shown under; empty for none.
        num_shared: number of newest checkpoints that a trial keeps for others to go on from (population based training).
    """
    start_ray()  # which keeps parameters, such as the login of a server, in its memory and not in Tune's files
    trainable = tune.with_parameters(
        _run_trial,
        base=base,
        named=tuple(named),
        num_at_once=num_at_once,
        parent_run_id=parent_run_id,
        num_shared=num_shared,
        directory=os.getcwd(),
        origin=origin_tags(),
    )
    return tune.with_resources(trainable, {"CPU": DRIVER_CPUS})


def _run_trial(
    point: dict[str, Any],
    *,
    base: TrainingConfig,
    named: tuple[str, ...],
    num_at_once: int,
    parent_run_id: str,
    num_shared: int,
    directory: str,
    origin: Mapping[str, str],
) -> None:
    """Run one trial; see :func:`make_trainable`. `directory` and `origin` are those of the process that started the job."""
    if os.path.isdir(directory):
        os.chdir(directory)
    fields = {field: point[field] for field in named} if named else point
    name, start_from = _find_start(name_of(fields))
    placed = place_trial(with_values(base, point), base.run, name, start_from)
    if num_shared:
        kept = max(num_shared, placed.run.num_checkpoints_kept)
        placed = dataclasses.replace(placed, run=dataclasses.replace(placed.run, num_checkpoints_kept=kept))
    outcome = find_outcome(placed)
    # Of a trial that was ended early only the end is reported, so that it is not ended once more, at an earlier step.
    if outcome is not None and outcome["num_steps"] == placed.run.num_steps:
        for validation in outcome["validations"][:-1]:
            tune.report({"step": validation["step"], **validation["scores"]})
    plan = make_plan_in_outage(placed)
    if num_shared:
        reporting_checkpoints(lambda metrics: _write_pointer(name, start_from, int(metrics["step"])))
    while True:
        try:
            outcome = train(
                plan,
                parent_run_id=parent_run_id,
                with_progress=False,
                saves_validated=True,
                callbacks=[_report_validations()],
                shares_cores=num_at_once > 1,
                origin=origin,
                record_models=record_models,
            )
            break
        except RunIsTakenError:  # another trial has the same values
            time.sleep(5.0)
    # The last report of the workers may not have arrived when the run is over.
    tune.report({"step": outcome["num_steps"], "loss": outcome.get("train_loss"), **outcome["validation"]})


def _report_validations() -> TuneReportCallback:
    """Return the callback that reports every validation to Tune, which expects a loss in every report."""

    # It runs in Ray Train's controller, which would import this module for a class that is not defined in a function.
    class ReportValidations(TuneReportCallback):
        def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None) -> None:
            if metrics[0].keys() > {"step"}:  # and not a checkpoint without a validation
                super().after_report(run_context, metrics, checkpoint)

    return ReportValidations()


def _find_start(name: str) -> tuple[str, str]:
    """Return the name of the run that Tune starts here, and what it starts from (`run.start_from`): Tune may have paused this
    trial, whose run then goes on, or let it go on from another's checkpoint with values of its own, which is another run.
    """
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return name, ""
    with checkpoint.as_directory() as directory:
        pointer = json.loads(Path(directory, _POINTER_FILE).read_text())
    if pointer["trial"] == tune.get_context().get_trial_id():
        return pointer["run"], pointer["start_from"]
    start = f"{pointer['run']}@{pointer['step']}"
    return f"{name}-from-{pointer['step']}-{hashlib.blake2b(start.encode(), digest_size=3).hexdigest()}", start


def _write_pointer(run: str, start_from: str, step: int) -> Mapping[str, str]:
    """Return the files of a checkpoint for Tune, which names the run's own: file name → content."""
    trial = tune.get_context().get_trial_id()
    return {_POINTER_FILE: json.dumps({"trial": trial, "run": run, "start_from": start_from, "step": step})}
