"""Training on rewards says what it is going to do, and measures what it has learned on prompts that it has not seen."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from jobs import train_reward
from jobs.scoring.reward.comparison import CONSTANTS, NUM_FINAL_BATCHES, compare_temperatures, table
from jobs.scoring.reward.config import LeashSection, RewardConfig, RewardTemperatureSection, VerifierSection
from jobs.scoring.reward.job import train
from jobs.scoring.reward.plan import RewardPlan, make_plan
from jobs.scoring.reward.rollouts import Answer, Order, RolloutWorker
from jobs.scoring.reward.trainer import RewardTrainer
from tests.jobs.scoring.generation_support import make_model

VERIFIER = 'def vowels(sample): return sum(x in "aeiou" for x in sample["text"]) / max(1, len(sample["text"]))\n'
TRAINING, HELD_OUT = ("def", "x", "class", "the"), ("for", "a base model", "return")


def write(path: Path, prompts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RewardPlan:
    (tmp_path / "held_out_rewards.py").write_text(VERIFIER)
    monkeypatch.syspath_prepend(tmp_path)
    return make_plan(
        RewardConfig(
            model=str(make_model(tmp_path / "model", "gpt2", 64, tempnet=False)),
            prompts=str(write(tmp_path / "prompts.jsonl", TRAINING)),
            held_out_prompts=str(write(tmp_path / "held-out.jsonl", HELD_OUT)),
            verifier=VerifierSection(name="held_out_rewards:vowels"),
            storage=str(tmp_path / "runs"),
            num_steps=3,
            prompts_per_step=3,
            group_size=4,
            prompts_at_a_time=2,
            max_new_tokens=5,
            leash=LeashSection(target_kl=0.5, num_base_batches=1),
            temperature=RewardTemperatureSection(hidden_size=8, num_prototypes=4),
        )
    )


def test_held_out_prompts_are_measured_beside_their_controls_and_never_learned_from(
    plan: RewardPlan, tmp_path: Path
) -> None:
    worker = RolloutWorker(plan)
    seen: list[Order] = []
    answers: list[Answer] = []

    def run(orders: Sequence[Order]) -> list[Answer]:
        seen.extend(orders)
        answers.extend(worker.run(order) for order in orders)
        return answers[-len(orders) :]

    trainer = RewardTrainer(plan, run)
    train(trainer, str(tmp_path / "run"), say=lambda line: None)
    places = {place for order in seen for place, _ in order.places}
    assert places <= set(range(len(TRAINING)))
    assert sum(len(order.places) for order in seen) == 3 * (1 + plan.config.num_steps)
    weights = trainer.weights()
    seen.clear()
    answers.clear()
    outcome = trainer.result() | compare_temperatures(trainer)
    worker.close()
    assert all(torch.equal(value, weights[name]) for name, value in trainer.weights().items())

    parts: dict[str, list[Answer]] = {}
    for order, answer in zip(seen, answers, strict=True):
        if order.places[0][0] >= len(TRAINING):
            key = f"{order.temperature:.6f}" if isinstance(order.temperature, float) else "learned"
            parts.setdefault(key, []).append(answer)
            assert {plan.asked[place].prompt.turns[0] for place, _ in order.places} <= set(HELD_OUT)
    held_out = outcome["held_out"]
    shift = outcome["temperatures"]["learned"][
        "tau_mean"
    ]  # of the training prompts, so that held-out ones choose nothing
    best = outcome["temperatures"]["constant"]["tau_mean"]
    keys = {"learned": "learned", "mean_shift": f"{shift:.6f}", "constant": f"{best:.6f}", "one": "1.000000"}
    for name, key in keys.items():
        rewards = sum(answer.sums["reward"] for answer in parts[key][:2])
        assert held_out[name]["reward"] == pytest.approx(rewards / (len(HELD_OUT) * 4)), name
        assert held_out[name]["texts"] == len(HELD_OUT) * 4
    shown = table(outcome | {"num_too_long": 0})
    assert shown.count("MeanShift") == shown.count("best constant") == 2
    assert f"over {len(HELD_OUT) * 4} texts each" in shown
    assert f"over {NUM_FINAL_BATCHES * 12} texts each" in shown


def test_the_best_constant_is_the_one_with_the_most_reward(plan: RewardPlan, tmp_path: Path) -> None:
    """The reference asks every constant for itself."""
    worker = RolloutWorker(plan)
    trainer = RewardTrainer(plan, lambda orders: [worker.run(order) for order in orders])
    train(trainer, str(tmp_path / "run"), say=lambda line: None)
    found = compare_temperatures(trainer)["temperatures"]["constant"]["tau_mean"]
    rewards = {
        constant: worker.run(Order(step=-2001, places=tuple(plan.places_of_step(-2001)), temperature=constant)).mean(
            "reward"
        )
        for constant in CONSTANTS
    }
    worker.close()
    assert rewards[min(CONSTANTS, key=lambda constant: abs(constant - found))] == max(rewards.values())
    assert len(set(rewards.values())) > 1


def test_a_dry_run_counts_what_a_run_asks_for_and_starts_nothing(
    plan: RewardPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference counts the texts of a whole run in this process."""
    config = plan.config
    arguments = [
        "--model", config.model, "--prompts", config.prompts, "--held-out-prompts", config.held_out_prompts,
        "--verifier.name", config.verifier.name, "--storage", str(tmp_path / "elsewhere"), "--num-steps", "3",
        "--prompts-per-step", "3", "--group-size", "4", "--prompts-at-a-time", "2", "--max-new-tokens", "5",
        "--leash.target-kl", "0.5", "--leash.num-base-batches", "1", "--temperature.hidden-size", "8",
        "--temperature.num-prototypes", "4", "--dry-run",
    ]  # fmt: skip
    assert train_reward.main(arguments) == 0
    shown = capsys.readouterr().out
    assert not (tmp_path / "elsewhere").exists()

    worker, num_texts = RolloutWorker(plan), 0

    def run(orders: Sequence[Order]) -> list[Answer]:
        nonlocal num_texts
        num_texts += sum(len(order.places) for order in orders) * config.group_size
        return [worker.run(order) for order in orders]

    trainer = RewardTrainer(plan, run)
    train(trainer, str(tmp_path / "run"), say=lambda line: None)
    compare_temperatures(trainer)
    worker.close()
    line = re.search(r"^texts +(\d+) to learn from, (\d+) to measure", shown, re.MULTILINE)
    assert line is not None
    assert int(line[1]) == 3 * 3 * 4
    assert int(line[1]) + int(line[2]) == num_texts
    assert re.search(rf"^tokens +at most {num_texts * 5:,} new ones", shown, re.MULTILINE)
    weights = AutoModelForCausalLM.from_pretrained(config.model)
    assert f"{sum(parameter.numel() for parameter in weights.parameters()):,} parameters in float32" in shown
    assert f"{sum(parameter.numel() for parameter in trainer.network.parameters()):,} parameters, reads hidden" in shown
    assert re.search(r"^held out +3 of \d+ to \d+ tokens", shown, re.MULTILINE)
    assert "held_out_rewards:vowels" in shown
    assert re.search(r"^memory +about 0\.\d\d GiB a worker: process 0.72", shown, re.MULTILINE)
