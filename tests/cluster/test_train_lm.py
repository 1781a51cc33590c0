"""The main job for real: Ray Data, Ray Train, DeepSpeed and MLflow; equal over workers and stages, and after kills."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from support import BIN, ROOT, readme_lines, run_lines, run_until, tiny_config, training_worker_pids, wait_for
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs.language_models.config import LanguageModelConfig
from jobs.language_models.plan import make_plan
from jobs.training.identity import flatten
from jobs.training.job import FatalTrainingError
from jobs.training.launch import train as run_plan
from jobs.training.tracking import TrackedRun, metric_history
from pipelines.manifest import write_json
from tempnet import TempNet
from tempnet.calibration import CalibrationError
from tempnet.loading import load_tempnet
from tempnet.models.packing import document_mask

pytestmark = pytest.mark.cluster

Make = Callable[..., LanguageModelConfig]


def train(config: LanguageModelConfig) -> dict[str, Any]:
    return run_plan(make_plan(config))


def history(outcome: dict[str, Any], key: str) -> dict[int, float]:
    return metric_history(TrackedRun(uri=outcome["tracking_uri"], run_id=outcome["mlflow_run_id"]), key)


@pytest.fixture(scope="session")
def reference(ray_head: dict[str, str], corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The uninterrupted run that others are held against: two workers, ZeRO 2, float32."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", "PATH"):
            patch.setenv(name, ray_head[name])
        return train(tiny_config(corpus, tmp_path_factory.mktemp("reference"), "reference"))


def test_the_run_learned_and_left_everything_a_person_needs(reference: dict[str, Any]) -> None:
    losses = history(reference, "train/loss")
    assert sorted(losses) == list(range(1, 41))
    assert losses[40] < losses[1] - 0.3
    assert reference["resumed_from_step"] == 0
    assert reference["validation"]["cross_entropy"] < math.log(512)
    rivals = reference["rivals"]
    assert (
        rivals["robust/oracle_loss"] <= rivals["robust/best_constant_loss"] <= rivals["robust/mean_shift_loss"] + 1e-4
    )
    assert reference["temperature_verdict"]
    report = Path(reference["directory"]) / "report"
    names = {path.name for path in report.iterdir()}
    assert names == {"tokens.html", "histogram.png", "curves.png", "summary.txt", "outcome.json", "configuration.json"}
    page = (report / "tokens.html").read_text()
    assert page.count('title="τ ') == 4 * 64
    assert "http" not in page  # self-contained
    client = MlflowClient(reference["tracking_uri"])
    run = client.get_run(reference["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["temperature.target_entropy"] == "3.0"
    assert run.data.tags["temperature.verdict"] == reference["temperature_verdict"]
    assert run.data.metrics["final/rivals/robust/mean_shift_loss"] == rivals["robust/mean_shift_loss"]
    assert reference["temperature_verdict"] in (report / "summary.txt").read_text()
    assert float(run.data.params["resolved.rho"]) == pytest.approx(math.log(512) - 3.0)
    assert {entry.dataset.name for entry in run.inputs.dataset_inputs} == {"train", "validation"}
    assert {artifact.path for artifact in client.list_artifacts(run.info.run_id)} == names
    for key in ("train/tau_mean", "train/tau_q95", "train/regret", "train/tau_entropy_spearman", "train/gradient_norm",
                "train/data_wait_share", "train/learning_rate/base", "train/learning_rate/tempnet"):  # fmt: skip
        assert {10, 20, 30, 40} <= set(history(reference, key)), key
    assert sorted(history(reference, "validation/cross_entropy_tau")) == [20, 40]
    assert history(reference, "system/cpu_utilization_percentage")
    models = {model.name: model for model in client.search_logged_models([run.info.experiment_id])}
    assert sorted(models) == ["checkpoint-35", "checkpoint-40", "tempnet"]
    for model in models.values():
        assert model.source_run_id == run.info.run_id
        assert Path(model.tags["uri"]).is_dir()
    scores = {metric.key: metric.value for metric in models["tempnet"].metrics}
    assert scores["validation/cross_entropy_tau"] == pytest.approx(reference["validation"]["cross_entropy_tau"])


def test_the_export_loads_without_this_project_and_scores_the_same(reference: dict[str, Any], corpus: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(reference["export"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(reference["export"])
    network = TempNet.from_pretrained(Path(reference["export"]) / "tempnet")
    assert len(tokenizer) == network.config.input_size == 512
    from pipelines.blocks import read_range
    from pipelines.manifest import Manifest

    (prepared,) = (corpus / "prepared").glob("validation-*")
    blocks = {name: torch.from_numpy(value) for name, value in read_range(Manifest.load(str(prepared)), 0, 32).items()}
    with torch.no_grad():
        logits = model(
            blocks["input_ids"],
            position_ids=blocks["position_ids"],
            attention_mask=document_mask(blocks["position_ids"]),
        ).logits[..., :512]
        tau = network(logits)
    valid = blocks["targets"] != -100
    cross_entropy = torch.nn.functional.cross_entropy
    scores = reference["validation"]
    assert cross_entropy(logits[valid], blocks["targets"][valid]).item() == pytest.approx(
        scores["cross_entropy"], abs=1e-5
    )
    assert cross_entropy(logits[valid] / tau[valid][:, None], blocks["targets"][valid]).item() == pytest.approx(
        scores["cross_entropy_tau"], abs=1e-5
    )
    assert tau[valid].mean().item() == pytest.approx(scores["tau_mean"], abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "workers",
    [
        {"num_workers": 1, "zero_stage": 2},
        {"num_workers": 2, "zero_stage": 0},
        {"num_workers": 2, "zero_stage": 3},
    ],
    ids=lambda value: f"{value['num_workers']} workers, ZeRO {value['zero_stage']}",
)
def test_workers_and_stages_do_not_change_the_result(
    cluster: dict[str, str], tiny: Make, reference: dict[str, Any], workers: dict[str, int]
) -> None:
    # The single worker also accumulates over four micro-batches.
    micro = {"micro_batch_size": 2} if workers["num_workers"] == 1 else {}
    outcome = train(tiny("other", workers=workers, optimizer=micro))
    for key in ("cross_entropy", "cross_entropy_tau", "robust_loss", "tau_mean"):
        assert outcome["validation"][key] == pytest.approx(reference["validation"][key], abs=1e-4), key
    assert history(outcome, "train/batch_digest") == history(reference, "train/batch_digest")
    losses, expected = history(outcome, "train/loss"), history(reference, "train/loss")
    assert [losses[step] for step in sorted(losses)] == pytest.approx(
        [expected[step] for step in sorted(expected)], abs=1e-4
    )


def has_checkpoint(config: LanguageModelConfig) -> bool:
    """Whether Ray Train has registered the first checkpoint (its files appear a little earlier)."""
    snapshot = Path(config.run.directory) / "checkpoint_manager_snapshot.json"
    return snapshot.exists() and "checkpoint-00000005" in snapshot.read_text()


def assert_same_losses(outcome: dict[str, Any], reference: dict[str, Any], tolerance: float = 1e-6) -> None:
    """Every step, those before the kill and those after, equals the uninterrupted run's, on the same batches."""
    losses, expected = history(outcome, "train/loss"), history(reference, "train/loss")
    assert sorted(losses) == sorted(expected)
    for step in expected:
        assert losses[step] == pytest.approx(expected[step], abs=tolerance), step
    assert history(outcome, "train/batch_digest") == history(reference, "train/batch_digest")
    assert outcome["validation"]["cross_entropy_tau"] == pytest.approx(
        reference["validation"]["cross_entropy_tau"], abs=tolerance
    )
    assert outcome["num_tokens"] == reference["num_tokens"]


