"""Test the evaluation of image-text models without Ray: encoders, units, and refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clip_support import make_clip, make_dual_encoder, make_image

from jobs import evaluate_clip
from jobs.scoring.dual_encoders.config import EvaluateClipConfig
from jobs.scoring.dual_encoders.data import retrieval_sources
from jobs.scoring.dual_encoders.encoder import Encoder
from jobs.scoring.dual_encoders.launch import clip_table
from jobs.scoring.dual_encoders.units import DualEncoderSpec, Embeddings, EmbeddingStore, image_units, text_units
from jobs.scoring.results import Column
from pipelines.images.caption_files import CaptionFile
from pipelines.text.tokenization import train_bpe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dual_encoder(tmp_path_factory.mktemp("model") / "export")


@pytest.mark.parametrize("make", [make_dual_encoder, make_clip])
def test_batches_change_nothing(make: Any, tmp_path: Path) -> None:
    spec = DualEncoderSpec.read("m", make(tmp_path / "model"))
    texts = ["a photo of a cat.", "dog", "a big red photo of the small green truck", "tree", "a", "house " * 60]
    images = np.stack([make_image(np.random.default_rng(seed)) for seed in range(5)])
    one, three = (Encoder(spec, precision="fp32", batch_size=size) for size in (1, 3))
    for few, many in ((one.texts(texts), three.texts(texts)), (one.images(images), three.images(images))):
        np.testing.assert_allclose(few, many, atol=2e-6)
        np.testing.assert_allclose(np.linalg.norm(few, axis=1), 1.0, atol=1e-6)
        assert np.abs(few[0] - few[1]).max() > 1e-3
    assert one.images(images[:0]).shape == (0, 12)


def test_units_are_found_again_where_nothing_has_changed(model: str, tmp_path: Path) -> None:
    def keys(path: str, precision: str = "fp32", digest: str = "x", texts: Sequence[str] = ("a", "b")) -> list[str]:
        spec = DualEncoderSpec.read("label", path)
        units = [*image_units(spec, precision, "data", digest, 300), *text_units(spec, precision, "data", texts)]
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


def test_the_store_gives_back_what_was_written(model: str, tmp_path: Path) -> None:
    store = EmbeddingStore(str(tmp_path))
    _, unit = image_units(DualEncoderSpec.read("m", model), "fp32", "data", "x", 300)
    rows = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    assert not store.has(unit)
    store.write(unit, Embeddings(rows=rows, numbers=np.array([256, 258, 299]), problems=("ä: broken",)))
    assert store.has(unit)
    found = store.read(unit)
    np.testing.assert_array_equal(found.rows, rows)
    assert (found.numbers.tolist(), found.problems) == ([256, 258, 299], ("ä: broken",))
    assert not list(tmp_path.rglob("*.partial"))


def test_the_table_puts_models_side_by_side(model: str) -> None:
    spec = DualEncoderSpec.read("ours", model)
    metrics = {"d/text_recall@1": 0.12345, "d/mean_recall": 1.0, "d/num_images": 1000, "d/top@5": 0.5}
    assert clip_table([dataclasses.replace(Column.of_model(spec), metrics=metrics)]) == (
        "| %                  |   ours |\n"
        "| :----------------- | -----: |\n"
        "| d image → text R@1 |  12.35 |\n"
        "| d mean recall      | 100.00 |\n"
        "| d images           |  1,000 |\n"
        "| d top-5            |  50.00 |"
    )


def test_what_cannot_work_is_refused_in_one_line_before_ray_starts(
    model: str, classes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    for file in (bare / "text_encoder").glob("tokenizer*"):
        file.unlink()
    foreign = tmp_path / "foreign"
    shutil.copytree(model, foreign)
    sentence = "several other words that nobody would look for in any of these sentences"
    train_bpe([sentence] * 3, 305).save_pretrained(foreign / "text_encoder")
    zero_shot = ["--zero-shot", f"c={classes}"]
    cases: list[tuple[list[str], str]] = [
        (["--models", "nowhere", *zero_shot], "models: 'nowhere' is missing: there is no such directory"),
        (["--models", str(tmp_path), *zero_shot], f"{tmp_path} holds no Transformers model"),
        (["--models", str(bare), *zero_shot], "has no tokenizer"),
        (["--models", str(foreign), *zero_shot], "has 305 tokens, the model 300"),
        (["--models", model, *zero_shot, "--templates", "imagnet"], "neither imagenet nor cifar, nor a file"),
        (["--models", model, *zero_shot, "--class-names", "c=cifar10"], "has no name for the folder 'cat'"),
        (["--models", model, "--retrieval", f"r={tmp_path}/none"], "no such file or directory"),
        (["--models", model, "--retrieval", f"r={classes}", "--captions", "r=no.json"], "no.json"),
    ]
    for arguments, message in cases:
        with pytest.raises(SystemExit) as stop:
            evaluate_clip.main([*arguments, "--storage", str(tmp_path / "runs")])
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert stop.value.code == 2
        assert error.startswith("error: "), arguments
        assert message in error, arguments


def test_a_retrieval_set_takes_several_splits_or_all(tmp_path: Path) -> None:
    file = tmp_path / "karpathy.json"
    images = [
        {"filename": f"{name}.jpg", "split": name, "sentences": [{"raw": name}]}
        for name in ("train", "restval", "test")
    ]
    file.write_text(json.dumps({"images": images}))
    for splits, expected in (
        (("r=train,restval",), {"train.jpg", "restval.jpg"}),
        ((), {f"{i['filename']}" for i in images}),
    ):
        config = EvaluateClipConfig(models=("m",), retrieval=("r=x",), captions=(f"r={file}",), splits=splits)
        source = retrieval_sources(config)["r"]
        assert set(CaptionFile.load(source.captions, source.splits).captions) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ()}, "models is empty"),
        ({"models": ("runs/a", "runs/a/")}, "models names 'runs/a' twice"),
        ({"zero_shot": ()}, "nothing to evaluate on"),
        ({"zero_shot": ("cifar.tar",)}, r"'cifar\.tar' is not NAME=VALUE"),
        ({"zero_shot": ("a/b=x",)}, "'a/b=x' is not NAME=VALUE"),
        ({"zero_shot": ("c=x", "c=y")}, "zero_shot names 'c' twice"),
        ({"retrieval": ("c=y",)}, "retrieval and zero_shot both name a set 'c'"),
        ({"captions": ("c=x.json",)}, "captions names the set 'c', which is not among those to evaluate on: none"),
        ({"templates": ("d=cifar",)}, "templates names the set 'd', which is not among those to evaluate on: c"),
        ({"templates": ("cifar", "imagenet")}, "only one is for all sets"),
        ({"batch_size": 0}, "batch_size = 0 must be at least 1"),
        ({"max_bad_share": 1.5}, r"max_bad_share = 1\.5 must lie in"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvaluateClipConfig(**{"models": ("m",), "zero_shot": ("c=x",), **changes})


def test_templates_may_be_one_for_all_sets_or_one_a_set() -> None:
    config = EvaluateClipConfig(models=("m",), zero_shot=("a=x", "b=y"), templates=("own.txt", "b=cifar"))
    assert (config.template_set("a"), config.template_set("b")) == ("own.txt", "cifar")
    assert EvaluateClipConfig(models=("m",), zero_shot=("a=x",), templates=("a=cifar",)).template_set("a") == "cifar"
