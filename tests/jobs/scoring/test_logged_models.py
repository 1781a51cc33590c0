"""Tests that checkpoints in MLflow come and go with their directories, and that exports predict temperatures."""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from clip_support import make_dual_encoder_with_tempnets
from mlflow import MlflowClient
from mlflow.entities import LoggedModel
from prediction_support import CONTEXT_LENGTH, save_tiny_model, some_texts
from transformers import AutoConfig, AutoModel

from jobs.engine.metrics import MetricLogger, TrackedRun
from jobs.engine.resumption import write_file_list
from jobs.engine.tracking import open_run
from jobs.scoring.mlflow_models.predictors import EXAMPLES, CaptionTemperatures, SentenceTemperatures, predictor_kind
from jobs.scoring.mlflow_models.record import record_checkpoints, record_export
from pipelines.text.tokenization import load_tokenizer, train_wordpiece
from tempnet.loading import load_causal_lm
from tempnet.models.sentence_encoder import SentenceEncoder
from tempnet.network import PAIRED_DIRECTORY, TempNet
from tempnet.network_config import TempNetConfig

TEXTS = ["a red circle", "two blue squares left of a green one"]


@pytest.fixture
def run(tracking_uri: str, tmp_path: Path) -> TrackedRun:
    run = open_run(
        uri=tracking_uri,
        experiment="tests",
        name="a run",
        directory=str(tmp_path),
        parameters={"rho": 3.0},
        tags={},
        data_sets={},
    )
    logger = MetricLogger(run, warn=print)
    for step in (5, 10):
        logger.log({"validation/cross_entropy": 1.0 / step, "train/loss": 7.0}, step)
    assert logger.close() == 0
    return run


def models(run: TrackedRun) -> dict[str, LoggedModel]:
    client = MlflowClient(run.uri)
    experiment_id = client.get_run(run.run_id).info.experiment_id
    found = client.search_logged_models([experiment_id], filter_string=f"source_run_id = '{run.run_id}'")
    return {model.name: model for model in found}


def test_checkpoints_are_external_models_as_long_as_they_are_there(run: TrackedRun, tmp_path: Path) -> None:
    def save(step: int) -> None:
        checkpoint = tmp_path / f"checkpoint-{step:08d}"
        checkpoint.mkdir()
        write_file_list(checkpoint, rank=0, world_size=1, group="a")

    for step in (5, 10):
        save(step)
    (tmp_path / "checkpoint-00000012").mkdir()  # The upload of this checkpoint was not finished.
    (tmp_path / "export").mkdir()
    record_checkpoints(run, str(tmp_path))
    first = models(run)
    assert sorted(first) == ["checkpoint-10", "checkpoint-5"]
    ten = first["checkpoint-10"]
    assert (ten.model_type, ten.status.value) == ("checkpoint", "READY")
    assert ten.tags["uri"] == str(tmp_path / "checkpoint-00000010")
    assert ten.tags["mlflow.model.isExternal"] == "true"
    assert ten.params == {"rho": "3.0"}
    assert {(metric.key, metric.value, metric.step) for metric in ten.metrics} == {
        ("validation/cross_entropy", 0.1, 10)
    }
    outputs = MlflowClient(run.uri).get_run(run.run_id).outputs.model_outputs
    assert {(output.model_id, output.step) for output in outputs} >= {(ten.model_id, 10)}

    # A continued run keeps the models whose checkpoints still exist and drops the others.
    shutil.rmtree(tmp_path / "checkpoint-00000005")
    save(15)
    record_checkpoints(run, str(tmp_path))
    later = models(run)
    assert sorted(later) == ["checkpoint-10", "checkpoint-15"]
    assert later["checkpoint-10"].model_id == ten.model_id


