"""Encoding images and texts into unit embeddings, in batches.

Shapes: n samples, S side of the image, d size of the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from jobs.scoring.dual_encoders.units import DualEncoderSpec
from pipelines.images.captions import CaptionEncoder
from pipelines.local_copy import local_copy
from pipelines.text.tokenization import load_tokenizer
from tempnet.models.dual_encoder import DualEncoder

_DTYPES = {"fp32": None, "bf16": torch.bfloat16}


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
    """Returns a caption encoder with the model's tokenizer and number of tokens per text.

    Raises:
        ValueError: naming the field, if the model has no tokenizer, or the tokenizer has more tokens than the model.
    """
    try:
        tokenizer = load_tokenizer(spec.tokenizer, needs_eos=False)
    except ValueError as error:
        raise ValueError(f"{field}: {spec.path!r} has no tokenizer: {error}") from error
    if len(tokenizer) > spec.vocab_size:
        raise ValueError(
            f"{field}: the tokenizer in {spec.tokenizer!r} has {len(tokenizer)} tokens, the model {spec.vocab_size}"
        )
    return CaptionEncoder(tokenizer=tokenizer, num_text_tokens=spec.num_text_tokens)
