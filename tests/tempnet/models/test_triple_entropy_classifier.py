"""TripleEntropy on a real classifier against its formula, one sentence at a time, and divided among ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from tempnet.contrastive.world import World
from tempnet.models.triple_entropy_classifier import TripleEntropyClassifier
from tempnet.soft_triple import SoftTriple, SoftTripleConfig

CLASSES, WIDTH, TOKENS, SENTENCES = 3, 16, 7, 6
KINDS: dict[str, dict[str, Any]] = {
    "roberta": {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    "bert": {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    "distilbert": {"dim": WIDTH, "n_layers": 1, "n_heads": 2, "hidden_dim": 32},
}


class OneOfTwo(World):
    """One rank of two, whose sums over ranks are given values."""

    total: Tensor

    def sum(self, x: Tensor) -> Tensor:
        return OneOfTwo.total.to(x)


def make_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=40, num_labels=CLASSES, pad_token_id=0, **KINDS[kind])
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


def by_the_formula(model: PreTrainedModel, centres: SoftTriple, batch: dict[str, Tensor]) -> Tensor:
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


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_equal_the_formula(kind: str) -> None:
    batch = make_batch()
    model, centres = make_model(kind), make_centres()
    output = TripleEntropyClassifier(model, centres)(**batch)
    output["loss"].backward()
    other, other_centres = make_model(kind), make_centres()
    expected = by_the_formula(other, other_centres, batch)
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


def test_without_centres_it_is_plain_cross_entropy() -> None:
    batch, model = make_batch(), make_model("roberta")
    output = TripleEntropyClassifier(model, None)(**batch)
    assert output["soft_triple"] is None
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])["logits"]
    torch.testing.assert_close(output["loss"], F.cross_entropy(logits, batch["labels"]))


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
