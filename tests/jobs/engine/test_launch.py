"""Tests what is refused before Ray starts, and the message for a run name that is already taken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from jobs import train_lm
from jobs.engine import cluster, launch, lease, rivals
from jobs.engine.launch import claim_directory
from jobs.engine.resumption import write_snapshot
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.plan import make_plan
from jobs.tasks.presets.language_models import PRESETS
from pipelines.text.tokenization import train_bpe

Change = Callable[..., LanguageModelConfig]


@pytest.fixture
def change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Change:
    """Returns a function that makes the small preset on tiny files, with changed sections; starting Ray is an error."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def start_ray() -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(launch, "start_ray", start_ray)
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.jsonl").write_text(json.dumps({"text": "a b c"}) + "\n")
    train_bpe(["a b c d e f g"], 400).save_pretrained(tmp_path / "tokenizer")

    def make(**sections: dict[str, Any]) -> LanguageModelConfig:
        config = PRESETS["gpt2-scratch-small"]()
        defaults: dict[str, dict[str, Any]] = {
            "run": {"storage": str(tmp_path / "runs")},
            "data": {
                "train": str(tmp_path / "train"),
                "validation": str(tmp_path / "validation"),
                "tokenizer": str(tmp_path / "tokenizer"),
            },
        }
        for name in defaults.keys() | sections.keys():
            values = {**defaults.get(name, {}), **sections.get(name, {})}
            config = replace(config, **{name: replace(getattr(config, name), **values)})
        return config

    return make


def test_a_good_configuration_has_a_plan(change: Change) -> None:
    config = change(temperature={"target_entropy": 2.0})
    plan = make_plan(config)
    text = plan.describe()
    assert plan.vocab_size < 400
    assert plan.tracking_uri == f"sqlite:///{config.run.storage}/mlflow.db"
    assert "16 blocks × 128 = 2048 tokens: 2 workers × 1 micro-batches × 8 blocks" in text
    assert "target entropy 2.0000" in text


