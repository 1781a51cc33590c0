"""What training on rewards has come to: learned temperatures beside their controls, on new texts and on new prompts.

    learned      the temperatures of the TempNet
    mean_shift   the constant that equals their mean over the texts of the training prompts
    constant     the best constant, chosen by the reward that was learned from, on texts of the training prompts
    one          τ = 1

All are measured on the same prompts and random streams, which no step of the training and no choice has seen.
"""

from __future__ import annotations

from typing import Any

from jobs.scoring.reward.trainer import RewardTrainer

CONSTANTS = (1.0, 0.85, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 1.2, 1.5)
"""The constants to choose from; of equally good ones the first."""
NUM_FINAL_BATCHES = 4
"""Steps' worth of texts for each of the temperatures that are compared at the end."""
NUM_COMPARED = 4
"""Number of these temperatures."""
_FIRST_FINAL, _FIRST_CHOICE = -1001, -2001


def compare_temperatures(trainer: RewardTrainer) -> dict[str, Any]:
    """Return figures of every temperature: `temperatures` on the training prompts, `held_out` on the held-out ones."""
    learned = trainer.evaluate(None, num_batches=NUM_FINAL_BATCHES, first=_FIRST_FINAL)
    constants = {"mean_shift": learned["tau_mean"], "constant": choose_constant(trainer), "one": 1.0}
    found: dict[str, Any] = {"temperatures": {"learned": learned}}
    for name, constant in constants.items():
        found["temperatures"][name] = trainer.evaluate(constant, num_batches=NUM_FINAL_BATCHES, first=_FIRST_FINAL)
    if trainer.plan.held_out:
        found["held_out"] = {"learned": trainer.evaluate_held_out(None)}
        found["held_out"] |= {name: trainer.evaluate_held_out(constant) for name, constant in constants.items()}
    return found


def choose_constant(trainer: RewardTrainer) -> float:
    """Return the constant whose texts have the most reward, or distinct reward if that was learned from."""
    measure = "distinct" if trainer.plan.config.reward == "distinct" else "reward"
    by_constant = {
        constant: trainer.evaluate(constant, num_batches=1, first=_FIRST_CHOICE)[measure] for constant in CONSTANTS
    }
    return max(by_constant, key=by_constant.__getitem__)


def table(outcome: dict[str, Any]) -> str:
    """Return the results as text for the terminal."""
    lines = _part("temperature", outcome["temperatures"])
    if held_out := outcome.get("held_out"):
        lines += ["", *_part("on held-out prompts", held_out)]
    lines.append(f"λ = {outcome['kl_weight']:.4g} for a KL of {outcome['target_kl']:.3f} nats a text")
    if failures := outcome["failures"]:
        reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(failures.items()))
        lines.append(
            f"LOST {sum(failures.values())} texts to the verifier: {reasons}; the first: {outcome['first_failure']}"
        )
    if outcome.get("num_too_long"):
        lines.append(f"LEFT OUT {outcome['num_too_long']} prompts that are too long for the model's context")
    return "\n".join(lines)


def _part(heading: str, figures_of: dict[str, dict[str, float]]) -> list[str]:
    lines = [f"{heading:<30}{'reward':>10}{'distinct':>10}{'KL':>10}"]
    # A constant's own mean is the constant.
    shift, constant = (figures_of[name]["tau_mean"] for name in ("mean_shift", "constant"))
    names = {
        "learned": "learned",
        "mean_shift": f"their mean, {shift:.3f} (MeanShift)",
        "constant": f"best constant, {constant:.3f}",
        "one": "1",
    }
    for name, shown in names.items():
        figures = figures_of[name]
        lines.append(f"{shown:<30}{figures['reward']:>10.4f}{figures['distinct']:>10.4f}{figures['kl']:>10.3f}")
    lines.append(f"over {figures_of['learned']['texts']:.0f} texts each")
    return lines
