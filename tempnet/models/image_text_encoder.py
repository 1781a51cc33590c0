"""A saved dual encoder, loaded in one call with everything that stands between images or texts and their embeddings.

    encoder = ImageTextEncoder.from_pretrained("runs/clip-cc3m-tempnet-small/export")
    similarities = encoder.encode_images(images) @ encoder.encode_texts(["a red circle"]).T

Images and texts are prepared as in training. Shapes: n samples, d dimensions of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tempnet.models.dual_encoder import DualEncoder
from tempnet.models.dual_encoder_config import TEXT_ENCODER_DIRECTORY


class ImageTextEncoder:
    """A dual encoder, which is put into eval mode, with its image processor and the tokenizer of its text tower."""

    def __init__(self, model: DualEncoder, processor: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.processor, self.tokenizer = model.eval(), processor, tokenizer

    @classmethod
    def from_pretrained(cls, source: str | Path, *, device: str | torch.device = "cpu") -> ImageTextEncoder:
        """Load an export of training, or a Transformers CLIPModel (directory or hub name) with its tokenizer, to a device.

        A source without a dual encoder or tokenizer raises ValueError, which names it; it takes Pillow (else ImportError).
        """
        # Pillow is no dependency of the library, which uses it only here.
        from transformers import CLIPImageProcessorPil

        model = DualEncoder.from_pretrained(source)
        text = Path(source) / TEXT_ENCODER_DIRECTORY
        place = text if text.is_dir() else Path(source)
        # Transformers would make an empty tokenizer for a directory that has none.
        if place.is_dir() and not (any(place.glob("tokenizer*")) or any(place.glob("vocab*"))):
            raise ValueError(f"{place} holds no tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(place if place.is_dir() else source, trust_remote_code=False)
        settings = model.config.preprocessor()
        del settings["image_processor_type"]
        return cls(model.to(device), CLIPImageProcessorPil(**settings), tokenizer)

    @torch.inference_mode()
    def encode_images(self, images: Sequence[Any], *, batch_size: int = 64) -> Tensor:
        """Return unit vectors (n, d) in float32 on the CPU of images: PIL images, or uint8 arrays (height, width, 3)."""
        from PIL import Image, ImageOps

        def encode(some: list[Any]) -> Tensor:
            upright = [ImageOps.exif_transpose(one) if isinstance(one, Image.Image) else one for one in some]
            return self.model.encode_pixels(
                self.processor(upright, return_tensors="pt")["pixel_values"].to(self._device)
            )

        return self._in_batches(encode, images, batch_size)

    @torch.inference_mode()
    def encode_texts(self, texts: Sequence[str], *, batch_size: int = 64) -> Tensor:
        """Return unit vectors (n, d) in float32 on the CPU of texts, truncated to the length of training."""
        options: dict[str, Any] = {"truncation": True, "max_length": self.model.config.num_text_tokens, "padding": True}

        def encode(some: list[str]) -> Tensor:
            tokens = self.tokenizer(some, return_tensors="pt", **options).to(self._device)
            return self.model.encode_texts(tokens["input_ids"], tokens["attention_mask"])

        return self._in_batches(encode, texts, batch_size)

    def _in_batches(self, encode: Callable[[list[Any]], Tensor], items: Sequence[Any], batch_size: int) -> Tensor:
        rows = [encode(list(items[at : at + batch_size])).cpu() for at in range(0, len(items), batch_size)]
        return torch.cat(rows) if rows else torch.empty(0, self.model.config.embedding_size)

    @property
    def _device(self) -> torch.device:
        return self.model.image_mean.device
