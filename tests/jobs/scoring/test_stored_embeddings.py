"""Tests that stored embeddings are those of the frozen towers, and that TempNets train on them as on the towers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from clip_support import make_dual_encoder
from frozen_towers_support import (
    NUM_STEPS,
    from_features,
    make_data,
    make_frozen_config,
    prepare_pairs,
    store,
    train_alone,
)
from safetensors.torch import load_file

from jobs.scoring.features import check_room, units_of
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.dual_encoder.plan import make_plan
from jobs.tasks.dual_encoder.task import ClipTask, find_embeddings, refer_to_towers
from jobs.tasks.dual_encoder.validation import score
from pipelines import features as features_module
from pipelines.features import EmbeddingSource, PairEmbeddings
from pipelines.images.manifest import ImageManifest
from pipelines.storage import write_json
from tempnet.base_model import BASE_FILE

CPU = torch.device("cpu")
Stored = tuple[PairEmbeddings, PairEmbeddings]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ClipConfig:
    return make_frozen_config(tmp_path_factory.mktemp("frozen"))


@pytest.fixture(scope="module")
def pairs(config: ClipConfig) -> ImageManifest:
    return prepare_pairs(config)


@pytest.fixture(scope="module")
def stored(config: ClipConfig, pairs: ImageManifest) -> Iterator[Stored]:
    """Store the embeddings of both splits in files of two images, and of three captions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features_module, "FILE_BYTES", 2000)
        yield store(config, pairs, "train"), store(config, pairs, "validation")


@pytest.fixture
def own(tmp_path: Path) -> ClipConfig:
    """Return a run whose towers a test may change."""
    return make_frozen_config(tmp_path)


