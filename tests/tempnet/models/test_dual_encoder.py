"""The dual encoder: its embeddings, its directory, its use in one call, and its training with a contrastive loss.

Transformers' CLIPModel is the reference.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer, CLIPImageProcessor

from tempnet import TempNet, TempNetConfig
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.losses import ContrastiveLoss
from tempnet.contrastive.state import SampleState
from tempnet.models.dual_encoder import (
    DualEncoder,
    DualEncoderConfig,
    TemperatureDualEncoder,
    load_training_temperature,
    save_training_temperature,
)
from tempnet.models.image_text_encoder import ImageTextEncoder
from tests.tempnet.models.tiny_towers import (
    IMAGE_SIZE,
    NUM_TOKENS,
    make_module,
    pairs,
    random_batch,
    tiny_clip,
    tiny_encoder,
    tiny_tokenizer,
    tiny_tower,
)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of an encoder with its tokenizer, which no test changes."""
    directory = tmp_path_factory.mktemp("export")
    tiny_encoder().save_pretrained(directory, tiny_tokenizer(["a", "red", "blue", "circle", "square"]))
    return directory


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


@pytest.mark.parametrize(("image", "text"), [("resnet", "distilbert"), ("clip_vision_model", "clip_text_model")])
def test_what_was_saved_comes_back(image: str, text: str, tmp_path: Path) -> None:
    encoder, batch = tiny_encoder(image, text), random_batch(5)
    encode(encoder, batch)  # in training mode: moves the statistics of batch norm
    encoder.save_pretrained(tmp_path)
    again = DualEncoder.from_pretrained(tmp_path)
    assert again.config == encoder.config
    assert not any(part.training for part in again.modules())
    torch.testing.assert_close(encode(again, batch), encode(encoder.eval(), batch), rtol=0, atol=1e-6)
    for name, tower in (("image", encoder.image_encoder), ("text", encoder.text_encoder)):
        alone = AutoModel.from_pretrained(tmp_path / f"{name}_encoder")  # by Transformers alone
        assert not any("Synchronized" in type(part).__name__ for part in alone.modules())
        if not image.startswith("clip"):  # AutoModel leaves CLIP's projection out
            assert all(torch.equal(alone.state_dict()[key], value) for key, value in tower.state_dict().items())
    # The state dict is as ZeRO-3 gathers it, from a module that holds other weights.
    tiny_encoder(image, text, seed=9).save_pretrained(tmp_path / "b", state_dict=encoder.state_dict())
    torch.testing.assert_close(encode(DualEncoder.from_pretrained(tmp_path / "b"), batch), encode(encoder, batch))


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


def scenes(*sizes: tuple[int, int]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (height, width, 3), dtype=np.uint8) for width, height in sizes]