def model_directory(path: Path, *, vocab_size: int, num_positions: int) -> str:
    config = AutoConfig.for_model(
        "gpt2", vocab_size=vocab_size, n_embd=16, n_layer=1, n_head=2, n_positions=num_positions, eos_token_id=0
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def test_what_cannot_work_is_refused_before_ray_starts(change: Change, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.doc").write_text("x")
    small_vocabulary = model_directory(tmp_path / "model-a", vocab_size=100, num_positions=128)
    short_context = model_directory(tmp_path / "model-b", vocab_size=400, num_positions=64)
    foreign = model_directory(tmp_path / "foreign", vocab_size=400, num_positions=128)
    train_bpe(["the words of another language"] * 8, 300).save_pretrained(foreign)
    cases: list[tuple[dict[str, dict[str, Any]], str]] = [
        ({"temperature": {"rho": 10.0, "target_entropy": None}}, r"temperature\.rho: rho = 10 is outside"),
        ({"temperature": {"target_entropy": 9.0}}, "target_entropy = 9 nats is impossible"),
        ({"temperature": {"tau_min": 3.0, "target_entropy": 2.0}}, "0 < tau_min < tau_max"),
        ({"data": {"train": str(tmp_path / "nowhere")}}, r"data\.train: .*nowhere"),
        ({"data": {"validation": str(tmp_path / "empty")}}, r"data\.validation: .*notes\.doc"),
        ({"data": {"tokenizer": str(tmp_path / "train")}}, "tokenizer = .*train' cannot be loaded"),
        ({"model": {"path": "nowhere/nothing"}}, r"model\.path = 'nowhere/nothing' is no Transformers model"),
        ({"model": {"path": small_vocabulary}}, "tokens, more than the vocabulary of 100"),
        ({"model": {"path": foreign}}, r"data\.tokenizer = .* is not the tokenizer of model\.path = .*foreign"),
        ({"tracking": {"uri": "mlflow:5000"}}, r"tracking\.uri = 'mlflow:5000' is no address of MLflow: give http://"),
        ({"model": {"path": short_context}}, r"data\.context_length = 128 is more than the 64 positions"),
        (
            {"model": {"architecture": "llama", "dropout": 0.1}},
            r"model\.dropout = 0\.1 is supported only for model\.architecture",
        ),
        ({"run": {"storage": "s3://bucket/runs"}}, r"tracking\.uri is not given"),
    ]
    for sections, message in cases:
        defaults = {"temperature": {"target_entropy": 2.0}} if "temperature" not in sections else {}
        with pytest.raises((ValueError, OSError), match=message):
            launch.train(make_plan(change(**{**defaults, **sections})))


def test_a_taken_name_is_refused_with_the_fields_that_differ(change: Change) -> None:
    config = change(temperature={"target_entropy": 2.0})
    assert launch.claim_directory(config) is None
    assert launch.claim_directory(change(temperature={"target_entropy": 2.0}, run={"log_every": 3})) is None
    with pytest.raises(ValueError, match=r"is taken .*temperature\.target_entropy: 2\.0 → 2\.5\. Choose another run"):
        launch.claim_directory(change(temperature={"target_entropy": 2.5}))


def test_a_second_driver_is_refused_before_ray_starts(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_SECONDS_TO_END", 0.1)
    config = change(temperature={"target_entropy": 2.0})
    plan = make_plan(config)
    with (
        lease.Lease(config.run.directory),
        pytest.raises(ValueError, match=rf"in the hands of process {os.getpid()} on \S+: wait until that has ended"),
    ):
        launch.train(plan)
    with pytest.raises(AssertionError, match="Ray was started"):
        launch.train(plan)


def test_a_run_without_a_whole_checkpoint_is_refused_before_ray_starts(change: Change) -> None:
    config = change(temperature={"target_entropy": 2.0})
    (Path(config.run.directory) / "checkpoint-00000005").mkdir(parents=True)
    write_snapshot(config.run.directory, ["checkpoint-00000005", "checkpoint-00000010"])
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole\. checkpoint-00000005 .* checkpoint-00000010 "):
        launch.train(make_plan(config))


def test_what_cannot_start_holds_no_name(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_small(**wanted: Any) -> None:
        raise ValueError("the cluster has no GPU")

    monkeypatch.setattr(launch, "start_ray", lambda: None)
    monkeypatch.setattr(launch, "check_resources", too_small)
    config = change(temperature={"target_entropy": 2.0})
    with pytest.raises(ValueError, match="no GPU"):
        launch.train(make_plan(config))
    assert not (Path(config.run.directory) / "configuration.json").exists()
    assert launch.claim_directory(change(temperature={"target_entropy": 2.5})) is None


def test_a_refusal_reaches_the_person_as_one_line_and_status_2(
    change: Change, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["gpt2-scratch-small", "--data.train", str(tmp_path / "nowhere"), "--run.storage", str(tmp_path)]
    with pytest.raises(SystemExit) as exit_info:
        train_lm.main(arguments)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: data.train:")
    assert "Traceback" not in error


@pytest.mark.parametrize("num_failures", [2, 3])
def test_a_ray_that_is_slow_to_start_is_tried_again(num_failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[subprocess.Popen[bytes]] = []

    def init(**options: Any) -> None:
        if len(left) < num_failures:
            left.append(subprocess.Popen(["sleep", "100"]))
            raise Exception("The current node timed out during startup. This could happen because …")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # Otherwise this process, and what later tests start, would be told that Ray starts no clusters.
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    if num_failures < 3:
        cluster.start_ray()
    else:
        with pytest.raises(TimeoutError, match="3 times: the machine is too busy"):
            cluster.start_ray()
    # The processes of the failed starts have been killed.
    assert [process.wait(timeout=10) for process in left] == [-signal.SIGKILL] * num_failures


def test_a_constant_tempnet_is_a_warning_and_no_failure(change: Change, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command shows a finished run again, so its exit status can be tested without training."""
    config = change(temperature={"target_entropy": 2.0}, tracking={"preset": "gpt2-scratch-small"})
    scores = dict.fromkeys(
        ("tau_mean", "tau_q05", "tau_q95", "tau_share_lower_bound", "tau_share_upper_bound", "tau_entropy_spearman",
         "cross_entropy", "cross_entropy_tau"), 1.0
    )  # fmt: skip
    of_constant = {"tau": 1.0, "loss": 0.5, "gain": 0.0, "gain_half_width": 0.0}
    figures = {
        f"robust/{name}_{key}": value for name in ("best_constant", "mean_shift") for key, value in of_constant.items()
    }
    outcome = {
        "run": config.run.name, "directory": config.run.directory, "export": "", "tracking_uri": "", "loss": "dro",
        "validation": scores | {"tau_std": 0.001}, "rho": 3.0, "target_entropy": 2.0, "judged_by": "robust",
        "rivals": figures | {"robust/loss": 0.5, "robust/oracle_loss": 0.4, "oracle_tau_mean": 0.7},
        "tokens_per_second": 1000.0, "data_wait_share": 0.01, "num_steps": 10, "num_epochs": 0.5,
    }  # fmt: skip
    claim_directory(config)
    verdict = rivals.verdict(outcome)
    Path(config.run.directory, "outcome.json").write_text(json.dumps(outcome | {"temperature_verdict": verdict}))
    arguments = ["--run.storage", config.run.storage, "--temperature.target-entropy", "2"]
    for name in ("train", "validation", "tokenizer"):
        arguments += [f"--data.{name}", getattr(config.data, name)]
    assert train_lm.main(["gpt2-scratch-small", *arguments]) == 0
    assert "the TempNet is constant" in capsys.readouterr().out
