"""The dual encoder: its embeddings, its directory, and Transformers' CLIPModel as the reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import AutoModel, AutoTokenizer, CLIPImageProcessor, PreTrainedTokenizerFast

from tempnet import TempNet, TempNetConfig
from tempnet.models.dual_encoder import (
    IMAGE_TEMPNET_DIRECTORY,
    TEXT_TEMPNET_DIRECTORY,
    DualEncoder,
    DualEncoderConfig,
    load_pair_tempnets,
)
from tests.tempnet.models.tiny_towers import IMAGE_SIZE, NUM_TOKENS, random_batch, tiny_clip, tiny_encoder, tiny_tower


@torch.no_grad()
def encode(encoder: DualEncoder, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the embeddings of images and texts: (2, n, d)."""
    return torch.stack(
        [encoder.encode_images(batch["images"]), encoder.encode_texts(batch["input_ids"], batch["attention_mask"])]
    )


def normalised(images: torch.Tensor, config: DualEncoderConfig) -> torch.Tensor:
    planes = images.permute(0, 3, 1, 2) / 255.0
    mean, std = torch.tensor(config.image_mean), torch.tensor(config.image_std)
    return (planes - mean[:, None, None]) / std[:, None, None]


@pytest.mark.parametrize(("image", "text"), [("resnet", "distilbert"), ("vit", "clip_text_model")])
def test_embeddings_are_unit_rows_of_the_towers_projected_vectors(image: str, text: str) -> None:
    encoder, batch = tiny_encoder(image, text).eval(), random_batch(5)
    images, texts = encode(encoder, batch)
    assert images.shape == texts.shape == (5, 6)
    torch.testing.assert_close(torch.stack([images, texts]).norm(dim=-1), torch.ones(2, 5))
    output = encoder.image_encoder(pixel_values=normalised(batch["images"], encoder.config))
    features = output.pooler_output.flatten(1) if image == "resnet" else output.last_hidden_state[:, 0]
    expected = F.normalize(F.linear(features, encoder.image_projection.weight, encoder.image_projection.bias), dim=-1)
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-6)
    output = encoder.text_encoder(batch["input_ids"], attention_mask=batch["attention_mask"])
    projected = encoder.text_projection(output.last_hidden_state[:, 0]) if text == "distilbert" else output.text_embeds
    torch.testing.assert_close(texts, F.normalize(projected, dim=-1), rtol=0, atol=1e-6)
    assert isinstance(encoder.text_projection, nn.Linear if text == "distilbert" else nn.Identity)


@pytest.mark.parametrize(
    ("image", "text"), [("resnet", "distilbert"), ("vit", "roberta"), ("clip_vision_model", "clip_text_model")]
)
def test_what_was_saved_comes_back(image: str, text: str, tmp_path: Path) -> None:
    encoder, batch = tiny_encoder(image, text), random_batch(5)
    encode(encoder, batch)  # in training mode: moves the statistics of batch norm
    encoder.save_pretrained(tmp_path)
    again = DualEncoder.from_pretrained(tmp_path)
    assert again.config == encoder.config
    assert not any(part.training for part in again.modules())
    torch.testing.assert_close(encode(again, batch), encode(encoder.eval(), batch), rtol=0, atol=1e-6)
    # The state dict is as ZeRO-3 gathers it, from a module that holds other weights.
    tiny_encoder(image, text, seed=9).save_pretrained(tmp_path / "b", state_dict=encoder.state_dict())
    torch.testing.assert_close(encode(DualEncoder.from_pretrained(tmp_path / "b"), batch), encode(encoder, batch))


