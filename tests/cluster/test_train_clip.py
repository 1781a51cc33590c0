"""Test the contrastive job on a real Ray: it is equal over workers and ZeRO stages, and exact after kills."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clip_training_support import NUM_PAIRS, tiny_clip_config
from killing import kill_workers, last_checkpoint
from mlflow import MlflowClient
from mlflow_support import columns_of
from PIL import Image
from ray.train import TrainingFailedError
from sample_state_support import sample_states
from support import run_until, training_worker_pids, wait_for
from transformers import AutoModel

from jobs import evaluate_clip
from jobs.engine.launch import train
from jobs.engine.metrics import metric_history
from jobs.engine.tracking import TrackedRun
from jobs.scoring.mlflow_models.run import record_models
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.dual_encoder.plan import make_plan
from jobs.train_clip import evaluation_of
from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from pipelines.sample.images import read_captions
from pipelines.text.tokenization import load_tokenizer
from tempnet.contrastive.retrieval import cross_entropy, recall
from tempnet.models.dual_encoder import DualEncoder, load_pair_tempnets

pytestmark = pytest.mark.cluster

NUM_STEPS = 32


@pytest.fixture(scope="session")
def reference(ray_head: dict[str, str], images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train the uninterrupted run that others must equal, with two workers, ZeRO 1 and float32; return its outcome."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", "PATH"):
            patch.setenv(name, ray_head[name])
        return train(
            make_plan(tiny_clip_config(images, tmp_path_factory.mktemp("reference"), "reference")),
            record_models=record_models,
        )


def history(outcome: dict[str, Any], key: str) -> dict[int, float]:
    return metric_history(TrackedRun(uri=outcome["tracking_uri"], run_id=outcome["mlflow_run_id"]), key)


def assert_same(outcome: dict[str, Any], reference: dict[str, Any], tolerance: float) -> None:
    """Assert equal batches, and nearly equal losses of all steps, mean τ and states of all samples."""
    assert history(outcome, "train/batch_digest") == history(reference, "train/batch_digest")
    losses, expected = history(outcome, "train/loss"), history(reference, "train/loss")
    assert sorted(losses) == sorted(expected) == list(range(1, NUM_STEPS + 1))
    # The losses are equal before the first update. Later Adam makes full-sized steps of rounding errors.
    assert losses[1] == pytest.approx(expected[1], abs=1e-6)
    for step in expected:
        assert losses[step] == pytest.approx(expected[step], abs=tolerance), step
    assert outcome["validation"]["tau_mean"] == pytest.approx(reference["validation"]["tau_mean"], rel=10 * tolerance)
    states, wanted = sample_states(outcome, NUM_STEPS), sample_states(reference, NUM_STEPS)
    assert states.keys() == wanted.keys()
    for name in wanted:
        assert torch.isfinite(wanted[name]).all()  # Five epochs have visited every sample.
        torch.testing.assert_close(states[name], wanted[name], rtol=0, atol=100 * tolerance)


def test_the_run_left_everything_a_person_needs(reference: dict[str, Any], images: Path) -> None:
    report = {path.name for path in (Path(reference["directory"]) / "report").iterdir()}
    assert report == {"summary.txt", "outcome.json", "configuration.json", "histogram.png", "curves.png"}
    client = MlflowClient(reference["tracking_uri"])
    run = client.get_run(reference["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.tags["temperature.verdict"] == reference["temperature_verdict"]
    rivals = reference["rivals"]
    assert rivals["robust/best_constant_loss"] <= rivals["robust/mean_shift_loss"] + 1e-4
    assert run.data.params["temperature.loss"] == "tempnet"
    assert {f"metrics.`{name}`" for name in run.data.metrics} >= set(columns_of(client, "contrastive"))
    assert {entry.dataset.name for entry in run.inputs.dataset_inputs} == {"train", "validation"}
    for key in ("train/tau_mean", "train/tau_q95", "train/log_u_mean", "train/dual_gradient_mean",
                "train/pairs_per_second", "train/learning_rate/tempnet"):  # fmt: skip
        assert {4, 8, NUM_STEPS} <= set(history(reference, key)), key
    assert sorted(history(reference, "validation/mean_recall")) == [16, NUM_STEPS]
    best = max(history(reference, "validation/mean_recall").values())
    assert reference["best_rating"] == best
    assert all(math.isfinite(value) for value in history(reference, "validation/cross_entropy_tau").values())
    tokens = load_tokenizer(str(images / "tokenizer"), needs_eos=False)(list(read_captions(images / "train")))
    assert reference["share_cut"]["train"] == sum(len(row) > 30 for row in tokens["input_ids"]) / NUM_PAIRS > 0
    assert "captions cut to" in (Path(reference["directory"]) / "report" / "summary.txt").read_text()
    assert sum(reference["histograms"]["image"]) == 20
    assert sum(reference["histograms"]["text"]) == 100


def test_the_export_is_the_best_model_and_scores_the_same(reference: dict[str, Any], images: Path) -> None:
    export = Path(reference["export"])
    encoder = DualEncoder.from_pretrained(export)
    networks = load_pair_tempnets(export)
    AutoModel.from_pretrained(export / "image_encoder")  # Transformers loads it without this project.
    (directory,) = (images / "prepared").glob("validation-*")
    tokenizer = load_tokenizer(str(export / "text_encoder"), needs_eos=False)
    source = PairSource(manifest=ImageManifest.load(str(directory)), tokenizer=tokenizer, image_size=32)
    captions, image_of_text = source.captions()
    share_cut = np.mean([len(row) > 30 for row in tokenizer(captions)["input_ids"]])
    assert reference["share_cut"]["validation"] == pytest.approx(share_cut)
    tokens = source.encoder.encode(captions)
    with torch.no_grad():
        image = encoder.encode_images(torch.from_numpy(source.read_images(range(20))))
        text = encoder.encode_texts(*(torch.from_numpy(tokens[name]) for name in ("input_ids", "attention_mask")))
        tau = networks[0](image), networks[1](text)
    owners = torch.from_numpy(image_of_text)
    assert recall(image, text, owners)["mean_recall"] == pytest.approx(reference["best_rating"], abs=1e-6)
    recalls = history(reference, "validation/mean_recall")
    best = min(step for step, value in recalls.items() if value == reference["best_rating"])
    expected = history(reference, "validation/cross_entropy_tau")[best]
    assert cross_entropy(image, text, owners, tau) == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    "workers",
    [{"num_workers": 1, "zero_stage": 0}, {"num_workers": 2, "zero_stage": 2}],
    ids=lambda value: f"{value['num_workers']} workers, ZeRO {value['zero_stage']}",
)
def test_workers_and_stages_do_not_change_the_result(
    cluster: dict[str, str], reference: dict[str, Any], images: Path, tmp_path: Path, workers: dict[str, int]
) -> None:
    outcome = train(make_plan(tiny_clip_config(images, tmp_path, "other", workers=workers)))
    assert_same(outcome, reference, tolerance=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("loss", ["isogclr", "tempnet"])
def test_a_killed_job_that_is_started_again_repeats_the_uninterrupted_one(
    cluster: dict[str, str], images: Path, tmp_path: Path, loss: str
) -> None:
    """With as many workers, every step is the same up to the rounding of sums over the ranks, even with dropout."""
    sections: dict[str, dict[str, Any]] = {
        # With batches of 8, an epoch takes 12.5 steps, so the first three checkpoints hold samples that were not visited yet.
        "run": {"num_steps": 28, "num_checkpoints_kept": 7},
        "optimizer": {"batch_size": 8},
        "model": {"text_dropout": 0.1},
        "temperature": {"loss": loss, "target_tau": 0.02 if loss == "tempnet" else None},
    }
    whole = train(make_plan(tiny_clip_config(images, tmp_path / "whole", "run", **sections)))
    config = tiny_clip_config(images, tmp_path / "killed", "run", **sections)

    def is_to_die() -> bool:
        """Kill the workers once a checkpoint is noted; return whether this was done, so that the driver dies too."""
        if last_checkpoint(config.run.directory) < 4:
            return False
        kill_workers(cluster)
        return True

    arguments = [str(images), str(tmp_path / "killed"), "run", json.dumps(sections)]
    path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    status, said = run_until(is_to_die, "clip_training_support", arguments, cluster | {"PYTHONPATH": path})
    assert status == -signal.SIGKILL, said
    again = train(make_plan(config))
    assert again["resumed_from_step"] in range(
        4, 28, 4
    )  # The kill comes some steps after the first checkpoint is seen.

    assert history(again, "train/batch_digest") == history(whole, "train/batch_digest")
    losses, expected = history(again, "train/loss"), history(whole, "train/loss")
    assert list(losses) == list(range(1, 29))
    assert list(losses.values()) == pytest.approx(list(expected.values()), abs=1e-6, rel=0)
    for step in range(4, 29, 4):
        states, wanted = sample_states(again, step), sample_states(whole, step)
        assert states.keys() == wanted.keys() >= ({"log_u", "tau"} if loss == "isogclr" else {"log_u"})
        assert torch.isneginf(wanted["log_u"]).any() == (8 * step < NUM_PAIRS)
        for name in wanted:
            torch.testing.assert_close(states[name], wanted[name], rtol=0, atol=1e-5, msg=f"{name} at step {step}")


def test_killed_twice_restarted_with_two_workers_and_continued_with_one(
    cluster: dict[str, str], reference: dict[str, Any], images: Path, tmp_path: Path
) -> None:
    config = tiny_clip_config(images, tmp_path, "killed", run={"max_restarts": 1})
    directory = config.run.directory

    def kill_twice() -> None:
        groups: list[list[int]] = [[]]
        for _ in range(2):
            step, dead = last_checkpoint(directory), groups[-1]
            wait_for(lambda step=step: last_checkpoint(directory) > step)
            # A checkpoint may be noted after the workers that wrote it are dead. Therefore wait for two new workers.
            wait_for(lambda dead=dead: len(set(training_worker_pids(cluster)) - set(dead)) == 2)
            groups.append([pid for pid in training_worker_pids(cluster) if pid not in dead])
            os.kill(groups[-1][-1], signal.SIGKILL)

    killer = threading.Thread(target=kill_twice)
    killer.start()
    with pytest.raises(TrainingFailedError):
        train(make_plan(config))
    killer.join()
    stopped_at = last_checkpoint(directory)
    outcome = train(make_plan(tiny_clip_config(images, tmp_path, "killed", workers={"num_workers": 1})))
    assert outcome["world_size"] == 1
    assert 4 <= stopped_at <= outcome["resumed_from_step"] < NUM_STEPS
    losses, expected = history(outcome, "train/loss"), history(reference, "train/loss")
    for step in range(1, outcome["resumed_from_step"] + 1):  # These steps had two workers, like the reference.
        assert losses[step] == pytest.approx(expected[step], abs=1e-6), step
    assert_same(outcome, reference, tolerance=1e-4)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optimizer": {"batch_size": 128}}, r"optimizer\.batch_size = 128 is more than the 100 pairs"),
        ({"temperature": {"rho": 4.6}}, r"temperature\.rho = 4\.6 is not below log\(N − 1\) = 4\.5951"),
        ({"temperature": {"num_prototypes": 101}}, r"temperature\.num_prototypes = 101 is more than the 100"),
    ],
)
def test_what_the_data_are_too_small_for_is_refused(
    cluster: dict[str, str], images: Path, tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(make_plan(tiny_clip_config(images, tmp_path, "large", **sections)))


def karpathy_validation(config: ClipConfig, directory: Path) -> ClipConfig:
    """Return the configuration with validation images in files: two in each of three splits, of which two are taken."""
    directory.mkdir()
    entries = []
    for number, split in enumerate(["val", "restval", "test"] * 2):
        pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "JPEG")
        (directory / f"{number}.jpg").write_bytes(stream.getvalue())
        entries.append({"filename": f"{number}.jpg", "split": split, "sentences": [{"raw": f"a caption {number}"}]})
    (directory / "captions.json").write_text(json.dumps({"images": entries}))
    fields = {
        "validation": str(directory),
        "validation_captions": str(directory / "captions.json"),
        "validation_splits": ("val", "restval"),
    }
    return replace(config, data=replace(config.data, **fields))


def test_the_evaluation_that_training_names_at_its_end_runs(
    cluster: dict[str, str], reference: dict[str, Any], images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three splits are taken, the directory's name has a space, and the captions are in a JSON file."""
    config = karpathy_validation(tiny_clip_config(images, tmp_path, "files"), tmp_path / "my files")
    job, *arguments = evaluation_of(config, reference["export"])
    assert job == "jobs.evaluate_clip"
    monkeypatch.setenv("TEMPNET_HOME", str(tmp_path / "runs"))
    assert evaluate_clip.main(arguments) == 0
    (results,) = (tmp_path / "runs").glob("clip-evaluation/results.json")
    (column,) = json.loads(results.read_text())["columns"]
    assert column["metrics"]["validation/num_images"] == 4
