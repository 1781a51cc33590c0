"""Test the prediction of image–text pairs' temperatures with Ray Data: they are right, however the job is run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from clip_support import make_dual_encoder_with_tempnets, make_pairs
from support import run_until

from jobs.predict_temperatures import main
from jobs.scoring.config import PoolSection
from jobs.scoring.temperatures.pairs.config import PredictPairTemperaturesConfig
from jobs.scoring.temperatures.pairs.job import predict_pairs
from jobs.scoring.temperatures.pairs.settings import resolve_settings
from jobs.scoring.temperatures.texts.settings import claim_output
from pipelines.images.manifest import ImageManifest
from pipelines.images.temperature_table import read_temperatures
from pipelines.text.tokenization import load_tokenizer
from tempnet.models.dual_encoder import DualEncoder
from tempnet.network import TempNet

pytestmark = [pytest.mark.cluster, pytest.mark.long]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a dual encoder with TempNets, and return its directory."""
    return make_dual_encoder_with_tempnets(tmp_path_factory.mktemp("model") / "export")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray], list[tuple[str, int]]]:
    directory = tmp_path_factory.mktemp("pairs")
    return directory, *make_pairs(directory)


def words(model: Path, source: Path, output: Path) -> list[str]:
    options = "--part-pairs 7 --max-bad-share 0.1 --batch-size 4 --workers.cpus-per-worker 0.5"
    return ["--model", str(model), "--images", str(source), "--output", str(output), *options.split()]


def two_workers(model: Path, source: Path, output: Path) -> PredictPairTemperaturesConfig:
    """Return the configuration of `words`, with the embeddings and with two workers."""
    return PredictPairTemperaturesConfig(
        model=str(model),
        images=str(source),
        output=str(output),
        part_pairs=7,
        max_bad_share=0.1,
        with_embeddings=True,
        batch_size=4,
        workers=PoolSection(num_workers=2, cpus_per_worker=0.5),
    )


def tables(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in output.glob("part-*.parquet")}


def interrupt_job(model: Path, source: Path, output: Path, environment: dict[str, str]) -> None:
    """Run the job in a process of its own, which is killed as soon as it has written a table."""
    arguments = [*words(model, source, output), "--with-embeddings"]
    run_until(lambda: bool(tables(output)), "jobs.predict_temperatures", arguments, environment)


@torch.inference_mode()
def compute_by_models(
    model: Path, images: list[np.ndarray], captions: list[tuple[str, int]]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the embeddings and temperatures of the images and the texts of all pairs, without the job.

    The images already have the model's size; the captions are encoded one by one.
    """
    encoder, tokenizer = (
        DualEncoder.from_pretrained(model),
        load_tokenizer(str(model / "text_encoder"), needs_eos=False),
    )
    networks = [TempNet.from_pretrained(model / name) for name in ("tempnet_image", "tempnet_text")]
    image = encoder.encode_images(torch.from_numpy(np.stack(images)))[[number for _, number in captions]]
    tokens = [
        tokenizer(text, truncation=True, max_length=encoder.config.num_text_tokens, return_tensors="pt")
        for text, _ in captions
    ]
    text = torch.cat([encoder.encode_texts(one["input_ids"], one["attention_mask"]) for one in tokens])
    return {
        "image": (image.numpy(), networks[0](image).numpy()),
        "text": (text.numpy(), networks[1](text).numpy()),
    }


def test_tables_hold_the_temperatures_of_the_models_however_the_job_is_run(
    cluster: dict[str, str],
    model: Path,
    data: tuple[Path, list[np.ndarray], list[tuple[str, int]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, images, captions = data
    assert main([*words(model, source, tmp_path / "whole"), "--with-embeddings"]) == 0
    printed = capsys.readouterr().out
    whole = tables(tmp_path / "whole")
    rows = [row for name in sorted(whole) for row in pq.read_table(tmp_path / "whole" / name).to_pylist()]
    assert len(whole) > 6
    assert [row["id"] for row in rows] == list(range(len(captions)))
    assert [row["caption"] for row in rows] == [text for text, _ in captions]

    # The models alone give the same values.
    for name, (expected_rows, expected_tau) in compute_by_models(model, images, captions).items():
        stored = np.array([row[f"{name}_embedding"] for row in rows])
        np.testing.assert_allclose(stored, expected_rows, atol=1e-5)
        tau = np.array([row[f"tau_{name}"] for row in rows])
        np.testing.assert_allclose(tau, expected_tau, atol=1e-5)
        assert tau.std() > 1e-3
        assert f"tau_{name}".ljust(10) + f"mean {tau.mean():.4f}, standard deviation {tau.std():.4f}" in printed
    summary = json.loads((tmp_path / "whole" / "_summary.json").read_text())
    assert summary["problems"] == {"corrupt_image": 1}

    # A job that is killed after some parts and continued by two workers keeps these parts and writes the same bytes.
    interrupt_job(model, source, tmp_path / "parts", cluster)
    config = two_workers(model, source, tmp_path / "parts")
    settings = resolve_settings(config)
    claim_output(config.output, settings.record())

    # If writing was quick, all parts exist, so the last one is deleted.
    (tmp_path / "parts" / sorted(whole)[-1]).unlink(missing_ok=True)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts").glob("part-*.parquet")}
    assert times
    lines: list[str] = []
    continued = predict_pairs(settings, config.output, config.workers, say=lines.append)
    assert tables(tmp_path / "parts") == whole
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert f"holds {len(times)} of {len(whole)} parts" in lines[1]
    assert {name: continued[name] for name in summary} == summary
    assert predict_pairs(settings, config.output, config.workers, say=lines.append)["num_pairs_now"] == 0

    # Training with given temperatures reads the table in the order of the data set.
    (prepared,) = (tmp_path / "whole" / "_prepared").iterdir()
    tau = read_temperatures(str(tmp_path / "whole"), ImageManifest.load(str(prepared)))
    np.testing.assert_array_equal(
        tau, np.array([[row[name] for row in rows] for name in ("tau_image", "tau_text")], np.float32)
    )

    # A job that would write other tables to the same output is refused.
    with pytest.raises(SystemExit):
        main(words(model, source, tmp_path / "whole"))
    assert "with_embeddings" in capsys.readouterr().err


def test_too_much_that_cannot_be_read_ends_before_the_models(
    cluster: dict[str, str],
    model: Path,
    data: tuple[Path, list[np.ndarray], list[tuple[str, int]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main([*words(model, data[0], tmp_path / "output"), "--max-bad-share", "0.01"])
    assert "max_bad_share = 1.00%" in capsys.readouterr().err
    assert not tables(tmp_path / "output")
