"""Test the evaluation of image–text models without Ray: encoders, units, prompts, and folders of classes."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from clip_support import CLASSES, SIDE, make_dual_encoder, make_image, png, write_tar

from jobs.scoring.dual_encoders.config import EvaluateClipConfig
from jobs.scoring.dual_encoders.encoder import DualEncoderSpec, Embeddings, ImageSet, encoding_units, read_images
from jobs.scoring.dual_encoders.evaluate import ClassFolders, prompts, read_class_names, read_templates, zero_shot_set
from pipelines.problems import TooManyProblemsError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dual_encoder(tmp_path_factory.mktemp("model") / "export")


def test_units_are_found_again_where_nothing_has_changed(model: str, tmp_path: Path) -> None:
    def keys(path: str, precision: str = "fp32", digest: str = "x", texts: Sequence[str] = ("a", "b")) -> list[str]:
        spec = DualEncoderSpec.read("label", path)
        images = ImageSet(num_images=300, digest=digest, read=lambda numbers, size: [])
        of_images, of_texts = encoding_units(spec, precision, "data", images, texts)
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


@pytest.mark.parametrize(("name", "number"), [("imagenet", 80), ("cifar", 18)])
def test_shipped_templates_are_complete(name: str, number: int) -> None:
    templates = read_templates(name)
    assert len(set(templates)) == len(templates) == number
    assert "a photo of a {}." in templates
    assert all(template.count("{}") == 1 and template.strip() == template for template in templates)


def test_class_names_come_from_folders_or_numbers_or_a_file(tmp_path: Path) -> None:
    assert read_class_names("", ["cat", "maple_tree"]) == ("cat", "maple tree")
    assert read_class_names("cifar10", ["0", "9"]) == ("airplane", "truck")
    cifar100 = read_class_names("cifar100", [str(number) for number in range(100)])
    assert (len(set(cifar100)), cifar100[0], cifar100[47], cifar100[99]) == (100, "apple", "maple tree", "worm")
    names = tmp_path / "names.json"
    names.write_text(json.dumps({"n01": "tench", "n02": "goldfish", "n03": "shark"}))
    assert read_class_names(str(names), ["n02", "n01"]) == ("goldfish", "tench")
    with pytest.raises(ValueError, match=r"names\.json' has no name for the folder 'n04'"):
        read_class_names(str(names), ["n01", "n04"])


def test_prompts_are_those_of_one_class_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("a {}\n\nthe {}!\n")
    templates = read_templates(str(tmp_path / "own.txt"))
    assert prompts(templates, ["cat", "dog"]) == ["a cat", "the cat!", "a dog", "the dog!"]
    (tmp_path / "own.txt").write_text("a {}\na photo\n")
    with pytest.raises(ValueError, match=r"'a photo' has no \{\}"):
        read_templates(str(tmp_path / "own.txt"))


def members() -> dict[str, bytes | None]:
    rng = np.random.default_rng(0)
    return {
        f"{split}/{name}/{i}.png": png(make_image(rng)) for split in "ab" for name in ("x_y", "z") for i in range(2)
    }


def test_a_tar_two_tars_and_a_directory_are_the_same(tmp_path: Path) -> None:
    files = members() | {"a/": None, "a/x_y/": None, "a/z/": None, ".DS_Store": b"x", "a/x_y/notes.txt": b"x"}
    write_tar(tmp_path / "one.tar", files)
    for split in "ab":
        write_tar(tmp_path / "two" / f"{split}.tar", {name: data for name, data in files.items() if name[0] == split})
    with tarfile.open(tmp_path / "one.tar") as tar:
        tar.extractall(tmp_path / "three", filter="data")
    (tmp_path / "three" / "again").symlink_to(".")
    for name in ("one.tar", "two", "three"):
        folders = ClassFolders.read(str(tmp_path / name))
        assert folders.folders == ("x_y", "z")
        assert folders.names == tuple(sorted(members()))
        assert folders.num_left_out == 1
        assert folders.labels.tolist() == [0, 0, 1, 1] * 2
        assert list(folders.read_bytes([5, 0, 3])) == [members()[sorted(members())[at]] for at in (5, 0, 3)]


def test_the_digest_knows_what_changed(tmp_path: Path) -> None:
    files = members()
    path = write_tar(tmp_path / "a.tar", files)
    digest = ClassFolders.read(path).digest
    shutil.copy(path, tmp_path / "b.tar")
    assert ClassFolders.read(str(tmp_path / "b.tar")).digest == digest
    for changed in (
        {name.replace("z", "v"): data for name, data in files.items()},
        {name: data for name, data in files.items() if name != "a/z/0.png"},
        files | {"a/z/0.png": files["a/z/0.png"] + b"\0"},  # type: ignore[operator]
    ):
        assert ClassFolders.read(write_tar(tmp_path / "c.tar", changed)).digest != digest


def test_folders_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    files = members()
    cases: list[tuple[dict[str, bytes | None], str]] = [
        (files | {"a/empty/": None}, "the folder 'a/empty' of a class holds no image"),
        (files | {"a/text/readme.txt": b"x"}, "the folder 'a/text' of a class holds no image"),
        (files | {"0.png": b"x"}, "the image '0.png' lies in no folder"),
        ({"a/readme.txt": b"x"}, "holds no image in a folder"),
    ]
    for content, message in cases:
        with pytest.raises(ValueError, match=message):
            ClassFolders.read(write_tar(tmp_path / "bad.tar", content))
    path = Path(write_tar(tmp_path / "cut.tar", files))
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"cut\.tar is cut or corrupt"):
        ClassFolders.read(str(path))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ClassFolders.read(str(tmp_path / "nowhere"))


def test_damaged_images_are_counted_and_too_many_refused(classes: str) -> None:
    folders = ClassFolders.read(classes)
    images, numbers, problems = read_images(folders.images(10**6), range(21), SIDE)
    damaged = folders.names.index("test/maple_tree/0004.png")
    assert numbers.tolist() == [number for number in range(21) if number != damaged]
    assert images.shape == (20, SIDE, SIDE, 3)
    assert len(problems) == 1
    assert problems[0].startswith("test/maple_tree/0004.png (corrupt_image")
    none, _, all_problems = read_images(folders.images(10), range(21), SIDE)
    assert none.shape == (0, SIDE, SIDE, 3)
    assert len(all_problems) == 21

    few, enough = (
        zero_shot_set(
            EvaluateClipConfig(models=("m",), zero_shot=(f"c={classes}",), templates=("cifar",), max_bad_share=share),
            "c",
            classes,
        )
        for share in (0.04, 0.05)
    )
    assert len(few.texts) == 18 * len(CLASSES)
    # These embeddings tell the classes apart without an error.
    axes = np.eye(3, dtype=np.float32)
    image = Embeddings(rows=axes[folders.labels[numbers]], numbers=numbers, problems=tuple(problems))
    text = Embeddings(rows=axes.repeat(18, axis=0), numbers=np.arange(54))
    figures = enough.figures(image, text)
    assert figures == {
        "top@1": 1.0, "top@3": 1.0, "top@5": 1.0, "num_images": 20, "num_classes": 3, "num_unreadable": 1
    }  # fmt: skip
    with pytest.raises(TooManyProblemsError, match=r"1 of 21 records .* max_bad_share = 4\.00%.*0004\.png"):
        few.figures(image, text)
