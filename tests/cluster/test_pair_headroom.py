"""Test `jobs.calibrate headroom --images` on a real Ray: its figures, however it is run, and data that it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clip_support import make_clip, make_dual_encoder, make_pairs
from mlflow import MlflowClient
from safetensors.torch import load_file, save_file
from support import run_until

from jobs.calibrate import main
from pipelines.text.tokenization import load_tokenizer
from tempnet.contrastive.retrieval import cross_entropy
from tempnet.models.dual_encoder import DualEncoder
from tempnet.models.training_temperature import load_training_temperature

pytestmark = pytest.mark.cluster

Pairs = tuple[Path, list[np.ndarray], list[tuple[str, int]]]
NUM_IMAGES = 59
"""Number of images that can be read."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    directory = tmp_path_factory.mktemp("pairs")
    return directory, *make_pairs(directory, num_images=NUM_IMAGES + 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a random CLIPModel, whose own temperature is its `logit_scale`, and return its directory."""
    return make_clip(tmp_path_factory.mktemp("model"))


def words(model: str, source: Path, output: Path, *more: str) -> list[str]:
    options = "--folds 3 --gallery-images 3 --max-bad-share 0.1 --workers.cpus-per-worker 0.5"
    places = ["--model", model, "--images", str(source), "--output", str(output), "--storage", str(output.parent)]
    return ["headroom", *places, *options.split(), *more]


def results(output: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((output / "headroom.json").read_text())
    return values


def tables(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in output.glob("part-*.parquet")}


@torch.inference_mode()
def cross_entropy_by_model(model: str, images: list[np.ndarray], captions: list[tuple[str, int]]) -> float:
    """Return the cross-entropy of all pairs as one gallery, both directions together, without the job."""
    encoder, tokenizer = DualEncoder.from_pretrained(model), load_tokenizer(model, needs_eos=False)
    texts = []
    for text, _ in captions:
        tokens = tokenizer(text, truncation=True, max_length=encoder.config.num_text_tokens, return_tensors="pt")
        texts.append(encoder.encode_texts(tokens["input_ids"], tokens["attention_mask"]))
    rows = encoder.encode_images(torch.from_numpy(np.stack(images)))
    tau = torch.tensor([load_training_temperature(model) or 0.0], dtype=torch.float64)
    return cross_entropy(rows, torch.cat(texts), torch.tensor([image for _, image in captions]), (tau, tau))


def test_figures_are_those_of_the_model_in_one_gallery(
    cluster: dict[str, str], model: str, data: Pairs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, images, captions = data
    assert main(words(model, source, tmp_path / "out", "--gallery-images", "1000")) == 0
    values, shown = results(tmp_path / "out"), capsys.readouterr().out
    found = [values[name] for name in ("image_to_text", "text_to_image")]
    for part in found:
        assert (part["num_images"], part["num_pairs"]) == (len(images), len(captions)) == (NUM_IMAGES, len(captions))
        assert part["verdict"] in shown
    expected = cross_entropy_by_model(model, images, captions)
    assert sum(part["cross_entropy"] for part in found) / 2 == pytest.approx(expected, abs=1e-4)
    assert values["own_tau"] == pytest.approx(load_training_temperature(model))
    assert (tmp_path / "out" / "reliability.png").stat().st_size > 5000
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("headroom").experiment_id])
    gain = found[1]["per_caption"]["both"]["gain"]["mean"]
    assert run.data.metrics["text_to_image/both/gain_mnat"] == pytest.approx(1000 * gain)
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"headroom.json", "reliability.png"}


def test_a_job_that_was_killed_ends_with_the_same_figures_on_two_workers(
    cluster: dict[str, str], model: str, data: Pairs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, whole, parts = data[0], tmp_path / "whole", tmp_path / "parts"
    assert main(words(model, source, whole)) == 0
    expected = tables(whole)
    assert len(expected) == 2 * (NUM_IMAGES // 24) == 4
    run_until(lambda: bool(tables(parts)), "jobs.calibrate", words(model, source, parts), cluster)
    (parts / sorted(expected)[-1]).unlink(missing_ok=True)  # If writing was quick, everything was there.
    (parts / "headroom.json").unlink(missing_ok=True)
    kept = {
        path: path.stat().st_mtime_ns
        for path in [*(parts / "embeddings").iterdir(), *parts.glob("part-*00000.parquet")]
    }
    assert kept
    capsys.readouterr()
    assert main(words(model, source, parts, "--workers.num-workers", "2", "--batch-size", "16")) == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert "2 units, 2 of them encoded before" in capsys.readouterr().out
    assert tables(parts) == expected
    assert results(parts) == results(whole)


def test_a_model_without_a_temperature_is_told_so(
    cluster: dict[str, str], data: Pairs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_dual_encoder(tmp_path / "model")
    assert main(words(model, data[0], tmp_path / "out", "--tracking.no-enabled")) == 0
    shown, values = capsys.readouterr().out, results(tmp_path / "out")
    assert f"{model} holds no constant temperature that it was trained at" in shown
    assert (
        values["own_tau"] is values["image_to_text"]["ece"] is values["text_to_image"]["best_constant"]["gain"] is None
    )


def test_too_few_images_and_broken_embeddings_are_refused(
    cluster: dict[str, str], model: str, data: Pairs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: Any) -> str:
        with pytest.raises(SystemExit) as stop:
            main(words(*arguments))
        assert stop.value.code == 2
        assert not tables(arguments[2])
        return capsys.readouterr().err

    said = refused(model, data[0], tmp_path / "few", "--folds", str(NUM_IMAGES + 1))
    assert f"has {NUM_IMAGES} readable images with captions, fewer than folds = {NUM_IMAGES + 1}" in said
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = load_file(broken / "model.safetensors")
    weights["visual_projection.weight"].fill_(torch.nan)
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    said = refused(str(broken), data[0], tmp_path / "nan")
    assert f"model = '{broken}': the embeddings of {NUM_IMAGES} of {NUM_IMAGES} images (0 to {NUM_IMAGES - 1})" in said
    assert "are NaN or infinite" in said
