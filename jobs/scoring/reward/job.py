"""The job: a plan, a pool of workers, the steps with a checkpoint now and then, the verdict, the export and MLflow.

The verdict compares the learned temperatures with their rivals, with intervals over prompts:

    learned      the temperatures of the TempNet
    mean_shift   the constant that equals their mean over texts of the training prompts
    shuffled     the same temperatures, each given to a token at random
    constant     the best constant, chosen by the reward that was learned from, on texts of the training prompts
    one          τ = 1

All are measured on the same prompts and random streams, which no step of the training and no choice has seen. What a text
earns depends on its prompt first of all, so the differences are taken prompt by prompt, and the interval is over prompts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from transformers import AutoConfig

from jobs.engine.cluster import check_machine, start_ray
from jobs.engine.console import clock
from jobs.engine.export import open_export
from jobs.engine.fields import differences, flatten
from jobs.engine.launch import check_writable
from jobs.engine.masking import masked
from jobs.engine.metrics import MetricLogger, survive_outage
from jobs.engine.report import markdown_table
from jobs.engine.tracking import finish_run, mark_if_ended, open_run, resolve_uri, run_tags
from jobs.scoring.generation.sampling import TemperatureRule
from jobs.scoring.reward.config import RewardConfig
from jobs.scoring.reward.plan import RewardPlan, describe_plan, make_plan, refer_to_base
from jobs.scoring.reward.rollouts import Temperature, gain, work_in_pool
from jobs.scoring.reward.trainer import Figures, RewardTrainer
from jobs.scoring.units import check_pool
from pipelines.local_copy import local_copy
from pipelines.storage import compute_digest, create_directory, read_json, write_bytes, write_json
from pipelines.text.tokenization import load_tokenizer
from tempnet.intervals import Interval
from tempnet.network import PAIRED_DIRECTORY, model_card

CONFIGURATION_FILE = "configuration.json"
OUTCOME_FILE = "outcome.json"
_STEP_OF_VERDICT = -3001
_MOST_TAUS = 4096


def describe_run(config: RewardConfig) -> str:
    """Return the plan of the job in words, and start nothing."""
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    plan = make_plan(config)
    check_start(plan)
    return describe_plan(plan, uri)


def train_reward(config: RewardConfig, *, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run or continue the job, and return the outcome."""
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    plan = make_plan(config)
    check_start(plan)
    directory, started = plan.config.run.directory, time.monotonic()
    create_directory(directory)
    write_json(f"{directory}/{CONFIGURATION_FILE}", plan.record)
    start_ray()
    check_pool(plan.config.workers, reads=False)
    with ExitStack() as stack:
        tracked = (
            None
            if not uri
            else open_run(
                uri=uri,
                experiment=config.tracking.experiment,
                name=config.name,
                directory=directory,
                parameters=flatten(plan.config),
                tags=run_tags(plan.config, config.tracking),
                data_sets={
                    "training": ("prompts", compute_digest(plan.record["questions_digest"]), plan.config.prompts)
                },
            )
        )
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
        write_card(trainer, outcome)
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

    `log` is called with the figures of every step, and its number from 1.
    """
    config = trainer.plan.config
    create_directory(directory)
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
        lost = f"  LOST {figures['lost']:.0f}" if figures["lost"] else ""
        say(
            f"{trainer.step:>{len(str(config.num_steps))}}/{config.num_steps}  reward {figures['reward']:.3f}  "
            f"distinct {figures['distinct']:.3f}  KL {figures['kl']:.3f}  λ {figures['kl_weight']:.3g}  "
            f"τ {figures['tau_mean']:.3f} ± {figures['tau_deviation']:.3f}{lost}  {clock(left)} left"
        )
        if trainer.step % config.checkpoint_every == 0 or trainer.step == config.num_steps:
            trainer.save(directory)


def compare_temperatures(trainer: RewardTrainer) -> dict[str, Any]:
    """Choose the goal whose weights are best, compare them with their rivals, and return figures, gains and the verdict."""
    goals = trainer.finish()
    best, learned = next(iter(goals.items()))
    taus = [tau for group in learned.groups for tau in group.taus]
    temperatures: dict[str, Temperature] = {
        "learned": trainer.weights(),
        "mean_shift": learned.figures()["tau_mean"],
        "shuffled": TemperatureRule(kind="shuffled", values=tuple(taus[:: len(taus) // _MOST_TAUS + 1])),
        "constant": trainer.best_constant,
        "one": 1.0,
    }
    places = trainer.plan.places_of_verdict()
    answers = {name: trainer.ask(temperature, places, _STEP_OF_VERDICT) for name, temperature in temperatures.items()}
    gains = {
        name: gain(answers["learned"], answers[name], trainer.measure) for name in temperatures if name != "learned"
    }
    return {
        "temperatures": {name: answer.figures() for name, answer in answers.items()},
        "gains": {name: interval.as_json() for name, interval in gains.items()},
        "goals": {str(step): answer.figures() for step, answer in goals.items()},
        "best_goal": best,
        "prompts": "held-out" if trainer.plan.held_out else "training",
        "num_prompts": len(answers["learned"].by_prompt(trainer.measure)),
        "measure": trainer.measure,
        "verdict": verdict(gains["constant"], is_start=best == 0 and not trainer.plan.config.temperature.path),
    }


def verdict(over_constant: Interval, *, is_start: bool = False) -> str:
    """Return better, not better or cannot be told, of a gain over the best constant.

    `is_start` says that nothing that was learned is better than the best constant on the training prompts.
    """
    if is_start or over_constant.high <= 0.0:
        return "not better"
    return "better" if over_constant.low > 0.0 else "cannot be told"


def table(outcome: dict[str, Any]) -> str:
    names = {
        "learned": "learned",
        "mean_shift": f"their mean, {outcome['temperatures']['mean_shift']['tau_mean']:.3f} (MeanShift)",
        "shuffled": "learned, shuffled",
        "constant": f"best constant, {outcome['best_constant']:g}",
        "one": "1",
    }
    rows = [["temperature", "reward", "distinct", "KL", "less than learned, points"]]
    for name, shown in names.items():
        figures, behind = outcome["temperatures"][name], outcome["gains"].get(name)
        values = [f"{figures[key]:.{digits}f}" for key, digits in (("reward", 4), ("distinct", 4), ("kl", 3))]
        rows.append([shown, *values, points(behind) if behind else ""])
    of = {"reward": "reward", "distinct": "distinct reward"}[outcome["measure"]]
    each = outcome["temperatures"]["learned"]["texts"] / outcome["num_prompts"]
    where = f"{outcome['num_prompts']} {outcome['prompts']} prompts of {each:.0f} texts each"
    goal = outcome["goals"][str(outcome["best_goal"])]
    leash = "no divergence that was tried earned more on the training prompts than the start"
    if outcome["best_goal"]:
        leash = (
            f"the weights after step {outcome['best_goal']} of {outcome['num_steps']}, {goal['kl']:.3f} nats a text from "
            f"τ = {outcome['reference']:g}, earned most on the training prompts"
        )
    lines = [
        markdown_table(rows),
        "",
        f"{outcome['verdict']}: {points(outcome['gains']['constant'])} points of {of} over the best constant, "
        f"over {where}",
        f"leash: {leash}",
    ]
    if outcome["failures"]:
        lines.append(describe_losses(outcome))
    if outcome.get("num_too_long"):
        lines.append(f"LEFT OUT {outcome['num_too_long']} prompts that are too long for the model's context")
    return "\n".join(lines)


def describe_losses(outcome: Mapping[str, Any]) -> str:
    failures = outcome["failures"]
    reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(failures.items()))
    return f"LOST {sum(failures.values())} texts to the verifier: {reasons}; the first: {outcome['first_failure']}"


def points(interval: dict[str, float | None]) -> str:
    """Return an interval of a reward in hundredths."""
    mean, half_width = interval["mean"], interval["half_width"]
    assert mean is not None
    return f"{100 * mean:.1f} ± {100 * half_width:.1f}" if half_width is not None else f"{100 * mean:.1f} (one prompt)"


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


def write_card(trainer: RewardTrainer, outcome: Mapping[str, Any]) -> None:
    """Write the model card of the export, with the verdict of :func:`compare_temperatures`."""
    config, export, gains = trainer.plan.config, outcome["export"], outcome["gains"]
    facts = [
        ("base model", config.model),
        ("training prompts", config.prompts),
        ("verifier, reward", f"{config.verifier.name}, {config.reward}"),
        (
            "learned τ",
            f"{outcome['verdict']}: {points(gains['constant'])} points over the best constant, "
            f"{points(gains['mean_shift'])} over MeanShift, on {outcome['num_prompts']} {outcome['prompts']} prompts",
        ),
    ]
    place = "/".join(export.split("/")[-3:])
    write_bytes(
        f"{export}/README.md", model_card({PAIRED_DIRECTORY: trainer.network}, place, "", masked(facts)).encode()
    )


def check_start(plan: RewardPlan) -> None:
    """Check what can be checked before Ray starts: that the run was not begun with other settings, and its directory."""
    directory = plan.config.run.directory
    known = read_json(f"{directory}/{CONFIGURATION_FILE}")
    if known and (changes := differences(known, plan.record)):
        raise ValueError(
            f"name = {plan.config.name!r} was begun with other settings: {'; '.join(changes[:5])}; choose another name, or "
            f"delete {directory}"
        )
    check_writable("storage", directory)
    check_machine()


def _final_metrics(outcome: dict[str, Any]) -> dict[str, float]:
    metrics = {"target_kl": outcome["target_kl"], "lost_total": float(sum(outcome["failures"].values()))}
    for name, figures in outcome["temperatures"].items():
        metrics |= {f"{name}/{key}": figures[key] for key in ("reward", "distinct", "kl", "tau_mean")}
    for name, interval in outcome["gains"].items():
        metrics |= {f"{name}/gain": interval["mean"], f"{name}/gain_half_width": interval["half_width"] or math.nan}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
