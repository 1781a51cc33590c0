"""Test what the frozen towers of a dual encoder make possible on a real Ray: stored embeddings, and a grid in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from clip_support import SIDE, make_dual_encoder, make_pairs
from mlflow import MlflowClient
from sample_state_support import sample_states
from support import outcome_of

from jobs import prepare_features, sweep, train_clip
from jobs.engine.metrics import TrackedRun, metric_history
from tempnet.models.dual_encoder import DualEncoder, load_pair_tempnets

pytestmark = pytest.mark.cluster

PRESET, NUM_STEPS = "clip-cc12m-tempnet-frozen-small", 12


@pytest.fixture(scope="module")
def options(home_directory: Path) -> list[str]:
    """Write an encoder and pairs, most of which share their image with others; return options for short runs on them."""
    make_pairs(home_directory / "pairs")
    encoder = make_dual_encoder(home_directory / "encoder")
    return [
        f"--model.path={encoder}", f"--model.image-size={SIDE}", "--model.embedding-size=12", "--data.tokenizer=",
        "--data.num-text-tokens=40", f"--data.train={home_directory / 'pairs'}", "--data.max-bad-share=0.1",
        f"--data.validation={home_directory / 'pairs'}", "--data.view=central", f"--run.num-steps={NUM_STEPS}",
        "--data.caption-noise=0.5", "--run.log-every=4", "--run.checkpoint-every=4", "--temperature.rho=1",
        "--temperature.hidden-size=6", "--temperature.num-prototypes=5", "--optimizer.batch-size=8",
        "--optimizer.epsilon=1e-4", "--workers.num-threads=1", "--workers.precision=fp32", "--validation.every=8",
        "--validation.num-images=7",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def on_towers(ray_head: dict[str, str], home_directory: Path, options: list[str]) -> dict[str, Any]:
    """Train on the towers with two workers, and return the outcome, which that of runs on embeddings must equal."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", "PATH"):
            patch.setenv(name, ray_head[name])
        patch.chdir(home_directory)
        assert train_clip.main([PRESET, *options, "--run.name=on-towers"]) == 0
    return outcome_of(home_directory, "on-towers")


def history(outcome: dict[str, Any], key: str) -> dict[int, float]:
    return metric_history(TrackedRun(uri=outcome["tracking_uri"], run_id=outcome["mlflow_run_id"]), key)


