"""Test the main job with real Ray Data, Ray Train, DeepSpeed and MLflow: equal over workers, stages and kills."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from mlflow.entities import LoggedModel
from readme_support import lines_like, run_line
from safetensors.torch import load_file
from support import BIN, LANGUAGE_MODEL_OPTIONS, ROOT, outcome_of, run_until, training_worker_pids, wait_for
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs import train_lm
from jobs.engine.command_line import parse_preset
from jobs.engine.identity import flatten
from jobs.engine.launch import train as run_plan
from jobs.engine.metrics import metric_history
from jobs.engine.tracking import TrackedRun
from jobs.scoring.mlflow_models.run import record_models
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.plan import make_plan
from jobs.tasks.presets.language_models import PRESETS
from pipelines.storage import write_json
from tempnet import TempNet
from tempnet.base_model import BASE_FILE, BaseReference, base_digest, read_reference
from tempnet.loading import load_causal_lm, load_tempnet
from tempnet.models.packing import document_mask

pytestmark = pytest.mark.cluster

Make = Callable[..., LanguageModelConfig]


def train(config: LanguageModelConfig) -> dict[str, Any]:
    return run_plan(make_plan(config), record_models=record_models)


def history(outcome: dict[str, Any], key: str) -> dict[int, float]:
    return metric_history(TrackedRun(uri=outcome["tracking_uri"], run_id=outcome["mlflow_run_id"]), key)


def models_of(outcome: dict[str, Any]) -> dict[str, LoggedModel]:
    """Return name → model for the models that MLflow shows under a run."""
    client = MlflowClient(outcome["tracking_uri"])
    experiment = client.get_run(outcome["mlflow_run_id"]).info.experiment_id
    models = client.search_logged_models([experiment])
    return {model.name: model for model in models if model.source_run_id == outcome["mlflow_run_id"]}


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
    assert "http" not in page  # The page is self-contained.
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
    models = models_of(reference)
    assert sorted(models) == ["checkpoint-35", "checkpoint-40", "tempnet"]
    for model in models.values():
        assert Path(model.tags["uri"]).is_dir()
    scores = {metric.key: metric.value for metric in models["tempnet"].metrics}
    assert scores["validation/cross_entropy_tau"] == pytest.approx(reference["validation"]["cross_entropy_tau"])


def test_the_run_is_listed(home: Path, reference: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = lines_like("jobs.runs *")
    run_line(line, "--json")
    runs = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    (run,) = (run for run in runs if run["name"] == "gpt2-scratch-small")
    assert (run["state"], run["step"], run["num_steps"], run["failure"]) == ("finished", 40, 40, "")
    assert run["loss"] == pytest.approx(history(reference, "train/loss")[40])
    assert run["tau_mean"] == pytest.approx(reference["validation"]["tau_mean"])


def test_the_export_loads_without_this_project_and_scores_the_same(
    reference: dict[str, Any], home_directory: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(reference["export"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(reference["export"])
    network = TempNet.from_pretrained(Path(reference["export"]) / "tempnet")
    assert len(tokenizer) == network.config.input_size == 512
    from pipelines.text.blocks import read_range
    from pipelines.text.manifest import Manifest

    (prepared,) = (home_directory / "runs" / "prepared").glob("validation-64-*")
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
        {"num_workers": 2, "zero_stage": 1},
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


def has_checkpoint(run: Path) -> bool:
    """Return whether Ray Train has registered the first checkpoint, whose files appear a little earlier."""
    snapshot = run / "checkpoint_manager_snapshot.json"
    return snapshot.exists() and "checkpoint-00000005" in snapshot.read_text()


def assert_same_losses(outcome: dict[str, Any], reference: dict[str, Any], tolerance: float = 1e-6) -> None:
    """Assert that every step, before and after the kill, has the batch and the loss of the uninterrupted run."""
    losses, expected = history(outcome, "train/loss"), history(reference, "train/loss")
    assert sorted(losses) == sorted(expected)
    for step in expected:
        assert losses[step] == pytest.approx(expected[step], abs=tolerance), step
    assert history(outcome, "train/batch_digest") == history(reference, "train/batch_digest")
    assert outcome["validation"]["cross_entropy_tau"] == pytest.approx(
        reference["validation"]["cross_entropy_tau"], abs=tolerance
    )
    assert outcome["num_tokens"] == reference["num_tokens"]


def test_a_killed_worker_costs_only_the_steps_since_the_checkpoint(
    cluster: dict[str, str], home: Path, reference: dict[str, Any]
) -> None:
    """The README's line has ZeRO 3, whose state is in the most pieces; the killed job below has ZeRO 2."""
    (line,) = lines_like("jobs.train_lm * --workers.zero-stage 3")
    killed: list[int] = []

    def kill() -> None:
        wait_for(lambda: has_checkpoint(home / "runs" / "mine"))
        pid = training_worker_pids(cluster)[-1]
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    run_line(line, *LANGUAGE_MODEL_OPTIONS)
    killer.join()
    assert killed
    outcome = outcome_of(home, "mine")
    assert 5 <= outcome["resumed_from_step"] < 40
    assert_same_losses(outcome, reference)
    runs = MlflowClient(outcome["tracking_uri"]).search_runs(["1"])
    assert [run.info.run_name for run in runs].count("mine") == 1
    assert sorted(models_of(outcome)) == ["checkpoint-35", "checkpoint-40", "tempnet"]


