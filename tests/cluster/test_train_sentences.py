"""Test the sentence job on a real Ray: exact after a kill and with other workers; others can load its export."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from mlflow_support import columns_of
from ray.train import TrainingFailedError
from sample_state_support import sample_states
from sentence_support import NUM_STEPS, history, tiny_sentences
from support import training_worker_pids, wait_for
from transformers import AutoModel, AutoTokenizer

from jobs.engine.launch import train
from jobs.scoring.mlflow_models.run import record_models
from jobs.tasks.sentence_encoder.plan import make_plan
from tempnet.models.sentence_encoder import SentenceEncoder
from tempnet.network import PAIRED_DIRECTORY, TempNet

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="session")
def reference(
    ray_head: dict[str, str], corpus: Path, wordpiece: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Train the uninterrupted run that others must equal, and return its outcome."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", "PATH"):
            patch.setenv(name, ray_head[name])
        return train(
            make_plan(tiny_sentences(corpus, wordpiece, tmp_path_factory.mktemp("sentences"), "reference")),
            record_models=record_models,
        )


def assert_same(outcome: dict[str, Any], reference: dict[str, Any]) -> None:
    """Assert equal batches, and nearly equal losses of all steps, scores and states of all documents."""
    assert history(outcome, "train/batch_digest") == history(reference, "train/batch_digest")
    losses, expected = history(outcome, "train/loss"), history(reference, "train/loss")
    assert sorted(losses) == sorted(expected) == list(range(1, NUM_STEPS + 1))
    # The losses are equal before the first update. Later Adam makes full-sized steps of rounding errors.
    assert losses[1] == pytest.approx(expected[1], rel=1e-6)
    for step in expected:
        assert losses[step] == pytest.approx(expected[step], abs=1e-4), step
    for name, value in reference["validation"].items():
        assert outcome["validation"][name] == pytest.approx(value, rel=1e-3), name
    states, wanted = sample_states(outcome, NUM_STEPS), sample_states(reference, NUM_STEPS)
    assert states["log_u"].shape == (2, outcome["num_documents_train"])
    torch.testing.assert_close(states, wanted, rtol=0, atol=1e-2)


def test_the_run_left_everything_a_person_needs(reference: dict[str, Any]) -> None:
    report = {path.name for path in (Path(reference["directory"]) / "report").iterdir()}
    assert report == {"summary.txt", "outcome.json", "configuration.json", "histogram.png", "curves.png"}
    client = MlflowClient(reference["tracking_uri"])
    run = client.get_run(reference["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.tags["temperature.verdict"] == reference["temperature_verdict"]
    rivals = reference["rivals"]
    assert rivals["robust/best_constant_loss"] <= rivals["robust/mean_shift_loss"] + 1e-4
    assert {f"metrics.`{name}`" for name in run.data.metrics} >= set(columns_of(client, "sentences"))
    assert int(run.data.params["num_documents"]) == reference["num_documents_train"] > 100
    assert reference["num_documents_too_short"]["train"] == 360 - reference["num_documents_train"] > 0
    for key in ("train/mlm_loss", "train/tau_mean_anchor", "train/log_u_mean", "train/share_crowded",
                "train/documents_per_second", "train/learning_rate/tempnet"):  # fmt: skip
        assert {5, 10, NUM_STEPS} <= set(history(reference, key)), key
    assert sorted(history(reference, "validation/span_recall@1")) == [20, NUM_STEPS]
    assert sum(reference["histograms"]["anchor"]) == sum(reference["histograms"]["positive"]) == 30
    losses = history(reference, "train/mlm_loss")
    assert losses[NUM_STEPS] < losses[5]


def test_the_export_is_an_encoder_for_transformers_and_a_tempnet(reference: dict[str, Any]) -> None:
    export = Path(reference["export"])
    tokenizer, plain = AutoTokenizer.from_pretrained(export), AutoModel.from_pretrained(export)
    ours = SentenceEncoder.from_pretrained(export)
    tokens = tokenizer(
        ["a short text", "another one that is longer"], padding=True, truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        hidden = plain(**{name: tokens[name] for name in ("input_ids", "attention_mask")})["last_hidden_state"]
        mask = tokens["attention_mask"][..., None]
        expected = (hidden * mask).sum(1) / mask.sum(1)
        torch.testing.assert_close(ours(tokens["input_ids"], tokens["attention_mask"]), expected)
    assert TempNet.from_pretrained(export / PAIRED_DIRECTORY).config.input_size == 16


@pytest.mark.long
def test_killed_and_continued_with_another_number_of_workers(
    cluster: dict[str, str], reference: dict[str, Any], corpus: Path, wordpiece: Path, tmp_path: Path
) -> None:
    config = tiny_sentences(corpus, wordpiece, tmp_path, "killed")
    snapshot = Path(config.run.directory) / "checkpoint_manager_snapshot.json"

    def kill() -> None:
        wait_for(lambda: snapshot.exists() and bool(re.search(r"checkpoint-\d{8}", snapshot.read_text())))
        os.kill(training_worker_pids(cluster)[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(TrainingFailedError):
        train(make_plan(config))
    killer.join()
    outcome = train(make_plan(tiny_sentences(corpus, wordpiece, tmp_path, "killed", workers={"num_workers": 1})))
    assert 5 <= outcome["resumed_from_step"] < NUM_STEPS
    assert_same(outcome, reference)
