"""Test the evaluation of image–text models on Ray: its figures, an interruption, the table and MLflow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


@torch.no_grad()
def rows(embed: Embed, inputs: list[Any]) -> np.ndarray:
    return np.stack([embed(one).double().numpy() for one in inputs])


def found(scores: np.ndarray, belongs: np.ndarray, k: int) -> float:
    """Return the share of the rows that have a column that belongs to them among their k best columns."""
    best = np.argsort(-scores, axis=1)[:, :k]
    return float(np.take_along_axis(belongs, best, axis=1).any(1).mean())


def test_an_interrupted_evaluation_goes_on_to_the_figures_of_one_process(
    cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("jobs.scoring.dual_encoders.units.NUM_IMAGES_PER_UNIT", 8)
    images, captions = make_pairs(tmp_path / "pairs")
    photos, labels = make_classes(tmp_path / "classes.tar")
    models = {
        "ours": (make_dual_encoder(tmp_path / "ours" / "export"), dual_encoder),
        "clip": (make_clip(tmp_path / "clip"), clip),
    }
    storage = tmp_path / "runs"
    arguments = [
        "--models", *(path for path, _ in models.values()), "--retrieval", f"pairs={tmp_path / 'pairs'}",
        "--zero-shot", f"classes={tmp_path / 'classes.tar'}", "--templates", "cifar", "--max-bad-share", "0.1",
        "--storage", str(storage), "--name", "both", "--batch-size", "3", "--workers.num-workers", "2",
    ]  # fmt: skip

    # The evaluation is interrupted after three units, and started again.
    with monkeypatch.context() as patch:
        write, written = EmbeddingStore.write, []

        def interrupted(self: EmbeddingStore, *unit: Any) -> None:
            if len(written) == 3:
                raise KeyboardInterrupt
            write(self, *unit)
            written.append(unit)

        patch.setattr(EmbeddingStore, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            evaluate_clip.main(arguments)
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
    of_text = np.array([number for _, number in captions])
    for title, (path, load) in models.items():
        embed_image, embed_text = load(path)
        image, text = rows(embed_image, images), rows(embed_text, [text for text, _ in captions])
        belongs = np.arange(len(images))[:, None] == of_text
        classes = rows(embed_text, prompts).reshape(len(CLASSES), 18, -1).mean(1)
        classes /= np.linalg.norm(classes, axis=1, keepdims=True)
        photo = rows(embed_image, photos)
        is_class = np.array(labels)[:, None] == np.arange(len(CLASSES))
        expected = {f"pairs/text_recall@{k}": found(image @ text.T, belongs, k) for k in (1, 5, 10)}
        expected |= {f"pairs/image_recall@{k}": found(text @ image.T, belongs.T, k) for k in (1, 5, 10)}
        expected["pairs/mean_recall"] = float(np.mean(list(expected.values())))
        expected |= {f"classes/top@{k}": found(photo @ classes.T, is_class, k) for k in (1, 3, 5)}
        expected |= {"pairs/num_images": 19, "pairs/num_texts": len(captions), "pairs/num_unreadable": 1}
        tokenizer = AutoTokenizer.from_pretrained(f"{path}/text_encoder" if title == "ours" else path)
        for data, its_texts in (("pairs", [text for text, _ in captions]), ("classes", prompts)):
            lengths = [len(tokenizer(text)["input_ids"]) for text in its_texts]
            expected[f"{data}/share_cut"] = float(np.mean(np.array(lengths) > 40))
        expected |= {"classes/num_images": 20, "classes/num_classes": 3, "classes/num_unreadable": 1}
        assert columns[title] == pytest.approx(expected, abs=1e-6)
        for name, reference in (("image", image), ("text", text)):
            assert nearest(store, reference) < 1e-6, name

    table = (storage / "both" / "results.md").read_text()
    assert table in printed
    for text in ("ours", "clip", "pairs image → text R@10", "pairs unreadable", "classes top-1"):
        assert text in table

    # In MLflow, the run of every model lies under the evaluation's. A second evaluation finds them and encodes nothing.
    def no_work(*arguments: Any) -> None:
        raise AssertionError("work was given out")

    monkeypatch.setattr(stages, "_Schedule", no_work)
    assert evaluate_clip.main(arguments) == 0
    assert table in capsys.readouterr().out
    client = MlflowClient(f"sqlite:///{storage}/mlflow.db")
    experiment = client.get_experiment_by_name("clip-evaluation")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"both", "ours", "clip"}
    for title, metrics in columns.items():
        logged = {name.replace("@", "_at_"): value for name, value in metrics.items()}
        assert runs[title].data.metrics == pytest.approx(logged)


def nearest(store: Path, rows: np.ndarray) -> float:
    """Return the largest distance from any of the rows to the stored row nearest to it, in the maximum norm."""
    from safetensors.numpy import load_file

    stored = np.concatenate([load_file(path)["rows"] for path in store.iterdir()]).astype(np.float64)
    return float(np.abs(rows[:, None] - stored).max(-1).min(1).max())
