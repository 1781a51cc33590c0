"""The verdict of training on rewards: learned temperatures beside their rivals, with intervals over prompts.

    learned      the temperatures of the TempNet
    mean_shift   the constant that equals their mean over texts of the training prompts
    shuffled     the same temperatures, each given to a token at random
    constant     the best constant, chosen by the reward that was learned from, on texts of the training prompts
    one          τ = 1

All are measured on the same prompts and random streams, which no step of the training and no choice has seen. What a text
earns depends on its prompt first of all, so the differences are taken prompt by prompt, and the interval is over prompts.
"""

from __future__ import annotations

from typing import Any

from jobs.engine.description import markdown_table
from jobs.scoring.generation.processors import TemperatureRule
from jobs.scoring.reward.rollouts import Temperature, gain
from jobs.scoring.reward.trainer import RewardTrainer
from tempnet.intervals import Interval

_STEP = -3001
_MOST_TAUS = 4096


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
    answers = {name: trainer.ask(temperature, places, _STEP) for name, temperature in temperatures.items()}
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

    Args:
        over_constant: the gain.
        is_start: whether nothing that was learned is better than the best constant on the training prompts.
    """
    if is_start or over_constant.high <= 0.0:
        return "not better"
    return "better" if over_constant.low > 0.0 else "cannot be told"


def table(outcome: dict[str, Any]) -> str:
    """Return the results as text for the terminal."""
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
    if failures := outcome["failures"]:
        reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(failures.items()))
        lines.append(
            f"LOST {sum(failures.values())} texts to the verifier: {reasons}; the first: {outcome['first_failure']}"
        )
    if outcome.get("num_too_long"):
        lines.append(f"LEFT OUT {outcome['num_too_long']} prompts that are too long for the model's context")
    return "\n".join(lines)


def points(interval: dict[str, float | None]) -> str:
    """Return an interval of a reward in hundredths."""
    mean, half_width = interval["mean"], interval["half_width"]
    assert mean is not None
    return f"{100 * mean:.1f} ± {100 * half_width:.1f}" if half_width is not None else f"{100 * mean:.1f} (one prompt)"
