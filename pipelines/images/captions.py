"""Captions: tokens of a fixed number, and caption noise.

Shapes: n captions, t tokens each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

RANDOM_WORD = "random"

# Apart from the generators of views, which are keyed by (seed, epoch, id).
_NOISE_STREAM = 0x6E6F697365


@dataclass(frozen=True, kw_only=True)
class CaptionEncoder:
    """A tokenizer with a fixed length: too long is cut inside its special tokens, too short is padded and masked."""

    tokenizer: PreTrainedTokenizerFast
    num_text_tokens: int = 30
    """t."""

    def __post_init__(self) -> None:
        num_special = self.tokenizer.num_special_tokens_to_add()
        if self.num_text_tokens <= num_special:
            raise ValueError(
                f"num_text_tokens = {self.num_text_tokens} must exceed the {num_special} special tokens that the "
                "tokenizer adds to every caption"
            )

    @cached_property
    def _backend(self) -> Tokenizer:
        """A copy, because length is a state of the tokenizer's."""
        backend = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        backend.enable_truncation(self.num_text_tokens)
        # What stands under the mask is never looked at: any token will do where there is none for padding (GPT-2).
        backend.enable_padding(length=self.num_text_tokens, pad_id=self.tokenizer.pad_token_id or 0)
        return backend

    def are_cut(self, texts: Sequence[str]) -> np.ndarray:
        """(n,) bool: which captions have more than t tokens and lose some."""
        return np.array(
            [bool(encoding.overflowing) for encoding in self._backend.encode_batch(list(texts))], dtype=bool
        )

    def encode(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """`input_ids` and `attention_mask`, each (n, t) int64."""
        encodings = self._backend.encode_batch(list(texts))
        shape = (len(encodings), self.num_text_tokens)
        return {
            "input_ids": np.array([encoding.ids for encoding in encodings], dtype=np.int64).reshape(shape),
            "attention_mask": np.array([encoding.attention_mask for encoding in encodings], dtype=np.int64).reshape(
                shape
            ),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionNoise:
    """Noise of TempNet's robustness experiment (arXiv 2404.04575, §6 and appendix D).

    A share p of the captions is chosen; each of these has, with equal chance, one of its words deleted, or one replaced
    by the word "random". A caption of a single word always has it replaced. Which captions, and what becomes of them, is
    a function of (seed, pair id) alone, the same in every epoch; and what is chosen at p is chosen at any larger p too.
    """

    share: float = 0.0
    """p."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ValueError(f"caption_noise = {self.share:g} must lie in [0, 1]")

    def apply(self, caption: str, pair: int) -> tuple[str, bool]:
        """The caption as it is trained with, and whether noise was put in."""
        if not self.share:
            return caption, False
        rng = np.random.default_rng([self.seed, _NOISE_STREAM, pair])
        if rng.random() >= self.share:
            return caption, False
        words = caption.split()
        is_deletion = rng.random() < 0.5 and len(words) > 1
        at = int(rng.integers(len(words)))
        words[at : at + 1] = [] if is_deletion else [RANDOM_WORD]
        return " ".join(words), True
