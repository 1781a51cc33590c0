"""Tests that every contrastive preset is complete, wrong values are named, and nothing starts that cannot end."""

from __future__ import annotations

import io
import json
import math
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from jobs import train_clip
from jobs.engine.command_line import parse_preset
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.dual_encoder.data import preparation
from jobs.tasks.dual_encoder.models import build_encoder
from jobs.tasks.dual_encoder.plan import make_plan
from jobs.tasks.presets.clip import PRESETS
from pipelines.images.prepare import check_source
from pipelines.text.tokenization import train_wordpiece
from tempnet.contrastive.config import LOSS_KINDS, check_negatives
from tempnet.models.towers import random_tower

Change = Callable[..., ClipConfig]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_consistent_and_its_rho_feasible(name: str) -> None:
    config = PRESETS[name]()
    assert config.run.name == name
    num_samples = 20_000 if name.endswith("-small") else 2_900_000
    check_negatives(config.temperature.loss_config, config.optimizer.batch_size, num_samples)
    network = config.temperature.network_config(config.model.embedding_size)
    loss = config.temperature.loss_config
    assert (network.tau_min, network.tau_max) == (loss.tau_min, loss.tau_max)
    if not name.endswith("-small"):
        assert f"{name}-small" in PRESETS
        assert config.optimizer.batch_size == 512
        assert (config.optimizer.weight_decay, config.optimizer.beta1, config.optimizer.beta2) == (0.02, 0.9, 0.999)
        assert config.run.num_steps * config.optimizer.warmup_share == pytest.approx(1000)
        assert (config.temperature.rho, config.model.image_size) == (8.0, 224)
        if loss.kind.normaliser == "global":
            assert (loss.tau_min, loss.tau_max, loss.gamma, loss.tau) == (0.001, 0.05, 0.8, 0.01)


@pytest.mark.parametrize(
    "name", ["clip-cc3m-tempnet-small", "clip-cc3m-noise-15-small", "clip-cc12m-tempnet-frozen-small"]
)
def test_the_rho_of_a_small_tempnet_can_be_reached_in_a_batch(name: str) -> None:
    config = PRESETS[name]()
    assert config.temperature.rho < math.log(config.optimizer.batch_size - 1)
    assert config.model.freeze == (config.temperature.target_tau is None)


