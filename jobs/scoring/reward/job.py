"""The job: a plan, a pool of workers, the steps with a checkpoint now and then, the export, the outcome and MLflow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from transformers import AutoConfig

from jobs.engine.cluster import check_machine, start_ray
from jobs.engine.console import clock
from jobs.engine.export import open_export
from jobs.engine.identity import differences, flatten
from jobs.engine.masking import masked
from jobs.engine.metrics import MetricLogger
from jobs.engine.preflight import check_writable
from jobs.engine.tracking import TrackedRun, finish_run, mark_if_ended, open_run, resolve_uri, run_tags, survive_outage
from jobs.scoring.reward.comparison import compare_temperatures, table
from jobs.scoring.reward.config import RewardConfig
from jobs.scoring.reward.plan import RewardPlan, describe_plan, make_plan, refer_to_base
from jobs.scoring.reward.rollouts import work_in_pool
from jobs.scoring.reward.trainer import Figures, RewardTrainer
from jobs.scoring.units import check_pool
from pipelines.local_copy import local_copy
from pipelines.storage import compute_digest, create_directory, read_json, resolve, write_json
from pipelines.text.tokenization import load_tokenizer
from tempnet.network import PAIRED_DIRECTORY

CONFIGURATION_FILE = "configuration.json"
OUTCOME_FILE = "outcome.json"


def describe_run(config: RewardConfig) -> str:
    """Return the plan of the job in words, and start nothing.

    Raises:
        ValueError, OSError: see `make_plan`.
    """
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    plan = make_plan(config)
    check_start(plan)
    return describe_plan(plan, uri)


def train_reward(config: RewardConfig, *, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run or continue the job, and return the outcome.

    Raises:
        ValueError, OSError: before any work starts, see `make_plan`; or if the run was begun with other settings.
        NoRewardError: if the verifier fails for all texts of a step.
    """
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    plan = make_plan(config)
    check_start(plan)
    claim_directory(plan)
    start_ray()
    check_pool(plan.config.workers, reads=False)
    directory, started = plan.config.run.directory, time.monotonic()
    with ExitStack() as stack:
        tracked = _open(plan, uri) if uri else None
        stack.enter_context(mark_if_ended(tracked))
        trainer = RewardTrainer(plan, stack.enter_context(work_in_pool(plan)))
        logger = MetricLogger(tracked, warn=say) if tracked else None
        log = logger.log if logger else lambda figures, step: None
        train(trainer, directory, say=say, log=log)
        outcome = trainer.result() | compare_temperatures(trainer)
        if logger:
            logger.close()
        outcome |= {"directory": directory, "export": f"{directory}/export", "num_too_long": plan.num_too_long}
        outcome |= {"tracking_uri": masked(uri), "mlflow_run_id": tracked.run_id if tracked else None}
        outcome |= {"mlflow_experiment_id": tracked.experiment_id if tracked else None}
        export(trainer, outcome["export"])
        write_json(f"{directory}/{OUTCOME_FILE}", outcome | {"history": trainer.history})
        if tracked:
            with survive_outage("the end of the run"):
                note = f"```\n{table(outcome)}\n```"
                finish_run(tracked, status="FINISHED", artifacts=None, metrics=_final_metrics(outcome), note=note)
    say(f"\n{table(outcome)}\n{trainer.step} steps, {clock(time.monotonic() - started)}")
    return outcome


