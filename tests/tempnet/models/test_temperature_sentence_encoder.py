"""The objective on spans against its formula, with all logits and one sentence at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel

from tempnet import TempNet, TempNetConfig
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.state import SampleState
from tempnet.contrastive.unimodal import UnimodalLoss
from tempnet.models.temperature_sentence_encoder import IGNORE_INDEX, TemperatureSentenceEncoder

VOCABULARY, WIDTH, TOKENS = 50, 16, 9
NUM_DOCUMENTS, NUM_ANCHORS, NUM_POSITIVES = 3, 2, 2
KINDS: dict[str, dict[str, Any]] = {
    "roberta": {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    "bert": {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    "distilbert": {"n_layers": 1, "n_heads": 2, "hidden_dim": 32},
    "modernbert": {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    "electra": {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "embedding_size": 8},
}


def make_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    size = "dim" if kind == "distilbert" else "hidden_size"
    config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, **{size: WIDTH}, **special, **KINDS[kind])
    return AutoModelForMaskedLM.from_config(config).double().eval()


def make_loss(name: str) -> UnimodalLoss:
    config = ContrastiveLossConfig.for_name(name, rho=0.5, tau=0.05)
    tempnet = None
    if config.kind.temperature == "tempnet":
        tempnet = TempNet(TempNetConfig.for_embeddings(WIDTH, rho=0.5, hidden_size=6, num_prototypes=4)).double()
    state = SampleState(10, config.state_columns) if config.state_columns else None
    return UnimodalLoss(config, tempnet=tempnet, state=state)


def make_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def spans(*shape: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(3, VOCABULARY, (*shape, TOKENS), generator=generator)
        lengths = torch.randint(4, TOKENS + 1, shape, generator=generator)
        mask = (torch.arange(TOKENS) < lengths[..., None]).long()
        return ids * mask, mask

    anchor_ids, anchor_mask = spans(NUM_DOCUMENTS, NUM_ANCHORS)
    positive_ids, positive_mask = spans(NUM_DOCUMENTS, NUM_ANCHORS, NUM_POSITIVES)
    is_masked = (torch.rand(anchor_ids.shape, generator=generator) < 0.4) & (anchor_mask == 1)
    return {
        "anchor_ids": anchor_ids,
        "anchor_mask": anchor_mask,
        "mlm_labels": torch.where(
            is_masked, torch.randint(VOCABULARY, anchor_ids.shape, generator=generator), IGNORE_INDEX
        ),
        "positive_ids": positive_ids,
        "positive_mask": positive_mask,
        "ids": torch.tensor([7, 2, 5]),
    }


def sentence(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Embed one span without its padding, as the mean of its tokens."""
    length = int(mask.sum())
    hidden = model.base_model(input_ids=ids[None, :length], attention_mask=mask[None, :length])["last_hidden_state"]
    return hidden[0].mean(0)


def by_the_formula(model: PreTrainedModel, loss: UnimodalLoss, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    anchors, positives, ids, losses = [], [], [], []
    for d in range(NUM_DOCUMENTS):
        for a in range(NUM_ANCHORS):
            tokens, mask = batch["anchor_ids"][d, a], batch["anchor_mask"][d, a]
            anchors.append(sentence(model, tokens, mask))
            each = [
                sentence(model, batch["positive_ids"][d, a, p], batch["positive_mask"][d, a, p])
                for p in range(NUM_POSITIVES)
            ]
            positives.append(torch.stack(each).mean(0))
            ids.append(int(batch["ids"][d]))
            labels = batch["mlm_labels"][d, a]
            logits = model(input_ids=tokens[None], attention_mask=mask[None])["logits"][0]
            losses += [F.cross_entropy(logits[at], labels[at]) for at in range(TOKENS) if labels[at] != IGNORE_INDEX]
    output = loss(
        F.normalize(torch.stack(anchors), dim=-1),
        F.normalize(torch.stack(positives), dim=-1),
        torch.tensor(ids),
        gamma=1.0,
    )
    return output["loss"], torch.stack(losses).mean()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["clip_fixed", "tempnet"])
