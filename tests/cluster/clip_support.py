"""Make tiny real image–text models, images with captions, and images in one folder per class, all from seeds."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from text_archive_support import tar
from tokenizers.processors import TemplateProcessing
from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

from pipelines.text.tokenization import END_OF_TEXT, train_bpe
from tempnet.models.dual_encoder import DualEncoder, DualEncoderConfig
from tempnet.models.towers import random_tower
from tempnet.network import TempNet
from tempnet.network_config import TempNetConfig

SIDE = 16
CLASSES = ("cat", "maple_tree", "truck")
WORDS = ("photo", "small", "big", "red", "green", "dog", "cat", "truck", "maple", "tree", "beside", "under", "house")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that ends every text with the token that CLIP looks for."""
    tokenizer = train_bpe([" ".join(WORDS)] * 5, 300)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, 0)]
    )
    tokenizer.pad_token = END_OF_TEXT
    return tokenizer


def make_dual_encoder(directory: Path, *, seed: int = 0) -> str:
    """Save a random ResNet and DistilBERT with projections, as `train_clip` exports them; return their directory."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    image = random_tower("resnet", "image", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    text = random_tower(
        "distilbert", "text", vocab_size=len(tokenizer), dim=16, n_heads=2, n_layers=1, hidden_dim=32,
        max_position_embeddings=48, initializer_range=0.4,
    )  # fmt: skip
    config = DualEncoderConfig(embedding_size=12, image_size=SIDE, num_text_tokens=40)
    DualEncoder(image, text, config).save_pretrained(directory, tokenizer)
    return str(directory)


def make_dual_encoder_with_tempnets(directory: Path, *, seed: int = 0) -> Path:
    """Save a random dual encoder with TempNets whose τ differ from sample to sample, and return its directory."""
    make_dual_encoder(directory)
    for number, name in enumerate(("tempnet_image", "tempnet_text")):
        torch.manual_seed(2 * seed + number)
        network = TempNet(TempNetConfig.for_embeddings(12, rho=2.0, hidden_size=16, num_prototypes=8))
        with torch.no_grad():
            network.first_layer.weight.mul_(20.0)
            network.pool_weight.normal_(std=4.0)
        network.save_pretrained(directory / name)
    return directory


def make_clip(directory: Path, *, seed: int = 0) -> str:
    """Save a random CLIPModel of Transformers and its tokenizer in a directory, and return the directory."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={
            **tower, "vocab_size": len(tokenizer), "max_position_embeddings": 40, "eos_token_id": 0, "bos_token_id": 0,
            "pad_token_id": 0, "initializer_range": 0.4,
        },
        vision_config={**tower, "image_size": SIDE, "patch_size": 8, "initializer_range": 0.4},
        projection_dim=12,
    )  # fmt: skip
    CLIPModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def make_image(rng: np.random.Generator) -> np.ndarray:
    """Return an image (SIDE, SIDE, 3) in uint8 that consists of four patches of random colour."""
    return rng.integers(0, 256, (2, 2, 3), dtype=np.uint8).repeat(SIDE // 2, 0).repeat(SIDE // 2, 1)


def png(image: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return stream.getvalue()


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    """Write a tar of files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar(members))


def make_pairs(directory: Path, *, num_images: int = 20) -> tuple[list[np.ndarray], list[tuple[str, int]]]:
    """Write two tars of images with one to five captions each, of which one image is damaged.

    Returns:
        the images that can be read, in order, and for each of their captions (caption, index of its image).
    """
    rng = np.random.default_rng(1)
    images, captions = [], []
    members: list[dict[str, bytes]] = [{}, {}]
    for number in range(num_images):
        image, key = make_image(rng), f"{number:05d}"
        texts = [" ".join(rng.choice(WORDS, size=rng.integers(2, 9))) for _ in range(1 + number % 5)]
        part = members[number * 2 // num_images]
        part[f"{key}.png"] = b"\x89PNG no more" if number == 3 else png(image)
        part[f"{key}.json"] = json.dumps({"caption": texts}).encode()
        if number != 3:
            captions += [(text, len(images)) for text in texts]
            images.append(image)
    for number, part in enumerate(members):
        write_tar(directory / f"{number:05d}.tar", part)
    return images, captions


def make_classes(path: Path, *, num_images: int = 21) -> tuple[list[np.ndarray], list[int]]:
    """Write a tar with one folder of images per class, of which one image is damaged.

    Returns:
        the images that can be read, in the order of their paths, and the indices of their classes in `CLASSES`.
    """
    rng = np.random.default_rng(2)
    members: dict[str, bytes] = {}
    kept = []
    for number in range(num_images):
        label, image = number % len(CLASSES), make_image(rng)
        name = f"test/{CLASSES[label]}/{number:04d}.png"
        members[name] = png(image)[:60] if number == 4 else png(image)
        if number != 4:
            kept.append((name, image, label))
    write_tar(path, members)
    kept.sort(key=lambda one: one[0])
    return [image for _, image, _ in kept], [label for *_, label in kept]
