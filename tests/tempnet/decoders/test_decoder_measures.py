"""Test the measures of decoders against nltk, scikit-learn, loops over tokens, and the enumeration of all subsets."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
from scipy.stats import t as student
from sklearn.metrics import log_loss
from torch import Tensor

from tempnet.decoders.likelihood import SMOOTHING, LikelihoodSums, Scores, score_tokens
from tempnet.decoders.temperatures import ConstantTemperature
from tempnet.decoders.texts import (
    bleu,
    distinct_correct,
    distinct_n,
    mean_interval,
    pass_at_k,
    samples_at_equal_cost,
    self_bleu,
)
from tempnet.decoders.truncation import TopP
from tempnet.rivals import half_width

words = st.lists(st.sampled_from("abcd"), min_size=0, max_size=9)


def some_tokens(num_tokens: int = 600, vocab_size: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, targets drawn at another temperature, and documents."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(num_tokens, vocab_size, generator=generator)
    targets = torch.multinomial((logits / 1.3).softmax(-1), 1, generator=generator).squeeze(-1)
    return logits, targets, torch.randint(40, (num_tokens,), generator=generator).sort().values


def summed(scores: Scores, documents: Tensor, *, batch_size: int = 77) -> LikelihoodSums:
    sums = LikelihoodSums(40)
    for part in torch.arange(len(documents)).split(batch_size):
        sums.add("rule", documents[part], Scores(*(value[part] for value in scores)))
    return sums


def test_scores_are_those_of_scikit_learn_and_of_loops() -> None:
    logits, targets, documents = some_tokens()
    log_q = ConstantTemperature(0.8).log_probabilities(logits)
    sums = summed(score_tokens(log_q, targets), documents)
    q = log_q.double().softmax(-1).numpy()
    assert sums.loss("rule").mean == pytest.approx(log_loss(targets.numpy(), q, labels=range(12)), abs=1e-5)
    brier = np.mean([sum((row - np.eye(12)[y]) ** 2) for row, y in zip(q, targets.tolist(), strict=True)])
    assert sums.mean("rule", "brier").mean == pytest.approx(brier, abs=1e-5)
    mixed = 0.99 * q[np.arange(600), targets] + 0.01 / 12
    assert sums.mean("rule", "smoothed").mean == pytest.approx(-np.log(mixed).mean(), abs=1e-5)
    error = 0.0
    for low in range(15):
        inside = (np.minimum((q.max(1) * 15).astype(int), 14)) == low
        if inside.any():
            error += inside.mean() * abs((q.argmax(1) == targets.numpy())[inside].mean() - q.max(1)[inside].mean())
    assert sums.calibration_error("rule").mean == pytest.approx(error, abs=1e-5)
    assert sums.calibration_error("rule").half_width > 0


def test_the_smoothed_loss_is_the_epsilon_perplexity_of_martins_et_al() -> None:
    logits, targets, _ = some_tokens()
    log_q = TopP(0.7).log_probabilities(logits)
    epsilon = SMOOTHING / (1 - SMOOTHING) / 12
    expected = -((log_q.exp().gather(1, targets[:, None])[:, 0] + epsilon) / (1 + epsilon * 12)).log()
    torch.testing.assert_close(score_tokens(log_q, targets).smoothed, expected)
    assert score_tokens(log_q, targets).smoothed.isfinite().all()


def test_a_rule_that_leaves_out_a_token_of_the_text_has_an_infinite_loss_and_says_how_many() -> None:
    logits, targets, documents = some_tokens()
    log_q = TopP(0.7).log_probabilities(logits)
    sums = summed(score_tokens(log_q, targets), documents)
    excluded = log_q.gather(1, targets[:, None]).isneginf().double().mean().item()
    assert 0.1 < excluded < 0.5
    assert sums.mean("rule", "excluded").mean == pytest.approx(excluded)
    assert math.isinf(sums.loss("rule").mean)


def test_intervals_are_over_documents_and_gains_are_paired() -> None:
    logits, targets, documents = some_tokens()
    sums, scores = LikelihoodSums(40), {}
    for tau in (1.0, 1.3):
        scores[tau] = score_tokens(ConstantTemperature(tau).log_probabilities(logits), targets)
        sums.add(str(tau), documents, scores[tau])
    gain = sums.gain("1.3", "1.0")
    difference = scores[1.0].smoothed - scores[1.3].smoothed
    assert gain.mean == pytest.approx(difference.mean().item(), abs=1e-6)
    assert gain.half_width == pytest.approx(half_width(difference, documents), rel=1e-4)
    assert gain.half_width < sums.mean("1.3", "smoothed").half_width


def test_banned_tokens_take_no_share_of_the_smoothing() -> None:
    logits, targets, _ = some_tokens()
    banned = torch.cat([logits, torch.full((600, 20), -math.inf)], dim=-1)
    ours = score_tokens(banned.log_softmax(-1), targets, num_allowed=torch.full((600,), 12))
    for value, expected in zip(ours, score_tokens(logits.log_softmax(-1), targets), strict=True):
        torch.testing.assert_close(value, expected)


@given(texts=st.lists(words, min_size=2, max_size=5), max_n=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_bleu_is_that_of_nltk(texts: list[list[str]], max_n: int) -> None:
    scores = []
    for place, text in enumerate(texts):
        others = texts[:place] + texts[place + 1 :]
        weights = (1 / max_n,) * max_n
        theirs = sentence_bleu(others, text, weights, SmoothingFunction().method1) if text else 0.0
        assert bleu(text, others, max_n) == pytest.approx(theirs, abs=1e-9)
        scores.append(theirs)
    assert self_bleu(texts, max_n) == pytest.approx(np.mean(scores), abs=1e-9)


@given(texts=st.lists(words, min_size=1, max_size=5), n=st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_distinct_n_is_that_of_a_list_of_ngrams(texts: list[list[str]], n: int) -> None:
    ngrams = ["".join(text[i : i + n]) for text in texts for i in range(len(text)) if i + n <= len(text)]
    found = distinct_n(texts, n)
    assert math.isnan(found) if not ngrams else found == pytest.approx(len(set(ngrams)) / len(ngrams))


def test_diversity_of_copies_and_of_texts_without_a_common_word() -> None:
    copies, different = [list("abcdefgh")] * 4, [list("abcdefgh"), list("ijklmnop"), list("qrstuvwx")]
    assert self_bleu(copies) == pytest.approx(1.0)
    assert self_bleu(different) == 0.0
    assert (distinct_n(copies, 2), distinct_n(different, 2)) == (0.25, 1.0)
    assert math.isnan(self_bleu(copies[:1]))


@given(correct=st.lists(st.booleans(), min_size=1, max_size=8), data=st.data())
@settings(max_examples=60, deadline=None)
def test_pass_at_k_is_the_share_of_all_subsets_with_a_correct_sample(correct: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(correct)))
    subsets = [any(subset) for subset in itertools.combinations(correct, k)]
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(np.mean(subsets))


def test_pass_at_k_refuses_what_no_set_of_samples_can_be() -> None:
    for k in (0, 4):
        with pytest.raises(ValueError, match=f"k = {k} must lie in 1 … 3"):
            pass_at_k(3, 1, k)
    with pytest.raises(ValueError, match="num_correct = 4 must lie in 0 … 3"):
        pass_at_k(3, 4, 1)


def test_distinct_correct_counts_answers_and_not_samples() -> None:
    assert distinct_correct(["1", "1", "2", "3", None], [True, True, True, False, False]) == 2
    assert distinct_correct([], []) == 0


def test_longer_texts_get_fewer_samples() -> None:
    assert samples_at_equal_cost(8, 20.0, 20.0, 16) == 8
    assert samples_at_equal_cost(8, 40.0, 20.0, 16) == 4
    assert samples_at_equal_cost(8, 5.0, 20.0, 16) == 16
    assert samples_at_equal_cost(1, 90.0, 20.0, 16) == 1


def test_the_interval_of_prompts_is_the_textbook_one() -> None:
    values = np.random.default_rng(0).normal(size=25)
    found = mean_interval([*values, math.nan])
    assert found.mean == pytest.approx(values.mean())
    assert found.half_width == pytest.approx(student.ppf(0.975, 24) * values.std(ddof=1) / 5)
    assert math.isnan(mean_interval([math.nan]).mean)
