"""Test the main job with real Ray Data, Ray Train, DeepSpeed and MLflow: results, exports, and equal over workers."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from language_model_support import history, models_of
from mlflow import MlflowClient
from readme_support import lines_like, run_line
from safetensors.torch import load_file
from support import ROOT, outcome_of
from transformers import AutoModelForCausalLM

from jobs import train_lm
from jobs.engine.command_line import parse_preset
from jobs.tasks.language_model.plan import make_plan
from jobs.tasks.presets.language_models import PRESETS
from pipelines.storage import write_json
from tempnet.base_model import BASE_FILE, BaseReference, base_digest, read_reference
from tempnet.loading import load_causal_lm, load_tempnet

pytestmark = pytest.mark.cluster


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
    assert 0 < page.count('title="τ ') <= 4 * 64
    assert "http" not in page  # The page is self-contained.
    client = MlflowClient(reference["tracking_uri"])
    run = client.get_run(reference["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["temperature.target_entropy"] == "3.0"
    assert run.data.tags["temperature.verdict"] == reference["temperature_verdict"]
    assert run.data.metrics["verdict/robust/mean_shift_loss"] == rivals["robust/mean_shift_loss"]
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


def test_a_tempnet_is_trained_on_a_frozen_base_in_bf16(
    home: Path, reference: dict[str, Any], monkeypatch: pytest.MonkeyPatch
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
    # In one process without Ray, none of which is at this address, the run is the same to the bit.
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    words = [*shlex.split(line)[1:], *options, "--workers.local", "--run.name=alone"]
    subprocess.run([sys.executable, *words], cwd=home, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    alone = outcome_of(home, "alone")
    assert history(alone, "train/loss") == losses
    assert (alone["validation"], alone["batches_digest"]) == (outcome["validation"], outcome["batches_digest"])
    assert files_of(home, "alone") == files_of(home, "frozen-small")
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


def files_of(home: Path, name: str) -> list[str]:
    """Return what is in the directory of a run, without what Ray Train itself notes there."""
    run = home / "runs" / name
    files = [file for file in run.rglob("*") if "snapshot" not in file.name and not file.name.startswith(".")]
    return sorted(str(file.relative_to(run)) for file in files)


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
