"""Sentence encoders: mean pooling, the saved directory, and the objective on spans against its formula."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedModel

from tempnet import TempNet, TempNetConfig
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.state import SampleState
from tempnet.contrastive.unimodal import UnimodalLoss
from tempnet.models.sentence_encoder import (
    IGNORE_INDEX,
    SentenceEncoder,
    TemperatureSentenceEncoder,
    mean_pooling,
    num_positions,
)
from tempnet.models.towers import random_tower
from tests.tempnet.models.tiny_towers import SIZES, tiny_tokenizer


@pytest.fixture
def encoder() -> SentenceEncoder:
    torch.manual_seed(0)
    return SentenceEncoder(
        random_tower("roberta", "text", **{**SIZES["roberta"], "max_position_embeddings": 20})
    ).eval()


def test_the_mean_is_over_tokens_and_in_float32() -> None:
    tokens = torch.randn(3, 5, 4)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    found = mean_pooling(tokens.bfloat16(), mask)
    assert found.dtype == torch.float32
    wide = tokens.bfloat16().float()
    for row, count in ((0, 5), (1, 2)):
        torch.testing.assert_close(found[row], sum(wide[row, token] for token in range(count)) / count)
    assert found[2].tolist() == [0.0] * 4


@pytest.mark.parametrize("kind", ["bert", "data2vec-text", "ibert", "luke", "mpnet", "roberta", "xlm-roberta-xl"])
def test_an_encoder_reads_as_many_tokens_as_it_has_positions_for(kind: str) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = AutoConfig.for_model(kind, vocab_size=9, max_position_embeddings=20, **sizes)
    tower, number = AutoModel.from_config(config).eval(), num_positions(config)
    tower(input_ids=torch.full((1, number), 7))
    with pytest.raises((IndexError, RuntimeError)):
        tower(input_ids=torch.full((1, number + 1), 7))


def test_what_is_saved_is_read_here_by_transformers_and_by_sentence_transformers(
    encoder: SentenceEncoder, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    tokenizer = tiny_tokenizer(list("abcdefgh"))
    encoder.save_pretrained(tmp_path, tokenizer, num_tokens=5)
    texts = ["b c d", "e", "f g h b c d e f g h"]
    expected = encoder.encode(texts, tokenizer, num_tokens=5)
    again = SentenceEncoder.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again.encode(texts, tokenizer, num_tokens=5), expected)
    AutoModel.from_pretrained(tmp_path)
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    torch.testing.assert_close(loaded.encode(texts, convert_to_tensor=True), expected, rtol=0, atol=1e-5)
    assert loaded.max_seq_length == 5
    pooling = json.loads((tmp_path / "1_Pooling" / "config.json").read_text())
    assert pooling["word_embedding_dimension"] == 16
    assert [name for name, value in pooling.items() if value is True] == ["pooling_mode_mean_tokens"]
    with pytest.raises(ValueError, match="nowhere holds no Transformers model"):
        SentenceEncoder.from_pretrained(tmp_path / "nowhere")
    loaded[1].pooling_mode = "cls"
    loaded.save(str(tmp_path / "first"))
    with pytest.raises(ValueError, match="first does not pool its tokens by their mean"):
        SentenceEncoder.from_pretrained(tmp_path / "first")


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
def test_loss_and_gradients_equal_the_formula(kind: str) -> None:
    batch = make_batch()
    results = []
    for way in ("module", "formula"):
        model, loss = make_model(kind), make_loss("tempnet")
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
