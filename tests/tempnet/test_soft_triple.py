"""SoftTriple against its formula in float64, and TripleEntropy on real classifiers against its own, also over ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from tempnet import soft_triple
from tempnet.contrastive.state import World
from tempnet.models.triple_entropy_classifier import TripleEntropyClassifier
from tempnet.soft_triple import SoftTriple, SoftTripleConfig, supervised_contrastive_loss, token_labels
from tests.tempnet.models.tiny_towers import SIZES


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


@pytest.mark.parametrize("tile_values", [1 << 22, 7])
@pytest.mark.parametrize(("num_classes", "num_centers", "regularizer"), [(2, 1, 0.0), (3, 4, 0.2)])
def test_loss_and_gradients(
    tile_values: int, num_classes: int, num_centers: int, regularizer: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soft_triple, "_TILE_VALUES", tile_values)
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


def test_equal_centres_have_finite_gradients_and_nothing_to_count_is_no_loss() -> None:
    module = SoftTriple(4, 2, SoftTripleConfig(num_centers=3, regularizer=1.0))
    with torch.no_grad():
        module.centers.copy_(torch.ones_like(module.centers))
    module(torch.randn(5, 4), torch.zeros(5, dtype=torch.int64)).backward()
    assert torch.isfinite(module.centers.grad).all()
    nothing = SoftTriple(4, 2, SoftTripleConfig(num_centers=2))(
        torch.randn(3, 4, requires_grad=True), torch.full((3,), -100)
    )
    assert nothing.item() == 0.0
    nothing.backward()


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


def test_labels_out_of_range_and_one_class_are_refused() -> None:
    module = SoftTriple(4, 3, SoftTripleConfig(num_centers=2))
    for label in (-1, 3):
        with pytest.raises(ValueError, match=rf"label {label} is not in \[0, 3\)"):
            module(torch.randn(2, 4), torch.tensor([0, label]))
    with pytest.raises(ValueError, match="num_classes = 1"):
        SoftTriple(4, 1, SoftTripleConfig())


CLASSES, WIDTH, TOKENS, SENTENCES = 3, 16, 7, 6


class OneOfTwo(World):
    """One rank of two, whose sums over ranks are given values."""

    total: Tensor

    def sum(self, x: Tensor) -> Tensor:
        return OneOfTwo.total.to(x)


def make_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, num_labels=CLASSES, pad_token_id=0, **SIZES[kind])
    return AutoModelForSequenceClassification.from_config(config).eval()


def make_centres(**settings: Any) -> SoftTriple:
    torch.manual_seed(1)
    return SoftTriple(
        WIDTH, CLASSES, SoftTripleConfig(**{"num_centers": 4, "regularizer": 0.2, "beta": 0.6, **settings})
    )


def make_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(2, TOKENS + 1, (SENTENCES,), generator=generator)
    mask = (torch.arange(TOKENS) < lengths[:, None]).long()
    ids = torch.randint(1, 40, (SENTENCES, TOKENS), generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(SENTENCES) % CLASSES}


def triple_entropy_by_the_formula(model: PreTrainedModel, centres: SoftTriple, batch: dict[str, Tensor]) -> Tensor:
    """Compute the loss sentence by sentence, without padding; SoftTriple has its own tests."""
    crosses, tokens, labels = [], [], []
    for ids, mask, label in zip(*batch.values(), strict=True):
        length = int(mask.sum())
        few = {"input_ids": ids[None, :length], "attention_mask": mask[None, :length]}
        crosses.append(F.cross_entropy(model(**few)["logits"], label[None]))
        tokens.append(model.base_model(**few)["last_hidden_state"][0])
        labels += [int(label)] * length
    beta = centres.config.beta
    return beta * torch.stack(crosses).mean() + (1 - beta) * centres(torch.cat(tokens), torch.tensor(labels))


def gradients(*parts: torch.nn.Module) -> list[Tensor]:
    return [parameter.grad for part in parts for parameter in part.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("kind", ["roberta", "bert", "distilbert"])
def test_triple_entropy_and_its_gradients_equal_the_formula(kind: str) -> None:
    batch = make_batch()
    model, centres = make_model(kind), make_centres()
    output = TripleEntropyClassifier(model, centres)(**batch)
    output["loss"].backward()
    other, other_centres = make_model(kind), make_centres()
    expected = triple_entropy_by_the_formula(other, other_centres, batch)
    expected.backward()
    torch.testing.assert_close(output["loss"], expected, rtol=1e-5, atol=1e-6)
    for found, wanted in zip(gradients(model, centres), gradients(other, other_centres), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    few = {name: batch[name] for name in ("input_ids", "attention_mask")}
    torch.testing.assert_close(output["logits"], other(**few)["logits"].detach())


def test_two_ranks_with_unequal_parts_average_to_the_whole() -> None:
    batch = make_batch()
    model, centres = make_model("bert"), make_centres()
    whole = TripleEntropyClassifier(model, centres)(**batch)
    whole["loss"].backward()
    OneOfTwo.total = torch.tensor([SENTENCES, int(batch["attention_mask"].sum())])
    other, other_centres = make_model("bert"), make_centres()
    losses = []
    for rank, part in enumerate((slice(0, 2), slice(2, SENTENCES))):
        module = TripleEntropyClassifier(other, other_centres, world=OneOfTwo(rank, 2))
        losses.append(module(**{name: value[part] for name, value in batch.items()})["loss"])
    average = torch.stack(losses).mean()
    average.backward()
    torch.testing.assert_close(average, whole["loss"])
    for found, wanted in zip(gradients(other, other_centres), gradients(model, centres), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_triple_entropy_without_centres_is_plain_cross_entropy() -> None:
    batch, model = make_batch(), make_model("roberta")
    output = TripleEntropyClassifier(model, None)(**batch)
    assert output["soft_triple"] is None
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])["logits"]
    torch.testing.assert_close(output["loss"], F.cross_entropy(logits, batch["labels"]))


def supervised_contrastive_by_the_sum(x: Tensor, labels: list[int], temperature: float) -> Tensor:
    """Compute the loss with loops, one pair at a time; a sentence without another of its class has the term 0."""
    unit = x / x.square().sum(-1, keepdim=True).sqrt()
    total = torch.zeros((), dtype=x.dtype)
    for i, label in enumerate(labels):
        others = [k for k in range(len(labels)) if k != i]
        positives = [j for j in others if labels[j] == label]
        for j in positives:
            share = (unit[i] @ unit[j] / temperature).exp() / sum(
                (unit[i] @ unit[k] / temperature).exp() for k in others
            )
            total = total - share.log() / len(positives)
    return total / len(labels)


@pytest.mark.parametrize("labels", [[0, 1, 0, 2, 1, 0, 0], [0, 1], [3]])
def test_the_supervised_contrastive_loss_is_the_sum_over_pairs(labels: list[int]) -> None:
    x = torch.randn(len(labels), 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    loss = supervised_contrastive_loss(x, torch.tensor(labels), 0.3, World.alone())
    expected = supervised_contrastive_by_the_sum(x, labels, 0.3)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    (found,) = torch.autograd.grad(loss, x)
    wanted = torch.autograd.grad(expected, x)[0] if expected.requires_grad else torch.zeros_like(x)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-12)


def test_a_classifier_weighs_cross_entropy_and_the_contrastive_loss_of_first_tokens() -> None:
    batch, model = make_batch(), make_model("bert")
    output = TripleEntropyClassifier(model, None, contrastive_weight=0.9, contrastive_temperature=0.2)(**batch)
    few = {name: batch[name] for name in ("input_ids", "attention_mask")}
    first = model.base_model(**few)["last_hidden_state"][:, 0]
    contrastive = supervised_contrastive_by_the_sum(first, batch["labels"].tolist(), 0.2)
    torch.testing.assert_close(output["contrastive"], contrastive.detach())
    expected = 0.1 * F.cross_entropy(model(**few)["logits"], batch["labels"]) + 0.9 * contrastive
    torch.testing.assert_close(output["loss"], expected)
    for settings, message in (
        ((1.5, 0.3), r"contrastive_weight = 1.5 must lie in \[0, 1\]"),
        ((0.5, 0.0), "temperature = 0"),
    ):
        with pytest.raises(ValueError, match=message):
            TripleEntropyClassifier(model, None, contrastive_weight=settings[0], contrastive_temperature=settings[1])


def test_padding_can_be_counted_as_the_authors_code_does() -> None:
    batch = make_batch()
    model, centres = make_model("bert"), make_centres(regularizer=0.0, beta=0.0)
    counted = TripleEntropyClassifier(model, centres, with_padding=True)(**batch)["loss"]
    few = {name: batch[name] for name in ("input_ids", "attention_mask")}
    hidden = model.base_model(**few)["last_hidden_state"]
    torch.testing.assert_close(counted, centres(hidden, batch["labels"][:, None].expand(SENTENCES, TOKENS)))
    assert not torch.allclose(counted, TripleEntropyClassifier(model, centres)(**batch)["loss"])


def test_centres_of_other_classes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the centres are for 2 classes of width 16, the model's are \(3, 16\)"):
        TripleEntropyClassifier(make_model("bert"), SoftTriple(WIDTH, 2, SoftTripleConfig(num_centers=2)))
