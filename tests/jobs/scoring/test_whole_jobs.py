"""Run whole scoring jobs in this process in place of Ray: their figures are those of their models, item by item.

`tests/cluster/test_scoring.py` runs such jobs on Ray.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from clip_support import (
    CLASSES,
    make_classes,
    make_clip,
    make_dual_encoder,
    make_dual_encoder_with_tempnets,
    make_image,
    make_pairs,
    png,
    write_tar,
)
from evaluation_support import LAMBADA, QUESTIONS, TEXT, BruteForce, make_export, write_lines
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from mlflow import MlflowClient
from prediction_support import save_tiny_model, some_texts
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from torch import Tensor

from jobs import analyse, evaluate_clip, evaluate_lm, predict_temperatures
from jobs.scoring import units as units_module
from jobs.scoring.dual_encoders import encoder as encoder_module
from jobs.scoring.dual_encoders import evaluate as pairs_evaluation
from jobs.scoring.dual_encoders.evaluate import read_templates
from jobs.scoring.headroom import pairs as measurement
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.headroom.job import read_measured
from jobs.scoring.language_models.windows import num_words, read_lambada, wikitext_pages
from jobs.scoring.temperatures.config import PredictTemperaturesConfig
from jobs.scoring.temperatures.texts import Predictor, resolve_settings
from jobs.scoring.units import ScoringFailedError, UnitStore, Worker, read_unit
from pipelines.images.captions import CaptionNoise
from pipelines.images.temperature_table import read_table
from pipelines.storage import write_json
from pipelines.text.tokenization import load_tokenizer
from tempnet.contrastive.retrieval import accuracy, class_embeddings, recall
from tempnet.intervals import mean_interval
from tempnet.models.dual_encoder import DualEncoder, load_pair_tempnets, load_training_temperature
from tests.jobs.scoring.evaluation_cases import EXAMPLES

Pairs = tuple[Path, list[np.ndarray], list[str], list[int]]
"""Directory of images with captions, the readable images, their captions, and the image of each caption."""


def rows_here(units: Sequence[Any], model: Any, read: Any, pool: Any, store: UnitStore | None) -> Iterator[Any]:
    """Take the place of `run_rows` in this process: the same reader and the same worker, one row after the other."""
    worker = Worker(model, store, 1)
    for number, unit in enumerate(units):
        row = units_module._Row(unit=number, item=unit, num_items=None if read else 1)
        for batch in read_unit(row.in_batch(), read) if read else [row.in_batch()]:
            yield from worker(batch)["item"]


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep jobs from Ray, and cut their work into small units."""
    monkeypatch.setattr(units_module, "run_rows", rows_here)
    for module in (units_module, pairs_evaluation, encoder_module):
        monkeypatch.setattr(module, "start_ray", lambda: None)
        monkeypatch.setattr(module, "check_pool", lambda pool, reads: None, raising=False)
    monkeypatch.setattr("jobs.scoring.language_models.windows.NUM_TOKENS_PER_SLICE", 48)
    monkeypatch.setattr("jobs.scoring.dual_encoders.encoder.NUM_IMAGES_PER_UNIT", 8)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    directory = tmp_path_factory.mktemp("pairs")
    images, captions = make_pairs(directory, num_images=50)
    return directory, images, [text for text, _ in captions], [image for _, image in captions]


@pytest.fixture(scope="module")
def dual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dual_encoder_with_tempnets(tmp_path_factory.mktemp("dual") / "export")


