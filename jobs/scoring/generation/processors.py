"""What happens to the logits of a step beside the temperature: the effective vocabulary, the entropy, the draw, the end.

Shapes: B sequences, T tokens, V effective vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerFast, StoppingCriteria


class EffectiveVocabulary(LogitsProcessor):
    """Bans the padding beyond the tokenizer's vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V or more) → the same, −inf beyond V."""
        scores = scores.clone()
        scores[:, self.vocab_size :] = -math.inf
        return scores


class EntropyRecorder(LogitsProcessor):
    """Keeps the entropy, in nats, of softmax(L) of every step; changes nothing. It must come first."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.steps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V or more) → the same."""
        log_probs = torch.log_softmax(scores[:, : self.vocab_size].float(), dim=-1)
        self.steps.append(-(log_probs.exp() * log_probs).sum(-1))
        return scores


class SeededDraw(LogitsProcessor):
    """Makes the draw itself: leaves one token a row, chosen by a random number that belongs to the row and the step.

    `generate()` draws all rows of a batch from one global generator, so a text depends on what it was batched with. Here
    the token is the one at which the cumulative probability passes a number of the row's own stream, which its key fixes;
    what `generate()` then draws from has a single possible outcome. It must come last.

    Args:
        keys: one a row; Python promises the same stream for a string in every version.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._streams = [random.Random(key) for key in keys]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) → 0 at the token that is drawn, −inf elsewhere."""
        numbers = [[stream.random()] for stream in self._streams]
        cumulative = torch.softmax(scores.double(), dim=-1).cumsum(-1)
        passed = torch.tensor(numbers, dtype=torch.float64, device=scores.device) * cumulative[:, -1:]
        # right: the first token above the number, so never one of probability 0.
        token = torch.searchsorted(cumulative, passed, right=True)
        return torch.full_like(scores, -math.inf).scatter_(1, token, 0.0)


class StopStrings(StoppingCriteria):
    """Ends a row as soon as its new text holds one of some strings, and keeps after how many new tokens that was."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, strings: Sequence[str], num_rows: int, width: int) -> None:
        """`width` is the number of columns of the padded prompts."""
        self.tokenizer, self.strings, self.width = tokenizer, strings, width
        self.ends: list[int | None] = [None] * num_rows
        # A string that ends with the newest token began at most so many tokens ago.
        self._num_looked_at = max(map(len, strings)) + 1

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **options: object) -> Tensor:
        """(B, T) → (B,) whether a row is done."""
        start = max(self.width, input_ids.shape[1] - self._num_looked_at)
        for row, tail in enumerate(self.tokenizer.batch_decode(input_ids[:, start:])):
            if self.ends[row] is None and any(string in tail for string in self.strings):
                self.ends[row] = input_ids.shape[1] - self.width
        return torch.tensor([end is not None for end in self.ends], device=input_ids.device)
