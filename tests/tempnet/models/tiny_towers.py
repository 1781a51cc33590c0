"""Create towers of a few thousand parameters, and inputs for them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, PreTrainedModel

from tempnet.models.dual_encoder import DualEncoder, DualEncoderConfig
from tempnet.models.towers import random_tower

IMAGE_SIZE, NUM_TOKENS, VOCABULARY = 16, 7, 40
SIZES = {
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic"},
    "distilbert": {
        "vocab_size": VOCABULARY,
        "dim": 16,
        "hidden_dim": 24,
        "n_layers": 2,
        "n_heads": 2,
        "max_position_embeddings": 16,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
}
_TRANSFORMER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
for name in ("vit", "deit", "clip_vision_model", "swin"):
    SIZES[name] = {**_TRANSFORMER, "image_size": IMAGE_SIZE, "patch_size": 4}
SIZES["swin"] = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": 4,
}
for name in ("bert", "roberta", "clip_text_model"):
    SIZES[name] = {**_TRANSFORMER, "vocab_size": VOCABULARY, "max_position_embeddings": 16}
for name in ("clip_vision_model", "clip_text_model"):
    SIZES[name]["projection_dim"] = 6


def tiny_tower(model_type: str) -> PreTrainedModel:
    modality = "image" if model_type in ("resnet", "vit", "deit", "clip_vision_model", "swin") else "text"
    return random_tower(model_type, modality, **SIZES[model_type])


def tiny_encoder(image: str = "resnet", text: str = "distilbert", seed: int = 0, **options: object) -> DualEncoder:
    torch.manual_seed(seed)
    config = DualEncoderConfig(embedding_size=6, image_size=IMAGE_SIZE, num_text_tokens=NUM_TOKENS)
    return DualEncoder(tiny_tower(image), tiny_tower(text), config, **options)


def tiny_clip() -> CLIPModel:
    """Create a CLIP model whose towers are configured for another embedding size than the whole model."""
    torch.manual_seed(0)
    text = {**SIZES["clip_text_model"], "projection_dim": 5, "bos_token_id": 1, "eos_token_id": 39, "pad_token_id": 0}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=SIZES["clip_vision_model"], projection_dim=6)).eval()


def random_batch(num_samples: int, seed: int = 1) -> dict[str, Tensor]:
    """Create a batch of images, and of texts of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, NUM_TOKENS + 1, (num_samples, 1), generator=generator)
    mask = (torch.arange(NUM_TOKENS) < lengths).long()
    return {
        "images": torch.randint(256, (num_samples, IMAGE_SIZE, IMAGE_SIZE, 3), generator=generator, dtype=torch.uint8),
        "input_ids": torch.randint(2, VOCABULARY - 1, (num_samples, NUM_TOKENS), generator=generator) * mask,
        "attention_mask": mask,
    }
