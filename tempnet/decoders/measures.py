"""Measures of decoders: how well a distribution q predicts real text, and how diverse and how correct sampled texts are.

    NLL                −log q_y                                   infinite if the rule leaves out the token y of the text
    smoothed NLL       −log((1 − λ)·q_y + λ/V)                    finite for every rule, and the same λ for all of them
    Brier score        Σ_k (q_k − [k = y])² = Σ q² − 2·q_y + 1    in [0, 2]
    ECE                mean over tokens of |accuracy − confidence| of their bin, of the most probable token
    distinct-n         different n-grams over n-grams, in all texts of a prompt      Li et al., arXiv 1510.03055
    self-BLEU          mean BLEU of a text against the others of its prompt          Zhu et al., arXiv 1802.01886
    pass@k             probability that k of the n texts hold a correct one          Chen et al., arXiv 2107.03374
    distinct-correct   number of different answers that are correct

The smoothed NLL is the ε-perplexity of Martins et al. (arXiv 2004.02644, §4.1), (q + ε)/(1 + ε·V), written as a mixture with
the uniform distribution of share λ = ε·V/(1 + ε·V), so that it means the same for every vocabulary. A high self-BLEU means
little diversity. A decoder that writes longer texts pays for more tokens, so `samples_at_equal_cost` says how many of its
texts cost as much as k texts of a reference.

Sums are kept for every document. Intervals treat the tokens of one document as dependent (`tempnet.intervals`).

Shapes: N tokens, V vocabulary, D documents, B bins.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tempnet import intervals
from tempnet.headroom.gains import NamedSums
from tempnet.intervals import Interval, ratio_interval

SMOOTHING = 0.01
"""λ, the share of the uniform distribution in the smoothed NLL."""
SUMS = ("smoothed", "brier", "excluded")
"""Names of the sums over tokens that are kept beside the bins, and beside the NLL of tokens that are not excluded."""
Tokens = Sequence[Hashable]
"""A text as a sequence of tokens or words."""
# What BLEU counts instead of no match at all (Chen and Cherry 2014, method 1).
_NO_MATCH = 0.1


class Scores(NamedTuple):
    """What a rule makes of N tokens, each (N,)."""

    loss: Tensor
    """−log q_y in nats, +inf for an excluded token."""
    smoothed: Tensor
    """Smoothed NLL in nats."""
    brier: Tensor
    """Brier score."""
    excluded: Tensor
    """1 if the rule leaves out the token of the text, else 0."""
    confidence: Tensor
    """Largest q."""
    correct: Tensor
    """1 if the most probable token is that of the text, else 0."""


def score_tokens(log_probabilities: Tensor, targets: Tensor) -> Scores:
    """Score the distributions of N tokens, from log q (N, V) and the tokens of the text (N,)."""
    loss = -log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    right = torch.exp(-loss)
    confidence, predicted = log_probabilities.max(-1)
    return Scores(
        loss=loss,
        smoothed=-((1.0 - SMOOTHING) * right + SMOOTHING / log_probabilities.shape[-1]).log(),
        brier=log_probabilities.exp().square().sum(-1) - 2.0 * right + 1.0,
        excluded=loss.isinf().to(right),
        confidence=confidence.exp().clamp(max=1.0),
        correct=(predicted == targets).to(right),
    )


class LikelihoodSums(NamedSums):
    """Sums of scores over the tokens of every document, for rules that are named."""

    def __init__(self, num_documents: int) -> None:
        super().__init__(num_documents)
        self.sums: dict[str, dict[str, Tensor]] = {}
        """Rule → name of a score → its sum over the tokens of each document: (D,)."""

    def add(self, rule: str, documents: Tensor, scores: Scores) -> None:
        """Add the scores of tokens, whose documents (N,) are given, under the name of a rule."""
        documents = documents.cpu()
        values = {name: getattr(scores, name) for name in SUMS}
        values |= {"loss": scores.loss.where(scores.excluded == 0, 0.0), "count": torch.ones_like(scores.loss)}
        known = self.sums.setdefault(rule, {})
        for name, value in values.items():
            self._sum(known, name, documents, value)
        self._add_bins(rule, documents, scores.confidence.double().cpu(), scores.correct.cpu())

    def mean(self, rule: str, name: str) -> Interval:
        """Return the mean over tokens of a score: one of `SUMS`."""
        return ratio_interval(self.sums[rule][name], self.sums[rule]["count"])

    def loss(self, rule: str) -> Interval:
        """Return the NLL per token; infinite if a token of the text is excluded."""
        if self.sums[rule]["excluded"].sum() > 0:
            return Interval(math.inf, math.nan)
        return ratio_interval(self.sums[rule]["loss"], self.sums[rule]["count"])

    def gain(self, rule: str, over: str, name: str = "smoothed") -> Interval:
        """Return by how much a score of `rule` is below that of `over`, per token and on the same tokens."""
        difference = self.sums[over][name] - self.sums[rule][name]
        return ratio_interval(difference, self.sums[rule]["count"])


def count_ngrams(tokens: Tokens, n: int) -> Counter[tuple[Hashable, ...]]:
    """Return how often every n-gram occurs in a text."""
    return Counter(tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1))


def distinct_n(texts: Sequence[Tokens], n: int) -> float:
    """Return the number of different n-grams of all texts over the number of their n-grams; NaN if there are none."""
    counts: Counter[tuple[Hashable, ...]] = Counter()
    for text in texts:
        counts.update(count_ngrams(text, n))
    return len(counts) / counts.total() if counts else math.nan


def self_bleu(texts: Sequence[Tokens], max_n: int = 4) -> float:
    """Return the mean BLEU of every text against all others; NaN for fewer than two texts.

    BLEU is the brevity penalty times the geometric mean of the clipped 1- to max_n-gram precisions. A precision of 0 is
    replaced by that of a tenth of a match, except that of single tokens, which makes the result 0. The penalty is
    exp(1 − r/c) for c < r, with c the length of the text and r that of the nearest one, the shorter one of two.

    The largest count of an n-gram among the others is the largest of all, or the second largest for a text that has the
    largest itself, so that n-grams are counted once for all pairs of texts.
    """
    if len(texts) < 2:
        return math.nan
    matches: list[list[int]] = [[] for _ in texts]
    for n in range(1, max_n + 1):
        counts = [count_ngrams(text, n) for text in texts]
        largest: dict[tuple[Hashable, ...], tuple[int, int]] = {}
        for own in counts:
            for ngram, number in own.items():
                first, second = largest.get(ngram, (0, 0))
                largest[ngram] = (max(first, number), max(second, min(first, number)))
        for place, own in enumerate(counts):
            others = ((number, largest[ngram]) for ngram, number in own.items())
            matches[place].append(
                sum(min(number, second if number == first else first) for number, (first, second) in others)
            )
    lengths = [len(text) for text in texts]
    scores = [
        _bleu_of_matches(found, lengths[place], [*lengths[:place], *lengths[place + 1 :]]) if lengths[place] else 0.0
        for place, found in enumerate(matches)
    ]
    return sum(scores) / len(scores)


def _bleu_of_matches(matches: Sequence[int], length: int, reference_lengths: Sequence[int]) -> float:
    """Return the BLEU of a text of some length from its clipped matches of single tokens, of pairs, and so on."""
    if not matches[0]:
        return 0.0
    logs = [
        math.log(
            (number or _NO_MATCH) / max(1, length - n)
        )  # a text has length − n + 1 n-grams, and n counts from 0 here
        for n, number in enumerate(matches)
    ]
    nearest = min(reference_lengths, key=lambda size: (abs(size - length), size))
    penalty = min(0.0, 1.0 - nearest / length)
    return math.exp(penalty + sum(logs) / len(matches))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return 1 − C(n − c, k)/C(n, k), the share of the sets of k of n samples that hold one of the c correct ones."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"k = {k} must lie in 1 … {num_samples}, the number of samples")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct = {num_correct} must lie in 0 … {num_samples}, the number of samples")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def distinct_correct(answers: Sequence[Hashable | None], is_correct: Sequence[bool]) -> int:
    """Return the number of different answers that are correct."""
    return len({answer for answer, right in zip(answers, is_correct, strict=True) if right})


def samples_at_equal_cost(k: int, mean_length: float, reference_length: float, num_samples: int) -> int:
    """Return how many samples of `mean_length` tokens cost as much as k of `reference_length`: at least 1, at most all."""
    return max(1, min(num_samples, round(k * reference_length / max(mean_length, 1e-9))))


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean over independent prompts with its 95 % interval, without those whose value is NaN."""
    known = [value for value in values if not math.isnan(value)]
    return intervals.mean_interval(known) if known else Interval(math.nan, math.nan)
