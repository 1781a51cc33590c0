"""The gradient of groups of texts in the weights of the TempNet, from one pass of the frozen base over them.

The base reads the texts once, without a graph. What a token's gradient needs of its logits are three numbers
(`tempnet.reward`); the graph of the TempNet is built for some tokens at a time, so that memory does not grow with the texts.

Shapes: B texts, G texts of a group, T new tokens of the longest text, N new tokens of all texts, d hidden size, V effective
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jobs.scoring.reward.plan import NUM_TOKENS_AT_A_TIME
from tempnet.models.output_head import find_output_head
from tempnet.network import TempNet
from tempnet.reward import (
    TokenStatistics,
    distinct_advantages,
    leave_one_out,
    surrogate_loss,
    token_advantages,
    token_statistics,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A generated text as tokens."""

    prompt: list[int]
    """Tokens of the prompt."""
    new: list[int]
    """Tokens that were drawn, with the one that ends the text."""
    tau: list[float]
    """The temperature that each was drawn at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """The rewards of the texts of one prompt, without those that were lost to the verifier."""

    question: int
    """Place of the prompt among all that may be asked."""
    places: list[int]
    """Places of the texts in their batch."""
    rewards: list[float]
    """Their rewards, in [0, 1]."""
    answers: list[str]
    """What is the same for texts that count once."""
    is_distinct: bool
    """Whether they do."""

    def advantages(self) -> Tensor:
        """Return the advantages (G,) of the texts, in float64."""
        rewards = torch.tensor(self.rewards, dtype=torch.float64)
        return distinct_advantages(rewards, self.answers) if self.is_distinct else leave_one_out(rewards)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The new tokens of a batch, one after the other."""

    ids: Tensor
    """(N,) the tokens drawn."""
    hidden: Tensor | None
    """(N, d) hidden states that their logits are computed from; None if the model's formula of the logits is not known."""
    logits: Tensor | None
    """(N, V) logits, if the hidden states are None."""
    rows: Tensor
    """(N,) the text of each token."""
    columns: Tensor
    """(N,) its place among the new tokens of the text."""


