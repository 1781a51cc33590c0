"""Decoding rules and their measures against Transformers, nltk, scikit-learn, loops over tokens, and enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
from sklearn.metrics import log_loss
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from tempnet.decoders.autodeco import AutoDecoHeads, autodeco_loss, soft_top_p
from tempnet.decoders.measures import (
    SMOOTHING,
    LikelihoodSums,
    Scores,
    distinct_correct,
    distinct_n,
    pass_at_k,
    samples_at_equal_cost,
    score_tokens,
    self_bleu,
)
from tempnet.decoders.rules import (
    ConstantTemperature,
    EntropyRange,
    EntropyTemperature,
    Mirostat,
    PredictedTemperature,
    Rule,
    Shuffled,
    TopNSigma,
    Warped,
    nucleus,
    teacher_forced,
)


def top_p(share: float, tau: float = 1.0) -> Rule:
    return Warped(f"top-p {share:.3g}", TopPLogitsWarper(share), tau)


OURS: list[Rule] = [
    ConstantTemperature(0.7),
    EntropyTemperature(1.2, 0.9),
    EntropyRange(0.2, 1.8, 2.0),
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


def test_a_warped_rule_is_transformers_own_sampling_and_a_nucleus_has_a_share_for_every_row() -> None:
    logits, ids = some_logits(), torch.zeros(40, 1, dtype=torch.long)
    for tau, warper in ((0.3, TopPLogitsWarper(0.5)), (2.5, MinPLogitsWarper(0.1)), (1.0, EpsilonLogitsWarper(0.01))):
        expected = warper(ids, TemperatureLogitsWarper(tau)(ids, logits)).log_softmax(-1)
        torch.testing.assert_close(distribution(Warped("", warper, tau), logits), expected, atol=1e-5, rtol=1e-5)
    shares = torch.linspace(0.05, 1.0, 40)
    kept = nucleus(logits.log_softmax(-1), shares)
    for row, share in enumerate(shares.tolist()):
        assert kept[row].equal(TopPLogitsWarper(share)(ids[:1], logits[row : row + 1])[0].isfinite())


def test_top_n_sigma_keeps_what_a_loop_in_numpy_keeps_at_every_temperature() -> None:
    logits = some_logits().double().numpy()
    for tau in (0.5, 3.0):
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


def test_mirostat_follows_its_definition_token_by_token() -> None:
    logits, rule = some_logits(60, 30, seed=3), Mirostat(1.5)
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
        mu -= 0.1 * (-np.log2(q[token]) - 1.5)
        state = rule.advance(state, log_q, torch.tensor([token]))
        assert state.item() == pytest.approx(mu, abs=1e-4)


def test_a_text_is_scored_as_it_would_be_decoded() -> None:
    logits, tokens = some_logits(20), torch.arange(20) % 7
    for rule in [*OURS, top_p(0.8, 1.3)]:
        state, rows = rule.start(1, seed=5), []
        for row, token in zip(logits.split(1), tokens.split(1), strict=True):
            rows.append(rule.log_probabilities(row, None, state))
            state = rule.advance(state, rows[-1], token)
        torch.testing.assert_close(teacher_forced(rule, logits, tokens, seed=5), torch.cat(rows))


def test_a_predicted_temperature_is_scaled() -> None:
    def network(logits: Tensor, hidden: Tensor | None) -> Tensor:
        return torch.full(logits.shape[:-1], 0.5)

    found = PredictedTemperature(network, "ours", scale=3.0).log_probabilities(some_logits())
    torch.testing.assert_close(found, (some_logits() / 1.5).log_softmax(-1))


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
        expected = top_p(float(rule.shares[place]), float(rule.pool[place])).log_probabilities(logits[row : row + 1])
        torch.testing.assert_close(found[row : row + 1], expected)


@pytest.mark.parametrize("rule", OURS, ids=lambda rule: rule.label)
@given(seed=st.integers(0, 10_000), vocab_size=st.integers(2, 40), spread=st.sampled_from([1e-3, 1.0, 30.0]))
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


VOCAB_SIZE, HIDDEN_SIZE = 20, 6


def some_tokens(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, hidden states and targets."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator)
    logits = 2 * torch.randn(num_tokens, VOCAB_SIZE, generator=generator)
    return logits, hidden, torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def test_the_soft_mask_is_the_published_formula_and_tends_to_top_p_without_the_token_that_crosses() -> None:
    logits, _, _ = some_tokens(60)
    log_p = logits.double().log_softmax(-1)
    share = torch.rand(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    p = log_p.exp()
    reached = torch.stack([(row[:, None] * (row[:, None] >= row)).sum(0) for row in p])
    for steepness in (0.0, 30.0):
        weighted = p * torch.exp(-steepness * torch.relu(reached - share.unsqueeze(-1)))
        expected = weighted / weighted.sum(-1, keepdim=True)
        torch.testing.assert_close(soft_top_p(log_p, share, steepness=steepness), expected, atol=1e-5, rtol=1e-3)
    hard = p * ((reached <= share.unsqueeze(-1)) | (p == p.amax(-1, keepdim=True)))
    soft = soft_top_p(log_p, share, steepness=1e7)
    torch.testing.assert_close(soft, hard / hard.sum(-1, keepdim=True), atol=1e-6, rtol=0)
    kept = nucleus(log_p, share)
    assert (kept | (soft < 1e-9)).all(), "the mask is inside the nucleus"
    assert (kept & (soft < 1e-9)).sum(-1).max() == 1


def test_the_loss_weights_tokens_by_the_base_and_drops_easy_ones() -> None:
    """Recompute the loss in float64 with loops, with the same draws."""
    torch.manual_seed(0)
    logits, hidden, targets = some_tokens(80)
    logits.requires_grad_()
    hidden.requires_grad_()
    heads = AutoDecoHeads(HIDDEN_SIZE, width=4)
    loss = autodeco_loss(heads, logits, hidden, targets, generator=torch.Generator().manual_seed(3))
    tau, share = (value.detach().double() for value in heads(logits, hidden))
    drawn = torch.rand(80, generator=torch.Generator().manual_seed(3))
    first, second = [], []
    for row in range(80):
        z, y = logits[row].double(), int(targets[row])
        weight, log_p = z.softmax(-1)[y], (z / tau[row]).log_softmax(-1)
        if drawn[row] >= 0.6 or int(z.argmax()) != y:
            first.append(-weight * log_p[y])
        second.append(-weight * soft_top_p(log_p, share[row])[y].log())
    expected = torch.stack(first).mean() + torch.stack(second).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.norm() > 1e-6 for parameter in heads.parameters())
    assert (logits.grad, hidden.grad) == (None, None)


words = st.lists(st.sampled_from("abcd"), min_size=0, max_size=9)


def scored_tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, targets drawn at another temperature, and documents."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(600, 12, generator=generator)
    targets = torch.multinomial((logits / 1.3).softmax(-1), 1, generator=generator).squeeze(-1)
    return logits, targets, torch.randint(40, (600,), generator=generator).sort().values


def summed(scores: Scores, documents: Tensor) -> LikelihoodSums:
    sums = LikelihoodSums(40)
    for part in torch.arange(len(documents)).split(77):
        sums.add("rule", documents[part], Scores(*(value[part] for value in scores)))
    return sums


def test_scores_are_those_of_scikit_learn_and_of_loops() -> None:
    logits, targets, documents = scored_tokens()
    log_q = ConstantTemperature(0.8).log_probabilities(logits)
    sums = summed(score_tokens(log_q, targets), documents)
    q = log_q.double().softmax(-1).numpy()
    assert sums.loss("rule").mean == pytest.approx(log_loss(targets.numpy(), q, labels=range(12)), abs=1e-5)
    brier = np.mean([sum((row - np.eye(12)[y]) ** 2) for row, y in zip(q, targets.tolist(), strict=True)])
    assert sums.mean("rule", "brier").mean == pytest.approx(brier, abs=1e-5)
    mixed = 0.99 * q[np.arange(600), targets] + 0.01 / 12
    assert sums.mean("rule", "smoothed").mean == pytest.approx(-np.log(mixed).mean(), abs=1e-5)
    assert sums.calibration_error("rule").half_width > 0


def test_a_rule_that_leaves_out_a_token_of_the_text_has_an_infinite_loss_but_a_finite_smoothed_one() -> None:
    """The smoothed loss is the ε-perplexity of Martins et al."""
    logits, targets, documents = scored_tokens()
    log_q = top_p(0.7).log_probabilities(logits)
    epsilon = SMOOTHING / (1 - SMOOTHING) / 12
    expected = -((log_q.exp().gather(1, targets[:, None])[:, 0] + epsilon) / (1 + epsilon * 12)).log()
    scores = score_tokens(log_q, targets)
    torch.testing.assert_close(scores.smoothed, expected)
    sums = summed(scores, documents)
    excluded = log_q.gather(1, targets[:, None]).isneginf().double().mean().item()
    assert 0.1 < excluded < 0.5
    assert sums.mean("rule", "excluded").mean == pytest.approx(excluded)
    assert math.isinf(sums.loss("rule").mean)


@given(texts=st.lists(words, min_size=2, max_size=5), max_n=st.integers(1, 4))
def test_bleu_is_that_of_nltk(texts: list[list[str]], max_n: int) -> None:
    scores, weights = [], (1 / max_n,) * max_n
    for place, text in enumerate(texts):
        others = texts[:place] + texts[place + 1 :]
        scores.append(sentence_bleu(others, text, weights, SmoothingFunction().method1) if text else 0.0)
    assert self_bleu(texts, max_n) == pytest.approx(np.mean(scores), abs=1e-9)
    assert math.isnan(self_bleu(texts[:1], max_n))


@given(texts=st.lists(words, min_size=1, max_size=5), n=st.integers(1, 4))
def test_distinct_n_is_that_of_a_list_of_ngrams(texts: list[list[str]], n: int) -> None:
    ngrams = ["".join(text[i : i + n]) for text in texts for i in range(len(text)) if i + n <= len(text)]
    found = distinct_n(texts, n)
    assert math.isnan(found) if not ngrams else found == pytest.approx(len(set(ngrams)) / len(ngrams))


@given(correct=st.lists(st.booleans(), min_size=1, max_size=8), data=st.data())
def test_pass_at_k_is_the_share_of_all_subsets_with_a_correct_sample(correct: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(correct)))
    subsets = [any(subset) for subset in itertools.combinations(correct, k)]
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(np.mean(subsets))
    for wrong in (0, len(correct) + 1):
        with pytest.raises(ValueError, match=f"k = {wrong} must lie in 1 … {len(correct)}"):
            pass_at_k(len(correct), 0, wrong)
    with pytest.raises(ValueError, match=r"num_correct = 9 must lie in 0 …"):
        pass_at_k(len(correct), 9, k)


def test_answers_are_counted_and_not_samples_of_which_longer_texts_get_fewer() -> None:
    assert distinct_correct(["1", "1", "2", "3", None], [True, True, True, False, False]) == 2
    for length, expected in ((20.0, 8), (40.0, 4), (5.0, 16), (900.0, 1)):
        assert samples_at_equal_cost(8, length, 20.0, 16) == expected