def test_the_room_is_as_predicted(pairs: ImageManifest, stored: Stored) -> None:
    for embeddings in stored:
        assert embeddings.num_bytes == pairs.num_images * (4 * 12 + 4) + pairs.num_pairs * (4 * 12 + 10)
        for files, rows_per_file in ((embeddings.images, 2), (embeddings.captions, 3)):
            paths = list(Path(embeddings.directory).glob(f"{files.name}-*.arrow"))
            assert len(paths) == sum(-(-size // rows_per_file) for size in files.shard_sizes) > 2
            headers = sum(path.stat().st_size for path in paths) - files.num_bytes
            assert 0 < headers < 1_500 * len(paths)
    assert "19 images × 52 bytes and 56 captions × 58 bytes" in stored[0].describe_size()


def test_a_run_on_them_is_the_run_on_the_towers(config: ClipConfig, pairs: ImageManifest, stored: Stored) -> None:
    on_towers = ClipTask(config, make_data(config, pairs, None), 0, 1)
    on_features = ClipTask(from_features(config), make_data(config, pairs, stored), 0, 1)
    for task in (on_towers, on_features):
        task.build(is_fresh=True)
    assert on_features.module.encoder is None
    expected, digests = train_alone(on_towers)
    losses, found = train_alone(on_features)
    assert found == digests
    assert len(set(digests)) == NUM_STEPS
    assert losses == pytest.approx(expected, abs=1e-5, rel=0)
    scores = []
    for task in (on_towers, on_features):
        task.module.eval()
        with torch.no_grad():
            values, details = score(task.module, task.held_out(task.module, CPU), CPU, with_details=True)
        assert details is not None
        assert sum(details["histograms"]["image"]) == 7
        scores.append(values | details["rivals"])
        task.export()
    assert scores[1] == pytest.approx(scores[0], rel=1e-4, abs=1e-5)
    assert scores[0]["tau_std"] > 0
    exports = [Path(task.config.run.export_directory) for task in (on_towers, on_features)]
    files = sorted(file.relative_to(exports[0]) for file in exports[0].rglob("*.safetensors"))
    assert len(files) == 5
    for file in files:
        ours, theirs = load_file(exports[1] / file), load_file(exports[0] / file)
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-4 if "tempnet" in str(file) else 0.0)


def test_those_of_other_towers_captions_or_precision_are_not_found(
    config: ClipConfig, pairs: ImageManifest, stored: Stored, tmp_path: Path
) -> None:
    towers = refer_to_towers(config)
    assert find_embeddings(config, pairs, towers, "train") == stored[0]
    assert find_embeddings(config, pairs, towers, "validation") == stored[1]
    for other in (
        replace(config, workers=replace(config.workers, precision="bf16")),
        replace(config, data=replace(config.data, caption_noise=0.4)),
        replace(config, run=replace(config.run, seed=1)),  # which the noise depends on
    ):
        with pytest.raises(FileNotFoundError, match=r"jobs\.prepare_features in the place of jobs\.train_clip"):
            find_embeddings(other, pairs, towers, "train")
    make_dual_encoder(tmp_path / "encoder", seed=1)
    other_towers = refer_to_towers(replace(config, model=replace(config.model, path=str(tmp_path / "encoder"))))
    assert other_towers.digest != towers.digest
    with pytest.raises(FileNotFoundError, match=r"the embeddings of data\.validation for these towers"):
        find_embeddings(config, pairs, other_towers, "validation")


def test_a_run_does_not_continue_on_other_towers(own: ClipConfig, tmp_path: Path) -> None:
    towers = refer_to_towers(own)
    (tmp_path / "towers").mkdir()
    write_json(str(tmp_path / "towers" / BASE_FILE), {"path": towers.path, "digest": towers.digest})
    # TempNets and tokenizer beside the towers do not belong to them.
    (tmp_path / "encoder" / "tempnet_image").mkdir()
    (tmp_path / "encoder" / "tempnet_image" / "model.safetensors").write_bytes(b"")
    assert refer_to_towers(own) == towers
    make_dual_encoder(tmp_path / "encoder", seed=1)
    with pytest.raises(ValueError, match=r"model\.path = .*run\.name = 'towers' cannot continue: .* digest"):
        refer_to_towers(own)


def test_a_damaged_file_is_named(stored: Stored, tmp_path: Path) -> None:
    shutil.copytree(stored[0].directory, tmp_path, dirs_exist_ok=True)
    embeddings = replace(stored[0], directory=str(tmp_path))
    first, second, *_ = embeddings.captions.parts()
    shutil.copy(tmp_path / list(embeddings.captions.parts_of(0))[-1].file, tmp_path / first.file)
    rows = np.arange(3)
    with pytest.raises(OSError, match=rf"{first.file} holds \d captions instead of 3: prepare the features again"):
        EmbeddingSource(embeddings=embeddings).read(np.zeros_like(rows), rows, 0)
    EmbeddingSource(embeddings=embeddings).read(np.zeros_like(rows), rows + second.start, 0)


def test_a_disk_without_room_is_refused(config: ClipConfig, pairs: ImageManifest, tmp_path: Path) -> None:
    class Endless(PairEmbeddings):
        """Embeddings that no disk has room for."""

        @property
        def images(self) -> features_module.FeatureFiles:
            return replace(super().images, shard_sizes=(2**50,), rows_per_file=2**50)

    embeddings = Endless(
        directory=str(tmp_path / "endless"), pairs=pairs, embedding_size=12, image_size=16, num_text_tokens=40
    )
    with pytest.raises(OSError, match=r"takes [\d.]+ GiB more, and its disk has [\d.]+ [GM]iB left: make room"):
        check_room(str(tmp_path), units_of(embeddings))


def test_what_they_cannot_stand_for_is_refused(config: ClipConfig) -> None:
    good = from_features(config)
    with pytest.raises(ValueError, match=r"model\.features = True needs model\.freeze True"):
        replace(good, model=replace(good.model, freeze=False))
    with pytest.raises(ValueError, match=r"data\.view = 'random' shows another crop .* choose data\.view central"):
        replace(good, data=replace(good.data, view="random"))


def test_the_plan_needs_no_weights_and_sizes_must_fit(
    own: ClipConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    good = from_features(own)
    (tmp_path / "encoder" / "image_encoder" / "model.safetensors").write_bytes(b"no weights")
    assert "towers none (frozen, their embeddings are read), networks of the loss " in make_plan(good).describe()
    with pytest.raises(ValueError, match=r"model\.embedding_size = 16, but model\.path = .* was made for 12"):
        make_plan(replace(good, model=replace(good.model, embedding_size=16)))