@pytest.mark.long
def test_a_killed_worker_costs_only_the_steps_since_the_checkpoint(
    cluster: dict[str, str], tiny: Make, reference: dict[str, Any]
) -> None:
    """With ZeRO 3, whose state is in the most pieces; ZeRO 2 is that of the killed job below."""
    config = tiny("killed-worker", workers={"zero_stage": 3})
    killed: list[int] = []

    def kill() -> None:
        wait_for(lambda: has_checkpoint(config))
        pid = training_worker_pids(cluster)[-1]
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    outcome = train(config)
    killer.join()
    assert killed
    assert 5 <= outcome["resumed_from_step"] < 40
    assert_same_losses(outcome, reference)
    client = MlflowClient(outcome["tracking_uri"])
    assert len(client.search_runs(["1"])) == 1
    assert sorted(model.name for model in client.search_logged_models(["1"])) == [
        "checkpoint-35",
        "checkpoint-40",
        "tempnet",
    ]


def command(config: LanguageModelConfig) -> list[str]:
    """The command line that gives this configuration."""
    arguments = []
    for name, value in flatten(config).items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            section, _, field = name.replace("_", "-").partition(".")
            arguments.append(f"--{section}.{field}" if value else f"--{section}.no-{field}")
        elif value != "":
            arguments += [flag, str(value)]
    return ["-m", "jobs.train_lm", "gpt2-scratch", *arguments]


