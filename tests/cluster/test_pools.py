"""Training on rewards and comparing decoders in a pool on Ray give what one process gives, also if a worker dies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from prediction_support import save_tiny_model, some_texts

from jobs import analyse, train_reward
from jobs.scoring.decoders.bench import BenchWorker, run_bench
from jobs.scoring.decoders.config import Decoders
from jobs.scoring.decoders.job import figures, resolve_settings
from jobs.scoring.reward.plan import make_plan
from jobs.scoring.reward.rollouts import work_here
from jobs.scoring.reward.trainer import RewardTrainer
from tempnet.loading import load_tempnet
from tests.jobs.scoring.generation_support import make_model

pytestmark = [pytest.mark.cluster, pytest.mark.long]

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


def test_training_on_rewards_with_a_worker_that_dies(
    cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "killing_rewards.py").write_text(VERIFIER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    model, prompts = make_model(tmp_path / "model", "gpt2", 64, tempnet=False), tmp_path / "prompts.jsonl"
    lines = [{"prompt": prompt, "kills": prompt == "x"} for prompt in ("def", "x", "the base model", "class")]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = (
        f"--model {model} --prompts {prompts} --verifier.name killing_rewards:vowels --storage {tmp_path}/runs "
        "--num-steps 3 --prompts-per-step 4 --group-size 4 --max-new-tokens 5 --leash.target-kl 0.5 --checkpoint-every 2 "
        "--temperature.hidden-size 8 --temperature.num-prototypes 4 "
        "--workers.num-workers 2 --workers.cpus-per-worker 0.5"
    ).split()
    assert train_reward.main(options) == 0
    assert (tmp_path / "has-killed").exists()
    assert "LOST" in capsys.readouterr().out
    run = tmp_path / "runs" / "reward"
    outcome = json.loads((run / "outcome.json").read_text())

    plan = make_plan(train_reward.parse(options)[0])
    with work_here(plan) as run_orders:
        expected = RewardTrainer(plan, run_orders)
        expected.begin()
        for _ in range(3):
            expected.train_step()
        expected.finish()
    learned = load_tempnet(run / "export").state_dict()
    for name, value in expected.weights().items():
        torch.testing.assert_close(learned[name], value, atol=1e-6, rtol=1e-5)
    for ours, theirs in zip(outcome["history"], expected.history, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)
    assert outcome["failures"].keys() == {"not_a_number"}

    client = MlflowClient(outcome["tracking_uri"])
    tracked = client.get_run(outcome["mlflow_run_id"])
    assert tracked.info.status == "FINISHED"
    for name in ("reward", "distinct", "kl", "kl_weight", "tau_mean", "lost"):
        values = {metric.step: metric.value for metric in client.get_metric_history(tracked.info.run_id, name)}
        assert values == pytest.approx({step: row[name] for step, row in enumerate(outcome["history"], start=1)})
    assert tracked.data.metrics["mean_shift/reward"] == outcome["temperatures"]["mean_shift"]["reward"]

    assert train_reward.main(options) == 0  # nothing is left to do
    assert "continues after step 3 of 3" in capsys.readouterr().out
    assert json.loads((run / "outcome.json").read_text())["history"] == outcome["history"]
    with pytest.raises(SystemExit):
        train_reward.main([*options, "--group-size", "3"])
    assert "name = 'reward' was begun with other settings: group_size: 4 → 3" in capsys.readouterr().err


def test_comparing_decoders(
    cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    model, text, output = save_tiny_model(tmp_path / "model"), tmp_path / "text.jsonl", tmp_path / "decoders"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in some_texts(12)))
    sizes = {"num_samples": 2, "max_new_tokens": 4, "prompt_tokens": 3, "num_steps": 2, "max_prompts": 6, "k": 2}
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in sizes.items())
    words = (
        f"decoders --model {model} --text {text} --output {output} --storage {tmp_path} --workers.num-workers 2 {words}"
    )
    assert analyse.main(words.split()) == 0
    shown, values = capsys.readouterr().out, json.loads((output / "results.json").read_text())
    settings = resolve_settings(Decoders(model=str(model), text=str(text), output=str(output), **sizes))[0]  # type: ignore[arg-type]
    worker = BenchWorker(settings)
    expected = figures(run_bench(settings, lambda units: [worker.do(unit) for unit in units]), k=2)["decoders"]
    assert values["decoders"].keys() == expected.keys()
    for name, found in values["decoders"].items():
        assert found["text"]["gain"]["mean"] == pytest.approx(expected[name]["text"]["gain"]["mean"], abs=1e-4), name
        assert found["prompts"]["distinct"] == pytest.approx(expected[name]["prompts"]["distinct"], abs=1e-4), name
    assert (output / "results.md").read_text().split("\n\n")[0] in shown
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("analyses").experiment_id])
    assert run.data.metrics["EDT/gain"] == pytest.approx(values["decoders"]["EDT"]["text"]["gain"]["mean"])
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert files == {"results.json", "results.md", "frontier.png"}
