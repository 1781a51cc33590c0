"""SoftTriple against its formula written out in float64, tile by tile and whole, in any dtype."""

from __future__ import annotations

import math

import pytest
import torch
from pytorch_metric_learning.losses import SoftTripleLoss
from torch import Tensor

from tempnet import soft_triple
from tempnet.soft_triple import SoftTriple, SoftTripleConfig, token_labels


def by_the_formula(x: Tensor, labels: Tensor, centers: Tensor, config: SoftTripleConfig) -> Tensor:
    """Compute the loss with loops, one number at a time."""
    num_classes, num_centers, _ = centers.shape
    unit = centers / centers.square().sum(-1, keepdim=True).sqrt()
    losses = []
    for row, label in zip(x.reshape(-1, x.shape[-1]), labels.reshape(-1).tolist(), strict=True):
        if label == -100:
            continue
        row = row / row.square().sum().sqrt()
        scores = []
        for c in range(num_classes):
            cosines = torch.stack([row @ unit[c, k] for k in range(num_centers)])
            weights = (cosines / config.gamma).exp()
            scores.append((weights / weights.sum() * cosines).sum() - (config.margin if c == label else 0.0))
        scaled = config.scale * torch.stack(scores)
        losses.append(scaled.logsumexp(0) - scaled[label])
    loss = torch.stack(losses).mean()
    if config.regularizer:
        pairs = [
            (2 - 2 * unit[c, s] @ unit[c, t] + 1e-5).sqrt()
            for c in range(num_classes)
            for s in range(num_centers)
            for t in range(s + 1, num_centers)
        ]
        loss = loss + config.regularizer * torch.stack(pairs).sum() / (num_classes * num_centers * (num_centers - 1))
    return loss


@pytest.fixture(params=[1 << 22, 7, 1], ids=lambda size: f"tiles of {size}")
def tile_values(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(soft_triple, "_TILE_VALUES", request.param)
    return request.param


@pytest.mark.parametrize(
    ("num_classes", "num_centers", "regularizer"), [(2, 1, 0.0), (3, 4, 0.0), (3, 4, 0.2), (5, 2, 0.2)]
)
def test_loss_and_gradients(tile_values: int, num_classes: int, num_centers: int, regularizer: float) -> None:
    config = SoftTripleConfig(num_centers=num_centers, regularizer=regularizer, gamma=0.2, margin=0.1)
    torch.manual_seed(num_classes)
    module = SoftTriple(6, num_classes, config).double()
    x = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(num_classes, (4, 5))
    labels[1, 3:] = -100
    loss = module(x, labels)
    expected = by_the_formula(x, labels, module.centers, config)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    for found, wanted in zip(
        torch.autograd.grad(loss, [x, module.centers]), torch.autograd.grad(expected, [x, module.centers]), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


def test_the_public_library_agrees() -> None:
    config = SoftTripleConfig(num_centers=5, gamma=0.07, scale=8.0, margin=0.1)
    torch.manual_seed(7)
    module = SoftTriple(12, 4, config).double()
    theirs = SoftTripleLoss(4, 12, centers_per_class=5, la=8.0, gamma=0.07, margin=0.1).double()
    with torch.no_grad():
        theirs.fc.copy_(module.centers.view(20, 12).T)
    x, labels = torch.randn(30, 12, dtype=torch.float64, requires_grad=True), torch.randint(4, (30,))
    found, expected = module(x, labels), theirs(x, labels)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for value, wanted in zip(torch.autograd.grad(found, x), torch.autograd.grad(expected, x), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_arithmetic_is_float32_and_parameters_keep_their_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = SoftTripleConfig(num_centers=3, regularizer=0.1)
    module = SoftTriple(8, 4, config).to(dtype)
    x = torch.randn(10, 8).to(dtype).requires_grad_()
    labels = torch.randint(4, (10,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(x, labels)
    assert loss.dtype == torch.float32
    assert module.centers.dtype == dtype
    exact = by_the_formula(x.detach().double(), labels, module.centers.detach().double(), config)
    assert loss.item() == pytest.approx(float(exact), rel=2e-6)
    loss.backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert torch.isfinite(module.centers.grad).all()


def test_equal_centres_have_finite_gradients() -> None:
    module = SoftTriple(4, 2, SoftTripleConfig(num_centers=3, regularizer=1.0))
    with torch.no_grad():
        module.centers.copy_(torch.ones_like(module.centers))
    module(torch.randn(5, 4), torch.zeros(5, dtype=torch.int64)).backward()
    assert torch.isfinite(module.centers.grad).all()


def test_nothing_to_count_is_no_loss() -> None:
    module = SoftTriple(4, 2, SoftTripleConfig(num_centers=2))
    loss = module(torch.randn(3, 4, requires_grad=True), torch.full((3,), -100))
    assert float(loss) == 0.0
    loss.backward()


def test_class_similarities_are_what_the_loss_compares() -> None:
    torch.manual_seed(3)
    config = SoftTripleConfig(num_centers=3, margin=0.0)
    module = SoftTriple(6, 4, config).double()
    x, labels = torch.randn(2, 7, 6, dtype=torch.float64), torch.randint(4, (2, 7))
    scores = module.class_similarities(x)
    assert scores.shape == (2, 7, 4)
    expected = torch.nn.functional.cross_entropy(config.scale * scores.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(module(x, labels), expected)


def test_tokens_bear_their_sentences_label() -> None:
    labels, mask = torch.tensor([1, 0]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert token_labels(labels, mask).tolist() == [[1, 1, -100], [0, 0, 0]]
    assert token_labels(labels, mask, with_padding=True).tolist() == [[1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_centers": 0}, "num_centers = 0"),
        ({"gamma": 0.0}, "gamma = 0"),
        ({"scale": math.inf}, "scale = inf"),
        ({"margin": -0.1}, "margin = -0.1"),
        ({"beta": 1.1}, r"beta = 1.1 must lie in \[0, 1\]"),
    ],
)
def test_impossible_settings_are_refused_by_name(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SoftTripleConfig(**values)


@pytest.mark.parametrize("label", [-1, 3])
def test_labels_out_of_range_are_refused(label: int) -> None:
    module = SoftTriple(4, 3, SoftTripleConfig(num_centers=2))
    with pytest.raises(ValueError, match=rf"label {label} is not in \[0, 3\)"):
        module(torch.randn(2, 4), torch.tensor([0, label]))


def test_one_class_is_refused() -> None:
    with pytest.raises(ValueError, match="num_classes = 1"):
        SoftTriple(4, 1, SoftTripleConfig())
