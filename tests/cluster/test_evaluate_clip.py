"""Test the evaluation of image–text models on Ray: its figures, an interruption, the table and MLflow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from clip_support import CLASSES, make_classes, make_clip, make_dual_encoder, make_pairs
from mlflow import MlflowClient
from transformers import AutoTokenizer, CLIPModel
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from jobs import evaluate_clip
from jobs.scoring import stages
from jobs.scoring.dual_encoders.prompts import read_templates
from jobs.scoring.dual_encoders.units import EmbeddingStore
from tempnet.models.dual_encoder import DualEncoder

pytestmark = [pytest.mark.cluster, pytest.mark.long]

# `Embed` is a function that embeds one image (S, S, 3) or one text as a vector (d,).
Embed = Any


def dual_encoder(path: str) -> tuple[Embed, Embed]:
    model, tokenizer = DualEncoder.from_pretrained(path), AutoTokenizer.from_pretrained(f"{path}/text_encoder")

    def text(text: str) -> torch.Tensor:
        tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=40)
        return model.encode_texts(tokens["input_ids"], tokens["attention_mask"])[0]

    return lambda image: model.encode_images(torch.from_numpy(image)[None])[0], text


def clip(path: str) -> tuple[Embed, Embed]:
    """Return functions that embed an image and a text with Transformers' own CLIPModel, without any code of ours."""
    model, tokenizer = CLIPModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)

    def image(image: np.ndarray) -> torch.Tensor:
        pixels = (torch.from_numpy(image) / 255 - torch.tensor(OPENAI_CLIP_MEAN)) / torch.tensor(OPENAI_CLIP_STD)
        features = model.visual_projection(model.vision_model(pixels.permute(2, 0, 1)[None]).pooler_output)[0]
        return features / features.norm()

    def text(text: str) -> torch.Tensor:
        tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=40)
        features = model.text_projection(model.text_model(**tokens).pooler_output)[0]
        return features / features.norm()

    return image, text


class Model(NamedTuple):
    path: str
    tokenizer: str
    """Directory of the tokenizer."""
    load: Callable[[str], tuple[Embed, Embed]]
    """Returns the functions that embed an image and a text, without the code of the evaluation."""


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Model]:
    """Save a dual encoder of ours and a CLIPModel, and return them by their titles in the evaluation."""
    ours, theirs = make_dual_encoder(tmp_path / "ours" / "export"), make_clip(tmp_path / "clip")
    return {"ours": Model(ours, f"{ours}/text_encoder", dual_encoder), "clip": Model(theirs, theirs, clip)}


@torch.no_grad()
def rows(embed: Embed, inputs: list[Any]) -> np.ndarray:
    return np.stack([embed(one).double().numpy() for one in inputs])


def found(scores: np.ndarray, belongs: np.ndarray, k: int) -> float:
    """Return the share of the rows that have a column that belongs to them among their k best columns."""
    best = np.argsort(-scores, axis=1)[:, :k]
    return float(np.take_along_axis(belongs, best, axis=1).any(1).mean())


def retrieval_figures(image: np.ndarray, text: np.ndarray, of_text: np.ndarray) -> dict[str, float]:
    """Return the recalls of retrieval between images (m, d) and their captions (n, d); of_text (n,) gives the images."""
    belongs = np.arange(len(image))[:, None] == of_text
    figures = {f"pairs/text_recall@{k}": found(image @ text.T, belongs, k) for k in (1, 5, 10)}
    figures |= {f"pairs/image_recall@{k}": found(text @ image.T, belongs.T, k) for k in (1, 5, 10)}
    return figures | {"pairs/mean_recall": float(np.mean(list(figures.values())))}


