"""Test every decoding rule against Transformers' warpers, plain loops over tokens, and properties of all rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopPLogitsWarper

from tempnet.decoders.rule import Rule, entropy, teacher_forced, temper
from tempnet.decoders.temperatures import (
    ConstantTemperature,
    EntropyRange,
    EntropyTemperature,
    PredictedTemperature,
    Shuffled,
)
from tempnet.decoders.truncation import MinP, Mirostat, TopNSigma, TopP
from tempnet.network import TempNet
from tempnet.network_config import TempNetConfig

RULES: list[Rule] = [
    ConstantTemperature(0.7),
    EntropyTemperature(1.2, 0.9),
    EntropyRange(0.2, 1.8, 2.0),
    TopP(0.8, 1.3),
    MinP(0.1, 1.5),
    TopNSigma(1.0, 2.0),
    Mirostat(2.0),
    Shuffled(torch.tensor([0.5, 1.0, 2.0]), "τ"),
    Shuffled(torch.tensor([0.5, 2.0]), "τ and P", torch.tensor([0.9, 0.6])),
]


def some_logits(num_rows: int = 40, vocab_size: int = 50, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = 5 * torch.rand(num_rows, 1, generator=generator)
    return spread * torch.randn(num_rows, vocab_size, generator=generator)


def distribution(rule: Rule, logits: Tensor) -> Tensor:
    return rule.log_probabilities(logits, None, rule.start(len(logits)))


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("tau", [0.3, 1.0, 2.5])
def test_top_p_is_that_of_transformers(share: float, tau: float) -> None:
    logits = some_logits()
    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    theirs = TopPLogitsWarper(share)(ids, TemperatureLogitsWarper(tau)(ids, logits))
    torch.testing.assert_close(distribution(TopP(share, tau), logits), theirs.log_softmax(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("tau", [0.3, 1.0, 2.5])
def test_min_p_is_that_of_transformers(ratio: float, tau: float) -> None:
    logits = some_logits()
    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    theirs = MinPLogitsWarper(ratio)(ids, TemperatureLogitsWarper(tau)(ids, logits))
    torch.testing.assert_close(distribution(MinP(ratio, tau), logits), theirs.log_softmax(-1), atol=1e-5, rtol=1e-5)


def test_top_n_sigma_keeps_what_a_loop_in_numpy_keeps_at_every_temperature() -> None:
    logits = some_logits().double().numpy()
    for tau in (0.5, 1.0, 3.0):
        found = distribution(TopNSigma(1.3, tau), torch.from_numpy(logits)).numpy()
        for row, log_q in zip(logits, found, strict=True):
            weights = np.where(row >= row.max() - 1.3 * np.std(row), np.exp((row - row.max()) / tau), 0.0)
            np.testing.assert_allclose(np.exp(log_q), weights / weights.sum(), atol=1e-6)


def test_temperatures_of_the_entropy_rules_are_those_of_a_loop() -> None:
    logits = some_logits()
    edt = EntropyTemperature(1.4, 0.6).temperatures(logits)
    ranged = EntropyRange(0.1, 2.0, 1.7).temperatures(logits)
    for row, tau_edt, tau_range in zip(logits.double().numpy(), edt, ranged, strict=True):
        p = np.exp(row - row.max())
        p /= p.sum()
        nats = -(p * np.log(np.maximum(p, 1e-300))).sum()
        assert tau_edt.item() == pytest.approx(1.4 * 0.8 ** (0.6 / nats), rel=1e-4)
        assert tau_range.item() == pytest.approx(0.1 + 1.9 * (nats / math.log(len(row))) ** 1.7, rel=1e-4)


def test_entropy_rules_at_their_ends() -> None:
    """A certain prediction has the lowest temperature, a uniform one the highest; both stay finite."""
    logits = torch.tensor([[50.0, 0.0, 0.0, 0.0], [1e4, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert EntropyRange(0.3, 1.5).temperatures(logits).tolist() == pytest.approx([0.3, 0.3, 1.5])
    tau = EntropyTemperature(1.5, 0.5).temperatures(logits)
    assert tau[:2].tolist() == [0.0, 0.0]
    assert tau[2].item() == pytest.approx(1.5 * 0.8 ** (0.5 / math.log(4)))
    for rule in (EntropyRange(0.0, 1.0), EntropyTemperature(1.0, 1.0)):
        assert rule.log_probabilities(logits)[:2].exp().tolist() == [[1, 0, 0, 0]] * 2


def test_mirostat_follows_its_definition_token_by_token() -> None:
    logits, rule = some_logits(60, 30, seed=3), Mirostat(1.5, 0.2)
    generator = np.random.default_rng(0)
    state, mu = rule.start(1), 3.0
    for row in logits:
        p = np.exp(row.double().numpy() - row.max().item())
        p /= p.sum()
        q = np.where(-np.log2(p) <= mu, p, 0.0)
        if not q.any():
            q[p.argmax()] = 1.0
        q /= q.sum()
        log_q = rule.log_probabilities(row.unsqueeze(0), None, state)
        np.testing.assert_allclose(log_q.exp()[0].numpy(), q, atol=1e-6)
        token = int(generator.choice(len(q), p=q))
        mu -= 0.2 * (-np.log2(q[token]) - 1.5)
        state = rule.advance(state, log_q, torch.tensor([token]))
        assert state.item() == pytest.approx(mu, abs=1e-4)


def test_mirostat_brings_the_mean_surprise_to_its_target() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, rule = 2.0 * torch.randn(3000, 200, generator=generator), Mirostat(3.0, 0.1)
    state, surprises = rule.start(1), []
    for row in logits.split(1):
        log_q = rule.log_probabilities(row, None, state)
        token = torch.multinomial(log_q.exp(), 1, generator=generator).squeeze(-1)
        surprises.append(-log_q[0, token].item() / math.log(2))
        state = rule.advance(state, log_q, token)
    assert np.mean(surprises[200:]) == pytest.approx(3.0, abs=0.05)
    assert abs(np.mean(-temper(logits, 1.0).gather(1, logits.softmax(-1).multinomial(1)).numpy()) / math.log(2) - 3) > 1


def test_a_text_is_scored_as_it_would_be_decoded() -> None:
    logits, tokens = some_logits(20), torch.arange(20) % 7
    for rule in RULES:
        state, rows = rule.start(1, seed=5), []
        for row, token in zip(logits.split(1), tokens.split(1), strict=True):
            rows.append(rule.log_probabilities(row, None, state))
            state = rule.advance(state, rows[-1], token)
        torch.testing.assert_close(teacher_forced(rule, logits, tokens, seed=5), torch.cat(rows))


def test_a_predicted_temperature_is_that_of_the_network() -> None:
    torch.manual_seed(0)
    network = TempNet(TempNetConfig.for_hidden(50, 6, with_logits=True, rho=2.0, hidden_size=8, num_prototypes=4))
    logits, hidden = some_logits(), torch.randn(40, 6)
    rule = PredictedTemperature(network, "ours")
    expected = (logits / network.eval()(logits, hidden).unsqueeze(-1)).log_softmax(-1)
    torch.testing.assert_close(rule.log_probabilities(logits, hidden), expected)
    doubled = PredictedTemperature(network, "ours", scale=2.0)
    torch.testing.assert_close(doubled.temperatures(logits, hidden), 2 * rule.temperatures(logits, hidden))
    with pytest.raises(ValueError, match="ours reads embeddings"):
        PredictedTemperature(TempNet(TempNetConfig.for_embeddings(8)), "ours")


def test_shuffled_predictions_have_the_distribution_of_the_pool_and_ignore_the_context() -> None:
    rule = Shuffled(torch.tensor([0.5, 1.0, 1.5, 2.0]), "ours", torch.tensor([0.2, 0.4, 0.6, 1.0]))
    state = rule.start(500, seed=1)
    steps = []
    for _ in range(40):
        steps.append(rule.places(state))
        state = rule.advance(state, torch.zeros(500, 3), torch.zeros(500, dtype=torch.long))
    drawn = torch.stack(steps)
    for place in range(4):
        assert (drawn == place).double().mean().item() == pytest.approx(0.25, abs=0.02)
    assert abs(np.corrcoef(drawn[:-1].flatten(), drawn[1:].flatten())[0, 1]) < 0.02
    assert rule.start(3, seed=1).equal(rule.start(3, seed=1))
    assert not rule.start(3, seed=1).equal(rule.start(3, seed=2))
    logits = some_logits(500)
    found = rule.log_probabilities(logits, None, state)
    for row, place in enumerate(rule.places(state).tolist()[:50]):
        expected = TopP(float(rule.shares[place]), float(rule.pool[place])).log_probabilities(logits[row : row + 1])
        torch.testing.assert_close(found[row : row + 1], expected)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.label)
@given(seed=st.integers(0, 10_000), vocab_size=st.integers(2, 40), spread=st.sampled_from([1e-3, 1.0, 30.0]))
@settings(max_examples=25, deadline=None)
def test_every_rule_gives_a_distribution_that_ignores_shifts_and_banned_tokens(
    rule: Rule, seed: int, vocab_size: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Multiples of 1/8 survive a shift by a power of two in float32 without rounding.
    logits = (spread * torch.randn(6, vocab_size, generator=generator) * 8).round() / 8
    log_q = distribution(rule, logits)
    torch.testing.assert_close(log_q.exp().sum(-1), torch.ones(6))
    assert (log_q.amax(-1) > -math.inf).all()
    # The order of tokens is never reversed: a more probable token is not less probable afterwards.
    assert (log_q.gather(-1, logits.argmax(-1, keepdim=True)).squeeze(-1) == log_q.amax(-1)).all()
    torch.testing.assert_close(distribution(rule, logits + 64.0), log_q, atol=1e-4, rtol=1e-4)
    banned = torch.cat([logits, torch.full((6, 3), -math.inf)], dim=-1)
    found = distribution(rule, banned)
    assert found[:, vocab_size:].isneginf().all()
    torch.testing.assert_close(found[:, :vocab_size], log_q, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "rule", [TopP(1.0), MinP(0.0), TopNSigma(1e6), Mirostat(1e6), EntropyRange(1.0, 1.0), EntropyTemperature(1.0, 1e-9)]
)
def test_rules_with_nothing_to_do_are_the_softmax(rule: Rule) -> None:
    logits = some_logits()
    torch.testing.assert_close(distribution(rule, logits), logits.log_softmax(-1), atol=1e-4, rtol=1e-4)


def test_tiny_temperatures_are_greedy_and_do_not_overflow() -> None:
    logits = torch.tensor([[3e4, -3e4, 2.9e4]])
    for tau in (0.0, 1e-30, 1e-6):
        assert temper(logits, tau).exp().tolist() == [[1.0, 0.0, 0.0]]
    assert entropy(temper(torch.zeros(1, 4), 0.0)).item() == pytest.approx(math.log(4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConstantTemperature(0.0), "tau = 0 must be positive and finite"),
        (lambda: EntropyTemperature(1.0, -1.0), "theta = -1 must be positive"),
        (lambda: EntropyTemperature(1.0, 1.0, 1.0), r"base = 1 must lie in \(0, 1\)"),
        (lambda: EntropyRange(1.0, 0.5), r"low = 1 must lie in \[0, high = 0.5\]"),
        (lambda: EntropyRange(0.0, 1.0, 0.0), "exponent = 0 must be positive"),
        (lambda: TopP(0.0), r"share = 0 must lie in \(0, 1\]"),
        (lambda: TopP(0.5, math.inf), "tau = inf must be positive and finite"),
        (lambda: MinP(1.1), r"ratio = 1.1 must lie in \[0, 1\]"),
        (lambda: TopNSigma(0.0), "num_sigma = 0 must be positive"),
        (lambda: Mirostat(0.0), "target = 0 must be positive"),
        (lambda: Mirostat(1.0, 0.0), "rate = 0 must be positive"),
        (lambda: Shuffled(torch.empty(0), "x"), "pool is empty"),
        (lambda: Shuffled(torch.ones(2), "x", torch.ones(3)), "shares holds 3 values, and pool 2"),
    ],
)
def test_parameters_are_checked(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
