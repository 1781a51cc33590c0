"""The models' part: images and texts → unit embeddings, in batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from jobs.clip_evaluation.units import ModelSpec
from tempnet.models.dual_encoder import DualEncoder

_DTYPES = {"fp32": None, "bf16": torch.bfloat16}


class Encoder:
    """A dual encoder with its tokenizer."""

    def __init__(self, spec: ModelSpec, *, precision: str, batch_size: int, use_gpu: bool = False) -> None:
        self._device = torch.device("cuda" if use_gpu else "cpu")
        self._model = DualEncoder.from_pretrained(spec.path, autocast_dtype=_DTYPES[precision]).to(self._device)
        self._tokenizer = load_text_tokenizer(spec)
        self._num_tokens = spec.num_text_tokens
        self._batch_size = batch_size

    @torch.inference_mode()
    def images(self, images: np.ndarray) -> np.ndarray:
        """uint8 (n, S, S, 3) → (n, d) unit rows, float32; n may be 0."""
        batches = torch.from_numpy(images).split(self._batch_size)
        rows = [self._model.encode_images(batch.to(self._device)).cpu() for batch in batches if len(batch)]
        return torch.cat(rows or [self._nothing()]).numpy()

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """n texts → (n, d) unit rows, float32; those of like length go together, so that there is little padding."""
        encoded = self._tokenizer(list(texts), truncation=True, max_length=self._num_tokens)
        order = np.argsort([len(ids) for ids in encoded["input_ids"]], kind="stable")
        rows = torch.empty(len(texts), self._model.config.embedding_size)
        for few in np.array_split(order, -(-len(order) // self._batch_size)):
            batch = self._tokenizer.pad(
                {name: [encoded[name][at] for at in few] for name in ("input_ids", "attention_mask")},
                return_tensors="pt",
            ).to(self._device)
            rows[few] = self._model.encode_texts(batch["input_ids"], batch["attention_mask"]).cpu()
        return rows.numpy()

    def _nothing(self) -> Tensor:
        return torch.empty(0, self._model.config.embedding_size)


def load_text_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerBase:
    """The tokenizer that lies with the model.

    Raises:
        ValueError: if there is none, or it has no token to pad with.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(spec.tokenizer)
    except Exception as error:  # whatever the first thing raised that Transformers tried
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"models: {spec.path!r} has no tokenizer in {spec.tokenizer!r}: {reason}") from error
    if tokenizer.pad_token_id is None:
        raise ValueError(f"models: the tokenizer in {spec.tokenizer!r} has no token to pad with (pad_token)")
    return tokenizer