def train(
    trainer: RewardTrainer,
    directory: str,
    *,
    say: Callable[[str], None] = print,
    log: Callable[[Figures, int], None] = lambda figures, step: None,
) -> None:
    """Make the steps that are left, from the checkpoint in a directory if there is one, and write checkpoints there.

    Args:
        trainer: a new trainer.
        directory: directory or URI of the run.
        say: called with a line of progress for every step.
        log: called with the figures of every step, and its number from 1.
    """
    config = trainer.plan.config
    filesystem, path = resolve(directory)
    filesystem.create_dir(path, recursive=True)
    if trainer.load(directory):
        say(f"continues after step {trainer.step} of {config.num_steps}")
    else:
        trainer.begin()
        assert trainer.controller is not None
        best = trainer.constants[trainer.best_constant]
        say(
            f"best constant τ = {trainer.best_constant:g}: reward {best['reward']:.4f}, distinct {best['distinct']:.4f}, "
            f"over {best['texts']:.0f} texts; the divergence from τ = {trainer.reference:g} rises to "
            f"{trainer.controller.target:.3f} nats a text"
        )
        trainer.save(directory)
    started, first = time.monotonic(), trainer.step
    while trainer.step < config.num_steps:
        figures = trainer.train_step()
        log(figures, trainer.step)
        left = (time.monotonic() - started) / (trainer.step - first) * (config.num_steps - trainer.step)
        say(f"{trainer.step:>{len(str(config.num_steps))}}/{config.num_steps}  {describe(figures)}  {clock(left)} left")
        if trainer.step % config.checkpoint_every == 0 or trainer.step == config.num_steps:
            trainer.save(directory)


def describe(figures: Figures) -> str:
    """Return the figures of a step in one line."""
    lost = f"  LOST {figures['lost']:.0f}" if figures["lost"] else ""
    return (
        f"reward {figures['reward']:.3f}  distinct {figures['distinct']:.3f}  KL {figures['kl']:.3f}  "
        f"λ {figures['kl_weight']:.3g}  τ {figures['tau_mean']:.3f} ± {figures['tau_deviation']:.3f}{lost}"
    )


def export(trainer: RewardTrainer, uri: str) -> None:
    """Write what `jobs.generate --model` reads: configuration and tokenizer of the base, where it is, and the TempNet."""
    plan = trainer.plan
    reference = refer_to_base(plan)
    with open_export(uri) as directory:
        place = local_copy(plan.config.model, with_weights=False)
        remote = plan.config.trust_remote_code
        AutoConfig.from_pretrained(place, trust_remote_code=remote).save_pretrained(directory)
        load_tokenizer(plan.config.model).save_pretrained(directory)
        reference.save(directory)
        trainer.network.save_pretrained(directory / PAIRED_DIRECTORY)


def check_start(plan: RewardPlan) -> None:
    """Check what can be checked before Ray starts: that the run was not begun with other settings, and its directory.

    Raises:
        ValueError: naming the settings that differ.
        OSError: if nothing can be written in the directory, or Ray not be started on this machine.
    """
    directory = plan.config.run.directory
    known = read_json(f"{directory}/{CONFIGURATION_FILE}")
    if known and (changes := differences(known, plan.record)):
        raise ValueError(
            f"name = {plan.config.name!r} was begun with other settings: {'; '.join(changes[:5])}; choose another name, or "
            f"delete {directory}"
        )
    check_writable("storage", directory)
    check_machine()


def claim_directory(plan: RewardPlan) -> None:
    """Write the settings into the directory of the run."""
    create_directory(plan.config.run.directory)
    write_json(f"{plan.config.run.directory}/{CONFIGURATION_FILE}", plan.record)


def _open(plan: RewardPlan, uri: str) -> TrackedRun:
    config = plan.config
    return open_run(
        uri=uri,
        experiment=config.tracking.experiment,
        name=config.name,
        directory=config.run.directory,
        parameters=flatten(config),
        tags=run_tags(config, config.tracking),
        data_sets={"training": ("prompts", compute_digest(plan.record["questions_digest"]), config.prompts)},
    )


def _final_metrics(outcome: dict[str, Any]) -> dict[str, float]:
    """Return the final figures for MLflow."""
    metrics = {"target_kl": outcome["target_kl"], "lost_total": float(sum(outcome["failures"].values()))}
    for name, figures in outcome["temperatures"].items():
        metrics |= {f"{name}/{key}": figures[key] for key in ("reward", "distinct", "kl", "tau_mean")}
    for name, interval in outcome["gains"].items():
        metrics |= {f"{name}/gain": interval["mean"], f"{name}/gain_half_width": interval["half_width"] or math.nan}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
