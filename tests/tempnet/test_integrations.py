"""Test the losses in the trainers of other libraries, against plain PyTorch, and TempNets on the hub."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard
from torch import Tensor
from transformers import Trainer, TrainingArguments

from tempnet import TempNet, TempNetConfig
from tempnet.contrastive.config import ContrastiveLossConfig, gamma_at
from tempnet.contrastive.losses import ContrastiveLoss
from tempnet.contrastive.state import SampleState, World
from tempnet.integrations import ClipLoss, SentencePairLoss, TrainerLoss
from tempnet.loading import load_tempnet
from tempnet.softmax.config import TemperatureLossConfig
from tests.tempnet.models.tiny_towers import tiny_tokenizer, tiny_tower
from tests.tempnet.tiny_language_models import make_base

VOCABULARY, DIM = 37, 16


def cross_entropy(similarities: Tensor, tau: Tensor | float) -> Tensor:
    targets = torch.arange(len(similarities))
    return F.cross_entropy(similarities / torch.as_tensor(tau).view(-1, 1), targets)


def test_the_trainer_of_transformers_trains_a_tempnet_with_its_model(tmp_path: Path) -> None:
    model = make_base("gpt2", vocab_size=40, hidden_size=16, initializer_range=0.02).train()
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


@pytest.mark.parametrize("name", ["clip_fixed", "tempnet_in_batch", "sogclr_given", "neuclip"])
def test_sentence_transformers_train_with_every_kind_of_loss(name: str, tmp_path: Path) -> None:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    tiny_tokenizer([f"w{number}" for number in range(20)]).save_pretrained(tmp_path)
    tiny_tower("bert").save_pretrained(tmp_path)
    model = SentenceTransformer(modules=[Transformer(str(tmp_path)), Pooling(DIM)], device="cpu")
    config = ContrastiveLossConfig.for_name(name, rho=1.0)
    loss = SentencePairLoss(model, config, num_samples=8, num_steps=2)
    if name == "sogclr_given":
        loss.state.fill("tau", torch.full((2, 8), 0.03))
    pairs = [(f"w{number} w{number + 1}", f"w{number + 2} w{number}") for number in range(8)]
    columns = [model.tokenize([pair[side] for pair in pairs]) for side in (0, 1)]
    with torch.no_grad():
        value = loss(columns)
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
    trainer = SentenceTransformerTrainer(model, options, train_dataset=data, loss=loss)
    assert torch.isfinite(torch.tensor(trainer.train().training_loss))
    stored = None if loss.state is None else loss.state.columns["log_u"].clone()
    assert stored is None or stored.isfinite().all()
    # An evaluation set has other samples with ids of their own, or none.
    for held_out in (data.map(lambda row: {"label": row["label"] + 4}), data.remove_columns("label")):
        trainer.evaluate(held_out)
        assert stored is None or torch.equal(loss.state.columns["log_u"], stored)
    assert loss.step == 2


@pytest.mark.parametrize("name", ["clip", "tempnet", "isogclr", "tempnet_neuclip"])
def test_the_loss_of_open_clip_has_the_same_signature(name: str) -> None:
    torch.manual_seed(0)
    image, text = (F.normalize(torch.randn(6, DIM), dim=-1).requires_grad_() for _ in range(2))
    config = ContrastiveLossConfig.for_name(name, rho=1.0)
    loss = ClipLoss(config, embedding_size=DIM, num_samples=10, num_steps=4)
    ids = torch.arange(6) if config.state_columns else None
    value = loss(image_features=image, text_features=text, logit_scale=torch.tensor(100.0), output_dict=True, ids=ids)
    value["contrastive_loss"].backward()
    assert image.grad is not None
    if name == "clip":
        similarities = image @ text.T
        expected = (cross_entropy(similarities, config.tau) + cross_entropy(similarities.T, config.tau)) / 2
        torch.testing.assert_close(value["contrastive_loss"], expected)
        rows = torch.tensor([0, 1, 2, 3, 0])  # a pair that is in the batch twice is no negative of itself
        torch.testing.assert_close(
            loss(image[rows], text[rows], ids=rows),
            ContrastiveLoss(config)(image[rows], text[rows], torch.arange(5), rows, gamma=1.0)["loss"],
        )
    if config.state_columns:
        with pytest.raises(ValueError, match="give the samples' ids"):
            loss(image, text)


def test_gamma_falls_with_every_batch_of_training() -> None:
    image, text = F.normalize(torch.randn(2, 6, DIM, generator=torch.Generator().manual_seed(0)), dim=-1)
    config, ids = ContrastiveLossConfig.for_name("fastclip_v1"), torch.arange(6)
    with pytest.raises(ValueError, match="γ of the loss fastclip_v1 falls during the training: give num_steps"):
        ClipLoss(config, num_samples=6)
    loss = ClipLoss(config, num_samples=6, num_steps=4)
    reference = ContrastiveLoss(config, state=SampleState(6, config.state_columns))
    for step in range(4):
        part = image.roll(step, 0)
        expected = reference(part, text, ids, ids, gamma=gamma_at(config, step, 4))["loss"]
        assert loss(part, text, ids=ids) == expected
        loss.eval()(part, text, ids=ids)  # counts for nothing
        loss.train()


@pytest.mark.parametrize("name", ["fastclip_v2", "tempnet", "clip"])
def test_a_loss_goes_on_from_its_state_dict(name: str) -> None:
    """Without the per-sample state and the count of batches, the last two losses would be others."""
    generator = torch.Generator().manual_seed(0)
    batches = [F.normalize(torch.randn(2, 6, DIM, generator=generator), dim=-1) for _ in range(4)]

    def new(num_samples: int = 6) -> ClipLoss:
        config = ContrastiveLossConfig.for_name(name, rho=1.0)
        return ClipLoss(config, embedding_size=DIM, num_samples=num_samples, num_steps=4)

    loss, saved = new(), io.BytesIO()
    for batch in batches[:2]:
        loss(*batch, ids=torch.arange(6))
    torch.save(loss.state_dict(), saved)
    saved.seek(0)
    (resumed := new()).load_state_dict(torch.load(saved, weights_only=True))
    for batch in batches[2:]:
        assert resumed(*batch, ids=torch.arange(6)) == loss(*batch, ids=torch.arange(6))
    if loss.state is not None:
        with pytest.raises(ValueError, match=r"saved by rank 0 of 1 with columns .*\(2, 6\).*keeps .*\(2, 7\)"):
            new(7).load_state_dict(loss.state_dict())
        other = loss.state_dict()
        other["_extra_state"] |= {"rank": 1, "size": 2}
        with pytest.raises(ValueError, match="saved by rank 1 of 2"):
            new().load_state_dict(other)


def test_a_state_is_placed_where_the_batches_are() -> None:
    state = SampleState(8, {"log_u": 0.0})
    state.fill("log_u", torch.arange(1.0, 17.0).view(2, 8))
    part = state.placed(World(1, 3), torch.device("cpu"))
    assert part.columns["log_u"].tolist() == [[2.0, 5.0, 8.0], [10.0, 13.0, 16.0]]
    assert part.placed(World(1, 3), torch.device("meta")).columns["log_u"].is_meta


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