def test_a_killed_job_goes_on_through_ray_job_submit_with_another_number_of_workers(
    ray_head: dict[str, str], tiny: Make, reference: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny("killed-job")
    environment = {name: value for name, value in ray_head.items() if name != "RAY_ADDRESS"}
    with (tmp_path / "first.log").open("w") as log:
        job = subprocess.Popen(
            [sys.executable, *command(config)],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            wait_for(lambda: has_checkpoint(config) or job.poll() is not None)
            assert job.poll() is None, (tmp_path / "first.log").read_text()
        finally:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert not (Path(config.run.directory) / "outcome.json").exists()
    alone = tiny("killed-job", workers={"num_workers": 1})
    # Ray gives a submitted job the address "auto", which on a machine with two heads, as here, may be the other one.
    address = ["env", f"RAY_ADDRESS={ray_head['RAY_ADDRESS']}"]
    submit = subprocess.run(
        [str(BIN / "ray"), "job", "submit", "--address", ray_head["DASHBOARD"], "--working-dir", ".", "--",
         *address, "python", *command(alone)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert "validation perplexity at τ" in submit.stdout, submit.stdout + submit.stderr
    outcome = json.loads((Path(config.run.directory) / "outcome.json").read_text())
    assert 5 <= outcome["resumed_from_step"] < 40
    assert f"continuing after step {outcome['resumed_from_step']}" in submit.stdout
    assert outcome["world_size"] == 1
    jobs = MlflowClient(outcome["tracking_uri"]).get_run(outcome["mlflow_run_id"]).data.tags["ray_job_id"]
    assert re.fullmatch(r"[0-9a-f]{8}, raysubmit_\w+", jobs)
    assert_same_losses(outcome, reference, tolerance=1e-5)
    # A third start has nothing to do, and says so.
    assert train(config) == outcome
    assert "This run is finished" in capsys.readouterr().out
    # Who has no token may not even look.
    refused = subprocess.run(
        [str(BIN / "ray"), "job", "list", "--address", ray_head["DASHBOARD"]],
        env=os.environ | {"RAY_AUTH_MODE": "disabled"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert refused.returncode != 0


@pytest.mark.long
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_says_how_to_go_on(ray_head: dict[str, str], tiny: Make, by: signal.Signals) -> None:
    config = tiny("interrupted")
    environment = {name: value for name, value in ray_head.items() if name != "RAY_ADDRESS"}
    arguments = command(config)[2:]
    status, said = run_until(lambda: has_checkpoint(config), "jobs.train_lm", arguments, environment, by=by)
    assert status == 130, said
    assert f"the same command goes on from what is in {config.run.directory}" in said
    assert "Traceback" not in said
    client = MlflowClient(f"sqlite:///{config.run.resolved_storage}/mlflow.db")
    assert [run.info.status for run in client.search_runs(["1"])] == ["KILLED"]


@pytest.mark.long
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(cluster: dict[str, str], tiny: Make) -> None:
    config = tiny(
        "explodes",
        optimizer={"learning_rate_base": 1e30, "warmup_share": 0.0},
        run={"checkpoint_every": 1},
        workers={"num_workers": 1},
    )
    with pytest.raises(FatalTrainingError, match=r"the loss of step \d+ is (nan|inf)") as error:
        train(config)
    message = str(error.value)
    step = int(message.split("step ")[1].split()[0])
    assert message.count(".arrow:") == 8  # every block of the batch
    assert "part-" in message
    assert (Path(config.run.directory) / f"checkpoint-{step - 1:08d}" / "state.json").exists()
    assert not (Path(config.run.directory) / f"checkpoint-{step:08d}").exists()
    client = MlflowClient(f"sqlite:///{config.run.resolved_storage}/mlflow.db")
    assert [run.info.status for run in client.search_runs(["1"])] == ["FAILED"]


def test_frozen_base_in_bf16_trains_the_tempnet_alone(
    cluster: dict[str, str], tiny: Make, reference: dict[str, Any]
) -> None:
    config = tiny(
        "frozen",
        data={"tokenizer": ""},  # the model's own
        model={"path": reference["export"]},  # frozen, as nothing else is said
        temperature={"target_entropy": None, "calibrated_tau": 0.9, "num_calibration_tokens": 1024},
        workers={"precision": "bf16", "zero_stage": 3, "num_workers": 1, "offload_optimizer": True},
        run={"num_steps": 10},
    )
    with pytest.raises(CalibrationError):
        train(replace(config, temperature=replace(config.temperature, calibrated_tau=1.9999)))
    assert not Path(config.run.directory).exists()  # what cannot start holds no name
    outcome = train(config)
    losses = history(outcome, "train/loss")
    assert losses[10] < losses[1]
    calibration = json.loads((Path(config.run.directory) / "calibration.json").read_text())
    assert calibration["tau_mean"] == pytest.approx(0.9, abs=1e-3)
    assert outcome["rho"] == calibration["rho"] == load_tempnet(outcome["export"]).config.rho
    # A run that is continued takes the ρ that it began with, whatever a calibration would find now.
    write_json(f"{config.run.directory}/calibration.json", calibration | {"rho": 1.25})
    assert make_plan(config).prepare().outcome["rho"] == 1.25
    before = AutoModelForCausalLM.from_pretrained(reference["export"], dtype=torch.bfloat16).state_dict()
    after = AutoModelForCausalLM.from_pretrained(outcome["export"], dtype=torch.bfloat16).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.long
def test_finetuning_starts_from_the_saved_weights(
    cluster: dict[str, str], tiny: Make, reference: dict[str, Any]
) -> None:
    config = tiny(
        "finetune",
        model={"path": reference["export"], "freeze": False},
        temperature={"loss": "ce"},
        workers={"precision": "bf16", "activation_checkpointing": True, "num_workers": 1},
        run={"num_steps": 5},
    )
    outcome = train(config)
    assert history(outcome, "train/loss")[1] == pytest.approx(reference["validation"]["cross_entropy"], abs=0.5)
    assert not (Path(outcome["export"]) / "tempnet").exists()


def test_the_readmes_other_commands_run(
    reference: dict[str, Any], cluster: dict[str, str], corpus: Path, tmp_path: Path
) -> None:
    """The commands and the Python snippet of the README, with its sample paths replaced by this test's."""
    paths = {
        "runs/gpt2-scratch-small/export": reference["export"],
        "data/sample/text/train": str(corpus / "train"),
        "data/sample/tokenizer": str(corpus / "tokenizer"),
        ".venv/bin/python": sys.executable,
    }
    jobs = "prepare_text|calibrate|generate|evaluate_lm|predict_temperatures .* --text"
    lines = readme_lines(rf"echo |{re.escape(sys.executable)} -m jobs\.({jobs}) ", paths)
    assert len(lines) == 8
    readme = (ROOT / "README.md").read_text()
    (tmp_path / "README.md").write_text(readme)
    run_lines(lines, tmp_path, cluster | {"TEMPNET_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)})
    assert (tmp_path / "temperatures.html").read_text().count('title="τ ') > 500
    assert list((tmp_path / "prepared").glob("train-128-*/manifest.json"))
    assert (tmp_path / "calibration" / "curve.png").stat().st_size > 5000
    (record,) = map(json.loads, (tmp_path / "texts.jsonl").read_text().splitlines())
    assert len(record["tau"]) == len(record["tokens"])
    assert list((tmp_path / "temperatures").glob("*.parquet"))
    (snippet,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    snippet = snippet.replace("runs/gpt2-scratch-small/export", reference["export"])
    scope: dict[str, Any] = {}
    exec(snippet, scope)
    generated = scope["result"].sequences[0, scope["prompt"]["input_ids"].shape[1] :]
    assert len(generated) == 16 or generated[-1] == scope["tokenizer"].eos_token_id
    assert scope["result"].temperatures.shape == (1, len(generated))
