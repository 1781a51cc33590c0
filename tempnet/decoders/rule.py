"""What a decoding rule is: a function from the logits of a step to the distribution q that its token is drawn from.

A rule has no side effects. What it remembers of a text (mirostat its bound) is a state with one entry per text, which the
caller passes on, so that texts can be decoded together, one after another, or scored against given tokens.

Shapes: … any leading dimensions, such as B texts or N tokens; T tokens of one text; V vocabulary; d hidden size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

# Smallest temperature that logits are divided by. Below it only the largest logits have a probability in float32.
_LEAST_TAU = 1e-6


class Rule(ABC):
    """A decoding rule; its parameters are those of the object."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Name of the rule with its parameters, for tables."""

    @abstractmethod
    def log_probabilities(self, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        """Return log q (…, V) in float32, −inf for tokens that cannot be drawn.

        Args:
            logits: (…, V) logits as the model made them; −inf for tokens that do not belong to the vocabulary.
            hidden: (…, d) hidden states that the logits were computed from, for rules that read them.
            state: (…,) what :meth:`start` or :meth:`advance` returned; None for a rule without memory.
        """

    def start(self, num_texts: int, seed: int = 0) -> Tensor | None:
        """Return the state (B,) of texts that begin, or None if the rule has no memory.

        Args:
            num_texts: B.
            seed: seed of rules that draw numbers of their own.
        """
        return None

    def advance(self, state: Tensor | None, log_probabilities: Tensor, tokens: Tensor) -> Tensor | None:
        """Return the state (B,) after tokens (B,) were chosen under log q (B, V)."""
        return state


def teacher_forced(
    rule: Rule, logits: Tensor, tokens: Tensor, hidden: Tensor | None = None, *, seed: int = 0
) -> Tensor:
    """Return log q (T, V) of a rule for every position of one text, given the text's own tokens.

    Args:
        rule: the rule.
        logits: (T, V) logits for each token.
        tokens: (T,) tokens of the text, which a rule with memory advances by.
        hidden: (T, d) hidden states.
        seed: seed of the rule's state.
    """
    state = rule.start(1, seed)
    if state is None:
        return rule.log_probabilities(logits, hidden)
    rows = []
    for step in range(len(tokens)):
        row = rule.log_probabilities(
            logits[step : step + 1], None if hidden is None else hidden[step : step + 1], state.to(logits.device)
        )
        state = rule.advance(state.to(logits.device), row, tokens[step : step + 1])
        assert state is not None
        rows.append(row)
    return torch.cat(rows) if rows else logits.float()


def temper(logits: Tensor, tau: Tensor | float) -> Tensor:
    """Return log softmax(z/τ) (…, V) in float32 at least; τ below 1e-6 counts as 1e-6.

    Args:
        logits: (…, V).
        tau: (…,) temperatures, or one for all rows.
    """
    z = logits if logits.dtype == torch.float64 else logits.float()
    divisor = torch.as_tensor(tau, dtype=z.dtype, device=z.device).clamp(min=_LEAST_TAU)
    # The maximum is subtracted first, so that a small τ overflows to −inf and never to +inf.
    return torch.log_softmax((z - z.amax(-1, keepdim=True)) / divisor.unsqueeze(-1), dim=-1)


def entropy(log_probabilities: Tensor) -> Tensor:
    """Return H(q) (…,) in nats of log q (…, V)."""
    return torch.special.entr(log_probabilities.exp()).sum(-1)


def keep_only(log_probabilities: Tensor, kept: Tensor) -> Tensor:
    """Return log q (…, V) of q restricted to the tokens in `kept` (…, V) and normalised again."""
    return torch.log_softmax(log_probabilities.masked_fill(~kept, -math.inf), dim=-1)


def check_positive(name: str, value: float) -> None:
    """Check that a parameter is positive and finite.

    Raises:
        ValueError: naming the parameter and the value.
    """
    if not (value > 0.0 and math.isfinite(value)):
        raise ValueError(f"{name} = {value:g} must be positive and finite")
