"""Test what the headroom job measures of image–text pairs, on galleries whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from clip_support import make_dual_encoder, make_pairs
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jobs.scoring.headroom.config import Headroom
from jobs.scoring.headroom.job import Question, figures, metrics, summary, verdict
from jobs.scoring.headroom.pairs import (
    CANDIDATES,
    FEATURES,
    EmbeddedWindow,
    ImageRange,
    PairMeasurement,
    WindowMeasurer,
    find_unit_tau,
    galleries,
    windows,
)
from tempnet.headroom.features import Tokens
from tempnet.headroom.run import HeadroomTest, run_headroom_test
from tempnet.intervals import Interval
from tempnet.models.dual_encoder import save_training_temperature

NUM_IMAGES, NUM_CAPTIONS, SIZE, TAU = 400, 1600, 6, 0.1


def unit_rows(count: int, size: int, generator: torch.Generator) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(count, size, generator=generator), dim=-1)


def some_pairs(num_images: int) -> EmbeddedWindow:
    generator = torch.Generator().manual_seed(0)
    owners = np.repeat(np.arange(num_images), [1 + number % 4 for number in range(num_images)])
    images = unit_rows(num_images, SIZE, generator)
    texts = torch.nn.functional.normalize(images[owners] + 0.5 * unit_rows(len(owners), SIZE, generator), dim=-1)
    return EmbeddedWindow(
        window=ImageRange(0, 0, num_images), images=images.numpy(), texts=texts.numpy(), owners=owners
    )


@given(st.integers(1, 500), st.integers(3, 20), st.integers(0, 3))
def test_every_image_is_a_query_once_among_as_many_others(num_images: int, size: int, seed: int) -> None:
    parts = windows(num_images, size)
    assert [parts[0].first, *(part.stop for part in parts)] == [*(part.first for part in parts), num_images]
    for window in parts:
        count = window.stop - window.first
        assert count >= 8 * size or len(parts) == 1
        found = galleries(window, size, seed)
        queries = np.concatenate([gallery.images[: gallery.num_queries] for gallery in found])
        assert sorted(queries) == list(range(count))
        assert all(len(set(gallery.images)) == len(gallery.images) == min(size, count) for gallery in found)


def test_images_are_dealt_out_at_random() -> None:
    orders = [
        np.concatenate([gallery.images for gallery in galleries(ImageRange(number, 0, 80), 10, seed)]).tolist()
        for number, seed in ((0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert sorted(orders[0]) == list(range(80)) != orders[0]


def test_predictions_are_softmaxes_over_the_gallery_without_other_captions_of_the_image() -> None:
    """Compare with a loop over pairs in float64, at the unit temperature and at others."""
    pairs, size = some_pairs(23), 9
    measured = WindowMeasurer(unit_tau=TAU, gallery_images=size, seed=3).measure(pairs)
    images, texts, owners = pairs.images.astype(np.float64), pairs.texts.astype(np.float64), pairs.owners
    gallery_of = {image: g for g in galleries(pairs.window, size, 3) for image in g.images[: g.num_queries].tolist()}
    for pair, owner in enumerate(owners.tolist()):
        members = set(gallery_of[owner].images.tolist())
        captions = [pair, *(other for other, image in enumerate(owners) if image in members - {owner})]
        scores = {
            "image_to_text": texts[captions] @ images[owner] / TAU,
            "text_to_image": images[[owner, *(members - {owner})]] @ texts[pair] / TAU,
        }
        for name, values in scores.items():
            tokens = measured[name]
            for u in (0.0, math.log(0.8), math.log(1.7)):
                found = tokens.profiles.cross_entropy(u)[pair].item()
                expected = np.log(np.exp(math.exp(u) * values).sum()) - math.exp(u) * values[0]
                assert found == pytest.approx(expected, abs=2e-4)
            top = np.sort(values)[::-1]
            assert tokens.maximum[pair].item() == pytest.approx(top[0])
            assert tokens.margin[pair].item() == pytest.approx(top[0] - top[1])
            assert (tokens.profiles.target[pair] == 0) == (values[0] == top[0])
            assert tokens.hidden[pair].tolist() == (images[owner] if name == "image_to_text" else texts[pair]).tolist()


@cache
def drawn() -> tuple[EmbeddedWindow, Tensor]:
    """Return captions whose image is drawn from softmax(cosine/τ) over all images, and these probabilities.

    So the predictions of text → image are calibrated by construction at the temperature τ.
    """
    generator = torch.Generator().manual_seed(0)
    images, texts = (unit_rows(count, SIZE, generator) for count in (NUM_IMAGES, NUM_CAPTIONS))
    probabilities = (texts.double() @ images.double().T / TAU).softmax(-1)
    owners = torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
    order = owners.argsort(stable=True)  # captions of an image are adjacent
    window = ImageRange(0, 0, NUM_IMAGES)
    pairs = EmbeddedWindow(
        window=window, images=images.numpy(), texts=texts[order].numpy(), owners=owners[order].numpy()
    )
    return pairs, probabilities[order]


def run(pairs: EmbeddedWindow, *, unit_tau: float = TAU) -> HeadroomTest:
    tokens = WindowMeasurer(unit_tau=unit_tau, gallery_images=NUM_IMAGES, seed=0).measure(pairs)["text_to_image"]

    def batches() -> Iterator[tuple[Tokens, Tensor]]:
        yield tokens, torch.from_numpy(pairs.owners)

    return run_headroom_test(batches, NUM_IMAGES, num_folds=5)


def question(own_name: str = "the model's τ = 0.1", unit_tau: float = TAU) -> Question:
    return Question(
        name="text_to_image", title="text → image", files=[], noun="caption", case="pair", document="image",
        candidate="image", features=FEATURES, unit_tau=unit_tau, own_name=own_name,
    )  # fmt: skip


def cosines_of(pairs: EmbeddedWindow) -> Tensor:
    return torch.from_numpy(pairs.texts).double() @ torch.from_numpy(pairs.images).double().T


def test_gains_and_temperatures_are_in_the_units_of_the_model() -> None:
    """A model that was trained at 2.5 times the temperature that suits it gains that constant, whatever the unit."""
    pairs, probabilities = drawn()
    own = 2.5 * TAU
    values = figures(run(pairs, unit_tau=own), question("the model's τ = 0.25", own), least_gain=1.0)
    assert values["best_constant"]["tau"] == pytest.approx(TAU, rel=0.05)
    cosines = cosines_of(pairs)
    # E[log p at τ − log p at the model's own] under the true probabilities, without any sampling
    difference = (cosines / TAU).log_softmax(-1) - (cosines / own).log_softmax(-1)
    expected, gain = (probabilities * difference).sum(-1).mean().item(), Interval(**values["best_constant"]["gain"])
    assert abs(gain.mean - expected) <= gain.half_width
    assert gain.mean > 0.1
    assert values["per_caption"]["hidden"]["tau_mean"] == pytest.approx(TAU, rel=0.1)
    wanted = torch.nn.functional.cross_entropy(cosines / own, torch.from_numpy(pairs.owners))
    assert values["cross_entropy"] == pytest.approx(wanted.item(), abs=1e-4)


def test_a_model_without_a_temperature_is_compared_with_the_best_constant() -> None:
    pairs, _ = drawn()
    unit = find_unit_tau(pairs, NUM_IMAGES, 0)
    assert unit in CANDIDATES
    asked = question("", unit)
    values = figures(run(pairs, unit_tau=unit), asked, least_gain=1.0)
    assert values["ece"] is values["best_constant"]["gain"] is None
    constant = values["best_constant"]["tau"]
    assert constant == pytest.approx(TAU, rel=0.05)
    wanted = torch.nn.functional.cross_entropy(cosines_of(pairs) / constant, torch.from_numpy(pairs.owners))
    assert values["cross_entropy"] == pytest.approx(wanted.item(), abs=1e-3)
    shown = summary(asked, values)
    assert "has no constant temperature of its own" in shown
    assert "model's τ" not in shown
    names = metrics(asked, values)
    assert all(name.startswith("text_to_image/") for name in names)
    assert "text_to_image/best_constant/gain_mnat" not in names


def test_a_best_constant_out_of_reach_is_said() -> None:
    test = run(drawn()[0], unit_tau=20 * TAU)
    shown = verdict(test, question("the model's τ = 2", 20 * TAU), "both", least_gain=1.0)
    assert "the best constant lies at an end of what was looked at, 0.25 to 16" in shown


def test_what_decides_the_figures_is_recorded_and_what_does_not_is_left_out(tmp_path: Path) -> None:
    make_dual_encoder(tmp_path / "model")
    make_pairs(tmp_path / "pairs")

    def record(**changes: object) -> dict[str, object]:
        values = {"model": str(tmp_path / "model"), "images": str(tmp_path / "pairs"), **changes}
        return PairMeasurement.resolve(Headroom(**values)).record()  # type: ignore[arg-type]

    first = record()
    assert first["own_tau"] is None
    assert record(batch_size=3, folds=7, least_gain=2.0) == first
    for name, value in (("gallery_images", 7), ("gallery_seed", 1), ("precision", "bf16")):
        assert record(**{name: value}) == first | {name: value}
    save_training_temperature(tmp_path / "model", 0.03)
    assert record()["own_tau"] == 0.03