def assert_same(outcome: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert equal batches and order, and losses, states of all samples and validations that agree to 1e-5."""
    assert outcome["batches_digest"] == expected["batches_digest"]
    losses, wanted = history(outcome, "train/loss"), history(expected, "train/loss")
    assert sorted(losses) == sorted(wanted) == list(range(1, NUM_STEPS + 1))
    assert [losses[step] for step in wanted] == pytest.approx(list(wanted.values()), abs=1e-5, rel=0)
    ours, theirs = sample_states(outcome, NUM_STEPS), sample_states(expected, NUM_STEPS)
    assert ours.keys() == theirs.keys() == {"log_u"}
    torch.testing.assert_close(ours["log_u"], theirs["log_u"], rtol=0, atol=1e-3)
    assert outcome["validation"] == pytest.approx(expected["validation"], rel=1e-4, abs=1e-5)


@pytest.mark.long
def test_a_run_on_stored_embeddings_is_the_run_on_the_towers(
    home: Path, options: list[str], on_towers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = [PRESET, *options, "--model.features", "--run.name=on-embeddings"]
    with pytest.raises(SystemExit) as ended:
        train_clip.main(run)
    assert ended.value.code == 2
    assert "store them by the same command with jobs.prepare_features" in capsys.readouterr().err
    already = set((home / "runs" / "prepared").glob("features-*"))
    prepare = [PRESET, *(option for option in options if "--data.view" not in option)]
    assert prepare_features.main(prepare) == 0
    said = capsys.readouterr().out
    assert "19 images × 52 bytes and 56 captions × 58 bytes (embeddings of 12 in float32, of the central view" in said
    assert "add --model.features --data.view central to the same options of jobs.train_clip" in said
    directories = sorted(set((home / "runs" / "prepared").glob("features-*")) - already)
    assert len(directories) == 2  # Captions of the training have noise.
    # A file that is missing is made again, and the others are kept.
    before = {file.name: file.stat().st_mtime_ns for file in directories[0].iterdir()}
    first = min(name for name in before if name.startswith("captions-"))
    for name in (first, "manifest.json"):
        (directories[0] / name).unlink()
    assert prepare_features.main(prepare) == 0
    assert "stored before" in capsys.readouterr().out
    after = {file.name: file.stat().st_mtime_ns for file in directories[0].iterdir()}
    assert {name for name in before if after[name] != before[name]} == {first, "manifest.json"}
    assert train_clip.main(run) == 0
    outcome = outcome_of(home, "on-embeddings")
    assert outcome["world_size"] == on_towers["world_size"] == 2
    assert_same(outcome, on_towers)
    exported, encoder = DualEncoder.from_pretrained(outcome["export"]), DualEncoder.from_pretrained(home / "encoder")
    assert all(torch.equal(value, encoder.state_dict()[name]) for name, value in exported.state_dict().items())
    for ours, theirs in zip(
        load_pair_tempnets(outcome["export"]), load_pair_tempnets(on_towers["export"]), strict=True
    ):
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], value, rtol=0, atol=1e-4)


def assert_grid_holds(home: Path, name: str, expected: dict[str, Any]) -> None:
    """Assert that a grid of ρ = 1, 2 was one run with MLflow runs of its trials, and that the first trial is a given run."""
    runs = home / "runs" / name
    rows = json.loads((runs / "results.json").read_text())["rows"]
    outcomes = [json.loads((runs / row["name"] / "outcome.json").read_text()) for row in rows]
    assert [row["num_steps"] for row in rows] == [NUM_STEPS] * 2
    assert not list(runs.glob("side-by-side-*/checkpoint-*"))
    client = MlflowClient(expected["tracking_uri"])
    found = client.search_runs([client.get_experiment_by_name("contrastive").experiment_id])
    (parent,) = (run for run in found if run.info.run_name == name)
    children = [run for run in found if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert sorted(run.info.run_name for run in children) == sorted(row["name"] for row in rows)
    assert {run.info.status for run in [parent, *children]} == {"FINISHED"}
    losses = [history(outcome, "train/loss") for outcome in outcomes]
    wanted = history(expected, "train/loss")
    assert [losses[0][step] for step in wanted] == pytest.approx(list(wanted.values()), abs=1e-5, rel=0)
    assert outcomes[0]["batches_digest"] == expected["batches_digest"]
    assert outcomes[0]["validation"] == pytest.approx(expected["validation"], rel=1e-4, abs=1e-5)
    assert losses[1][NUM_STEPS] != pytest.approx(losses[0][NUM_STEPS], abs=1e-3)
    for outcome in outcomes:
        load_pair_tempnets(outcome["export"])


def sweep_words(options: list[str], name: str) -> list[str]:
    """Return the arguments of a sweep whose first trial, at ρ = 1, is the run on the towers with the given options."""
    based = [option.replace("--", "--base.", 1) for option in options]
    axes = ["--sweep.axes", "temperature.rho=1,2"]
    return ["clip-frozen-rho-lr-small", *based, f"--base.run.name={name}", *axes]


@pytest.mark.long
def test_a_grid_on_stored_embeddings_is_one_run(home: Path, options: list[str], on_towers: dict[str, Any]) -> None:
    assert prepare_features.main([PRESET, *options]) == 0
    assert sweep.main([*sweep_words(options, "towers-grid"), "--base.model.features"]) == 0
    assert_grid_holds(home, "towers-grid", on_towers)