def results_of(output: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((output / "results.json").read_text())
    return values


@torch.inference_mode()
def embed(model: str | Path, images: list[np.ndarray], texts: list[str]) -> tuple[Tensor, Tensor]:
    """Return the rows (m, d) of images and (n, d) of texts, one text at a time."""
    encoder, place = DualEncoder.from_pretrained(model), Path(model)
    place = place / "text_encoder" if (place / "text_encoder").is_dir() else place
    tokenizer, rows = load_tokenizer(str(place), needs_eos=False), []
    for text in texts:
        tokens = tokenizer(text, truncation=True, max_length=encoder.config.num_text_tokens, return_tensors="pt")
        rows.append(encoder.encode_texts(tokens["input_ids"], tokens["attention_mask"]))
    return encoder.encode_images(torch.from_numpy(np.stack(images))), torch.cat(rows)


def test_columns_of_language_models_beside_a_task_that_fails(
    export: str, brute: BruteForce, tmp_path: Path, tracking_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "tasks").mkdir()
    lambada = write_lines(tmp_path / "lambada.jsonl", LAMBADA)
    write_lines(tmp_path / "arc_easy_test.jsonl", QUESTIONS)
    task, good = tmp_path / "tasks" / "own.yaml", (EXAMPLES / "local_arc_easy.yaml").read_text()
    task.write_text(good.replace("choices\n", "no_field\n"))
    words = (
        f"--models {export} --temperatures one tempnet --wikitext {tmp_path}/text.txt --lambada {lambada} --batch-size 3 "
        f"--tasks local_arc_easy --include-path {tmp_path}/tasks --data-dir {tmp_path} --storage {tmp_path} --name out "
        f"--tracking.uri {tracking_uri} --tracking.experiment columns"
    ).split()
    assert evaluate_lm.main(words) == 1
    said = capsys.readouterr().out
    titles = {name: f"{Path(export).name} · {name}" for name in ("one", "tempnet")}
    failed = {title.replace(" · ", " · local_arc_easy · ") for title in titles.values()}
    assert all(f"  FAILED    {title}: " in said for title in failed)
    assert "| wikitext word perplexity" in said
    results = results_of(tmp_path / "out")
    assert results["failed"].keys() == failed
    columns = {column["title"]: column["metrics"] for column in results["columns"]}
    assert list(columns) == list(titles.values())

    pages = wikitext_pages(TEXT)
    rows = [row for page in pages for row in brute.document(wikitext_detokenizer({"page": page}), "tempnet")]
    nll, tau, entropy, _ = (np.array(values) for values in zip(*rows, strict=True))
    answers = [
        brute.continuation([brute.start, *brute.ids(context)], brute.ids(f" {word}"), "tempnet")
        for context, word in read_lambada(lambada, 0)
    ]
    expected = {
        "wikitext/word_perplexity": math.exp(nll.sum() / sum(map(num_words, pages))),
        "wikitext/token_perplexity": math.exp(nll.mean()),
        "wikitext/tau_mean": tau.mean(),
        "wikitext/tau_std": tau.std(),
        "wikitext/tau_entropy_spearman": spearmanr(tau, entropy).statistic,
        "lambada/perplexity": math.exp(sum(row[0] for rows in answers for row in rows) / len(answers)),
        "lambada/acc": sum(all(row[3] for row in rows) for rows in answers) / len(answers),
    }
    found = columns[titles["tempnet"]]
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert found.keys() - columns[titles["one"]].keys() > {"wikitext/tau_mean", "wikitext/tau_std"}

    # Once the task is mended, only that task is run; MLflow shows a run for every column under that of the evaluation.
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "units").glob("*.json")}
    task.write_text(good)
    assert evaluate_lm.main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert (tmp_path / "out" / "results.md").read_text() in capsys.readouterr().out
    client = MlflowClient(tracking_uri)
    runs = client.search_runs([client.get_experiment_by_name("columns").experiment_id])
    (parent,) = [run for run in runs if (run.info.run_name, run.info.status) == ("out", "FINISHED")]
    assert sum((run.info.run_name, run.info.status) == ("out", "FAILED") for run in runs) == 1
    assert {file.path for file in client.list_artifacts(parent.info.run_id)} == {"results.md", "results.json"}
    children = {run.info.run_name: run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id}
    columns = results_of(tmp_path / "out")["columns"]
    assert children.keys() == {column["title"] for column in columns}
    for column in columns:
        run = children[column["title"]]
        assert (run.info.status, run.data.params["temperature"]) == ("FINISHED", column["temperature"])
        assert run.data.metrics == pytest.approx(column["metrics"])


