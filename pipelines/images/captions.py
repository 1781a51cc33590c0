"""Tokenise captions to a fixed length, and add noise to captions.

Shapes: n captions of t tokens each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

RANDOM_WORD = "random"

# Keeps the random generators of the noise distinct from those of image views, which are keyed by (seed, epoch, id).
_NOISE_STREAM = 0x6E6F697365


@dataclass(frozen=True, kw_only=True)
class CaptionEncoder:
    """Tokenizer with output of a fixed length t.

    A longer caption is truncated but keeps its special tokens; a shorter one is padded, and the padding is masked.

    Raises:
        ValueError: if t leaves no room for a token of the caption beside the special tokens.
    """

    tokenizer: PreTrainedTokenizerFast
    """Tokenizer to apply; its own truncation and padding settings are not changed."""
    num_text_tokens: int = 30
    """Number t of tokens per caption, including special tokens and padding."""

    def __post_init__(self) -> None:
        num_special = self.tokenizer.num_special_tokens_to_add()
        if self.num_text_tokens <= num_special:
            raise ValueError(
                f"num_text_tokens = {self.num_text_tokens} must exceed the {num_special} special tokens that the "
                "tokenizer adds to every caption"
            )

    @cached_property
    def _backend(self) -> Tokenizer:
        """Copy of the backend tokenizer, because truncation and padding lengths are part of a tokenizer's state."""
        backend = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        backend.enable_truncation(self.num_text_tokens)
        # Masked positions are never read, so any token serves as padding if the tokenizer has no pad token (GPT-2).
        backend.enable_padding(length=self.num_text_tokens, pad_id=self.tokenizer.pad_token_id or 0)
        return backend

    def are_cut(self, texts: Sequence[str]) -> np.ndarray:
        """Return (n,) bool: which captions have more than t tokens and are therefore truncated."""
        return np.array(
            [bool(encoding.overflowing) for encoding in self._backend.encode_batch(list(texts))], dtype=bool
        )

    def encode(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Tokenise n captions; return `input_ids` and `attention_mask`, each (n, t) int64."""
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
    """Caption noise of TempNet's robustness experiment (arXiv 2404.04575, §6 and appendix D).

    Each caption is selected with probability p. In a selected caption, one word is either deleted or replaced by the
    word "random", with equal probability; in a caption of a single word, it is always replaced. The selection and the
    change depend on (seed, pair id) only, so they are the same in every epoch, and a caption that is selected at p is
    also selected at any larger p.

    Raises:
        ValueError: if p is outside [0, 1].
    """

    share: float = 0.0
    """Probability p that a caption receives noise, in [0, 1]."""
    seed: int = 0
    """Seed of the noise."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ValueError(f"caption_noise = {self.share:g} must lie in [0, 1]")

    def selects(self, pair: int) -> bool:
        """Return whether the caption of pair id `pair` receives noise."""
        return self.apply(RANDOM_WORD, pair)[1]

    def apply(self, caption: str, pair: int) -> tuple[str, bool]:
        """Return the caption of pair id `pair` as it is used in training, and whether noise was added to it."""
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