def options_of(config: LanguageModelConfig) -> list[str]:
    """Return the options that turn the preset `gpt2-scratch` into this configuration."""
    options = []
    preset = flatten(PRESETS["gpt2-scratch"]())
    for name, value in flatten(config).items():
        section, _, field = name.replace("_", "-").partition(".")
        if value == preset[name]:
            continue
        if isinstance(value, bool):
            options.append(f"--{section}.{field}" if value else f"--{section}.no-{field}")
        else:
            options.append(f"--{section}.{field}={value}")
    return options


def submitted(config: LanguageModelConfig) -> tuple[str, list[str]]:
    """Return the README's `ray job submit … -- … python …` for a configuration as (before `python`, arguments)."""
    (line,) = lines_like("ray job submit *")
    submit, _, arguments = line.partition(" python ")
    paths = {
        "s3://bucket/openwebtext2/train": config.data.train,
        "s3://bucket/openwebtext2/validation": config.data.validation,
        "s3://bucket/runs": config.run.storage,
        "http://mlflow:5000": f"sqlite:///{config.run.storage}/mlflow.db",
    }
    words = [paths.get(word, word) for word in shlex.split(arguments)]
    return submit, [*words, *(option for option in options_of(config) if option.partition("=")[0] not in words)]


@pytest.mark.parametrize(
    ("num_workers", "tolerance"),
    [(2, 1e-6), pytest.param(1, 1e-5, marks=pytest.mark.long)],
    ids=["as many workers", "fewer workers"],
)
def test_a_killed_job_goes_on_through_ray_job_submit(
    ray_head: dict[str, str], tiny: Make, reference: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    num_workers: int, tolerance: float,
) -> None:  # fmt: skip
    config = tiny("killed-job")
    run = Path(config.run.directory)
    environment = {name: value for name, value in ray_head.items() if name != "RAY_ADDRESS"}
    with (tmp_path / "first.log").open("w") as log:
        job = subprocess.Popen(
            [sys.executable, *submitted(config)[1]],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            wait_for(lambda: has_checkpoint(run) or job.poll() is not None)
            assert job.poll() is None, (tmp_path / "first.log").read_text()
        finally:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert not (run / "outcome.json").exists()
    config = tiny("killed-job", workers={"num_workers": num_workers})
    submit, arguments = submitted(config)
    # Ray gives a submitted job the address "auto". With two heads on a machine, as here, it may be the other one.
    assert submit.startswith("ray job submit ")
    assert " -- env " in submit
    submit = submit.replace("ray job submit", f"ray job submit --address {ray_head['DASHBOARD']}")
    submit = submit.replace(" -- env ", f" -- env RAY_ADDRESS={ray_head['RAY_ADDRESS']} ")
    done = subprocess.run(
        f"{submit} python {shlex.join(arguments)}",
        shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "validation perplexity at τ" in done.stdout
    outcome = json.loads((run / "outcome.json").read_text())
    assert 5 <= outcome["resumed_from_step"] < 40
    assert f"continuing after step {outcome['resumed_from_step']}" in done.stdout
    assert outcome["world_size"] == num_workers
    jobs = MlflowClient(outcome["tracking_uri"]).get_run(outcome["mlflow_run_id"]).data.tags["ray_job_id"]
    assert re.fullmatch(r"[0-9a-f]{8}, raysubmit_\w+", jobs)
    assert_same_losses(outcome, reference, tolerance)
    # A job that is started a third time has nothing to do, and says so.
    assert train(config) == outcome
    assert "This run is finished" in capsys.readouterr().out
    # Without the token not even the list of jobs can be read.
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
    arguments = ["gpt2-scratch", *options_of(config)]
    status, said = run_until(
        lambda: has_checkpoint(Path(config.run.directory)), "jobs.train_lm", arguments, environment, by=by
    )
    assert status == 130, said
    assert f"the same command goes on from what is in {config.run.directory}" in said
    assert "Traceback" not in said
    client = MlflowClient(f"sqlite:///{config.run.resolved_storage}/mlflow.db")
    assert [run.info.status for run in client.search_runs(["1"])] == ["KILLED"]


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(
    cluster: dict[str, str], tiny: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(
        "explodes",
        optimizer={"learning_rate_base": 1e30, "warmup_share": 0.0},
        run={"checkpoint_every": 1},
        workers={"num_workers": 1},
    )
    with pytest.raises(SystemExit) as ended:
        train_lm.main(["gpt2-scratch", *options_of(config)])
    assert ended.value.code == 1
    message = capsys.readouterr().err
    (step,) = map(int, re.findall(r"error: the loss of step (\d+) is (?:nan|inf)", message))
    assert message.count(".arrow:") == 8  # The message names every block of the batch.
    assert "part-" in message
    assert (Path(config.run.directory) / f"checkpoint-{step - 1:08d}" / "state.json").exists()
    assert not (Path(config.run.directory) / f"checkpoint-{step:08d}").exists()
    client = MlflowClient(f"sqlite:///{config.run.resolved_storage}/mlflow.db")
    assert [run.info.status for run in client.search_runs(["1"])] == ["FAILED"]


def test_a_tempnet_is_trained_on_a_frozen_base_in_bf16(
    home: Path, reference: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = lines_like("jobs.train_lm frozen-small *")
    options = [
        "--run.num-steps=10", "--run.log-every=10", "--data.context-length=64", "--temperature.hidden-size=32",
        "--temperature.num-prototypes=16", "--temperature.num-calibration-tokens=1024", "--optimizer.batch-size=8",
        "--optimizer.learning-rate-tempnet=0.05", "--workers.num-workers=1", "--workers.num-threads=1",
        "--workers.zero-stage=3", "--workers.offload-optimizer", "--validation.num-blocks=32",
        "--validation.num-oracle-tokens=256",
    ]  # fmt: skip
    run = home / "runs" / "frozen-small"
    with pytest.raises(SystemExit) as ended:
        train_lm.main([*shlex.split(line)[3:], *options, "--temperature.calibrated-tau=1.9999"])
    assert ended.value.code == 2
    assert not run.exists()  # A run that cannot start does not take the name.
    run_line(line, *options)
    outcome = outcome_of(home, "frozen-small")
    losses = history(outcome, "train/loss")
    assert losses[10] < losses[1]
    calibration = json.loads((run / "calibration.json").read_text())
    assert calibration["tau_mean"] == pytest.approx(0.85, abs=1e-3)
    assert outcome["rho"] == calibration["rho"] == load_tempnet(outcome["export"]).config.rho
    # A run that is continued keeps the ρ that it began with, whatever a calibration would find now.
    write_json(f"{run}/calibration.json", calibration | {"rho": 1.25})
    config, _ = parse_preset(PRESETS, [*shlex.split(line)[3:], *options], job="train_lm", purpose="")
    assert make_plan(config).prepare().outcome["rho"] == 1.25
    # Neither the checkpoint nor the export holds the base, which both name; the export loads it in one call.
    reference_to_base = BaseReference(path=reference["export"], digest=base_digest(reference["export"]))
    (checkpoint,) = run.glob("checkpoint-*")
    assert read_reference(checkpoint) == read_reference(outcome["export"]) == reference_to_base
    num_trained = sum(value.numel() for value in load_tempnet(outcome["export"]).parameters())
    assert sum(file.stat().st_size for file in checkpoint.rglob("*")) < 24 * num_trained + 100_000
    before = AutoModelForCausalLM.from_pretrained(reference["export"], dtype=torch.bfloat16).state_dict()
    after = load_causal_lm(outcome["export"], dtype=torch.bfloat16)[0].state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    write_json(f"{run}/{BASE_FILE}", {"path": reference["export"], "digest": "another"})
    with pytest.raises(ValueError, match=r"run\.name = 'frozen-small' cannot continue: the base model"):
        make_plan(config).prepare()


def test_an_export_is_made_of_a_checkpoint(home: Path, reference: dict[str, Any]) -> None:
    """The checkpoint of the last step gives the export that the run itself has made."""
    (line,) = lines_like("jobs.export *")
    output = home / "exports" / "last"
    run_line(line, f"--output={output}")
    for place in (Path(), Path("tempnet")):
        made, own = (load_file(export / place / "model.safetensors") for export in (output, Path(reference["export"])))
        assert made.keys() == own.keys()
        assert all(torch.equal(made[name], own[name]) for name in own)
    assert not list((home / "runs" / "gpt2-scratch-small").glob(".export*"))


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
