"""Dual encoders to be scored: their description, the pairs they read, and encoding into unit embeddings, in batches.

Shapes: n samples, S side of the image, d size of the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jobs.engine.fields import absolute_path
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.models import ModelSpec, model_labels
from jobs.scoring.temperatures.config import PredictPairTemperaturesConfig
from jobs.tasks.base import naming_field
from pipelines.archives import resolve_source
from pipelines.images.captions import CaptionEncoder
from pipelines.images.prepare import PrepareImagesConfig, check_source
from pipelines.local_copy import is_directory, local_copy
from pipelines.storage import join, relative
from pipelines.text.tokenization import load_tokenizer
from tempnet.fingerprints import files_digest
from tempnet.models.dual_encoder import DualEncoder
from tempnet.models.dual_encoder_config import IMAGE_ENCODER_DIRECTORY, TEXT_ENCODER_DIRECTORY

_DTYPES = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class DualEncoderSpec(ModelSpec):
    """Description of a dual encoder; its digest covers both encoders and their projections."""

    image_size: int
    """Side of the images in pixels."""
    num_text_tokens: int
    """Maximum number of tokens of a text; longer texts are cut."""
    vocab_size: int
    """Number of tokens in the text encoder's embedding table."""

    @classmethod
    def read(cls, label: str, path: str, *, field: str = "models") -> DualEncoderSpec:
        """Returns the description of a dual encoder, which is loaded once to check that it can be.

        Raises:
            ValueError: naming the field and the path, if it is not a directory with a dual encoder.
        """
        try:
            place = Path(local_copy(path))
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from error
        if not place.exists():
            raise ValueError(f"{field}: {path!r} is missing: there is no such directory")
        if not place.is_dir():
            raise ValueError(f"{field}: {path!r} is no directory with a dual encoder or a Transformers CLIPModel")
        with naming_field(f"{field}: "):
            model = DualEncoder.from_pretrained(place)
        tokens: Any = model.text_encoder.get_input_embeddings()
        parts = [place, place / IMAGE_ENCODER_DIRECTORY, place / TEXT_ENCODER_DIRECTORY]
        return cls(
            label=label,
            path=absolute_path(path),
            digest=files_digest(
                file for part in parts if part.is_dir() for file in sorted(part.iterdir()) if file.is_file()
            ),
            image_size=model.config.image_size,
            num_text_tokens=model.config.num_text_tokens,
            vocab_size=tokens.num_embeddings,
        )

    def record(self) -> dict[str, Any]:
        """Returns the digest and the sizes of what the model reads, without its location."""
        return {f"model.{name}": getattr(self, name) for name in ("digest", "image_size", "num_text_tokens")}

    @property
    def tokenizer(self) -> str:
        """Directory of the model's tokenizer."""
        beside = join(self.path, TEXT_ENCODER_DIRECTORY)
        return beside if is_directory(beside) else self.path


class Encoder:
    """A dual encoder with its tokenizer."""

    def __init__(self, spec: DualEncoderSpec, *, precision: str, batch_size: int, use_gpu: bool = False) -> None:
        self._device = torch.device("cuda" if use_gpu else "cpu")
        model = DualEncoder.from_pretrained(local_copy(spec.path), autocast_dtype=_DTYPES[precision])
        self._model = model.to(self._device)
        self._captions = caption_encoder(spec)
        self._batch_size = batch_size

    @torch.inference_mode()
    def images(self, images: np.ndarray) -> np.ndarray:
        """Encode uint8 images (n, S, S, 3) into unit rows (n, d), float32; n may be 0."""
        rows = torch.empty(len(images), self._model.config.embedding_size)
        for start in range(0, len(images), self._batch_size):
            batch = slice(start, start + self._batch_size)
            rows[batch] = self._model.encode_images(torch.from_numpy(images[batch]).to(self._device)).cpu()
        return rows.numpy()

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """Encode n texts into unit rows (n, d), float32.

        Texts of similar length are batched together, and padding that no text of a batch needs is removed.
        """
        tokens = {name: torch.from_numpy(array) for name, array in self._captions.encode(texts).items()}
        rows = torch.empty(len(texts), self._model.config.embedding_size)
        for indices in tokens["attention_mask"].sum(1).argsort(stable=True).split(self._batch_size):
            is_needed = tokens["attention_mask"][indices].any(0)
            batch = {name: tensor[indices][:, is_needed].to(self._device) for name, tensor in tokens.items()}
            rows[indices] = self._model.encode_texts(**batch).cpu()
        return rows.numpy()


def caption_encoder(spec: DualEncoderSpec, *, field: str = "models") -> CaptionEncoder:
    """Returns a caption encoder with the model's tokenizer and number of tokens per text."""
    try:
        tokenizer = load_tokenizer(spec.tokenizer, needs_eos=False)
    except ValueError as error:
        raise ValueError(f"{field}: {spec.path!r} has no tokenizer: {error}") from error
    if len(tokenizer) > spec.vocab_size:
        raise ValueError(
            f"{field}: the tokenizer in {spec.tokenizer!r} has {len(tokenizer)} tokens, the model {spec.vocab_size}"
        )
    return CaptionEncoder(tokenizer=tokenizer, num_text_tokens=spec.num_text_tokens)


def resolve_pairs(config: PredictPairTemperaturesConfig | Headroom) -> tuple[PrepareImagesConfig, DualEncoderSpec]:
    """Returns how the pairs of a configuration are prepared, and its model."""
    images = PrepareImagesConfig(
        source=absolute_path(config.images),
        captions=absolute_path(config.captions),
        splits=config.splits,
        max_bad_share=config.max_bad_share,
        key_dot=config.key_dot,
    )
    with naming_field("images: "):
        check_source(images)
    (label,) = model_labels([config.model])
    model = DualEncoderSpec.read(label, config.model, field="model")
    caption_encoder(model, field="model")
    return images, model


def pairs_record(images: PrepareImagesConfig) -> dict[str, Any]:
    """Returns the archives of a source of pairs and their captions, without locations and the tolerated problems.

    The contents of archives are identified by their sizes; an archive that changes while it is read is detected by
    checksums. Errors are those of `check_source`.
    """
    archives, captions = check_source(images)
    root = resolve_source(images.source)[1]
    sizes = {f"archive {relative(one.path, root)} (bytes)": [one.num_bytes, len(one.files)] for one in archives}
    return {
        "num_captioned_images": None if captions is None else len(captions.captions),
        "splits": list(images.splits),
        **({} if images.key_dot == "first" else {"key_dot": images.key_dot}),
        **sizes,
    }
