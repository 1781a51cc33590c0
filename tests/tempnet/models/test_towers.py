"""The towers: which vector of which model, what is refused, and that a saved tower is a Transformers model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, GPT2Config, GPT2Model

from tempnet.models.batch_norm import synchronize_batch_norm
from tempnet.models.towers import (
    image_features,
    image_width,
    load_tower,
    projects_itself,
    random_tower,
    text_features,
    text_width,
)
from tests.tempnet.models.tiny_towers import IMAGE_SIZE, NUM_TOKENS, SIZES, random_batch, tiny_tower


def pixels() -> torch.Tensor:
    return torch.randn(3, 3, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("model_type", "width"), [("resnet", 12), ("vit", 16), ("deit", 16), ("swin", 16), ("clip_vision_model", 6)]
)
def test_the_vector_of_an_image(model_type: str, width: int) -> None:
    tower = tiny_tower(model_type).eval()
    features, output = image_features(tower, pixels()), tower(pixel_values=pixels())
    assert image_width(tower, IMAGE_SIZE) == width == features.shape[-1]
    expected = {
        "resnet": lambda: output.last_hidden_state.mean((-2, -1)),
        "swin": lambda: output.last_hidden_state.mean(1),
        "clip_vision_model": lambda: output.image_embeds,
    }.get(model_type, lambda: output.last_hidden_state[:, 0])
    torch.testing.assert_close(features, expected())
    assert projects_itself(tower) == (model_type == "clip_vision_model")
    features.sum().backward()
    assert [name for name, parameter in tower.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize(
    ("model_type", "width"), [("distilbert", 16), ("bert", 16), ("roberta", 16), ("clip_text_model", 6)]
)
def test_the_vector_of_a_text(model_type: str, width: int) -> None:
    tower = tiny_tower(model_type).eval()
    batch = random_batch(3)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    features, output = text_features(tower, ids, mask), tower(input_ids=ids, attention_mask=mask)
    assert text_width(tower, NUM_TOKENS) == width == features.shape[-1]
    expected = output.text_embeds if projects_itself(tower) else output.last_hidden_state[:, 0]
    assert torch.equal(features, expected)
    other_padding = torch.where(mask == 1, ids, 3)
    torch.testing.assert_close(text_features(tower, other_padding, mask), features)
    features.sum().backward()
    assert [name for name, parameter in tower.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("model_type", list(SIZES))
def test_a_saved_tower_loads(model_type: str, tmp_path: Path) -> None:
    tower = tiny_tower(model_type).eval()
    tower.save_pretrained(tmp_path)
    modality = "image" if tower.main_input_name == "pixel_values" else "text"
    again = load_tower(tmp_path, modality)
    assert type(again) is type(tower)
    assert set(again.state_dict()) == set(tower.state_dict())
    for name, value in tower.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    other = "text" if modality == "image" else "image"
    with pytest.raises(ValueError, match=rf"{tmp_path.name} is no .*: a {type(tower).__name__} reads"):
        load_tower(tmp_path, other)


def test_a_model_with_a_pooling_layer_loads_without_it(tmp_path: Path) -> None:
    whole = AutoModel.from_config(AutoConfig.for_model("bert", **SIZES["bert"])).eval()
    assert whole.pooler is not None
    whole.save_pretrained(tmp_path)
    tower = load_tower(tmp_path, "text")
    batch = random_batch(3)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    assert torch.equal(text_features(tower, **inputs), whole(**inputs).last_hidden_state[:, 0])


def test_what_is_no_tower_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="/nowhere/at/all holds no Transformers model"):
        load_tower("/nowhere/at/all", "image")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{tmp_path.name} holds no Transformers model"):
        load_tower(tmp_path, "text")
    tiny_tower("vit").config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path.name} holds no weights that can be read"):
        load_tower(tmp_path, "image")
    torch.save(tiny_tower("vit").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=f"{tmp_path.name} holds no weights that can be read"):
        load_tower(tmp_path, "image")
    tower = tiny_tower("clip_vision_model")
    tower.vision_model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"lacks weights of a CLIPVisionModelWithProjection: visual_projection\.weight"
    ):
        load_tower(tmp_path, "image")
    with pytest.raises(ValueError, match="no Transformers model of type 'resnot'"):
        random_tower("resnot", "image")
    with pytest.raises(ValueError, match="bert is no vision model"):
        random_tower("bert", "image", **SIZES["bert"])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="ViTModel\\) takes no images of 24 × 24"):
        image_width(tiny_tower("vit"), 24)
    with pytest.raises(ValueError, match="BertModel\\) takes no texts of 17 tokens"):
        text_width(tiny_tower("bert"), 17)
    decoder = GPT2Model(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40))
    with pytest.raises(ValueError, match="first token of GPT2Model does not see"):
        text_width(decoder, NUM_TOKENS)


def test_a_model_with_synchronised_batch_norms_keeps_its_names_and_weights() -> None:
    torch.manual_seed(0)
    plain = AutoModel.from_config(AutoConfig.for_model("resnet", **SIZES["resnet"])).train()
    ours = synchronize_batch_norm(copy.deepcopy(plain))
    x = torch.randn(4, 3, 16, 16)
    assert torch.equal(ours(x).pooler_output, plain(x).pooler_output)
    assert not any(type(part) is nn.BatchNorm2d for part in ours.modules())
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in plain.named_parameters()]
    other = AutoModel.from_config(plain.config)
    other.load_state_dict(ours.state_dict())
    assert torch.equal(other.eval()(x).pooler_output, ours.eval()(x).pooler_output)
