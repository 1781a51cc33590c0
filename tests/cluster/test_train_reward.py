"""Training on rewards on Ray, with a worker that dies, gives what one process gives, and what it leaves can be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient

from jobs import generate, train_reward
from jobs.scoring.reward.config import LeashSection, RewardConfig, RewardTemperatureSection, VerifierSection
from jobs.scoring.reward.plan import make_plan
from jobs.scoring.reward.rollouts import RolloutWorker
from jobs.scoring.reward.trainer import RewardTrainer
from jobs.scoring.verifiers.function_server import load_function
from tempnet.loading import load_tempnet
from tests.jobs.scoring.generation_support import make_model

pytestmark = pytest.mark.cluster

# The first call of all kills the worker whose verifier it is, as a machine that is lost would.
VERIFIER = """
import os, pathlib, signal
def vowels(sample):
    mark = pathlib.Path(__file__).with_name("has-killed")
    if sample.get("kills") and not mark.exists():
        mark.touch()
        os.kill(os.getppid(), signal.SIGKILL)
    text = sample["text"]
    if len(text) % 5 == 4:
        return float("nan")
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))
"""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "killing_rewards.py").write_text(VERIFIER)
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    model = make_model(tmp_path / "model", "gpt2", 64, tempnet=False)
    lines = [{"prompt": prompt, "kills": prompt == "x"} for prompt in ("def", "x", "the base model", "class")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [
        "--model", str(model), "--prompts", str(tmp_path / "prompts.jsonl"), "--verifier.name", "killing_rewards:vowels",
        "--storage", str(tmp_path / "runs"), "--num-steps", "3", "--prompts-per-step", "4", "--group-size", "4",
        "--max-new-tokens", "5", "--leash.target-kl", "0.5", "--leash.num-base-batches", "1", "--checkpoint-every", "2",
        "--temperature.hidden-size", "8", "--temperature.num-prototypes", "4",
        "--workers.num-workers", "2", "--workers.cpus-per-worker", "0.5",
    ]  # fmt: skip


def one_process(tmp_path: Path) -> RewardTrainer:
    """Return the trainer of the same run, after all its steps, without Ray."""
    config = RewardConfig(
        model=str(tmp_path / "model"),
        prompts=str(tmp_path / "prompts.jsonl"),
        verifier=VerifierSection(name="killing_rewards:vowels"),
        num_steps=3,
        prompts_per_step=4,
        group_size=4,
        max_new_tokens=5,
        leash=LeashSection(target_kl=0.5, num_base_batches=1),
        temperature=RewardTemperatureSection(hidden_size=8, num_prototypes=4),
    )
    plan = make_plan(config)
    worker = RolloutWorker(plan)
    trainer = RewardTrainer(plan, lambda orders: [worker.run(order) for order in orders])
    trainer.measure_base()
    for _ in range(3):
        trainer.train_step()
    worker.close()
    return trainer


@pytest.mark.long
def test_a_pool_whose_worker_dies_gives_what_one_process_gives(
    cluster: dict[str, str], options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_reward.main(options) == 0
    shown = capsys.readouterr().out
    assert (tmp_path / "code" / "has-killed").exists()
    assert callable(load_function("killing_rewards:vowels"))
    run = tmp_path / "runs" / "reward"
    outcome = json.loads((run / "outcome.json").read_text())
    expected = one_process(tmp_path)
    learned = load_tempnet(run / "export")
    for name, value in expected.weights().items():
        torch.testing.assert_close(learned.state_dict()[name], value, atol=1e-6, rtol=1e-5)
    for ours, theirs in zip(outcome["history"], expected.history, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)
    assert outcome["failures"].keys() == {"not_a_number"}
    assert "LOST" in shown
    assert "MeanShift" in shown

    client = MlflowClient(outcome["tracking_uri"])
    tracked = client.get_run(outcome["mlflow_run_id"])
    assert tracked.info.status == "FINISHED"
    for name in ("reward", "distinct", "kl", "kl_weight", "tau_mean", "lost"):
        history = sorted(client.get_metric_history(tracked.info.run_id, name), key=lambda metric: metric.step)
        assert [metric.value for metric in history] == pytest.approx([step[name] for step in outcome["history"]])
    assert tracked.data.metrics["mean_shift/reward"] == outcome["temperatures"]["mean_shift"]["reward"]

    texts = tmp_path / "texts.jsonl"
    arguments = ["--model", str(run / "export"), "--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(texts)]
    assert generate.main([*arguments, "--max-new-tokens", "4"]) == 0
    assert all(len(json.loads(line)["tau"]) for line in texts.read_text().splitlines())

    assert train_reward.main(options) == 0  # nothing is left to do
    assert "continues after step 3 of 3" in capsys.readouterr().out
    assert json.loads((run / "outcome.json").read_text())["history"] == outcome["history"]
    with pytest.raises(SystemExit) as stopped:
        train_reward.main([*options, "--group-size", "3"])
    assert stopped.value.code == 2
    assert "name = 'reward' was begun with other settings: group_size: 4 → 3" in capsys.readouterr().err