def test_images_are_encoded_as_in_training_and_as_transformers_processor_prepares_them(export: Path) -> None:
    encoder = ImageTextEncoder.from_pretrained(export)
    images = scenes(*[(IMAGE_SIZE, IMAGE_SIZE)] * 3)
    expected = encoder.model.encode_images(torch.from_numpy(np.stack(images)))
    torch.testing.assert_close(encoder.encode_images(images), expected, rtol=0, atol=1e-5)
    pictures = [Image.fromarray(image) for image in images]
    torch.testing.assert_close(encoder.encode_images(pictures, batch_size=2), expected, rtol=0, atol=1e-5)
    assert encoder.encode_images([]).shape == (0, 6)
    # As in training, a photo whose camera was turned is turned back.
    orientation, turned = Image.Exif(), io.BytesIO()
    orientation[0x0112] = 6  # to be turned clockwise
    pictures[0].transpose(Image.Transpose.ROTATE_90).save(turned, "PNG", exif=orientation)
    found = encoder.encode_images([Image.open(turned)])
    torch.testing.assert_close(found, encoder.encode_images(pictures[:1]))
    # Other sizes are resized and cropped at the centre.
    (image,) = scenes((80, 40))
    middle = Image.fromarray(image).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC, box=(20, 0, 60, 40))
    expected = encoder.model.encode_images(torch.from_numpy(np.asarray(middle).copy())[None])
    torch.testing.assert_close(encoder.encode_images([image]), expected, rtol=0, atol=2e-3)
    images = scenes((30, 20), (20, 33))
    pixels = AutoImageProcessor.from_pretrained(export)(images, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (2, 3, IMAGE_SIZE, IMAGE_SIZE)
    with torch.no_grad():
        expected = encoder.model.encode_pixels(pixels)
    torch.testing.assert_close(encoder.encode_images(images), expected, rtol=0, atol=1e-5)


def test_texts_are_tokenised_truncated_and_padded(export: Path) -> None:
    encoder = ImageTextEncoder.from_pretrained(export)
    texts = ["a red circle", "a blue square " * 9]
    tokens = torch.zeros(2, NUM_TOKENS, dtype=torch.int64)
    tokens[0, :3] = torch.tensor([2, 3, 5])
    tokens[1] = torch.tensor([2, 4, 6] * 9)[:NUM_TOKENS]
    assert AutoTokenizer.from_pretrained(export / "text_encoder")(texts[0])["input_ids"] == [2, 3, 5]
    with torch.no_grad():
        expected = encoder.model.encode_texts(tokens, (tokens > 0).long())
    for batch_size in (1, 64):
        torch.testing.assert_close(encoder.encode_texts(texts, batch_size=batch_size), expected, rtol=0, atol=1e-5)


def test_wrong_directories_are_refused(tmp_path: Path) -> None:
    tiny_encoder().save_pretrained(tmp_path / "encoder")
    with pytest.raises(ValueError, match="text_encoder holds no tokenizer"):
        ImageTextEncoder.from_pretrained(tmp_path / "encoder")
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


def test_the_training_temperature_of_a_clip_model_is_the_inverse_of_its_logit_scale(tmp_path: Path) -> None:
    tiny_clip().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert load_training_temperature(tmp_path) == pytest.approx(1 / weights["logit_scale"].exp().item())
    weights["logit_scale"] = torch.tensor(torch.nan)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"logit_scale of .*: the temperature nan must be positive and finite"):
        load_training_temperature(tmp_path)
    del weights["logit_scale"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_training_temperature(tmp_path) is None


def test_the_training_temperature_of_an_export_is_what_was_saved_with_it(tmp_path: Path) -> None:
    tiny_encoder().save_pretrained(tmp_path)
    assert load_training_temperature(tmp_path) is None
    save_training_temperature(tmp_path, 0.0125)
    assert load_training_temperature(tmp_path) == 0.0125
    for content, message in (
        ('{"tau": 0}', "the temperature 0 must be positive and finite"),
        ('{"temperature": 0.1}', r"training_temperature.json is no JSON object \{\"tau\": number\}"),
    ):
        (tmp_path / "training_temperature.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            load_training_temperature(tmp_path)


def rows(num_rows: int, seed: int) -> torch.Tensor:
    return F.normalize(torch.randn(num_rows, 6, generator=torch.Generator().manual_seed(seed)), dim=-1)


def test_a_frozen_encoder_keeps_weights_and_statistics() -> None:
    module = make_module("tempnet", freeze_encoder=True).train()
    assert module.training
    assert not any(part.training for part in module.encoder.modules())
    before = {key: value.clone() for key, value in module.state_dict().items()}
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    first, second = (module(**pairs(), gamma=1.0) for _ in range(2))
    assert first["loss"].item() == second["loss"].item()
    second["loss"].backward()
    assert all(parameter.grad is None for parameter in module.encoder.parameters())
    assert all(parameter.grad is not None for parameter in module.loss.parameters())
    optimizer.step()
    changed = {key for key, value in module.state_dict().items() if not torch.equal(value, before[key])}
    assert any("running_var" in key for key in before)
    assert changed
    assert all(key.startswith("loss.") for key in changed)


def test_prototypes_are_transformed_samples_of_their_own_modality() -> None:
    module = make_module("tempnet")
    images, texts = rows(4, seed=1), rows(9, seed=2)
    module.init_prototypes(images, texts)
    for network, own in ((module.loss.image_tempnet, images), (module.loss.text_tempnet, texts[:4])):
        linear = network.first_layer
        expected = torch.sigmoid(F.linear(own, linear.weight, linear.bias)).T
        torch.testing.assert_close(network.projection.detach(), expected)
    both = make_module("tempnet_neuclip")
    both.init_prototypes(images, texts)
    for network, contrasts in ((both.loss.image_normaliser, texts[:4]), (both.loss.text_normaliser, images)):
        torch.testing.assert_close(network.prototypes.detach(), contrasts)
    with pytest.raises(ValueError, match=r"TempNet has 4 prototypes, .* there are only 3"):
        module.init_prototypes(images, texts[:3])
    with pytest.raises(ValueError, match="'clip' has no TempNets"):
        make_module("clip").init_prototypes(images, texts)


def test_a_tempnet_without_projection_has_no_prototypes_and_one_of_another_size_is_refused() -> None:
    config = ContrastiveLossConfig.for_name("tempnet", rho=1.2)
    right, wrong = (TempNet(TempNetConfig.for_embeddings(dim, rho=1.2, projection=False)) for dim in (6, 8))
    state = SampleState(20, config.state_columns)
    loss = ContrastiveLoss(config, image_tempnet=right, text_tempnet=right, state=state)
    module = TemperatureDualEncoder(tiny_encoder(), loss)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    module.init_prototypes(rows(2, seed=1), rows(2, seed=2))
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    loss = ContrastiveLoss(config, image_tempnet=right, text_tempnet=wrong, state=state)
    with pytest.raises(ValueError, match="text TempNet was built for embeddings of 8, the encoder's have 6"):
        TemperatureDualEncoder(tiny_encoder(), loss)
