"""Running trials that share a frozen base side by side, in one group of workers, in the place of one run after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jobs.engine.failures import FatalTrainingError
from jobs.engine.launch import claim_directory, train_group
from jobs.engine.lease import Lease
from jobs.engine.recording import record_end
from jobs.engine.tracking import TrackedRun, end_children, mark_if_ended, origin_tags, survive_outage
from jobs.scoring.mlflow_models.run import record_models
from jobs.studies.trials.run import Outcomes, Trial


def run_side_by_side(
    trials: Sequence[Trial],
    *,
    num_at_once: int,
    directory: str,
    parent: TrackedRun | None,
    describe: Callable[[Mapping[str, Any]], str],
) -> Outcomes:
    """Run or continue every trial that is not finished yet, and return the outcomes of all. Ray must be running.

    Args:
        trials: trials for which `jobs.tasks.side_by_side.can_share_base` holds.
        num_at_once: maximum number of networks side by side; the groups run one after the other.
        directory: the directory of the trials.
        parent: the MLflow parent run of the trials' runs.
        describe: describes an outcome in a few words.
    """
    finished: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    with Lease(directory), mark_if_ended(parent):
        waiting = []
        for trial in trials:
            if (outcome := claim_directory(trial.config)) is None:
                waiting.append(trial)
            else:
                finished[trial.name] = outcome
                record_end(trial.config, outcome, record_models)
        print(f"trials finished before: {len(finished)}, in {directory}", flush=True)
        for start in range(0, len(waiting), num_at_once):
            group = waiting[start : start + num_at_once]
            print(f"{len(group)} networks train side by side on one base", flush=True)
            try:
                outcomes, reasons = train_group(
                    [trial.make_plan(trial.config) for trial in group],
                    directory=directory,
                    parent_run_id=parent.run_id if parent else "",
                    with_progress=True,
                    origin=origin_tags(),
                    record_models=record_models,
                )
            except FatalTrainingError as error:
                outcomes, reasons = {}, dict.fromkeys([trial.name for trial in group], error.cause)
            finished |= outcomes
            failed |= reasons
            for name, outcome in outcomes.items():
                print(f"{name}  {describe(outcome)}", flush=True)
        if parent is not None and failed:
            with survive_outage("the end of the trials that failed"):
                end_children(parent, "FAILED")
    names = [trial.name for trial in trials]
    return Outcomes(
        finished={name: finished[name] for name in names if name in finished},
        failed={name: failed[name] for name in names if name in failed},
    )
