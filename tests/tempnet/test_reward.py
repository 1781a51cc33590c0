"""Gradients of the expected reward and of the divergence, against autograd and exhaustive sums in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tempnet.reward import (
    distinct_advantages,
    distinct_reward,
    leave_one_out,
    surrogate_loss,
    token_advantages,
    token_statistics,
)

NUM_TOKENS, LENGTH = 3, 2
WEIGHT = 0.37


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("tau", "reference"), [(0.02, 1.0), (1.0, 1.0), (1.9, 0.3)])
def test_statistics_are_the_derivatives_that_autograd_finds(tau: float, reference: float) -> None:
    logits, beta = 3.0 * random(5, 11), torch.full((5,), 1.0 / tau, dtype=torch.float64, requires_grad=True)
    tokens = torch.arange(5)
    log_probs, log_base = (beta[:, None] * logits).log_softmax(-1), (logits / reference).log_softmax(-1)
    kl = (log_probs.exp() * (log_probs - log_base)).sum(-1)
    drawn = log_probs.gather(-1, tokens[:, None]).sum()
    found = token_statistics(logits, tokens, torch.full((5,), tau, dtype=torch.float64), reference)
    torch.testing.assert_close(found.kl, kl.detach(), atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(found.score, torch.autograd.grad(drawn, beta, retain_graph=True)[0])
    torch.testing.assert_close(found.kl_slope, torch.autograd.grad(kl.sum(), beta)[0], atol=1e-12, rtol=1e-7)


def test_a_shift_of_the_logits_changes_nothing_and_cold_tokens_do_not_overflow() -> None:
    logits, tokens = 30.0 * random(4, 9).float(), torch.tensor([0, 3, 8, 2])
    tau = torch.tensor([1e-3, 0.05, 1.0, 2.0])
    one, other = token_statistics(logits, tokens, tau), token_statistics(logits + 500.0, tokens, tau)
    for name in ("score", "kl", "kl_slope"):
        assert getattr(one, name).isfinite().all()
        torch.testing.assert_close(getattr(one, name), getattr(other, name), atol=2e-3, rtol=1e-3)
    assert one.kl[2] == 0.0


class Tree:
    """A base model over texts of two tokens of three, with a temperature for each of the four contexts."""

    def __init__(self, seed: int) -> None:
        self.logits = 2.0 * random(1 + NUM_TOKENS, NUM_TOKENS, seed=seed)
        self.tau = (0.5 + random(1 + NUM_TOKENS, seed=seed + 1).sigmoid()).requires_grad_()
        self.texts = list(itertools.product(range(NUM_TOKENS), repeat=LENGTH))

    def contexts(self, text: tuple[int, ...]) -> list[int]:
        return [0, 1 + text[0]]

    def log_prob(self, text: tuple[int, ...], tau: Tensor) -> Tensor:
        log_probs = (self.logits / tau[:, None]).log_softmax(-1)
        return torch.stack([log_probs[c, token] for c, token in zip(self.contexts(text), text, strict=True)]).sum()

    def surrogate(self, group: Sequence[tuple[int, ...]], advantages: Tensor) -> Tensor:
        """Return the surrogate loss of a group, as training computes it, divided by the number of texts."""
        places = torch.tensor([self.contexts(text) for text in group])
        found = token_statistics(self.logits[places], torch.tensor(group), self.tau[places])
        tokens = token_advantages(advantages, found.kl, WEIGHT)
        return surrogate_loss(self.tau[places], found, tokens, WEIGHT) / len(group)

    def expected_gradient(self, size: int, advantages_of: object) -> Tensor:
        """Return the expectation of the surrogate's gradient over all groups of a size."""
        total = torch.zeros_like(self.tau)
        for group in itertools.product(self.texts, repeat=size):
            probability = torch.stack([self.log_prob(text, self.tau.detach()) for text in group]).sum().exp()
            loss = self.surrogate(group, advantages_of(group))  # type: ignore[operator]
            total += probability * torch.autograd.grad(loss, self.tau)[0]
        return total

    def divergence(self) -> Tensor:
        """Return KL(π_τ ‖ π_1) as a sum over all texts."""
        ones = torch.ones_like(self.tau)
        own = torch.stack([self.log_prob(text, self.tau) for text in self.texts])
        base = torch.stack([self.log_prob(text, ones) for text in self.texts])
        return (own.exp() * (own - base)).sum()


REWARDS = {text: float(value) for text, value in zip(itertools.product(range(3), repeat=2), range(9), strict=True)}


def each(rewards: Tensor, texts: Sequence[tuple[int, ...]]) -> tuple[Tensor, float]:
    return leave_one_out(rewards), rewards.mean().item()


def distinct(rewards: Tensor, texts: Sequence[tuple[int, ...]]) -> tuple[Tensor, float]:
    """Texts that share their sum are one answer, and its texts have different rewards."""
    answers = [sum(text) for text in texts]
    return distinct_advantages(rewards, answers), distinct_reward(rewards.tolist(), answers)


@pytest.mark.parametrize(("kind", "size"), [(each, 2), (distinct, 3)])
def test_the_expected_gradient_is_that_of_the_objective(kind: Any, size: int) -> None:
    """The objective is the expectation, over all groups of texts, of their reward."""
    tree = Tree(seed=4)
    probabilities = {text: tree.log_prob(text, tree.tau).exp() for text in tree.texts}
    expected = torch.zeros((), dtype=torch.float64)
    for group in itertools.product(tree.texts, repeat=size):
        _, value = kind(torch.tensor([REWARDS[text] for text in group], dtype=torch.float64), group)
        expected = expected + torch.stack([probabilities[text] for text in group]).prod() * value
    objective = -expected + WEIGHT * tree.divergence()

    def advantages(group: Sequence[tuple[int, ...]]) -> Tensor:
        return kind(torch.tensor([REWARDS[text] for text in group], dtype=torch.float64), group)[0]

    torch.testing.assert_close(
        tree.expected_gradient(size, advantages), torch.autograd.grad(objective, tree.tau)[0], atol=1e-9, rtol=1e-7
    )


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 3)), min_size=1, max_size=7))
def test_a_text_is_worth_what_the_group_loses_without_it(texts: list[tuple[float, int]]) -> None:
    """The advantages, by their definition: differences of sums over groups that lack one text, or two."""
    rewards, answers = [reward for reward, _ in texts], [answer for _, answer in texts]

    def value(places: list[int]) -> float:
        chosen = [rewards[i] for i in places]
        return distinct_reward(chosen, [answers[i] for i in places]) * len(places) if places else 0.0

    everyone, expected = list(range(len(texts))), []
    for i in everyone:
        others = [j for j in everyone if j != i]
        lost = [value(others) - value([k for k in others if k != j]) for j in others]
        expected.append(value(everyone) - value(others) - (sum(lost) / len(others) if others else 0.0))
    found = distinct_advantages(torch.tensor(rewards, dtype=torch.float64), answers)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_copies_of_a_correct_answer_earn_nothing() -> None:
    assert distinct_reward([1.0, 1.0, 1.0, 0.0], ["a", "a", "b", "c"]) == 0.5
