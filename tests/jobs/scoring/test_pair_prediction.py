"""Tests that `predict_temperatures --images` refuses bad input before Ray starts, with a message of one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from jobs.predict_temperatures import main
from jobs.scoring.temperatures.pairs.config import PredictPairTemperaturesConfig
from jobs.scoring.temperatures.pairs.labels import distinct_rows
from pipelines.sample.images import write_images
from pipelines.text.tokenization import train_wordpiece
from tempnet.models.dual_encoder import DualEncoder, DualEncoderConfig
from tempnet.models.towers import random_tower
from tempnet.network import TempNet
from tempnet.network_config import TempNetConfig


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory that holds `model`, a tiny dual encoder with TempNets, and `images`."""
    root = tmp_path_factory.mktemp("files")
    tokenizer = train_wordpiece(["a red circle"], 200)
    image = random_tower("resnet", "image", embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic")
    text = random_tower("distilbert", "text", vocab_size=len(tokenizer), dim=8, n_heads=2, n_layers=1, hidden_dim=8)
    DualEncoder(image, text, DualEncoderConfig(embedding_size=6, image_size=32)).save_pretrained(
        root / "model", tokenizer
    )
    for name in ("tempnet_image", "tempnet_text"):
        TempNet(TempNetConfig.for_embeddings(6, hidden_size=4, num_prototypes=4)).save_pretrained(root / "model" / name)
    write_images(
        root / "images", num_images=3, num_retrieval_images=1, num_classes=1, num_images_per_class=1, image_size=32
    )
    return root


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as exit:
        main([str(word) for word in words])
    assert exit.value.code == 2
    # Transformers draws its progress bars before the message.
    message = capsys.readouterr().err.rstrip().rpartition("\n")[2]
    assert message.startswith("error: ")
    return message


def test_what_does_not_fit_is_refused(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(**changes: object) -> str:
        values = {"model": files / "model", "images": files / "images" / "train", "output": tmp_path / "o", **changes}
        return refused(capsys, *(word for name, value in values.items() for word in (f"--{name}", value)))

    assert "nowhere" in run(images=tmp_path / "nowhere")
    assert "holds no TempNet" in run(model=tmp_path)
    assert "nothing' is missing: there is no such directory" in run(model=tmp_path / "nothing", tempnet=files / "model")
    (tmp_path / "empty").mkdir()
    assert "empty holds no Transformers model" in run(model=tmp_path / "empty", tempnet=files / "model")
    other = tmp_path / "other"
    shutil.copytree(files / "model", other)
    TempNet(TempNetConfig.for_embeddings(7, hidden_size=4, num_prototypes=4)).save_pretrained(other / "tempnet_text")
    assert "tempnet_text reads 7 embeddings, the embeddings of" in run(tempnet=other)
    shutil.rmtree(other / "tempnet_image")
    assert "tempnet_image holds no TempNet" in run(tempnet=other)
    assert not (tmp_path / "o").exists()


def test_values_are_checked() -> None:
    for field, value in (("part_pairs", 0), ("batch_size", 0), ("max_bad_share", 2.0), ("output", "")):
        with pytest.raises(ValueError, match=field):
            PredictPairTemperaturesConfig(**{"model": "m", "images": "i", "output": "o", field: value})


def test_help_is_that_of_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--images", "--help"])
    assert exit.value.code == 0
    assert "--with-embeddings" in capsys.readouterr().out


def test_a_label_needs_a_page() -> None:
    with pytest.raises(ValueError, match="label = n is shown on the page only: html must name a file"):
        PredictPairTemperaturesConfig(model="m", images="i", output="o", label="n")


def test_an_image_with_several_captions_counts_once() -> None:
    table = pa.table({"key": ["b", "b", "a", "c", "c"]})
    assert sorted(distinct_rows("tau_image", table)) == [0, 2, 3]
    assert list(distinct_rows("tau_text", table)) == [0, 1, 2, 3, 4]