def test_loss_and_gradients_equal_the_formula(kind: str, name: str) -> None:
    batch = make_batch()
    results = []
    for way in ("module", "formula"):
        model, loss = make_model(kind), make_loss(name)
        if way == "module":
            module = TemperatureSentenceEncoder(model, loss, contrastive_weight=0.7, mlm_weight=1.3).eval()
            output = module(**batch, gamma=1.0)
            value = output["loss"]
            assert output["mlm_loss"] is not None
        else:
            loss.eval()
            contrastive, mlm = by_the_formula(model, loss, batch)
            value = 0.7 * contrastive + 1.3 * mlm
        value.backward()
        gradients = {
            key: parameter.grad
            for part, prefix in ((model, "model"), (loss, "loss"))
            for key, parameter in ((f"{prefix}.{key}", parameter) for key, parameter in part.named_parameters())
            if parameter.grad is not None
        }
        results.append((value.detach(), gradients))
    (value, gradients), (expected, wanted) = results
    torch.testing.assert_close(value.double(), expected.double(), rtol=1e-6, atol=1e-6)
    assert {key for key, grad in wanted.items() if grad.abs().max() > 1e-9} <= gradients.keys()
    for key, grad in gradients.items():
        other = wanted.get(key, torch.zeros_like(grad))
        torch.testing.assert_close(grad, other, rtol=1e-5, atol=1e-6 * float(1 + other.abs().max()))


def test_an_objective_can_be_left_out() -> None:
    batch = make_batch()
    alone = TemperatureSentenceEncoder(make_model("roberta"), None, contrastive_weight=0.0)
    output = alone(**batch, gamma=1.0)
    assert output["contrastive"] is None
    torch.testing.assert_close(output["loss"], output["mlm_loss"])

    model = make_model("roberta")
    sentences = TemperatureSentenceEncoder(model, make_loss("clip_fixed"), mlm_weight=0.0)
    output = sentences(**batch, gamma=1.0)
    assert output["mlm_loss"] is None
    output["loss"].backward()
    body = {id(parameter) for parameter in model.base_model.parameters()}
    head = {name for name, parameter in model.named_parameters() if id(parameter) not in body}
    assert head
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name in head) == (not parameter.requires_grad), name


def test_a_batch_without_masked_tokens_has_no_mlm_loss() -> None:
    batch = make_batch() | {"mlm_labels": torch.full((NUM_DOCUMENTS, NUM_ANCHORS, TOKENS), IGNORE_INDEX)}
    module = TemperatureSentenceEncoder(make_model("roberta"), make_loss("clip_fixed"))
    output = module(**batch, gamma=1.0)
    assert float(output["mlm_loss"]) == 0.0
    assert torch.equal(output["loss"], output["contrastive"]["loss"])


def test_what_does_not_fit_is_refused() -> None:
    model = make_model("roberta")
    with pytest.raises(ValueError, match="are both 0: nothing is left to learn"):
        TemperatureSentenceEncoder(model, None, contrastive_weight=0.0, mlm_weight=0.0)
    with pytest.raises(ValueError, match="go together"):
        TemperatureSentenceEncoder(model, None)
    other = UnimodalLoss(
        ContrastiveLossConfig.for_name("tempnet_in_batch"), tempnet=TempNet(TempNetConfig.for_embeddings(8, rho=1.0))
    )
    with pytest.raises(ValueError, match="embeddings of 8, the encoder's have 16"):
        TemperatureSentenceEncoder(model, other)
    network = TempNet(TempNetConfig.for_embeddings(WIDTH, rho=1.0, num_prototypes=9))
    loss = UnimodalLoss(ContrastiveLossConfig.for_name("tempnet_in_batch"), tempnet=network)
    module = TemperatureSentenceEncoder(model, loss)
    with pytest.raises(ValueError, match="has 9 prototypes, and there are only 4 sentences"):
        module.init_prototypes(torch.zeros(4, WIDTH))