def test_recalls_and_accuracies_of_image_text_models(pairs: Pairs, tmp_path: Path) -> None:
    source, images, captions, owners = pairs
    photos, labels = make_classes(tmp_path / "classes.tar")
    models = make_dual_encoder(tmp_path / "ours" / "export"), make_clip(tmp_path / "clip")
    words = (
        f"--models {models[0]} {models[1]} --retrieval p={source} --zero-shot c={tmp_path}/classes.tar --templates cifar "
        f"--max-bad-share 0.1 --batch-size 3 --storage {tmp_path} --name out --tracking.no-enabled"
    )
    assert evaluate_clip.main(words.split()) == 0
    prompts = [template.format(name.replace("_", " ")) for name in CLASSES for template in read_templates("cifar")]
    for column, model in zip(results_of(tmp_path / "out")["columns"], models, strict=True):
        image, text = embed(model, images, captions)
        photo, prompt = embed(model, photos, prompts)
        classes = class_embeddings(prompt.unflatten(0, (len(CLASSES), -1)))
        counts = {"p/num_images": 49, "p/num_texts": len(captions), "p/num_unreadable": 1}
        counts |= {"c/num_images": 20, "c/num_classes": 3, "c/num_unreadable": 1}
        expected = {f"p/{name}": value for name, value in recall(image, text, torch.tensor(owners)).items()} | counts
        expected |= {f"c/{name}": value for name, value in accuracy(photo, classes, torch.tensor(labels)).items()}
        assert {name: column["metrics"][name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_temperatures_of_archives_are_in_the_order_of_their_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, model = some_texts(12, seed=3), save_tiny_model(tmp_path / "model")
    (tmp_path / "source").mkdir()
    write_lines(tmp_path / "source" / "0.jsonl", [{"text": text} for text in texts[:7]])
    with Path(write_lines(tmp_path / "source" / "1.jsonl", [{"text": text} for text in texts[7:]])).open("a") as file:
        file.write("no JSON\n")
    words = f"--model {model} --text {tmp_path}/source --output {tmp_path}/out --per-token --part-characters 300"
    assert predict_temperatures.main([*words.split(), "--max-bad-share", "0.1"]) == 0
    files = sorted((tmp_path / "out").glob("part-*.parquet"))
    assert len(files) > 4
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert [row["key"] for row in rows] == [f"{i // 7}.jsonl:{i % 7}" for i in range(12)]
    assert [row["source"] for row in rows] == ["0.jsonl"] * 7 + ["1.jsonl"] * 5
    tokenizer = load_tokenizer(str(model))
    ids = [np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32) for text in texts]
    assert [row["token_ids"] for row in rows] == [array.tolist() for array in ids]
    config = PredictTemperaturesConfig(model=str(model), text=str(tmp_path / "source"), output="unused")
    predictions = Predictor(resolve_settings(config)).predict(ids)
    for row, prediction in zip(rows, predictions, strict=True):
        np.testing.assert_allclose(row["tau"], prediction.tau, atol=1e-5)
    summary = json.loads((tmp_path / "out" / "_summary.json").read_text())
    tau = np.concatenate([prediction.tau for prediction in predictions])
    assert (summary["num_documents"], summary["num_tokens"]) == (12, len(tau))
    assert (summary["tau_mean"], summary["problems"]) == (pytest.approx(tau.mean(), abs=1e-6), {"invalid_json": 1})
    # A part that is missing is made again, and no other.
    times = {file: file.stat().st_mtime_ns for file in files}
    files[2].unlink()
    assert predict_temperatures.main([*words.split(), "--max-bad-share", "0.1"]) == 0
    assert [file for file in files if file.stat().st_mtime_ns != times[file]] == [files[2]]
    assert [row for file in files for row in pq.read_table(file).to_pylist()] == rows
    with pytest.raises(SystemExit):  # A finished job still checks a stricter share.
        predict_temperatures.main([*words.split(), "--max-bad-share", "0"])
    assert "max_bad_share = 0.00%" in capsys.readouterr().err


def test_temperatures_of_pairs_are_those_of_their_embeddings(
    pairs: Pairs, dual: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, images, captions, owners = pairs
    words = f"--model {dual} --images {source} --output {tmp_path}/out --part-pairs 7 --batch-size 4".split()
    with pytest.raises(SystemExit):  # Too many damaged images are refused before the models are loaded.
        predict_temperatures.main([*words, "--max-bad-share", "0.01", "--with-embeddings"])
    assert "max_bad_share = 1.00%" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("part-*"))
    words += ["--max-bad-share", "0.1"]
    assert predict_temperatures.main([*words, "--with-embeddings"]) == 0
    files = sorted((tmp_path / "out").glob("part-*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert [row["id"] for row in rows] == list(range(len(captions)))
    assert [row["caption"] for row in rows] == captions
    summary = json.loads((tmp_path / "out" / "_summary.json").read_text())
    assert (summary["problems"], summary["num_parts"]) == ({"corrupt_image": 1}, len(files))
    image, text = embed(dual, images, captions)
    for name, network, expected in zip(
        ("image", "text"), load_pair_tempnets(str(dual)), (image[owners], text), strict=True
    ):
        np.testing.assert_allclose([row[f"{name}_embedding"] for row in rows], expected, atol=1e-5)
        with torch.inference_mode():
            tau = network(expected).numpy()
        np.testing.assert_allclose([row[f"tau_{name}"] for row in rows], tau, atol=1e-5)
        assert summary[f"tau_{name}_std"] == pytest.approx(tau.std(), rel=1e-4)
        assert tau.std() > 1e-3
    times = {file: file.stat().st_mtime_ns for file in files}
    files[1].unlink()
    assert predict_temperatures.main([*words, "--with-embeddings"]) == 0
    assert [file for file in files if file.stat().st_mtime_ns != times[file]] == [files[1]]
    with pytest.raises(SystemExit):
        predict_temperatures.main(words)
    assert "with_embeddings" in capsys.readouterr().err


def test_headroom_of_pairs_is_measured_of_every_embedding(
    pairs: Pairs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, images, captions, owners = pairs
    models = make_clip(tmp_path / "clip"), make_dual_encoder(tmp_path / "dual")

    def measure(model: str, **changes: Any) -> list[measurement.Question]:
        fields = {"images": str(source), "gallery_images": 3, "folds": 3, "max_bad_share": 0.1} | changes
        output = tmp_path / "out" / model.rsplit("/", 1)[-1]
        output.mkdir(parents=True, exist_ok=True)
        return measurement.PairMeasurement.resolve(Headroom(model=model, output=str(output), **fields)).measure(
            str(output)
        )

    for model in models:
        expected = dict(zip(("image_to_text", "text_to_image"), embed(model, images, captions), strict=True))
        expected["image_to_text"] = expected["image_to_text"][owners]
        for question in measure(model):
            assert len(question.files) == 2
            found = list(read_measured(str(tmp_path / "out" / Path(model).name), question.files))
            hidden = torch.cat([tokens.hidden for tokens, _ in found]).float()
            torch.testing.assert_close(hidden, expected[question.name], atol=2e-3, rtol=0)
            assert np.concatenate([images for _, images in found]).tolist() == owners
            if own := load_training_temperature(model):
                assert (question.unit_tau, question.own_name) == (own, f"the model's τ = {own:.4g}")
            else:
                assert question.own_name == ""
    assert f"{models[1]} holds no constant temperature that it was trained at" in capsys.readouterr().out
    with pytest.raises(ValueError, match="has 49 readable images with captions, fewer than folds = 50"):
        measure(models[0], folds=50)
    weights = load_file(tmp_path / "clip" / "model.safetensors")
    weights["visual_projection.weight"].fill_(torch.nan)
    save_file(weights, tmp_path / "clip" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ScoringFailedError, match=r"images 0–7: .* the embeddings of 8 of 8 images are NaN or infinite"):
        measure(models[0])


def test_perplexity_over_tau_max_is_the_mean_over_the_models(tmp_path: Path) -> None:
    models = [make_export(tmp_path / name / "export", seed=seed) for seed, name in enumerate("ab")]
    (tmp_path / "text.txt").write_text(TEXT)
    words = f"tau-max --wikitext {tmp_path}/text.txt --tau-max 0.8 1.4 --output {tmp_path}/out --tracking.no-enabled"
    assert analyse.main([*words.split(), "--models", *models]) == 0
    columns = results_of(tmp_path / "out" / "evaluation")["columns"]
    for point, tau_max in zip(results_of(tmp_path / "out")["points"], ("0.8", "1.4"), strict=True):
        for figure, name in (("word perplexity", "wikitext/word_perplexity"), ("mean τ", "wikitext/tau_mean")):
            of_models = [row["metrics"][name] for row in columns if row["temperature"] == f"tempnet:{tau_max}"]
            mean, half = mean_interval(of_models)
            assert point[figure] == pytest.approx({"mean": mean, "half_width": half}, rel=1e-6)
    assert (tmp_path / "out" / "tau_max.png").is_file()
    before = results_of(tmp_path / "out")["settings"]
    (tmp_path / "text.txt").write_text(f"{TEXT} more")
    assert analyse.main([*words.split(), "--models", *models]) == 0
    assert results_of(tmp_path / "out")["settings"] != before, "another text is another run in MLflow"


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, members = np.random.default_rng(0), dict[str, bytes | None]()
    for pair in range(24):
        members[f"{pair:03d}.png"] = png(make_image(rng))
        members[f"{pair:03d}.json"] = json.dumps({"caption": f"a red tree {pair}", "n": 7 * pair % 24}).encode()
    directory = tmp_path_factory.mktemp("numbered")
    write_tar(directory / "0.tar", members)
    return directory


def test_rank_correlations_over_rho_are_those_of_scipy(numbered: Path, tmp_path: Path) -> None:
    for seed, rho in enumerate((2.0, 0.5)):
        export = make_dual_encoder_with_tempnets(tmp_path / "sweep" / f"rho-{rho}" / "export", seed=seed)
        write_json(str(export.parent / "outcome.json"), {"rho": rho, "num_pairs_train": 24, "export": str(export)})
    words = (
        f"phase --sweep {tmp_path}/sweep --images {numbered} --label n --output {tmp_path}/out --tracking.no-enabled"
    )
    assert analyse.main(words.split()) == 0
    for point, rho in zip(results_of(tmp_path / "out")["points"], (0.5, 2.0), strict=True):
        assert point["ρ"] == rho
        table = read_table(str(tmp_path / "out" / f"rho-{rho}"), ["key", "tau_image", "tau_text"]).to_pydict()
        numbers = [7 * int(key) % 24 for key in table["key"]]
        for noun, column in (("images", "tau_image"), ("captions", "tau_text")):
            expected = spearmanr(table[column], numbers).statistic
            assert point[f"Spearman(τ of {noun}, n)"]["mean"] == pytest.approx(expected, abs=1e-6)


def test_noisy_captions_have_the_temperature_of_what_the_noise_made_of_them(
    numbered: Path, dual: Path, tmp_path: Path
) -> None:
    words = (
        f"noise --model {dual} --images {numbered} --label n --share 0.4 --output {tmp_path}/out --tracking.no-enabled"
    )
    assert analyse.main(words.split()) == 0
    originals = [f"a red tree {pair}" for pair in range(24)]
    captions = [CaptionNoise(share=0.4, seed=42).apply(text, pair)[0] for pair, text in enumerate(originals)]
    is_noisy = np.array(captions) != np.array(originals)
    assert 2 <= is_noisy.sum() <= 22
    rows = embed(dual, [make_image(np.random.default_rng(0))], captions)[1]
    with torch.inference_mode():
        tau = load_pair_tempnets(str(dual))[1](rows).numpy()
    for group, chosen in zip(results_of(tmp_path / "out")["groups"], (~is_noisy, is_noisy), strict=False):
        assert group["captions"]["mean"] == pytest.approx(tau[chosen].mean(), rel=1e-4)
    assert (tmp_path / "out" / "noise.png").is_file()