class Learner:
    """Computes gradients for a base model and its TempNet, both on one device; the base gets none."""

    def __init__(self, base: PreTrainedModel, network: TempNet) -> None:
        self._base, self._network = base, network
        self._head = find_output_head(base)

    def gradient(
        self, rollouts: Sequence[Rollout], groups: Sequence[GroupRewards], kl_weight: float, reference: float
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the sum over texts of the gradient of −(advantage·log p − λ·KL), and what :meth:`measure` returns.

        Args:
            rollouts: the texts of a batch, drawn at the temperatures of the TempNet as it is.
            groups: their rewards.
            kl_weight: λ.
            reference: the constant temperature that the divergence is measured from.

        Returns:
            the gradient by the name of the parameter, and (B, 4) sums over the tokens of each text.
        """
        tokens = self._read(rollouts)
        statistics, tau = self._statistics(tokens, None, reference)
        weights = _token_weights(tokens, statistics, groups, kl_weight, len(rollouts))
        self._network.zero_grad()
        for part in torch.arange(len(tokens.ids), device=tau.device).split(NUM_TOKENS_AT_A_TIME):
            part = part[weights.is_valid[part]]
            if len(part):
                found = TokenStatistics(statistics.score[part], statistics.kl[part], statistics.kl_slope[part])
                surrogate_loss(self._tau(tokens, part), found, weights.advantages[part], kl_weight).backward()
        gradient = {
            name: (torch.zeros_like(value) if value.grad is None else value.grad).cpu()
            for name, value in self._network.named_parameters()
        }
        return gradient, _sums(tokens, statistics.kl, tau, len(rollouts))

    def measure(self, rollouts: Sequence[Rollout], reference: float) -> Tensor:
        """Return the sums of 1, divergence, τ and τ² over the tokens of texts that were drawn at their τ: (B, 4)."""
        tokens = self._read(rollouts)
        given = torch.tensor([value for rollout in rollouts for value in rollout.tau], device=tokens.ids.device)
        statistics, tau = self._statistics(tokens, given, reference)
        return _sums(tokens, statistics.kl, tau, len(rollouts))

    @torch.no_grad()
    def _read(self, rollouts: Sequence[Rollout]) -> _Tokens:
        """Run the base over the texts, padded on the right, where causal attention does not see it."""
        device = self._base.device
        texts = [[*rollout.prompt, *rollout.new[:-1]] for rollout in rollouts]  # nothing is drawn after the last token
        width = max(map(len, texts))
        ids = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts], device=device)
        mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts], device=device)
        rows = [row for row, rollout in enumerate(rollouts) for _ in rollout.new]
        columns = [column for rollout in rollouts for column in range(len(rollout.new))]
        places = [len(rollouts[row].prompt) - 1 + column for row, column in zip(rows, columns, strict=True)]
        inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        hidden = logits = None
        if self._head is not None:
            hidden = self._base.base_model(**inputs)[0][rows, places]
        else:
            logits = self._base(**inputs).logits[rows, places, : self._network.config.input_size]
        return _Tokens(
            ids=torch.tensor([token for rollout in rollouts for token in rollout.new], device=device),
            hidden=hidden,
            logits=logits,
            rows=torch.tensor(rows, device=device),
            columns=torch.tensor(columns, device=device),
        )

    @torch.no_grad()
    def _statistics(self, tokens: _Tokens, given: Tensor | None, reference: float) -> tuple[TokenStatistics, Tensor]:
        """Return statistics and temperatures (N,), at given temperatures or at those of the TempNet."""
        parts, taus = [], []
        for part in torch.arange(len(tokens.ids), device=tokens.ids.device).split(NUM_TOKENS_AT_A_TIME):
            logits = self._logits(tokens, part)
            tau = self._tau(tokens, part, logits) if given is None else given[part]
            parts.append(token_statistics(logits, tokens.ids[part], tau, reference))
            taus.append(tau)
        fields = (torch.cat([getattr(part, name) for part in parts]) for name in ("score", "kl", "kl_slope"))
        return TokenStatistics(*fields), torch.cat(taus)

    def _logits(self, tokens: _Tokens, part: Tensor) -> Tensor:
        if tokens.logits is not None:
            return tokens.logits[part].float()
        assert self._head is not None
        assert tokens.hidden is not None
        with torch.no_grad():
            return self._head.logits(self._base, tokens.hidden[part], self._network.config.input_size).float()

    def _tau(self, tokens: _Tokens, part: Tensor, logits: Tensor | None = None) -> Tensor:
        config = self._network.config
        hidden = None if tokens.hidden is None else tokens.hidden[part]
        if config.reads_logits or hidden is None:
            logits = self._logits(tokens, part) if logits is None else logits
            return self._network(logits, hidden)
        return self._network.from_first_product(self._network.state_product(self._network.normalize_state(hidden)))


@dataclass(frozen=True, slots=True)
class _TokenWeights:
    advantages: Tensor
    """(N,) advantage of every token."""
    is_valid: Tensor
    """(N,) whether its text has a reward."""


def _token_weights(
    tokens: _Tokens, statistics: TokenStatistics, groups: Sequence[GroupRewards], kl_weight: float, num_texts: int
) -> _TokenWeights:
    kl = torch.zeros(num_texts, int(tokens.columns.max()) + 1, dtype=statistics.kl.dtype, device=statistics.kl.device)
    kl[tokens.rows, tokens.columns] = statistics.kl
    advantages, is_valid = torch.zeros_like(kl), torch.zeros_like(kl, dtype=torch.bool)
    for group in groups:
        advantages[group.places] = token_advantages(group.advantages().to(kl), kl[group.places], kl_weight)
        is_valid[group.places] = True
    return _TokenWeights(advantages[tokens.rows, tokens.columns], is_valid[tokens.rows, tokens.columns])


def _sums(tokens: _Tokens, kl: Tensor, tau: Tensor, num_texts: int) -> Tensor:
    values = torch.stack([torch.ones_like(tau), kl, tau, tau.square()], dim=-1).double().cpu()
    return values.new_zeros(num_texts, values.shape[-1]).index_add_(0, tokens.rows.cpu(), values)