def test_the_presets_cover_every_loss() -> None:
    shown = {PRESETS[name]().temperature.loss for name in PRESETS}
    assert shown | {"clip_fixed"} == set(LOSS_KINDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--optimizer.micro-batch-size", "32"],
            "optimizer.micro_batch_size = 32: a contrastive loss compares all samples",
        ),
        (["--workers.zero-stage", "3"], "workers.zero_stage = 3"),
        (["--temperature.loss", "simclr"], "temperature.loss = 'simclr' is unknown: choose one of clip"),
        (["--temperature.loss", "sogclr_given"], "temperature.target_tau = 0.02 steers the ρ of a robust loss"),
        (["--temperature.input-shift", "mean"], "temperature.input_shift = mean shifts logits"),
        (
            ["--temperature.target-tau", "None", "--temperature.loss", "sogclr_given"],
            "the loss sogclr_given needs a table",
        ),
        (["--temperature.tau-min", "0.1"], "0 < tau_min < tau_max does not hold"),
        (["--temperature.gamma", "0"], "gamma = 0 must lie in (0, 1]"),
        (["--model.freeze"], "model.freeze = True needs model.path"),
        (["--model.text-num-heads", "7"], "not divisible by text_num_heads = 7"),
        (["--model.image-depths", "1", "1"], "must be equally many positive numbers"),
        (
            ["--model.image-size", "100000"],
            "model.image_size = 100000 is above 4096: as float32, one view alone takes 111",
        ),
        (["--model.image-size", "0"], "model.image_size = 0 must be positive"),
        (["--model.image-size", "-32"], "model.image_size = -32 must be positive"),
        (["--data.caption-noise", "1.5"], "data.caption_noise = 1.5 must lie in [0, 1]"),
        (["--data.min-crop-scale", "0"], "data.min_crop_scale = 0.0 must be positive"),
        (["--data.min-crop-scale", "2"], "data.min_crop_scale = 2 must lie in [0, 1]"),
        (["--data.num-augmentations", "-1"], "data.num_augmentations = -1 must not be negative"),
        (["--data.augmentation-magnitude", "11"], "data.augmentation_magnitude = 11 must lie in [0, 10]"),
        (["--optimizer.batch-size", "127"], "is not divisible by workers.num_workers = 2"),
        (["--temperature.target-tau", "0.02", "--temperature.loss", "isogclr"], "or tempnet (contrastive)"),
        (["--temperature.target-tau", "0.02", "--temperature.loss", "tempnet_in_batch"], "target_tau = 0.02 steers"),
        (["--temperature.target-tau", "0.06"], "target_tau = 0.06 must lie between τ₀ = 0.001 and τ_max = 0.05"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_values_are_refused_with_their_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse_preset(PRESETS, ["clip-cc3m-tempnet-small", *arguments], job="train_clip", purpose="")
    assert exit_info.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1


@pytest.fixture
def change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Change:
    """Returns a function that makes a small preset on a tiny tar, with changed sections."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "JPEG")
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
        with tarfile.open(tmp_path / split / "0.tar", "w") as tar:
            for name, data in (("a.jpg", picture.getvalue()), ("a.txt", b"a black square")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    train_wordpiece(["a black square"], 200).save_pretrained(tmp_path / "tokenizer")

    def make(preset: str = "clip-cc3m-tempnet-small", **sections: dict[str, Any]) -> ClipConfig:
        config = PRESETS[preset]()
        defaults: dict[str, dict[str, Any]] = {
            "run": {"storage": str(tmp_path / "runs")},
            "data": {
                "train": str(tmp_path / "train"),
                "validation": str(tmp_path / "validation"),
                "tokenizer": str(tmp_path / "tokenizer"),
            },
        }
        names = defaults.keys() | sections.keys()
        changed = {name: defaults.get(name, {}) | sections.get(name, {}) for name in names}
        return replace(config, **{name: replace(getattr(config, name), **values) for name, values in changed.items()})

    return make


def test_a_good_configuration_has_a_plan(change: Change) -> None:
    plan = make_plan(change())
    text = plan.describe()
    assert "128 pairs: 2 workers × 64, each image against 127 captions" in text
    assert "normaliser global, τ in [0.001, 0.05], ρ = " in text
    assert "negatives of a batch" not in text
    above = make_plan(change(temperature={"rho": 7.0})).describe()
    assert "ρ = 7 is not below log(127 negatives of a batch) = 4.84" in above
    # Table 13 gives this formula; here two networks read embeddings of 128 numbers.
    assert plan.num_tempnet_parameters == 2 * (128 * 256 + 256 + 256 * 256 + 256 + 2)


def test_what_cannot_work_is_refused_before_ray_starts(change: Change, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, dict[str, Any]], str]] = [
        ({"data": {"train": str(tmp_path / "nowhere")}}, r"data\.train: .*nowhere"),
        ({"data": {"validation_captions": str(tmp_path / "no.json")}}, r"data\.validation: .*no\.json"),
        ({"data": {"tokenizer": str(tmp_path / "train")}}, "tokenizer = .*train' cannot be loaded"),
        ({"data": {"num_text_tokens": 2}}, r"data\.num_text_tokens = 2 must exceed the 2 special tokens"),
        ({"model": {"image_path": str(tmp_path)}}, "holds no Transformers model"),
        ({"model": {"path": str(tmp_path)}}, "holds no"),
        (
            {"workers": {"activation_checkpointing": True}},
            r"workers\.activation_checkpointing = True would run the batch",
        ),
        (
            {"temperature": {"loss": "sogclr_given", "target_tau": None, "table": str(tmp_path / "none")}},
            r"temperature\.table = .* not exist",
        ),
    ]
    for sections, message in cases:
        with pytest.raises((ValueError, OSError), match=message):
            make_plan(change(**sections))


@pytest.mark.parametrize("size", [7, 30, 100])
def test_an_image_size_that_the_tower_cannot_read_is_refused(size: int, change: Change, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    random_tower("vit", "image", image_size=32, patch_size=8, **sizes).save_pretrained(tmp_path / "vit")
    tower = {"image_path": str(tmp_path / "vit")}
    assert make_plan(change(model=tower | {"image_size": 32}))
    with pytest.raises(ValueError, match=rf"takes no images of {size} × {size}: .*size"):
        make_plan(change(model=tower | {"image_size": size}))


def test_several_splits_and_none_are_read_by_training(change: Change, tmp_path: Path) -> None:
    images = [
        {"filename": f"{split}.jpg", "split": split, "sentences": [{"raw": split}]}
        for split in ("train", "restval", "val", "test")
    ]
    file = tmp_path / "karpathy.json"
    file.write_text(json.dumps({"images": images}))
    for arguments, expected in {
        ("--data.train-splits", "train", "restval"): {"train.jpg", "restval.jpg"},
        ("--data.train-splits",): {f"{image['filename']}" for image in images},
        ("--data.train-splits", ""): {f"{image['filename']}" for image in images},
        (): {f"{image['filename']}" for image in images},
    }.items():
        line = ["clip-cc3m-tempnet-small", "--data.train-captions", str(file), *arguments]
        config, _ = parse_preset(PRESETS, line, job="train_clip", purpose="")
        wanted = preparation(
            change(data={name: getattr(config.data, name) for name in ("train_captions", "train_splits")}), "train"
        )
        _, captions = check_source(wanted)
        assert captions is not None
        assert set(captions.captions) == expected


def test_a_saved_encoder_must_have_the_sizes_that_the_configuration_says(change: Change, tmp_path: Path) -> None:
    from pipelines.text.tokenization import load_tokenizer

    config = change()
    tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
    build_encoder(config, tokenizer).save_pretrained(tmp_path / "encoder", tokenizer)
    saved = {"path": str(tmp_path / "encoder"), "freeze": True}
    assert "(frozen)" in make_plan(change(model=saved, data={"tokenizer": ""})).describe()
    with pytest.raises(ValueError, match=r"model\.image_size = 32, but model\.path = .* was made for 48"):
        make_plan(change(model=saved | {"image_size": 32}))
    with pytest.raises(ValueError, match=r"leaves nothing to train with temperature\.loss = 'clip'"):
        change(model=saved, temperature={"loss": "clip", "target_tau": None})


def test_a_refusal_reaches_the_person_as_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["clip-cc3m-clip-small", "--data.train", str(tmp_path / "nowhere"), "--run.storage", str(tmp_path)]
    with pytest.raises(SystemExit) as exit_info:
        train_clip.main(arguments)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: data.train:")
    assert "Traceback" not in error
