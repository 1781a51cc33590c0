"""Test that `jobs.calibrate headroom --images` refuses bad input before Ray starts, naming the field."""

from __future__ import annotations

from pathlib import Path

import pytest
from clip_support import make_dual_encoder, make_pairs
from prediction_support import save_tiny_model

from jobs.calibrate import main
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.headroom.pairs.settings import resolve_settings
from tempnet.models.training_temperature import save_training_temperature


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory that holds `model`, a tiny dual encoder, `language`, a language model, and `pairs`."""
    root = tmp_path_factory.mktemp("files")
    make_dual_encoder(root / "model")
    save_tiny_model(root / "language")
    (root / "pairs").mkdir()
    make_pairs(root / "pairs")
    return root


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": ""}, "text and images are both empty: give text for a language model, or images for an image–text"),
        ({"model": ""}, "model is empty"),
        ({"images": "nowhere"}, "images: "),
        ({"model": "nowhere"}, "model: 'nowhere' is missing: there is no such directory"),
        ({"model": "LANGUAGE"}, "neither image_encoder/, nor a Transformers CLIPModel (its model_type is 'gpt2')"),
        ({"captions": "nowhere.json"}, "nowhere.json"),
        ({"splits": "test"}, "splits = test selects from captions, which is empty"),
        ({"gallery-images": "2"}, "gallery_images = 2 must be at least 3"),
        ({"context-length": "64"}, "context_length = 64 has no meaning with images: leave it out"),
        ({"precision": "int8"}, "precision = int8 is for language models: choose fp32 or bf16 with images"),
        ({"workers.device-map": "auto"}, "workers.device_map = auto spreads language models only"),
    ],
)  # fmt: skip
def test_refusals_come_before_any_work(
    changes: dict[str, str],
    message: str,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    values = {"model": str(files / "model"), "images": str(files / "pairs"), "output": str(tmp_path / "out")}
    values |= {name: value.replace("LANGUAGE", str(files / "language")) for name, value in changes.items()}
    words = [word for name, value in values.items() for word in (f"--{name}", value)]
    with pytest.raises(SystemExit) as stop:
        main(["headroom", *words, "--storage", str(tmp_path)])
    assert stop.value.code == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in said
    assert not (tmp_path / "out").exists()


def test_what_decides_the_figures_is_recorded_and_what_does_not_is_left_out(files: Path) -> None:
    def record(**changes: object) -> dict[str, object]:
        values = {"model": str(files / "model"), "images": str(files / "pairs"), **changes}
        return resolve_settings(Headroom(**values)).record()  # type: ignore[arg-type]

    first = record()
    assert first["own_tau"] is None
    assert record(batch_size=3, folds=7, least_gain=2.0) == first
    for name, value in (("gallery_images", 7), ("gallery_seed", 1), ("precision", "bf16")):
        assert record(**{name: value}) == first | {name: value}
    save_training_temperature(files / "model", 0.03)
    assert record()["own_tau"] == 0.03
