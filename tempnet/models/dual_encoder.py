"""A dual encoder: an image tower and a text tower that map images and their captions to nearby unit vectors.

A saved dual encoder is a directory with these contents; its two towers can be loaded with Transformers alone, and
`tempnet.models.image_text_encoder` loads all of it for images and texts as they are:

    config.json           DualEncoderConfig
    preprocessor_config.json         configuration of a Transformers image processor, which makes pixels from images
    model.safetensors     the projections; a tower that has its own projection (CLIP) contributes none
    image_encoder/        a Transformers model
    text_encoder/         a Transformers model and its tokenizer
    training_temperature.json        the constant temperature that it was trained at, if there was one
    tempnet_image/, tempnet_text/    the TempNets that were trained with it, if any

:class:`TemperatureDualEncoder` is the encoder and a contrastive loss, with its TempNets, in one module whose forward
returns the loss, so that data-parallel wrappers see all parameters.

Shapes: n samples, b pairs on this rank, d2 prototypes of a TempNet, S pixels per side of an image, t text tokens, d
dimensions of an embedding.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPModel, PreTrainedModel

from tempnet.base_model import base_digest
from tempnet.contrastive.losses import ContrastiveLoss, ContrastiveOutput, contrastive_losses
from tempnet.models.batch_norm import synchronize_batch_norm
from tempnet.models.dual_encoder_config import (
    IMAGE_ENCODER_DIRECTORY,
    PREPROCESSOR_FILE,
    TEXT_ENCODER_DIRECTORY,
    DualEncoderConfig,
)
from tempnet.models.towers import (
    image_features,
    image_width,
    load_clip_towers,
    load_tower,
    load_with_missing,
    projects_itself,
    read_config,
    text_features,
    text_width,
)
from tempnet.network import CONFIG_FILE, PAIRED_DIRECTORY, WEIGHTS_FILE, TempNet, check_embeddings
from tempnet.network_config import read_fields

IMAGE_TEMPNET_DIRECTORY = f"{PAIRED_DIRECTORY}_image"
TEXT_TEMPNET_DIRECTORY = f"{PAIRED_DIRECTORY}_text"
TEMPERATURE_FILE = "training_temperature.json"


class DualEncoder(nn.Module):
    """Two towers, each followed by a linear projection without activation; the embeddings are unit vectors in float32.

    The towers are any Transformers vision model and text encoder (`tempnet.models.towers`), with batch norms over the batch
    of all ranks. One that does not accept inputs of the configured size, or that has its own projection (CLIP) to another
    `embedding_size`, raises ValueError. `autocast_dtype` is the dtype of the towers' matrix products.
    """

    image_mean: Tensor
    image_std: Tensor

    def __init__(
        self,
        image_encoder: PreTrainedModel,
        text_encoder: PreTrainedModel,
        config: DualEncoderConfig,
        *,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.autocast_dtype = autocast_dtype
        image_size_out = image_width(image_encoder, config.image_size)
        text_size_out = text_width(text_encoder, config.num_text_tokens)
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
        synchronize_batch_norm(self)
        self.image_projection = _make_projection(image_encoder, image_size_out, config)
        self.text_projection = _make_projection(text_encoder, text_size_out, config)
        # Pixels are bytes, so mean and standard deviation are 255 times those of the configuration.
        self.register_buffer("image_mean", 255.0 * torch.tensor(config.image_mean).view(3, 1, 1), persistent=False)
        self.register_buffer("image_std", 255.0 * torch.tensor(config.image_std).view(3, 1, 1), persistent=False)
        self.train()

    def encode_images(self, images: Tensor) -> Tensor:
        """Return embeddings of uint8 images (n, S, S, 3): (n, d) unit vectors in float32; other images raise ValueError."""
        side = self.config.image_size
        if images.dtype != torch.uint8 or images.shape[1:] != (side, side, 3):
            raise ValueError(
                f"images are uint8 of shape (n, {side}, {side}, 3), not {images.dtype} of {tuple(images.shape)}"
            )
        # The memory layout stays channels-last, which is the fast one for convolutions.
        return self.encode_pixels((images.permute(0, 3, 1, 2).to(self._dtype) - self.image_mean) / self.image_std)

    def encode_pixels(self, pixel_values: Tensor) -> Tensor:
        """Return embeddings of normalised pixels (n, 3, S, S), as an image processor makes them: (n, d) unit vectors."""
        with self._autocast(pixel_values.device.type):
            features = image_features(self.image_encoder, pixel_values)
        return self._embed(features, self.image_projection)

    def encode_texts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return embeddings of tokens (n, t) and their mask (1 token, 0 padding): (n, d) unit vectors in float32."""
        with self._autocast(input_ids.device.type):
            features = text_features(self.text_encoder, input_ids, attention_mask)
        return self._embed(features, self.text_projection)

    def save_pretrained(
        self, directory: str | Path, tokenizer: Any = None, *, state_dict: Mapping[str, Tensor] | None = None
    ) -> None:
        """Save the dual encoder in the layout that the docstring of this module describes, except for the TempNets.

        The tokenizer, if given, is saved with the text tower. `state_dict` are complete parameters and buffers by name, for
        a module that holds only parts of them (ZeRO-3).
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        state = dict(self.state_dict() if state_dict is None else state_dict)
        self.config.save(directory / CONFIG_FILE)
        (directory / PREPROCESSOR_FILE).write_text(json.dumps(self.config.preprocessor(), indent=2) + "\n")
        projections = {name: value.contiguous() for name, value in state.items() if "_projection." in name}
        save_file({name: projections[name] for name in self._projection_names()}, directory / WEIGHTS_FILE)
        for encoder, name in (
            (self.image_encoder, IMAGE_ENCODER_DIRECTORY),
            (self.text_encoder, TEXT_ENCODER_DIRECTORY),
        ):
            prefix = f"{name}."
            part = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            encoder.save_pretrained(directory / name, state_dict=part)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory / TEXT_ENCODER_DIRECTORY)

    @classmethod
    def from_pretrained(cls, source: str | Path, *, autocast_dtype: torch.dtype | None = None) -> DualEncoder:
        """Load what :meth:`save_pretrained` wrote, or a Transformers CLIPModel; it is returned in eval mode.

        A source that contains neither, or lacks a part, raises ValueError, which names it.
        """
        directory, config = Path(source), read_sizes(source)
        if not (directory / IMAGE_ENCODER_DIRECTORY).is_dir():
            return cls(*load_clip_towers(source), config, autocast_dtype=autocast_dtype).eval()
        encoder = cls(
            load_tower(directory / IMAGE_ENCODER_DIRECTORY, "image"),
            load_tower(directory / TEXT_ENCODER_DIRECTORY, "text"),
            config,
            autocast_dtype=autocast_dtype,
        )
        try:
            state = load_file(directory / WEIGHTS_FILE)
        except SafetensorError as error:
            raise ValueError(f"{directory / WEIGHTS_FILE} holds no tensors that can be read: {error}") from error
        shapes = {name: tuple(value.shape) for name, value in sorted(state.items())}
        expected = {name: tuple(encoder.get_parameter(name).shape) for name in encoder._projection_names()}
        if shapes != expected:
            raise ValueError(f"{directory / WEIGHTS_FILE} holds {shapes}, not the projections {expected}")
        encoder.load_state_dict(state, strict=False)
        return encoder.eval()

    @property
    def _dtype(self) -> torch.dtype:
        """Dtype of pixels and projections: float32, unless a test has converted the module to float64."""
        return self.image_mean.dtype

    def _autocast(self, device: str) -> torch.autocast:
        return torch.autocast(device, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None)

    def _embed(self, features: Tensor, projection: nn.Module) -> Tensor:
        """Project and normalise features (n, w) to embeddings (n, d).

        It is done in float32, because similarities are divided by τ as low as 0.005.
        """
        with torch.autocast(features.device.type, enabled=False):
            return F.normalize(projection(features.to(self._dtype)), dim=-1)

    def _projection_names(self) -> list[str]:
        return sorted(name for name, _ in self.named_parameters() if name.startswith(("image_proj", "text_proj")))


def read_sizes(source: str | Path) -> DualEncoderConfig:
    """Read the configuration of what :meth:`DualEncoder.from_pretrained` loads, without its weights; same errors."""
    directory = Path(source)
    if not (directory / IMAGE_ENCODER_DIRECTORY).is_dir():
        clip = read_config(source)
        if clip.model_type != "clip":
            raise ValueError(
                f"{source} holds no dual encoder: neither {IMAGE_ENCODER_DIRECTORY}/, nor a Transformers CLIPModel "
                f"(its model_type is {clip.model_type!r})"
            )
        return DualEncoderConfig.of_clip(clip, directory)
    for name in (CONFIG_FILE, WEIGHTS_FILE, TEXT_ENCODER_DIRECTORY):
        if not (directory / name).exists():
            raise ValueError(f"{directory} holds no dual encoder: {name} is missing")
    return read_fields(DualEncoderConfig, directory / CONFIG_FILE)


def encoder_digest(place: str) -> str:
    """Return a digest of weights and configurations of a dual encoder at a local path, or of a CLIPModel on the hub."""
    parts = ("", IMAGE_ENCODER_DIRECTORY, TEXT_ENCODER_DIRECTORY)
    return base_digest(place, parts=parts, configurations=(CONFIG_FILE, PREPROCESSOR_FILE))


def load_pair_tempnets(directory: str | Path) -> tuple[TempNet, TempNet]:
    """Load the TempNets of images and texts that were saved with a dual encoder; they are returned in eval mode.

    A missing one raises FileNotFoundError, which names its path.
    """
    image, text = (
        TempNet.from_pretrained(Path(directory) / name) for name in (IMAGE_TEMPNET_DIRECTORY, TEXT_TEMPNET_DIRECTORY)
    )
    return image, text


def _make_projection(encoder: nn.Module, width: int, config: DualEncoderConfig) -> nn.Module:
    if not projects_itself(encoder):
        return nn.Linear(width, config.embedding_size)
    if width != config.embedding_size:
        raise ValueError(
            f"DualEncoderConfig.embedding_size = {config.embedding_size}, but {type(encoder).__name__} projects to {width}"
        )
    return nn.Identity()


def save_training_temperature(directory: str | Path, tau: float) -> None:
    """Write τ beside an exported dual encoder."""
    (Path(directory) / TEMPERATURE_FILE).write_text(json.dumps({"tau": tau}) + "\n")


def load_training_temperature(directory: str | Path) -> float | None:
    """Return the constant τ that a dual encoder or a Transformers CLIPModel was trained at; None if it holds none.

    A CLIPModel holds −log τ among its weights (`logit_scale`, Radford et al. 2021, section 2.5). A model whose temperatures
    differ from sample to sample, or whose loss has none, holds none. Something else in its place, or a τ that is not
    positive and finite, raises ValueError.
    """
    directory = Path(directory)
    path = directory / TEMPERATURE_FILE
    if path.is_file():
        try:
            tau = float(json.loads(path.read_text())["tau"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f'{path} is no JSON object {{"tau": number}}: {error}') from error
        place = str(path)
    elif (directory / IMAGE_ENCODER_DIRECTORY).is_dir() or read_config(directory).model_type != "clip":
        return None
    else:
        clip, missing = load_with_missing(CLIPModel, directory)
        if "logit_scale" in missing:
            return None
        tau, place = math.exp(-clip.logit_scale.item()), f"logit_scale of {directory}"
    if not 0.0 < tau < math.inf:
        raise ValueError(f"{place}: the temperature {tau:g} must be positive and finite")
    return tau


class TemperatureDualEncoder(nn.Module):
    """Dual encoder with a contrastive loss, which contains the TempNets if it needs them; other sizes raise ValueError.

    The encoder is None if the module is only given embeddings that frozen towers have computed before. A frozen one stays in
    eval mode (no dropout, constant statistics of batch norm), runs without a graph, and is not trained.
    """

    def __init__(self, encoder: DualEncoder | None, loss: ContrastiveLoss, *, freeze_encoder: bool = False) -> None:
        super().__init__()
        if encoder is not None:
            check_embeddings(loss.image_tempnet, encoder.config.embedding_size, "image TempNet")
            check_embeddings(loss.text_tempnet, encoder.config.embedding_size, "text TempNet")
        self.encoder = encoder
        self.loss = loss
        self.freeze_encoder = freeze_encoder
        if encoder is not None and freeze_encoder:
            encoder.requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> TemperatureDualEncoder:
        """Set the mode as nn.Module.train does, but keep a frozen encoder in eval mode."""
        super().train(mode)
        if self.encoder is not None and self.freeze_encoder:
            self.encoder.eval()
        return self

    def forward(self, *, ids: Tensor, image_ids: Tensor, gamma: float, **inputs: Tensor) -> ContrastiveOutput:
        """Compute the loss of this rank's pairs, with ids of the pairs and of their images, (b,) int64, and γ (`gamma_at`).

        `inputs` are images, uint8 (b, S, S, 3), with input_ids and attention_mask of the captions, (b, t) each (1 token, 0
        padding); or image_embeddings and text_embeddings, (b, d) unit vectors.
        """
        image, text = self.embed(**inputs)
        return self.loss(image, text, ids, image_ids, gamma=gamma)

    def embed(
        self,
        *,
        images: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_embeddings: Tensor | None = None,
        text_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the embeddings of images and texts, (b, d) each: those that are given, or else the towers compute them."""
        if image_embeddings is not None and text_embeddings is not None:
            return image_embeddings, text_embeddings
        assert self.encoder is not None
        assert images is not None
        assert input_ids is not None
        assert attention_mask is not None
        with torch.no_grad() if self.freeze_encoder else contextlib.nullcontext():
            return self.encoder.encode_images(images), self.encoder.encode_texts(input_ids, attention_mask)

    def init_prototypes(self, image_embeddings: Tensor, text_embeddings: Tensor) -> None:
        """Set the prototypes of each TempNet from the first d2 embeddings of its own modality (TempNet Appendix D.1).

        Those of a network that predicts normalisers are of the other modality. The embeddings (d2 or more, d) are unit
        vectors of random training pairs, the same on all ranks. A TempNet without a projection layer (ablation) is skipped.
        Fewer than d2 embeddings, and a loss without networks, raise ValueError.
        """
        loss = self.loss
        if loss.image_normaliser is not None and loss.text_normaliser is not None:
            loss.image_normaliser.init_prototypes(text_embeddings)
            loss.text_normaliser.init_prototypes(image_embeddings)
            if loss.image_tempnet is None:
                return
        for network, embeddings in zip(self._tempnets(), (image_embeddings, text_embeddings), strict=True):
            if network.config.projection:
                network.init_prototypes(embeddings)

    @torch.no_grad()
    def predict_temperatures(self, image_embeddings: Tensor, text_embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return τ of images (n,) and texts (m,), given their embeddings (n, d) and (m, d); ValueError without TempNets."""
        image_tempnet, text_tempnet = self._tempnets()
        return image_tempnet(image_embeddings), text_tempnet(text_embeddings)

    def _tempnets(self) -> tuple[TempNet, TempNet]:
        image, text = self.loss.image_tempnet, self.loss.text_tempnet
        if image is None or text is None:
            raise ValueError(f"the loss {self.loss.config.name!r} has no TempNets")
        return image, text


class SideBySideDualEncoder(nn.ModuleList):
    """Modules :class:`TemperatureDualEncoder` on one frozen encoder, whose similarities are computed once for all losses."""

    def forward(
        self, *, ids: Tensor, image_ids: Tensor, gammas: Sequence[float], **inputs: Tensor
    ) -> list[ContrastiveOutput]:
        """Return the output of every module; the arguments are those of one, with γ for each."""
        modules: Any = self
        image, text = modules[0].embed(**inputs)
        return contrastive_losses([module.loss for module in modules], image, text, ids, image_ids, gammas=gammas)
