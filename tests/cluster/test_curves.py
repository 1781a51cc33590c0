"""Test the analyses of curves on Ray: their figures are those of a brute-force score and of scipy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clip_support import make_dual_encoder_with_tempnets, make_image, png, write_tar
from evaluation_support import TEXT, BruteForce, make_export
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from scipy.stats import spearmanr

from jobs.analyse import main
from jobs.scoring.language_models.windows import num_words, wikitext_pages
from pipelines.images.captions import CaptionNoise
from pipelines.images.temperature_table import read_table
from pipelines.text.tokenization import load_tokenizer
from tempnet.models.dual_encoder import DualEncoder, load_pair_tempnets
from tempnet.statistics import mean_interval

pytestmark = pytest.mark.cluster


def read_points(output: Path) -> list[dict[str, Any]]:
    """Return the points of a curve, in the order of the quantity that was varied."""
    points: list[dict[str, Any]] = json.loads((output / "results.json").read_text())["points"]
    return points


def make_images(directory: Path, *, num_images: int = 12) -> Path:
    """Write a tar of images, each with a caption and a number, and return its directory."""
    rng = np.random.default_rng(0)
    members: dict[str, bytes | None] = {}
    for number in range(num_images):
        members[f"{number:03d}.png"] = png(make_image(rng))
        record = {"caption": f"photo of a {('red', 'green')[number % 2]} tree {number}", "frequency": frequency(number)}
        members[f"{number:03d}.json"] = json.dumps(record).encode()
    write_tar(directory / "0.tar", members)
    return directory


def frequency(number: int) -> int:
    return (7 * number) % 12


def test_perplexity_over_tau_max(cluster: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exports = [make_export(tmp_path / name / "export", seed=seed) for seed, name in enumerate("ab")]
    text, output = tmp_path / "text.txt", tmp_path / "output"
    text.write_text(TEXT)
    arguments = [
        "tau-max", "--models", *exports, "--wikitext", str(text), "--tau-max", "0.8", "1.4", "--output", str(output),
        "--storage", str(tmp_path / "store"),
    ]  # fmt: skip
    assert main(arguments) == 0
    pages = wikitext_pages(TEXT)
    words = sum(num_words(page) for page in pages)
    for point, value in zip(read_points(output), (0.8, 1.4), strict=True):
        perplexities, means = [], []
        for export in exports:
            model = BruteForce(export)
            scores = [
                score
                for page in pages
                for score in model.document(wikitext_detokenizer({"page": page}), f"tempnet:{value}")
            ]
            perplexities.append(math.exp(sum(score[0] for score in scores) / words))
            means.append(float(np.mean([score[1] for score in scores])))
        for name, values in (("word perplexity", perplexities), ("mean τ", means)):
            mean, half = mean_interval(values)
            assert point[name] == {
                "mean": pytest.approx(mean, rel=1e-4),
                "half_width": pytest.approx(half, rel=1e-2),
            }, (name, value)
    assert "2 models" in capsys.readouterr().out
    assert (output / "tau_max.png").is_file()


def test_the_rank_correlation_with_a_number_over_rho(
    cluster: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = make_images(tmp_path / "images")
    rhos = {"rho0.5": 0.5, "rho2": 2.0}
    for seed, (name, rho) in enumerate(rhos.items()):
        export = make_dual_encoder_with_tempnets(tmp_path / "sweep" / name / "export", seed=seed)
        outcome = {"rho": rho, "num_pairs_train": 12, "export": str(export)}
        (tmp_path / "sweep" / name / "outcome.json").write_text(json.dumps(outcome))
    output = tmp_path / "output"
    arguments = [
        "phase", "--sweep", str(tmp_path / "sweep"), "--images", str(images), "--label", "frequency",
        "--output", str(output), "--storage", str(tmp_path / "store"),
    ]  # fmt: skip
    assert main(arguments) == 0
    points = read_points(output)
    assert [point["ρ"] for point in points] == [0.5, 2.0]
    for point, name in zip(points, rhos, strict=True):
        table = read_table(str(output / name), ["key", "tau_image", "tau_text"])
        frequencies = [frequency(int(key)) for key in table["key"].to_pylist()]
        for noun, column in (("images", "tau_image"), ("captions", "tau_text")):
            expected = spearmanr(table[column].to_numpy(), frequencies).statistic
            assert point[f"Spearman(τ of {noun}, frequency)"]["mean"] == pytest.approx(expected, abs=1e-6)
    capsys.readouterr()
    assert main(arguments) == 0  # finds everything done
    assert capsys.readouterr().out.count("holds 1 of 1 parts") == 2


def test_temperatures_of_noisy_captions(cluster: dict[str, str], tmp_path: Path) -> None:
    images = make_images(tmp_path / "images", num_images=24)
    export = make_dual_encoder_with_tempnets(tmp_path / "export")
    output = tmp_path / "output"
    arguments = [
        "noise", "--model", str(export), "--images", str(images), "--label", "frequency", "--share", "0.4",
        "--output", str(output), "--storage", str(tmp_path / "store"),
    ]  # fmt: skip
    assert main(arguments) == 0
    table = read_table(str(output / "temperatures"), ["id", "caption", "tau_image", "tau_text"]).to_pydict()
    noise = CaptionNoise(share=0.4, seed=42)
    originals = [f"photo of a {('red', 'green')[number % 2]} tree {number}" for number in range(24)]
    assert table["caption"] == [noise.apply(text, pair)[0] for pair, text in enumerate(originals)]
    is_noisy = np.array([caption != text for caption, text in zip(table["caption"], originals, strict=True)])
    assert 2 <= is_noisy.sum() <= 22
    model, (_, network) = DualEncoder.from_pretrained(export), load_pair_tempnets(str(export))
    tokenizer = load_tokenizer(str(export / "text_encoder"), needs_eos=False)
    tokens = [tokenizer(caption, return_tensors="pt") for caption in table["caption"]]
    with torch.inference_mode():
        rows = [model.encode_texts(one["input_ids"], one["attention_mask"]) for one in tokens]
        tau = network(torch.cat(rows)).numpy()
    assert table["tau_text"] == pytest.approx(tau, rel=1e-4)
    results = json.loads((output / "results.json").read_text())
    assert results["groups"][1]["captions"]["mean"] == pytest.approx(float(tau[is_noisy].mean()), rel=1e-4)
    assert (output / "noise.png").is_file()
