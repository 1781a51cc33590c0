"""Recall and cross-entropy in tiles, and zero-shot accuracy, against brute force in float64; ties and collapse included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tempnet.contrastive.retrieval import accuracy, cross_entropy, recall


def units(rng: np.random.Generator, num: int, size: int) -> Tensor:
    return F.normalize(torch.from_numpy(rng.standard_normal((num, size))), dim=-1).float()


def best_first(scores: np.ndarray, is_own: np.ndarray) -> list[int]:
    """Return the candidates from best to worst; among equals, those that belong to the query come last."""
    return sorted(range(len(scores)), key=lambda at: (-scores[at], is_own[at]))


def brute_force(
    image: np.ndarray, text: np.ndarray, image_of_text: np.ndarray, ks: tuple[int, ...]
) -> dict[str, float]:
    scores = image @ text.T
    belongs = np.arange(len(image))[:, None] == image_of_text[None]
    found: dict[str, list[bool]] = {}
    for name, matrix, own in (("text", scores, belongs), ("image", scores.T, belongs.T)):
        for row, mine in zip(matrix, own, strict=True):
            if mine.any():
                order = best_first(row, mine)
                for k in ks:
                    found.setdefault(f"{name}_recall@{k}", []).append(bool(mine[order[:k]].any()))
    figures = {name: float(np.mean(hits)) for name, hits in found.items()}
    return figures | {"mean_recall": float(np.mean(list(figures.values())))}


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Draw images with different numbers of texts, some of them with none, and texts in any order."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_texts = draw(st.lists(st.integers(0, 6), min_size=1, max_size=17).filter(any))
    image_of_text = rng.permutation(np.repeat(np.arange(len(num_texts)), num_texts))
    return {"rng": rng, "image_of_text": image_of_text, "num_images": len(num_texts)}


@given(problems(), st.sampled_from([1, 3, 64]), st.integers(3, 9), st.booleans())
def test_recall_is_that_of_brute_force(problem: dict[str, Any], tile_size: int, size: int, with_ties: bool) -> None:
    """With ties, embeddings are a few signed axes: most scores are equal, exact in any arithmetic, and count against."""
    rng, image_of_text = problem["rng"], problem["image_of_text"]
    axes = torch.cat([torch.eye(size), -torch.eye(size)])
    text, image = (
        axes[torch.from_numpy(rng.integers(0, 2 * size, num))] if with_ties else units(rng, num, size)
        for num in (len(image_of_text), problem["num_images"])
    )
    for ks in ((1, 2, 3), (1, 5, 10)):
        expected = brute_force(image.double().numpy(), text.double().numpy(), image_of_text, ks)
        found = recall(image, text, torch.from_numpy(image_of_text), ks, tile_size)
        assert found == pytest.approx(expected, abs=1e-12)


def test_a_collapsed_model_and_one_without_numbers_find_nothing() -> None:
    """All rows are equal, with products that are not exact in float32, so that any rounding would break the ties."""
    row = units(np.random.default_rng(0), 1, 256)
    of = torch.arange(500) // 5
    for image, text in (
        (row.expand(100, -1), row.expand(500, -1)),
        (torch.full((100, 8), torch.nan), torch.full((500, 8), torch.nan)),
    ):
        for tile_size in (7, 64, 2048):
            assert set(recall(image, text, of, tile_size=tile_size).values()) == {0.0}
        assert set(accuracy(text, image, of, tile_size=7).values()) == {0.0}


def brute_force_cross_entropy(
    image: np.ndarray, text: np.ndarray, owners: np.ndarray, tau: tuple[np.ndarray, np.ndarray] | None
) -> float:
    """Compute the cross-entropy one text at a time, with all its candidates written out."""
    scores = image @ text.T
    image_tau, text_tau = tau or (np.ones(len(image)), np.ones(len(text)))
    if tau is None:
        scores = scores.clip(1e-6 - 1, 1 - 1e-6)  # rows of two numbers may be as good as parallel
        scores = np.log1p(scores) - np.log1p(-scores)
    costs = []
    for number, owner in enumerate(owners):
        texts = [k for k in range(len(text)) if k == number or owners[k] != owner]
        costs.append(-np.log(np.exp(scores[owner, number] / image_tau[owner])))
        costs[-1] += np.log(np.exp(scores[owner, texts] / image_tau[owner]).sum())
        costs.append(np.log(np.exp((scores[:, number] - scores[owner, number]) / text_tau[number]).sum()))
    return float(np.mean(costs))


@given(problems(), st.sampled_from([1, 2, 5, 64]), st.integers(2, 9), st.booleans())
def test_cross_entropy_is_that_of_brute_force(
    problem: dict[str, Any], tile_size: int, size: int, has_temperature: bool
) -> None:
    rng, owners = problem["rng"], problem["image_of_text"]
    text, image = units(rng, len(owners), size), units(rng, problem["num_images"], size)
    tau = (rng.uniform(0.05, 2.0, len(image)), rng.uniform(0.05, 2.0, len(text))) if has_temperature else None
    given = (torch.from_numpy(tau[0]), torch.from_numpy(tau[1])) if tau else None
    expected = brute_force_cross_entropy(image.double().numpy(), text.double().numpy(), owners, tau)
    found = cross_entropy(image, text, torch.from_numpy(owners), given, tile_size)
    assert found == pytest.approx(expected, rel=1e-6 if tau is None else 1e-10)  # artanh is steep at its margin


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 8), st.sampled_from([1, 4, 100]))
def test_accuracy_is_that_of_brute_force(seed: int, num_images: int, num_classes: int, tile_size: int) -> None:
    rng = np.random.default_rng(seed)
    image, classes = units(rng, num_images, 6), units(rng, num_classes, 6)
    labels = rng.integers(0, num_classes, num_images)
    order = np.argsort(-(image.double() @ classes.double().T).numpy(), axis=1)
    expected = {
        f"top@{k}": np.mean([label in row[:k] for label, row in zip(labels, order, strict=True)]) for k in (1, 3, 5)
    }
    assert accuracy(image, classes, torch.from_numpy(labels), tile_size=tile_size) == pytest.approx(expected)


def test_what_cannot_be_scored_is_refused() -> None:
    image, text, of = torch.eye(4)[:2], torch.eye(4)[:3], torch.tensor([0, 1, 1])
    with pytest.raises(ValueError, match=r"image_of_text holds 2, but there are 2 images: expected 0 … 1"):
        recall(image, text, torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"image_of_text has shape \(2,\): expected \(3,\)"):
        recall(image, text, of[:2])
    with pytest.raises(ValueError, match=r"text has shape \(0, 4\)"):
        recall(image, text[:0], of[:0])
    with pytest.raises(ValueError, match=r"differ in size: image \(2, 3\), text \(3, 4\)"):
        recall(image[:, :3], text, of)
    with pytest.raises(ValueError, match=r"class_of_image holds -1, but there are 3 classes"):
        accuracy(image, text, torch.tensor([-1, 0]))
