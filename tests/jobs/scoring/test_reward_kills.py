"""A training on rewards that is killed goes on exactly: it ends as the one that nothing disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from tests.jobs.scoring.generation_support import make_model

ROOT = Path(__file__).parents[3]
# A whole training in one process, with the function that verifies in a process of its own.
PROGRAM = """
import sys
import torch
from jobs.scoring.reward.config import LeashSection, RewardConfig, RewardTemperatureSection, VerifierSection
from jobs.scoring.reward.job import train
from jobs.scoring.reward.plan import make_plan
from jobs.scoring.reward.rollouts import RolloutWorker
from jobs.scoring.reward.trainer import RewardTrainer

torch.set_num_threads(1)
model, prompts, directory = sys.argv[1:]
plan = make_plan(RewardConfig(
    model=model,
    prompts=prompts,
    verifier=VerifierSection(name="vowel_rewards:vowels"),
    storage=directory,
    num_steps=5,
    prompts_per_step=3,
    group_size=4,
    max_new_tokens=5,
    checkpoint_every=2,
    leash=LeashSection(target_kl=0.5, num_base_batches=1),
    temperature=RewardTemperatureSection(hidden_size=8, num_prototypes=4),
))
worker = RolloutWorker(plan)
trainer = RewardTrainer(plan, lambda orders: [worker.run(order) for order in orders])
train(trainer, directory, say=lambda line: print(line, flush=True))
worker.close()
"""
VERIFIER = 'def vowels(sample): return sum(x in "aeiou" for x in sample["text"]) / max(1, len(sample["text"]))\n'


def start(place: Path, run: Path) -> subprocess.Popen[str]:
    """Start the training in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(place / "model"), str(place / "prompts.jsonl"), str(run)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{place}"},
        start_new_session=True,
    )


def run_to_the_end(place: Path, run: Path) -> list[str]:
    process = start(place, run)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return said.splitlines()


def kill_after(place: Path, run: Path, beginning: str) -> None:
    """Kill a training by SIGKILL as soon as it says a line with a certain beginning; its verifier ends with its input."""
    process = start(place, run)
    assert process.stdout is not None
    assert any(line.startswith(beginning) for line in process.stdout)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    process.stdout.close()


def test_a_job_that_is_killed_twice_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    """The first kill comes after the measurement at τ = 1, the second a step after a checkpoint."""
    make_model(tmp_path / "model", "gpt2", 64, tempnet=False)
    (tmp_path / "vowel_rewards.py").write_text(VERIFIER)
    lines = [json.dumps({"id": name, "prompt": name}) for name in ("def", "x", "the base model", "class")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_to_the_end(tmp_path, whole)
    kill_after(tmp_path, parts, "1/5")
    kill_after(tmp_path, parts, "3/5")
    said = run_to_the_end(tmp_path, parts)
    assert said[0] == "continues after step 2 of 5"
    ours, theirs = (load_file(run / "checkpoint.safetensors") for run in (parts, whole))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (ours[name] == value).all(), name
