"""Logits processors for the effective vocabulary, entropy recording and seeded draws, and a criterion for stop strings.

Shapes: B sequences, T tokens, V effective vocabulary (the size of the tokenizer's vocabulary).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerFast, StoppingCriteria


class EffectiveVocabulary(LogitsProcessor):
    """Bans the tokens beyond the tokenizer's vocabulary, which only pad the output layer."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V or more) logits → a copy with −inf beyond the first V columns."""
        scores = scores.clone()
        scores[:, self.vocab_size :] = -math.inf
        return scores


class EntropyRecorder(LogitsProcessor):
    """Records the entropy of softmax(logits) at every step, in nats, and leaves the logits unchanged.

    It must be the first processor, so that it sees the model's own logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.steps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V or more) logits → the same logits, unchanged."""
        log_probs = torch.log_softmax(scores[:, : self.vocab_size].float(), dim=-1)
        self.steps.append(-(log_probs.exp() * log_probs).sum(-1))
        return scores


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureRule:
    """Temperatures that depend on little, as rivals and bounds of learned ones."""

    kind: Literal["phases", "entropy", "shuffled"]
    """phases: the first value before token number `bound` of a text, then the second. entropy: the first value where the
    entropy at τ = 1 is below `bound` in nats, else the second. shuffled: one of the values at random for every token."""
    values: tuple[float, ...]
    """Temperatures."""
    bound: float = 0.0
    """Where the second value begins."""


class RuleTemperature(LogitsProcessor):
    """Divides the logits by the temperatures of a rule, and records them.

    Args:
        rule: the rule.
        keys: one seed string per row, for the rule that draws.
        width: number of columns of the padded prompts.
    """

    def __init__(self, rule: TemperatureRule, keys: Sequence[str], width: int) -> None:
        self.rule, self.width = rule, width
        self.steps: list[Tensor] = []
        self._streams = [random.Random(f"tau/{key}") for key in keys]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) logits → logits divided by the temperatures (B,) of this step."""
        values = torch.tensor(self.rule.values, dtype=torch.float32, device=scores.device)
        if self.rule.kind == "shuffled":
            tau = values[[stream.randrange(len(values)) for stream in self._streams]]
        elif self.rule.kind == "phases":
            tau = values[int(input_ids.shape[1] - self.width >= self.rule.bound)].expand(len(scores))
        else:
            entropy = torch.special.entr(scores.float().softmax(-1)).sum(-1)
            tau = values[(entropy >= self.rule.bound).long()]
        self.steps.append(tau)
        return scores / tau.unsqueeze(-1)


class SeededDraw(LogitsProcessor):
    """Draws one token per row from that row's own random stream, and masks all others.

    `generate()` draws all rows of a batch from one global generator, so that a text depends on the other texts in its
    batch. Here every row has its own random stream, seeded by its key. The token drawn is the first at which the
    cumulative probability exceeds the next number of that stream. It is the only token that `generate()` can still
    draw, so this must be the last processor.

    Args:
        keys: one seed string per row. Python guarantees that a string gives the same stream in every version.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._streams = [random.Random(key) for key in keys]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) scores → 0 for the token drawn, −inf for all others."""
        numbers = [[stream.random()] for stream in self._streams]
        cumulative = torch.softmax(scores.double(), dim=-1).cumsum(-1)
        passed = torch.tensor(numbers, dtype=torch.float64, device=scores.device) * cumulative[:, -1:]
        # right=True: the first token whose cumulative probability exceeds the number, so never one of probability 0.
        token = torch.searchsorted(cumulative, passed, right=True)
        return torch.full_like(scores, -math.inf).scatter_(1, token, 0.0)


class StopStrings(StoppingCriteria):
    """Ends a row once its new text contains one of the stop strings.

    `ends` holds, for every row, the number of new tokens after which that happened, or None if it has not.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, strings: Sequence[str], num_rows: int, width: int) -> None:
        """Create the criterion for one batch.

        Args:
            tokenizer: decodes the newest tokens to look for the strings.
            strings: the stop strings.
            num_rows: number of rows in the batch.
            width: number of columns of the padded prompts.
        """
        self.tokenizer, self.strings, self.width = tokenizer, strings, width
        self.ends: list[int | None] = [None] * num_rows
        # A stop string that ends in the newest token began at most this many tokens ago.
        self._num_looked_at = max(map(len, strings)) + 1

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **options: object) -> Tensor:
        """(B, T) token ids → (B,) booleans: whether each row is finished."""
        start = max(self.width, input_ids.shape[1] - self._num_looked_at)
        for row, tail in enumerate(self.tokenizer.batch_decode(input_ids[:, start:])):
            if self.ends[row] is None and any(string in tail for string in self.strings):
                self.ends[row] = input_ids.shape[1] - self.width
        return torch.tensor([end is not None for end in self.ends], device=input_ids.device)
