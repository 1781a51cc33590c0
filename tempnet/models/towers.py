"""The towers of a dual encoder: any Transformers vision model and any text encoder, and the features that they return.

The features of a sample are one vector:

    image   `image_embeds` if the tower has its own projection (CLIP); else the result of the model's own pooling, if
            that has no parameters (ResNet, Swin, …); else the vector of the first token (ViT, DeiT, …)
    text    `text_embeds` if the tower has its own projection; else the vector of the first token, [CLS], as in the
            code of SogCLR and TempNet

A pooling layer with parameters (such as BERT's and ViT's, with a tanh) is removed: it belongs to another objective, many
checkpoints lack it, and that of a text encoder would never be trained.

Shapes: n samples, S pixels per side of an image, t text tokens, w width of the tower.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    CLIPModel,
    CLIPTextModelWithProjection,
    CLIPVisionModelWithProjection,
    PreTrainedConfig,
    PreTrainedModel,
)

from tempnet.weights import check_weight_files, first_line, load_with_report

Modality = Literal["image", "text"]
_INPUT_NAMES = {"image": "pixel_values", "text": "input_ids"}
_KINDS = {"image": "vision model", "text": "text encoder"}
# Classes for the models that AutoModel would load without their projection.
_PROJECTING: dict[str, Any] = {
    "clip_vision_model": CLIPVisionModelWithProjection,
    "clip_text_model": CLIPTextModelWithProjection,
}


def load_tower(path: str | Path, modality: Modality) -> PreTrainedModel:
    """Load a pretrained tower in float32, from a directory or hub name, or that of a CLIPModel; only safetensors are read.

    A missing model or weights, or a model that encodes something else, raises ValueError, which names the path.
    """
    config = read_config(path)
    if config.model_type == "clip":
        return load_clip_towers(path)[0 if modality == "image" else 1]
    tower, missing = load_with_missing(_PROJECTING.get(config.model_type, AutoModel), path)
    _remove_pooler(tower)
    _check_modality(tower, modality, str(path))
    _check_complete(tower, [name for name in missing if not name.startswith("pooler.")], path)
    return tower


def random_tower(model_type: str, modality: Modality, **sizes: Any) -> PreTrainedModel:
    """Create a tower with random weights of a Transformers model type, such as "resnet" or "clip_vision_model".

    `sizes` are fields of its configuration. An unknown type, or one that encodes something else, raises ValueError.
    """
    try:
        config = AutoConfig.for_model(model_type, **sizes)
        source = _PROJECTING.get(model_type)
        tower = AutoModel.from_config(config, trust_remote_code=False) if source is None else source(config)
    except ValueError as error:
        raise ValueError(f"no Transformers model of type {model_type!r}: {first_line(error)}") from error
    _remove_pooler(tower)
    _check_modality(tower, modality, model_type)
    return tower


def load_clip_towers(path: str | Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Load the image tower and the text tower of a Transformers CLIPModel, each with its projection."""
    clip, missing = load_with_missing(CLIPModel, path)
    _check_complete(clip, [name for name in missing if name != "logit_scale"], path)
    config = clip.config
    # CLIPModel uses the projection size of the outer configuration, from which those of the towers may differ.
    config.vision_config.projection_dim = config.text_config.projection_dim = config.projection_dim
    image, text = CLIPVisionModelWithProjection(config.vision_config), CLIPTextModelWithProjection(config.text_config)
    for tower, names in ((image, ("vision_model", "visual_projection")), (text, ("text_model", "text_projection"))):
        for name in names:
            setattr(tower, name, getattr(clip, name))
    return image, text


def read_config(path: str | Path) -> PreTrainedConfig:
    """Read the Transformers configuration of a directory or hub name; ValueError if there is none or weights are cut."""
    check_weight_files(path)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} holds no Transformers model: {first_line(error)}") from error


def image_features(tower: nn.Module, pixels: Tensor) -> Tensor:
    """Return features (n, w) of normalised pixels (n, 3, S, S)."""
    output = tower(pixel_values=pixels)
    if (embeddings := output.get("image_embeds")) is not None:
        return embeddings
    if (pooled := output.get("pooler_output")) is not None:
        return pooled.flatten(1)  # ResNet returns (n, w, 1, 1).
    return output["last_hidden_state"][:, 0]


def text_features(tower: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return features (n, w) of tokens (n, t) and their mask (1 token, 0 padding)."""
    output = tower(input_ids=input_ids, attention_mask=attention_mask)
    if (embeddings := output.get("text_embeds")) is not None:
        return embeddings
    return output["last_hidden_state"][:, 0]


def projects_itself(tower: nn.Module) -> bool:
    """Return whether the tower has its own projection, so that its features are already embeddings."""
    return isinstance(tower, tuple(_PROJECTING.values()))


@torch.no_grad()
def image_width(tower: PreTrainedModel, image_size: int) -> int:
    """Return the width w of an image tower, which is left in eval mode; ValueError if it accepts no images of this size."""
    pixels = torch.zeros(1, 3, image_size, image_size, dtype=tower.dtype, device=tower.device)
    try:
        return image_features(tower.eval(), pixels).shape[-1]
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"the image encoder ({type(tower).__name__}) takes no images of {image_size} × {image_size}: "
            f"{first_line(error)}"
        ) from error


@torch.no_grad()
def text_width(tower: PreTrainedModel, num_tokens: int) -> int:
    """Return the width w of a text tower, which is left in eval mode.

    A tower that does not accept texts of this length, or whose first token does not attend to later ones, raises ValueError.
    """
    ids = torch.zeros(2, num_tokens, dtype=torch.int64, device=tower.device)
    ids[1, -1] = 1
    try:
        features = text_features(tower.eval(), ids, torch.ones_like(ids))
    except (ValueError, RuntimeError, IndexError) as error:
        raise ValueError(
            f"the text encoder ({type(tower).__name__}) takes no texts of {num_tokens} tokens: {first_line(error)}"
        ) from error
    if not projects_itself(tower) and torch.equal(features[0], features[1]):
        raise ValueError(
            f"the first token of {type(tower).__name__} does not see the tokens after it: a decoder is no text encoder"
        )
    return features.shape[-1]


def load_with_missing(source: Any, path: str | Path) -> tuple[Any, list[str]]:
    """Load a Transformers model of a class in float32 from safetensors, with the names of weights that do not fit it.

    Where there are no weights that can be read, ValueError is raised, which names the path.
    """
    try:
        model, random, _ = load_with_report(source, path, dtype=torch.float32, use_safetensors=True)
        return model, random
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{path} holds no weights that can be read: {first_line(error)}") from error


def _remove_pooler(tower: nn.Module) -> None:
    pooler = getattr(tower, "pooler", None)
    if pooler is not None and any(True for _ in pooler.parameters()):
        tower.register_module("pooler", None)


def _check_modality(tower: PreTrainedModel, modality: Modality, source: str) -> None:
    if tower.main_input_name != _INPUT_NAMES[modality]:
        raise ValueError(
            f"{source} is no {_KINDS[modality]}: a {type(tower).__name__} reads {tower.main_input_name}, "
            f"not {_INPUT_NAMES[modality]}"
        )


def _check_complete(model: nn.Module, missing: list[str], path: str | Path) -> None:
    if missing:
        raise ValueError(f"{path} lacks weights of a {type(model).__name__}: {', '.join(missing[:4])}")
