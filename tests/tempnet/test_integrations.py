"""Test the losses in the trainers of other libraries, against plain PyTorch, and TempNets on the hub."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from tempnet import TempNet, TempNetConfig
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.integrations import ClipLoss, SentencePairLoss, TrainerLoss
from tempnet.loading import load_tempnet
from tempnet.softmax.config import TemperatureLossConfig

VOCABULARY, DIM = 37, 16


def cross_entropy(similarities: Tensor, tau: Tensor | float) -> Tensor:
    targets = torch.arange(len(similarities))
    return F.cross_entropy(similarities / torch.as_tensor(tau).view(-1, 1), targets)


def test_the_trainer_of_transformers_trains_a_tempnet_with_its_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0))
    network = TempNet(TempNetConfig.for_logits(VOCABULARY, rho=0.0, hidden_size=8, num_prototypes=4))
    loss = TrainerLoss(model, network, TemperatureLossConfig(name="ts_ce", rho=0.0))
    ids = torch.randint(VOCABULARY, (8, 10))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.2, -100)
    outputs = model(input_ids=ids)
    logits = outputs.logits[:, :-1, :VOCABULARY]
    expected = F.cross_entropy((logits / network(logits)[..., None]).flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(loss(outputs, labels), expected)
    torch.testing.assert_close(loss(outputs, labels, 7) * 7 / (labels[:, 1:] != -100).sum(), expected)
    before = network.first_layer.weight.detach().clone()
    options = TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True, learning_rate=1e-2,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    rows: Any = [{"input_ids": row, "labels": own} for row, own in zip(ids, labels, strict=True)]
    result = Trainer(model, options, train_dataset=rows, compute_loss_func=loss).train()
    assert 2 < result.training_loss < 6
    assert not torch.equal(before, network.first_layer.weight)


@pytest.mark.parametrize("name", ["clip_fixed", "tempnet_in_batch", "temperature_free", "sogclr", "neuclip"])
def test_sentence_transformers_train_with_every_kind_of_loss(name: str, tmp_path: Path) -> None:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(20))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(tmp_path)
    sizes = {"hidden_size": DIM, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(tmp_path)
    body = Transformer(str(tmp_path))
    model = SentenceTransformer(modules=[body, Pooling(DIM)], device="cpu")
    config = ContrastiveLossConfig.for_name(name, rho=1.0)
    loss = SentencePairLoss(model, config, num_samples=8)
    pairs = [(f"w{number} w{number + 1}", f"w{number + 2} w{number}") for number in range(8)]
    columns = [model.tokenize([pair[side] for pair in pairs]) for side in (0, 1)]
    with torch.no_grad():
        value = loss.eval()(columns, torch.arange(8))
        if name == "clip_fixed":
            ends = torch.cat([F.normalize(model(column)["sentence_embedding"], dim=-1) for column in columns])
            similarities = (ends @ ends.T / config.tau).fill_diagonal_(-torch.inf)
            assert value.item() == pytest.approx(
                F.cross_entropy(similarities, torch.arange(16).roll(8)).item(), rel=1e-5
            )
    options = SentenceTransformerTrainingArguments(
        str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    anchors, positives = zip(*pairs, strict=True)
    data = Dataset.from_dict({"anchor": anchors, "positive": positives, "label": range(8)})
    result = SentenceTransformerTrainer(model, options, train_dataset=data, loss=loss).train()
    assert torch.isfinite(torch.tensor(result.training_loss))


@pytest.mark.parametrize("name", ["clip", "tempnet", "isogclr", "temperature_free", "siglip", "tempnet_neuclip"])
def test_the_loss_of_open_clip_has_the_same_signature(name: str) -> None:
    torch.manual_seed(0)
    image, text = (F.normalize(torch.randn(6, DIM), dim=-1).requires_grad_() for _ in range(2))
    config = ContrastiveLossConfig.for_name(name, rho=1.0)
    loss = ClipLoss(config, embedding_size=DIM, num_samples=10)
    ids = torch.arange(6) if config.state_columns else None
    value = loss(image_features=image, text_features=text, logit_scale=torch.tensor(100.0), output_dict=True, ids=ids)
    value["contrastive_loss"].backward()
    assert image.grad is not None
    if name == "clip":
        similarities = image @ text.T
        expected = (cross_entropy(similarities, config.tau) + cross_entropy(similarities.T, config.tau)) / 2
        torch.testing.assert_close(value["contrastive_loss"], expected)
    if config.state_columns:
        with pytest.raises(ValueError, match="give the samples' ids"):
            loss(image, text)


class LocalHub:
    """Stands for `huggingface_hub.HfApi`, because no hub can be reached: uploads into the cache that downloads read."""

    cache: Path

    def create_repo(self, repository: str, *, private: bool, exist_ok: bool) -> None:
        assert private
        assert exist_ok

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> str:
        place = self.cache / f"models--{repo_id.replace('/', '--')}"
        shutil.copytree(folder_path, place / "snapshots" / "c0ffee")
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text("c0ffee")
        return f"https://huggingface.co/{repo_id}"


def test_a_tempnet_is_pushed_with_its_card_and_read_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", LocalHub)
    monkeypatch.setattr(LocalHub, "cache", tmp_path, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    network = TempNet(TempNetConfig.for_logits(VOCABULARY, rho=1.0, hidden_size=8, num_prototypes=4)).eval()
    assert network.push_to_hub("me/net", base_model="them/base").endswith("me/net")
    logits = torch.randn(5, VOCABULARY)
    for found in (TempNet.from_pretrained("me/net"), load_tempnet("me/net")):
        assert torch.equal(found(logits), network(logits))
    card = ModelCard.load(tmp_path / "models--me--net/snapshots/c0ffee/README.md")
    assert (card.data.base_model, card.data.library_name) == ("them/base", "tempnet")
    assert 'load_causal_lm("them/base", "me/net")' in card.text
    with pytest.raises(FileNotFoundError, match="me/other holds no TempNet"):
        TempNet.from_pretrained("me/other")