def test_an_export_is_a_model_that_predicts_what_the_predictor_does(run: TrackedRun, tmp_path: Path) -> None:
    export = save_tiny_model(tmp_path / "export")
    for _ in range(2):  # The second call replaces what was there before.
        record_export(run, str(export), step=10, max_gib=1.0)
    (logged,) = models(run).values()
    assert (logged.name, logged.model_type, logged.status.value) == ("tempnet", "tempnet", "READY")
    (base, network), tokenizer = load_causal_lm(export), load_tokenizer(str(export))
    shutil.rmtree(export)  # The logged model holds all weights that it needs, and no code but what names the class.
    place = Path(logged.artifact_location.removeprefix("file://"))
    assert not list(place.rglob("*.pkl"))
    assert [file.name for file in place.rglob("*.py")] == ["model_code.py"]
    assert f"tempnet[pipeline]=={version('tempnet')}" in (place / "requirements.txt").read_text().split()
    loaded = mlflow.pyfunc.load_model(logged.artifact_location)
    assert loaded.metadata.signature.inputs.input_names() == ["text"]
    assert loaded.metadata.signature.outputs.input_names() == ["tau", "tokens", "token_tau"]
    texts = [*some_texts(3, seed=1), ""]
    found = loaded.predict(pd.DataFrame({"text": texts}))
    for text, (tau, tokens, token_tau) in zip(texts, found.itertuples(index=False), strict=True):
        assert "".join(tokens) == text
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(token_tau) == len(tokens) == len(ids)
        assert tau == pytest.approx(np.mean(token_tau)) if text else np.isnan(tau)
        with torch.no_grad():
            logits = base(torch.tensor([[0, *ids[: CONTEXT_LENGTH - 1]]])).logits[0, :, : network.config.input_size]
        first = min(len(ids), CONTEXT_LENGTH)
        np.testing.assert_allclose(token_tau[:first], network(logits).detach()[:first], atol=1e-5)
    assert np.concatenate(found["token_tau"]).std() > 0.02
    assert len(loaded.predict(loaded.input_example)) == len(EXAMPLES)


def test_a_large_export_is_only_referred_to_and_one_without_a_tempnet_is_left_alone(
    run: TrackedRun, tmp_path: Path
) -> None:
    export = save_tiny_model(tmp_path / "export")
    record_export(run, str(export), step=10, max_gib=0.0)
    (logged,) = models(run).values()
    assert logged.tags["mlflow.model.isExternal"] == "true"
    assert logged.tags["uri"] == str(export)
    held = Path(logged.artifact_location.removeprefix("file://"))
    files = {str(file.relative_to(held)) for file in held.rglob("*") if file.is_file()}
    assert files == {"MLmodel", "tempnet/config.json", "tempnet/model.safetensors"}
    MlflowClient(run.uri).delete_logged_model(logged.model_id)
    shutil.rmtree(export / PAIRED_DIRECTORY)
    record_export(run, str(export), step=10, max_gib=1.0)
    assert models(run) == {}


def test_captions_and_sentences_have_one_temperature_each(tmp_path: Path) -> None:
    make_dual_encoder_with_tempnets(tmp_path / "pairs")
    tokenizer = train_wordpiece(TEXTS, 200)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = AutoConfig.for_model("bert", vocab_size=len(tokenizer), pad_token_id=0, **sizes)
    SentenceEncoder(AutoModel.from_config(config)).save_pretrained(tmp_path / "texts", tokenizer, num_tokens=16)
    network = TempNet(TempNetConfig.for_embeddings(16, rho=2.0, tau_max=1.0, hidden_size=8, num_prototypes=4))
    torch.nn.init.normal_(network.pool_weight, std=4.0)
    network.save_pretrained(tmp_path / "texts" / PAIRED_DIRECTORY)
    for directory, kind in ((tmp_path / "pairs", CaptionTemperatures), (tmp_path / "texts", SentenceTemperatures)):
        assert predictor_kind(directory) is kind
        tau = kind(directory)(TEXTS)["tau"]
        assert tau[1] == pytest.approx(kind(directory)(TEXTS[1:])["tau"][0], abs=1e-6)
        assert tau[0] != pytest.approx(tau[1], abs=1e-4)