def zero_shot_figures(photo: np.ndarray, prompts: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the accuracies of photos (n, d) with labels (n,), from 18 prompts of every class, (3·18, d)."""
    classes = prompts.reshape(len(CLASSES), 18, -1).mean(1)
    classes /= np.linalg.norm(classes, axis=1, keepdims=True)
    is_class = labels[:, None] == np.arange(len(CLASSES))
    return {f"classes/top@{k}": found(photo @ classes.T, is_class, k) for k in (1, 3, 5)}


def share_cut(tokenizer: Any, texts: list[str]) -> float:
    """Return the share of texts that are longer than the 40 tokens that the models read."""
    lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
    return float(np.mean(np.array(lengths) > 40))


def interrupt_evaluation(arguments: list[str], *, num_units: int) -> None:
    """Run an evaluation that is interrupted when it is about to store a unit after the first `num_units`."""
    write, written = EmbeddingStore.write, []

    def interrupted(self: EmbeddingStore, *unit: Any) -> None:
        if len(written) == num_units:
            raise KeyboardInterrupt
        write(self, *unit)
        written.append(unit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddingStore, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            evaluate_clip.main(arguments)


def forbid_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it an error to give out work."""

    def no_work(*arguments: Any) -> None:
        raise AssertionError("work was given out")

    monkeypatch.setattr(stages, "_Schedule", no_work)


def logged_metrics(storage: Path) -> dict[str | None, dict[str, float]]:
    """Return name → metrics of every run of the evaluation in MLflow."""
    client = MlflowClient(f"sqlite:///{storage}/mlflow.db")
    experiment = client.get_experiment_by_name("clip-evaluation")
    assert experiment is not None
    return {run.info.run_name: run.data.metrics for run in client.search_runs([experiment.experiment_id])}


def words(models: dict[str, Model], pairs: Path, classes: Path, storage: Path) -> list[str]:
    """Return the arguments of an evaluation of all models by retrieval and by zero-shot classification."""
    return [
        "--models", *(model.path for model in models.values()), "--retrieval", f"pairs={pairs}",
        "--zero-shot", f"classes={classes}", "--templates", "cifar", "--max-bad-share", "0.1",
        "--storage", str(storage), "--name", "both", "--batch-size", "3", "--workers.num-workers", "2",
    ]  # fmt: skip


def test_an_interrupted_evaluation_goes_on_to_the_figures_of_one_process(
    cluster: dict[str, str],
    models: dict[str, Model],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("jobs.scoring.dual_encoders.units.NUM_IMAGES_PER_UNIT", 8)
    images, captions = make_pairs(tmp_path / "pairs")
    photos, labels = make_classes(tmp_path / "classes.tar")
    storage = tmp_path / "runs"
    arguments = words(models, tmp_path / "pairs", tmp_path / "classes.tar", storage)

    # The evaluation is interrupted after three units, and started again.
    interrupt_evaluation(arguments, num_units=3)
    store = storage / "both" / "embeddings"
    times = {path: path.stat().st_mtime_ns for path in store.iterdir()}
    assert len(times) == 3
    capsys.readouterr()
    assert evaluate_clip.main(arguments) == 0
    printed = capsys.readouterr().out
    # A model has 3 units of pairs' images, 3 of classes' images, 1 of captions and 1 of prompts.
    assert "16 units, 3 of them encoded before" in printed
    assert len(list(store.iterdir())) == 16
    assert times == {path: path.stat().st_mtime_ns for path in times}

    # All figures are those that one process computes, one image and one text at a time.
    results = json.loads((storage / "both" / "results.json").read_text())
    columns = {column["title"]: column["metrics"] for column in results["columns"]}
    assert list(columns) == ["ours", "clip"]
    prompts = [template.format(name.replace("_", " ")) for name in CLASSES for template in read_templates("cifar")]
    texts, of_text = [text for text, _ in captions], np.array([number for _, number in captions])
    for title, model in models.items():
        embed_image, embed_text = model.load(model.path)
        image, text = rows(embed_image, images), rows(embed_text, texts)
        expected = retrieval_figures(image, text, of_text)
        expected |= zero_shot_figures(rows(embed_image, photos), rows(embed_text, prompts), np.array(labels))
        expected |= {"pairs/num_images": 19, "pairs/num_texts": len(captions), "pairs/num_unreadable": 1}
        expected |= {"classes/num_images": 20, "classes/num_classes": 3, "classes/num_unreadable": 1}
        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer)
        for data, its_texts in (("pairs", texts), ("classes", prompts)):
            expected[f"{data}/share_cut"] = share_cut(tokenizer, its_texts)
        assert columns[title] == pytest.approx(expected, abs=1e-6)
        for name, reference in (("image", image), ("text", text)):
            assert nearest(store, reference) < 1e-6, name

    table = (storage / "both" / "results.md").read_text()
    assert table in printed
    for text in ("ours", "clip", "pairs image → text R@10", "pairs unreadable", "classes top-1"):
        assert text in table

    # In MLflow, the run of every model lies under the evaluation's. A second evaluation finds them and encodes nothing.
    forbid_work(monkeypatch)
    assert evaluate_clip.main(arguments) == 0
    assert table in capsys.readouterr().out
    metrics = logged_metrics(storage)
    assert set(metrics) == {"both", "ours", "clip"}
    for title, figures in columns.items():
        assert metrics[title] == pytest.approx({name.replace("@", "_at_"): value for name, value in figures.items()})


def nearest(store: Path, rows: np.ndarray) -> float:
    """Return the largest distance from any of the rows to the stored row nearest to it, in the maximum norm."""
    from safetensors.numpy import load_file

    stored = np.concatenate([load_file(path)["rows"] for path in store.iterdir()]).astype(np.float64)
    return float(np.abs(rows[:, None] - stored).max(-1).min(1).max())