def test_the_saved_towers_load_with_transformers_alone(tmp_path: Path) -> None:
    encoder, batch = tiny_encoder(), random_batch(5)
    encode(encoder, batch)
    encoder.eval().save_pretrained(tmp_path)
    image, text = (AutoModel.from_pretrained(tmp_path / f"{name}_encoder").eval() for name in ("image", "text"))
    assert any(type(part) is nn.BatchNorm2d for part in image.modules())
    features = image(pixel_values=normalised(batch["images"], encoder.config)).pooler_output.flatten(1)
    tokens = text(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state[:, 0]
    for modality, values in (("image", features), ("text", tokens)):
        state = load_file(tmp_path / "model.safetensors")
        weight, bias = (state[f"{modality}_projection.{name}"] for name in ("weight", "bias"))
        expected = encode(encoder, batch)[0 if modality == "image" else 1]
        torch.testing.assert_close(F.normalize(F.linear(values, weight, bias), dim=-1), expected, rtol=0, atol=1e-6)


def test_the_tokenizer_lies_in_the_text_encoder(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2, "dog": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    tiny_encoder().save_pretrained(tmp_path, tokenizer)
    again = AutoTokenizer.from_pretrained(tmp_path / "text_encoder")
    assert again(["a dog", "dog"], padding=True)["input_ids"] == [[2, 3], [3, 0]]
    assert DualEncoder.from_pretrained(tmp_path).config.num_text_tokens == NUM_TOKENS


def test_a_clip_model_of_transformers(tmp_path: Path) -> None:
    clip, batch = tiny_clip(), random_batch(5)
    clip.save_pretrained(tmp_path)
    encoder = DualEncoder.from_pretrained(tmp_path)
    assert encoder.config.image_mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    CLIPImageProcessor(image_mean=[0.3, 0.4, 0.5], image_std=[0.1, 0.2, 0.3]).save_pretrained(tmp_path)
    encoder = DualEncoder.from_pretrained(tmp_path)
    assert encoder.config == DualEncoderConfig(
        embedding_size=6,
        image_size=IMAGE_SIZE,
        image_mean=(0.3, 0.4, 0.5),
        image_std=(0.1, 0.2, 0.3),
        num_text_tokens=16,
    )
    texts = {name: batch[name] for name in ("input_ids", "attention_mask")}
    output = clip(pixel_values=normalised(batch["images"], encoder.config), **texts)
    torch.testing.assert_close(
        encode(encoder, batch), torch.stack([output.image_embeds, output.text_embeds]), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("image", ["resnet", "vit"])
def test_bfloat16_towers_give_nearly_the_same_float32_embeddings(image: str) -> None:
    ours, theirs = tiny_encoder(image, autocast_dtype=torch.bfloat16), tiny_encoder(image)
    batch = random_batch(5)
    half, full = encode(ours, batch), encode(theirs, batch)
    assert half.dtype == torch.float32
    assert not torch.equal(half, full)
    torch.testing.assert_close(half.norm(dim=-1), torch.ones(2, 5), rtol=0, atol=1e-6)
    assert (half - full).norm(dim=-1).max() < 0.03


def test_tempnets_beside_the_encoder(tmp_path: Path) -> None:
    for seed, name in enumerate((IMAGE_TEMPNET_DIRECTORY, TEXT_TEMPNET_DIRECTORY)):
        torch.manual_seed(seed)
        TempNet(TempNetConfig.for_embeddings(6, hidden_size=4 + seed, num_prototypes=3)).save_pretrained(
            tmp_path / name
        )
    image, text = load_pair_tempnets(tmp_path)
    assert (image.config.hidden_size, text.config.hidden_size) == (4, 5)
    (tmp_path / "tempnet_text" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tempnet_text holds no TempNet: config\.json"):
        load_pair_tempnets(tmp_path)


def test_wrong_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="/nowhere/at/all holds no"):
        DualEncoder.from_pretrained("/nowhere/at/all")
    tiny_tower("bert").save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"bert holds no dual encoder: neither image_encoder/.*'bert'"):
        DualEncoder.from_pretrained(tmp_path / "bert")
    directory = tmp_path / "pair"
    tiny_encoder().save_pretrained(directory)
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(settings | {"colour": 1}))
    with pytest.raises(ValueError, match=r"pair/config\.json: unknown fields \['colour'\]"):
        DualEncoder.from_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(settings | {"embedding_size": 7}))
    with pytest.raises(ValueError, match=r"holds \{'image_projection.bias': \(6,\), .*not .* \(7,\)"):
        DualEncoder.from_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(settings))
    save_file({"image_projection.weight": torch.zeros(6, 12)}, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors holds \{'image_projection\.weight': \(6, 12\)\}"):
        DualEncoder.from_pretrained(directory)
    (directory / "model.safetensors").write_bytes(b"half a fi")
    with pytest.raises(ValueError, match=r"pair/model\.safetensors holds no tensors that can be read"):
        DualEncoder.from_pretrained(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pair holds no dual encoder: model\.safetensors is missing"):
        DualEncoder.from_pretrained(directory)


def test_wrong_sizes_are_refused() -> None:
    config = DualEncoderConfig(embedding_size=7, image_size=IMAGE_SIZE, num_text_tokens=NUM_TOKENS)
    with pytest.raises(ValueError, match="embedding_size = 7, but CLIPTextModelWithProjection projects to 6"):
        DualEncoder(tiny_tower("resnet"), tiny_tower("clip_text_model"), config)
    with pytest.raises(ValueError, match=r"image_std = \(1\.0, 0\.0, 1\.0\) must be positive"):
        DualEncoderConfig(image_std=(1.0, 0.0, 1.0))
    with pytest.raises(ValueError, match="num_text_tokens = 0 must be at least 1"):
        DualEncoderConfig(num_text_tokens=0)
    with pytest.raises(ValueError, match=r"uint8 of shape \(n, 16, 16, 3\), not torch.float32"):
        tiny_encoder().encode_images(torch.zeros(2, 16, 16, 3))
