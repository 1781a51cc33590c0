"""Test the evaluation of image–text models without Ray: units, templates, class names and prompts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clip_support import make_dual_encoder
from PIL import Image
from safetensors.torch import load_file, save_file

from jobs.scoring.dual_encoders.encoder import DualEncoderSpec, Encoder, encoding_units, pairs_record
from jobs.scoring.dual_encoders.evaluate import name_classes, prompts, read_class_names, read_templates
from pipelines.images.prepare import PrepareImagesConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dual_encoder(tmp_path_factory.mktemp("model") / "export")


def test_units_are_found_again_where_nothing_has_changed(model: str, tmp_path: Path) -> None:
    def keys(path: str, precision: str = "fp32", digest: str = "x", texts: Sequence[str] = ("a", "b")) -> list[str]:
        spec = DualEncoderSpec.read("label", path)
        pairs: Any = SimpleNamespace(manifest=SimpleNamespace(num_images=300, digest=digest))
        of_images, of_texts = encoding_units(spec, precision, "data", pairs, texts)
        units = [*of_images, *of_texts]
        assert [(unit.start, unit.stop) for unit in units] == [(0, 256), (256, 300), (0, 2)]
        return [unit.key for unit in units]

    first = keys(model)
    assert len(set(first)) == 3
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "copy" / "tempnet_image").mkdir()
    assert keys(str(tmp_path / "copy")) == first
    assert not set(keys(model, precision="bf16")) & set(first)
    assert keys(model, digest="y")[2:] == first[2:]
    assert not set(keys(model, digest="y")[:2]) & set(first)
    assert keys(model, texts=["a", "c"])[:2] == first[:2]
    assert keys(model, texts=["a", "c"])[2] != first[2]
    assert not set(keys(make_dual_encoder(tmp_path / "other", seed=1))) & set(first)
    (tmp_path / "copy" / "text_encoder" / "tokenizer.json").write_text(
        (tmp_path / "copy" / "text_encoder" / "tokenizer.json").read_text() + " "
    )
    assert not set(keys(str(tmp_path / "copy"))) & set(first)


def test_embeddings_that_are_not_finite_are_refused(model: str, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "nan")
    file = tmp_path / "nan" / "model.safetensors"
    weights = load_file(file)
    weights["text_projection.weight"].fill_(torch.nan)
    save_file(weights, file)
    encoder = Encoder(DualEncoderSpec.read("label", str(tmp_path / "nan")), precision="fp32", batch_size=2)
    with pytest.raises(ValueError, match="the embeddings of 3 of 3 texts are NaN or infinite"):
        encoder.texts(["a", "b", "c"])


def test_other_captions_of_the_same_images_are_other_pairs(tmp_path: Path) -> None:
    def record(file: str, caption: str) -> dict[str, Any]:
        (tmp_path / file).write_text(json.dumps([{"image": "a.png", "caption": caption}]))
        return pairs_record(PrepareImagesConfig(source=str(tmp_path / "images"), captions=str(tmp_path / file)))

    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "a.png")
    assert record("first.json", "a circle") == record("copy.json", "a circle")
    assert record("other.json", "a square") != record("first.json", "a circle")


def test_class_names_come_from_folders_or_numbers_or_a_file(tmp_path: Path) -> None:
    assert [len(set(read_templates(name))) for name in ("imagenet", "cifar")] == [80, 18]
    assert name_classes(["cat", "maple_tree"], None) == ["cat", "maple tree"]
    assert name_classes(["0", "9"], read_class_names("cifar10")) == ["airplane", "truck"]
    cifar100 = list(read_class_names("cifar100").values())
    assert (len(set(cifar100)), cifar100[0], cifar100[47], cifar100[99]) == (100, "apple", "maple tree", "worm")
    names = tmp_path / "names.json"
    names.write_text(json.dumps({"n01": "tench", "n02": "goldfish", "n03": "shark"}))
    assert name_classes(["n02", "n01"], read_class_names(str(names))) == ["goldfish", "tench"]
    with pytest.raises(ValueError, match=r"class_names = 'names' has no name for the folder 'n04'"):
        name_classes(["n01", "n04"], read_class_names(str(names)), "names")


def test_prompts_are_those_of_one_class_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("a {}\n\nthe {}!\n")
    templates = read_templates(str(tmp_path / "own.txt"))
    assert prompts(templates, ["cat", "dog"]) == ["a cat", "the cat!", "a dog", "the dog!"]
    (tmp_path / "own.txt").write_text("a {}\na photo\n")
    with pytest.raises(ValueError, match=r"'a photo' has no \{\}"):
        read_templates(str(tmp_path / "own.txt"))
