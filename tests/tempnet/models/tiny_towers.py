"""Create towers of a few thousand parameters, whole modules of them, and inputs for them."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, PreTrainedModel, PreTrainedTokenizerFast

from tempnet import TempNet, TempNetConfig
from tempnet.contrastive.config import LOSS_KINDS, ContrastiveLossConfig
from tempnet.contrastive.losses import ContrastiveLoss
from tempnet.contrastive.normalisers import NormaliserNet
from tempnet.contrastive.state import SampleState, World
from tempnet.models.dual_encoder import DualEncoder, DualEncoderConfig, TemperatureDualEncoder
from tempnet.models.towers import random_tower

IMAGE_SIZE, NUM_TOKENS, VOCABULARY, NUM_PAIRS = 16, 7, 40, 6
SIZES = {
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic"},
    "distilbert": {
        "vocab_size": VOCABULARY, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 16,
        "dropout": 0.0, "attention_dropout": 0.0,
    },
    "swin": {
        "image_size": IMAGE_SIZE, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
    },
}  # fmt: skip
_TRANSFORMER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
for name in ("vit", "deit", "clip_vision_model"):
    SIZES[name] = {**_TRANSFORMER, "image_size": IMAGE_SIZE, "patch_size": 4}
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


def tiny_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """Create a tokenizer whose tokens are words, [PAD] and [UNK] first."""
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def make_module(
    name: str, dtype: torch.dtype = torch.float32, world: World | None = None, *, freeze_encoder: bool = False
) -> TemperatureDualEncoder:
    """Create a dual encoder with its loss, whose TempNets, if it has some, have random prototypes."""
    encoder = tiny_encoder()
    config = ContrastiveLossConfig.for_name(name, rho=1.2)
    tempnets: dict[str, nn.Module | None] = {
        f"{modality}_normaliser": NormaliserNet.for_loss(config, 6, 4) for modality in ("image", "text")
    }
    if LOSS_KINDS[name].temperature == "tempnet":
        settings = TempNetConfig.for_embeddings(6, rho=1.2, hidden_size=5, num_prototypes=4)
        tempnets |= {f"{modality}_tempnet": TempNet(settings) for modality in ("image", "text")}
    state = SampleState(20, config.state_columns, world=world) if config.state_columns else None
    loss = ContrastiveLoss(config, **tempnets, state=state, world=world)
    module = TemperatureDualEncoder(encoder, loss, freeze_encoder=freeze_encoder)
    if any(network is not None for network in tempnets.values()):
        module.init_prototypes(*nn.functional.normalize(torch.randn(2, 4, 6), dim=-1))
    return module.to(dtype)


def pairs(step: int = 0, rows: slice = slice(None)) -> dict[str, Tensor]:
    """Return the pairs in these rows; two of the pairs share their image."""
    ids = (torch.arange(NUM_PAIRS) * 3 + step) % 20
    batch = {**random_batch(NUM_PAIRS, seed=step), "ids": ids, "image_ids": torch.where(ids == ids[1], ids[0], ids)}
    return {key: value[rows] for key, value in batch.items()}
