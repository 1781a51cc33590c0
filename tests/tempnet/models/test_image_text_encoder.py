"""A saved dual encoder loaded in one call, against the steps one by one, and against Transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoImageProcessor, PreTrainedTokenizerFast

from tempnet.models.image_text_encoder import ImageTextEncoder
from tests.tempnet.models.tiny_towers import IMAGE_SIZE, NUM_TOKENS, tiny_encoder

WORDS = ["[PAD]", "[UNK]", "a", "red", "blue", "circle", "square"]


@pytest.fixture
def export(tmp_path: Path) -> Path:
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    tiny_encoder().save_pretrained(tmp_path, tokenizer)
    return tmp_path


def scenes(*sizes: tuple[int, int]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (height, width, 3), dtype=np.uint8) for width, height in sizes]


def test_images_of_the_right_size_are_encoded_as_in_training(export: Path) -> None:
    encoder = ImageTextEncoder.from_pretrained(export)
    images = scenes((IMAGE_SIZE, IMAGE_SIZE), (IMAGE_SIZE, IMAGE_SIZE), (IMAGE_SIZE, IMAGE_SIZE))
    expected = encoder.model.encode_images(torch.from_numpy(np.stack(images)))
    torch.testing.assert_close(encoder.encode_images(images), expected, rtol=0, atol=1e-5)
    pictures = [Image.fromarray(image) for image in images]
    torch.testing.assert_close(encoder.encode_images(pictures, batch_size=2), expected, rtol=0, atol=1e-5)
    assert encoder.encode_images([]).shape == (0, 6)


def test_other_sizes_are_resized_and_cropped_at_the_centre(export: Path) -> None:
    encoder = ImageTextEncoder.from_pretrained(export)
    (image,) = scenes((80, 40))
    middle = Image.fromarray(image).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC, box=(20, 0, 60, 40))
    expected = encoder.model.encode_images(torch.from_numpy(np.asarray(middle).copy())[None])
    torch.testing.assert_close(encoder.encode_images([image]), expected, rtol=0, atol=2e-3)


def test_the_processor_is_one_that_transformers_loads(export: Path) -> None:
    encoder = ImageTextEncoder.from_pretrained(export)
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
    with torch.no_grad():
        expected = encoder.model.encode_texts(tokens, (tokens > 0).long())
    for batch_size in (1, 64):
        torch.testing.assert_close(encoder.encode_texts(texts, batch_size=batch_size), expected, rtol=0, atol=1e-5)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    tiny_encoder().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="text_encoder holds no tokenizer"):
        ImageTextEncoder.from_pretrained(tmp_path)
